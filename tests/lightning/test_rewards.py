"""TRL's signature of reward functions."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from lightning_module.rewards import Rewards

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


def right(prompts, completions, completion_ids, answer, **_):
    assert prompts == ["a", "b"] and completion_ids == [[4], [5]]
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


async def later(completions, **_):
    await asyncio.sleep(0)
    return [None if text == "1" else 7.0 for text in completions]


def test_columns_reach_the_functions_and_none_is_no_reward():
    values = Rewards([right, later], [1.0, 0.5])(ROWS, ["1", "3"], [[4], [5]])
    assert values[:, 0].tolist() == [1.0, 0.0]
    assert math.isnan(values[0, 1]) and values[1, 1] == 7.0


def test_names_and_weights():
    rewards = Rewards("math:fsum")
    assert rewards.names == ["fsum"] and torch.equal(rewards.weights, torch.ones(1))


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ([], None, "reward_funcs must be one or more functions"),
        ([right], [1.0, 2.0], "reward_weights must have one number a function"),
        ("math.fsum", None, r"package\.module:name"),
        ("math:nothing", None, "must name something that exists"),
    ],
)
def test_mistakes_are_named(functions, weights, message):
    with pytest.raises(ValueError, match=message):
        Rewards(functions, weights)


def test_a_wrong_number_of_rewards_is_an_error():
    with pytest.raises(ValueError, match="reward function <lambda> must return 2 rewards, but got 1"):
        Rewards(lambda **_: [1.0])(ROWS, ["1", "2"], [[4], [5]])
