"""The numbers that a verdict reads: one statistic of each metric over the last steps, and what follows from them.

The statistic of a metric is told by its name (:func:`statistic`): a maximum over tokens is a maximum over the steps'
tokens too, a mean is a mean with a 95 % interval, and a correlation, which one odd batch can spoil, is a quantile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.course import course
from trl_offpolicy.diagnosis.verdict.rows import FEWEST, Row, mean, scatter, values_of
from trl_offpolicy.diagnosis.verdict.tree import APPLIED_ESS, INTERVAL, Readings
from trl_offpolicy.run_folder.log_forms import not_finite
from trl_offpolicy.run_folder.names import OTHER_WEIGHT_MEANS, ZEROED
from trl_offpolicy.run_folder.run_data import LASTING
from trl_offpolicy.stats import PREFIX

_QUANTILE = 0.1
_SMALL_PROBABILITY = 0.01
"""Mean difference of a token's probabilities that rounding may make."""
_FARTHER = 1.5
"""Times ``logp_diff_outlier`` (then a factor of 1000) from which on one token is no chance, however near the others."""
_RATIOS = ("mismatch", "staleness", "total")
_FIRST = 10
"""Steps of a run in which mixed precision may still look for its loss scale."""
_LARGEST = 20.0
"""As everywhere, ratios are clamped at e^20."""

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
    "collapse": "the last steps against those before",
    "rollout/length_surge": "up to ten steps over as many before",
    "growth/cut": "ten steps less ten before",
    "fallen": "mean of {steps} steps over that of the first five",
    "learning": "mean of {steps} steps less that of 100 steps before",
    "gained": "mean of the last five steps less that of the first five",
    "still/gradient": "share of {steps} steps",
    "still/advantages": "share of {steps} steps",
    "lost": "of {steps} steps",
}


def statistic(metric: str, steps: int) -> str:
    """How the reading of a metric was formed from that many logged steps, in words.

    Example:
        >>> statistic("mismatch/prob_pearson", 20), statistic("mismatch/kl_k3", 20)
        ('10 % quantile of 20 steps', 'mean of 20 steps')
    """
    if steps == 1:
        return "one step"
    ends = (words for end, words in _WORDS.items() if metric.endswith(end))
    of_group = _DERIVED_WORDS.get(metric.split("/")[0], next(ends, "mean of {steps} steps"))
    return _DERIVED_WORDS.get(metric, of_group).format(steps=steps)


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
        values = values_of(last, name)
        if not name.endswith(INTERVAL) and values:
            found |= _statistics(last, name, values, logged)
    found |= _distances(found, last, thresholds)
    found |= _weights(found, last) | _halves(last) | _lags(found, last) | _reward_gap(last) | _lost(last)
    everything = found | course(rows, window, found, thresholds)
    return {name: value for name, value in everything.items() if math.isfinite(value)}


_LOST = {
    "lost/distance": tuple(
        f"{PREFIX}{group}/{name}" for group in ("mismatch", "total") for name in ("kl_k3", "kl_k1", "logp_diff_mean")
    ),
    "lost/reward": ("reward",),
    "lost/gradient": ("grad_norm",),
}


def _lost(last: Sequence[Row]) -> dict[str, float]:
    """Last steps in a row whose distance, or reward, was logged as NaN, infinite or null.

    Nothing for fewer than three, which may be an accident, unless no step has a number.
    """
    found: dict[str, float] = {}
    for reading, names in _LOST.items():
        for name, since in not_finite(last, names).items():
            steps = [row["step"] for row in last if name in row]
            lost = sum(step >= since for step in steps)
            begins = name == "grad_norm" and lost == len(steps) <= _FIRST
            key = "lost/first_gradients" if begins else reading
            if lost >= LASTING or 1 < lost == len(steps):
                found[key] = max(float(lost), found.get(key, 0.0))
    return found


