"""The option ``--tokenizer`` of the commands that show text."""

from __future__ import annotations

from collections.abc import Callable


def load_decode(name: str | None) -> Callable[[list[int]], str] | None:
    """What turns token ids into text, from the name or folder of a tokenizer; None without one."""
    if name is None:
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    return lambda ids: str(tokenizer.decode(ids))
