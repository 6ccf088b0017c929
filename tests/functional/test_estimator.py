"""The bounds of bias and variance against sums over every response of a small process, in float64."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.certificates.mdp import Process, process, space
from trl_offpolicy.functional import estimator
from trl_offpolicy.functional.estimator import ESTIMATOR_LAYOUT, estimator_rows
from trl_offpolicy.functional.moments import Moments

DRIFTS = (0.05, 0.3, 1.0)
MASK = space(3, 4).mask


def weights_of(made: Process) -> dict[str, torch.Tensor]:
    """Weights of each kind of correction, (responses, 4) or (responses, 1)."""
    log_ratio = made.old - made.sampling
    token, product = log_ratio.exp(), log_ratio.sum(-1, keepdim=True).exp()
    geometric = (log_ratio.sum(-1, keepdim=True) / MASK.sum(-1, keepdim=True)).exp()
    inside = ((geometric > 0.8) & (geometric < 1.25)).double()
    return {
        "none": torch.ones_like(product),
        "product": product,
        "product cut at 2": product.clamp(max=2.0),
        "product cut at 1.2": product.clamp(max=1.2),
        "token": token,
        "token cut at 1.2": token.clamp(max=1.2),
        "icepop": torch.where((token > 0.5) & (token < 2.0), token, 0.0),
        "geometric mask": inside,
        "dropped": torch.zeros_like(product),
    }


def rows_of(made: Process, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_ratio = (made.old - made.sampling).float()
    return estimator_rows(log_ratio, weights.float(), MASK, made.advantages.unsqueeze(-1).float())


def expected(made: Process, weights: torch.Tensor) -> Moments:
    """Moments whose means are the expectations under the sampler."""
    sums, tops = rows_of(made, weights)
    return Moments(ESTIMATOR_LAYOUT, made.mu @ sums, tops.amax(0))


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("seed", range(3))
def test_bias_and_variance_stay_below_their_bounds(drift, seed):
    made = process(drift, seed)
    for name, weights in weights_of(made).items():
        found = expected(made, weights)
        bias, bound = made.bias(weights), float(estimator.bias_bound(found))
        assert bias <= bound + 1e-6, name
        assert made.variance(weights) <= float(estimator.variance_bound(found)) + 1e-6, name
    assert made.bias(weights_of(made)["product"]) < 1e-12  # the only weight without a bias, and the bound knows it
    assert float(estimator.bias_bound(expected(made, weights_of(made)["product"]))) < 1e-5


def test_the_bounds_are_not_vacuous():
    """The exact numbers reach a twentieth of their bounds, so that a bound far too large fails here."""
    made = process(1.0)
    for name, weights in weights_of(made).items():
        found = expected(made, weights)
        assert made.variance(weights) >= 0.05 * float(estimator.variance_bound(found)), name
    signs = torch.where((made.old - made.sampling).sum(-1) > 0, 1.0, -1.0).double()
    agree = Process(made.space, made.sampler, made.target, signs)
    found = expected(agree, weights_of(agree)["none"])
    assert agree.bias(weights_of(agree)["none"]) >= 0.05 * float(estimator.bias_bound(found))


@pytest.mark.parametrize("drift", DRIFTS)
def test_what_is_missed_by_its_definition(drift):
    made = process(drift)
    log_ratio = made.old - made.sampling
    product = log_ratio.sum(-1).exp()
    for name, weights in weights_of(made).items():
        by_token = torch.where(MASK, weights.expand(-1, 4), 0.0)
        counts = MASK.sum(-1)
        mean = float(made.mu @ (by_token.sum(-1) / counts))
        distance = (torch.where(MASK, (by_token - product.unsqueeze(-1)).abs(), 0.0).sum(-1) / counts) @ made.mu
        found = expected(made, weights)
        # E|w - W| by the expectation of a bounded quantity
        missed = float(estimator.missed(found))
        assert mean + 1 - 2 * (max(1.0, mean) - missed) == pytest.approx(float(distance), rel=1e-5, abs=1e-6), name
    variation = 0.5 * float((made.mu - made.old.sum(-1).exp()).abs().sum())
    assert float(estimator.missed(expected(made, weights_of(made)["none"]))) == pytest.approx(variation, rel=1e-5)
    cut = float(made.mu @ (product - 1.2).clamp(min=0.0))
    assert float(estimator.missed(expected(made, weights_of(made)["product cut at 1.2"]))) == pytest.approx(
        cut, rel=1e-4, abs=1e-6
    )
    assert float(estimator.missed(expected(made, weights_of(made)["dropped"]))) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("drift", DRIFTS)
def test_moments_by_hand(drift):
    made = process(drift)
    weights = weights_of(made)["token cut at 1.2"]
    used, counts = torch.where(MASK, weights, 0.0), MASK.sum(-1)
    found = expected(made, weights)
    square = float(made.mu @ (used.square().sum(-1) / counts))
    mean = float(made.mu @ (used.sum(-1) / counts))
    power = float(made.mu @ (made.advantages.square() * used.square().sum(-1) / counts))
    assert float(estimator.second_moment(found)) == pytest.approx(square, rel=1e-5)
    assert float(estimator.ess(found)) == pytest.approx(mean**2 / square, rel=1e-5)
    assert float(estimator.variance_bound(found)) == pytest.approx(2 * power, rel=1e-5)
    ratio = torch.where(MASK, (made.old - made.sampling).exp(), 0.0)
    larger = max(mean, float(made.mu @ (ratio.sum(-1) / counts)))
    overlap = float(made.mu @ (torch.minimum(used, ratio).sum(-1) / counts))
    assert float(estimator.missed_token(found)) == pytest.approx(larger - overlap, rel=1e-4, abs=1e-6)


def test_the_order_of_the_bounds_is_that_of_the_exact_bias():
    """A tighter cap misses more and varies less, exactly and by the bounds."""
    made = process(1.0)
    product = (made.old - made.sampling).sum(-1, keepdim=True).exp()
    caps = [product.clamp(max=cap) for cap in (1e9, 4.0, 2.0, 1.2, 1.0, 0.5)]
    for exact, bound, rises in (
        (made.bias, estimator.missed, True),
        (made.variance, estimator.variance_bound, False),
    ):
        by_sum = [exact(weights) for weights in caps]
        by_bound = [float(bound(expected(made, weights))) for weights in caps]
        assert by_sum == sorted(by_sum, reverse=not rises)
        assert by_bound == sorted(by_bound, reverse=not rises)
    assert by_sum[0] > 1.5 * by_sum[3]


def test_from_samples_the_estimates_come_near_the_expectations():
    made = process(0.7)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(made.mu, 20_000, replacement=True, generator=generator)
    for name, weights in weights_of(made).items():
        sums, tops = rows_of(made, weights)
        sampled = Moments(ESTIMATOR_LAYOUT, sums[drawn].sum(0), tops.amax(0))
        for quantity, finalize in estimator.ESTIMATOR_DIAGNOSTICS.items():
            exact, estimate = float(finalize(expected(made, weights))), float(finalize(sampled))
            assert estimate == pytest.approx(exact, rel=0.1, abs=0.03), (name, quantity)


@pytest.mark.parametrize("shift", [-0.03, 0.03])
@pytest.mark.parametrize("cap", [1.0, 2.0, math.inf])
def test_equal_weights_do_not_hide_that_the_products_are_off(shift, cap):
    """A thousand tokens whose ratios all are a little below 1 (above it: no sampler's log-probs): ESS 1, all missed."""
    log_ratios = torch.full((8, 1000), shift)
    product = log_ratios.sum(-1, keepdim=True).exp().clamp(max=cap)
    sums, tops = estimator_rows(log_ratios, product, torch.ones(8, 1000).bool(), torch.ones(8, 1))
    found = Moments(ESTIMATOR_LAYOUT, sums.sum(0), tops.amax(0))
    assert float(estimator.ess(found)) == pytest.approx(1.0)
    assert float(estimator.missed(found)) >= 1 - 1e-6


def test_padding_and_empty_rows_count_for_nothing():
    rho = torch.tensor([[2.0, 0.5, 7.0], [1.5, 1.0, 1.0], [3.0, 3.0, 3.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    garbage = torch.where(mask, torch.ones(3, 3), torch.nan)
    sums, tops = estimator_rows(torch.where(mask, rho.log(), torch.nan), garbage, mask, torch.full((3, 1), -2.0))
    assert sums[2].abs().sum() == 0 and tops[2] == 0
    found = Moments(ESTIMATOR_LAYOUT, sums.sum(0), tops.amax(0))
    mass = (1 + (1 + 0.5)) / 2  # the products are 1 and 1.5
    assert float(estimator.missed(found)) == pytest.approx(mass - 1, rel=1e-5)
    assert float(estimator.missed_token(found)) == pytest.approx((1.25 + 1.5) / 2 - (0.75 + 1) / 2, rel=1e-6)
    assert float(estimator.bias_bound(found)) == pytest.approx(math.sqrt(2) * 2 * (1 + mass - 2), rel=1e-5)
    nothing = Moments(ESTIMATOR_LAYOUT, sums[2], torch.full((1,), -torch.inf))
    assert {float(finalize(nothing)) for finalize in estimator.ESTIMATOR_DIAGNOSTICS.values()} == {0.0}
