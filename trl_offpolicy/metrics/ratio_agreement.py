"""Agreement of both policies token by token, in probabilities and in nats.

Notation: rho = numerator / denominator (say pi_old / mu), l = log rho in nats clamped to +-20, E = mean over
observed trainable tokens, a_i and b_i = mean log-prob of response i under numerator and denominator. Tokens
with a non-finite log-ratio are left out. ``higher_is_better`` is None where the best value lies inside.
"""

from __future__ import annotations

from trl_offpolicy.functional import diagnostics
from trl_offpolicy.metrics.base import RatioMetric


class ProbDiffMean(RatioMetric):
    """Mean difference of the sampled token's two probabilities.

    Formula: E|p_numerator - p_denominator|.
    Unit: probability. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ProbDiffMean()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.1057, dtype=torch.float64)

    Reference: verl's rollout/actor probability metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.prob_diff_mean)


class ProbDiffMax(RatioMetric):
    """Largest difference of the sampled token's two probabilities.

    Formula: max |p_numerator - p_denominator|.
    Unit: probability. Normaliser: none (a maximum).

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ProbDiffMax()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.1723, dtype=torch.float64)

    Reference: verl's rollout/actor probability metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.prob_diff_max)


class ProbDiffStd(RatioMetric):
    """Standard deviation of the difference of the two probabilities.

    Formula: sqrt(E d^2 - (E d)^2), d = |p_numerator - p_denominator|.
    Unit: probability. Normaliser: observed trainable tokens (population form).

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ProbDiffStd()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.0756, dtype=torch.float64)

    Reference: verl's rollout/actor probability metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.prob_diff_std)


class ProbPearson(RatioMetric):
    """Pearson correlation of the two probabilities; without variance 1 if they agree, else 0.

    Formula: cov(p_numerator, p_denominator) / (std std).
    Unit: none, in [-1, 1]. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ProbPearson()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.9249, dtype=torch.float64)

    Reference: verl's rollout/actor probability metrics.
    """

    higher_is_better = True
    finalize = staticmethod(diagnostics.prob_pearson)


class LogpDiffMean(RatioMetric):
    """Mean absolute log-ratio.

    Formula: E|l|.
    Unit: nats. Normaliser: observed trainable tokens.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = LogpDiffMean()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)

    Reference: verl's rollout/actor probability metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.logp_diff_mean)


class LogpDiffMax(RatioMetric):
    """Largest absolute log-ratio, at most 20.

    Formula: max |l|.
    Unit: nats. Normaliser: none (a maximum).

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = LogpDiffMax()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)

    Reference: verl's rollout/actor probability metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.logp_diff_max)


class ResponseMaxMean(RatioMetric):
    """A response's largest absolute log-ratio, averaged over responses; grows with length.

    Formula: mean_i max_t |l_t|.
    Unit: nats. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ResponseMaxMean()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.3750, dtype=torch.float64)

    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (there in probabilities).
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.response_max_mean)


class ResponseMeanMean(RatioMetric):
    """A response's mean absolute log-ratio, averaged over responses.

    Formula: mean_i mean_t |l_t|.
    Unit: nats. Normaliser: responses with an observed trainable token.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ResponseMeanMean()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)

    Reference: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (there in probabilities).
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.response_mean_mean)


class NonfiniteFraction(RatioMetric):
    """Share of trainable tokens with a NaN or infinite log-ratio; all other diagnostics leave them out.

    Formula: #nonfinite / #trainable.
    Unit: share. Normaliser: trainable tokens, the non-finite ones included.

    Example:
        >>> import torch
        >>> old = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
        >>> sampling = torch.tensor([[-1.5, -2.0], [-0.25, -9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = NonfiniteFraction()
        >>> metric.update(old, sampling, mask)
        >>> metric.compute()
        tensor(0., dtype=torch.float64)

    Reference: -.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.nonfinite_fraction)
