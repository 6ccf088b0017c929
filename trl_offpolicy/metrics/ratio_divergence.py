"""Divergences of two policies, estimated on the tokens that the denominator sampled.

Notation: rho = numerator / denominator (say pi_old / mu), l = log rho in nats clamped to +-20, E = mean over
observed trainable tokens, a_i and b_i = mean log-prob of response i under numerator and denominator. Tokens
with a non-finite log-ratio are left out. ``higher_is_better`` is None where the best value lies inside.
"""

from __future__ import annotations

from trl_offpolicy.functional import diagnostics
from trl_offpolicy.metrics.base import RatioMetric


class KLK1(RatioMetric):
    """KL(denominator || numerator) by the k1 estimator: unbiased, high variance, may be negative.

    Formula: E[-l].
    Unit: nats. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = KLK1()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(-0.0833, dtype=torch.float64)

    Reference: Schulman 2020, "Approximating KL divergence".
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.kl_k1)


class KLK3(RatioMetric):
    """KL(denominator || numerator) by the k3 estimator: unbiased, low variance, never negative.

    Formula: E[rho - 1 - l].
    Unit: nats. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = KLK3()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.0592, dtype=torch.float64)

    Reference: Schulman 2020, "Approximating KL divergence".
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.kl_k3)


class KLReverseK3(RatioMetric):
    """KL(numerator || denominator) by the k3 estimator, weighted by rho: unbiased, never negative.

    Formula: E[rho l - rho + 1].
    Unit: nats. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = KLReverseK3()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.0674, dtype=torch.float64)

    Reference: Schulman 2020, "Approximating KL divergence".
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.kl_reverse_k3)


class TotalVariation(RatioMetric):
    """Total variation distance of the next-token distributions: unbiased, bounds the bias of token weights.

    Formula: E|rho - 1| / 2.
    Unit: probability; an estimate may exceed 1. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = TotalVariation()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.1450, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability".
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.tv)


class Chi2Token(RatioMetric):
    """Chi-square divergence of a token: unbiased, the variance of token weights.

    Formula: E[rho^2] - 1.
    Unit: none. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = Chi2Token()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.4416, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.chi2_token)


class Chi2TokenP95(RatioMetric):
    """95th percentile over responses of the response's own token chi-square.

    Formula: Q95_i(E_i[rho^2] - 1), read from a histogram in log10: upper edge of a bin 12 % wide,
    below 1e-8 reads 0, above 1e4 reads 1e4.
    Unit: none. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = Chi2TokenP95()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.8913, dtype=torch.float64)

    Reference: Liu 2026, "Off-policy drift in LLM RL", problem 2.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.chi2_token_p95)


class ESSProduct(RatioMetric):
    """Effective sample size of the responses' products of ratios, as a fraction.

    Formula: (sum_i W_i)^2 / (N sum_i W_i^2), W_i = prod_t rho_t, at most e^300 and 0 below e^-300.
    Unit: share, in [0, 1]. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ESSProduct()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.8862, dtype=torch.float64)

    Reference: Kong 1992, "A note on importance sampling using standardized weights".
    """

    higher_is_better = True
    finalize = staticmethod(diagnostics.ess_product)


class Chi2Sequence(RatioMetric):
    """Chi-square divergence of whole responses: the variance of sequence weights.

    Formula: mean_i (prod_t rho_t)^2 - 1, the log product clamped to +-20 nats.
    Unit: none. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = Chi2Sequence()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.6624, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.chi2_sequence)
