"""A quantile equals torch's, to the bit, up to the number of values that torch takes; beyond, that of the formula."""

from __future__ import annotations

import math

import pytest
import torch

from trl_offpolicy.functional.quantiles import TORCH_LIMIT, quantile

NAN, INF = math.nan, math.inf
SHARES = (0.0, 0.1, 0.25, 1 / 3, 0.7, 1 - 0.3, 0.9999, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 11, 1000, 100_003])
def test_it_is_the_result_of_torch(count, dtype):
    values = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(count))
    for q in SHARES:
        assert torch.equal(quantile(values, q), torch.quantile(values, q)), q


@pytest.mark.parametrize(
    "values", [[NAN, 1.0, 2.0, 3.0], [NAN, NAN], [0.0, 1.0, INF], [-INF, 0.0, 1.0], [2.0, 2.0, 2.0, 1.0]]
)
def test_nan_infinities_and_ties_are_as_in_torch(values):
    given = torch.tensor(values)
    for q in SHARES:
        torch.testing.assert_close(quantile(given, q), torch.quantile(given, q), rtol=0, atol=0, equal_nan=True)


def test_beyond_the_limit_of_torch():
    """17 million and one values up to 0 in steps of 1/4; the rank 16,999,990.5 is none that float32 has."""
    values = torch.arange(-17_000_000, 1, dtype=torch.int32).float().div_(4).roll(1000)
    assert len(values) > TORCH_LIMIT
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    # 9.5 places below the largest: between -2.5 and -2.25
    assert quantile(values, 16_999_990.5 / 17_000_000).item() == pytest.approx(-2.375, abs=1e-6)


@pytest.mark.parametrize("values", [torch.zeros(0), torch.zeros(2, 2), torch.tensor(1.0)])
def test_what_is_no_vector_is_refused(values):
    with pytest.raises(ValueError, match=r"^values must be a vector with at least one entry, but got shape \("):
        quantile(values, 0.5)


def test_a_share_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"^q must be in \[0, 1\], but got 1\.5"):
        quantile(torch.zeros(3), 1.5)
