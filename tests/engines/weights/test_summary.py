from __future__ import annotations

import pytest
import torch

from trl_offpolicy.engines.weights.summary import checksum, joined, sample_of, sample_places, summarise

LONG = 40_000  # more than two blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_changed_value_a_changed_place_and_a_changed_sign_change_the_checksum(dtype: torch.dtype) -> None:
    a = torch.randn(LONG).to(dtype)
    for place in (0, 1, LONG // 2, LONG - 1):
        other = a.clone()
        other[place] = other[place].nextafter(torch.tensor(9.0)) if dtype == torch.float32 else other[place] * 1.01 + 1
        assert checksum(other) != checksum(a)
        other[place] = -a[place]
        assert checksum(other) != checksum(a)
    assert checksum(a.clone()) == checksum(a.reshape(200, 200))
    assert checksum(a.roll(1)) != checksum(a) and checksum(a.flip(0)) != checksum(a)
    # the same place of another block is another place
    swapped = a.clone()
    swapped[[0, 1 << 14]] = a[[1 << 14, 0]]
    assert checksum(swapped) != checksum(a)


def test_both_zeros_count_as_one_and_dtypes_do_not() -> None:
    assert checksum(torch.tensor([0.0, 1.0])) == checksum(torch.tensor([-0.0, 1.0]))
    assert checksum(torch.tensor([1.0])) != checksum(torch.tensor([1.0], dtype=torch.bfloat16))


def test_without_order_only_the_values_count() -> None:
    a = torch.randn(LONG)
    padded = torch.cat([a[torch.randperm(LONG)], torch.zeros(100)])
    assert checksum(padded, ordered=False) == checksum(a, ordered=False) != checksum(a * 1.001, ordered=False)
    halves = [checksum(part, ordered=False) for part in a.split(LONG // 2)]
    assert joined(halves) == checksum(a, ordered=False)


def test_a_sample_is_spread_and_the_same_on_both_sides() -> None:
    assert len(sample_places(10**6, 1000).unique()) == 1000
    places = sample_places(49152 * 576, 4096)
    assert places.max() > 0.99 * 49152 * 576 and len((places % 576).unique()) > 500
    a = torch.randn(50, 50)
    assert sample_of(a, 10) == sample_of(a.reshape(-1), 10) != sample_of(a + 1, 10)
    assert summarise(a)["shape"] == [50, 50] and summarise(a)["dtype"] == "float32"
