"""Bias and variance together: what total variation and chi-square ask for (the SGA view of off-policy training).

Total variation bounds the bias of weights by token, chi-square the variance of exact weights. Source: Li, Liu et al.
2025, "When Speed Kills Stability", as Liu 2026, "Off-Policy Drift in LLM RL", puts it. It gives no numbers: the limits
are ``tv_moderate``, ``chi2_high`` and, for whole sequences, ``chi2_sequence_high`` of the thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.tree import INTERVAL, Readings

Remedy = Literal["nothing", "token", "sequence", "repair"]
TEXTS: dict[Remedy, str] = {
    "nothing": "Both are below their limits, so they would not ask for a correction.",
    "token": "The bias is moderate and the variance small: token weights, or rejection by the geometric mean.",
    "sequence": "The bias is small but weights of whole responses explode: truncate or mask by response.",
    "repair": "Both are high: no correction alone is enough. First make engine and trainer agree, or sync more often.",
}


@dataclass(frozen=True)
class Cell:
    """One of the four cells.

    Args:
        remedy: what it asks for.
        tv: total variation between sampler and trainer.
        chi2: token chi-square.
        chi2_sequence: chi-square of whole sequences; None if it was not logged.
    """

    remedy: Remedy
    tv: float
    chi2: float
    chi2_sequence: float | None

    @property
    def text(self) -> str:
        """What to do, in words."""
        return TEXTS[self.remedy]


def sga_cell(readings: Readings, thresholds: Thresholds) -> Cell | None:
    """The cell of a run: of current/sampling if it was logged, else of old/sampling; None without both numbers.

    A number is high if it is above its limit by more than its 95 % interval.

    Example:
        >>> sga_cell({"mismatch/tv": 0.01, "mismatch/chi2_token": 0.02}, Thresholds()).remedy
        'nothing'
    """
    group = "total" if "total/tv" in readings else "mismatch"
    tv, chi2 = readings.get(f"{group}/tv"), readings.get(f"{group}/chi2_token")
    if tv is None or chi2 is None:
        return None

    def above(metric: str, limit: float) -> bool:
        value = readings.get(f"{group}/{metric}", 0.0)
        return value - readings.get(f"{group}/{metric}{INTERVAL}", 0.0) > limit

    biased, noisy = above("tv", thresholds.tv_moderate), above("chi2_token", thresholds.chi2_high)
    by_sequence = above("chi2_sequence", thresholds.chi2_sequence_high)
    remedy: Remedy = "nothing"
    if biased:
        remedy = "repair" if noisy else "token"
    elif noisy or by_sequence:
        remedy = "sequence"
    return Cell(remedy, tv, chi2, readings.get(f"{group}/chi2_sequence"))
