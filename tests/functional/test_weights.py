"""Truncated and masked importance weights."""

import pytest
import torch

from trl_offpolicy.functional.weights import band_weight, inside_band, truncate_weight

RATIO = torch.tensor([0.1, 0.5, 1.0, 2.0, 3.0])


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
    nan = torch.tensor([float("nan")])

    for low, high in ((0.5, 2.0), (None, 2.0), (0.5, None)):
        assert inside_band(nan, low=low, high=high).tolist() == [False]
        assert band_weight(nan, low=low, high=high).tolist() == [0.0]


def test_a_band_open_on_both_sides_is_refused():
    with pytest.raises(ValueError, match="low and high must not both be None"):
        inside_band(RATIO, low=None, high=None)


def test_input_is_not_mutated():
    before = RATIO.clone()

    truncate_weight(RATIO, max_weight=1.0, min_weight=0.5)
    band_weight(RATIO, low=0.5, high=1.0)

    assert torch.equal(RATIO, before)
