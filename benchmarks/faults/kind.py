"""A kind of fault, and the wall between those that are tuned on and those that are reported.

Kinds, not seeds, are split. A kind of the tune side may be looked at while the attribution changes; a kind of the
report side may not, and its numbers are read once, at the end. The list in ``wall.py`` decides (:func:`split_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine_faults import Inject
from time_faults import RunFault
from wall import SEEN

Split = Literal["tune", "report"]
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
        name: unique; the side hangs on it.
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


def split_of(name: str) -> Split:
    """The side of a kind: "tune" if its answers have been looked at, "report" if they have not.

    Example:
        >>> split_of("rope_theta"), split_of("a kind that nobody has scored")
        ('tune', 'report')
    """
    return "tune" if name in SEEN else "report"
