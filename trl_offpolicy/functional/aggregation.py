"""From a loss per token to one number, with the denominator said."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def aggregate_loss(
    per_token_loss: Tensor,
    mask: Tensor,
    mode: Aggregation,
    *,
    tokens: Tensor | float | None = None,
    sequences: Tensor | float | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Aggregate a loss per token; carries the gradient of ``per_token_loss``.

    Args:
        per_token_loss: (B, T) float32; may hold anything where ``mask`` is False.
        mask: (B, T) bool, the tokens of the sum and, unless ``tokens`` is given, of the denominator.
        mode: token_mean (DAPO; BNPO when ``tokens`` is None): sum / tokens. token_sum: no denominator.
            seq_mean_token_mean (GRPO): mean over B rows of the row's token mean. seq_mean_token_sum (LUSPO): mean
            over rows of the row's sum. seq_mean_token_sum_norm (Dr. GRPO): the latter / max_length.
        tokens: denominator of token_mean; None = True tokens of ``mask``.
        sequences: denominator of the sequence means; None = B, empty rows included.
        max_length: L of seq_mean_token_sum_norm; None = T.

    Returns:
        0-d; a denominator of 0 reads as 1.

    Example:
        >>> aggregate_loss(torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]]),
        ...                "seq_mean_token_mean")
        tensor(3.5000)
    """
    inside = torch.where(mask, per_token_loss, 0.0)
    if mode == "token_sum":
        return inside.sum()
    if mode == "token_mean":
        return inside.sum() / _nonzero(mask.sum() if tokens is None else tokens)
    rows = inside.sum(-1)
    if mode == "seq_mean_token_mean":
        rows = rows / mask.sum(-1).clamp(min=1)
    elif mode == "seq_mean_token_sum_norm":
        rows = rows / (mask.shape[1] if max_length is None else max_length)
    elif mode != "seq_mean_token_sum":
        raise ValueError(f"aggregation must be one of {list(AGGREGATIONS)}, but got {mode!r}.")
    return rows.sum() / _nonzero(float(mask.shape[0]) if sequences is None else sequences)


def _nonzero(count: Tensor | float) -> Tensor | float:
    return torch.where(count > 0, count, 1) if isinstance(count, Tensor) else count or 1.0
