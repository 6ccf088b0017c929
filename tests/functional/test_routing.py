"""Agreement of two routings against a count in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from trl_offpolicy.functional.routing import (
    ROUTING_DIAGNOSTICS,
    routing_agreement,
    routing_flip_fraction,
    routing_moments,
    shared_experts,
)
from trl_offpolicy.metrics import ROUTING_METRICS, routing_metrics

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
    assert shared_experts(torch.tensor([5, 1, 2]), torch.tensor([2, 7, 5])).item() == pytest.approx(2 / 3)


def test_parts_merge_to_the_whole() -> None:
    first, second, mask = records()
    whole = routing_moments(first, second, mask)
    parts = [routing_moments(first[i : i + 1], second[i : i + 1], mask[i : i + 1]) for i in range(3)]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    for finalize in ROUTING_DIAGNOSTICS.values():
        assert finalize(merged) == finalize(whole)
    by_layer = routing_moments(first[:, :, :1], second[:, :, :1], mask).merge(
        routing_moments(first[:, :, 1:], second[:, :, 1:], mask)
    )
    torch.testing.assert_close(by_layer.sums, whole.sums)


def test_nothing_to_compare() -> None:
    nothing = routing_moments(torch.full(SHAPE, -1), torch.zeros(SHAPE, dtype=torch.long))
    assert routing_agreement(nothing) == 1 and routing_flip_fraction(nothing) == 0


def test_metrics_are_shells_over_the_moments() -> None:
    first, second, mask = records()
    metrics = routing_metrics()
    for i in range(3):
        metrics.update(first[i : i + 1], second[i : i + 1], mask[i : i + 1])
    m = routing_moments(first, second, mask)
    assert metrics.compute() == {f"offpolicy/routing/{name}": f(m) for name, f in ROUTING_DIAGNOSTICS.items()}
    assert ROUTING_METRICS.keys() == ROUTING_DIAGNOSTICS.keys()


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
