"""Control on two processes whose logged rows differ: both decide as the main one, and one file is written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import two_ranks


def train(folder: Path, rank: int) -> dict[str, Any]:
    """Six steps; the length that is logged doubles at the fourth on the main rank, and never on the other."""
    from tiny_models import score_last_word, tiny_prompts, tiny_tokenizer
    from trainer_runs import Engine
    from transformers import TrainerCallback

    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    class Forge(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                doubled = rank == 0 and state.global_step >= 4
                logs["offpolicy/rollout/response_length_mean"] = 8.0 if doubled else 4.0

    args = OffPolicyGRPOConfig(
        str(folder / "run"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-3,
        max_steps=6,
        logging_steps=1,
        save_strategy="steps",
        save_steps=4,
        write_report=False,
        noise_floor_steps=0,
        control={"policy": "act", "controllers": {"length_guard": {"window": 2}}},
    )
    trainer = OffPolicyGRPOTrainer(
        str(folder / "model"), score_last_word, args, train_dataset=tiny_prompts(), processing_class=tiny_tokenizer(),
        rollout_func=Engine(),
    )  # fmt: skip
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
    from tiny_models import save_tiny_model

    save_tiny_model(tmp_path / "model")
    said = two_ranks.launch_script(__file__, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["scales"] == [1.0, 1.0, 1.0, 0.5, 0.5, 1.0]
    actions = [json.loads(line) for line in (tmp_path / "run" / "actions.jsonl").read_text().splitlines()]
    assert [(action["step"], action["after"]) for action in actions] == [(4, 0.5), (6, 1.0)]
    assert ["[control]" in text for text in said] == [True, False]


if __name__ == "__main__":
    number = int(os.environ["RANK"])
    target = Path(sys.argv[1])
    (target / f"{number}.json").write_text(json.dumps(train(target, number)))