def _statistics(last: Sequence[Row], name: str, values: list[float], logged: set[str]) -> dict[str, float]:
    metric = name.removeprefix(PREFIX)
    if metric.endswith("_max"):
        return {metric: max(values)}
    if metric.endswith("_min"):
        return {metric: min(values)}
    if metric.endswith("prob_pearson"):
        return {metric: low_quantile(values)}
    half_width = _logged_interval(last, name) if f"{name}{INTERVAL}" in logged else scatter(values)
    return {metric: mean(values)} | ({} if half_width is None else {f"{metric}{INTERVAL}": half_width})


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
    extra |= _undivided(found)
    variation = next((name for name in ("total/tv", "mismatch/tv") if name in found), None)
    if variation is not None:
        extra["drift/tv"] = found[variation]
        extra |= _interval_of(found, variation, "drift/tv")
    healthy = (
        found.get("mismatch/kl_k3", math.inf) <= thresholds.kl_healthy
        and found.get("mismatch/prob_pearson", -math.inf) >= thresholds.pearson_healthy
    )
    # other frameworks log no KL: how far the tokens are apart on average, rounding may explain
    small = found.get("mismatch/logp_diff_mean", math.inf) <= thresholds.logp_diff_small
    small &= found.get("mismatch/logp_diff_max", 0.0) <= _FARTHER * thresholds.logp_diff_outlier
    # or only probabilities, as verl does
    of_probabilities = (
        found.get("mismatch/prob_diff_mean", math.inf) <= _SMALL_PROBABILITY
        and found.get("mismatch/prob_pearson", -math.inf) >= thresholds.pearson_healthy
        and "mismatch/logp_diff_mean" not in found
    )
    lone = (small or of_probabilities) and "mismatch/kl_k3" not in found
    for name in ("mismatch/prob_diff_max", "mismatch/logp_diff_max"):
        if name in found:
            extra[f"{'close' if healthy else 'lone' if lone else 'open'}/{name}"] = found[name]
    for group in _RATIOS:
        extra |= _only_others(found, group)
        key = f"{PREFIX}{group}/kl_k1"
        # the upper end of each step's interval: of few tokens a negative mean is chance
        k1 = [row[key] + row.get(f"{key}{INTERVAL}", 0.0) for row in last if math.isfinite(row.get(key, math.nan))]
        if len(k1) >= FEWEST:
            extra[f"negative/{group}/kl_k1"] = sum(value < -thresholds.k1_negative for value in k1) / len(k1)
    return extra


def _undivided(found: Readings) -> dict[str, float]:
    """``equal/*``, ``undivided/*``: current/sampling where nothing tells how much of it is the engine's.

    Of rollouts that the current weights sampled all of it is; where no lag is logged, it may be either.
    """
    apart = ("mismatch/", "staleness/", "alone/mismatch/", "atleast/mismatch/", "alone/staleness/")
    if any(name.startswith(apart) for name in found):
        return {}
    lag = found.get("rollout/version_lag_max", found.get("rollout/version_lag_mean"))
    if lag is not None and lag > 0:
        return {}
    group, extra = "undivided" if lag is None else "equal", dict[str, float]()
    for metric in ("kl_k3", "prob_pearson"):
        if f"total/{metric}" in found:
            extra[f"{group}/{metric}"] = found[f"total/{metric}"]
            extra |= _interval_of(found, f"total/{metric}", f"{group}/{metric}")
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
        k1 = found[f"{group}/kl_k1"]
        alone = {f"alone/{group}/kl_k1": k1} | _interval_of(found, f"{group}/kl_k1", f"alone/{group}/kl_k1")
        # the tokens became likelier on average: E k3 = E r - 1 + k1 >= e^-k1 - 1 + k1
        nearest = max(min(k1 + found.get(f"{group}/kl_k1{INTERVAL}", 0.0), 0.0), -_LARGEST)
        return alone if nearest == 0 else {**alone, f"atleast/{group}/kl_k3": math.expm1(-nearest) + nearest}
    middle, largest = found.get(f"{group}/logp_diff_mean"), found.get(f"{group}/logp_diff_max")
    if middle is None:
        return {}
    bounds = {f"atleast/{group}/kl_k3": math.expm1(min(-middle, _LARGEST)) + middle}
    if largest is not None and largest > 0:
        high = min(largest, _LARGEST)
        bounds[f"atmost/{group}/kl_k3"] = middle * (math.expm1(high) - high) / high
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
    if "weight/mean" in found:
        extra["off/weight_mean"] = abs(found["weight/mean"] - 1)
        extra |= _interval_of(found, "weight/mean", "off/weight_mean")
        return extra
    return extra | _applied(found, last)


