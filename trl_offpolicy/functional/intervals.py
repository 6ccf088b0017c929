"""Confidence intervals of diagnostics, clustered by prompt group.

Tokens of one response, and responses to one prompt, are not independent: an interval that counts tokens is far too
narrow. Here the group is the unit: its moments are added up, and the spread between groups gives the interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.moments import Layout, Moments

# 97.5 % quantile of Student's t for 1, 2, ... 30 degrees of freedom, then 1.96 (1 + 1.21 / dof + 1.44 / dof^2), good
# to 0.01 %.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t_quantile_975(degrees_of_freedom: int) -> float:
    """97.5 % quantile of Student's t distribution.

    Example:
        >>> t_quantile_975(4)
        2.776
    """
    if degrees_of_freedom <= len(_T_975):
        return _T_975[degrees_of_freedom - 1]
    return 1.959964 * (1 + 1.21036 / degrees_of_freedom + 1.4402 / degrees_of_freedom**2)


@dataclass(frozen=True)
class ClusterRows:
    """Moments of single responses, kept apart so that they can be grouped later.

    Args:
        layout: names of the columns; the first counts tokens.
        values: (N, S) float64, one row per response; a row without tokens is ignored.
        ids: (N,) int64 prompt group; None = every response is one group.
    """

    layout: Layout
    values: Tensor
    ids: Tensor | None

    def merge(self, other: ClusterRows) -> ClusterRows:
        """The responses of both objects in one.

        Raises:
            ValueError: only one side knows its groups.
        """
        if (self.ids is None) != (other.ids is None):
            raise ValueError("group_ids must be given for all batches of a logging window or for none.")
        ids = None if self.ids is None or other.ids is None else torch.cat([self.ids, other.ids])
        return ClusterRows(self.layout, torch.cat([self.values, other.values]), ids)

    def group_totals(self) -> Tensor:
        """(G, S) moments of the groups that have a token. Waits for the device."""
        counted = self.values[:, 0] > 0
        values = self.values[counted]
        if self.ids is None:
            return values
        groups, index = torch.unique(self.ids[counted], return_inverse=True)
        return values.new_zeros(len(groups), values.shape[1]).index_add_(0, index, values)


def half_width_95(finalize: Finalizer, layout: Layout, totals: Tensor) -> Tensor | None:
    """Half width of the 95 % interval of a diagnostic, by the delta method.

        t sqrt(G / (G - 1) sum_g (grad f . m_g)^2)

    where f is the diagnostic, m_g the moments of group g, G the number of groups, grad f the gradient at sum_g m_g and
    t the 97.5 % quantile of Student's t with G - 1 degrees of freedom. No mean is subtracted: f does not change when
    all moments are scaled, so the terms sum to 0. The interval is approximate: with few groups or heavy tails it is too
    narrow.

    Args:
        finalize: a ratio of sums (KL, chi-square, ESS, perplexity ratio, a fraction).
        layout: names of the S columns.
        totals: (G, S) float64.

    Returns:
        0-d float64; None with fewer than two groups.

    Reference: Cochran 1977, "Sampling techniques", ratio estimates of cluster samples (6.4, 9A).
    """
    if totals.dim() != 2 or totals.shape[1] != len(layout.sums):
        raise ValueError(f"totals must have shape (G, {len(layout.sums)}), but got {tuple(totals.shape)}.")
    count = len(totals)
    if count < 2:
        return None
    with torch.enable_grad():
        moments = totals.sum(0).detach().requires_grad_()
        value = finalize(Moments(layout, moments, totals.new_empty(0)))
        (slope,) = torch.autograd.grad(value, moments)
    variance = (totals @ slope).square().sum() * count / (count - 1)
    return t_quantile_975(count - 1) * variance.sqrt()
