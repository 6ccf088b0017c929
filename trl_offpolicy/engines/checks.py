"""Sampling options that the trainer mirrors, and those under which its log-probs and the engine's do not compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_offpolicy.functional.truncated_sampling import Truncation

_OFF: dict[str, tuple[float | int | None, ...]] = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None)}
_NEUTRAL: dict[str, tuple[float | int | None, ...]] = {
    "repetition_penalty": (1.0, None),
    "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None),
}
_FORBIDDEN = {
    "logprobs": "the first entry would be the most likely token, not the sampled one",
    "n": "one completion a prompt is expected",
    "temperature": "the trainer would divide by another temperature; set the config's own field",
}


def truncation_of(options: Mapping[str, Any]) -> Truncation:
    """What the engine cuts of its distribution, and the trainer therefore of its own.

    Args:
        options: TRL's ``top_p``, ``top_k``, ``min_p`` and ``generation_kwargs``, whose entries win, as in TRL.

    Raises:
        ValueError: a value outside of its range.

    Example:
        >>> truncation_of({"top_p": 0.9, "top_k": -1, "generation_kwargs": {"min_p": 0.05}})
        Truncation(top_p=0.9, top_k=0, min_p=0.05)
    """
    extra = dict(options.get("generation_kwargs") or {})
    chosen: dict[str, Any] = {name: extra.get(name, options.get(name)) for name in _OFF}
    return Truncation(**{name: value for name, value in chosen.items() if value not in _OFF[name]})


def sampling_faults(options: Mapping[str, Any], *, device_type: str) -> list[str]:
    """Why the engine's log-probs would be biased under these sampling options; empty = they are comparable.

    top_p, top_k and min_p are mirrored (:func:`truncation_of`).

    Args:
        options: TRL's ``repetition_penalty`` and ``generation_kwargs``; others are not looked at.
        device_type: "cpu" or an accelerator.
    """
    extra = dict(options.get("generation_kwargs") or {})
    faults = []
    for name, neutral in _NEUTRAL.items():
        value = extra.get(name, options.get(name, neutral[0]))
        if value not in neutral:
            faults.append(
                f"{name}={value}: the engine changes the distribution by what was generated before, which the trainer "
                f"does not mirror, so old/sampling is biased (its mean is not 1); set it to {neutral[0]}"
            )
    faults += [f"generation_kwargs.{name}: {why}" for name, why in _FORBIDDEN.items() if name in extra]
    if "seed" in extra and device_type == "cpu":
        faults.append("generation_kwargs.seed: a seed per request stops vLLM's CPU engine; set engine.seed")
    return faults


def require_comparable(options: Mapping[str, Any], *, device_type: str) -> None:
    """Raise if the log-probs would be biased.

    Raises:
        ValueError: naming each option and the reason.
    """
    if faults := sampling_faults(options, device_type=device_type):
        raise ValueError("sampling options must leave the engine's log-probs comparable, but got " + "; ".join(faults))
