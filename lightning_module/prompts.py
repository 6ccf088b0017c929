"""Turns prompts into token ids, and completions back into text or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trl_offpolicy.rollouts.batches import check_prompts


class Prompts:
    """A tokenizer with the ids that end a completion.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        ends: token ids that end a completion.

    Raises:
        ValueError: the tokenizer has neither a padding nor an end token.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad is None:
            raise ValueError("tokenizer must have a pad_token or an eos_token, but has neither.")
        self.pad: int = pad
        self.ends = tuple(dict.fromkeys(ends))

    @classmethod
    def of(cls, model: Any, tokenizer: Any, policy: Any) -> Prompts:
        """Use ``tokenizer`` or, if it is None, that of ``model`` (a name, or a model that knows its name)."""
        if tokenizer is None or isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            name = tokenizer or (model if isinstance(model, str) else model.config._name_or_path)
            tokenizer = AutoTokenizer.from_pretrained(name)
        named = getattr(getattr(policy, "generation_config", None), "eos_token_id", None)
        ends = [named] if isinstance(named, int) else list(named or [])
        return cls(tokenizer, [*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of prompts. A text is tokenized as it is, messages go through the chat template.

        Raises:
            ValueError: a prompt has no token.
        """
        if isinstance(prompts[0], str):
            found = self.tokenizer(text=list(prompts))
        else:
            found = self.tokenizer.apply_chat_template(
                conversation=list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        ids: list[list[int]] = found["input_ids"]
        check_prompts(ids, prompts)
        return ids

    def decode(self, completion_ids: Sequence[Sequence[int]], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Completions as reward functions take them: a text, or a list of one message if the prompt is messages."""
        texts = self.tokenizer.batch_decode([list(ids) for ids in completion_ids], skip_special_tokens=True)
        pairs = zip(texts, rows, strict=True)
        return [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}] for text, row in pairs
        ]
