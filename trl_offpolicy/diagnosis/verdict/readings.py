"""The numbers that a verdict reads: one statistic of each metric over the last steps, and what follows from them.

The statistic of a metric is told by its name (:func:`statistic`): a maximum over tokens is a maximum over the steps'
tokens too, a mean is a mean with a 95 % interval, and a correlation, which one odd batch can spoil, is a quantile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.tree import APPLIED_ESS, INTERVAL, Readings
from trl_offpolicy.functional.intervals import t_quantile_975
from trl_offpolicy.run_folder.names import OTHER_WEIGHT_MEANS, ZEROED
from trl_offpolicy.stats import PREFIX

LENGTHS = (f"{PREFIX}rollout/response_length_mean", "completions/mean_length")
BASELINE = 50
"""Logged rows before the window with which gradients are compared."""
FEWEST = 5
"""Steps without which no interval and no baseline is formed."""
_QUANTILE = 0.1
_RATIOS = ("mismatch", "staleness", "total")
_WEIGHTS = tuple(f"{PREFIX}{key}" for key in (*APPLIED_ESS, "weight_applied/mean"))
Row = dict[str, float]

_WORDS = {
    "_max": "largest of {steps} steps",
    "_min": "smallest of {steps} steps",
    "prob_pearson": "10 % quantile of {steps} steps",
}
_DERIVED_WORDS = {
    "rising": "last half of {steps} steps over their first half",
    "falling": "last half of {steps} steps over their first half",
    "growth": "median of {steps} steps over that before",
    "weighted": "median of {steps} steps over that without weights",
    "negative": "share of {steps} steps",
    "atleast": "bound from the means of {steps} steps",
    "collapse": "{steps} steps against those before",
}


def statistic(metric: str, steps: int) -> str:
    """How the reading of a metric was formed from that many logged steps, in words.

    Example:
        >>> statistic("mismatch/prob_pearson", 20), statistic("mismatch/kl_k3", 20)
        ('10 % quantile of 20 steps', 'mean of 20 steps')
    """
    if steps == 1:
        return "one step"
    group = metric.split("/")[0]
    ends = (words for end, words in _WORDS.items() if metric.endswith(end))
    return _DERIVED_WORDS.get(group, next(ends, "mean of {steps} steps")).format(steps=steps)


def read(rows: Sequence[Row], window: int, thresholds: Thresholds) -> Readings:
    """The readings of the tree over the last ``window`` rows.

    - maxima: the largest value, and minima: the smallest, because that is the extreme over all their tokens;
    - ``prob_pearson``: the 10 % quantile, so that one odd batch does not decide (of 20 steps the lowest but one);
    - everything else: the mean, with the half-width of its 95 % interval under ``<metric>_ci95``. That is the logged
      one, or from five steps on that of the scatter between the steps.
    """
    last = rows[-window:]
    found: dict[str, float] = {}
    logged = {key for row in last for key in row if key.startswith(PREFIX)}
    for name in logged:
        values = _values(last, name)
        if not name.endswith(INTERVAL) and values:
            found |= _statistics(last, name, values, logged)
    return (
        found
        | _distances(found, last, thresholds)
        | _weights(found, last)
        | _halves(last)
        | _lags(found)
        | _rewards(rows, last, thresholds)
        | _gradients(rows, window)
        | _surge(rows, thresholds)
    )


def _statistics(last: Sequence[Row], name: str, values: list[float], logged: set[str]) -> dict[str, float]:
    metric = name.removeprefix(PREFIX)
    if metric.endswith("_max"):
        return {metric: max(values)}
    if metric.endswith("_min"):
        return {metric: min(values)}
    if metric.endswith("prob_pearson"):
        return {metric: low_quantile(values)}
    half_width = _logged_interval(last, name) if f"{name}{INTERVAL}" in logged else _scatter(values)
    return {metric: _mean(values)} | ({} if half_width is None else {f"{metric}{INTERVAL}": half_width})


def low_quantile(values: Sequence[float]) -> float:
    """The value that a tenth of the steps reach or fall below; from three steps on never the lowest one alone.

    Example:
        >>> low_quantile([0.94] + [0.999] * 19), low_quantile([0.94, 0.93] + [0.999] * 18)
        (0.999, 0.94)
    """
    place = max(math.ceil(_QUANTILE * len(values)), 2 if len(values) > 2 else 1)
    return sorted(values)[place - 1]


def _logged_interval(rows: Sequence[Row], name: str) -> float | None:
    """Half-width of the mean, with rows taken as independent. None unless each row with a value has one."""
    widths = [row.get(f"{name}{INTERVAL}", math.nan) for row in rows if math.isfinite(row.get(name, math.nan))]
    if not widths or not all(map(math.isfinite, widths)):
        return None
    return math.sqrt(math.fsum(w**2 for w in widths)) / len(widths)


def _scatter(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % interval of the mean, from how much the steps differ; None with fewer than five steps."""
    count = len(values)
    if count < FEWEST:
        return None
    mean = _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return t_quantile_975(count - 1) * math.sqrt(variance / count)


