"""Additive moments: every diagnostic is a function of sums and maxima that merge over batches and ranks.

A pass over (B, T) tensors gives per-row sums (:func:`ratio_rows`); :func:`fold_ratio_rows` adds rows up and
derives the per-sequence quantities. Rows are kept apart because a sequence-level mask then costs no second pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import as_float, row_blocks
from trl_offpolicy.functional._shapes import check_mask, check_rows, check_tokens
from trl_offpolicy.functional.log_ratios import (
    LOG_RATIO_CLAMP,
    LogRatio,
    excess_of,
    exp_of,
    finite_or_zero,
    log_ratio,
    probability_difference,
)

HISTOGRAM_BINS = 240
HISTOGRAM_DECADES = (-8.0, 4.0)
_MAX_EXPONENT = 80.0  # nats; keeps perplexities of garbage log-probs finite
_MAX_PROBABILITY = 1e4
"""No probability is above 1. Those of garbage log-probs far above 0 are cut, so that sums of squares stay finite."""
HIGH_PROB_DIFF = 0.5
"""Largest |p_numerator - p_denominator| of a response from which Yao et al. 2025 call it high."""
CONFIDENT_LOGP, DISAGREEMENT = math.log(0.5), 2.0
"""A confident disagreement: the denominator gave the token at least this log-prob (a probability of a half), and the
numerator is more than this many nats below it."""
_DISAGREEING_EXCESS = math.expm1(-DISAGREEMENT)  # rho - 1 at that log-ratio
PRODUCT_RANGE = 300.0
"""A response's product of ratios is at most e^300, and 0 below e^-300, so that float64 holds sums of its square."""


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
        """The entry with this name, 0-d float64."""
        if name in self.layout.sums:
            return self.sums[self.layout.sums.index(name)]
        return self.maxima[self.layout.maxima.index(name)]

    @property
    def histogram(self) -> Tensor:
        """The counts after the named sums, (bins,) float64."""
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
    "excess_sq",  # the last of CORE_SUMS
    "excess_log_ratio",  # (rho - 1) l
    "logp",  # log-prob of the denominator
    "prob",  # its probability p
    "prob_sq",
    "prob_diff",  # p_numerator - p = p (rho - 1)
    "abs_prob_diff",
    "prob_diff_sq",
    "prob_prob_diff",
    "log_ratio_sq",
    "confident_disagreement",  # 1 where the denominator was confident and the numerator finds the token unlikely
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
    "row_max_abs_prob_diff",
    "row_mean_abs_prob_diff",
    "row_high_prob_diff",  # 1 where its largest is above HIGH_PROB_DIFF
    "product",  # of the response's ratios
    "product_sq",
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
    bins=2 * HISTOGRAM_BINS,  # of the responses' chi-square, then of their total variation
)


CORE_SUMS = _TOKEN_SUMS[: _TOKEN_SUMS.index("excess_sq") + 1]
"""The sums that need neither probabilities nor a second product: a third of a pass over the tokens."""
CORE_LAYOUT = Layout(sums=(*CORE_SUMS, "rows", "product", "product_sq"))


class RatioRows(NamedTuple):
    """Per-row sums (B, S) float64 in the order of the token sums, and maxima (B, 3): max l, max -l, max |dp|.

    Of a core pass the sums are :data:`CORE_SUMS` alone and the maxima (B, 0).
    """

    sums: Tensor
    maxima: Tensor


def is_core(rows: RatioRows) -> bool:
    """True if the rows are those of a core pass."""
    return rows.sums.shape[1] == len(CORE_SUMS)


