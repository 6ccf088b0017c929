"""Numbers that reward functions log on some ranks only, in two real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import two_ranks

import trl_offpolicy as op
from lightning_module.measuring import Measuring

LOGGED = [{"errors": [1.0], "both": [2.0, 4.0]}, {"hits": [5.0], "both": [9.0]}]


def run(rank: int) -> dict[str, float]:
    measuring = Measuring(["score"])
    measuring.loss.update(torch.tensor(0.0))
    for name, values in LOGGED[rank].items():
        for value in values:
            measuring.add_reward_metric(name, value)
    first = measuring.close(op.Objective(), torch.device("cpu"))
    measuring.loss.update(torch.tensor(0.0))
    again = measuring.close(op.Objective(), torch.device("cpu"))
    return {name: first[name] for name in ("errors", "hits", "both")} | {"left": float("both" in again)}


@pytest.mark.integration
def test_every_name_is_the_mean_of_the_values_that_any_rank_logged(tmp_path: Any) -> None:
    expected = {"errors": 1.0, "hits": 5.0, "both": 5.0, "left": 0.0}
    assert two_ranks.launch(__file__, run, tmp_path) == [expected, expected]


if __name__ == "__main__":
    two_ranks.join(run)
