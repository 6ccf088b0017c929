"""ReMax's advantages: each reward against that of the greedy completion of its prompt, and nothing else."""

import math

import pytest
import torch

import trl_offpolicy as op

A = op.advantages
NAN = float("nan")
REWARDS = [[1.0, 0.0], [0.25, NAN], [NAN, NAN], [0.5, 1.0], [2.0, 0.0]]
BASELINE = [0.75, 0.75, 0.75, NAN, -1.0]
WEIGHTS = [2.0, 1.0]


def inputs(**changed):
    given = {
        "rewards": torch.tensor(REWARDS),
        "reward_weights": torch.tensor(WEIGHTS),
        "group_ids": torch.tensor([0, 0, 0, 1, 2]),  # the last two are alone
        "greedy_rewards": torch.tensor(BASELINE),
    }
    return A.AdvantageInputs(**{**given, **changed})


def plain(counted):
    out = []
    for row, baseline, counts in zip(REWARDS, BASELINE, counted, strict=True):
        present = [w * r for w, r in zip(WEIGHTS, row, strict=True) if not math.isnan(r)]
        learns = present and counts and not math.isnan(baseline)
        out.append(sum(present) - baseline if learns else 0.0)
    return out


@pytest.mark.parametrize("counted", [[True] * 5, [False, True, True, True, True]])
def test_it_is_the_reward_less_the_greedy_one(counted):
    x = inputs(counted=torch.tensor(counted), greedy_rewards=torch.tensor(BASELINE, requires_grad=True))
    found = A.ReMax()(x)
    assert found.tolist() == pytest.approx(plain(counted)) and found.dtype == torch.float32
    assert not found.requires_grad
    assert plain([True] * 5) == [1.25, -0.25, 0.0, 0.0, 5.0]  # a response that is alone learns, too


def test_rewards_by_token_belong_to_the_response():
    tokens = torch.tensor([[0.1, 0.2, 9.0]]).expand(5, -1)
    mask = torch.tensor([[True, True, False]]).expand(5, -1)
    found = A.ReMax()(inputs(mask=mask, token_rewards=tokens))
    assert found.tolist() == pytest.approx([1.55, 0.05, 0.0, 0.0, 5.3])


def test_without_a_greedy_reward_the_field_is_named():
    with pytest.raises(ValueError, match=r"^greedy_rewards must be given for ReMax, but got None\. Both train"):
        A.ReMax()(inputs(greedy_rewards=None))
    with pytest.raises(ValueError, match=r"^greedy_rewards must have shape \(5,\), but got \(4,\)"):
        inputs(greedy_rewards=torch.zeros(4))
