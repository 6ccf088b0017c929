"""The tokenizer or processor of a module, with its templates, and the ids that end a completion."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_module.models import reads_images
from trl_offpolicy.rollouts.agents import chat_tokenizer


class Prompts:
    """A tokenizer with the ids that end a completion.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        ends: token ids that end a completion.
        processor: what reads messages with images; None = the model reads text.

    Raises:
        ValueError: the tokenizer has neither a padding nor an end token.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], processor: Any = None) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad is None:
            raise ValueError("tokenizer must have a pad_token or an eos_token, but has neither.")
        self.pad: int = pad
        self.ends = tuple(dict.fromkeys(ends))

    @classmethod
    def of(cls, settings: Mapping[str, Any], policy: Any) -> Prompts:
        """The ``tokenizer`` of a module's settings or, if it is None, that of ``model``, with the templates given.

        For a vision-language model it is a processor, which holds a tokenizer.

        Args:
            settings: the module's arguments.
            policy: the model, whose generation config may name further end tokens.
        """
        model, tokenizer = settings["model"], settings["tokenizer"]
        if tokenizer is None or isinstance(tokenizer, str):
            from transformers import AutoProcessor, AutoTokenizer

            name = tokenizer or (model if isinstance(model, str) else model.config._name_or_path)
            loader: Any = AutoProcessor if reads_images(policy.config) else AutoTokenizer
            # Of the revision of the weights, unless it is another repository's.
            options = {} if tokenizer not in (None, model) else settings["model_options"] or {}
            named = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
            tokenizer = loader.from_pretrained(name, **named)
        tokenizer, processor = _parts(tokenizer)
        tokenizer = chat_tokenizer(tokenizer, settings["chat_template"], settings["response_template"])
        if processor is not None and settings["chat_template"] is not None:
            processor = copy.copy(processor)
            processor.chat_template = tokenizer.chat_template
        stops = getattr(getattr(policy, "generation_config", None), "eos_token_id", None)
        ends = [stops] if isinstance(stops, int) else list(stops or [])
        ends += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return cls(tokenizer, ends, processor)

    def save(self, folder: Path) -> None:
        """Write the tokenizer, or the processor with it, as ``save_pretrained`` does."""
        (self.processor or self.tokenizer).save_pretrained(folder)


def _parts(given: Any) -> tuple[Any, Any]:
    """A tokenizer and None, or the tokenizer in a processor and that."""
    from transformers import ProcessorMixin

    return (given.tokenizer, given) if isinstance(given, ProcessorMixin) else (given, None)
