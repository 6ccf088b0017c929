"""Copies of a group that lies on two ranks: each rank marks its own rows, and the log-probs are those of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import two_ranks

from trl_offpolicy.functional.collective import gather_rows
from trl_offpolicy.rollouts.duplicates import IMPROBABLE, late_copies, marked_duplicates
from trl_offpolicy.types import PolicyBatch

OF_RANK = [[[5, 6], [7, 8]], [[5, 6], [9, 9]]]
"""A group of four: the first rows of both ranks are equal."""


def run(rank: int) -> dict[str, float]:
    ids = torch.tensor(OF_RANK[rank])
    rows = {"completion_ids": ids, "completion_mask": torch.ones_like(ids)}
    stats = marked_duplicates(rows, group_size=4, drawn_as_scored=True)
    logps = torch.full((2, 2), IMPROBABLE)
    logps[1] = 0.0 if rank else IMPROBABLE  # three rows are improbable, two of them equal
    batch = PolicyBatch(per_token_logps=logps, completion_mask=torch.ones_like(ids), advantages=torch.zeros(2))
    return stats.union(late_copies(rows, batch)).all_reduce(gather_rows).compute()


@pytest.mark.integration
def test_a_copy_on_the_other_rank_is_seen(tmp_path: Path) -> None:
    for said in two_ranks.launch(__file__, run, tmp_path):
        assert said["offpolicy/rollout/distinct_fraction"] == 0.75
        assert said["offpolicy/rollout/copied_fraction"] == pytest.approx(2 / 3)


if __name__ == "__main__":
    two_ranks.join(run)
