"""Every weight metric against its formula, spelled out in float64."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_offpolicy.metrics import WEIGHT_METRICS

NAN = float("nan")
RTOL = 2e-5  # row sums are float32


def naive(weights, mask):
    """{name: value} from lists of float64 numbers."""
    weights = weights.double().numpy()
    rows = []
    for i in range(len(mask)):
        row = [weights[i, t if weights.shape[1] > 1 else 0] for t in range(mask.shape[1]) if mask[i, t]]
        if row:
            rows.append(row)
    if not rows:
        return dict.fromkeys(WEIGHT_METRICS, 0.0)
    tokens, means = [w for row in rows for w in row], [sum(row) / len(row) for row in rows]
    return {
        "mean": np.mean(tokens),
        "std": np.std(tokens),
        "min": min(tokens),
        "max": max(tokens),
        "ess_token": _ess(tokens),
        "ess_sequence": _ess(means),
    }


def _ess(weights):
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def sample(seed=0, rows=11, length=30, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(rows, length, generator=generator) * spread).exp() * torch.rand(rows, 1, generator=generator)
    mask = torch.rand(rows, length, generator=generator) < torch.rand(rows, 1, generator=generator)
    mask[0], mask[-1] = True, False
    return torch.where(mask, weights, NAN), mask


def by_sequence():
    weights, mask = sample(1)
    weights = torch.rand(len(mask), 1, generator=torch.Generator().manual_seed(1)) * 3
    weights[-1] = NAN  # an empty row
    return weights, mask


def extreme():
    """From exp(-20) to exp(20)."""
    _, mask = sample(2)
    return (torch.rand(mask.shape, generator=torch.Generator().manual_seed(2)) * 40 - 20).exp(), mask


SAMPLES = {
    "ragged": sample,
    "by_sequence": by_sequence,
    "extreme": extreme,
    "bfloat16": lambda: (sample(3)[0].bfloat16(), sample(3)[1]),
    "some_zero": lambda: (sample(4)[0].clamp(max=0.3) * (sample(4)[0] < 0.3), sample(4)[1]),
    "integer_mask": lambda: (sample(5)[0], sample(5)[1].long()),
    "one_token": lambda: (torch.tensor([[0.25]]), torch.tensor([[True]])),
}


def value(name, *batches):
    metric = WEIGHT_METRICS[name]()
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


@pytest.mark.parametrize("case", SAMPLES)
@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_equals_the_formula(name, case):
    batch = SAMPLES[case]()
    got = value(name, batch)
    assert got.dtype == torch.float64 and got.shape == ()
    np.testing.assert_allclose(got.item(), naive(*batch)[name], rtol=RTOL, atol=1e-9)


def test_a_number_by_hand():
    weights, mask = torch.tensor([[0.5, 2.0, 7.0], [1.0, 7.0, 7.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert value("mean", (weights, mask)).item() == pytest.approx(3.5 / 3)
    assert value("ess_token", (weights, mask)).item() == pytest.approx(3.5**2 / (3 * 5.25))
    assert value("ess_sequence", (weights, mask)).item() == pytest.approx(2.25**2 / (2 * (1.25**2 + 1)))
    assert (value("min", (weights, mask)).item(), value("max", (weights, mask)).item()) == (0.5, 2.0)


@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_constant_weights(name):
    expected = {"mean": 0.75, "min": 0.75, "max": 0.75, "std": 0.0}.get(name, 1.0)
    assert value(name, (torch.full((3, 5), 0.75), torch.ones(3, 5).bool())).item() == expected


@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_responses_of_length_0(name):
    weights, mask = torch.ones(2, 0), torch.ones(2, 0).bool()
    assert value(name, (weights, mask), (torch.ones(2, 1), mask)).item() == 0
    assert value(name, sample(), (weights, mask)).item() == value(name, sample()).item()


@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_all_zero_or_no_token(name):
    zeros, all_tokens = torch.zeros(3, 5), torch.ones(3, 5).bool()
    assert value(name, (zeros, all_tokens)).item() == 0
    assert value(name, (zeros + NAN, ~all_tokens)).item() == 0
    assert value(name, (zeros[:, :1] + NAN, ~all_tokens)).item() == 0
    assert value(name, (zeros[:0], all_tokens[:0])).item() == 0
    empty = (zeros + NAN, ~all_tokens)
    assert value(name, empty, sample(), empty).item() == value(name, sample()).item()


@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_one_weight_a_sequence_is_the_same_on_each_of_its_tokens(name):
    weights, mask = by_sequence()
    wide = value(name, (weights.expand(mask.shape), mask)).item()
    assert value(name, (weights, mask)).item() == pytest.approx(wide, rel=RTOL)


@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_two_updates_are_one(name):
    weights, mask = sample()
    parts = (weights[:4], mask[:4]), (weights[4:], mask[4:])
    assert value(name, *parts).item() == pytest.approx(value(name, (weights, mask)).item(), rel=RTOL)


@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_autocast_changes_nothing(name):
    expected = value(name, sample()).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert value(name, sample()).item() == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=30))
def test_ess_is_a_fraction(weights):
    batch = (torch.tensor([weights]), torch.ones(1, len(weights)).bool())
    for name in ("ess_token", "ess_sequence"):
        got = value(name, batch).item()
        assert 0 <= got <= 1 and math.isfinite(got)


ONES = torch.ones(2, 3)
BAD = [
    (ONES[0], ONES.bool(), ValueError, "weights must have shape (B, T), but got (3,)."),
    (ONES, torch.ones(2, 4).bool(), ValueError, "mask must have shape (2, 3), but got (2, 4)."),
    (ONES[:, :1], torch.ones(3, 4).bool(), ValueError, "mask must have shape (2, T), but got (3, 4)."),
    (ONES.bool(), ONES, TypeError, "weights must be a floating point tensor, but got torch.bool."),
    (ONES, 1, TypeError, "mask must be a tensor, but got int."),
    (ONES, ONES * math.nan, ValueError, "mask must be a bool or 0/1 tensor, but got nan."),
    (ONES[:, :1], ONES * 7, ValueError, "mask must be a bool or 0/1 tensor, but got 7.0."),
]


@pytest.mark.parametrize(("weights", "mask", "error", "message"), BAD)
def test_bad_arguments(weights, mask, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        WEIGHT_METRICS["mean"]().update(weights, mask)


@pytest.mark.parametrize("name", WEIGHT_METRICS)
def test_a_batch_of_one_column_leaves_out_what_padding_holds(name):
    weights, mask = torch.tensor([[1.0], [math.nan]]), torch.tensor([[True], [False]])
    metric, alone = WEIGHT_METRICS[name](), WEIGHT_METRICS[name]()

    metric.update(weights, mask)
    alone.update(weights[:1], mask[:1])

    assert metric.compute() == alone.compute()
