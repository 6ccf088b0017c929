"""Completions of a group that are equal: counted by hand, told from chance by their probability."""

from __future__ import annotations

import math

import pytest
import torch

from trl_offpolicy.rollouts.duplicates import (
    IMPROBABLE,
    completion_keys,
    draws_as_scored,
    duplicate_stats,
    duplicate_stats_here,
    late_copies,
    marked_duplicates,
)
from trl_offpolicy.types import PolicyBatch

IDS = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 0], [7, 6, 5]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()


def found(ids=IDS, mask=MASK, logps=None, group_size=4):
    stats = duplicate_stats(ids, mask, logps, group_size=group_size)
    return {key.rpartition("/")[2]: float(stat) for key, stat in stats.items()}


def test_a_key_tells_ids_order_and_length_apart_and_leaves_padding_out():
    first, same, shorter, turned = completion_keys(IDS, MASK).tolist()
    assert first == same
    assert len({first, shorter, turned}) == 3
    padded = torch.nn.functional.pad(IDS, (0, 2), value=9)
    assert completion_keys(padded, torch.nn.functional.pad(MASK, (0, 2))).tolist() == [first, same, shorter, turned]


def test_keys_of_many_random_rows_do_not_collide():
    ids = torch.randint(0, 50, (20_000, 6), generator=torch.Generator().manual_seed(0))
    rows = len(set(map(tuple, ids.tolist())))
    assert len(set(completion_keys(ids, torch.ones_like(ids).bool()).tolist())) == rows


def test_distinct_completions_are_counted_within_their_group():
    assert found() == {"distinct_fraction": 0.75}
    assert found(group_size=2) == {"distinct_fraction": 0.75}  # (a a) (b c)
    assert found(IDS[[0, 3, 1, 3]], MASK[[0, 3, 1, 3]], group_size=2) == {"distinct_fraction": 1.0}


def test_copies_are_those_that_chance_does_not_repeat():
    logps = torch.full((4, 3), (IMPROBABLE - 0.1) / 3)
    logps[2] *= 1.5  # two tokens
    assert found(logps=logps)["copied_fraction"] == 0.5
    logps[0] = IMPROBABLE  # its copy is probable now, as far as it knows
    logps[1] = -0.1
    assert found(logps=logps)["copied_fraction"] == pytest.approx(1 / 3)


def test_padding_does_not_make_a_completion_improbable():
    rows = [2, 2, 2, 2]
    stats = duplicate_stats(IDS[rows], MASK[rows], torch.where(MASK, -0.1, -1000.0)[rows], group_size=4)
    assert stats.compute() == {"offpolicy/rollout/distinct_fraction": 0.25}  # nothing improbable: no copied_fraction


def test_missing_log_probs_call_nothing_copied():
    stats = duplicate_stats(IDS, MASK, torch.full((4, 3), math.nan), group_size=4)
    assert "offpolicy/rollout/copied_fraction" not in stats.compute()


def test_rows_without_a_token_do_not_count() -> None:
    """Completions that were cut and left the loss are no copies of each other."""
    ids = torch.tensor([[5, 6], [7, 8], [9, 9], [9, 9]])
    mask = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 1]]).bool()
    logps = torch.full((4, 2), -9.0)
    found = duplicate_stats(ids, mask, logps, group_size=4).compute()
    assert found["offpolicy/rollout/distinct_fraction"] == 1 and found["offpolicy/rollout/copied_fraction"] == 0


def batch_of(logps, *, versions=None, old=None):
    return PolicyBatch(
        per_token_logps=logps,
        old_per_token_logps=old,
        completion_mask=MASK,
        advantages=torch.zeros(len(MASK)),
        policy_versions=versions,
        current_version=1,
    )


def marked(drawn_as_scored=True):
    rows = {"completion_ids": IDS, "completion_mask": MASK.long()}
    stats = marked_duplicates(rows, group_size=4, drawn_as_scored=drawn_as_scored)
    assert stats.compute() == {"offpolicy/rollout/distinct_fraction": 0.75}
    return rows


def late(rows, batch):
    return late_copies(rows, batch).compute().get("offpolicy/rollout/copied_fraction")


def test_without_an_engines_log_probs_those_of_the_trainer_tell_copies_from_chance():
    improbable, sure = torch.full((4, 3), IMPROBABLE), torch.full((4, 3), -0.1)
    assert late(marked(), batch_of(improbable)) == 0.5
    assert late(marked(), batch_of(sure)) is None  # honest repeats of a policy of low entropy
    rows = marked()
    assert late(rows, batch_of(improbable)) == 0.5
    assert late(rows, batch_of(improbable)) is None  # a second pass over the rows


def test_rows_of_older_weights_count_only_if_their_log_probs_are_known():
    improbable, stale = torch.full((4, 3), IMPROBABLE), torch.tensor([0, 0, 1, 1])
    assert late(marked(), batch_of(improbable, versions=stale)) == 0.0  # the copies are of version 0, now is 1
    assert late(marked(), batch_of(torch.zeros(4, 3), versions=stale, old=improbable)) == 0.5


def test_nothing_is_copied_where_the_trainer_does_not_score_what_was_drawn_from():
    assert late(marked(drawn_as_scored=False), batch_of(torch.full((4, 3), IMPROBABLE))) is None
    assert draws_as_scored({"repetition_penalty": 1.0, "generation_kwargs": {"top_p": 0.9}})
    assert not draws_as_scored({"repetition_penalty": 1.1})
    assert not draws_as_scored({"generation_kwargs": {"no_repeat_ngram_size": 2}})


def test_rows_of_one_rank_are_told_apart_by_their_group():
    logps = torch.full((4, 3), IMPROBABLE)
    seen = [duplicate_stats_here(IDS, MASK, logps, torch.tensor(ids)).compute() for ids in ([7, 7, 7, 7], [7, 8, 7, 8])]
    assert [one["offpolicy/rollout/distinct_fraction"] for one in seen] == [0.75, 1.0]
    assert [one["offpolicy/rollout/copied_fraction"] for one in seen] == [0.5, 0.0]
