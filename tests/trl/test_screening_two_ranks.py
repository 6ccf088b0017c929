"""Two processes of the TRL trainer, of which only the second sees a reply that cannot be used, or a tool's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import two_ranks
from trainer_runs import Engine, generation_batches


class Broken(Engine):
    """The second rank's engine gives one empty reply in its first call."""

    def __init__(self, rank: int) -> None:
        super().__init__(noise=0.3)
        self.random.manual_seed(rank)
        self.broken = rank == 1

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        if self.broken:
            output["completion_ids"][1], output["logprobs"][1] = [], []
            self.broken = False
        return output


def train(folder: Path, mode: str, rank: int) -> dict[str, Any]:
    """Two steps of 2 x 2 x 2 rows; a group of four lies half on each rank."""
    trainer = two_ranks.tiny_trainer(
        folder, mode, Broken(rank), max_steps=2, offpolicy="paper/tis", on_bad_rollout=mode
    )
    outputs = generation_batches(trainer)
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    first = outputs[0]
    return {
        "rewards": first["group_rewards"].tolist(),
        "advantages": first["advantages"].tolist(),
        "tokens": int(first["completion_mask"].sum()),
        "all_tokens": int(first["num_items_in_batch"]),
        "steps": trainer.state.global_step,
        "share": [row.get("offpolicy/rollout/unusable_fraction") for row in trainer.state.log_history if "loss" in row],
    }


class WithTools(Engine):
    """The second rank's rollout function says of the last token of each completion that a tool wrote it."""

    def __init__(self, rank: int) -> None:
        super().__init__(noise=0.3)
        self.random.manual_seed(rank)
        self.masks = rank == 1

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        if self.masks:
            output["env_mask"] = [[1] * (len(row) - 1) + [0] for row in output["completion_ids"]]
        return output


def with_tools(folder: Path, rank: int) -> dict[str, Any]:
    trainer = two_ranks.tiny_trainer(folder, "tools", WithTools(rank), max_steps=2, offpolicy="paper/tis")
    outputs = generation_batches(trainer)
    trainer.train()
    return {
        "masked": int((outputs[0]["tool_mask"] == 0).sum()),
        "rows": [row for row in trainer.state.log_history if "loss" in row],
    }


def train_both(folder: Path, rank: int) -> dict[str, Any]:
    found = {mode: train(folder, mode, rank) for mode in ("drop", "raise")}
    return {**found, "tools": with_tools(folder, rank)}


@pytest.mark.integration
def test_one_rank_sees_it_and_both_go_on_or_both_stop(tmp_path: Path) -> None:
    (first, second), _ = two_ranks.trained(__file__, tmp_path)

    dropped = [first["drop"], second["drop"]]
    assert [one["steps"] for one in dropped] == [2, 2]
    assert dropped[0]["share"] == dropped[1]["share"] == [1 / 8, None]
    assert dropped[0]["all_tokens"] == dropped[1]["all_tokens"] == dropped[0]["tokens"] + dropped[1]["tokens"]
    # the rows of a rank are a group of four here: rank 1's second reply is missing from its baseline
    group = dropped[1]["rewards"][0]
    assert [value != value for value in group] == [False, True, False, False]
    mean = sum(value for value in group if value == value) / 3
    signs = [0.0 if value != value else value - mean for value in group]
    advantages = dropped[1]["advantages"]
    assert advantages[1] == 0.0 and all(a * s > 0 for a, s in zip(advantages, signs, strict=True) if s)

    assert first["raise"]["error"] == second["raise"]["error"]
    assert (
        first["raise"]["error"].startswith("RolloutError: 1 of 8 replies")
        and "Rank 1: row 1" in first["raise"]["error"]
    )

    # a mask of one rank is one of both: all measure what comes after a tool
    assert first["tools"]["masked"] == 0 < second["tools"]["masked"]
    assert all("offpolicy/mismatch/kl_k1" in row for row in first["tools"]["rows"])
    assert len(first["tools"]["rows"]) == 2


if __name__ == "__main__":
    two_ranks.leave(train_both)
