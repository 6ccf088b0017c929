"""Keep masks: veto, off-policy sequence mask, divergence statistics."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy.functional.masks import divergence, off_policy_sequence_mask, outlier_veto

NAN = float("nan")
close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0.5, 4.0, [True, False, False, True]),
        (None, 4.0, [True, True, False, True]),
        (0.5, None, [True, False, True, True]),
    ],
)
def test_one_token_outside_vetoes_its_sequence(low, high, kept):
    ratios = torch.tensor([[1.0, 2.0], [1.0, 0.25], [8.0, 1.0], [1.0, 1.0]])
    mask = torch.ones(4, 2).bool()

    assert outlier_veto(ratios.log(), mask, low=low, high=high).flatten().tolist() == kept


def test_veto_bounds_are_inclusive():
    log_ratios = torch.tensor([[0.5], [-0.5], [0.5001], [-0.5001]])
    low, high = math.exp(-0.5), math.exp(0.5)

    keep = outlier_veto(log_ratios, torch.ones(4, 1).bool(), low=low, high=high)

    assert keep.flatten().tolist() == [True, True, False, False]


def test_veto_reads_trainable_tokens_only_and_keeps_an_empty_row():
    log_ratios = torch.tensor([[0.0, 9.0], [NAN, -9.0], [0.0, NAN]])
    mask = torch.tensor([[True, False], [False, False], [True, False]])

    assert outlier_veto(log_ratios, mask, low=0.5, high=2.0).tolist() == [[True], [True], [True]]


def test_sequence_mask_drops_negative_advantages_that_drifted_too_far():
    # rows: drifted (log mu/pi = 0.5), at the threshold (0.25), far the other way (-3)
    mean_log_ratio = torch.tensor([[-0.5], [-0.25], [3.0]])

    def keep(advantage):
        advantages = torch.full((3, 1), advantage)
        return off_policy_sequence_mask(mean_log_ratio, advantages, max_divergence=0.25).flatten().tolist()

    assert keep(-1.0) == [False, True, True]  # equality is kept
    assert keep(0.0) == [True, True, True]
    assert keep(1.0) == [True, True, True]


def test_sequence_mask_decides_by_token_where_advantages_do():
    advantages = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])

    keep = off_policy_sequence_mask(torch.tensor([[-1.0], [-0.1]]), advantages, max_divergence=0.5)

    assert keep.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("k1", [-math.log(2), math.log(2), 0.0]),  # -l, signed
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0]),
        ("k3", [2 - 1 - math.log(2), 0.5 - 1 + math.log(2), 0.0]),  # rho - 1 - l
    ],
)
def test_divergence_statistics(statistic, expected):
    log_ratios = torch.tensor([math.log(2), -math.log(2), 0.0])

    close(divergence(log_ratios, statistic), torch.tensor(expected))


def test_k3_is_exact_where_the_policies_nearly_agree():
    value = divergence(torch.tensor([1e-4]), "k3").item()

    # l^2/2 + l^3/6; exp(l) - 1 - l in float32 gives noise of 6e-8
    assert value == pytest.approx(5.00017e-9, rel=2e-3)


def test_k3_of_the_largest_log_ratio_is_finite():
    assert divergence(torch.tensor([20.0]), "k3").item() == pytest.approx(math.exp(20) - 21, rel=1e-6)


def test_unknown_statistic_is_refused():
    with pytest.raises(ValueError, match="statistic must be one of 'k1', 'k2', 'k3', but got 'k4'"):
        divergence(torch.zeros(1), "k4")
