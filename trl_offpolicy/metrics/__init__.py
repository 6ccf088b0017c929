"""The diagnostics as torchmetrics: one class each, a shell over the pure functions of ``functional``.

They merge over batches and ranks by sums, counts and maxima, never by means. The trainers log the same
numbers from :class:`~trl_offpolicy.Stats` with one collective a step; these classes are for other loops.
"""

from trl_offpolicy.metrics.base import MomentMetric, RatioMetric, WeightMetric
from trl_offpolicy.metrics.collections import (
    RATIO_METRICS,
    ROUTING_METRICS,
    WEIGHT_METRICS,
    ratio_metrics,
    routing_metrics,
    weight_metrics,
)
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

__all__ = [
    "KLK1",
    "KLK3",
    "RATIO_METRICS",
    "ROUTING_METRICS",
    "WEIGHT_METRICS",
    "Chi2Sequence",
    "Chi2Token",
    "Chi2TokenP95",
    "ESSProduct",
    "ESSSequence",
    "ESSToken",
    "KLReverseK3",
    "LogPPLAbsDiff",
    "LogPPLDiff",
    "LogPPLDiffMax",
    "LogPPLDiffMin",
    "LogpDiffMax",
    "LogpDiffMean",
    "MomentMetric",
    "NonfiniteFraction",
    "PPLOld",
    "PPLRatio",
    "PPLSampling",
    "ProbDiffMax",
    "ProbDiffMean",
    "ProbDiffStd",
    "ProbPearson",
    "RatioMetric",
    "ResponseMaxMean",
    "ResponseMeanMean",
    "RoutingAgreement",
    "RoutingFlipFraction",
    "RoutingMetric",
    "TotalVariation",
    "WeightMax",
    "WeightMean",
    "WeightMetric",
    "WeightMin",
    "WeightStd",
    "ratio_metrics",
    "routing_metrics",
    "weight_metrics",
]
