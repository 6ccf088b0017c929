"""The diagnostics of a ratio of two policies, one class each."""

from __future__ import annotations

from collections.abc import Mapping

from trl_offpolicy.functional.diagnostics import RATIO_DIAGNOSTICS
from trl_offpolicy.metrics.base import RatioMetric, by_quantity, classes_in, derived


def _ratio(name: str, key: str, *, better: bool | None = False) -> type[RatioMetric]:
    finalize = RATIO_DIAGNOSTICS[key]
    return derived(RatioMetric, name, f"mismatch/{key}", finalize, __name__, better=better)


KLK1 = _ratio("KLK1", "kl_k1")
KLK3 = _ratio("KLK3", "kl_k3")
KLReverseK3 = _ratio("KLReverseK3", "kl_reverse_k3")
TotalVariation = _ratio("TotalVariation", "tv")
TotalVariationP95 = _ratio("TotalVariationP95", "tv_p95")
Chi2Token = _ratio("Chi2Token", "chi2_token")
Chi2TokenP95 = _ratio("Chi2TokenP95", "chi2_token_p95")
Chi2Sequence = _ratio("Chi2Sequence", "chi2_sequence")
PPLSampling = _ratio("PPLSampling", "ppl_sampling")
PPLOld = _ratio("PPLOld", "ppl_old")
PPLRatio = _ratio("PPLRatio", "ppl_ratio", better=None)
LogPPLDiff = _ratio("LogPPLDiff", "log_ppl_diff", better=None)
LogPPLAbsDiff = _ratio("LogPPLAbsDiff", "log_ppl_abs_diff")
LogPPLDiffMax = _ratio("LogPPLDiffMax", "log_ppl_diff_max", better=None)
LogPPLDiffMin = _ratio("LogPPLDiffMin", "log_ppl_diff_min", better=None)
ProbDiffMean = _ratio("ProbDiffMean", "prob_diff_mean")
ProbDiffMax = _ratio("ProbDiffMax", "prob_diff_max")
ProbDiffStd = _ratio("ProbDiffStd", "prob_diff_std")
ProbPearson = _ratio("ProbPearson", "prob_pearson", better=True)
LogpDiffMean = _ratio("LogpDiffMean", "logp_diff_mean")
LogpDiffStd = _ratio("LogpDiffStd", "logp_diff_std")
LogpDiffMax = _ratio("LogpDiffMax", "logp_diff_max")
ConfidentDisagreementFraction = _ratio("ConfidentDisagreementFraction", "confident_disagreement_fraction")
ResponseMaxMean = _ratio("ResponseMaxMean", "response_max_mean")
ResponseMeanMean = _ratio("ResponseMeanMean", "response_mean_mean")
ResponseMaxProbDiffMean = _ratio("ResponseMaxProbDiffMean", "response_max_prob_diff_mean")
ResponseMeanProbDiffMean = _ratio("ResponseMeanProbDiffMean", "response_mean_prob_diff_mean")
ResponseMaxProbDiffAboveHalf = _ratio("ResponseMaxProbDiffAboveHalf", "response_max_prob_diff_above_half")
ESSProduct = _ratio("ESSProduct", "ess_sequence", better=True)
NonfiniteFraction = _ratio("NonfiniteFraction", "nonfinite_fraction")

RATIO_METRICS: Mapping[str, type[RatioMetric]] = by_quantity(classes_in(globals(), RatioMetric))
"""Key of ``offpolicy/mismatch/<key>`` -> class."""
