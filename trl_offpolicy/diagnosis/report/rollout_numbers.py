"""Computes the numbers of the rollout figures, with pure functions of the recorded rollouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.run_folder.rollouts import RecordedRollouts

Array = NDArray[Any]

HISTOGRAM_BINS = 61
"""Odd, so that the ratio 1 sits in the middle of a bar."""
CORE_QUANTILE = 0.999
"""The histogram spans 1.5 times this quantile of |log-ratio|; the tail goes into the outermost bars."""
SMALLEST_LIMIT = 1e-3
"""Half-width of the histogram in nats where all ratios are 1."""
GRID_BINS = 50
POSITION_BINS = 64
FEWEST_TOKENS = 20
"""A mean over fewer tokens than this is not drawn, unless every bin is that small."""

KEPT, PARTLY, DROPPED = 0, 1, 2


class RatioHistogram(NamedTuple):
    """Counts over bins that are equal in log space. ``edges`` are ratios; the outermost bins also hold the tail.

    ``after`` counts the applied weights on kept tokens; None = no weight was recorded. ``zero_weights`` of them are 0
    and have no place on the axis.
    """

    edges: Array
    before: Array
    after: Array | None
    outside_before: int
    outside_after: int
    zero_weights: int


class BinnedMean(NamedTuple):
    """Mean |log-ratio| in nats over bins ``low <= x < high`` (the last one closed), and tokens per bin.

    ``left_out`` tokens lie in bins that hold too few for a mean and are not listed.
    """

    low: Array
    high: Array
    mean: Array
    tokens: Array
    left_out: int


class SequencePoints(NamedTuple):
    """One entry per completion with an observed token; ``state`` is KEPT, PARTLY or DROPPED."""

    row: Array
    length: Array
    geometric_mean: Array
    state: Array


def kl_k1(rollouts: RecordedRollouts) -> float:
    """KL(sampler || trainer) in nats per token over all observed tokens: mean of sampling - old."""
    return -float(np.mean(rollouts.log_ratio, dtype=np.float64))


def ratio_histogram(rollouts: RecordedRollouts) -> RatioHistogram:
    """Histogram of the token ratio old/sampling before, and of the applied weights on kept tokens after."""
    log_ratio = rollouts.log_ratio
    # The axis spans the bulk of the ratios, so that a few outliers do not flatten the rest.
    core = float(np.quantile(np.abs(log_ratio), CORE_QUANTILE))
    limit = min(max(1.5 * core, SMALLEST_LIMIT), LOG_RATIO_CLAMP)
    weights = rollouts.weight[rollouts.keep]
    weights = weights[np.isfinite(weights)]
    positive = np.log(weights[weights > 0])
    before, outside_before = _clipped_counts(log_ratio, limit)
    after, outside_after = _clipped_counts(positive, limit)
    return RatioHistogram(
        edges=np.exp(np.linspace(-limit, limit, HISTOGRAM_BINS + 1)),
        before=before,
        after=after if weights.size else None,
        outside_before=outside_before,
        outside_after=outside_after,
        zero_weights=int(weights.size - positive.size),
    )


def _clipped_counts(values: Array, limit: float) -> tuple[Array, int]:
    counts, _ = np.histogram(np.clip(values, -limit, limit), bins=HISTOGRAM_BINS, range=(-limit, limit))
    return counts, int(np.count_nonzero(np.abs(values) > limit))


def probability_grid(rollouts: RecordedRollouts) -> Array:
    """(GRID_BINS, GRID_BINS) token counts over [0, 1]: rows trainer, columns sampler probability."""
    sampler = _grid_index(np.exp(rollouts.sampling_logp))
    trainer = _grid_index(np.exp(rollouts.sampling_logp + rollouts.log_ratio))
    counts = np.bincount(trainer * GRID_BINS + sampler, minlength=GRID_BINS**2)
    return counts.reshape(GRID_BINS, GRID_BINS)


def _grid_index(probability: Array) -> Array:
    index: Array = np.clip(probability * GRID_BINS, 0, GRID_BINS - 1).astype(np.int32)
    return index


def mean_by_position(rollouts: RecordedRollouts) -> BinnedMean:
    """Mean |log-ratio| over the token's index in the response, in up to POSITION_BINS equal bins."""
    width = int(rollouts.position.max()) // POSITION_BINS + 1
    low = np.arange(0, int(rollouts.position.max()) + 1, width)
    return _binned_mean(rollouts, rollouts.position // width, low, low + width)


def mean_by_probability(rollouts: RecordedRollouts) -> BinnedMean:
    """Mean |log-ratio| in tenths of the tokens by sampler probability; tenths with equal edges are merged."""
    probability = np.exp(rollouts.sampling_logp)
    edges = np.unique(np.quantile(probability, np.linspace(0, 1, 11)))
    if edges.size == 1:  # every token has the same probability: one bin of no width
        edges = np.repeat(edges, 2)
    # Inner edges only, so that the smallest and the largest value fall into the outermost bins.
    index = np.searchsorted(edges[1:-1], probability, side="right")
    return _binned_mean(rollouts, index, edges[:-1], edges[1:])


def _binned_mean(rollouts: RecordedRollouts, index: Array, low: Array, high: Array) -> BinnedMean:
    tokens = np.bincount(index, minlength=len(low))
    total = np.bincount(index, weights=np.abs(rollouts.log_ratio), minlength=len(low))
    shown = tokens >= min(FEWEST_TOKENS, tokens.max())  # a run of few tokens is drawn all the same
    left_out = int(tokens[~shown].sum())
    return BinnedMean(low[shown], high[shown], total[shown] / tokens[shown], tokens[shown], left_out)


def sequence_points(rollouts: RecordedRollouts) -> SequencePoints:
    """Geometric mean of each completion's token ratios (log clamped to +-20), its length and its fate."""
    n = len(rollouts.steps)
    observed = np.bincount(rollouts.row, minlength=n)
    total = np.bincount(rollouts.row, weights=rollouts.log_ratio, minlength=n)
    row = np.flatnonzero(observed)
    return SequencePoints(
        row=row,
        length=rollouts.trainable[row],
        geometric_mean=np.exp(np.clip(total[row] / observed[row], -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)),
        state=completion_states(rollouts)[row],
    )


def completion_states(rollouts: RecordedRollouts) -> Array:
    """(N,) KEPT (all trainable tokens), PARTLY or DROPPED (none of at least one)."""
    lost = rollouts.kept < rollouts.trainable
    return np.where(lost, np.where(rollouts.kept == 0, DROPPED, PARTLY), KEPT)


def largest_log_ratios(rollouts: RecordedRollouts, count: int) -> Array:
    """Indices into the observed tokens of the ``count`` largest |log-ratio|, largest first."""
    size = np.abs(rollouts.log_ratio)
    top = np.argpartition(size, -count)[-count:] if count < size.size else np.arange(size.size)
    ordered: Array = top[np.argsort(-size[top], kind="stable")]
    return ordered
