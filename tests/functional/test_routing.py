"""Agreement of two routings against a count in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from trl_offpolicy.functional.routing import (
    EXPERT_DIAGNOSTICS,
    ROUTING_DIAGNOSTICS,
    expert_flip_max,
    expert_flip_mean,
    expert_flip_rates,
    routing_agreement,
    routing_flip_fraction,
    routing_moments,
    stacked_layers,
)
from trl_offpolicy.metrics import ROUTING_METRICS, RoutingExpertFlipMax, routing_metrics

SHAPE = (3, 5, 2, 4)  # rows, positions, layers, experts of a token


def records(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two routings among six experts, some tokens unknown, and a mask."""
    chance = random.Random(seed)

    def one() -> list[int]:
        return [-1] * 4 if chance.random() < 0.2 else chance.sample(range(6), 4)

    first, second = (
        torch.tensor([[[one() for _ in range(2)] for _ in range(5)] for _ in range(3)], dtype=torch.int8)
        for _ in range(2)
    )
    second[0] = first[0].flip(-1)
    mask = torch.tensor([[chance.random() < 0.7 for _ in range(5)] for _ in range(3)])
    return first, second, mask


def counted(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    shares, flips = [], []
    for i, j, layer in ((i, j, layer) for i in range(3) for j in range(5) for layer in range(2)):
        one, other = set(first[i, j, layer].tolist()), set(second[i, j, layer].tolist())
        if mask[i, j] and -1 not in one | other:
            shares.append(len(one & other) / 4)
            flips.append(one != other)
    return sum(shares) / len(shares), sum(flips) / len(flips)


@pytest.mark.parametrize("seed", range(5))
def test_against_a_count(seed: int) -> None:
    first, second, mask = records(seed)
    m = routing_moments(first, second, mask)
    agreement, flips = counted(first, second, mask)
    assert 0 < flips < 1 and agreement < 1
    assert routing_agreement(m).item() == pytest.approx(agreement, abs=1e-7)
    assert routing_flip_fraction(m).item() == pytest.approx(flips, abs=1e-12)


def test_order_does_not_count() -> None:
    first, _, _ = records()
    known = routing_moments(first, first.flip(-1))
    assert routing_agreement(known) == 1 and routing_flip_fraction(known) == 0
    two_of_three = routing_moments(torch.tensor([[[[5, 1, 2]]]]), torch.tensor([[[[2, 7, 5]]]]))
    assert routing_agreement(two_of_three).item() == pytest.approx(2 / 3)


def test_parts_merge_to_the_whole() -> None:
    first, second, mask = records()
    whole = routing_moments(first, second, mask)
    parts = [routing_moments(first[i : i + 1], second[i : i + 1], mask[i : i + 1]) for i in range(3)]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    for finalize in ROUTING_DIAGNOSTICS.values():  # also of moments that were not counted by expert
        assert finalize(merged) == finalize(whole)
    by_layer = routing_moments(first[:, :, :1], second[:, :, :1], mask).merge(
        routing_moments(first[:, :, 1:], second[:, :, 1:], mask)
    )
    torch.testing.assert_close(by_layer.sums, whole.sums)


def by_expert(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    """Of each layer and expert: share of the known tokens that only one side sends there."""
    rates = []
    for layer in range(2):
        known = [
            (set(first[i, j, layer].tolist()), set(second[i, j, layer].tolist()))
            for i in range(3)
            for j in range(5)
            if mask[i, j] and -1 not in {*first[i, j].flatten().tolist(), *second[i, j].flatten().tolist()}
        ]
        rates.append([sum((e in one) != (e in other) for one, other in known) / len(known) for e in range(6)])
    return rates


@pytest.mark.parametrize("seed", range(3))
def test_flips_by_expert_against_a_count(seed: int) -> None:
    first, second, mask = records(seed)
    unknown = (first < 0).any(-1).any(-1) | (second < 0).any(-1).any(-1)  # a token is known in all layers or in none
    first[unknown] = -1
    m = routing_moments(first, second, mask, experts=6)
    expected = by_expert(first, second, mask)
    assert expert_flip_rates(m).view(2, 6).tolist() == [pytest.approx(row) for row in expected]
    delta = sum(map(sum, expected)) / 12
    assert expert_flip_mean(m).item() == pytest.approx(delta)
    assert delta == pytest.approx(2 * 4 * (1 - routing_agreement(m).item()) / 6, rel=1e-5)
    assert expert_flip_max(m).item() == pytest.approx(max(map(max, expected)))
    layers = [routing_moments(first[:, :, i : i + 1], second[:, :, i : i + 1], mask, experts=6) for i in range(2)]
    assert torch.equal(stacked_layers(layers).sums, m.sums) and stacked_layers(layers).layout == m.layout
    assert torch.equal(m.merge(m).maxima, m.maxima)  # the number of layers does not add up
    assert expert_flip_rates(m.merge(m)).tolist() == expert_flip_rates(m).tolist()


def test_experts_that_were_not_counted_have_no_rate() -> None:
    first, second, mask = records()
    with pytest.raises(ValueError, match=r"moments must be counted by expert \(experts=...\), but got none"):
        expert_flip_rates(routing_moments(first, second, mask))
    with pytest.raises(ValueError, match="layers and experts must be given together, but got None and None"):
        RoutingExpertFlipMax()
    with pytest.raises(ValueError, match="first must have 3 layers, but got 2"):
        RoutingExpertFlipMax(layers=3, experts=6).update(first, second, mask)
    assert set(routing_metrics(prefix="").keys()) == {"agreement", "flip_fraction"}


def test_nothing_to_compare() -> None:
    nothing = routing_moments(torch.full(SHAPE, -1), torch.zeros(SHAPE, dtype=torch.long))
    assert routing_agreement(nothing) == 1 and routing_flip_fraction(nothing) == 0


def test_metrics_are_shells_over_the_moments() -> None:
    first, second, mask = records()
    metrics = routing_metrics(layers=2, experts=6)
    for i in range(3):
        metrics.update(first[i : i + 1], second[i : i + 1], mask[i : i + 1])
    m = routing_moments(first, second, mask, experts=6)
    every = {**ROUTING_DIAGNOSTICS, **EXPERT_DIAGNOSTICS}
    assert metrics.compute() == {f"offpolicy/routing/{name}": f(m) for name, f in every.items()}
    assert ROUTING_METRICS.keys() == every.keys()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a, b, m: (a.float(), b, m), TypeError, "first must be a tensor of integers"),
        (
            lambda a, b, m: (a, b[:, :4], m),
            ValueError,
            r"second must have shape \(3, 5, 2, 4\), but got \(3, 4, 2, 4\)",
        ),
        (lambda a, b, m: (a[0], b[0], m), ValueError, r"first must have shape \(B, L, layers, k\)"),
        (lambda a, b, m: (a, b, m[:, :3]), ValueError, r"mask must have shape \(3, 5\), but got \(3, 3\)"),
    ],
)
def test_wrong_input_is_named(change, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        routing_metrics().update(*change(*records()))
