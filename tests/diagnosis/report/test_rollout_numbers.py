from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trl_offpolicy.diagnosis.report import rollout_numbers as stats
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, read_rollouts


@pytest.fixture
def rollouts(write_run: Any, rollout_parts: Any) -> RecordedRollouts:
    found = read_rollouts(write_run([], rollout_parts))
    assert found is not None
    return found


def _tokens(
    log_ratio: Any, *, probability: Any = 0.5, position: Any = 0, weight: Any = 1.0, keep: Any = True
) -> RecordedRollouts:
    """One completion a token."""
    values = np.asarray(log_ratio, np.float32)
    n = len(values)
    return RecordedRollouts(
        steps=np.zeros(n, np.int64),
        trainable=np.ones(n, np.int64),
        kept=np.broadcast_to(keep, n).astype(np.int64),
        row=np.arange(n, dtype=np.int32),
        position=np.broadcast_to(position, n).astype(np.int32),
        sampling_logp=np.log(np.broadcast_to(probability, n)).astype(np.float32),
        log_ratio=values,
        weight=np.broadcast_to(weight, n).astype(np.float32),
        keep=np.broadcast_to(keep, n).astype(np.bool_),
        chunks=(),
    )


def test_kl_k1_is_the_mean_of_sampling_minus_old(rollouts: RecordedRollouts) -> None:
    assert stats.kl_k1(rollouts) == pytest.approx((math.log(2) - math.log(1.5)) / 3, rel=1e-5)


def test_histogram_counts_ratios_before_and_kept_weights_after() -> None:
    tokens = _tokens([0.0, 0.0, 0.1, -0.1], weight=[1.0, 0.0, 1.05, np.nan], keep=[True, True, True, True])
    histogram = stats.ratio_histogram(tokens)
    middle = stats.HISTOGRAM_BINS // 2
    limit = math.log(histogram.edges[-1])
    assert limit == pytest.approx(0.15, rel=1e-5)
    assert histogram.edges[0] == pytest.approx(math.exp(-limit))
    assert histogram.before[middle] == 2 and histogram.before.sum() == 4
    assert np.flatnonzero(histogram.before).tolist() == [middle - 20, middle, middle + 20]
    assert histogram.after is not None
    assert np.flatnonzero(histogram.after).tolist() == [middle, middle + 10]  # ln 1.05 = 0.0488
    assert (histogram.zero_weights, histogram.outside_before, histogram.outside_after) == (1, 0, 0)


def test_histogram_puts_the_tail_into_the_outermost_bars() -> None:
    log_ratio = np.full(10_000, 0.01)
    log_ratio[:3] = (-5.0, 5.0, 6.0)
    histogram = stats.ratio_histogram(_tokens(log_ratio, weight=2.0, keep=np.arange(10_000) < 7))
    assert histogram.edges[-1] == pytest.approx(math.exp(0.015), rel=1e-5)
    assert (histogram.before[0], histogram.before[-1], histogram.outside_before) == (1, 2, 3)
    assert histogram.after is not None
    assert (histogram.after[-1], histogram.after.sum(), histogram.outside_after) == (7, 7, 7)


def test_histogram_without_weights_or_without_mismatch() -> None:
    histogram = stats.ratio_histogram(_tokens([0.0, 0.0], weight=np.nan))
    assert histogram.after is None
    assert histogram.before[stats.HISTOGRAM_BINS // 2] == 2


def test_probability_grid_has_the_trainer_in_rows() -> None:
    grid = stats.probability_grid(_tokens(np.log([0.5, 1.0]), probability=[0.5, 1.0]))
    last = stats.GRID_BINS - 1
    assert grid.sum() == 2 and grid[last, last] == 1
    assert grid[int(0.25 * stats.GRID_BINS), int(0.5 * stats.GRID_BINS)] == 1


def test_mean_by_position_uses_absolute_log_ratios() -> None:
    means = stats.mean_by_position(_tokens([-0.1, 0.3, -0.4], position=[0, 0, 2]))
    # FEWEST_TOKENS is above all bins: the fullest ones are shown
    assert (means.low.tolist(), means.high.tolist(), means.tokens.tolist()) == ([0], [1], [2])
    assert means.mean == pytest.approx([0.2]) and means.left_out == 1


def test_mean_by_position_merges_long_responses_into_equal_bins() -> None:
    position = np.arange(stats.POSITION_BINS * 3)
    means = stats.mean_by_position(_tokens(position * 0.001, position=position))
    assert means.low.tolist() == list(range(0, stats.POSITION_BINS * 3, 3))
    np.testing.assert_allclose(means.mean, (means.low + 1) * 0.001, rtol=1e-5)


def test_mean_by_probability_splits_into_tenths() -> None:
    probability = np.linspace(0.1, 0.999, 100)
    means = stats.mean_by_probability(_tokens(-np.repeat(np.arange(10.0), 10), probability=probability))
    assert means.tokens.tolist() == [10] * 10
    np.testing.assert_allclose(means.mean, np.arange(10.0))
    assert (means.low[0], means.high[-1]) == (pytest.approx(0.1), pytest.approx(0.999))


def test_mean_by_probability_merges_tenths_that_are_all_one() -> None:
    probability = np.r_[np.full(80, 1.0), np.full(20, 0.5)]
    means = stats.mean_by_probability(_tokens(np.r_[np.full(80, 0.1), np.full(20, 0.2)], probability=probability))
    assert means.tokens.sum() == 100
    assert float((means.mean * means.tokens).sum()) == pytest.approx(80 * 0.1 + 20 * 0.2, rel=1e-5)
    only = stats.mean_by_probability(_tokens([0.1, 0.3], probability=1.0))
    assert only.mean == pytest.approx([0.2])


def test_sequence_points_are_geometric_means_over_observed_tokens(rollouts: RecordedRollouts) -> None:
    points = stats.sequence_points(rollouts)
    assert points.row.tolist() == [0, 2]
    assert points.length.tolist() == [2, 2]
    np.testing.assert_allclose(points.geometric_mean, [math.sqrt(0.5), 1.5], rtol=1e-5)
    assert points.state.tolist() == [stats.KEPT, stats.DROPPED]


def test_completion_states_tell_partly_from_wholly_dropped(rollouts: RecordedRollouts) -> None:
    changed = replace(rollouts, trainable=np.array([3, 3, 3]), kept=np.array([3, 1, 0]))
    assert stats.completion_states(changed).tolist() == [stats.KEPT, stats.PARTLY, stats.DROPPED]
    empty = replace(rollouts, trainable=np.array([0]), kept=np.array([0]))
    assert stats.completion_states(empty).tolist() == [stats.KEPT]


def test_largest_log_ratios_are_ordered_by_size() -> None:
    tokens = _tokens([0.1, -0.9, 0.5, -0.2])
    assert stats.largest_log_ratios(tokens, 2).tolist() == [1, 2]
    assert stats.largest_log_ratios(tokens, 10).tolist() == [1, 2, 3, 0]


def test_extreme_log_ratios_do_not_overflow() -> None:
    tokens = _tokens([1e6, -1e6])
    assert np.isfinite(stats.ratio_histogram(tokens).edges).all()
    assert np.isfinite(stats.sequence_points(tokens).geometric_mean).all()
