"""The variance of log products: by loops, over lengths, merged, and with responses left out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trl_offpolicy.functional.moments import ratio_rows
from trl_offpolicy.functional.sequence_ess import product_moments, product_variance
from trl_offpolicy.functional.weights import ess_fraction


def measured(log_ratios: Tensor, mask: Tensor, keep_rows: Tensor | None = None) -> float:
    denominator = torch.full_like(log_ratios, -1.0)
    return float(product_variance(product_moments(ratio_rows(denominator + log_ratios, denominator, mask), keep_rows)))


def by_loops(log_ratios: Tensor, mask: Tensor) -> float:
    rows = [[float(v) for v, here in zip(*pair, strict=True) if here] for pair in zip(log_ratios, mask, strict=True)]
    rows = [row for row in rows if row]
    tokens = sum(len(row) for row in rows)
    mean = sum(sum(row) for row in rows) / tokens
    spread = sum((sum(row) - len(row) * mean) ** 2 for row in rows)
    return len(rows) / (len(rows) - 1) * spread / tokens


def ragged(rows: int = 6, length: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (rows, 1), generator=generator)
    return 0.3 * torch.randn(rows, length, generator=generator) - 0.1, torch.arange(length) < lengths


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_formula(seed: int) -> None:
    log_ratios, mask = ragged(seed=seed)
    assert measured(log_ratios, mask) == pytest.approx(by_loops(log_ratios, mask), rel=1e-4)
    assert measured(-log_ratios, mask) == pytest.approx(by_loops(log_ratios, mask), rel=1e-4)
    keep = torch.tensor([True, True, True, True, False, False])
    assert measured(log_ratios, mask, keep) == pytest.approx(by_loops(log_ratios[:4], mask[:4]), rel=1e-4)


def test_a_shift_of_all_tokens_is_no_variance_and_one_of_whole_responses_is() -> None:
    """Responses that drift as wholes are counted with all their tokens: T times the variance of their shift."""
    mask = torch.ones(4, 10).bool()
    assert measured(torch.full((4, 10), -0.2), mask) == pytest.approx(0.0, abs=1e-6)
    shifts = torch.tensor([[0.1], [-0.1], [0.1], [-0.1]]).expand(4, 10)
    assert measured(shifts, mask) == pytest.approx(10 * 0.01 * 4 / 3, rel=1e-4)


def test_unequal_lengths_alone_are_no_variance() -> None:
    mask = torch.arange(8) < torch.tensor([[1], [8], [4]])
    assert measured(torch.full((3, 8), -0.2), mask) == pytest.approx(0.0, abs=1e-6)


def test_fewer_than_two_responses_give_0() -> None:
    log_ratios, mask = torch.randn(3, 4), torch.zeros(3, 4).bool()
    assert measured(log_ratios, mask) == 0.0
    mask[1] = True
    assert measured(log_ratios, mask) == 0.0


def test_moments_of_halves_merge() -> None:
    log_ratios, mask = ragged(rows=8)
    denominator = torch.full_like(log_ratios, -1.0)
    halves = [
        product_moments(ratio_rows(denominator[part] + log_ratios[part], denominator[part], mask[part]))
        for part in (slice(0, 3), slice(3, 8))
    ]
    assert float(product_variance(halves[0].merge(halves[1]))) == pytest.approx(by_loops(log_ratios, mask), rel=1e-4)


@pytest.mark.parametrize("length", [16, 256, 4096])
def test_neither_the_length_nor_the_number_of_responses_saturates_it(length: int) -> None:
    """Normal log-ratios of sd 0.1: D is 0.01 at every length. The ESS of whole products reaches its floor, 1 / N."""
    sd, rows = 0.1, 200
    noise = torch.randn(rows, length, generator=torch.Generator().manual_seed(length))
    log_ratios = sd * noise - sd**2 / 2
    variance = measured(log_ratios, torch.ones(rows, length).bool())
    assert variance == pytest.approx(sd**2, rel=0.3)
    weights = log_ratios.double().sum(-1).exp()
    share = float(ess_fraction(weights.sum(), weights.square().sum(), torch.tensor(float(rows))))
    if length == 16:  # few tokens: both agree
        assert math.exp(-length * variance) == pytest.approx(share, abs=0.05)
    if length == 4096:
        assert share < 3 / rows
