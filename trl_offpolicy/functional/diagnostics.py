"""Every ratio and weight diagnostic as a pure function of moments.

Notation: rho = numerator / denominator on trainable tokens sampled by the denominator, l = log rho in nats; rho is
clamped to e^+-20, l is not. E is the mean over all observed trainable tokens of the sample (a mean of sums, never a
mean of means). a_i, b_i are a response's mean log-prob under numerator and denominator. Each function takes
:class:`Moments` and returns a 0-d float64 tensor; an empty sample gives 0.

The moments hold E[rho - 1], E[(rho - 1) l] and so on, from one pass over the tokens. So KL k3, its reverse and the
product's ESS are put together from means here instead of being called token by token; tests compare them with
:func:`~.kl.k3`, :func:`~.kl.reverse_k3` and :func:`~.weights.ess_fraction_of_logs`.

References: KL estimators k1, k3: Schulman 2020; the perplexity and chi-square set: Li, Liu et al. 2025 (verl's
rollout-correction metrics); ESS: Kong 1992.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trl_offpolicy.functional.moments import HISTOGRAM_BINS, Moments, histogram_quantile
from trl_offpolicy.functional.weights import ess_fraction

Finalizer = Callable[[Moments], Tensor]


def _mean(m: Moments, name: str, over: str = "tokens") -> Tensor:
    return m[name] / m[over].clamp(min=1.0)


def _std(m: Moments, squares: str, name: str) -> Tensor:
    """Standard deviation over tokens, population form."""
    return (_mean(m, squares) - _mean(m, name).square()).clamp(min=0.0).sqrt()


def _not_negative(difference: Tensor) -> Tensor:
    """A difference of float32 row sums that cannot be negative: rounding below 0 is cut off."""
    return difference.clamp(min=0.0)


def _maximum(m: Moments, name: str) -> Tensor:
    top = m[name]
    return torch.where(top > -torch.inf, top, 0.0)


def kl_k1(m: Moments) -> Tensor:
    """E[-l], nats: unbiased for KL(denominator || numerator), may be negative."""
    return -_mean(m, "log_ratio")


def kl_k3(m: Moments) -> Tensor:
    """E[rho - 1 - l], nats: unbiased for KL(denominator || numerator), never negative, low variance."""
    return _not_negative(_mean(m, "excess") - _mean(m, "log_ratio"))


def kl_reverse_k3(m: Moments) -> Tensor:
    """E[rho l - rho + 1], nats: unbiased for KL(numerator || denominator), never negative."""
    return _not_negative(_mean(m, "excess_log_ratio") + _mean(m, "log_ratio") - _mean(m, "excess"))


def tv(m: Moments) -> Tensor:
    """E|rho - 1| / 2: total variation distance of the next-token distributions, unbiased; an estimate may exceed 1."""
    return _mean(m, "abs_excess") / 2


def chi2_token(m: Moments) -> Tensor:
    """E[rho^2] - 1: chi-square divergence of a token."""
    return _mean(m, "excess_sq") + 2 * _mean(m, "excess")


def chi2_token_p95(m: Moments) -> Tensor:
    """95th percentile over responses of the response's own token chi-square (bins 12 % wide; below 1.1e-8 reads 0)."""
    return histogram_quantile(m.histogram[:HISTOGRAM_BINS], 0.95)


def tv_p95(m: Moments) -> Tensor:
    """95th percentile over responses of the response's own E_i|rho - 1| / 2 (bins as chi2_token_p95)."""
    return histogram_quantile(m.histogram[HISTOGRAM_BINS:], 0.95)


def chi2_sequence(m: Moments) -> Tensor:
    """Mean over responses of (product of rho)^2 - 1, the log product clamped to +-20 nats."""
    return _mean(m, "chi2_sequence", "rows")


def ppl_sampling(m: Moments) -> Tensor:
    """Mean over responses of exp(-b_i): perplexity under the denominator."""
    return _mean(m, "ppl_denominator", "rows")


