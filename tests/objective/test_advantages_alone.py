"""What a group of one gets: 0, or its reward as in verl (``alone="return"``)."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import trl_offpolicy as op

A = op.advantages
NAN = float("nan")
close = partial(pytest.approx, rel=1e-5, abs=1e-6)


def inputs(rewards, group_ids, **fields):
    return A.AdvantageInputs(rewards=torch.tensor(rewards), group_ids=torch.tensor(group_ids), **fields)


LENGTHS = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
TWO_AND_ONE = inputs([3.0, 1.0, 5.0], [0, 0, 1], mask=LENGTHS)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (A.GRPO(scale="none", alone="return"), [1.0, -1.0, 5.0]),
        (A.GRPO(alone="return", epsilon=1e-6), [1 / 2**0.5, -1 / 2**0.5, 5.0]),
        (A.RLOO(alone="return"), [2.0, -2.0, 5.0]),
        (A.OPO(alone="return"), [0.5, -1.5, 5.0]),  # the baseline of the first group is (3 * 3 + 1 * 1) / 4
        (A.GPG(alone="return"), [1.0, -1.0, 5.0]),  # no reward is 0
    ],
)
def test_a_group_of_one_may_keep_its_reward(estimator, expected):
    assert estimator(TWO_AND_ONE).tolist() == close(expected)
    assert replace(estimator, alone="zero")(TWO_AND_ONE).tolist() == close([*expected[:2], 0.0])


def test_the_reward_is_normalised_and_scaled_with_the_others():
    """Over the tokens 1, 1, 1, -1, 5, 5: mean 2 and variance 30 / 5. Of four responses one has a reward: a factor 4."""
    normalised = A.REINFORCEPlusPlusBaseline(alone="return")(TWO_AND_ONE)
    assert normalised.tolist() == close([a / 6**0.5 for a in (-1, -3, 3)])

    assert A.GPG(alone="return")(inputs([0.0, 0.0, 5.0, 0.0], [0, 0, 1, 2])).tolist() == close([0.0, 0.0, 20.0, 0.0])


def test_a_group_of_one_that_is_not_counted_keeps_nothing():
    x = inputs([3.0, 5.0, NAN], [0, 1, 2], counted=torch.tensor([True, False, True]))

    assert A.RLOO(alone="return")(x).tolist() == [3.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [partial(A.GRPO, scale="batch"), partial(A.RLOO, normalize=True)])
def test_what_the_batch_scales_has_no_reward_of_its_own(estimator):
    with pytest.raises(ValueError, match=r"^alone must be 'zero' with"):
        estimator(alone="return")
    with pytest.raises(ValueError, match=r"^alone must be one of"):
        A.OPO(alone="half")
