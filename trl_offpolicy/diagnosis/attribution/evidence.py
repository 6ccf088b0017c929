"""The evidence that attribution reads: arrays over tokens, and the settings that both sides declare.

:func:`differences` and :func:`excluded` say which causes the declarations support or rule out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

Level = Literal["logps", "logps+config", "logps+model"]
"""What is observed: log-probs of both sides; also what both sides declare; also other log-probs of the same tokens,
computed under hypotheses with the model at hand."""
OBSERVED: Mapping[Level, str] = {
    "logps": "log-probs alone",
    "logps+config": "log-probs and configuration",
    "logps+model": "log-probs and tests with the model",
}
LEVELS: tuple[Level, ...] = tuple(OBSERVED)

LOW_PRECISION = ("bfloat16", "float16", "bf16", "fp16", "half")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The settings that one side declares; None = not declared.

    Args:
        dtype: data type of its computation, "float32", "bfloat16", ...
        quantization: quantization of its weights, "int8", "fp8", ...; "none" = declared to have none.
        temperature: temperature of the distribution that its log-probs are of.
        top_p: top-p of that distribution; 1 = off.
        top_k: top-k of that distribution; 0 = off.
        min_p: min-p of that distribution; 0 = off.
        adapter: name or hash of the adapter; "none" = declared to have none.
        weight_version: version of the weights that sampled (engine) or scored (trainer).
        prompt_hash: hash of the prompt ids that it saw.
        dropout: largest dropout probability that was active.
        experts: number of experts of a mixture-of-experts model; 0 = dense.
        tools: True if the completions hold text that no policy sampled.
        kv_cache: format of the stored keys and values, or which tokens' are held; "auto" = all, as they are computed.
    """

    dtype: str | None = None
    quantization: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    adapter: str | None = None
    weight_version: int | None = None
    prompt_hash: str | None = None
    dropout: float | None = None
    experts: int | None = None
    tools: bool | None = None
    kv_cache: str | None = None

    @property
    def low_precision(self) -> bool:
        """True if it declares 16-bit arithmetic."""
        return self.dtype in LOW_PRECISION

    @property
    def exact(self) -> bool:
        """True if it declares float32 and no rounding of weights or cache."""
        plain = self.quantization in (None, "none") and self.kv_cache in (None, "auto", "float32")
        return self.dtype == "float32" and plain


Compared = Literal[
    "weights",
    "adapter",
    "model_config",
    "precision",
    "tokenizer",
    "prompts",
    "sampling",
    "logprobs_mode",
    "parallelism",
]
"""What both sides can be asked for and compared, without inference."""


@dataclass(frozen=True)
class Seen:
    """A difference that was looked up on both sides, not inferred from log-probs.

    Args:
        cause: the cause that it proves, a name in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
        what: what was compared, e.g. "RoPE theta" or "layers.3.mlp.up_proj.weight".
        engine: the engine's value, as text.
        trainer: the trainer's value, as text.
    """

    cause: str
    what: str
    engine: str
    trainer: str

    @property
    def text(self) -> str:
        """One sentence with both values."""
        return f"{self.what}: {self.engine} in the engine, {self.trainer} in the trainer"