def ppl_old(m: Moments) -> Tensor:
    """Mean over responses of exp(-a_i): perplexity under the numerator."""
    return _mean(m, "ppl_numerator", "rows")


def ppl_ratio(m: Moments) -> Tensor:
    """Mean over responses of exp(b_i - a_i); 1 = both find the text equally likely."""
    return _mean(m, "ppl_ratio", "rows")


def log_ppl_diff(m: Moments) -> Tensor:
    """Mean over responses of b_i - a_i, nats; positive = the numerator finds the text less likely."""
    return _mean(m, "log_ppl_diff", "rows")


def log_ppl_abs_diff(m: Moments) -> Tensor:
    """Mean over responses of |b_i - a_i|, nats."""
    return _mean(m, "abs_log_ppl_diff", "rows")


def log_ppl_diff_max(m: Moments) -> Tensor:
    """Largest b_i - a_i of a response, nats."""
    return _maximum(m, "log_ppl_diff_max")


def log_ppl_diff_min(m: Moments) -> Tensor:
    """Smallest b_i - a_i of a response, nats."""
    return -_maximum(m, "log_ppl_diff_min_negated")


def prob_diff_mean(m: Moments) -> Tensor:
    """E|p_numerator - p_denominator| of the sampled token, probability."""
    return _mean(m, "abs_prob_diff")


def prob_diff_max(m: Moments) -> Tensor:
    """Largest |p_numerator - p_denominator|, probability."""
    return _maximum(m, "abs_prob_diff_max")


def prob_diff_std(m: Moments) -> Tensor:
    """Standard deviation of |p_numerator - p_denominator| over tokens."""
    return _std(m, "prob_diff_sq", "abs_prob_diff")


def prob_pearson(m: Moments) -> Tensor:
    """Pearson correlation of the two probabilities over tokens; without variance: 1 if they agree, else 0.

    Without variance: less than 1e-5 of the mean square, as where every probability is near 1. The correlation would be
    rounding of the float32 sums, of any value. They agree where their mean squared difference is as small.
    """
    count = m["tokens"].clamp(min=1.0)
    mean, diff = m["prob"] / count, m["prob_diff"] / count
    variance = m["prob_sq"] / count - mean.square()
    covariance_diff = m["prob_prob_diff"] / count - mean * diff
    variance_diff = m["prob_diff_sq"] / count - diff.square()
    other_variance = variance + 2 * covariance_diff + variance_diff
    # Of the larger of the two mean squares, which bounds what rounding does to either variance.
    negligible = 1e-5 * torch.maximum(m["prob_sq"], m["prob_sq"] + 2 * m["prob_prob_diff"] + m["prob_diff_sq"]) / count
    varies = torch.minimum(variance, other_variance) > negligible
    product = torch.where(varies, variance * other_variance, 1.0)
    correlation = (variance + covariance_diff) / product.sqrt()
    agree = (m["prob_diff_sq"] / count <= negligible) & (m["tokens"] > 0)
    return torch.where(varies, correlation.clamp(-1.0, 1.0), agree.double())


def logp_diff_mean(m: Moments) -> Tensor:
    """E|l|, nats: mean size of the log-ratio of a token."""
    return _mean(m, "abs_log_ratio")


def logp_diff_std(m: Moments) -> Tensor:
    """Standard deviation of |l| over tokens, nats."""
    return _std(m, "log_ratio_sq", "abs_log_ratio")


def logp_diff_max(m: Moments) -> Tensor:
    """Largest |l| of a token of the sample, nats."""
    return torch.maximum(_maximum(m, "log_ratio_max"), _maximum(m, "log_ratio_min_negated"))


def confident_disagreement_fraction(m: Moments) -> Tensor:
    """Share of the tokens with p_denominator >= 0.5 and l < -2: the sampler was sure, and the numerator is not."""
    return _mean(m, "confident_disagreement")


def response_max_mean(m: Moments) -> Tensor:
    """Mean over responses of the response's largest |l|, nats."""
    return _mean(m, "row_max_abs_log_ratio", "rows")


