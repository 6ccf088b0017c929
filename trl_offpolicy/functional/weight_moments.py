"""Additive moments of importance weights, in one pass over the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import as_float, count_true, row_blocks
from trl_offpolicy.functional._shapes import check_mask, check_rows, check_tokens, check_tokens_or_rows
from trl_offpolicy.functional.moments import Layout, Moments, dot

WEIGHT_LAYOUT = Layout(
    sums=("tokens", "weight", "weight_sq", "rows", "row_weight", "row_weight_sq"),
    maxima=("weight_max", "weight_min_negated"),
)


class WeightRows(NamedTuple):
    """Moments of every response's weights: sums (B, 6) float64 as in the layout, maxima (B, 2): max w, max -w."""

    sums: Tensor
    maxima: Tensor


def weight_rows(mask: Tensor, *weights: Tensor, lengths: Tensor | None = None) -> list[WeightRows]:
    """One pass over the weights, in blocks of rows.

    Args:
        mask: (B, T) bool; rows without a True token have sums of 0 and maxima of minus infinity.
        weights: one or more (B, T) or (B, 1) float32, finite and not negative.
        lengths: (B,) number of True tokens of each row, if it is known.

    Returns:
        The rows of each of ``weights``. The sequence entries take each row's mean weight over its tokens (a
        sequence-level weight is its own mean).
    """
    check_mask(mask=mask)
    for weight in weights:
        check_tokens_or_rows(mask.shape, weights=weight)
    check_rows(len(mask), lengths=lengths)
    count = (count_true(mask) if lengths is None else lengths).double()
    by_token = [weight for weight in weights if _is_by_token(weight, mask)]
    blocks = [
        _block_weights(mask[block], [weight[block] for weight in by_token])
        for block in row_blocks(mask.shape, mask.device)
        if by_token
    ]
    # (W, B, 4) in the order of the weights by token; weights by row need no pass over the tokens.
    columns = iter(torch.cat(blocks, dim=1).double() if blocks else ())
    return [
        _with_means(count, *next(columns).unbind(-1)) if _is_by_token(weight, mask) else _constant(count, weight)
        for weight in weights
    ]


def cut_rows(mask: Tensor, raw: Tensor, bounded: Tensor) -> Tensor:
    """How many weights of each row differ from their ratio, and the mass that is cut off them: (2, B) float32.

    Args:
        mask: (B, T) bool.
        raw: (B, T) ratios, finite.
        bounded: (B, T) the same after caps and bands. Where it is larger than the ratio (a floor) no mass is cut.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, raw=raw, bounded=bounded)
    parts = []
    for block in row_blocks(mask.shape, mask.device):
        gap = (raw[block] - bounded[block]).mul_(as_float(mask[block]))
        cut = gap.clamp(min=0.0).sum(-1)
        parts.append(torch.stack([gap.ne_(0.0).sum(-1), cut]))
    return torch.cat(parts, dim=1)


def _is_by_token(weight: Tensor, mask: Tensor) -> bool:
    return weight.shape[-1] > 1 or mask.shape[-1] == 1


def _block_weights(mask: Tensor, weights: list[Tensor]) -> Tensor:
    """(W, rows, 4): row sums of w and w^2, row maximum and minimum over the True tokens."""
    here = as_float(mask)
    outside = (here - 1).mul_(-_LARGE)  # 0 on the tokens that count
    parts = []
    for weight in weights:
        inside = weight * here
        parts += [inside.sum(-1), dot(inside, inside), inside.amax(-1), inside.add_(outside).amin(-1)]
    return torch.cat(parts).view(len(weights), 4, len(mask)).mT


_LARGE = 1e38
"""Larger than every weight. It fills the places outside the mask when the smallest weight is looked for."""


def _with_means(count: Tensor, total: Tensor, squares: Tensor, top: Tensor, bottom: Tensor) -> WeightRows:
    active = count > 0
    mean = total / count.clamp(min=1.0)
    sums = torch.stack([count, total, squares, active.double(), mean, mean.square()], dim=-1)
    return WeightRows(sums, torch.where(active.unsqueeze(-1), torch.stack([top, -bottom], dim=-1), -torch.inf))


def _constant(count: Tensor, weight: Tensor) -> WeightRows:
    """The rows of a weight (B, 1), which is the same on every token of a row."""
    value = torch.where(count > 0, weight.squeeze(-1).double(), 0.0)
    return _with_means(count, value * count, value.square() * count, value, value)


def fold_weight_rows(rows: WeightRows, keep_rows: Tensor | None = None) -> Moments:
    """Add the rows up. ``keep_rows`` (B,) bool leaves out some sequences without a second pass over the tokens."""
    sums, maxima = rows
    if keep_rows is not None:
        sums = torch.where(keep_rows.unsqueeze(-1), sums, 0.0)
        maxima = torch.where(keep_rows.unsqueeze(-1), maxima, -torch.inf)
    return Moments(WEIGHT_LAYOUT, sums.sum(0), maxima.amax(0) if len(maxima) else maxima.new_full((2,), -torch.inf))


def weight_moments(weights: Tensor, mask: Tensor) -> Moments:
    """Moments of importance weights over the True tokens of ``mask``, whatever the others hold.

    The arguments are those of :func:`weight_rows`, but only the weights on True tokens need be finite.
    """
    check_tokens_or_rows(mask.shape, weights=weights)
    check_mask(mask=mask)
    inside = torch.where(mask, weights, 0.0) if _is_by_token(weights, mask) else weights
    (rows,) = weight_rows(mask, inside)
    return fold_weight_rows(rows)
