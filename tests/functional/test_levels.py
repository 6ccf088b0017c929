"""Aggregation of tokens to sequences."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy.functional.levels import LEVELS, aggregate, aggregate_ratio

NAN = float("nan")
close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)

VALUES = torch.tensor([[1.0, 3.0, NAN], [-2.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[1.0, 3.0, 0.0], [-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("sequence", [[4.0], [-2.0], [0.0]]),  # 1 + 3; -2; an empty row is 0
        ("sequence_mean", [[2.0], [-2.0], [0.0]]),  # 4 / 2 tokens, not / 3 positions; -2 / 1
    ],
)
def test_aggregates_over_the_mask_only(level, expected):
    assert aggregate(VALUES, MASK, level).tolist() == expected


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[4.0, 1.0, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]]),  # a masked token reads 1
        ("sequence", [[4.0], [0.5], [1.0]]),  # 4 * 1
        ("sequence_mean", [[2.0], [0.5], [1.0]]),  # sqrt(4 * 1) = 2, not the mean 2.5
    ],
)
def test_ratios_multiply_in_log_space(level, expected):
    log_ratios = torch.tensor([[math.log(4), 0.0, NAN], [math.log(0.5), NAN, NAN], [NAN, NAN, NAN]])

    close(aggregate_ratio(log_ratios, MASK, level), torch.tensor(expected))


def test_ratio_is_clamped_after_the_aggregation():
    log_ratios = torch.tensor([[15.0, 15.0], [15.0, -15.0], [-15.0, -15.0]])
    mask = torch.ones(3, 2).bool()

    sequence = aggregate_ratio(log_ratios, mask, "sequence")

    # 30 -> 20; 15 - 15 = 0; -30 -> -20
    close(sequence, torch.tensor([[math.exp(20)], [1.0], [math.exp(-20)]]))
    mixed = aggregate_ratio(torch.tensor([[30.0, -10.0]]), mask[:1], "sequence")
    close(mixed, torch.tensor([[math.exp(20)]]))  # 30 - 10; clamped first it would be e^10


def test_one_token_is_the_same_at_every_level():
    log_ratios, mask = torch.tensor([[0.7], [NAN]]), torch.tensor([[True], [False]])

    for level in LEVELS:
        close(aggregate_ratio(log_ratios, mask, level), torch.tensor([[math.exp(0.7)], [1.0]]))


def test_input_is_not_mutated():
    values = torch.tensor([[1.0, 5.0]])

    aggregate(values, torch.tensor([[True, False]]), "token")

    assert values.tolist() == [[1.0, 5.0]]