def response_mean_mean(m: Moments) -> Tensor:
    """Mean over responses of the response's mean |l|, nats."""
    return _mean(m, "row_mean_abs_log_ratio", "rows")


def response_max_prob_diff_mean(m: Moments) -> Tensor:
    """Mean over responses of the response's largest |p_numerator - p_denominator|, probability."""
    return _mean(m, "row_max_abs_prob_diff", "rows")


def response_mean_prob_diff_mean(m: Moments) -> Tensor:
    """Mean over responses of the response's mean |p_numerator - p_denominator|, probability."""
    return _mean(m, "row_mean_abs_prob_diff", "rows")


def response_max_prob_diff_above_half(m: Moments) -> Tensor:
    """Share of the responses whose largest |p_numerator - p_denominator| is above 0.5."""
    return _mean(m, "row_high_prob_diff", "rows")


def ess_product(m: Moments) -> Tensor:
    """Effective sample size of the responses' products of rho, (sum W)^2 / (N sum W^2), a fraction in [0, 1].

    W is at most e^300 and counts as 0 below e^-300; 0 if every W does.
    """
    return ess_fraction(m["product"], m["product_sq"], m["rows"])


def nonfinite_fraction(m: Moments) -> Tensor:
    """Share of trainable tokens whose log-ratio was NaN or infinite; all other diagnostics leave them out."""
    return m["nonfinite"] / (m["tokens"] + m["nonfinite"]).clamp(min=1.0)


RATIO_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "ess_sequence" if function is ess_product else function.__name__: function
    for function in (
        kl_k1, kl_k3, kl_reverse_k3, tv, tv_p95, chi2_token, chi2_token_p95, chi2_sequence, ppl_sampling, ppl_old,
        ppl_ratio, log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min, prob_diff_mean, prob_diff_max,
        prob_diff_std, prob_pearson, logp_diff_mean, logp_diff_std, logp_diff_max, confident_disagreement_fraction,
        response_max_mean, response_mean_mean, response_max_prob_diff_mean, response_mean_prob_diff_mean,
        response_max_prob_diff_above_half, ess_product, nonfinite_fraction,
    )
}  # fmt: skip


def weight_mean(m: Moments) -> Tensor:
    """E[w], the mean weight over tokens."""
    return _mean(m, "weight")


def weight_std(m: Moments) -> Tensor:
    """Standard deviation of the weight over tokens."""
    return _std(m, "weight_sq", "weight")


def weight_min(m: Moments) -> Tensor:
    """Smallest weight w of a token in the sample."""
    return -_maximum(m, "weight_min_negated")


def weight_max(m: Moments) -> Tensor:
    """Largest weight w of a token in the sample."""
    return _maximum(m, "weight_max")


def ess_token(m: Moments) -> Tensor:
    """Effective sample size over tokens, (sum w)^2 / (n sum w^2), a fraction in [0, 1]; 0 if every weight is 0."""
    return ess_fraction(m["weight"], m["weight_sq"], m["tokens"])


def ess_sequence(m: Moments) -> Tensor:
    """Effective sample size over sequences, of each sequence's mean weight; a fraction in [0, 1]; 0 if all are 0.

    Of token weights the mean of a long response is near 1 however far its product is: see :func:`ess_product`.
    """
    return ess_fraction(m["row_weight"], m["row_weight_sq"], m["rows"])


WEIGHT_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "mean": weight_mean,
    "std": weight_std,
    "min": weight_min,
    "max": weight_max,
    "ess_token": ess_token,
    "ess_sequence": ess_sequence,
}


def fraction(numerator: str, denominator: str) -> Finalizer:
    """Finaliser of a share: the sum of ``numerator`` over the sum of ``denominator``, or 0 if that sum is 0."""

    def finalize(m: Moments) -> Tensor:
        total = m[denominator]
        return torch.where(total > 0, m[numerator] / torch.where(total > 0, total, 1.0), 0.0)

    finalize.__doc__ = f"sum of {numerator} / sum of {denominator}."
    return finalize
