"""Warns of habits that hide a fault or make it worse.

The first five are those of Liu 2026, "Off-Policy Drift in LLM RL", sidebar "five common diagnostic mistakes"; the
length trap is its failure mode of that name (Liu et al. 2025). Two are conjectures 4 and 5 of its open problems. The
one about tools is this kit's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.tree import LEARNS, Readings
from trl_offpolicy.run_folder.rollouts import RecordedRollouts

FEWEST_RESPONSES = 40
"""With fewer responses, the groups by length are too small to compare."""


@dataclass(frozen=True)
class AntiPattern:
    """A warning: the habit, what was seen, and what to do instead."""

    name: str
    seen: str
    instead: str


@dataclass(frozen=True)
class LengthShares:
    """Share of responses dropped as a whole, by length, in up to four groups, shortest first.

    Responses of one length are in one group, so a group is a quarter of them only where no length is that frequent.

    Args:
        dropped: shares.
        longest: largest length in each group, tokens.
        responses: responses in each group.
    """

    dropped: tuple[float, ...]
    longest: tuple[int, ...]
    responses: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(
            f"{share:.0%} up to {length}" for share, length in zip(self.dropped, self.longest, strict=True)
        )


def find_antipatterns(
    readings: Readings,
    info: Mapping[str, Any],
    thresholds: Thresholds,
    rollouts: RecordedRollouts | None = None,
) -> tuple[AntiPattern, ...]:
    """All anti-patterns that the numbers and the run's description show.

    Args:
        readings: from :func:`~.judge.read`.
        info: ``run.json``; empty if it is missing. Warnings that depend on it are then left out.
        thresholds: limits of the diagnosis.
        rollouts: recorded tokens, for the length trap; None leaves it out.
    """
    found = (
        _never_tested_at_equal_weights(readings),
        _sequence_weights_with_low_ess(readings, info, thresholds),
        _wide_clip(readings, info, thresholds),
        _surge_without_guard(readings, info, thresholds),
        _maximum_behind_the_mean(readings, thresholds),
        _tools_behind_the_mean(readings, thresholds),
        _correction_of_nothing(readings, thresholds),
        _lag_beyond_the_law(readings, info, thresholds),
        None if rollouts is None else _length_trap(rollouts, info, thresholds),
    )
    return tuple(one for one in found if one is not None)


def _never_tested_at_equal_weights(readings: Readings) -> AntiPattern | None:
    if "total/kl_k3" not in readings or "mismatch/kl_k3" in readings or readings["total/kl_k3"] <= 0:
        return None
    return AntiPattern(
        "KL read as policy learning",
        "Only current/sampling was measured: engine mismatch and policy change cannot be told apart.",
        "Measure both at the same weights first: trl-offpolicy probe, or log old log-probs.",
    )


def _sequence_weights_with_low_ess(
    readings: Readings, info: Mapping[str, Any], thresholds: Thresholds
) -> AntiPattern | None:
    keys = ("mismatch/ess_sequence", "total/ess_sequence", "weight_applied/ess_sequence")  # the last: earlier logs
    ess = next((readings[key] for key in keys if key in readings), None)
    if not re.search(r"Weight\([^)]*level='sequence'", str(info.get("correction", ""))):
        return None
    if ess is None or ess >= thresholds.ess_healthy:
        return None
    return AntiPattern(
        "sequence weights because they sound principled",
        f"Weights are products over whole responses and the ESS is {ess:.2f} (limit {thresholds.ess_healthy:g}).",
        "Token weights with a cap, or reject by the geometric mean first.",
    )


def _wide_clip(readings: Readings, info: Mapping[str, Any], thresholds: Thresholds) -> AntiPattern | None:
    share = readings.get("loss/clip_region_fraction")
    bounds = [float(x) for x in re.findall(r"(?:low|high)=([0-9.]+)", str(info.get("objective", "")))]
    if share is None or share <= thresholds.clip_high or not bounds or max(bounds) <= thresholds.clip_high:
        return None
    return AntiPattern(
        "clip widened against a high clip fraction",
        f"{share:.0%} of the units are clipped although the clip is {max(bounds):g} wide.",
        "Reduce drift or the size of the updates first: one iteration, half the learning rate.",
    )


def _surge_without_guard(readings: Readings, info: Mapping[str, Any], thresholds: Thresholds) -> AntiPattern | None:
    surge = readings.get("rollout/length_surge")
    if surge is None or surge <= thresholds.length_surge or "LengthGuard" in str(info.get("control")):
        return None
    if LEARNS.holds(readings, thresholds):
        return None
    return AntiPattern(
        "length surge taken for a reward issue",
        f"Responses are {surge:.2f} times as long as {thresholds.length_window:g} steps before, and no guard is on.",
        "Decay the learning rate first (control: act); look at the reward if the length keeps growing.",
    )


def _maximum_behind_the_mean(readings: Readings, thresholds: Thresholds) -> AntiPattern | None:
    mean, largest = readings.get("mismatch/kl_k3"), readings.get("mismatch/logp_diff_max")
    spike = readings.get("mismatch/prob_diff_max")
    if mean is None or mean > thresholds.kl_healthy:
        return None
    by_probability = spike is not None and spike > thresholds.prob_diff_high
    if not by_probability and (largest is None or largest <= thresholds.logp_diff_spike):
        return None
    seen = f"a probability is off by {spike:.2f}" if by_probability else f"a log-prob is off by {largest:.1f} nats"
    return AntiPattern(
        "largest difference averaged away",
        f"The mean KL is small ({mean:.2g} nats), but for some token {seen}.",
        "Look at the worst tokens of the report: the spike is often the engine, routing or precision fault.",
    )


def _tools_behind_the_mean(readings: Readings, thresholds: Thresholds) -> AntiPattern | None:
    after, times = readings.get("post_tool/kl_k3"), readings.get("post_tool/kl_k3_ratio")
    if after is None or times is None or after <= thresholds.kl_healthy or times <= thresholds.post_tool_ratio:
        return None
    return AntiPattern(
        "mismatch after tool calls averaged away",
        f"After tool output KL k3 is {after:.2g} nats, {times:.1f} times that before it "
        f"(limit {thresholds.post_tool_ratio:g}).",
        "Look at rollout/retokenised_fraction first; then cap weights by turn (offpolicy: paper/turn-is).",
    )


def _correction_of_nothing(readings: Readings, thresholds: Thresholds) -> AntiPattern | None:
    """Conjecture 4 of the source: within this budget a correction gains less than 0.3 %."""
    tv, chi2 = readings.get("mismatch/tv_p95"), readings.get("mismatch/chi2_sequence")
    flips = readings.get("routing/expert_flip_mean", 0.0)
    corrected = readings.get("weight_applied/mean", readings.get("keep/dropped_token_fraction"))
    if tv is None or chi2 is None or corrected is None:
        return None
    if tv >= thresholds.tv_budget or chi2 >= thresholds.chi2_budget or flips >= thresholds.expert_flip_high:
        return None
    if max(readings.get("staleness/kl_k3", 0.0), readings.get("lagged/kl_k3", 0.0)) > thresholds.kl_healthy:
        return None
    return AntiPattern(
        "correction of what already agrees",
        f"Total variation by response is {tv:.1g} at the 95th percentile (limit {thresholds.tv_budget:g}) and the "
        f"sequence chi-square {chi2:.1g} (limit {thresholds.chi2_budget:g}), and a correction is on.",
        "It can gain next to nothing (a conjecture of Liu 2026): offpolicy: measure does the same.",
    )


def _lag_beyond_the_law(readings: Readings, info: Mapping[str, Any], thresholds: Thresholds) -> AntiPattern | None:
    """Conjecture 5 of the source, for losses that take the lagged policy as their reference."""
    lag, ess = readings.get("rollout/version_lag_max"), readings.get("total/ess_sequence")
    if "OAPL" not in str(info.get("objective", "")) or lag is None or ess is None:
        return None
    if lag <= thresholds.lag_per_ess * ess:
        return None
    return AntiPattern(
        "more lag than the sample size bears",
        f"Tokens are up to {lag:g} optimizer steps old at a sequence ESS of {ess:.2f} "
        f"(limit {thresholds.lag_per_ess:g} times the ESS, a conjecture of Liu 2026).",
        "Shorten the queue until the lag is below it, or make smaller updates.",
    )


def length_shares(rollouts: RecordedRollouts) -> LengthShares | None:
    """Share of responses dropped as a whole in each group of length; None for fewer than 40 responses."""
    some = rollouts.trainable > 0
    lengths, kept = rollouts.trainable[some], rollouts.kept[some]
    if len(lengths) < FEWEST_RESPONSES:
        return None
    longest = np.unique(np.quantile(lengths, (0.25, 0.5, 0.75, 1.0), method="inverted_cdf"))
    group = np.searchsorted(longest, lengths)  # up to and including the longest of a group
    parts = [group == number for number in range(len(longest))]
    return LengthShares(
        dropped=tuple(float(np.mean(kept[part] == 0)) for part in parts),
        longest=tuple(int(length) for length in longest),
        responses=tuple(int(part.sum()) for part in parts),
    )


def _length_trap(rollouts: RecordedRollouts, info: Mapping[str, Any], thresholds: Thresholds) -> AntiPattern | None:
    shares = length_shares(rollouts)
    if shares is None or len(shares.longest) == 1:
        return None
    first, last = shares.dropped[0], shares.dropped[-1]
    low, high = min(first, last), max(first, last)
    if high <= thresholds.length_trap * low or not _differ(shares):
        return None
    which = "Short"
    instead = "Widen the geometric band: noise does not average out over short responses."
    if last > first:
        which = "Long"
        instead = "Reject by the geometric mean (sequence_mean) with a band calibrated to the measured mismatch."
    by_sum = "level='sequence'" in str(info.get("correction", ""))
    why = " The correction looks at the product over a response, which grows with its length." if by_sum else ""
    return AntiPattern(
        "length trap",
        f"{which} responses are dropped more often: {shares} tokens.{why}",
        instead,
    )


def _differ(shares: LengthShares) -> bool:
    """Two-proportion z-test of the outer groups at 1 %."""
    (a, *_, b), (n, *_, m) = shares.dropped, shares.responses
    pooled = (a * n + b * m) / (n + m)
    error = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return bool(error > 0 and abs(a - b) > 2.576 * error)
