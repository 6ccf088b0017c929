"""Effective sample size of ratio products that neither the length of the responses nor their number saturates.

The ESS of products over whole responses (:func:`~.diagnostics.ess_product`) falls exponentially with the length, and an
estimate from N responses cannot fall below 1 / N. Over long responses it is near 1 / N under any mismatch, so it tells
a healthy run from a drifting one no more. The variance of the *logs* of the products has neither limit: it grows in
proportion to the length, so it can be quoted per token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.moments import _TOKEN_SUMS, Layout, Moments, RatioRows

PRODUCT_LAYOUT = Layout(sums=("rows", "tokens", "log_product", "tokens_sq", "log_product_tokens", "log_product_sq"))


def product_moments(rows: RatioRows, keep_rows: Tensor | None = None) -> Moments:
    """Moments of the responses' lengths T_i and of the logs L_i of their products of ratios.

    Args:
        rows: from :func:`~.moments.ratio_rows`.
        keep_rows: (B,) bool, the responses that count; None = all.
    """
    tokens = rows.sums[:, _TOKEN_SUMS.index("tokens")]
    log_product = rows.sums[:, _TOKEN_SUMS.index("log_ratio")]
    columns = [
        (tokens > 0).double(),
        tokens,
        log_product,
        tokens.square(),
        log_product * tokens,
        log_product.square(),
    ]
    values = torch.stack(columns, dim=-1)
    if keep_rows is not None:
        values = torch.where(keep_rows.unsqueeze(-1), values, 0.0)
    return Moments(PRODUCT_LAYOUT, values.sum(0), values.new_empty(0))


def product_variance(m: Moments) -> Tensor:
    r"""What a token adds to the variance of the log of its response's product of ratios, nats^2.

    .. math:: D = \frac{N}{N - 1} \frac{\sum_i (L_i - T_i \bar l)^2}{\sum_i T_i}

    where L_i is the sum of the T_i log-ratios of response i, N the number of responses and l-bar the mean log-ratio of
    a token. For independent tokens D is their variance, about twice the KL divergence of a token; log-ratios that drift
    together within a response make it larger. 0 with fewer than two responses.
    """
    tokens, rows = m["tokens"].clamp(min=1.0), m["rows"]
    mean = m["log_product"] / tokens
    squares = m["log_product_sq"] - 2 * mean * m["log_product_tokens"] + mean.square() * m["tokens_sq"]
    unbiased = rows / (rows - 1).clamp(min=1.0)
    # A difference of rounded sums: below 0 only by rounding.
    return torch.where(rows > 1, unbiased * (squares / tokens).clamp(min=0.0), 0.0)


PRODUCT_DIAGNOSTICS: Mapping[str, Finalizer] = {"product_variance": product_variance}
