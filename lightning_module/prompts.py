"""The tokenizer of a module, with its templates, and the ids that end a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trl_offpolicy.rollouts.agents import chat_tokenizer


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
    def of(cls, settings: Mapping[str, Any], policy: Any) -> Prompts:
        """The ``tokenizer`` of a module's settings or, if it is None, that of ``model``, with the templates given.

        Args:
            settings: the module's arguments.
            policy: the model, whose generation config may name further end tokens.
        """
        model, tokenizer = settings["model"], settings["tokenizer"]
        if tokenizer is None or isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            name = tokenizer or (model if isinstance(model, str) else model.config._name_or_path)
            tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer = chat_tokenizer(tokenizer, settings["chat_template"], settings["response_template"])
        named = getattr(getattr(policy, "generation_config", None), "eos_token_id", None)
        ends = [named] if isinstance(named, int) else list(named or [])
        return cls(tokenizer, [*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])
