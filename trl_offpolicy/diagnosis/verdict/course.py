"""The course of a run: its last steps against what they were before.

A low entropy, long responses or a low reward may be how a run began. Only a change from there says that something
happens to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.rows import FEWEST, Row, mean, scatter, values_of, wobble
from trl_offpolicy.diagnosis.verdict.tree import APPLIED_ESS, INTERVAL, Readings
from trl_offpolicy.functional.intervals import t_quantile_975
from trl_offpolicy.stats import PREFIX

Array = NDArray[np.integer]
LENGTHS = (f"{PREFIX}rollout/response_length_mean", "completions/mean_length")
CUT = ("completions/clipped_ratio", "response_length/clip_ratio", "rollout/truncated_ratio")
"""Share of responses that reached the length limit, as TRL and ms-swift, verl and slime log it."""
EQUAL = "frac_reward_zero_std"
"""Share of groups with equal rewards, as TRL logs it."""
_SIDE = 10
"""Rows of which a length is a mean."""
BASELINE = 50
"""Logged rows before the window with which gradients are compared."""
_CHANCE = 2.0
"""Times both intervals that a fall must exceed: the best of many means is high by chance. Of forty runs of 400 steps
with a reward that stands still and the noise of a batch, none was called a collapse (``test_course.py``)."""
_ALL_OF, _HALF = 10, 0.5
"""A lost reward: that many last rows, none of which reaches this share of the best mean."""
_WEIGHTS = tuple(f"{PREFIX}{key}" for key in (*APPLIED_ESS, "weight_applied/mean"))
COMPARED = (
    *LENGTHS, *CUT, "reward", "grad_norm",
    *(f"{PREFIX}{key}" for key in (
        "gradient/noise", "weight_applied/mean", "loss/entropy", "mismatch/kl_k3", "mismatch/logp_diff_mean")),
)  # fmt: skip
"""What is read of rows before the window (the mean weight tells under which correction the noise was measured)."""
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
    # no KL beyond what is healthy and no saturated clip: such a run may grow because it learns
    far = any(found.get(name, 0.0) > thresholds.kl_healthy for name in _DISTANCES)
    sane = not far and found.get("loss/clip_region_fraction", 0.0) <= thresholds.clip_high
    size = rewards.pop("size/reward", 0.0)
    if sane:
        learned = _learning(rows, window, thresholds)
        rewards |= learned
        lost = rewards.get("collapse/reward_drop", 0.0) * size
        if lost > 0 and learned:
            gain, chance = learned["learning/reward_gain"], learned[f"learning/reward_gain{INTERVAL}"]
            rewards["regained/reward"] = gain / lost if gain > chance else 0.0
    else:
        rewards.pop("holds/reward", None)
    entropy = _entropy(rows, window)
    if entropy and "collapse/reward_fall" in rewards:
        rewards["collapse/entropy_rise"] = entropy["fallen/entropy"]  # of a run that still learns it is exploration
    growth = _lengths(rows, thresholds) | _gradients(rows, window) | _mismatch(rows, window, thresholds)
    known = any(name in found for name in _DISTANCES) and "loss/clip_region_fraction" in found
    return rewards | entropy | growth | _signal(rows, window) | {"known/distances": float(known)}


class _Mean(NamedTuple):
    """A mean over rows that begin at ``place``, and the half-width of its 95 % interval."""

    value: float
    half_width: float
    place: int = 0


def _falls(rows: Sequence[Row], window: int, thresholds: Thresholds) -> dict[str, float]:
    """How far the reward is below its best.

    - ``collapse/reward_drop``: from the best mean up to ``reward_drop_steps`` ago to the best one since, because a run
      that came back once has recovered;
    - ``collapse/reward_fall``: from the best mean to that of the last rows;
    - ``collapse/reward_lost``: the same, where not one of the last ten rows reaches half of the best mean;
    - ``holds/reward``: 1 if the last rows are as good as the best ones, less a tenth or what chance allows; else 0;
    - ``size/reward``: what these are shares of.

    Means are of up to ``window`` rows, of fewer in a short log. Falls are shares of the best mean, or of the range of
    all means where that is wider (rewards may be negative), and not given where chance explains them.
    """
    logged = _of_first(rows, ("reward",))
    size = max(min(window, len(logged) // 6), FEWEST)
    if len(logged) < 2 * size:
        return {}
    steps, rewards = np.array(logged).T
    windows = sliding_window_view(rewards, size)
    means, ends = windows.mean(axis=1), steps[size - 1 :]
    half_widths = t_quantile_975(size - 1) * windows.std(axis=1, ddof=1) / math.sqrt(size)

    def best(which: Array) -> _Mean:
        place = which[means[which].argmax()]
        return _Mean(float(means[place]), float(half_widths[place]))

    places = np.arange(len(means))
    before, now, lowest = best(places[:-size]), best(places[-1:]), float(means.min())
    scale = _scale(before, lowest)
    falls = {"collapse/reward_fall": _fall(before, now, lowest)}
    since = ends > steps[-1] - thresholds.reward_drop_steps
    if not since.all():
        falls["collapse/reward_drop"] = _fall(best(places[~since]), best(places[since]), lowest)
    found = {name: value for name, value in falls.items() if value is not None}
    if "collapse/reward_fall" in found and len(rewards) >= 2 * _ALL_OF:
        reached = (before.value - float(rewards[-_ALL_OF:].max())) / scale
        found |= {"collapse/reward_lost": found["collapse/reward_fall"]} if reached > _HALF else {}
    margin = max(scale / 10, math.hypot(before.half_width, now.half_width))
    return {**found, "holds/reward": float(before.value - now.value <= margin), "size/reward": scale}


def _scale(best: _Mean, lowest: float) -> float:
    return max(abs(best.value), best.value - lowest)


def _fall(best: _Mean, now: _Mean, lowest: float) -> float | None:
    size, fall = _scale(best, lowest), best.value - now.value
    return fall / size if size > 0 and fall > _CHANCE * (best.half_width + now.half_width) else None


def _signal(rows: Sequence[Row], window: int) -> dict[str, float]:
    """Whether the last rows hold anything to learn from.

    - ``still/gradient``: share of them whose gradient norm is 0;
    - ``still/rewards``: share of their groups with equal rewards, whose advantages are 0;
    - ``still/advantages``: share of them whose advantages are all 0, as verl and SkyRL log them;
    - ``gained/reward``: their reward less that of the first rows: a task that is solved has nothing left either.
    """
    last, found = rows[-window:], dict[str, float]()
    norms, equal = values_of(last, "grad_norm"), values_of(last, EQUAL)
    if len(norms) >= FEWEST:
        found["still/gradient"] = sum(norm == 0 for norm in norms) / len(norms)
    if len(equal) >= FEWEST:
        found["still/rewards"] = mean(equal)
    sizes = [size for size in map(_advantage_size, last) if size is not None]
    if len(sizes) >= FEWEST:
        found["still/advantages"] = sum(size == 0 for size in sizes) / len(sizes)
    rewards = values_of(rows, "reward")
    if len(rewards) >= 2 * FEWEST:
        first, now = rewards[:FEWEST], rewards[-FEWEST:]
        found["gained/reward"] = mean(now) - mean(first)
        found[f"gained/reward{INTERVAL}"] = math.hypot(scatter(first) or 0.0, scatter(now) or 0.0)
    return found


def _advantage_size(row: Row) -> float | None:
    """The largest |advantage| of a step, or the mean one; None = not logged."""
    for names in (("critic/advantages/max", "critic/advantages/min"), ("loss/avg_raw_advantages_abs",)):
        values = [row[name] for name in names if math.isfinite(row.get(name, math.nan))]
        if len(values) == len(names):
            return max(map(abs, values))
    return None


def _entropy(rows: Sequence[Row], window: int) -> dict[str, float]:
    """The entropy of the window over that of the first five rows that measured it. Trainers log 0 elsewhere."""
    measured = [value for value in values_of(rows, f"{PREFIX}loss/entropy") if value > 0]
    if len(measured) < 2 * FEWEST:
        return {}
    now = measured[-min(window, len(measured) - FEWEST) :]
    return {"fallen/entropy": mean(now) / mean(measured[:FEWEST])}


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
    """What the lengths of responses were ``length_window`` steps before, and are now.

    - ``rollout/length_surge`` as logged, else the ratio of both, unless responses had been as long even earlier;
    - ``growth/cut``: share of responses at the length limit less that of then: a mean cannot grow beyond the limit;
    - ``collapse/length_left``: the median of the last ten rows over the longest mean of ten before.
    """
    extra: dict[str, float] = {}
    lengths, cut = _of_first(rows, LENGTHS), _then_and_now(_of_first(rows, CUT), thresholds)
    # the run's control may have measured it already
    if not any(f"{PREFIX}rollout/length_surge" in row for row in rows[-1:]):
        extra |= _surge(lengths, thresholds)
    if len(lengths) >= 2 * _SIDE and (longest := _means(lengths[:-_SIDE], _SIDE).max()) > 0:
        extra["collapse/length_left"] = median(value for _, value in lengths[-_SIDE:]) / float(longest)
    if cut is not None:
        share = _of_window(_of_first(rows, CUT), cut[0].place, cut[1].place, thresholds)
        noise = share * math.hypot(cut[0].half_width, cut[1].half_width)
        extra |= {"growth/cut": share * (cut[1].value - cut[0].value), f"growth/cut{INTERVAL}": noise}
    return extra


def _surge(lengths: Sequence[tuple[float, float]], thresholds: Thresholds) -> dict[str, float]:
    """Of ten rows on each side or of five, whichever shows more beyond its noise: growth that is fast needs few."""
    found = [_surge_of(lengths, thresholds, size) for size in (_SIDE, FEWEST)]
    name = "rollout/length_surge"
    return max(found, key=lambda one: one.get(name, 0.0) - one.get(f"{name}{INTERVAL}", 0.0))


def _surge_of(lengths: Sequence[tuple[float, float]], thresholds: Thresholds, most: int) -> dict[str, float]:
    pair = _then_and_now(lengths, thresholds, most)
    if pair is None or pair[0].value <= 0:
        return {}
    before, now = pair
    ratio = now.value / before.value
    earlier = _means(lengths, len(lengths) - now.place)[: before.place + 1]
    if ratio > 1 and now.value <= earlier.max():
        return {"rollout/length_surge": 1.0}
    noise = math.hypot(before.half_width / before.value, now.half_width / max(now.value, 1e-9))
    share = _of_window(lengths, before.place, now.place, thresholds)
    grown = ratio**share
    return {"rollout/length_surge": grown, f"rollout/length_surge{INTERVAL}": share * grown * noise}


def _means(values: Sequence[tuple[float, float]], size: int) -> NDArray[np.floating[Any]]:
    """Of every ``size`` rows that follow each other."""
    means: NDArray[np.floating[Any]] = sliding_window_view([value for _, value in values], size).mean(axis=1)
    return means


def _of_first(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[float, float]]:
    """Step and value of the first of these metrics that was logged."""
    key = next((name for name in names if any(name in row for row in rows)), None)
    return [(row["step"], row[key]) for row in rows if key and math.isfinite(row.get(key, math.nan))]


def _then_and_now(
    values: Sequence[tuple[float, float]], thresholds: Thresholds, most: int = _SIDE
) -> tuple[_Mean, _Mean] | None:
    """Means of up to ``most`` rows, ``length_window`` steps before and now; None with fewer than ten rows in all."""
    parts = _parts(values, thresholds, most)
    if parts is None:
        return None
    first, before, now = parts
    return _Mean(mean(before), wobble(before), first), _Mean(mean(now), wobble(now), len(values) - len(now))


def _parts(
    values: Sequence[tuple[float, float]], thresholds: Thresholds, most: int
) -> tuple[int, list[float], list[float]] | None:
    """Where the rows of ``length_window`` steps before begin, their values and those of the last rows.

    A run that is shorter than the window is measured from its start.
    """
    size = min(most, len(values) // 2)
    if size < FEWEST:
        return None
    start = values[-1][0] - thresholds.length_window
    # the first row inside the window, but early enough that the rows from it on are not among the last ones
    first = min(next(i for i, (step, _) in enumerate(values) if step >= start), len(values) - 2 * size)
    before, now = ([value for _, value in part] for part in (values[first : first + size], values[-size:]))
    return first, before, now


def _of_window(values: Sequence[tuple[float, float]], before: int, now: int, thresholds: Thresholds) -> float:
    """``length_window`` over the steps between two parts, at most 1: few logged rows may lie farther apart."""
    apart = values[now][0] - values[before][0]
    return min(1.0, thresholds.length_window / apart) if apart > 0 else 1.0


def _learning(rows: Sequence[Row], window: int, thresholds: Thresholds) -> dict[str, float]:
    """``learning/reward_gain``: the reward less that of ``length_window`` steps before."""
    parts = _parts(_of_first(rows, ("reward",)), thresholds, window)
    if parts is None:
        return {}
    _, before, now = parts
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
    return extra | _spike(rows, window) | _level(rows)


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


def _level(rows: Sequence[Row]) -> dict[str, float]:
    """``collapse/gradient_level``: median of the last ten gradient norms over that of up to 50 before."""
    norms = values_of(rows, "grad_norm")
    now, before = norms[-_ALL_OF:], norms[-_ALL_OF - BASELINE : -_ALL_OF]
    if len(before) < _ALL_OF or median(before) <= 0:
        return {}
    return {"collapse/gradient_level": median(now) / median(before)}
