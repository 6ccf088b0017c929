"""Aggregation of tokens to turns, prefixes, sequences and groups."""

import math
from functools import partial

import plain
import pytest
import torch

from trl_offpolicy.functional.levels import LEVELS, TOKEN_LEVELS, aggregate, aggregate_ratio, group_mean, turn_index

NAN, INF = float("nan"), float("inf")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

# Row 0: two turns (1, 3) and (5, -2); row 1: one token; row 2: nothing trainable.
VALUES = torch.tensor([[1.0, 3.0, NAN, 5.0, -2.0, INF], [NAN, -4.0, NAN, NAN, -INF, NAN], [NAN] * 6])
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6]).bool()
ALONE = [0, -4, 0, 0, 0, 0]
NOTHING = [0] * 6


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[1, 3, 0, 5, -2, 0], ALONE, NOTHING]),
        ("turn", [[4, 4, 0, 3, 3, 0], ALONE, NOTHING]),
        ("turn_mean", [[2, 2, 0, 1.5, 1.5, 0], ALONE, NOTHING]),
        ("prefix", [[1, 4, 0, 9, 7, 0], ALONE, NOTHING]),
        ("sequence", [[7], [-4], [0]]),
        ("sequence_mean", [[7 / 4], [-4], [0]]),  # over 4 tokens, not over 6 positions
        ("sequence_max", [[5], [-4], [0]]),  # the largest of negative values is negative
        ("sequence_min", [[-2], [-4], [0]]),
        ("group", [[(7 / 4 - 4) / 2], [(7 / 4 - 4) / 2], [0]]),
    ],
)
def test_aggregates_over_the_mask_only(level, expected):
    assert aggregate(VALUES, MASK, level, group_ids=torch.tensor([8, 8, 3])).tolist() == expected


@pytest.mark.parametrize(
    ("turn_ids", "expected"),
    [
        ([0, 1, 1, 1, 2, 2], [1, 8, 0, 8, -2, 0]),  # changes without a gap; one id across a gap
        ([7] * 6, [7, 7, 0, 7, 7, 0]),
        ([0, 0, -1, 0, 0, 0], [4, 4, 0, 3, 3, 0]),  # an id that comes back is a turn of its own
        ([3, 2, 1, 0, -1, -2], [1, 3, 0, 5, -2, 0]),
    ],
)
def test_turns_of_ids(turn_ids, expected):
    ids = torch.tensor([turn_ids])

    assert aggregate(VALUES[:1], MASK[:1], "turn", turn_ids=ids).tolist() == [expected]


def test_turn_mean_counts_trainable_tokens_only():
    ids = torch.tensor([[0, 1, 1, 1, 2, 2]])

    assert aggregate(VALUES[:1], MASK[:1], "turn_mean", turn_ids=ids).tolist() == [[1, 4, 0, 4, -2, 0]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1], [0, 0, 0]),
        ([0, 1, 1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1, 2]),
        ([0, 0], [0, 0]),
        ([0, 1], [0, 0]),
        ([1], [0]),
    ],
)
def test_turns_are_runs_of_trainable_tokens(mask, expected):
    index = turn_index(torch.tensor([mask]).bool())

    assert index.tolist() == [expected]
    assert index.dtype == torch.int64


def test_numbered_turns_are_numbered_the_same_again():
    mask = torch.rand(50, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    index = turn_index(mask)

    assert torch.equal(turn_index(mask, index)[mask], index[mask])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 0, 0, 0], [3.0, 3.0, 3.0, 3.0]),  # (1 + 2 + 6) / 3: the empty row counts for nothing
        ([0, 0, 1, 1], [1.5, 1.5, 6.0, 6.0]),  # an empty row reads its group
        ([-5, 2, -5, 7], [3.5, 2.0, 3.5, 0.0]),  # apart, negative, a group without tokens
        ([4, 3, 2, 1], [1.0, 2.0, 6.0, 0.0]),  # groups of one
    ],
)
def test_group_is_the_mean_over_its_sequences(ids, expected):
    values = torch.tensor([[1.0, 1.0, 1.0], [2.0, NAN, NAN], [4.0, 8.0, NAN], [NAN] * 3])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()

    assert aggregate(values, mask, "group", group_ids=torch.tensor(ids)).flatten().tolist() == expected


def test_group_mean_ignores_what_rows_hold_that_do_not_count():
    active = torch.tensor([True, False, True])

    got = group_mean(torch.tensor([1.0, NAN, 2.0]), active, torch.tensor([0, 0, 0]))

    assert got.tolist() == [1.5] * 3


