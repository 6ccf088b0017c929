"""Additive moments: every diagnostic is a function of sums and maxima that merge over batches and ranks.

A pass over (B, T) tensors gives per-row sums (:func:`ratio_rows`); :func:`fold_ratio_rows` adds rows up and
derives the per-sequence quantities. Rows are kept apart because a sequence-level mask then costs no second pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, LogRatio

HISTOGRAM_BINS = 240
HISTOGRAM_DECADES = (-8.0, 4.0)
_MAX_EXPONENT = 80.0  # nats; keeps perplexities of garbage log-probs finite


@dataclass(frozen=True)
class Layout:
    """Names of the entries of a :class:`Moments`: additive sums, then ``bins`` histogram counts; and maxima."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...] = ()
    bins: int = 0


@dataclass(frozen=True)
class Moments:
    """Packed moments: ``sums`` (S,) float64 add up, ``maxima`` (M,) float64 take the maximum."""

    layout: Layout
    sums: Tensor
    maxima: Tensor

    def __getitem__(self, name: str) -> Tensor:
        """0-d float64 entry by name."""
        if name in self.layout.sums:
            return self.sums[self.layout.sums.index(name)]
        return self.maxima[self.layout.maxima.index(name)]

    @property
    def histogram(self) -> Tensor:
        """(bins,) float64 counts."""
        return self.sums[len(self.layout.sums) :]

    def merge(self, other: Moments) -> Moments:
        """Moments of the union of both samples.

        Raises:
            ValueError: the layouts differ.
        """
        if self.layout != other.layout:
            raise ValueError(f"layout must be {self.layout.sums}, but got {other.layout.sums}.")
        return Moments(self.layout, self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


def moments(layout: Layout, sums: list[Tensor], maxima: list[Tensor] | None = None) -> Moments:
    """Pack 0-d tensors (in the order of ``layout``) into a :class:`Moments` without histogram."""
    packed = torch.stack([value.to(torch.float64) for value in sums])
    tops = torch.stack([value.to(torch.float64) for value in maxima]) if maxima else packed.new_empty(0)
    return Moments(layout, packed, tops)


# ------------------------------------------------------------------------------------------- ratio of two policies

_TOKEN_SUMS = (
    "tokens",  # trainable tokens observed
    "nonfinite",  # trainable tokens whose log-ratio is not finite
    "log_ratio",  # l
    "abs_log_ratio",  # |l|
    "excess",  # rho - 1
    "abs_excess",
    "excess_sq",
    "excess_log_ratio",  # (rho - 1) l
    "logp",  # log-prob of the denominator
    "prob",  # its probability p
    "prob_sq",
    "prob_diff",  # p_numerator - p = p (rho - 1)
    "abs_prob_diff",
    "prob_diff_sq",
    "prob_prob_diff",
)
_ROW_SUMS = (
    "rows",  # sequences with at least one observed token
    "ppl_denominator",
    "ppl_numerator",
    "ppl_ratio",
    "log_ppl_diff",
    "abs_log_ppl_diff",
    "chi2_sequence",
    "row_max_abs_log_ratio",
    "row_mean_abs_log_ratio",
)
RATIO_LAYOUT = Layout(
    sums=_TOKEN_SUMS + _ROW_SUMS,
    maxima=(
        "log_ratio_max",
        "log_ratio_min_negated",
        "abs_prob_diff_max",
        "log_ppl_diff_max",
        "log_ppl_diff_min_negated",
    ),
    bins=HISTOGRAM_BINS,
)


class RatioRows(NamedTuple):
    """Per-row sums (B, 15) float64 in the order of the token sums, and maxima (B, 3): max l, max -l, max |dp|."""

    sums: Tensor
    maxima: Tensor


def ratio_rows(ratio: LogRatio, denominator: Tensor, mask: Tensor) -> RatioRows:
    """One pass over the tokens: every row sum that a ratio diagnostic needs.

    ``expm1`` keeps rho - 1 exact where the policies nearly agree, so KL k3 of a 1e-4 mismatch is not rounding noise.

    Args:
        ratio: log(numerator / denominator), from :func:`~trl_offpolicy.functional.log_ratios.log_ratio`.
        denominator: (B, T) log-probs of the denominator, nats.
        mask: (B, T) bool, trainable tokens.
    """
    log_ratios, observed = ratio
    logp = torch.where(observed, denominator.float(), 0.0)
    prob = torch.where(observed, logp, -torch.inf).exp_()
    excess = torch.expm1(log_ratios)
    prob_diff = prob * excess
    abs_log_ratio, abs_diff = log_ratios.abs(), prob_diff.abs()
    tokens = observed.sum(-1)
    sums = [
        tokens.float(),
        (mask.sum(-1) - tokens).float(),
        log_ratios.sum(-1),
        abs_log_ratio.sum(-1),
        excess.sum(-1),
        excess.abs().sum(-1),
        _dot(excess, excess),
        _dot(excess, log_ratios),
        logp.sum(-1),
        prob.sum(-1),
        _dot(prob, prob),
        prob_diff.sum(-1),
        abs_diff.sum(-1),
        _dot(prob_diff, prob_diff),
        _dot(prob, prob_diff),
    ]
    maxima = [log_ratios.amax(-1), -log_ratios.amin(-1), abs_diff.amax(-1)]
    return RatioRows(torch.stack(sums, -1).double(), torch.stack(maxima, -1).double())


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise dot product in float32; autocast would round its inputs to bfloat16."""
    with torch.autocast(left.device.type, enabled=False):
        product: Tensor = torch.linalg.vecdot(left, right)
    return product


ROW_LAYOUT = Layout(sums=_TOKEN_SUMS + _ROW_SUMS)
"""The additive entries of :data:`RATIO_LAYOUT` for one response at a time, without histogram and maxima."""


def ratio_row_moments(rows: RatioRows) -> Tensor:
    """Moments of every response by itself: (B, S) float64 in the order of :data:`ROW_LAYOUT`, 0 for an empty row."""
    column = dict(zip(_TOKEN_SUMS, rows.sums.unbind(-1), strict=True))
    active = column["tokens"] > 0
    count = column["tokens"].clamp(min=1.0)
    log_denominator, log_ratio = column["logp"] / count, column["log_ratio"] / count
    per_row = torch.stack(
        [
            torch.ones_like(count),
            (-log_denominator).clamp(max=_MAX_EXPONENT).exp(),
            (-log_denominator - log_ratio).clamp(max=_MAX_EXPONENT).exp(),
            (-log_ratio).exp(),
            -log_ratio,
            log_ratio.abs(),
            (2 * column["log_ratio"].clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).exp() - 1,
            rows.maxima[:, :2].amax(-1),
            column["abs_log_ratio"] / count,
        ],
        dim=-1,
    )
    return torch.cat([rows.sums, torch.where(active.unsqueeze(-1), per_row, 0.0)], dim=-1)


def fold_ratio_rows(rows: RatioRows, keep_rows: Tensor | None = None, row_moments: Tensor | None = None) -> Moments:
    """Add rows up; ``keep_rows`` (B,) bool restricts to some sequences at no extra pass over the tokens.

    Args:
        rows: from :func:`ratio_rows`.
        keep_rows: (B,) bool, or None for all.
        row_moments: the same rows through :func:`ratio_row_moments`, where they are known already.
    """
    row_moments = ratio_row_moments(rows) if row_moments is None else row_moments
    column = dict(zip(ROW_LAYOUT.sums, row_moments.unbind(-1), strict=True))
    active = column["tokens"] > 0
    kept = row_moments
    if keep_rows is not None:
        active = active & keep_rows
        kept = torch.where(keep_rows.unsqueeze(-1), row_moments, 0.0)
    chi2_row = (column["excess_sq"] + 2 * column["excess"]) / column["tokens"].clamp(min=1.0)
    difference = column["log_ppl_diff"]
    tops = torch.cat([rows.maxima, torch.stack([difference, -difference], -1)], dim=-1)
    sums = torch.cat([kept.sum(0), _log_histogram(chi2_row, active)])
    inside = active.unsqueeze(-1)
    maxima = torch.where(inside, tops, -torch.inf).amax(0) if len(tops) else tops.new_full((5,), -torch.inf)
    return Moments(RATIO_LAYOUT, sums, maxima)


def _log_histogram(values: Tensor, active: Tensor) -> Tensor:
    """Counts of (B,) values in equal bins of log10; at or below the first edge falls into bin 0."""
    first, last = HISTOGRAM_DECADES
    position = (values.clamp(min=10.0**first).log10() - first) / (last - first)
    index = (position * HISTOGRAM_BINS).long().clamp(0, HISTOGRAM_BINS - 1)
    return torch.zeros(HISTOGRAM_BINS, dtype=torch.float64, device=values.device).index_add_(0, index, active.double())


def histogram_quantile(counts: Tensor, quantile: float) -> Tensor:
    """Quantile of values binned by the log histogram: the upper edge of the bin (12 % wide); bin 0 reads 0."""
    first, last = HISTOGRAM_DECADES
    cumulative = counts.cumsum(0)
    index = (cumulative < quantile * cumulative[-1]).sum()
    edge = 10.0 ** (first + (index.double() + 1) * (last - first) / HISTOGRAM_BINS)
    return torch.where((index == 0) | (cumulative[-1] == 0), 0.0, edge)


# ------------------------------------------------------------------------------------------------------------ weights

WEIGHT_LAYOUT = Layout(
    sums=("tokens", "weight", "weight_sq", "rows", "row_weight", "row_weight_sq"),
    maxima=("weight_max", "weight_min_negated"),
)


def weight_row_moments(weights: Tensor, mask: Tensor) -> Tensor:
    """The additive moments of every response's weights by itself: (B, 6) float64 in the order of the weight layout.

    Args:
        weights: (B, T) or (B, 1) float32.
        mask: (B, T) bool; rows without a True token are 0.

    The sequence entries take each row's mean weight over its tokens (a sequence-level weight is its own mean).
    """
    count = mask.sum(-1).double()
    active = count > 0
    if weights.shape[-1] == 1:
        mean = torch.where(active, weights.squeeze(-1).double(), 0.0)
        total, squares = mean * count, mean.square() * count
    else:
        inside = torch.where(mask, weights, 0.0)
        total, squares = inside.sum(-1).double(), _dot(inside, inside).double()
        mean = total / count.clamp(min=1.0)
    return torch.stack([count, total, squares, active.double(), mean, mean.square()], dim=-1)


def weight_moments(weights: Tensor, mask: Tensor, row_moments: Tensor | None = None) -> Moments:
    """Moments of importance weights over the True tokens of ``mask``.

    Args:
        weights: (B, T) or (B, 1) float32.
        mask: (B, T) bool; rows without a True token are not counted.
        row_moments: the same through :func:`weight_row_moments`, where it is known already.
    """
    rows = weight_row_moments(weights, mask) if row_moments is None else row_moments
    if weights.shape[-1] == 1:
        low, high = _extrema(weights.squeeze(-1), mask.any(-1))
    else:
        low, high = _extrema(weights, mask)
    return Moments(WEIGHT_LAYOUT, rows.sum(0), torch.stack([high, -low]).double())


def _extrema(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.where(mask, values, torch.inf)
    high = torch.where(mask, values, -torch.inf)
    if values.numel() == 0:
        return values.new_tensor(torch.inf), values.new_tensor(-torch.inf)
    return low.amin(), high.amax()
