"""The other diagnostics of a correction and an objective, one class each, fed with the ``stats`` of an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_offpolicy.checks import check_whole
from trl_offpolicy.correction import measure as correction_measure
from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.lags import LAG_NAMES, MOST_LAGS
from trl_offpolicy.functional.moments import Layout
from trl_offpolicy.metrics.base import MomentMetric, classes_in, derived
from trl_offpolicy.objective import measure as objective_measure
from trl_offpolicy.stats import Stats

GROUPS: Mapping[str, tuple[Layout, Mapping[str, Finalizer]]] = {
    **correction_measure.GROUPS,
    **objective_measure.GROUPS,
}
"""Group of :class:`~trl_offpolicy.stats.Stats` -> the names of its moments, and its finalisers by quantity."""


class GroupMetric(MomentMetric):
    """Base of the diagnostics that a correction or an objective has collected already.

    Example:
        >>> import torch, trl_offpolicy as op
        >>> from trl_offpolicy.metrics import KeepDroppedTokenFraction
        >>> band = op.RatioBand(level="token", low=0.5, high=2.0)
        >>> out = op.Correction(keep=(band,))(op.PolicyBatch(
        ...     per_token_logps=torch.tensor([[-1.0, -3.0]]), sampling_per_token_logps=torch.tensor([[-1.0, -1.0]]),
        ...     completion_mask=torch.ones(1, 2).bool(), advantages=torch.ones(1)))
        >>> metric = KeepDroppedTokenFraction()  # any of GROUP_METRICS
        >>> metric.update(out.stats)
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    group: str

    def update(self, stats: Stats) -> None:
        """Add one call of a correction or an objective.

        Args:
            stats: the ``stats`` of its output.

        Raises:
            ValueError: they do not hold this diagnostic (there is no such term, or the batch lacked an input).
        """
        quantity, found = self.key.rpartition("/")[2], stats.groups.get(self.group)
        if found is None or quantity not in found.finalizers:
            raise ValueError(f"stats must hold {self.group.partition('#')[0]}/{quantity}, but got {sorted(stats)}.")
        self._add(found.moments)