def ratio_rows(
    ratio: LogRatio | Tensor, denominator: Tensor, mask: Tensor, lengths: Tensor | None = None, *, core: bool = False
) -> RatioRows:
    """One pass over the tokens, in blocks of rows: every row sum that a ratio diagnostic needs.

    rho - 1 is exact where the policies nearly agree, so KL k3 of a 1e-4 mismatch is not rounding noise.

    Args:
        ratio: log(numerator / denominator), from :func:`~trl_offpolicy.functional.log_ratios.log_ratio`; or the
            numerator's (B, T) log-probs, from which the log-ratio is made block by block and never held as a whole.
        denominator: (B, T) log-probs of the denominator, nats.
        mask: (B, T) bool, trainable tokens.
        lengths: (B,) float32, how many ``mask`` has in each row, where that is known.
        core: take only :data:`CORE_SUMS`.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, ratio=ratio.values if isinstance(ratio, LogRatio) else ratio, denominator=denominator)
    parts = []
    for block in row_blocks(mask.shape, mask.device):
        below, inside = denominator[block], mask[block]
        if isinstance(ratio, LogRatio):
            here = LogRatio(ratio.values[block], ratio.observed[block])
        else:
            here = log_ratio(ratio[block], below, inside)
        trainable = as_float(inside).sum(-1) if lengths is None else lengths[block]
        parts.append(_core_rows(here, trainable) if core else _block_rows(here, below, trainable))
    sums, maxima = (torch.cat(columns, dim=1).double().t() for columns in zip(*parts, strict=True))
    return RatioRows(sums, maxima)


def _core_rows(ratio: LogRatio, trainable: Tensor) -> tuple[Tensor, Tensor]:
    """:data:`CORE_SUMS` of one block, as :func:`_block_rows`."""
    log_ratios, observed = ratio
    excess, tokens = excess_of(log_ratios), as_float(observed).sum(-1)
    magnitudes = (log_ratios.abs().sum(-1), excess.abs().sum(-1))
    sums = [tokens, trainable - tokens, log_ratios.sum(-1), magnitudes[0], excess.sum(-1), magnitudes[1]]
    sums.append(dot(excess, excess))
    return _columns(sums), log_ratios.new_empty(0, len(log_ratios))


def _columns(parts: list[Tensor]) -> Tensor:
    """(K, rows) of K row sums, with one operation instead of the K + 1 of a stack."""
    return torch.cat(parts).view(len(parts), len(parts[0]))


def _block_rows(ratio: LogRatio, denominator: Tensor, trainable: Tensor) -> tuple[Tensor, Tensor]:
    """The sums (S, rows) and maxima (3, rows) of one block, float32.

    Everything is 0 outside the observed tokens, so no sum needs a mask.

    Products are taken by :func:`dot`, which holds no tensor of products. KL k3 and its reverse are not computed by
    token (:func:`~.kl.k3`): ``excess`` and ``log_ratios``, which other diagnostics need as well, add up to both.
    """
    log_ratios, observed = ratio
    here = as_float(observed)
    logp = finite_or_zero(denominator.float()).mul_(here)
    prob = exp_of(logp).clamp_(max=_MAX_PROBABILITY).mul_(here)
    excess = excess_of(log_ratios)  # rho - 1
    abs_excess, abs_log_ratio = excess.abs(), log_ratios.abs()
    highest = log_ratios.amax(-1)
    prob_diff = probability_difference(logp, prob, log_ratios, excess, largest=highest)
    abs_diff = prob_diff.abs()
    tokens = here.sum(-1)
    sums = [
        tokens,
        trainable - tokens,
        log_ratios.sum(-1),
        abs_log_ratio.sum(-1),
        excess.sum(-1),
        abs_excess.sum(-1),
        dot(excess, excess),
        dot(excess, log_ratios),
        logp.sum(-1),
        prob.sum(-1),
        dot(prob, prob),
        prob_diff.sum(-1),
        abs_diff.sum(-1),
        dot(prob_diff, prob_diff),
        dot(prob, prob_diff),
        dot(log_ratios, log_ratios),
    ]
    # Last and in place, because nothing else reads these two any more. Outside the observed tokens rho - 1 is 0.
    sums.append(dot(excess.lt_(_DISAGREEING_EXCESS), logp.ge_(CONFIDENT_LOGP)))
    maxima = [highest, -log_ratios.amin(-1), abs_diff.amax(-1)]
    return _columns(sums), _columns(maxima)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise dot product in float32, (B, T) to (B,); autocast would round its inputs to bfloat16."""
    with torch.autocast(left.device.type, enabled=False):
        product: Tensor = torch.linalg.vecdot(left, right)
    return product


ROW_LAYOUT = Layout(sums=_TOKEN_SUMS + _ROW_SUMS)
"""The additive entries of :data:`RATIO_LAYOUT` for one response at a time, without histogram and maxima."""


def ratio_row_moments(rows: RatioRows) -> Tensor:
    """Moments of each single response: (B, S) float64 in the order of :data:`ROW_LAYOUT`, 0 for an empty row."""
    tokens = rows.sums[:, :1]
    # Each sum by token becomes the response's mean; the log of its product of ratios stays a sum.
    means = rows.sums / tokens.clamp(min=1.0)
    log_ratio, abs_log_ratio, logp, abs_prob_diff = (
        means[:, _TOKEN_SUMS.index(name)] for name in ("log_ratio", "abs_log_ratio", "logp", "abs_prob_diff")
    )
    log_product, surprise = rows.sums[:, _TOKEN_SUMS.index("log_ratio")], -logp
    # Four exponentials in one call: both perplexities, their ratio, and the squared product (for the chi-square).
    squared = 2 * log_product.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    exponents = torch.stack([surprise, surprise - log_ratio, -log_ratio, squared], dim=-1)
    ppl_denominator, ppl_numerator, ppl_ratio, square = exponents.clamp_(max=_MAX_EXPONENT).exp_().unbind(-1)
    product = _products(log_product)
    per_row = torch.stack(
        [
            torch.ones_like(surprise),
            ppl_denominator,
            ppl_numerator,
            ppl_ratio,
            -log_ratio,
            log_ratio.abs(),
            square - 1,
            rows.maxima[:, :2].amax(-1),
            abs_log_ratio,
            rows.maxima[:, 2],
            abs_prob_diff,
            (rows.maxima[:, 2] > HIGH_PROB_DIFF).double(),
            product,
            product.square(),
        ],
        dim=-1,
    )
    return torch.cat([rows.sums, torch.where(tokens > 0, per_row, 0.0)], dim=-1)


