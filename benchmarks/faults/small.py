"""The suite's small dense model: Qwen3-like (q and k norms, GQA, untied head, BOS), trained here on procedural text.

A random model is flat: no token matters. A few hundred steps on questions that are repeated and answered make this
one as sure of most tokens as a real model is, so that its log-probs react to faults as real ones do.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from tasks import KINDS, SYSTEM

SEED = 20
STEPS, ROWS, VOCABULARY = 400, 12, 1024
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_dense(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer; trained on the first call, read from ``folder`` afterwards."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    if not (folder / "config.json").exists():
        start = time.monotonic()
        texts = training_texts()
        tokenizer = make_tokenizer(texts)
        model = train(tokenizer, texts)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        print(f"trained the small model in {time.monotonic() - start:.0f} s")
    return Qwen3ForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def training_texts() -> list[tuple[str, str]]:
    """Questions, and responses that repeat and answer them."""
    items = [item for kind in KINDS for item in reasoning_gym.create_dataset(kind, size=400, seed=SEED)]
    return [(item["question"], f"The question is: {item['question']} My answer: {item['answer']}.") for item in items]


def make_tokenizer(texts: list[tuple[str, str]]) -> Any:
    """Byte-level BPE of the texts, with Qwen's chat template and a BOS token in front of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator((text for pair in texts for text in (*pair, SYSTEM, "system user assistant")), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE
    return made


def train(tokenizer: Any, texts: list[tuple[str, str]]) -> Any:
    """A few hundred AdamW steps on the responses."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rope_parameters={"rope_theta": 10000.0},
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    generator = torch.Generator().manual_seed(SEED)
    for step in range(STEPS):
        chosen = torch.randint(len(texts), (ROWS,), generator=generator).tolist()
        ids, labels = _batch(tokenizer, [texts[n] for n in chosen])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"small model, step {step}: loss {loss.item():.2f}", flush=True)
    return model.eval()


def _batch(tokenizer: Any, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, right-padded; every token of the conversation is learned."""
    rows = []
    for question, response in pairs:
        messages = [{"role": role, "content": text}
                    for role, text in (("system", SYSTEM), ("user", question), ("assistant", response))]  # fmt: skip
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"][:160])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    return ids, labels
