"""Sampling options that cut the distribution; the trainer mirrors them. The others are in ``sampling_states``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trl_offpolicy.engines.environment import engine_has_triton
from trl_offpolicy.functional.truncated_sampling import Truncation

_OFF: dict[str, tuple[float | int | None, ...]] = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None)}


def truncation_of(options: Mapping[str, Any]) -> Truncation:
    """How the engine cuts its distribution, and how the trainer therefore has to cut its own.

    Args:
        options: TRL's ``top_p``, ``top_k``, ``min_p`` and ``generation_kwargs``, whose entries win, as in TRL.

    Raises:
        ValueError: a value is outside its range.

    Example:
        >>> truncation_of({"top_p": 0.9, "top_k": -1, "generation_kwargs": {"min_p": 0.05}})
        Truncation(top_p=0.9, top_k=0, min_p=0.05, exact_top_k=False)
    """
    extra = dict(options.get("generation_kwargs") or {})
    chosen: dict[str, Any] = {name: extra.get(name, options.get(name)) for name in _OFF}
    return Truncation(**{name: value for name, value in chosen.items() if value not in _OFF[name]})


def as_vllm_keeps(truncation: Truncation) -> Truncation:
    """The truncation with the rule that vLLM follows on this machine for tokens tied with the k-th."""
    return replace(truncation, exact_top_k=True) if truncation.top_k and engine_has_triton() else truncation
