"""Age decay, its fit to a measured ESS, and draws without repetition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trl_offpolicy as op
from trl_offpolicy.rollouts.replay import AgeDecay, draw_without_repetition, ess_by_lag, fitted_decay


def test_priority_halves_every_half_life() -> None:
    decay = AgeDecay(rate=math.log(2) / 3)
    logs = decay.log_priorities(np.array([8.0, 8.0, 8.0]), np.array([10, 7, 4]), current_version=10)
    assert np.exp(logs) == pytest.approx([8.0, 4.0, 2.0])
    assert np.exp(AgeDecay().log_priorities(np.ones(1), np.array([0]), current_version=4)) == pytest.approx([0.5])
    assert AgeDecay(rate=0.0).log_priorities(np.ones(2), np.array([0, 9]), current_version=9).tolist() == [0.0, 0.0]


@given(rate=st.floats(0.001, 2.0), lags=st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True))
def test_fit_finds_the_rate_of_an_exponential_fall(rate: float, lags: list[int]) -> None:
    ess = {0: 1.0} | {lag: max(math.exp(-rate * lag), 1e-300) for lag in lags}
    assert fitted_decay(ess).rate == pytest.approx(rate, rel=1e-5)


def test_fit_weighs_long_lags_more() -> None:
    """Least squares through the origin: (1 * 0.5 + 3 * 0.3) / (1 + 9)."""
    assert fitted_decay({1: math.exp(-0.5), 3: math.exp(-0.3)}).rate == pytest.approx(0.14)
    assert fitted_decay({2: 1.0}).rate == 0.0


@pytest.mark.parametrize(
    ("ess", "message"),
    [
        ({0: 1.0}, "lag above 0"),
        ({-1: 0.5}, "at least 0, but got -1"),
        ({1: 0.0}, "got 0.0 at lag 1"),
        ({1: 1.1}, "1.1"),
    ],
)
def test_fit_refuses_what_is_no_ess(ess: dict[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted_decay(ess)


def test_decay_refuses_wrong_rates_and_groups_from_the_future() -> None:
    with pytest.raises(ValueError, match="rate must be at least 0, but got -1"):
        AgeDecay(rate=-1.0)
    with pytest.raises(ValueError, match="rate must be a finite number"):
        AgeDecay(rate=math.nan)
    with pytest.raises(ValueError, match="stored group, 7, but got 5"):
        AgeDecay().log_priorities(np.ones(2), np.array([3, 7]), current_version=5)


def test_ess_by_lag_of_known_ratios() -> None:
    """Ratios 2 and 1 at lag 0 (ESS 9 / (2 * 5)), 1 and 1 at lag 3; padding and its version do not count."""
    logs = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 7.0]]).log()
    batch = op.PolicyBatch(
        per_token_logps=logs - 1.0,
        sampling_per_token_logps=torch.full((2, 3), -1.0),
        completion_mask=torch.tensor([[1, 1, 0], [1, 1, 0]]).bool(),
        advantages=torch.ones(2),
        policy_versions=torch.tensor([[5, 5, 0], [2, 4, 0]]),
        current_version=5,
    )
    assert ess_by_lag(batch) == pytest.approx({0: 9 / 10, 3: 1.0})
    assert ess_by_lag(batch, level="sequence") == pytest.approx({0: 1.0, 3: 1.0})
    with pytest.raises(ValueError, match="level must be"):
        ess_by_lag(batch, level="turn")


def test_ess_of_a_random_walk_gives_back_its_variance() -> None:
    """Log-ratios of age a are normal with variance s a and mean -s a / 2: the fitted rate is s."""
    generator, variance = torch.Generator().manual_seed(0), 0.05
    ages = torch.arange(1, 9).repeat_interleave(20_000)
    logs = (variance * ages).sqrt() * torch.randn(len(ages), generator=generator) - variance * ages / 2
    batch = op.PolicyBatch(
        per_token_logps=logs.unsqueeze(1) - 3.0,
        sampling_per_token_logps=torch.full((len(ages), 1), -3.0),
        completion_mask=torch.ones(len(ages), 1).bool(),
        advantages=torch.ones(len(ages)),
        policy_versions=-ages,
        current_version=0,
    )
    assert fitted_decay(ess_by_lag(batch)).rate == pytest.approx(variance, rel=0.05)


@given(
    logs=st.lists(st.floats(-20.0, 20.0), min_size=1, max_size=30),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_draw_never_repeats_and_its_weights_are_positive(logs: list[float], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(logs)))
    drawn = draw_without_repetition(np.array(logs), count, np.random.default_rng(seed))
    assert len(set(drawn.places.tolist())) == count and drawn.places.min() >= 0 and drawn.places.max() < len(logs)
    assert (drawn.weights >= count / len(logs) * (1 - 1e-12)).all() and np.isfinite(drawn.weights).all()


def test_the_first_place_is_drawn_by_priority() -> None:
    logs, rng = np.log([1.0, 2.0, 5.0]), np.random.default_rng(0)
    first = [draw_without_repetition(logs, 2, rng).places[0] for _ in range(8_000)]
    assert np.bincount(first) / len(first) == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.02)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_weights_make_the_mean_of_a_draw_that_of_the_buffer(count: int) -> None:
    rng = np.random.default_rng(0)
    logs, values = np.log([1.0, 0.5, 4.0, 2.0, 0.7]), np.array([3.0, -1.0, 2.0, 0.5, 10.0])
    estimates = []
    for _ in range(8_000):
        drawn = draw_without_repetition(logs, count, rng)
        estimates.append(np.mean(drawn.weights * values[drawn.places]))
    error = 4 * np.std(estimates) / math.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(values.mean(), abs=error)


def test_impossible_draws_are_refused() -> None:
    rng = np.random.default_rng(0)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"from 1 to 3, the groups there are, but got {count}"):
            draw_without_repetition(np.zeros(3), count, rng)
    with pytest.raises(ValueError, match="must be finite"):
        draw_without_repetition(np.array([0.0, np.nan]), 1, rng)