class TermMetric(GroupMetric):
    """Base of the diagnostics of one keep term.

    Args:
        term: its name in the metrics, e.g. "ratio_band_sequence_mean".
    """

    def __init__(self, term: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.group = f"keep/{term}"


class LagMetric(GroupMetric):
    """Base of the diagnostics of one version lag.

    Args:
        lag: 0, 1, ...; 9 and more are measured together.

    Raises:
        ValueError: ``lag`` is negative.
    """

    part: str

    def __init__(self, lag: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_whole("lag", lag, least=0)
        self.group = f"lag/{LAG_NAMES[min(lag, MOST_LAGS)]}{self.part}"


def _of(group: str, name: str, quantity: str, *, better: bool | None = None) -> type[GroupMetric]:
    layout, finalizers = GROUPS[group]
    base = next((base for mark, base in _BASES.items() if mark in group), GroupMetric)
    below, mark, part = group.partition("#")
    own = {"part": mark + part} if base is LagMetric else {}
    return derived(
        base, name, f"{below}/{quantity}", finalizers[quantity], __name__,
        better=better, group=group, layout=layout, **own,
    )  # fmt: skip


_BASES: Mapping[str, type[GroupMetric]] = {"<term>": TermMetric, "<lag>": LagMetric}

ProductVariance = _of("mismatch#products", "ProductVariance", "product_variance", better=False)

PostToolKLK1 = _of("post_tool", "PostToolKLK1", "kl_k1", better=False)
PostToolKLK3 = _of("post_tool", "PostToolKLK3", "kl_k3", better=False)
PostToolChi2Token = _of("post_tool", "PostToolChi2Token", "chi2_token", better=False)
PostToolLogpDiffMean = _of("post_tool", "PostToolLogpDiffMean", "logp_diff_mean", better=False)
PostToolKLK3Ratio = _of("post_tool", "PostToolKLK3Ratio", "kl_k3_ratio")
PostToolTokenFraction = _of("post_tool", "PostToolTokenFraction", "token_fraction")

WeightTruncatedFraction = _of("weight#bounds", "WeightTruncatedFraction", "truncated_fraction", better=False)
WeightNormalizer = _of("weight#bounds", "WeightNormalizer", "normalizer")
WeightCutMass = _of("weight#bounds", "WeightCutMass", "cut_mass", better=False)

EstimatorMissed = _of("estimator", "EstimatorMissed", "missed", better=False)
EstimatorMissedToken = _of("estimator", "EstimatorMissedToken", "missed_token", better=False)
EstimatorSecondMoment = _of("estimator", "EstimatorSecondMoment", "second_moment")
EstimatorESS = _of("estimator", "EstimatorESS", "ess", better=True)
EstimatorBiasBound = _of("estimator", "EstimatorBiasBound", "bias_bound", better=False)
EstimatorVarianceBound = _of("estimator", "EstimatorVarianceBound", "variance_bound", better=False)

ResponseLengthMean = _of("rollout", "ResponseLengthMean", "response_length_mean")
VersionLagMean = _of("rollout#lag", "VersionLagMean", "version_lag_mean", better=False)
VersionLagMax = _of("rollout#lag", "VersionLagMax", "version_lag_max", better=False)
CrossVersionFraction = _of("rollout#versions", "CrossVersionFraction", "cross_version_fraction", better=False)
RewardReweighted = _of("rollout#reward", "RewardReweighted", "reward_reweighted", better=True)
OutsideFraction = _of("rollout#support", "OutsideFraction", "outside_fraction", better=False)
KeptIdsMean = _of("rollout#kept", "KeptIdsMean", "kept_ids_mean")
RecomputedCutFraction = _of("rollout#kept", "RecomputedCutFraction", "recomputed_cut_fraction", better=False)

LagTokens = _of("lag/<lag>", "LagTokens", "tokens")
LagLogRatioMean = _of("lag/<lag>", "LagLogRatioMean", "log_ratio_mean")
LagLogpDiffMean = _of("lag/<lag>", "LagLogpDiffMean", "logp_diff_mean", better=False)
LagESSToken = _of("lag/<lag>", "LagESSToken", "ess_token", better=True)
LagClipFraction = _of("lag/<lag>#clip", "LagClipFraction", "clip_fraction", better=False)

KeepDroppedTokenFraction = _of("keep", "KeepDroppedTokenFraction", "dropped_token_fraction", better=False)
KeepDroppedSequenceFraction = _of("keep", "KeepDroppedSequenceFraction", "dropped_sequence_fraction", better=False)
KeepDroppedRewardMean = _of("keep", "KeepDroppedRewardMean", "dropped_reward_mean")
KeepDroppedCorrectFraction = _of("keep", "KeepDroppedCorrectFraction", "dropped_correct_fraction", better=False)
TermDroppedFraction = _of("keep/<term>", "TermDroppedFraction", "dropped_fraction", better=False)
TermAboveFraction = _of("keep/<term>", "TermAboveFraction", "above_fraction", better=False)
TermBelowFraction = _of("keep/<term>", "TermBelowFraction", "below_fraction", better=False)

LossPolicy = _of("loss", "LossPolicy", "policy")
LossKL = _of("loss", "LossKL", "kl")
LossKLCoef = _of("loss", "LossKLCoef", "kl_coef")
LossDiscrepancy = _of("loss#discrepancy", "LossDiscrepancy", "discrepancy", better=False)
LossDiscrepancyCoef = _of("loss#discrepancy", "LossDiscrepancyCoef", "discrepancy_coef")
LossEntropy = _of("loss", "LossEntropy", "entropy")
LossClipLowFraction = _of("loss", "LossClipLowFraction", "clip_low_fraction", better=False)
LossClipHighFraction = _of("loss", "LossClipHighFraction", "clip_high_fraction", better=False)
LossClipRegionFraction = _of("loss", "LossClipRegionFraction", "clip_region_fraction", better=False)
LossResponseClipLowMin = _of("loss", "LossResponseClipLowMin", "response_clip_low_min", better=False)
LossResponseClipHighMax = _of("loss", "LossResponseClipHighMax", "response_clip_high_max", better=False)
LossNonfiniteCurrent = _of("loss", "LossNonfiniteCurrent", "nonfinite_current", better=False)
LossNonfiniteReference = _of("loss", "LossNonfiniteReference", "nonfinite_reference", better=False)
LossGateMean = _of("loss", "LossGateMean", "gate_mean")

GradientPower = _of("gradient", "GradientPower", "power", better=False)

GROUP_METRICS: Mapping[str, type[GroupMetric]] = classes_in(globals(), GroupMetric)
"""Key below ``offpolicy/`` -> class."""
