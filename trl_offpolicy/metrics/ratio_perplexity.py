"""Perplexities of the sampled text under both policies.

Notation: rho = numerator / denominator (say pi_old / mu), l = log rho in nats clamped to +-20, E = mean over
observed trainable tokens, a_i and b_i = mean log-prob of response i under numerator and denominator. Tokens
with a non-finite log-ratio are left out. ``higher_is_better`` is None where the best value lies inside.
"""

from __future__ import annotations

from trl_offpolicy.functional import diagnostics
from trl_offpolicy.metrics.base import RatioMetric


class PPLSampling(RatioMetric):
    """Perplexity of the text under the denominator.

    Formula: mean_i exp(-b_i).
    Unit: perplexity. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = PPLSampling()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(3.5193, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.ppl_sampling)


class PPLOld(RatioMetric):
    """Perplexity of the text under the numerator.

    Formula: mean_i exp(-a_i).
    Unit: perplexity. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = PPLOld()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(3.0652, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.ppl_old)


class PPLRatio(RatioMetric):
    """Ratio of the perplexities: above 1 = the numerator finds the text less likely.

    Formula: mean_i exp(b_i - a_i).
    Unit: none (1 = equal). Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = PPLRatio()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(1.0314, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = None
    finalize = staticmethod(diagnostics.ppl_ratio)


class LogPPLDiff(RatioMetric):
    """Difference of the log-perplexities: positive = the numerator finds the text less likely.

    Formula: mean_i (b_i - a_i).
    Unit: nats. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = LogPPLDiff()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0., dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = None
    finalize = staticmethod(diagnostics.log_ppl_diff)


class LogPPLAbsDiff(RatioMetric):
    """Absolute difference of the log-perplexities.

    Formula: mean_i |b_i - a_i|.
    Unit: nats. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = LogPPLAbsDiff()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.log_ppl_abs_diff)


class LogPPLDiffMax(RatioMetric):
    """Largest difference of the log-perplexities.

    Formula: max_i (b_i - a_i).
    Unit: nats. Normaliser: none (a maximum).

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = LogPPLDiffMax()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = None
    finalize = staticmethod(diagnostics.log_ppl_diff_max)


class LogPPLDiffMin(RatioMetric):
    """Smallest difference of the log-perplexities.

    Formula: min_i (b_i - a_i).
    Unit: nats. Normaliser: none (a minimum).

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = LogPPLDiffMin()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(-0.2500, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = None
    finalize = staticmethod(diagnostics.log_ppl_diff_min)
