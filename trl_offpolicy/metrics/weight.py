"""Health of importance weights.

w = weight, n = number of tokens of the mask: all trainable tokens for raw weights, kept ones for applied
weights. ``higher_is_better`` is None where the best value lies inside the range.
"""

from __future__ import annotations

from trl_offpolicy.functional import diagnostics
from trl_offpolicy.metrics.base import WeightMetric


class WeightMean(WeightMetric):
    """Mean weight; 1 for unbiased raw weights.

    Formula: sum w / n.
    Unit: none. Normaliser: the tokens of the mask.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0], [1.0, 9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = WeightMean()
        >>> metric.update(weights, mask)
        >>> metric.compute()
        tensor(1.1667, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = None
    finalize = staticmethod(diagnostics.weight_mean)


class WeightStd(WeightMetric):
    """Standard deviation of the weight.

    Formula: sqrt(E w^2 - (E w)^2).
    Unit: none. Normaliser: the tokens of the mask (population form).

    Example:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0], [1.0, 9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = WeightStd()
        >>> metric.update(weights, mask)
        >>> metric.compute()
        tensor(0.6236, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = False
    finalize = staticmethod(diagnostics.weight_std)


class WeightMin(WeightMetric):
    """Smallest weight.

    Formula: min w.
    Unit: none. Normaliser: none (a minimum).

    Example:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0], [1.0, 9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = WeightMin()
        >>> metric.update(weights, mask)
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = None
    finalize = staticmethod(diagnostics.weight_min)


class WeightMax(WeightMetric):
    """Largest weight.

    Formula: max w.
    Unit: none. Normaliser: none (a maximum).

    Example:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0], [1.0, 9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = WeightMax()
        >>> metric.update(weights, mask)
        >>> metric.compute()
        tensor(2., dtype=torch.float64)

    Reference: Li, Liu et al. 2025, "When speed kills stability"; verl's rollout-correction metrics.
    """

    higher_is_better = None
    finalize = staticmethod(diagnostics.weight_max)


class ESSToken(WeightMetric):
    """Effective sample size over tokens, as a fraction; 0 if every weight is 0.

    Formula: (sum w)^2 / (n sum w^2).
    Unit: share, in (0, 1]. Normaliser: the tokens of the mask.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0], [1.0, 9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ESSToken()
        >>> metric.update(weights, mask)
        >>> metric.compute()
        tensor(0.7778, dtype=torch.float64)

    Reference: Kong 1992, "A note on importance sampling using standardized weights".
    """

    higher_is_better = True
    finalize = staticmethod(diagnostics.ess_token)


class ESSSequence(WeightMetric):
    """Effective sample size over sequences, as a fraction, of each sequence's mean weight.

    Formula: (sum v)^2 / (N sum v^2), v_i = mean of w over the tokens of sequence i.
    Unit: share, in (0, 1]. Normaliser: sequences with a token in the mask.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[0.5, 2.0], [1.0, 9.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> metric = ESSSequence()
        >>> metric.update(weights, mask)
        >>> metric.compute()
        tensor(0.9878, dtype=torch.float64)

    Reference: Kong 1992, "A note on importance sampling using standardized weights".
    """

    higher_is_better = True
    finalize = staticmethod(diagnostics.ess_sequence)
