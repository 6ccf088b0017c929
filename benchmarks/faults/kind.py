"""A kind of fault, and the wall between those that are tuned on and those that are reported.

Kinds, not seeds, are split. A kind of the tune side may be looked at while the attribution changes; a kind of the
report side may not, and its numbers are read once, at the end. A hash of the name decides (:func:`split_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from engine_faults import Inject
from time_faults import RunFault

Split = Literal["tune", "report"]
SALT = 0
"""The smallest number for which each family has a kind on both sides and neither side has more than 55 % of the kinds.
It was chosen from the names, before any case existed. A new kind does not move the others."""
CLEAN = "clean"
ALL = ("smollm2", "qwen", "moe")
DENSE = ("smollm2", "qwen")
SMALL = ("qwen", "moe")

OLDER = ("other_weights", "policy_staleness")
"""Answers that lead to the same fix as stale weights: sync, and look whether they arrived."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        name: unique; the split hangs on it.
        family: faults of the same part of the system.
        right: causes of ``trl_offpolicy.diagnosis.causes`` that count as right; "unknown" if no cause stands for it.
        inject: makes the batch.
        sane: causes that count as sane: their fix is the same, or would lead there at once.
        models: worlds that have it.
        hidden: the log-probs agree, because the engine does not report what it sampled from.
        run: in place of ``inject``: a fault over time, which gives a recorded run.
    """

    name: str
    family: str
    right: tuple[str, ...]
    inject: Inject | None = None
    sane: tuple[str, ...] = ()
    models: tuple[str, ...] = ALL
    hidden: bool = False
    run: RunFault | None = None

    @property
    def split(self) -> Split:
        return split_of(self.name)


def split_of(name: str, salt: int = SALT) -> Split:
    """The side of a kind, by the first bit of a hash of its name.

    Example:
        >>> split_of("rope_theta") == split_of("rope_theta")
        True
    """
    return "tune" if sha256(f"{salt}:{name}".encode()).digest()[0] < 128 else "report"
