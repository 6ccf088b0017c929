"""Which groups of a buffer are added to a generation batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trl_offpolicy.rollouts.replay import ReplayBuffer, ReplayGroup, Response, pad_groups
from trl_offpolicy.rollouts.replay.mixing import mixed, warn_of_other_sizes, with_replayed


def group(number: int, rewards: list[float]) -> ReplayGroup:
    """One with a response for each reward."""
    responses = tuple(
        Response(completion_ids=(5, 6), sampling_logps=(-0.1, -0.2), policy_versions=(0, 0), reward=reward)
        for reward in rewards
    )
    return ReplayGroup(prompt_ids=(1, 2), responses=responses, group_id=number)


def fresh(generations: int) -> dict[str, Any]:
    """A generation batch of one group."""
    rewards, two = torch.arange(float(generations)), (generations, 2)
    return {
        "prompt_ids": torch.ones(two, dtype=torch.long),
        "prompt_mask": torch.ones(two, dtype=torch.long),
        "completion_ids": torch.full(two, 7),
        "completion_mask": torch.ones(two, dtype=torch.long),
        "advantages": torch.zeros(generations),
        "sampling_per_token_logps": torch.full(two, -1.0),
        "num_items_in_batch": torch.tensor(2 * generations),
        "group_ids": torch.zeros(generations, dtype=torch.long),
        "policy_versions": torch.full((generations,), 3),
        "rewards": rewards,
        "group_rewards": rewards.repeat(generations, 1),
    }


def mix(output: dict[str, Any], buffer: ReplayBuffer, count: int, generations: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return mixed(
        output, buffer, count, version=3, rng=rng, max_lag=None, generations=generations, pad_token_id=0
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 8])
def test_groups_of_another_size_are_not_drawn(tmp_path: Path, size: int) -> None:
    with ReplayBuffer(tmp_path, max_rows=1000) as buffer:
        buffer.add([group(number, [float(number)] * size) for number in range(3)])
        assert len(mix(fresh(4), buffer, 1, 4)["prompt_ids"]) == 4  # as if there were none
        rows = mix(fresh(4), buffer, 1, 4)  # the group of the first batch
        assert rows["group_rewards"].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 8
        assert rows["group_ids"].unique().numel() == 2 and int(rows["num_items_in_batch"]) == 16


def test_what_is_left_out_is_said_with_the_numbers(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, max_rows=1000) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_sizes(buffer, 4)  # nothing to say of an empty one
        buffer.add([group(0, [0.0] * 4), group(1, [0.0] * 2), group(2, [0.0] * 8)])
        said = r"^2 of 3 groups in .* are not replayed: they have 2, 8 responses, and num_generations is 4\.$"
        with pytest.warns(UserWarning, match=said):
            warn_of_other_sizes(buffer, 4)


def test_rewards_of_different_prompts_are_not_mixed() -> None:
    """Two groups of two have as many rows as one of four."""
    rows = pad_groups([group(0, [0.0, 1.0]), group(1, [0.0, 1.0])], pad_token_id=0)
    with pytest.raises(ValueError, match=r"^replayed groups must have 4 rows each, as fresh ones, but got \[2, 2\]"):
        with_replayed(fresh(4), rows, ids=[-1, -2])
