"""Tiny models, a tokenizer and a data set, made offline from nothing in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Kind = Literal["llama", "qwen3_moe"]

PAD, EOS, UNKNOWN = 0, 1, 2
WORDS = tuple(f"w{i}" for i in range(125))
VOCABULARY = ("<pad>", "<eos>", "<unk>", *WORDS)
LONG_CONTEXT = 256
"""Positions of a model that answers at length."""
FIRST_WORD = 3
"""Id of ``w0``; word ``wN`` has id ``FIRST_WORD + N``."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
"""vLLM's speculative_config whose drafts are found even in a few tokens."""

_SHAPE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,  # vLLM's CPU attention takes no smaller one than 32
    "max_position_embeddings": 64,
    "initializer_range": 0.25,  # peaked, so that entropies and log-probs differ from token to token
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, ``w0`` to ``w124``; decoding joins them with spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_model(kind: Kind = "llama", *, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """A float32 model of 74k parameters (the mixture of experts: 99k) with seeded weights; ``shape`` changes it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **shape}))
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_SHAPE, **shape}, **experts))


def save_tiny_model(folder: Path, kind: Kind = "llama", **shape: int) -> Path:
    """Save model and tokenizer; returns ``folder``."""
    tiny_model(kind, **shape).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_prompts(count: int = 32) -> Dataset:
    """Plain-text prompts of one to four words, all different."""
    return Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 1 + i % 4]) for i in range(count)]})


def score_last_word(completions: list[str], **_: object) -> list[float]:
    """A reward that the text alone determines: the number of the last word, or -1 for an empty text."""
    return [float(text.split()[-1].removeprefix("w")) / 100 if text.split() else -1.0 for text in completions]


def spread(completions: list[str], **_: object) -> list[float]:
    """A reward that differs within every group, so that every step has a gradient."""
    return [float(sum(map(ord, text)) % 7) for text in completions]
