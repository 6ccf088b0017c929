"""The course of a run: its last steps against what they were before.

A low entropy, long responses or a low reward may be how a run began. Only a change from there says that something
happens to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.rows import FEWEST, Row, mean, scatter, values_of
from trl_offpolicy.diagnosis.verdict.tree import APPLIED_ESS, INTERVAL, Readings
from trl_offpolicy.functional.intervals import t_quantile_975
from trl_offpolicy.stats import PREFIX

Array = NDArray[np.integer]
LENGTHS = (f"{PREFIX}rollout/response_length_mean", "completions/mean_length")
CUT = ("completions/clipped_ratio", "response_length/clip_ratio", "rollout/truncated_ratio")
"""Share of responses that reached the length limit, as TRL and ms-swift, verl and slime log it."""
BASELINE = 50
"""Logged rows before the window with which gradients are compared."""
_CHANCE = 2.0
"""Times both intervals that a fall must exceed: the best of many means is high by chance. Of forty runs of 400 steps
with a reward that stands still and the noise of a batch, none was called a collapse (``test_course.py``)."""
_WEIGHTS = tuple(f"{PREFIX}{key}" for key in (*APPLIED_ESS, "weight_applied/mean"))
_DISTANCES = tuple(
    f"{bound}{ratio}/{kl}"
    for ratio in ("mismatch", "staleness", "total")
    for bound, kl in (("", "kl_k3"), ("alone/", "kl_k1"), ("atleast/", "kl_k3"))
)


def course(rows: Sequence[Row], window: int, found: Readings, thresholds: Thresholds) -> dict[str, float]:
    """The readings that compare the last ``window`` rows with earlier ones.

    Args:
        rows: all logged rows.
        window: how many of the last ones are judged.
        found: the readings of these, which say whether a run that changes is sane otherwise.
        thresholds: over how many steps length and reward are compared.
    """
    rewards = _falls(rows, window, thresholds)
    entropy = _entropy(rows, window)
    rise = entropy.pop("risen/entropy", None)
    if rise is not None and "collapse/reward_fall" in rewards:
        rewards["collapse/entropy_rise"] = rise  # of a run that still learns it is exploration
    growth = _lengths(rows, thresholds) | _gradients(rows, window) | _mismatch(rows, window, thresholds)
    return rewards | entropy | growth | _learning(rows, window, {**found, **entropy}, thresholds)


class _Mean(NamedTuple):
    """A mean of the reward and the half-width of its 95 % interval."""

    value: float
    half_width: float


def _falls(rows: Sequence[Row], window: int, thresholds: Thresholds) -> dict[str, float]:
    """``collapse/reward_drop``: fall from the best mean of a window up to ``reward_drop_steps`` ago to the best since.

    The best one since, because a run that came back once has recovered. ``collapse/reward_fall``: to the last one, from
    the best whenever it was. Both are shares of the best mean, or of the range of all means where that is wider
    (rewards may be negative), and neither is given where chance explains it.
    """
    logged = [(row["step"], row["reward"]) for row in rows if math.isfinite(row.get("reward", math.nan))]
    if len(logged) < 2 * max(window, FEWEST):
        return {}
    steps, rewards = np.array(logged).T
    windows = sliding_window_view(rewards, window)
    means, ends = windows.mean(axis=1), steps[window - 1 :]
    spread = windows.std(axis=1, ddof=1) if window >= FEWEST else np.zeros_like(means)
    half_widths = t_quantile_975(max(window - 1, 1)) * spread / math.sqrt(window)

    def best(which: Array) -> _Mean:
        place = which[means[which].argmax()]
        return _Mean(float(means[place]), float(half_widths[place]))

    lowest, places = float(means.min()), np.arange(len(means))
    falls = {"collapse/reward_fall": _fall(best(places[:-window]), best(places[-1:]), lowest)}
    since = ends > steps[-1] - thresholds.reward_drop_steps
    if not since.all():
        falls["collapse/reward_drop"] = _fall(best(places[~since]), best(places[since]), lowest)
    return {name: value for name, value in falls.items() if value is not None}


def _fall(best: _Mean, now: _Mean, lowest: float) -> float | None:
    size, fall = max(abs(best.value), best.value - lowest), best.value - now.value
    return fall / size if size > 0 and fall > _CHANCE * (best.half_width + now.half_width) else None


def _entropy(rows: Sequence[Row], window: int) -> dict[str, float]:
    """The entropy of the window over that of the first five rows that measured it. Trainers log 0 elsewhere."""
    measured = [value for value in values_of(rows, f"{PREFIX}loss/entropy") if value > 0]
    if len(measured) < 2 * FEWEST:
        return {}
    now = measured[-min(window, len(measured) - FEWEST) :]
    ratio = mean(now) / mean(measured[:FEWEST])
    return {"fallen/entropy": ratio, "risen/entropy": ratio}


def _mismatch(rows: Sequence[Row], window: int, thresholds: Thresholds) -> dict[str, float]:
    """``growth/mismatch``: the distance of engine and trainer over that of the first rows; where it is not small.

    Of KL k3, or of the square of the mean |log-ratio|, with which KL grows.
    """
    for key, power in (("mismatch/kl_k3", 1), ("mismatch/logp_diff_mean", 2)):
        values = [value**power for value in values_of(rows, f"{PREFIX}{key}")]
        if len(values) < window + FEWEST:
            continue
        first, now = median(values[:FEWEST]), median(values[-window:])
        small = thresholds.kl_healthy / 4
        return {"growth/mismatch": now / first} if first > 0 and now > small else {}
    return {}


def _lengths(rows: Sequence[Row], thresholds: Thresholds) -> dict[str, float]:
    """``rollout/length_surge`` as logged, else the length now over that of ``length_window`` steps before.

    ``growth/cut``: share of responses at the length limit less that of then. A mean length cannot grow beyond it.
    """
    extra: dict[str, float] = {}
    before, now = _then_and_now(rows, LENGTHS, thresholds)
    # the run's control may have measured it already
    if before > 0 and not any(f"{PREFIX}rollout/length_surge" in row for row in rows[-1:]):
        extra["rollout/length_surge"] = now / before
    before, now = _then_and_now(rows, CUT, thresholds)
    return extra if math.isnan(before) else extra | {"growth/cut": now - before}


def _then_and_now(rows: Sequence[Row], names: Sequence[str], thresholds: Thresholds) -> tuple[float, float]:
    """Means of five logged steps, ``length_window`` steps before and now; NaN with fewer than ten steps.

    A run that is shorter than the window is measured from its start.
    """
    key = next((name for name in names if any(name in row for row in rows)), None)
    values = [(row["step"], row[key]) for row in rows if key and math.isfinite(row.get(key, math.nan))]
    if len(values) < 2 * FEWEST:
        return math.nan, math.nan
    start = values[-1][0] - thresholds.length_window
    # the first row inside the window, but early enough that the five rows from it on are not among the last five
    first = min(next(i for i, (step, _) in enumerate(values) if step >= start), len(values) - 2 * FEWEST)
    return mean([v for _, v in values[first : first + FEWEST]]), mean([v for _, v in values[-FEWEST:]])


def _learning(rows: Sequence[Row], window: int, found: Readings, thresholds: Thresholds) -> dict[str, float]:
    """``learning/reward_gain``: the reward less that of ``length_window`` steps before, in a run sane otherwise.

    Sane: no KL beyond ``kl_healthy``, no saturated clip, no fall of the entropy.
    """
    far = any(found.get(name, 0.0) > thresholds.kl_healthy for name in _DISTANCES)
    clipped = found.get("loss/clip_region_fraction", 0.0) > thresholds.clip_high
    if far or clipped or found.get("fallen/entropy", 1.0) < thresholds.entropy_fallen:
        return {}
    rewards = [(row["step"], row["reward"]) for row in rows if math.isfinite(row.get("reward", math.nan))]
    count = min(window, len(rewards) // 2)
    if count < FEWEST:
        return {}
    start = rewards[-1][0] - thresholds.length_window
    first = min(next(i for i, (step, _) in enumerate(rewards) if step >= start), len(rewards) - 2 * count)
    before, now = ([reward for _, reward in part] for part in (rewards[first : first + count], rewards[-count:]))
    half_width = math.hypot(scatter(before) or 0.0, scatter(now) or 0.0)
    return {"learning/reward_gain": mean(now) - mean(before), f"learning/reward_gain{INTERVAL}": half_width}


def _gradients(rows: Sequence[Row], window: int) -> dict[str, float]:
    """Noise of the gradient against what it was, and the spike after which the reward fell."""
    extra: dict[str, float] = {}
    noise = f"{PREFIX}gradient/noise"
    logged = [row for row in rows if math.isfinite(row.get(noise, math.nan))]
    now, earlier = logged[-window:], logged[-window - BASELINE : -window]
    weighted = [row for row in now if _is_weighted(row)]
    if len(earlier) >= FEWEST and median(values_of(earlier, noise)) > 0:
        extra["growth/gradient_noise"] = median(values_of(now, noise)) / median(values_of(earlier, noise))
    # if weights were switched on while the run was logged, what was before has none
    plain = [row for row in logged[-window - BASELINE :] if not _is_weighted(row)]
    before = plain if plain else earlier
    if len(weighted) >= FEWEST and len(before) >= FEWEST and median(values_of(before, noise)) > 0:
        extra["weighted/gradient_noise"] = median(values_of(weighted, noise)) / median(values_of(before, noise))
    return extra | _spike(rows, window)


def _is_weighted(row: Row) -> bool:
    return any(key in row for key in _WEIGHTS)


def _spike(rows: Sequence[Row], window: int) -> dict[str, float]:
    """Largest gradient norm of the window over the median before it, if the reward has fallen since."""
    norms = [
        (place, row["grad_norm"]) for place, row in enumerate(rows) if math.isfinite(row.get("grad_norm", math.nan))
    ]
    now, before = norms[-window:], [value for _, value in norms[-window - BASELINE : -window]]
    if len(before) < FEWEST or median(before) <= 0:
        return {}
    place, largest = max(now, key=lambda one: one[1])
    earlier, later = values_of(rows[:place][-window:], "reward"), values_of(rows[place + 1 :], "reward")
    if min(len(earlier), len(later)) < FEWEST:
        return {}
    margin = (scatter(earlier) or 0.0) + (scatter(later) or 0.0)
    return {"collapse/gradient_spike": largest / median(before)} if mean(later) + margin < mean(earlier) else {}
