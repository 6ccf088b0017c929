"""From a loss per token to one number, with the denominator in the name of the mode."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_mask, check_tokens_or_rows

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

        token_sum                 sum_i sum_t l_it
        token_mean                sum_i sum_t l_it / N               DAPO; BNPO where N is this call's
        seq_mean_token_mean       sum_i (sum_t l_it / n_i) / S       GRPO
        seq_mean_token_sum        sum_i sum_t l_it / S               LUSPO
        seq_mean_token_sum_norm   sum_i sum_t l_it / (L S)           Dr. GRPO

    where t runs over the n_i True tokens of row i, N is ``tokens``, S ``sequences`` and L ``max_length``.

    Args:
        per_token_loss: (B, T) float32; may hold anything where ``mask`` is False.
        mask: (B, T) bool, the tokens of the sum and, unless ``tokens`` says otherwise, of the denominator.
        mode: one of the names above.
        tokens: N; None = True tokens of ``mask``.
        sequences: S; None = B, empty rows included.
        max_length: L, at least 1; None = T.

    Returns:
        0-d; a denominator of 0 reads as 1.

    Raises:
        ValueError: an unknown mode, or a ``max_length`` below 1 that is read.
        TypeError: ``mask`` is not bool.

    Example:
        >>> aggregate_loss(torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]]),
        ...                "seq_mean_token_mean")
        tensor(3.5000)
    """
    check_mask(mask=mask)
    check_tokens_or_rows(mask.shape, per_token_loss=per_token_loss)
    inside = torch.where(mask, per_token_loss, 0.0)
    if mode == "token_sum":
        return inside.sum()
    if mode == "token_mean":
        return inside.sum() / _nonzero(mask.sum() if tokens is None else tokens)
    rows = inside.sum(-1)
    if mode == "seq_mean_token_mean":
        rows = rows / mask.sum(-1).clamp(min=1)
    elif mode == "seq_mean_token_sum_norm":
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, but got {max_length}.")
        rows = rows / _nonzero(float(mask.shape[1]) if max_length is None else max_length)
    elif mode != "seq_mean_token_sum":
        raise ValueError(f"aggregation must be one of {list(AGGREGATIONS)}, but got {mode!r}.")
    return rows.sum() / _nonzero(float(mask.shape[0]) if sequences is None else sequences)


def _nonzero(count: Tensor | float) -> Tensor | float:
    if isinstance(count, Tensor):
        return torch.where(count > 0, count, 1)
    return count or 1.0
