"""Tiny vision-language models (Qwen2-VL, LLaVA), their processors, and rows with images, made offline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from tiny_models import EOS, PAD, WORDS, tiny_tokenizer
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trl_offpolicy.engines.images import model_inputs
from trl_offpolicy.rollouts.images import encode

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE = 4, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endfor %}"
)
SIZES = ((8, 8), (24, 8), (8, 8), (16, 16))
"""Width and height of the images of four prompts: 1, 3, 1 and 4 tokens."""


class TinyProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """Qwen2-VL's processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = MARKS[2:]
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def tiny_processor() -> TinyProcessor:
    """One token a word, and one for each 8 x 8 pixels of an image."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    size = {"shortest_edge": 64, "longest_edge": 1024}
    pictures = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=size)
    return TinyProcessor(pictures, tokenizer, chat_template=CHAT_TEMPLATE)


def tiny_vlm(seed: int = 0) -> Qwen2VLForConditionalGeneration:
    """A float32 model with seeded weights, whose answers depend on the image."""
    processor = tiny_processor()
    start, end, image, video = processor.tokenizer.convert_tokens_to_ids(list(MARKS))
    text = {
        "vocab_size": len(processor.tokenizer), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.25,
        "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "patch_size": PATCH, "mlp_ratio": 1}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    return _seeded(Qwen2VLForConditionalGeneration, config, seed)


def _seeded(kind: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "language_model" not in name and "lm_head" not in name:
                torch.nn.init.normal_(parameter, std=0.25)  # else all images look alike
    return model


def save_tiny_llava(folder: Path) -> Path:
    """Save a LLaVA (4 tokens an image of any size) and its processor, which loads without torchvision."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128, initializer_range=0.25,
        tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, image_size=16, patch_size=8
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=image, image_seq_length=4, eos_token_id=EOS,
        pad_token_id=PAD,
    )  # fmt: skip
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    processor = LlavaProcessor(
        pictures, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1,
    )  # fmt: skip
    _seeded(LlavaForConditionalGeneration, config, 0).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(number: int, size: tuple[int, int]) -> Image.Image:
    """Random pixels, drawn from ``number``."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_rows(count: int = 8, *, column: str = "image") -> Dataset:
    """Prompts of one to three words with an image each, of different sizes, in the column ``image`` or ``images``."""
    rows = []
    for i in range(count):
        seen = picture(i, SIZES[i % len(SIZES)])
        prompt = [{"role": "user", "content": " ".join(WORDS[i : i + 1 + i % 3])}]
        rows.append({"prompt": prompt, column: [seen] if column == "images" else seen})
    return Dataset.from_list(rows)


def last_word(completions: list[Any], **_: object) -> list[float]:
    """The number of the last word of the reply, or -1 for an empty one."""
    texts = [reply[0]["content"] for reply in completions]
    return [float(text.split()[-1].removeprefix("w")) / 100 if text.split() else -1.0 for text in texts]


def encoded(processor: Any, prompts: list[Any]) -> tuple[list[list[int]], list[Any]]:
    """Ids and images of messages that hold their images."""
    return encode(processor, prompts, {})


def kept_by_generate(
    logits: list[float], *, temperature: float, top_p: float, top_k: int, min_p: float, never: int
) -> dict[int, float]:
    """Log-prob of each token that transformers' ``generate`` keeps, in its order: top-k, top-p, min-p; by loops."""
    scaled = {token: value / temperature for token, value in enumerate(logits) if token != never}
    kept = sorted(scaled, key=lambda token: -scaled[token])[:top_k]

    def probabilities() -> list[float]:
        weights = [math.exp(scaled[token] - scaled[kept[0]]) for token in kept]
        return [weight / sum(weights) for weight in weights]

    found = probabilities()
    above = [sum(found[:place]) for place in range(len(kept))]  # the mass of more likely tokens
    kept = [token for token, mass in zip(kept, above, strict=True) if mass < top_p]
    found = probabilities()
    kept = [token for token, p in zip(kept, found, strict=True) if p >= min_p * found[0]]
    return {token: math.log(p) for token, p in zip(kept, probabilities(), strict=True)}


@torch.no_grad()
def seen_logits(model: Any, prompt: list[int], completion: list[int], inputs: Any) -> torch.Tensor:
    """(T, V) logits that predict one completion, by the model itself, without padding."""
    seen = model_inputs([inputs], width=len(prompt), length=len(completion))
    found: torch.Tensor = model(input_ids=torch.tensor([prompt + completion]), **seen).logits[0, len(prompt) - 1 : -1]
    return found.float()


def seen_logps(model: Any, prompt: list[int], completion: list[int], inputs: Any) -> torch.Tensor:
    """(T,) log-probs of one completion by the model itself, without padding."""
    logits = seen_logits(model, prompt, completion, inputs)
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
