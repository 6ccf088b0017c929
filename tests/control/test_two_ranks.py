"""Control on two processes whose logged rows differ: both decide as the main one, and one file is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import two_ranks


def train(folder: Path, rank: int) -> dict[str, Any]:
    """Six steps; the length that is logged doubles at the fourth on the main rank, and never on the other."""
    from trainer_runs import Engine
    from transformers import TrainerCallback

    class Forge(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                doubled = rank == 0 and state.global_step >= 4
                logs["offpolicy/rollout/response_length_mean"] = 8.0 if doubled else 4.0

    control = {"policy": "act", "controllers": {"length_guard": {"window": 2}}}
    trainer = two_ranks.tiny_trainer(
        folder, "run", Engine(), learning_rate=1e-3, max_steps=6, save_strategy="steps", save_steps=4, control=control
    )
    trainer.callback_handler.callbacks.insert(0, Forge())
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    again = {"scales": [row["offpolicy/control/learning_rate_scale"] for row in logged]}
    weights = sum(
        float(p.detach().double().sum()) for p in trainer.accelerator.unwrap_model(trainer.model).parameters()
    )
    return {**again, "state": trainer._control.state.as_dict()["controllers"], "weights": weights}


@pytest.mark.slow
def test_both_ranks_decide_as_the_main_one(tmp_path: Path) -> None:
    (first, second), printed = two_ranks.trained(__file__, tmp_path)
    assert first == second and first["scales"] == [1.0, 1.0, 1.0, 0.5, 0.5, 1.0]
    actions = [json.loads(line) for line in (tmp_path / "run" / "actions.jsonl").read_text().splitlines()]
    assert [(action["step"], action["after"]) for action in actions] == [(4, 0.5), (6, 1.0)]
    assert ["[control]" in text for text in printed] == [True, False]


if __name__ == "__main__":
    two_ranks.leave(train)
