"""Whose log-probs verl gives as the old ones: one answer for two ranks, of which one has no tokens."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import two_ranks

from trl_offpolicy.integrations._common import read_method
from trl_offpolicy.integrations.verl import _old_policy

OLD = torch.tensor([[-1.0, -2.0]])


def run(rank):
    method = read_method({"preset": "verl/bypass_ppo_clip"}, where="offpolicy", framework="verl")
    answers = []
    for sampling in (OLD, OLD - 0.1 * rank):  # in mode bypass; then of another policy, seen by rank 1 alone
        for tokens in (1, rank):
            old = _old_policy(method, OLD, sampling, torch.full((1, 2), tokens), dist.group.WORLD)
            answers.append(old is None)
    return answers


@pytest.mark.integration
def test_both_ranks_measure_the_same(tmp_path):
    first, second = two_ranks.launch(__file__, run, Path(tmp_path))
    assert first == second == [True, True, False, False]


@pytest.mark.filterwarnings("error")
def test_a_micro_batch_without_tokens_says_nothing():
    method = read_method({"preset": "paper/tis"}, where="offpolicy", framework="verl")
    assert _old_policy(method, OLD, OLD, torch.zeros(1, 2), None) is OLD
    with pytest.warns(UserWarning, match="those of the sampler on every token"):
        assert _old_policy(method, OLD, OLD, torch.ones(1, 2), None) is OLD


if __name__ == "__main__":
    two_ranks.join(run)
