"""The decision tree as data: which symptom leads to which cause, in the order in which they are tested.

A branch is taken if any of its symptoms holds and none of its exceptions does. Metrics are named without their
``offpolicy/`` prefix, thresholds by their field in :class:`~trl_offpolicy.diagnosis.thresholds.Thresholds`.
Source: Liu 2026, "Off-Policy Drift in LLM RL", section "Diagnosing and fixing off-policy drift: a decision tree".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trl_offpolicy.diagnosis.thresholds import Thresholds

Severity = Literal["ok", "notice", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("ok", "notice", "warning", "critical")
Readings = Mapping[str, float]
"""Metric name without ``offpolicy/`` -> value over the window that is judged; finite. Beside the logged ones:
``rising/<metric>`` (last half over first half of the window), ``floor/kl_k3`` (times the noise floor),
``lagged/kl_k3`` (only under version lag) and ``rejecting/ess`` (only where something is dropped);
``<metric>_ci95`` is the half-width of the 95 % interval of that value."""
INTERVAL = "_ci95"
APPLIED_ESS = ("weight_applied/ess_token", "weight_applied/ess_sequence")
"""``rejecting/ess``, where anything is dropped, is the smallest of these. Not that of the products over responses
(``kept/ess_sequence``): a mean ratio of 1.01, which a geometric mask lets pass, is a product of e^4 over 400 tokens."""


@dataclass(frozen=True)
class Symptom:
    """``metric sign threshold``, e.g. ``mismatch/prob_pearson < pearson_broken``; ``label`` is its name for people."""

    metric: str
    sign: Literal["<", ">"]
    threshold: str | float
    label: str

    def limit(self, thresholds: Thresholds) -> float:
        """The number to compare the metric with: the threshold itself, or the field of that name."""
        return self.threshold if isinstance(self.threshold, float) else float(getattr(thresholds, self.threshold))

    def holds(self, readings: Readings, thresholds: Thresholds) -> bool:
        """True if the metric is beyond the limit, by more than the half-width of its 95 % interval if there is one.

        False if the metric was not logged.
        """
        value = readings.get(self.metric)
        if value is None:
            return False
        limit, half_width = self.limit(thresholds), readings.get(f"{self.metric}{INTERVAL}", 0.0)
        return value + half_width < limit if self.sign == "<" else value - half_width > limit


@dataclass(frozen=True)
class Step:
    """A branch: any of ``any_of`` leads to ``cause`` if all of ``all_of`` hold and none of ``unless`` does."""

    cause: str
    severity: Severity
    any_of: tuple[Symptom, ...]
    all_of: tuple[Symptom, ...] = ()
    unless: tuple[Symptom, ...] = ()

    def taken(self, readings: Readings, thresholds: Thresholds) -> tuple[Symptom, ...]:
        """The symptoms that lead here; empty if the branch is not taken."""
        if any(one.holds(readings, thresholds) for one in self.unless):
            return ()
        if not all(one.holds(readings, thresholds) for one in self.all_of):
            return ()
        found = tuple(one for one in self.any_of if one.holds(readings, thresholds))
        return found + self.all_of if found else ()


_PEARSON, _KL = "mismatch/prob_pearson", "mismatch/kl_k3"
_AT_FLOOR = Symptom("floor/kl_k3", "<", "floor_factor", "KL k3 over its noise floor")
_ESS_LOW = Symptom("weight_applied/ess_token", "<", "ess_healthy", "ESS of the applied token weights")
_ESS_LOW_SEQUENCE = Symptom("weight_applied/ess_sequence", "<", "ess_healthy", "ESS of the responses' applied weights")
_CHI2_HIGH = Symptom("mismatch/chi2_token", ">", "chi2_high", "token chi-square")
_VARIANCE = (
    _ESS_LOW,
    _ESS_LOW_SEQUENCE,
    _CHI2_HIGH,
    Symptom("total/chi2_token", ">", "chi2_high", "token chi-square of current/sampling"),
)
_BEYOND = (
    Symptom("mismatch/chi2_token", ">", "chi2_systems", "token chi-square"),
    Symptom("total/chi2_token", ">", "chi2_systems", "token chi-square of current/sampling"),
    Symptom("keep/dropped_sequence_fraction", ">", "dropped_broken", "share of responses dropped"),
    Symptom("keep/dropped_token_fraction", ">", "dropped_broken", "share of tokens dropped"),
    Symptom("rejecting/ess", "<", "ess_broken", "ESS under rejection"),
)
_ENGINE = (
    Symptom(_PEARSON, "<", "pearson_broken", "correlation of the two probabilities"),
    Symptom(_KL, ">", "kl_high", "KL k3 at equal weights"),
)

TREE: tuple[Step, ...] = (
    Step(
        "nonfinite",
        "warning",
        (Symptom("mismatch/nonfinite_fraction", ">", 0.0, "share of tokens without a finite log-ratio"),),
    ),
    # 1. agreement of rollout and trainer at the same weights
    Step("engine_mismatch", "critical", _ENGINE, unless=(_AT_FLOOR,)),
    Step(
        "engine_mismatch",
        "warning",
        (
            Symptom("mismatch/log_ppl_diff", ">", "log_ppl_high", "log perplexity ratio"),
            Symptom("mismatch/-log_ppl_diff", ">", "log_ppl_high", "negative log perplexity ratio"),
            Symptom("mismatch/prob_diff_max", ">", "prob_diff_high", "largest difference of a token's probabilities"),
        ),
        unless=(_AT_FLOOR, *_ENGINE),
    ),
    Step(
        "engine_mismatch",
        "notice",
        (
            Symptom(_PEARSON, "<", "pearson_healthy", "correlation of the two probabilities"),
            Symptom(_KL, ">", "kl_healthy", "KL k3 at equal weights"),
        ),
        unless=(
            _AT_FLOOR,
            *_ENGINE,
            Symptom("mismatch/prob_diff_max", ">", "prob_diff_high", ""),
            Symptom("mismatch/log_ppl_diff", ">", "log_ppl_high", ""),
            Symptom("mismatch/-log_ppl_diff", ">", "log_ppl_high", ""),
        ),
    ),
    # 2. agreement is sane: how far the weights have moved since
    Step(
        "policy_staleness",
        "warning",
        (
            Symptom("staleness/kl_k3", ">", "kl_high", "KL k3 between the sampling and the current weights"),
            Symptom("lagged/kl_k3", ">", "kl_high", "KL k3 of current/sampling under version lag"),
        ),
    ),
    Step(
        "policy_staleness",
        "notice",
        (
            Symptom("staleness/kl_k3", ">", "kl_healthy", "KL k3 between the sampling and the current weights"),
            Symptom("lagged/kl_k3", ">", "kl_healthy", "KL k3 of current/sampling under version lag"),
        ),
        unless=(
            Symptom("staleness/kl_k3", ">", "kl_high", ""),
            Symptom("lagged/kl_k3", ">", "kl_high", ""),
        ),
    ),
    # 3. drift exists: what it does to the weights
    Step(
        "token_drift",
        "warning",
        (
            Symptom("mismatch/chi2_token", ">", "chi2_moderate", "token chi-square"),
            Symptom("total/chi2_token", ">", "chi2_moderate", "token chi-square of current/sampling"),
        ),
        unless=_VARIANCE,
    ),
    # escalation: rejection alone, with token weights, then nothing but a fix of the system
    Step(
        "rejection_limit",
        "warning",
        (
            Symptom("mismatch/chi2_token", ">", "chi2_reject", "token chi-square"),
            Symptom("total/chi2_token", ">", "chi2_reject", "token chi-square of current/sampling"),
            Symptom("keep/dropped_sequence_fraction", ">", "dropped_high", "share of responses dropped"),
            Symptom("keep/dropped_token_fraction", ">", "dropped_high", "share of tokens dropped"),
        ),
        unless=_BEYOND,
    ),
    Step("correction_limit", "critical", _BEYOND),
    Step("weight_variance", "critical", _VARIANCE, unless=_BEYOND),
    Step(
        "weight_variance",
        "notice",
        (
            Symptom("mismatch/chi2_sequence", ">", "chi2_sequence_high", "chi-square of whole sequences"),
            Symptom("mismatch/ess_sequence", "<", "ess_healthy", "ESS of the products over whole sequences"),
            Symptom("total/ess_sequence", "<", "ess_healthy", "ESS of the products of current/sampling"),
        ),
        unless=_VARIANCE,
    ),
    # 4. loss mechanics
    Step(
        "clip_saturation",
        "warning",
        (Symptom("loss/clip_region_fraction", ">", "clip_high", "share of clipped units"),),
        all_of=(Symptom("rising/loss/clip_region_fraction", ">", "clip_rising", "its last half over its first half"),),
    ),
    Step(
        "clip_saturation",
        "notice",
        (Symptom("loss/clip_region_fraction", ">", "clip_high", "share of clipped units"),),
        unless=(Symptom("rising/loss/clip_region_fraction", ">", "clip_rising", ""),),
    ),
    Step(
        "length_surge",
        "critical",
        (Symptom("rollout/length_surge", ">", "length_surge", "response length over that of 100 steps before"),),
    ),
)
