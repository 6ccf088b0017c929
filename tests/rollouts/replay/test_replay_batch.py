"""From stored groups to a batch of the three policies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import trl_offpolicy as op
from trl_offpolicy.rollouts.batches import oldest_versions
from trl_offpolicy.rollouts.replay import PaddedGroups, ReplayGroup, Response, pad_groups, replayed_batch
from trl_offpolicy.rollouts.replay.mixing import _joined
from trl_offpolicy.types import PolicyBatch

LONG = Response(
    completion_ids=(4, 5, 6), sampling_logps=(-1.0, -2.0, -3.0), policy_versions=(2, 2, 3),
    completion_mask=(True, False, True), old_logps=(-1.1, -2.1, -3.1), reward=1.0,
)  # fmt: skip
SHORT = Response(completion_ids=(7,), sampling_logps=(-0.5,), policy_versions=(3,), reward=0.0)
FIRST = ReplayGroup(prompt_ids=(1, 2), responses=(LONG, SHORT), group_id=40)
SECOND = ReplayGroup(prompt_ids=(3,), responses=(SHORT, SHORT), group_id=41)
NOW = torch.tensor([[-0.7, -1.0, -2.5], [-0.5, 0.0, 0.0], [-0.4, 0.0, 0.0], [-0.9, 0.0, 0.0]])


def score(rows: PaddedGroups) -> Tensor:
    return NOW.clone().requires_grad_()


def batch_of(**options: object) -> op.PolicyBatch:
    return replayed_batch([FIRST, SECOND], score, current_version=5, pad_token_id=0, **options)


def test_padding_is_left_for_prompts_and_right_for_completions() -> None:
    rows = pad_groups([FIRST, SECOND], pad_token_id=99)
    assert rows.prompt_ids.tolist() == [[1, 2], [1, 2], [99, 3], [99, 3]]
    assert rows.prompt_mask.tolist() == [[True, True], [True, True], [False, True], [False, True]]
    assert rows.completion_ids.tolist() == [[4, 5, 6], [7, 99, 99], [7, 99, 99], [7, 99, 99]]
    assert rows.attention_mask.sum(1).tolist() == [3, 1, 1, 1]
    assert rows.completion_mask.tolist()[0] == [True, False, True]  # the tool token is there and not trained
    assert rows.completion_mask[1:].sum(1).tolist() == [1, 1, 1]
    assert rows.policy_versions.tolist()[:2] == [[2, 2, 3], [3, 3, 3]]
    assert rows.rewards.tolist() == [1.0, 0.0, 0.0, 0.0] and rows.group_ids.tolist() == [0, 0, 1, 1]
    assert rows.old_per_token_logps is not None and rows.old_per_token_logps[0].tolist() == pytest.approx(
        [-1.1, -2.1, -3.1]
    )
    assert rows.old_per_token_logps[1:].isnan().all()
    assert pad_groups([SECOND], pad_token_id=0).old_per_token_logps is None


def test_the_batch_holds_the_policies_that_it_says() -> None:
    batch = batch_of()
    assert batch.proximal_per_token_logps is not None and batch.sampling_per_token_logps is not None
    torch.testing.assert_close(batch.proximal_per_token_logps, NOW)
    assert batch.per_token_logps.requires_grad and not batch.proximal_per_token_logps.requires_grad
    assert batch.sampling_per_token_logps[0].tolist() == [-1.0, -2.0, -3.0]
    assert batch.old_per_token_logps is None and batch.version_lags is not None
    assert batch.version_lags[0].tolist() == [3, 3, 2]
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    torch.testing.assert_close(batch.advantages, torch.tensor([a, -a, 0.0, 0.0]))


def test_the_loss_is_decoupled_ppo_written_out() -> None:
    """sum of min(prox/mu, cap) A grad log pi over trainable tokens; the first step clips nothing."""
    batch = batch_of()
    cap = 1.3
    correction = op.Correction(weight=op.TruncateWeight(level="token", max_weight=cap))
    result = op.Objective(policy_loss=op.losses.PPOClip(), correction=correction)(batch)
    result.loss.backward()
    mask, a = batch.mask, batch.advantages.unsqueeze(1)
    weight = (NOW - torch.nan_to_num(batch.sampling_per_token_logps)).exp().clamp(max=cap)
    expected = torch.where(mask, -weight * a, 0.0) / mask.sum()
    torch.testing.assert_close(batch.per_token_logps.grad, expected)
    assert weight[0, 0] == cap and 1.0 < weight[2, 0] < cap


def test_draw_weights_multiply_the_advantages_of_their_group() -> None:
    plain, weighted = batch_of().advantages, batch_of(weights=[0.5, 3.0]).advantages
    torch.testing.assert_close(weighted, plain * torch.tensor([0.5, 0.5, 3.0, 3.0]))
    by_token = batch_of(weights=[0.5, 3.0], advantages=lambda rows: torch.ones(4, 3)).advantages
    assert by_token.tolist() == [[0.5] * 3] * 2 + [[3.0] * 3] * 2


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"score must return shape \(2, 1\), but got \(4, 3\)"):
        replayed_batch([SECOND], score, current_version=5, pad_token_id=0)
    with pytest.raises(ValueError, match="weights must have 2 entries, one a group, but got 1"):
        batch_of(weights=[1.0])
    with pytest.raises(ValueError, match="at least one group"):
        pad_groups([], pad_token_id=0)


def test_joined_versions_repeat_the_last_one_and_the_oldest_is_of_the_tokens() -> None:
    fresh, replayed = torch.tensor([[10, 10, 10]]), torch.tensor([[2, 2, 3, 3, 4]])
    joined = _joined("policy_versions", fresh, replayed)
    assert joined.tolist() == [[10, 10, 10, 10, 10], [2, 2, 3, 3, 4]]

    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    versions = torch.tensor([[10, 9, 10, 0, 0], [2, 5, 3, 6, 4], [1, 1, 1, 1, 7]])
    batch = PolicyBatch(
        per_token_logps=-torch.ones(3, 5), completion_mask=mask, advantages=torch.zeros(3), policy_versions=versions
    )
    assert oldest_versions(batch).tolist() == [9, 3, 7]  # type: ignore[union-attr]
