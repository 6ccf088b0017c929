"""Two ranks that draw their completions go on from a checkpoint exactly: each draws what it would have drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

STEPS, STOP = 4, 2


def train(folder: Path, rank: int) -> dict[str, Any]:
    """The whole run, then its second half again from the checkpoint: what this rank drew, and its last weights."""
    from trainer_runs import generation_batches

    def run(checkpoint: str | None) -> dict[str, Any]:
        trainer = two_ranks.tiny_trainer(
            folder, "run", None, learning_rate=1e-2, max_steps=STEPS, save_strategy="steps", save_steps=STOP
        )
        made = generation_batches(trainer)
        torch.manual_seed(99 + rank)  # those of the run, or of its checkpoint, come when it begins
        trainer.train(resume_from_checkpoint=checkpoint)
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        drawn = [batch["completion_ids"].tolist() for batch in made]
        return {"drawn": drawn, "weights": {name: value.clone() for name, value in weights.items()}}

    return {"whole": run(None), "rest": run(str(folder / "run" / f"checkpoint-{STOP}"))}


@pytest.mark.slow
def test_each_rank_draws_what_the_whole_run_drew(tmp_path: Path) -> None:
    said, _ = two_ranks.trained(__file__, tmp_path)
    for rank in said:
        whole, rest = rank["whole"], rank["rest"]
        assert len(whole["drawn"]) == STEPS and rest["drawn"] == whole["drawn"][STOP:]
        assert all(torch.equal(rest["weights"][name], weight) for name, weight in whole["weights"].items())
    assert said[0]["whole"]["drawn"] != said[1]["whole"]["drawn"]


if __name__ == "__main__":
    two_ranks.leave(train)
