"""Collapse risk: one number in [0, 1] from five parts that each say what they saw. No fitted model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trl_offpolicy.control.controllers import ESS_KEYS, LENGTH_KEYS
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.run_folder.run_data import MetricsLog
from trl_offpolicy.stats import PREFIX

RECENT = 5
"""Logged rows whose median is "now"."""
BASELINE = 50
"""Logged rows before those that it is compared with."""
PARTS = ("chi2", "ess", "clip", "length", "gradient")
ESS_SHARE = 0.4
"""How much of the ESS part counts. Products over thousands of tokens leave few effective samples under any mismatch:
by itself it must not reach the 0.5 at which ``control: stop`` ends a run; beside another it does so sooner."""


@dataclass(frozen=True)
class Risk:
    """The score, and its parts by name; a part whose metrics were not logged is 0.

    Args:
        score: 1 - product over the parts of (1 - part): one alarm is enough, several add up. The ESS counts as at most
            ``ESS_SHARE``.
        parts: each in [0, 1].
    """

    score: float
    parts: Mapping[str, float]


def collapse_risk(log: MetricsLog, thresholds: Thresholds | None = None) -> Risk:
    """How likely a run is to collapse soon, by the last rows of its log.

    "Now" is the median of the last 5 rows. A part is 0 up to a first number, 1 from a second on, and linear in the
    logarithm between them:

    - chi2: 95th percentile of the responses' chi-square, of the drift that no weight corrects (``staleness`` where
      weights are applied, else ``total``, else ``mismatch``), from ``chi2_moderate`` to ``chi2_reject``;
    - ess: 1 / ESS of the products of the responses' ratios (``total``, else ``mismatch``), where that was not logged
      1 + chi2_sequence, which is the same for many responses; from 1 / ``ess_healthy`` to 1 / ``ess_broken`` squared;
    - clip: share of clipped units, from ``clip_high`` to three times that;
    - length: the mean response length over that of ``length_window`` steps ago (in a shorter run: of its start), up or
      down, from ``length_surge`` to its square; or, from a change by 5 % on, its distance from the median of the 50
      rows before in robust standard deviations (1.48 median absolute deviations), from 6 to 20;
    - gradient: its norm over the median of the 50 rows before, from 3 to 10.

    Args:
        log: the rows so far, the newest last; about 60 are looked at, and the lengths of ``length_window`` steps.
        thresholds: of the diagnosis; None = the defaults.

    Reference: the features are those of Liu 2026, "Off-Policy Drift in LLM RL", problem 2, and the gradient norm; the
    ramps are this kit's, chosen on the runs of ``benchmarks/collapse``.
    """
    limits = thresholds or Thresholds()
    parts = {
        "chi2": _chi2(log, limits),
        "ess": _ess(log, limits),
        "clip": _clip(log, limits),
        "length": _length(log, limits),
        "gradient": _gradient(log),
    }
    counted = {**parts, "ess": ESS_SHARE * parts["ess"]}
    return Risk(1.0 - math.prod(1.0 - part for part in counted.values()), parts)


def ramp(value: float, low: float, high: float) -> float:
    """0 up to ``low``, 1 from ``high`` on, linear in the logarithm between.

    Example:
        >>> [round(ramp(value, 1.0, 100.0), 2) for value in (0.0, 1.0, 10.0, 1000.0)]
        [0.0, 0.0, 0.5, 1.0]
    """
    if value <= low:
        return 0.0
    return 1.0 if value >= high else math.log(value / low) / math.log(high / low)


def _group(log: MetricsLog) -> str:
    """The ratio that no weight corrects: current/old under weights, else all of current/sampling."""
    if log.has(f"{PREFIX}weight_applied/ess_sequence"):
        return f"{PREFIX}staleness"
    return f"{PREFIX}total" if log.has(f"{PREFIX}total/chi2_token") else f"{PREFIX}mismatch"


def _now(values: Sequence[float]) -> float | None:
    """The median of the last rows; with fewer than three one odd batch would decide."""
    return median(values[-RECENT:]) if len(values) >= 3 else None


def _chi2(log: MetricsLog, limits: Thresholds) -> float:
    now = _now(log.series(f"{_group(log)}/chi2_token_p95").values)
    return 0.0 if now is None else ramp(now, limits.chi2_moderate, limits.chi2_reject)


def _ess(log: MetricsLog, limits: Thresholds) -> float:
    key = log.first_logged(ESS_KEYS)
    if key is not None:
        now = _now(log.series(key).values)
        inverse = None if now is None else 1 / max(now, 1e-6)
    else:  # a log of an earlier version, or of another framework
        key = log.first_logged([f"{PREFIX}total/chi2_sequence", f"{PREFIX}mismatch/chi2_sequence"])
        now = None if key is None else _now(log.series(key).values)
        inverse = None if now is None else 1 + max(now, 0.0)
    return 0.0 if inverse is None else ramp(inverse, 1 / limits.ess_healthy, 1 / limits.ess_broken**2)


def _clip(log: MetricsLog, limits: Thresholds) -> float:
    key = log.first_logged([f"{PREFIX}loss/clip_region_fraction", "clip_ratio/region_mean"])
    now = None if key is None else _now(log.series(key).values)
    return 0.0 if now is None else ramp(now, limits.clip_high, 3 * limits.clip_high)


def _length(log: MetricsLog, limits: Thresholds) -> float:
    key = log.first_logged(LENGTH_KEYS)
    steps, values, _ = log.series(key) if key else ([], [], 0)
    if len(values) < 2 * RECENT:
        return 0.0
    start = steps[-1] - limits.length_window
    first = min(next(place for place, at in enumerate(steps) if at >= start), len(values) - 2 * RECENT)
    slow = _either_way(median(values[-RECENT:]), median(values[first : first + RECENT]))
    part = ramp(slow, limits.length_surge, limits.length_surge**2)
    return max(part, _sudden(values))


def _sudden(values: Sequence[float]) -> float:
    """How far the newest rows lie outside the scatter of those before; 0 for a change of less than a twentieth."""
    recent, before = values[-RECENT:], values[-RECENT - BASELINE : -RECENT]
    if len(before) < 10:
        return 0.0
    now, base = median(recent), median(before)
    spread = 1.4826 * median([abs(value - base) for value in before])
    if _either_way(now, base) < 1.05:
        return 0.0
    return ramp(abs(now - base) / max(spread, 1e-3 * abs(base)), 6.0, 20.0)


def _either_way(now: float, before: float) -> float:
    """The larger of now / before and its inverse; 1 where one of them is not positive."""
    return max(now / before, before / now) if min(now, before) > 0 else 1.0


def _gradient(log: MetricsLog) -> float:
    return ramp(_over_baseline(log.series("grad_norm").values, max), 3.0, 10.0)


def _over_baseline(values: Sequence[float], reduce: Callable[[Sequence[float]], float]) -> float:
    """The last rows over the median of those before; 0 while there are fewer than 10 of those."""
    recent, before = values[-RECENT:], values[-RECENT - BASELINE : -RECENT]
    if len(before) < 10 or (base := median(before)) <= 0:
        return 0.0
    return reduce(recent) / base