def _values(rows: Iterable[Row], key: str) -> list[float]:
    return [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _distances(found: Readings, last: Sequence[Row], thresholds: Thresholds) -> dict[str, float]:
    """The distances under other names: beside the noise floor, under lag, alone, or as bounds where only others are."""
    extra: dict[str, float] = {}
    floor, distance = found.get("noise_floor/kl_k3"), found.get("mismatch/kl_k3")
    if floor is not None and distance is not None and floor > 0:
        extra["floor/kl_k3"] = distance / floor
    if "mismatch/log_ppl_diff" in found:
        extra["mismatch/-log_ppl_diff"] = -found["mismatch/log_ppl_diff"]
        extra |= _interval_of(found, "mismatch/log_ppl_diff", "mismatch/-log_ppl_diff")
    if found.get("rollout/version_lag_mean", 0.0) > 0 and "total/kl_k3" in found:
        extra["lagged/kl_k3"] = found["total/kl_k3"]
        extra |= _interval_of(found, "total/kl_k3", "lagged/kl_k3")
    variation = next((name for name in ("total/tv", "mismatch/tv") if name in found), None)
    if variation is not None:
        extra["drift/tv"] = found[variation]
        extra |= _interval_of(found, variation, "drift/tv")
    for group in _RATIOS:
        extra |= _only_others(found, group)
        key = f"{PREFIX}{group}/kl_k1"
        # the upper end of each step's interval: of few tokens a negative mean is chance
        k1 = [row[key] + row.get(f"{key}{INTERVAL}", 0.0) for row in last if math.isfinite(row.get(key, math.nan))]
        if len(k1) >= FEWEST:
            extra[f"negative/{group}/kl_k1"] = sum(value < -thresholds.k1_negative for value in k1) / len(k1)
    return extra


def _interval_of(found: Readings, name: str, alias: str) -> dict[str, float]:
    return {f"{alias}{INTERVAL}": found[f"{name}{INTERVAL}"]} if f"{name}{INTERVAL}" in found else {}


def _only_others(found: Readings, group: str) -> dict[str, float]:
    """What other logs tell of KL k3, where it was not logged: KL k1 alone, or bounds from the |log-ratio|.

    k3(l) = e^l - 1 - l is convex and smaller on the negative side. With m = E|l| and M = max|l|, Jensen's inequality
    gives E k3 >= e^-m - 1 + m, and the chord from 0 to M gives E k3 <= m (e^M - 1 - M) / M.
    """
    if f"{group}/kl_k3" in found:
        return {}
    if f"{group}/kl_k1" in found:
        return {f"alone/{group}/kl_k1": found[f"{group}/kl_k1"]} | _interval_of(
            found, f"{group}/kl_k1", f"alone/{group}/kl_k1"
        )
    mean, largest = found.get(f"{group}/logp_diff_mean"), found.get(f"{group}/logp_diff_max")
    if mean is None:
        return {}
    bounds = {f"atleast/{group}/kl_k3": math.expm1(-mean) + mean}
    if largest is not None and largest > 0:
        high = min(largest, 20.0)  # as everywhere, ratios are clamped at e^20
        bounds[f"atmost/{group}/kl_k3"] = mean * (math.expm1(high) - high) / high
    return bounds


def _weights(found: Readings, last: Sequence[Row]) -> dict[str, float]:
    """What rejection and weights take away."""
    extra: dict[str, float] = {}
    if found.get("keep/dropped_token_fraction", 0.0) > 0:
        applied = min((key for key in APPLIED_ESS if key in found), key=found.__getitem__, default="")
        extra |= {f"rejecting/ess{end}": found[applied + end] for end in ("", INTERVAL) if applied + end in found}
    # some logs have no total, only one share for each mask: what is dropped is at least the largest
    if not any(name in found for name in ("keep/dropped_token_fraction", "keep/dropped_sequence_fraction")):
        terms = [
            name
            for name in found
            if name.startswith("keep/") and name.count("/") == 2 and name.endswith("/dropped_fraction")
        ]
        if terms:
            most = max(terms, key=found.__getitem__)
            extra["one_term/dropped_fraction"] = found[most]
            extra |= _interval_of(found, most, "one_term/dropped_fraction")
    # a band gives weight 0 outside, which takes a token out as a mask does; a cap leaves it in
    zeroed = found.get("weight_applied/min") == 0 or any(ZEROED in row for row in last)
    if "weight/truncated_fraction" in found:
        name = "zeroed/weight" if zeroed else "capped/weight"
        extra[name] = found["weight/truncated_fraction"]
        extra |= _interval_of(found, "weight/truncated_fraction", name)
    mean = next((key for key in ("weight/mean", "weight_applied/mean") if key in found), None)
    if mean is not None:
        extra["off/weight_mean"] = abs(found[mean] - 1)
        extra |= _interval_of(found, mean, "off/weight_mean")
    elif means := [value for key in OTHER_WEIGHT_MEANS for value in _values(last, key)]:
        extra["off/weight_mean"] = abs(_mean(means) - 1)
        extra[f"off/weight_mean{INTERVAL}"] = _scatter(means) or 0.0
    return extra


def _halves(last: Sequence[Row]) -> dict[str, float]:
    """The last half of the window over its first half, for what counts only if it goes on."""
    extra: dict[str, float] = {}
    for name, metric in (("rising", "loss/clip_region_fraction"), ("falling", "loss/entropy")):
        values = _values(last, f"{PREFIX}{metric}")
        half = len(values) // 2
        if half and _mean(values[:half]) > 0:
            extra[f"{name}/{metric}"] = _mean(values[half:]) / _mean(values[:half])
    # trainers log 0 where they measured no entropy
    measured = [value for value in _values(last, f"{PREFIX}loss/entropy") if value > 0]
    if measured:
        extra["measured/entropy"] = _mean(measured)
        half_width = _scatter(measured)
        extra |= {} if half_width is None else {f"measured/entropy{INTERVAL}": half_width}
    return extra


def _lags(found: Readings) -> dict[str, float]:
    """``queue/version_lag``: steps by which even the freshest rollouts are late; without it 2 mean = max.

    Several optimizer steps on one generation have lags 0 to S - 1, and their mean is half their maximum. A queue adds
    its own lag to both.
    """
    mean, oldest = found.get("rollout/version_lag_mean"), found.get("rollout/version_lag_max")
    if mean is None or oldest is None:
        return {}
    queue = max(2 * mean - oldest, 0.0)
    extra = {"queue/version_lag": queue}
    if not any(name.startswith(("weight_applied/", "keep/")) for name in found):
        extra["uncorrected/version_lag"] = queue
    if queue > 0 and "gradient/cosine_previous" in found:
        extra["late/gradient_cosine"] = found["gradient/cosine_previous"]
        extra |= _interval_of(found, "gradient/cosine_previous", "late/gradient_cosine")
    return extra


def _rewards(rows: Sequence[Row], last: Sequence[Row], thresholds: Thresholds) -> dict[str, float]:
    """The engine's reward against the trainer's, and how far the reward is below its best."""
    extra: dict[str, float] = {}
    both = [(row.get("reward", math.nan), row.get(f"{PREFIX}rollout/reward_reweighted", math.nan)) for row in last]
    pairs = [(plain, weighed) for plain, weighed in both if math.isfinite(plain) and math.isfinite(weighed)]
    size = max((abs(_mean(side)) for side in zip(*pairs, strict=True)), default=0.0)
    if len(pairs) >= FEWEST and size > 0:
        gaps = [plain - weighed for plain, weighed in pairs]
        extra["gap/reward"] = abs(_mean(gaps)) / size
        extra[f"gap/reward{INTERVAL}"] = (_scatter(gaps) or 0.0) / size
    drop = _reward_drop(rows, len(last), thresholds)
    return extra if drop is None else extra | {"collapse/reward_drop": drop}


def _reward_drop(rows: Sequence[Row], window: int, thresholds: Thresholds) -> float | None:
    """Fall from the best mean of a window up to ``reward_drop_steps`` ago to the best one since; None = too short.

    The best one since, because a run that came back once has recovered.
    """
    steps = [(row["step"], row["reward"]) for row in rows if math.isfinite(row.get("reward", math.nan))]
    if len(steps) < 2 * max(window, FEWEST):
        return None
    means = [
        (steps[end][0], _mean([value for _, value in steps[end - window + 1 : end + 1]]))
        for end in range(window - 1, len(steps))
    ]
    since = steps[-1][0] - thresholds.reward_drop_steps
    before = [mean for step, mean in means if step <= since]
    if not before or max(before) <= 0:
        return None
    return 1 - max(mean for step, mean in means if step > since) / max(before)


def _gradients(rows: Sequence[Row], window: int) -> dict[str, float]:
    """Noise of the gradient against what it was, and the spike after which the reward fell."""
    extra: dict[str, float] = {}
    noise = f"{PREFIX}gradient/noise"
    logged = [row for row in rows if math.isfinite(row.get(noise, math.nan))]
    now, earlier = logged[-window:], logged[-window - BASELINE : -window]
    weighted = [row for row in now if _is_weighted(row)]
    if len(earlier) >= FEWEST and median(_values(earlier, noise)) > 0:
        extra["growth/gradient_noise"] = median(_values(now, noise)) / median(_values(earlier, noise))
    # if weights were switched on while the run was logged, what was before has none
    plain = [row for row in logged[-window - BASELINE :] if not _is_weighted(row)]
    before = plain if plain else earlier
    if len(weighted) >= FEWEST and len(before) >= FEWEST and median(_values(before, noise)) > 0:
        extra["weighted/gradient_noise"] = median(_values(weighted, noise)) / median(_values(before, noise))
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
    earlier, later = _values(rows[:place][-window:], "reward"), _values(rows[place + 1 :], "reward")
    if min(len(earlier), len(later)) < FEWEST:
        return {}
    margin = (_scatter(earlier) or 0.0) + (_scatter(later) or 0.0)
    return {"collapse/gradient_spike": largest / median(before)} if _mean(later) + margin < _mean(earlier) else {}


def _surge(rows: Sequence[Row], thresholds: Thresholds) -> dict[str, float]:
    """``rollout/length_surge`` as logged, else the length now over that of ``length_window`` steps before.

    Both lengths are means of five logged steps. A run that is shorter than the window is measured from its start, once
    it has ten steps.
    """
    logged = f"{PREFIX}rollout/length_surge"
    if any(logged in row for row in rows[-1:]):
        return {}  # the run's control has already measured it
    key = next((name for name in LENGTHS if any(name in row for row in rows)), None)
    lengths = [(row["step"], row[key]) for row in rows if key and math.isfinite(row.get(key, math.nan))]
    if len(lengths) < 10:
        return {}
    start = lengths[-1][0] - thresholds.length_window
    # the first row inside the window, but early enough that the five rows from it on are not among the last five
    first = min(next(i for i, (step, _) in enumerate(lengths) if step >= start), len(lengths) - 10)
    before, now = _mean([v for _, v in lengths[first : first + 5]]), _mean([v for _, v in lengths[-5:]])
    return {"rollout/length_surge": now / before} if before > 0 else {}
