"""What the two sides' own statements make possible, likely or impossible."""

from __future__ import annotations

from dataclasses import dataclass

from trl_offpolicy.diagnosis.attribution.evidence import Declared

LOW_PRECISION = ("bfloat16", "float16", "bf16", "fp16", "half")


@dataclass(frozen=True)
class Statement:
    """A cause that the statements speak for, and why.

    Args:
        cause: name in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
        text: what was declared.
        certain: the two sides differ; False = only possible (tools are in use, experts exist).
    """

    cause: str
    text: str
    certain: bool = True


def differences(engine: Declared, trainer: Declared) -> dict[str, Statement]:
    """Statements by cause.

    Example:
        >>> differences(Declared(temperature=0.9), Declared(temperature=1.0))["temperature"].text
        'temperature 0.9 in the engine, 1.0 in the trainer'
    """
    found: dict[str, Statement] = {}
    for cause, names in _COMPARED.items():
        texts = [
            f"{name} {getattr(engine, name)} in the engine, {getattr(trainer, name)} in the trainer"
            for name in names
            if None not in (getattr(engine, name), getattr(trainer, name))
            and getattr(engine, name) != getattr(trainer, name)
        ]
        if texts:
            found[cause] = Statement(cause, "; ".join(texts))
    if engine.kv_cache not in (None, "auto", engine.dtype):
        text = f"keys and values stored as {engine.kv_cache} in the engine"
        known = [found["precision"].text] if "precision" in found else []
        found["precision"] = Statement("precision", "; ".join([*known, text]))
    for cause, text in _possible(engine, trainer).items():
        found.setdefault(cause, Statement(cause, text, certain=False))
    return found


_COMPARED = {
    "temperature": ("temperature",),
    "truncated_sampling": ("top_p", "top_k", "min_p"),
    "wrong_adapter": ("adapter",),
    "policy_staleness": ("weight_version",),
    "precision": ("dtype", "quantization"),
    "prompt_difference": ("prompt_hash",),
}


def _possible(engine: Declared, trainer: Declared) -> dict[str, str]:
    texts = {}
    if trainer.dropout:
        texts["dropout"] = f"dropout {trainer.dropout:g} is configured in the trainer"
    if engine.experts or trainer.experts:
        texts["routing"] = "the model is a mixture of experts"
    if engine.tools or trainer.tools:
        texts["tool_tokens"] = "completions hold tool output"
    if any(side.dtype in LOW_PRECISION for side in (engine, trainer)):
        texts["precision"] = "16-bit arithmetic"
    return texts


def excluded(engine: Declared, trainer: Declared) -> frozenset[str]:
    """Causes that the statements rule out: both sides say the same of everything that the cause would need."""
    stated = differences(engine, trainer)
    out = set()
    for cause, names in _COMPARED.items():
        known = all(None not in (getattr(engine, name), getattr(trainer, name)) for name in names)
        if known and cause not in stated:
            out.add(cause)
    for cause, value in (("dropout", trainer.dropout), ("tool_tokens", engine.tools or trainer.tools)):
        silent = trainer.dropout is None if cause == "dropout" else (engine.tools is None and trainer.tools is None)
        if not silent and not value:
            out.add(cause)
    if engine.experts == 0 or trainer.experts == 0:
        out.add("routing")
    return frozenset(out)