def _applied(found: Readings, last: Sequence[Row]) -> dict[str, float]:
    """Mean of the weights after cap and masks, which may be below 1 where engine and trainer agree."""
    name = "capped/weight_mean"
    if "weight_applied/mean" in found:
        off = abs(found["weight_applied/mean"] - 1)
        return {name: off, **_interval_of(found, "weight_applied/mean", name)}
    means = [value for key in OTHER_WEIGHT_MEANS for value in values_of(last, key)]
    return {name: abs(mean(means) - 1), f"{name}{INTERVAL}": scatter(means) or 0.0} if means else {}


def _halves(last: Sequence[Row]) -> dict[str, float]:
    """The last half of the window over its first half, for what counts only if it goes on."""
    extra: dict[str, float] = {}
    for name, metric in (("rising", "loss/clip_region_fraction"), ("falling", "loss/entropy")):
        values = values_of(last, f"{PREFIX}{metric}")
        half = len(values) // 2
        if half and mean(values[:half]) > 0:
            extra[f"{name}/{metric}"] = mean(values[half:]) / mean(values[:half])
    # trainers log 0 where they measured no entropy
    measured = [value for value in values_of(last, f"{PREFIX}loss/entropy") if value > 0]
    if measured:
        extra["measured/entropy"] = mean(measured)
        half_width = scatter(measured)
        extra |= {} if half_width is None else {f"measured/entropy{INTERVAL}": half_width}
    return extra


def _lags(found: Readings, last: Sequence[Row]) -> dict[str, float]:
    """``queue/version_lag``: steps by which even the freshest rollouts are late; without it 2 mean = max.

    Several optimizer steps on one generation have lags 0 to S - 1, and their mean is half their maximum; where each is
    logged by itself, the first has lag 0. A queue adds its own lag to all, so the lowest step tells it; one with a
    response far older than those of all others is left out.
    """
    logged = [[row.get(f"{PREFIX}rollout/version_lag_{end}", math.nan) for end in ("mean", "max")] for row in last]
    lags = [(usual, oldest) for usual, oldest in logged if math.isfinite(usual + oldest)]
    if not lags:
        return {}
    spread = sorted((oldest - usual for usual, oldest in lags), reverse=True)
    if len(spread) > 2 and spread[0] > 2 * spread[1] + 1:
        lags = [(usual, oldest) for usual, oldest in lags if oldest - usual < spread[0]]
    queue = min(max(2 * usual - oldest, 0.0) for usual, oldest in lags)
    extra = {"queue/version_lag": queue}
    if not any(name.startswith(("weight_applied/", "keep/")) for name in found):
        extra["uncorrected/version_lag"] = queue
    if queue > 0 and "gradient/cosine_previous" in found:
        extra["late/gradient_cosine"] = found["gradient/cosine_previous"]
        extra |= _interval_of(found, "gradient/cosine_previous", "late/gradient_cosine")
    return extra


def _reward_gap(last: Sequence[Row]) -> dict[str, float]:
    """The engine's reward against the trainer's."""
    both = [(row.get("reward", math.nan), row.get(f"{PREFIX}rollout/reward_reweighted", math.nan)) for row in last]
    pairs = [(plain, weighed) for plain, weighed in both if math.isfinite(plain) and math.isfinite(weighed)]
    size = max((abs(mean(side)) for side in zip(*pairs, strict=True)), default=0.0)
    if len(pairs) < FEWEST or size <= 0:
        return {}
    gaps = [plain - weighed for plain, weighed in pairs]
    return {"gap/reward": abs(mean(gaps)) / size, f"gap/reward{INTERVAL}": (scatter(gaps) or 0.0) / size}
