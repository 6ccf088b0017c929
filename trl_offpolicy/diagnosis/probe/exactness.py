"""Whether an exact engine is exact: the distance to the trainer against the noise floor, and what keeps it above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trl_offpolicy.diagnosis.attribution.evidence import Compared, Floats
from trl_offpolicy.diagnosis.attribution.features import kl_k3
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.probe.asked import Asked
from trl_offpolicy.diagnosis.thresholds import SAME_POLICY_KL

ABOVE = 2.0
"""A distance up to this multiple of the noise floor counts as none, as everywhere in the diagnosis."""
_TOPICS: tuple[Compared, ...] = ("weights", "adapter", "prompts", "sampling", "logprobs_mode", "model_config",
                                 "precision", "parallelism")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """What the first generation of an exact run shows.

    Args:
        kl_k3: KL(engine || trainer), nats per token.
        floor: that of the trainer against itself in other batches, at least
            :data:`~trl_offpolicy.diagnosis.thresholds.SAME_POLICY_KL`.
        largest: largest |log-ratio|, nats.
        tokens: number of tokens.
        applied: what ``exact`` has set, in words.
        keeps: what keeps engine and trainer apart: differences that were looked up, then what cannot be had here.
    """

    kl_k3: float
    floor: float
    largest: float
    tokens: int
    applied: str
    keeps: tuple[str, ...] = ()

    @property
    def at_floor(self) -> bool:
        """True if the distance is within twice the noise floor."""
        return self.kl_k3 <= ABOVE * self.floor

    @property
    def text(self) -> str:
        """The verdict in one or two sentences."""
        size = (
            f"KL k3 {format_number(self.kl_k3)} nats per token over {self.tokens} tokens (largest |d| "
            f"{format_number(self.largest)}), noise floor {format_number(self.floor)}"
        )
        if self.at_floor:
            return f"engine and trainer are the same policy: {size}."
        why = "; ".join(self.keeps) or "nothing that engine and trainer say of themselves: run trl-offpolicy probe"
        times = format_number(self.kl_k3 / self.floor)
        return f"engine and trainer differ: {size}; the KL is {times} times that. What keeps it: {why}."


def judge_exactness(
    sampling: Floats,
    old: Floats,
    again: Floats | None,
    *,
    applied: str,
    rows: Sequence[Asked] = (),
    missing: Sequence[str] = (),
) -> Exactness:
    """Compare the log-probs of a generation.

    Args:
        sampling: (B, T) the engine's, nats; NaN outside the completions.
        old: (B, T) the trainer's.
        again: (B, T) the trainer's from other batches; NaN = not scored again. None = the floor is not measured.
        applied: see :class:`Exactness`.
        rows: what both sides were asked.
        missing: what cannot be had here.
    """
    d = old - sampling
    repeated = float("nan") if again is None else kl_k3(again - np.where(np.isfinite(sampling), old, np.nan))
    different = [one for one in rows if one.outcome == "different" and one.topic in _TOPICS]
    seen = [f"{one.what}: {one.engine} in the engine, {one.trainer} in the trainer" for one in different]
    finite = d[np.isfinite(d)]
    return Exactness(
        kl_k3=kl_k3(d),
        floor=max(SAME_POLICY_KL, repeated if np.isfinite(repeated) else 0.0),
        largest=float(np.abs(finite).max()) if finite.size else float("nan"),
        tokens=int(finite.size),
        applied=applied,
        keeps=(*seen, *missing),
    )