@dataclass(frozen=True, kw_only=True)
class TokenEvidence:
    """One batch of B completions padded to T tokens, as numpy arrays.

    Args:
        sampling_per_token_logps: (B, T) log mu as the engine reported it, nats.
        old_per_token_logps: (B, T) log pi_old of the trainer, nats.
        completion_mask: (B, T) bool, True = trainable token.
        rescored_per_token_logps: (B, T) the trainer's log-probs of the same text from a second forward in another
            batch layout, for the noise floor; NaN = not scored again.
        entropies: (B, T) entropy of the trainer's distribution, nats.
        token_ids: (B, T) token ids.
        group_ids: (B,) number of the prompt group.
        version_lags: (B, T) weight versions between the policy that sampled a token and the trainer that scored it; -1
            outside the completions.
        turns: (B, T) which turn of the response a token belongs to, from 0; tool output lies between two turns. -1
            outside the trainable tokens.
        engine: what the engine declares; None = nothing.
        trainer: what the trainer declares; None = nothing.
        tested: log-probs (B, T) of the same tokens under hypotheses, by ``cause:detail``; NaN = not scored.
        seen: differences that were looked up on both sides.
        compared: what was looked up on both sides; without a difference in ``seen`` it is equal.

    Raises:
        ValueError: a shape does not fit, or no token is observed.
    """

    sampling_per_token_logps: Floats
    old_per_token_logps: Floats
    completion_mask: Bools
    rescored_per_token_logps: Floats | None = None
    entropies: Floats | None = None
    token_ids: Array | None = None
    group_ids: Array | None = None
    version_lags: Array | None = None
    turns: Array | None = None
    engine: Declared | None = None
    trainer: Declared | None = None
    tested: Mapping[str, Floats] = field(default_factory=dict)
    seen: tuple[Seen, ...] = ()
    compared: frozenset[Compared] = frozenset()

    def __post_init__(self) -> None:
        shape = self.sampling_per_token_logps.shape
        if len(shape) != 2:
            raise ValueError(f"sampling_per_token_logps must have shape (B, T), but got {shape}.")
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        arrays |= {f"tested[{name!r}]": value for name, value in self.tested.items()}
        for name, value in arrays.items():
            wanted = shape[:1] if name == "group_ids" else shape
            if isinstance(value, np.ndarray) and value.shape != wanted:
                raise ValueError(f"{name} must have shape {wanted}, but got {value.shape}.")
        if not self.observed.any():
            raise ValueError("completion_mask must leave a token with finite log-probs on both sides, but got none.")

    @property
    def both_exact(self) -> bool:
        """True if both sides declare float32 and no rounding."""
        return all(side is not None and side.exact for side in (self.engine, self.trainer))

    @property
    def observed(self) -> Bools:
        """(B, T) bool: trainable tokens with finite log-probs on both sides."""
        finite = np.isfinite(self.sampling_per_token_logps) & np.isfinite(self.old_per_token_logps)
        observed: Bools = self.completion_mask.astype(bool) & finite
        return observed

    @property
    def log_ratio(self) -> Floats:
        """(B, T) log(old / mu) of the observed tokens, nats; NaN elsewhere."""
        return np.where(self.observed, self.old_per_token_logps - self.sampling_per_token_logps, np.nan)

    @property
    def level(self) -> Level:
        """The highest level that the evidence reaches: log-probs, with configuration, or with tested hypotheses."""
        if self.tested:
            return "logps+model"
        return "logps" if self.engine is None and self.trainer is None else "logps+config"

    def at_level(self, level: Level) -> TokenEvidence:
        """The same evidence without anything beyond ``level``.

        Raises:
            ValueError: the level is unknown.
        """
        if level not in LEVELS:
            raise ValueError(f"level must be one of {list(LEVELS)}, but got {level!r}.")
        if level == "logps+model":
            return self
        blind: dict[str, Any] = {"engine": None, "trainer": None} if level == "logps" else {}
        return replace(self, tested={}, **blind)


def padded(rows: Any, *, width: int | None = None, fill: float = np.nan) -> Floats:
    """(B, T) float64 array of rows of unequal length, padded with ``fill``.

    Example:
        >>> padded([[1.0], [2.0, 3.0]])
        array([[ 1., nan],
               [ 2.,  3.]])
    """
    width = max((len(row) for row in rows), default=0) if width is None else width
    out = np.full((len(rows), width), fill, np.float64)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return out


# -------------------------------------------------------------------------------------------- what was declared


@dataclass(frozen=True)
class Statement:
    """A cause that the declarations support, and why.

    Args:
        cause: name in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
        text: what was declared.
        certain: True if the two sides differ; False = the cause is only possible (tools are in use, experts exist).
    """

    cause: str
    text: str
    certain: bool = True


def differences(engine: Declared, trainer: Declared) -> dict[str, Statement]:
    """The causes that the declarations of the two sides support, each with its :class:`Statement`.

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
    if (cache := _caches(engine, trainer)) is not None:
        known = [found[cache.cause].text] if cache.cause in found else []
        found[cache.cause] = replace(cache, text="; ".join([*known, cache.text]), certain=cache.certain or bool(known))
    for cause, text in _possible(engine, trainer).items():
        found.setdefault(cause, Statement(cause, text, certain=False))
    return found


def _caches(engine: Declared, trainer: Declared) -> Statement | None:
    """What the KV caches of both sides say; None = nothing.

    One that is not declared is taken for whole. An engine whose cache is not declared may well do what the trainer
    repeats, so that the statement is not certain then.
    """
    ours, theirs = (compression(side) for side in (engine, trainer))
    if ours == theirs:
        return None
    certain = engine.kv_cache is not None
    if EVICTING in f"{ours}{theirs}":
        text = f"the engine's KV cache holds {ours or 'all tokens'}, the trainer's {theirs or 'all tokens'}"
        return Statement("compressed_cache", text, certain)
    texts = [
        f"keys and values stored as {kept} in the {side}"
        for kept, side in ((ours, "engine"), (theirs, "trainer"))
        if kept
    ]
    return Statement("precision", ", ".join(texts), certain)


def compression(side: Declared) -> str | None:
    """What its cache does to keys and values; None = nothing."""
    return None if side.kv_cache in (None, "auto", side.dtype) else side.kv_cache


EVICTING = "tokens"
"""In the description of a KV cache that does not hold those of all tokens (``KVCache.text``)."""
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
    """Causes that the declarations rule out: both sides declare the same for everything that the cause needs."""
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