def test_group_needs_ids():
    with pytest.raises(ValueError, match=r"^group_ids must be given for level 'group', but got None"):
        aggregate(VALUES, MASK, "group")


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_by_plain_loops(level, with_ids):
    for seed in range(20):
        values, mask, turn_ids, group_ids = plain.random_case(seed)
        ids = turn_ids if with_ids else None

        got = aggregate(torch.where(mask, values, NAN), mask, level, turn_ids=ids, group_ids=group_ids)

        listed = None if ids is None else ids.tolist()
        expected = plain.aggregate(values.tolist(), mask.tolist(), level, listed, group_ids.tolist())
        close(got, torch.tensor(expected))
        assert got.shape[1] == (mask.shape[1] if level in TOKEN_LEVELS else 1)


@pytest.mark.parametrize("level", LEVELS)
def test_values_that_are_zero_outside_may_say_so(level):
    """It saves a pass, and changes nothing: not the maximum of negative values either."""
    for sign in (1, -1):
        values, mask, turn_ids, group_ids = plain.random_case(0)
        values = torch.where(mask, sign * values.abs(), 0.0)
        before, ids = values.clone(), {"turn_ids": turn_ids, "group_ids": group_ids}

        got = aggregate(values, mask, level, zero_outside=True, **ids)

        assert torch.equal(got, aggregate(values, mask, level, **ids))
        ratio = aggregate_ratio(values, mask, level, zero_outside=True, **ids)
        assert torch.equal(ratio, aggregate_ratio(values, mask, level, **ids))
        assert torch.equal(values, before)  # not written to


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [4.0, 1.0, 1.0, 0.25, 2.0]),  # a masked token reads 1
        ("turn", [4.0, 4.0, 1.0, 0.5, 0.5]),
        ("turn_mean", [2.0, 2.0, 1.0, math.sqrt(0.5), math.sqrt(0.5)]),
        ("prefix", [4.0, 4.0, 1.0, 1.0, 2.0]),
        ("sequence", [2.0]),
        ("sequence_mean", [2**0.25]),  # the geometric mean, not the mean 1.8125
        ("sequence_max", [4.0]),
        ("sequence_min", [0.25]),
        ("group", [2**-0.25]),  # geometric over rows too: sqrt(2^(1/4) * 2^(-3/4))
    ],
)
def test_ratios_multiply_in_log_space(level, expected):
    ratios = torch.tensor([[4.0, 1.0, NAN, 0.25, 2.0], [2**-0.75] * 5])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()

    got = aggregate_ratio(ratios.log(), mask, level, group_ids=torch.zeros(2, dtype=torch.int64))

    close(got[0], torch.tensor(expected))


@pytest.mark.parametrize(
    ("level", "expected"),
    [  # 15 + 15 = 30 -> 20; 30 - 25 = 5, not 20 - 25
        ("turn", [5.0, 5.0, 5.0]),
        ("prefix", [15.0, 20.0, 5.0]),
        ("sequence", [5.0]),
        ("token", [15.0, 15.0, -20.0]),
        ("sequence_min", [-20.0]),
    ],
)
def test_ratio_is_clamped_after_the_aggregation(level, expected):
    got = aggregate_ratio(torch.tensor([[15.0, 15.0, -25.0]]), torch.ones(1, 3).bool(), level)

    close(got, torch.tensor([expected]).exp())


@pytest.mark.parametrize("level", LEVELS)
def test_one_token_is_the_same_at_every_level(level):
    log_ratios, mask = torch.tensor([[0.7], [NAN]]), torch.tensor([[True], [False]])

    got = aggregate_ratio(log_ratios, mask, level, group_ids=torch.tensor([0, 1]))

    close(got, torch.tensor([[math.exp(0.7)], [1.0]]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("length", [1, 4])
def test_nothing_trainable_gives_zero(length, rows, level):
    ids = torch.zeros(rows, dtype=torch.int64)
    nothing = torch.zeros(rows, length).bool()

    got = aggregate(torch.full((rows, length), NAN), nothing, level, group_ids=ids)

    assert torch.equal(got, torch.zeros(rows, length if level in TOKEN_LEVELS else 1))


@pytest.mark.parametrize("level", LEVELS)
def test_input_is_not_mutated(level):
    values, mask, turn_ids, group_ids = plain.random_case(0)
    before = [tensor.clone() for tensor in (values, mask, turn_ids, group_ids)]

    aggregate(values, mask, level, turn_ids=turn_ids, group_ids=group_ids)

    assert all(torch.equal(*pair) for pair in zip(before, (values, mask, turn_ids, group_ids), strict=True))


@pytest.mark.parametrize("level", ["seq", "", "Token"])
def test_an_unknown_level_is_refused(level):
    with pytest.raises(ValueError, match=f"level must be one of .*, but got '{level}'"):
        aggregate(torch.zeros(1, 2), torch.ones(1, 2).bool(), level, group_ids=torch.zeros(1).long())
