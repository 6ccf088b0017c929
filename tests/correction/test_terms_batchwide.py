"""Keep terms that look at the whole batch: the second-moment budget and the rejection of groups."""

import plain
import pytest
import torch

from trl_offpolicy import GroupRejection, SecondMomentBudget
from trl_offpolicy.correction.terms import TermInputs

NAN = float("nan")
TRAINABLE = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 0], [1, 1]]).bool()


def budget_inputs(log_ratios):
    log_ratios = torch.tensor(log_ratios)
    return TermInputs(log_ratios, ~log_ratios.isnan(), torch.ones(len(log_ratios), 1))


# ------------------------------------------------------------------------------------------------------ budget


@pytest.mark.parametrize(
    ("budget", "above", "below"),
    [  # squares 0.01, 4 (up), 1 (down); mean of the two smaller 0.505
        (1.7, [[False, False], [False, False]], [[False, False], [False, False]]),
        (0.6, [[False, True], [False, False]], [[False, False], [False, False]]),
        (0.1, [[False, True], [False, False]], [[False, False], [True, False]]),
        (0.009, [[True, True], [False, False]], [[False, False], [True, False]]),
    ],
)
def test_budget_reports_the_side(budget, above, below):
    violations = SecondMomentBudget(budget=budget).violations(budget_inputs([[0.1, 2.0], [-1.0, NAN]]))

    assert violations.above.tolist() == above
    assert violations.below.tolist() == below


@pytest.mark.parametrize("scope", ["generation_batch", "micro_batch"])
def test_budget_by_dropping_one_at_a_time(scope):
    for seed in range(10):
        log_ratios, mask, _, _ = plain.random_case(seed, scale=0.4)
        seen = TermInputs(torch.where(mask, log_ratios, NAN), mask, torch.ones(len(mask), 1))

        above, below = SecondMomentBudget(budget=0.05, scope=scope).violations(seen)

        assert (~(above | below))[mask].tolist() == plain.affordable(log_ratios[mask].tolist(), 0.05)
        assert (log_ratios[above] > 0).all() and (log_ratios[below] < 0).all()
        assert not (above | below)[~mask].any()


def test_default_budget_is_the_papers():
    assert SecondMomentBudget().budget == 0.04


# ------------------------------------------------------------------------------------------------------- groups


def rejected(keep, group_ids, max_dropped_fraction=0.5, trainable=TRAINABLE, mask=None):
    keep = None if keep is None else torch.tensor(keep).bool()
    mask = trainable if mask is None else mask
    rows = len(mask)
    seen = TermInputs(
        torch.zeros(mask.shape),
        mask,
        torch.ones(rows, 1),
        group_ids=torch.tensor(group_ids),
        trainable=trainable,
        keep=keep,
    )
    above, below = GroupRejection(max_dropped_fraction=max_dropped_fraction).violations(seen)
    assert below is None
    assert above.shape == (rows, 1)
    return above.flatten().tolist()


GONE_0_2_3 = [[0], [1], [0], [0], [1], [1]]  # row 4 has no tokens


@pytest.mark.parametrize(
    ("group_ids", "max_dropped_fraction", "expected"),
    [
        ([1, 1, 1, 1, 1, 1], 0.5, [True] * 6),  # 3 of 5
        ([1, 1, 1, 1, 1, 1], 0.6, [False] * 6),  # equality is kept
        ([1, 1, 2, 2, 2, 2], 0.5, [False, False, True, True, True, True]),  # 1 of 2; 2 of 3
        ([1, 1, 2, 2, 2, 2], 0.4, [True] * 6),
        ([-7, 3, -7, 3, 3, 3], 0.5, [True, False, True, False, False, False]),  # 2 of 2; 1 of 3; apart, negative
        ([0, 1, 2, 3, 4, 5], 0.0, [True, False, True, True, False, False]),  # groups of one
        ([0, 1, 2, 3, 4, 5], 0.99, [True, False, True, True, False, False]),
    ],
)
def test_groups_that_lost_too_many_are_dropped(group_ids, max_dropped_fraction, expected):
    assert rejected(GONE_0_2_3, group_ids, max_dropped_fraction) == expected


def test_a_response_counts_as_dropped_when_nothing_trainable_of_it_is_left():
    keep = [[1, 0], [0, 1], [0, 0], [1, 1], [1, 1], [1, 1]]  # row 1 keeps padding only

    assert rejected(keep, [0, 1, 2, 3, 4, 5]) == [False, True, True, False, False, False]


def test_it_counts_all_trainable_tokens_not_the_measured_ones():
    """Under measure_on='remaining' the measured mask has lost the dropped rows already."""
    keep = torch.tensor(GONE_0_2_3).bool()

    assert rejected(GONE_0_2_3, [1] * 6, mask=TRAINABLE & keep) == [True] * 6


def test_nothing_dropped_rejects_nothing():
    assert rejected(None, [0, 0, 0, 1, 1, 1], 0.0) == [False] * 6
    assert rejected([[1]] * 6, [0, 0, 0, 1, 1, 1], 0.0) == [False] * 6


def test_a_batch_without_rows():
    seen = TermInputs(
        torch.zeros(0, 3), torch.zeros(0, 3).bool(), torch.ones(0, 1), group_ids=torch.zeros(0, dtype=torch.int64)
    )

    assert GroupRejection().violations(seen).above.shape == (0, 1)


def test_group_rejection_needs_ids():
    with pytest.raises(ValueError, match=r"^group_ids must be given for a group rejection, but got None"):
        GroupRejection().violations(budget_inputs([[0.1]]))
