"""Lowers the priority of a stored group with its age, and draws a batch by priority without repetition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trl_offpolicy.checks import check_number
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, log_ratio
from trl_offpolicy.functional.weights import ess_fraction_of_logs
from trl_offpolicy.types import PolicyBatch

Floats = NDArray[np.float64]

HALF_LIFE = 4.0
"""Versions in which the default priority halves: the lag that AReaL still trusts for code (8 for mathematics)."""


@dataclass(frozen=True, kw_only=True)
class AgeDecay:
    """Priority p exp(-rate a) of a group that is a weight versions old: the share of it that is an effective sample.

    Assume that each version moves the log-ratio to the sampling policy by an independent step of variance s. Then
    log-ratios of age a are normal with variance s a, and the ESS fraction is 1 / E[rho^2] = exp(-s a), exponential in
    the age. So a group counts for what it is still worth. Measure the rate (:func:`fitted_decay`); the default is only
    a placeholder.

    Args:
        rate: decay per weight version, at least 0; 0 = age does not count.

    Raises:
        ValueError: the rate is negative or not finite.

    Reference: Ma et al. 2026, Freshness-Aware PER (arXiv:2604.16918), whose priority is (abs(reward) + 1e-6)
    exp(-age / 500) with age in training steps. Fitting the rate to a measured ESS is this kit's addition.

    Example:
        >>> decay = AgeDecay(rate=math.log(2) / 4)
        >>> np.exp(decay.log_priorities(np.array([1.0, 3.0]), np.array([10, 6]), current_version=10)).round(3)
        array([1. , 1.5])
    """

    rate: float = math.log(2.0) / HALF_LIFE

    def __post_init__(self) -> None:
        check_number("rate", self.rate)
        if self.rate < 0:
            raise ValueError(f"rate must be at least 0, but got {self.rate}.")

    def log_priorities(self, priorities: Floats, versions: NDArray[np.int64], *, current_version: int) -> Floats:
        """(N,) log of p exp(-rate a).

        Args:
            priorities: (N,) p, positive.
            versions: (N,) weight version of each group.
            current_version: current weight version; no group may be newer.

        Raises:
            ValueError: a group is newer than ``current_version``.
        """
        ages = current_version - np.asarray(versions)
        if ages.size and ages.min() < 0:
            raise ValueError(
                f"current_version must be at least that of every stored group, {int(np.max(versions))}, "
                f"but got {current_version}."
            )
        decayed: Floats = np.log(np.asarray(priorities, np.float64)) - self.rate * ages
        return decayed


def fitted_decay(ess: Mapping[int, float]) -> AgeDecay:
    """The decay that fits a measured ESS: rate = sum_a a (-log ESS(a)) / sum_a a^2, at least 0.

    This is the least-squares fit of log ESS(a) = -rate a through ESS(0) = 1. Use the ESS of the weights that the loss
    holds: by token for token TIS, by response for sequence weights (:func:`ess_by_lag` gives both).

    Args:
        ess: {lag in weight versions: ESS fraction in (0, 1]}; lag 0 is allowed but carries no information.

    Raises:
        ValueError: there is no lag above 0, a lag is negative, or an ESS is outside (0, 1].

    Example:
        >>> round(fitted_decay({1: math.exp(-0.1), 4: math.exp(-0.4)}).rate, 6)
        0.1
    """
    for lag, value in ess.items():
        if lag < 0:
            raise ValueError(f"ess must have lags of at least 0, but got {lag}.")
        if not 0.0 < value <= 1.0:
            raise ValueError(f"ess must hold fractions in (0, 1], but got {value} at lag {lag}.")
    lags = [lag for lag in ess if lag > 0]
    if not lags:
        raise ValueError(f"ess must hold at least one lag above 0, but got {sorted(ess)}.")
    return AgeDecay(rate=sum(-lag * math.log(ess[lag]) for lag in lags) / sum(lag * lag for lag in lags))


def ess_by_lag(batch: PolicyBatch, *, level: str = "token") -> dict[int, float]:
    """{lag: ESS fraction of current/sampling} of a batch, by the lag of its rows.

    Args:
        batch: with ``sampling_per_token_logps``, ``policy_versions`` and ``current_version``. The oldest version of a
            row counts.
        level: "token", or "sequence" (the product over the response).

    Raises:
        ValueError: the level is unknown, or versions are missing.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', but got {level!r}.")
    if (lags := batch.version_lags) is None:
        raise ValueError("policy_versions and current_version must be given to know the lags, but got None.")
    ratio = log_ratio(batch.logps("current"), batch.logps("sampling"), batch.mask)
    by_row = torch.where(batch.mask, lags.expand_as(batch.mask), 0).amax(1)
    found = {}
    for lag in sorted(set(by_row.tolist())):
        here = by_row == lag
        logs = ratio.values[here].sum(1) if level == "sequence" else ratio.values[here][ratio.observed[here]]
        if len(logs):
            held = logs.double().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
            found[int(lag)] = float(ess_fraction_of_logs(held))
    return found


class Draw(NamedTuple):
    """``places`` (k,) are the distinct drawn places, ``weights`` (k,) their importance weights."""

    places: NDArray[np.int64]
    weights: Floats


def draw_without_repetition(log_priorities: Floats, count: int, rng: np.random.Generator) -> Draw:
    """Draw ``count`` of N places one after the other, each time by priority among the remaining places.

    Gumbel top-k: the places with the largest log p_i + g_i, g_i standard Gumbel. With kappa the largest value that was
    not drawn, a place is drawn if g_i > kappa - log p_i, which has probability q_i = 1 - exp(-p_i exp(-kappa)), and

        weight_i = count / (N q_i)

    makes the weighted mean of the draw, sum_i weight_i f_i / count, an unbiased estimate of the plain mean of f over
    the buffer, for every f. So the weights undo the preference of the priorities. They are 1 if everything is drawn.

    Args:
        log_priorities: (N,) log p, any offset.
        count: k, from 1 to N.
        rng: numpy generator.

    Returns:
        :class:`Draw`, with the places in the order in which they were drawn.

    Raises:
        ValueError: ``count`` is not in 1..N, or a log-priority is not finite.

    Reference: Kool et al. 2019 (arXiv:1903.06059), Eq. 15 and appendix. The weights are those of Horvitz and Thompson
    with Duffield's threshold.

    Example:
        >>> draw_without_repetition(np.zeros(3), 3, np.random.default_rng(0)).weights
        array([1., 1., 1.])
    """
    total = len(log_priorities)
    if not 1 <= count <= total:
        raise ValueError(f"count must be from 1 to {total}, the groups there are, but got {count}.")
    if not np.isfinite(log_priorities).all():
        raise ValueError("log_priorities must be finite, but got NaN or infinity.")
    logs = np.asarray(log_priorities, np.float64) - np.max(log_priorities)
    perturbed = logs + rng.gumbel(size=total)
    order = np.argsort(-perturbed)
    places = order[:count]
    if count == total:
        return Draw(places, np.ones(count))
    threshold = perturbed[order[count]]
    included = -np.expm1(-np.exp(logs[places] - threshold))
    return Draw(places, count / (total * included))
