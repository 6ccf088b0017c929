"""Truncated, masked, shaped and prefix weights, and the cap that reaches an effective sample size."""

import math
from functools import partial

import plain
import pytest
import torch

from trl_offpolicy.functional.weights import (
    band_weight,
    ess_cap,
    ess_fraction,
    ess_fraction_of_logs,
    inside_band,
    prefix_bounds,
    prefix_min_weight,
    shaped_weight,
    truncate_weight,
)

NAN, INF = float("nan"), float("inf")
RATIO = torch.tensor([0.1, 0.5, 1.0, 2.0, 3.0])
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("max_weight", "min_weight", "expected"),
    [
        (2.0, None, [0.1, 0.5, 1.0, 2.0, 2.0]),
        (2.0, 0.5, [0.5, 0.5, 1.0, 2.0, 2.0]),
        (None, 0.5, [0.5, 0.5, 1.0, 2.0, 3.0]),
        (None, None, [0.1, 0.5, 1.0, 2.0, 3.0]),
    ],
)
def test_truncation_caps_and_floors(max_weight, min_weight, expected):
    weight = truncate_weight(RATIO, max_weight=max_weight, min_weight=min_weight)

    assert torch.equal(weight, torch.tensor(expected))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 2.0, [0.0, 0.5, 1.0, 2.0, 0.0]),  # both bounds are inside; inside the ratio stays raw
        (None, 2.0, [0.1, 0.5, 1.0, 2.0, 0.0]),
        (0.5, None, [0.0, 0.5, 1.0, 2.0, 3.0]),
        (1.0, 1.0, [0.0, 0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_band_is_zero_outside_and_inclusive(low, high, expected):
    assert torch.equal(band_weight(RATIO, low=low, high=high), torch.tensor(expected))


def test_nan_is_outside_every_band():
    nan = torch.tensor([NAN])

    for low, high in ((0.5, 2.0), (None, 2.0), (0.5, None)):
        assert inside_band(nan, low=low, high=high).tolist() == [False]
        assert band_weight(nan, low=low, high=high).tolist() == [0.0]


def test_a_band_open_on_both_sides_is_refused():
    with pytest.raises(ValueError, match="low and high must not both be None"):
        inside_band(RATIO, low=None, high=None)


# ----------------------------------------------------------------------------------------------------- prefix


@pytest.mark.parametrize(
    ("log_ratios", "mask", "expected"),
    [
        ([2.0, -1.0, 3.0, 0.5], [1, 1, 1, 1], [2.0, 1.0, 2.0, -0.5]),  # + 0, 2, -1, -1
        ([2.0, 5.0, NAN, 1.0], [0, 1, 0, 1], [0.0, 5.0, 0.0, 6.0]),  # padding is in nobody's prefix
        ([-3.0, -INF, 1.0, 4.0], [1, 0, 1, 1], [-3.0, 0.0, -2.0, 1.0]),
        ([0.5, 0.5, 0.5, 0.5], [1, 1, 1, 1], [0.5, 1.0, 1.0, 1.0]),  # all above 1: less than the prefix product
        ([NAN] * 4, [0] * 4, [0.0] * 4),
    ],
)
def test_prefix_min_adds_the_smallest_log_ratio_strictly_before(log_ratios, mask, expected):
    got = prefix_min_weight(torch.tensor([log_ratios]), torch.tensor([mask]).bool())

    assert got.tolist() == [expected]


def test_prefix_min_by_plain_loops():
    for seed in range(20):
        log_ratios, mask, _, _ = plain.random_case(seed)
        expected = torch.zeros_like(log_ratios)
        for b, t in mask.nonzero().tolist():
            before = [log_ratios[b, s].item() for s in range(t) if mask[b, s]]
            expected[b, t] = log_ratios[b, t].item() + min(before, default=0.0)

        close(prefix_min_weight(torch.where(mask, log_ratios, NAN), mask), expected)


def test_prefix_bounds_grow_with_the_root_of_the_tokens_so_far():
    low, high = prefix_bounds(torch.tensor([[1, 1, 0, 1, 1]]).bool(), low=0.5, high=4.0)

    roots = torch.tensor([[1.0, 2.0, 2.0, 3.0, 4.0]]).sqrt()  # padding does not count
    close(low, -math.log(2) * roots)
    close(high, 2 * math.log(2) * roots)


# ----------------------------------------------------------------------------------------------------- shaped


def test_shaped_weight_is_half_at_gamma_and_below_one():
    got = shaped_weight(torch.tensor([math.exp(-20), 0.25, 0.5, 1.5, math.exp(20)]), gamma=0.5)

    close(got, torch.tensor([2 * math.exp(-20), 1 / 3, 0.5, 0.75, 1.0]))


# -------------------------------------------------------------------------------------------------------- ESS


def test_ess_fraction_by_hand_of_equal_weights_and_of_none():
    total, squares = torch.tensor([4.0, 6.0, 0.0]), torch.tensor([10.0, 18.0, 0.0])  # (1, 3), (3, 3), (0, 0)

    close(ess_fraction(total, squares, 2), torch.tensor([0.8, 1.0, 0.0]))


def test_ess_of_logs_is_that_of_the_weights_and_does_not_overflow():
    logs = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()

    for shift in (0.0, 1000.0, -1000.0):
        assert ess_fraction_of_logs(logs + shift).item() == pytest.approx(plain.ess(logs.exp().tolist()), rel=1e-6)


def test_ess_cap_reaches_the_one_ess():
    ratios = (2 * torch.randn(200, generator=torch.Generator().manual_seed(1)).double()).exp()

    capped = ratios.clamp(max=ess_cap(ratios, target=0.6).double())

    assert ess_fraction(capped.sum(), capped.square().sum(), 200).item() == pytest.approx(0.6, rel=1e-5)


def test_ess_cap_by_hand():
    # (3 + C)^2 = 0.8 * 4 * (3 + C^2): 2.2 C^2 - 6 C + 0.6 = 0
    cap = ess_cap(torch.tensor([1.0, 9.0, 1.0, 1.0]), target=0.8)

    assert cap.item() == pytest.approx((6 + math.sqrt(36 - 5.28)) / 4.4, rel=1e-5)


@pytest.mark.parametrize("target", [0.05, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("count", [1, 2, 3, 30, 400])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_ess_cap_by_bisection(spread, count, target):
    generator = torch.Generator().manual_seed(count)
    ratios = (spread * torch.randn(count, generator=generator)).clamp(-20, 20).exp()

    cap = ess_cap(ratios, target=target).item()

    assert cap == pytest.approx(plain.ess_cap(ratios.tolist(), target), rel=1e-5)
    assert plain.ess([min(r, cap) for r in ratios.tolist()]) >= target * (1 - 1e-6)


@pytest.mark.parametrize("ratios", [[], [INF, NAN], [2.0, 2.0, INF, 2.0], [3.0, NAN], [1.0, 1.1]])
def test_no_cap_where_the_target_is_met(ratios):
    assert ess_cap(torch.tensor(ratios), target=0.9).item() == INF


def test_padding_does_not_count_and_order_does_not_matter():
    ratios = torch.tensor([5.0, 1.0, 1.0, 0.2, 5.0])
    padded = torch.tensor([INF, 1.0, 5.0, NAN, 0.2, 5.0, 1.0, INF])

    assert ess_cap(padded, target=0.8).item() == ess_cap(ratios, target=0.8).item()


def test_the_cap_is_exact_over_eighteen_decades():
    # (a + C)^2 = 1.8 (a^2 + C^2) has the root C = 2 a
    assert ess_cap(torch.tensor([1e-8, 4e8]), target=0.9).item() == pytest.approx(2e-8, rel=1e-5)


def test_equal_largest_ratios_are_capped_together():
    ratios = torch.tensor([1.0] * 6 + [50.0] * 2)

    cap = ess_cap(ratios, target=0.7).item()

    assert 1 < cap < 50
    assert plain.ess([min(r, cap) for r in ratios.tolist()]) == pytest.approx(0.7, rel=1e-5)


def test_a_target_of_nearly_one_caps_at_the_smallest_ratio():
    cap = ess_cap(torch.tensor([0.5, 3.0, 7.0]), target=math.nextafter(1, 0)).item()

    assert cap == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_ess_cap_of_other_dtypes(dtype):
    ratios = torch.tensor([1.0, 1.0, 1.0, 9.0])

    got = ess_cap(ratios.to(dtype), target=0.8)

    assert got.dtype == torch.float32
    assert got.item() == ess_cap(ratios, target=0.8).item()


def test_inputs_are_not_mutated():
    before = RATIO.clone()
    log_ratios, mask, _, _ = plain.random_case(0)
    kept = log_ratios.clone(), mask.clone()

    truncate_weight(RATIO, max_weight=1.0, min_weight=0.5)
    band_weight(RATIO, low=0.5, high=1.0)
    shaped_weight(RATIO, gamma=1.0)
    ess_cap(RATIO, target=0.9)
    prefix_min_weight(log_ratios, mask)
    prefix_bounds(mask, low=0.5, high=2.0)

    assert torch.equal(RATIO, before)
    assert torch.equal(log_ratios, kept[0]) and torch.equal(mask, kept[1])


@pytest.mark.parametrize("target", [0.0, 1.0, 2.0])
def test_an_ess_that_no_cap_reaches_is_refused(target):
    with pytest.raises(ValueError, match="target must be"):
        ess_cap(torch.ones(3), target=target)
