"""Bias, variance and progress of an estimator, from gradients of independent batches and their inner products.

With a_i the estimate of batch i (of n), o_i the on-policy estimate of the same prompts, J the true gradient and m the
estimator's mean:

    <x, y> of two means     sum_{i != j} x_i . y_j / (n (n - 1))          unbiased: no batch meets itself
    |Bias|^2 = |m - J|^2    the same with x = y = a - o: the oracle's own noise does not enter
    tr Var                  mean_i |a_i|^2 - <m, m>
    P                       <J, m>^2 / (tr Var + |Bias|^2)
    P, best step size       max over c of P(c a) = <J, m>^2 / (tr Var + |m|^2 - <J, m>^2 / |J|^2)

P is that of Liu 2026, "Off-policy drift in LLM RL", problem 1. It depends on the scale of the estimator, which a
learning rate absorbs; the last line does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Inner products of the means of an estimator and the oracle, each (R,) for R resamples."""

    mean_sq: Tensor
    inner: Tensor
    oracle_sq: Tensor
    bias_sq: Tensor
    variance: Tensor


def off_diagonal(products: Tensor, counts: Tensor) -> Tensor:
    """(R,): mean of ``products`` (n, n) over pairs of different batches, batch i counted ``counts[r, i]`` times."""
    pairs = torch.einsum("ri,ij,rj->r", counts, products, counts) - (counts**2) @ products.diagonal()
    return pairs / (counts.sum(1) ** 2 - (counts**2).sum(1))


def moments(estimates: Tensor, oracle: Tensor, counts: Tensor) -> Moments:
    """Of gradients ``estimates`` and ``oracle`` (n, P) of n batches, weighted by ``counts`` (R, n); in float64."""
    a, o = estimates.double(), oracle.double()
    counts = counts.double()
    own, apart = a @ a.T, (a - o) @ (a - o).T
    mean_sq = off_diagonal(own, counts)
    return Moments(
        mean_sq=mean_sq,
        inner=off_diagonal(a @ o.T, counts),
        oracle_sq=off_diagonal(o @ o.T, counts),
        bias_sq=off_diagonal(apart, counts),
        variance=counts @ own.diagonal() / counts.sum(1) - mean_sq,
    )


def progress(found: Moments, batches: float = 1.0) -> Tensor:
    """(R,): P of the mean of ``batches`` batches. A negative estimate of the squared bias counts as 0."""
    return found.inner.clamp(min=0) ** 2 / (found.variance / batches + found.bias_sq.clamp(min=0))


def scaled_progress(found: Moments, batches: float = 1.0) -> Tensor:
    """(R,): P of the best multiple of the estimator; what counts is the bias across the true gradient."""
    along = found.inner**2 / found.oracle_sq
    across = (found.mean_sq - along).clamp(min=0)
    return found.inner.clamp(min=0) ** 2 / (found.variance / batches + across)


def resamples(batches: int, count: int, seed: int = 0) -> Tensor:
    """(1 + count, n): every batch once, then how often each is in ``count`` bootstrap samples."""
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randint(batches, (count, batches), generator=chance)
    counts = torch.zeros(count, batches).scatter_add_(1, drawn, torch.ones(count, batches))
    return torch.cat([torch.ones(1, batches), counts])


class Spread(NamedTuple):
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def spread(values: Tensor) -> Spread:
    """From (1 + R,): the estimate first, then its resamples."""
    low, high = torch.quantile(values[1:], torch.tensor([0.025, 0.975], dtype=values.dtype))
    return Spread(float(values[0]), float(low), float(high))
