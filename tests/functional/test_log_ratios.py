"""Log-ratios: the sign, the clamp, and what is not finite."""

import pytest
import torch

from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, excess_of, log_ratio, ratio_of

NAN, INF = float("nan"), float("inf")


def test_is_numerator_minus_denominator():
    ratio = log_ratio(torch.tensor([[-1.0, -2.5]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2).bool())

    assert ratio.values.tolist() == [[0.5, -0.5]]  # -1 + 1.5 and -2.5 + 2
    assert ratio.observed.tolist() == [[True, True]]


def test_is_as_it_is_up_to_10000_nats_and_its_ratio_clamped_to_20():
    lowest = torch.finfo(torch.float32).min
    numerator = torch.tensor([[0.0, -30.0, 0.0, lowest, 0.0]])
    denominator = torch.tensor([[-30.0, 0.0, lowest, 0.0, -19.5]])

    values = log_ratio(numerator, denominator, torch.ones(1, 5).bool()).values

    assert LOG_RATIO_CLAMP == 20.0
    assert values.tolist() == [[30.0, -30.0, 1e4, -1e4, 19.5]]
    held = torch.tensor([[20.0, -20.0, 20.0, -20.0, 19.5]])
    torch.testing.assert_close(ratio_of(values), held.exp(), rtol=1e-6, atol=0)
    torch.testing.assert_close(excess_of(values), held.expm1(), rtol=1e-6, atol=0)


def test_padding_is_zero_and_not_observed_whatever_it_holds():
    numerator = torch.tensor([[-1.0, NAN, INF, -7.0]])
    denominator = torch.tensor([[-3.0, -1.0, INF, -1.0]])

    ratio = log_ratio(numerator, denominator, torch.tensor([[True, False, False, False]]))

    assert ratio.values.tolist() == [[2.0, 0.0, 0.0, 0.0]]
    assert ratio.observed.tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_not_finite_reads_zero_and_not_observed(bad, side):
    policies = [torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -4.0]])]
    policies[side][0, 0] = bad

    ratio = log_ratio(*policies, torch.ones(1, 2).bool())

    assert ratio.values.tolist() == [[0.0, 2.0]]
    assert ratio.observed.tolist() == [[False, True]]


def test_two_infinities_are_not_observed():
    both = torch.tensor([[-INF, INF]])  # inf - inf is NaN

    assert log_ratio(both, both, torch.ones(1, 2).bool()).observed.tolist() == [[False, False]]


def test_bfloat16_is_cast_before_the_subtraction():
    numerator = torch.tensor([[-0.03125]], dtype=torch.bfloat16)
    denominator = torch.tensor([[-16.0]], dtype=torch.bfloat16)

    values = log_ratio(numerator, denominator, torch.ones(1, 1).bool()).values

    assert values.dtype == torch.float32
    assert values.item() == 15.96875  # needs 9 bits: bfloat16 arithmetic would say 16


def test_no_gradient_flows_and_inputs_stay_as_they_are():
    numerator = torch.tensor([[-1.0, NAN, -30.0]], requires_grad=True)
    denominator = torch.tensor([[-2.0, -1.0, -1.0]])
    before = denominator.clone()

    values = log_ratio(numerator, denominator, torch.tensor([[True, False, True]])).values

    assert not values.requires_grad
    assert values.tolist() == [[1.0, 0.0, -29.0]]
    assert torch.equal(denominator, before)