def core_row_moments(rows: RatioRows) -> Tensor:
    """Moments of each single response: (B, S) float64 in the order of :data:`CORE_LAYOUT`, 0 for an empty row."""
    observed = (rows.sums[:, 0] > 0).double()
    product = observed * _products(rows.sums[:, CORE_SUMS.index("log_ratio")])
    return torch.cat([rows.sums, torch.stack([observed, product, product.square()], dim=-1)], dim=-1)


def _products(log_product: Tensor) -> Tensor:
    """The products of ratios, for their ESS (diagnostics.ess_product, the same as weights.ess_fraction_of_logs).

    Not clamped from below: products that all vanish must not look like equal weights.
    """
    return torch.where(log_product >= -PRODUCT_RANGE, log_product.clamp(max=PRODUCT_RANGE).exp(), 0.0)


def fold_ratio_rows(rows: RatioRows, keep_rows: Tensor | None = None, row_moments: Tensor | None = None) -> Moments:
    """Add the rows up. ``keep_rows`` leaves out some sequences without a second pass over the tokens.

    Args:
        rows: from :func:`ratio_rows`.
        keep_rows: (B,) bool, the sequences that count; None = all.
        row_moments: the same rows after :func:`ratio_row_moments`, where they are already known.
    """
    check_rows(len(rows.sums), keep_rows=keep_rows)
    row_moments = ratio_row_moments(rows) if row_moments is None else row_moments
    tokens, excess, abs_excess, excess_sq, difference = (
        row_moments[:, ROW_LAYOUT.sums.index(name)]
        for name in ("tokens", "excess", "abs_excess", "excess_sq", "log_ppl_diff")
    )
    active = tokens > 0  # a response without an observed token has no extremes and no place in a histogram
    kept = row_moments
    if keep_rows is not None:
        active = active & keep_rows
        kept = torch.where(keep_rows.unsqueeze(-1), row_moments, 0.0)

    # The additive moments, then the histograms of two numbers by response: chi-square E[rho^2] - 1 (from rho - 1, see
    # diagnostics.chi2_token) and total variation.
    by_response = torch.stack([excess_sq + 2 * excess, abs_excess / 2]) / tokens.clamp(min=1.0)
    sums = torch.cat([kept.sum(0), _log_histograms(by_response, active)])

    # Extremes: those over tokens, and the largest and smallest difference of perplexities. A minimum is kept as the
    # maximum of the negative value, so that all merge alike.
    tops = torch.cat([rows.maxima, torch.stack([difference, -difference], -1)], dim=-1)
    tops = torch.where(active.unsqueeze(-1), tops, -torch.inf)
    maxima = tops.amax(0) if len(tops) else tops.new_full((len(RATIO_LAYOUT.maxima),), -torch.inf)
    return Moments(RATIO_LAYOUT, sums, maxima)


def _log_histograms(values: Tensor, active: Tensor) -> Tensor:
    """(K * bins,) counts of each row of (K, B) values in equal bins of log10; at or below the first edge: bin 0."""
    first, last = HISTOGRAM_DECADES
    # The bin of each value, shifted by a whole histogram for each row of values: one index_add for all of them.
    position = (values.clamp(min=10.0**first).log10() - first) / (last - first)
    index = (position * HISTOGRAM_BINS).long().clamp(0, HISTOGRAM_BINS - 1)
    index += HISTOGRAM_BINS * torch.arange(len(values), device=values.device).unsqueeze(-1)
    counts = torch.zeros(HISTOGRAM_BINS * len(values), dtype=torch.float64, device=values.device)
    return counts.index_add_(0, index.flatten(), active.double().repeat(len(values)))


def histogram_quantile(counts: Tensor, quantile: float) -> Tensor:
    """Quantile of values binned by the log histogram: the upper edge of the bin (12 % wide); bin 0 reads 0."""
    first, last = HISTOGRAM_DECADES
    cumulative = counts.cumsum(0)
    index = (cumulative < quantile * cumulative[-1]).sum()
    edge = 10.0 ** (first + (index.double() + 1) * (last - first) / HISTOGRAM_BINS)
    return torch.where((index == 0) | (cumulative[-1] == 0), 0.0, edge)
