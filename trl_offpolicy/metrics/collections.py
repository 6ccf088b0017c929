"""Whole sets of diagnostics as one collection: the moments are computed once an update."""

from __future__ import annotations

from collections.abc import Mapping

from torchmetrics import MetricCollection

from trl_offpolicy.metrics.base import MomentMetric, RatioMetric, WeightMetric
from trl_offpolicy.metrics.ratio_agreement import (
    LogpDiffMax,
    LogpDiffMean,
    NonfiniteFraction,
    ProbDiffMax,
    ProbDiffMean,
    ProbDiffStd,
    ProbPearson,
    ResponseMaxMean,
    ResponseMeanMean,
)
from trl_offpolicy.metrics.ratio_divergence import (
    KLK1,
    KLK3,
    Chi2Sequence,
    Chi2Token,
    Chi2TokenP95,
    ESSProduct,
    KLReverseK3,
    TotalVariation,
)
from trl_offpolicy.metrics.ratio_perplexity import (
    LogPPLAbsDiff,
    LogPPLDiff,
    LogPPLDiffMax,
    LogPPLDiffMin,
    PPLOld,
    PPLRatio,
    PPLSampling,
)
from trl_offpolicy.metrics.routing import RoutingAgreement, RoutingFlipFraction, RoutingMetric
from trl_offpolicy.metrics.weight import ESSSequence, ESSToken, WeightMax, WeightMean, WeightMin, WeightStd

RATIO_METRICS: Mapping[str, type[RatioMetric]] = {
    "kl_k1": KLK1,
    "kl_k3": KLK3,
    "kl_reverse_k3": KLReverseK3,
    "tv": TotalVariation,
    "chi2_token": Chi2Token,
    "chi2_token_p95": Chi2TokenP95,
    "chi2_sequence": Chi2Sequence,
    "ppl_sampling": PPLSampling,
    "ppl_old": PPLOld,
    "ppl_ratio": PPLRatio,
    "log_ppl_diff": LogPPLDiff,
    "log_ppl_abs_diff": LogPPLAbsDiff,
    "log_ppl_diff_max": LogPPLDiffMax,
    "log_ppl_diff_min": LogPPLDiffMin,
    "prob_diff_mean": ProbDiffMean,
    "prob_diff_max": ProbDiffMax,
    "prob_diff_std": ProbDiffStd,
    "prob_pearson": ProbPearson,
    "logp_diff_mean": LogpDiffMean,
    "logp_diff_max": LogpDiffMax,
    "response_max_mean": ResponseMaxMean,
    "response_mean_mean": ResponseMeanMean,
    "ess_sequence": ESSProduct,
    "nonfinite_fraction": NonfiniteFraction,
}
"""Key of ``offpolicy/mismatch/<key>`` -> class."""

WEIGHT_METRICS: Mapping[str, type[WeightMetric]] = {
    "mean": WeightMean,
    "std": WeightStd,
    "min": WeightMin,
    "max": WeightMax,
    "ess_token": ESSToken,
    "ess_sequence": ESSSequence,
}
"""Key of ``offpolicy/weight/<key>`` -> class."""


ROUTING_METRICS: Mapping[str, type[RoutingMetric]] = {
    "agreement": RoutingAgreement,
    "flip_fraction": RoutingFlipFraction,
}
"""Key of ``offpolicy/routing/<key>`` -> class."""


def ratio_metrics(prefix: str = "offpolicy/mismatch/") -> MetricCollection:
    """All ratio diagnostics, named as a :class:`~trl_offpolicy.Correction` names them.

    Args:
        prefix: written before every key; "offpolicy/staleness/" for current/old, "offpolicy/total/" for
            current/sampling.

    Returns:
        One compute group: ``update`` makes one pass over the tokens. Calling the collection itself
        (``forward``) makes one pass a metric, as every torchmetrics collection does.

    Example:
        >>> import torch
        >>> metrics = ratio_metrics()
        >>> old, sampling = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> metrics.update(old, sampling, torch.ones(1, 2).bool())
        >>> metrics.compute()["offpolicy/mismatch/kl_k1"]
        tensor(-0.2500, dtype=torch.float64)
    """
    return _collection(RATIO_METRICS, prefix)


def weight_metrics(prefix: str = "offpolicy/weight/") -> MetricCollection:
    """All weight diagnostics, named as a :class:`~trl_offpolicy.Correction` names them.

    Args:
        prefix: written before every key; "offpolicy/weight_applied/" for the weights after cap and
            normalisation, over the kept tokens.

    Returns:
        One compute group, as :func:`ratio_metrics`.

    Example:
        >>> import torch
        >>> metrics = weight_metrics()
        >>> metrics.update(torch.tensor([[0.5, 2.0]]), torch.ones(1, 2).bool())
        >>> metrics.compute()["offpolicy/weight/max"]
        tensor(2., dtype=torch.float64)
    """
    return _collection(WEIGHT_METRICS, prefix)


def routing_metrics(prefix: str = "offpolicy/routing/") -> MetricCollection:
    """All routing diagnostics of a mixture of experts.

    Args:
        prefix: written before every key.

    Returns:
        One compute group, as :func:`ratio_metrics`.

    Example:
        >>> import torch
        >>> metrics = routing_metrics()
        >>> metrics.update(torch.tensor([[[[0, 3]]]]), torch.tensor([[[[3, 1]]]]), torch.ones(1, 1).bool())
        >>> metrics.compute()["offpolicy/routing/agreement"]
        tensor(0.5000, dtype=torch.float64)
    """
    return _collection(ROUTING_METRICS, prefix)


def _collection(classes: Mapping[str, type[MomentMetric]], prefix: str) -> MetricCollection:
    """The group is given: detecting it would run every metric on the first update and then compare values."""
    return MetricCollection(
        {name: metric() for name, metric in classes.items()}, prefix=prefix, compute_groups=[sorted(classes)]
    )
