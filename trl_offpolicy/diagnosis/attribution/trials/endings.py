"""Ends of a prompt that chat templates write with or without thoughts, and that one side may lack."""

from __future__ import annotations

from typing import Any

from trl_offpolicy.engines.hf import Ids

ENDS = {
    "an empty block of thoughts": "<think>\n\n</think>\n\n",
    "the beginning of thoughts": "<think>\n",
}
"""What Qwen3 writes behind a prompt without thoughts (``enable_thinking=False``), and reasoning models with them."""


def other_ends(tokenizer: Any, prompts: Ids) -> dict[str, Ids]:
    """The prompts with another end, by name; those that have an end lose it. Empty without a chat template.

    Args:
        tokenizer: the model's tokenizer.
        prompts: token ids of the prompts.
    """
    if not getattr(tokenizer, "chat_template", None):
        return {}
    found: dict[str, Ids] = {}
    for name, text in ENDS.items():
        end = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        has = [0 < len(end) < len(ids) and list(ids[-len(end) :]) == end for ids in prompts]
        if any(has):
            found[f"{name} missing at the end"] = [
                list(ids[: -len(end)]) if it else list(ids) for ids, it in zip(prompts, has, strict=True)
            ]
        if end and not all(has):
            found[f"{name} at the end"] = [
                list(ids) if it else [*ids, *end] for ids, it in zip(prompts, has, strict=True)
            ]
    return found
