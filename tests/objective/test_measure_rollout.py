"""Lag, length and reweighted reward by hand, merged over micro-batches."""

from __future__ import annotations

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.objective.measure import rollout_stats

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()


def batch(**fields):
    zeros = torch.zeros(4, 3)
    return op.PolicyBatch(per_token_logps=zeros, completion_mask=MASK, advantages=torch.zeros(4), **fields)


def values(stats):
    return {key.removeprefix("offpolicy/rollout/"): float(stat) for key, stat in stats.items()}


def test_lag_by_response_and_by_token():
    rows = batch(policy_versions=torch.tensor([3, 1, 0, 4]), current_version=4)
    got = values(rollout_stats(rows, torch.ones(4, 3)))
    assert got["version_lag_mean"] == pytest.approx((2 * 1 + 3 + 0) / 6)
    assert got["version_lag_max"] == 3  # the row of lag 4 has no token
    tokens = batch(policy_versions=torch.tensor([[1, 2, 0], [4, 0, 0], [0, 0, 0], [4, 4, 3]]), current_version=4)
    got = values(rollout_stats(tokens, torch.ones(4, 3)))
    assert got["version_lag_mean"] == pytest.approx((3 + 2 + 0 + 0 + 0 + 1) / 6)
    assert got["version_lag_max"] == 3
    assert got["cross_version_fraction"] == pytest.approx(2 / 3)  # of three with a token; padding does not count
    assert "cross_version_fraction" not in values(rollout_stats(rows, torch.ones(4, 3)))


def test_versions_of_padding_and_of_single_tokens_do_not_cross():
    tokens = batch(policy_versions=torch.tensor([[7, 7, 9], [1, 2, 3], [0, 5, 9], [2, 2, 2]]))
    assert values(rollout_stats(tokens, torch.ones(4, 3)))["cross_version_fraction"] == 0.0


def test_length_and_reweighted_reward():
    weights = torch.tensor([[2.0, 1.0, 9.0], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0], [1.0, 1.0, 4.0]])
    got = values(rollout_stats(batch(rewards=torch.tensor([1.0, 0.0, 5.0, torch.nan])), weights))
    assert got["response_length_mean"] == 2.0
    assert got["reward_reweighted"] == pytest.approx(1.5 / (1.5 + 0.5))
    assert "version_lag_mean" not in got


def test_halves_merge_to_the_whole():
    rewards, versions = torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.tensor([0, 2, 1, 1])
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))

    def part(rows):
        half = op.PolicyBatch(
            per_token_logps=torch.zeros(4, 3)[rows], completion_mask=MASK[rows], advantages=torch.zeros(4)[rows],
            rewards=rewards[rows], policy_versions=versions[rows], current_version=3,
        )  # fmt: skip
        return rollout_stats(half, weights[rows])

    merged = part(slice(0, 2)).merge(part(slice(2, 4)))
    assert values(merged) == pytest.approx(values(part(slice(0, 4))))


def test_no_response_at_all():
    empty = op.PolicyBatch(
        per_token_logps=torch.zeros(2, 3), completion_mask=torch.zeros(2, 3).bool(), advantages=torch.zeros(2),
        policy_versions=torch.zeros(2).long(), current_version=1,
    )  # fmt: skip
    got = values(rollout_stats(empty, torch.ones(2, 3)))
    assert got == {"response_length_mean": 0.0, "version_lag_mean": 0.0, "version_lag_max": 0.0}
