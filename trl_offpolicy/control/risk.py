"""Collapse risk: one number in [0, 1], made of five parts that are reported too. It is not a fitted model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trl_offpolicy.control.ess import recent_ess, variances
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.judge import LENGTHS
from trl_offpolicy.run_folder.run_data import MetricsLog
from trl_offpolicy.stats import PREFIX

RECENT = 5
"""Logged rows whose median is "now"."""
BASELINE = 50
"""Logged rows before the recent ones, which serve as the baseline."""
ENOUGH = 10
"""Fewest rows of a baseline; with fewer, nothing is compared with it."""
PARTS = ("chi2", "ess", "clip", "length", "gradient")


@dataclass(frozen=True)
class Risk:
    """The score, and its parts by name. A part whose metrics were not logged is 0.

    Args:
        score: 1 - product over the parts of (1 - part): one alarm is enough, several add up.
        parts: each in [0, 1].
    """

    score: float
    parts: Mapping[str, float]


def collapse_risk(log: MetricsLog, thresholds: Thresholds | None = None) -> Risk:
    """How likely a run is to collapse soon, judged by the last rows of its log.

    "Now" is the median of the last 5 rows. A part is 0 up to a first number, 1 from a second on, and linear in the
    logarithm between them:

    - chi2: 95th percentile of the responses' chi-square, of the drift that no weight corrects (``staleness`` if
      weights are applied, else ``total``, else ``mismatch``), from ``chi2_moderate`` to ``chi2_reject``;
    - ess: 1 / ESS of the products over 16 tokens, in the log domain (:func:`~trl_offpolicy.control.ess.piece_ess`), of
      the same drift, from 1 / ``ess_healthy`` to 1 / ``ess_broken`` squared;
    - clip: share of clipped units, from ``clip_high`` to three times that;
    - length: the mean response length over that of ``length_window`` steps ago (in a shorter run: of its start), up or
      down, from ``length_surge`` to its square; or, from a change by 5 % on, its distance from the median of the 50
      rows before in robust standard deviations (1.48 median absolute deviations), from 6 to 20;
    - gradient: its norm over the median of the 50 rows before, from 3 to 10.

    Args:
        log: the rows so far, the newest last. About 60 are read, and the lengths of ``length_window`` steps.
        thresholds: limits of the diagnosis; None = the defaults.

    Reference: the features are those of Liu 2026, "Off-Policy Drift in LLM RL", problem 2, and the gradient norm. The
    ramps are this kit's. They were chosen on the runs of ``benchmarks/collapse``.
    """
    limits = thresholds or Thresholds()
    parts = {
        "chi2": _chi2(log, limits),
        "ess": _ess(log, limits),
        "clip": _clip(log, limits),
        "length": _length(log, limits),
        "gradient": _gradient(log),
    }
    # as if each part were the probability of an independent cause of collapse
    return Risk(1.0 - math.prod(1.0 - part for part in parts.values()), parts)


def ramp(value: float, low: float, high: float) -> float:
    """0 up to ``low``, 1 from ``high`` on, linear in the logarithm between.

    Example:
        >>> [round(ramp(value, 1.0, 100.0), 2) for value in (0.0, 1.0, 10.0, 1000.0)]
        [0.0, 0.0, 0.5, 1.0]
    """
    if value <= low:
        return 0.0
    return 1.0 if value >= high else math.log(value / low) / math.log(high / low)


def _now(values: Sequence[float]) -> float | None:
    """The median of the last rows; None with fewer than three, because one odd batch would then decide."""
    return median(values[-RECENT:]) if len(values) >= 3 else None


def _uncorrected(log: MetricsLog, quantity: str) -> str:
    """The ratio group of the drift that no weight corrects."""
    # applied weights cancel the drift from the sampler to old; the drift from old to current is left
    if log.has(f"{PREFIX}weight_applied/ess_sequence"):
        return "staleness"
    return "total" if log.has(f"{PREFIX}total/{quantity}") else "mismatch"


def _chi2(log: MetricsLog, limits: Thresholds) -> float:
    now = _now(log.series(f"{PREFIX}{_uncorrected(log, 'chi2_token')}/chi2_token_p95").values)
    return 0.0 if now is None else ramp(now, limits.chi2_moderate, limits.chi2_reject)


def _ess(log: MetricsLog, limits: Thresholds) -> float:
    found = variances(log, _uncorrected(log, "ess_sequence"))
    share = recent_ess(found, max(found, default=0))
    # whole only far below the limit, so that the alarm does not hang on one threshold
    return 0.0 if share is None else ramp(1 / max(share, 1e-12), 1 / limits.ess_healthy, 1 / limits.ess_broken**2)


def _clip(log: MetricsLog, limits: Thresholds) -> float:
    key = log.first_logged([f"{PREFIX}loss/clip_region_fraction", "clip_ratio/region_mean"])
    now = None if key is None else _now(log.series(key).values)
    return 0.0 if now is None else ramp(now, limits.clip_high, 3 * limits.clip_high)


def _length(log: MetricsLog, limits: Thresholds) -> float:
    """The larger of two alarms: a slow drift over ``length_window`` steps, and a jump out of the recent scatter."""
    key = log.first_logged(LENGTHS)
    steps, values, _ = log.series(key) if key else ([], [], 0)
    if len(values) < 2 * RECENT:
        return 0.0
    # slow: compare the last rows with as many from length_window steps ago (in a shorter run, from its start), and
    # never with rows that count as the last ones
    start = steps[-1] - limits.length_window
    first = min(next(place for place, at in enumerate(steps) if at >= start), len(values) - 2 * RECENT)
    change = _either_way(median(values[-RECENT:]), median(values[first : first + RECENT]))
    slow = ramp(change, limits.length_surge, limits.length_surge**2)
    # sudden: how far the last rows lie outside the scatter of the rows before
    recent, before = _recent_and_before(values)
    if len(before) < ENOUGH:
        return slow
    now, base = median(recent), median(before)
    if _either_way(now, base) < 1.05:  # if lengths hardly scatter, a tiny change is many deviations
        return slow
    # For normal scatter, 1.48 median absolute deviations are one standard deviation. Lengths that do not scatter get
    # a thousandth of their size, to avoid a division by zero.
    spread = max(1.4826 * median([abs(value - base) for value in before]), 1e-3 * abs(base))
    return max(slow, ramp(abs(now - base) / spread, 6.0, 20.0))


def _either_way(now: float, before: float) -> float:
    """The larger of now / before and its inverse; 1 if one of them is not positive."""
    return max(now / before, before / now) if min(now, before) > 0 else 1.0


def _gradient(log: MetricsLog) -> float:
    recent, before = _recent_and_before(log.series("grad_norm").values)
    if len(before) < ENOUGH or (base := median(before)) <= 0:
        return 0.0
    return ramp(max(recent) / base, 3.0, 10.0)  # the largest: a median would hide the one step that explodes


def _recent_and_before(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The last ``RECENT`` rows and up to ``BASELINE`` before them."""
    return values[-RECENT:], values[-RECENT - BASELINE : -RECENT]
