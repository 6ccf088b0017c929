"""Two processes of the TRL trainer, of which only the second sees a reply that cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import two_ranks
from tiny_models import save_tiny_model
from trainer_runs import Engine


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
    from tiny_models import score_last_word, tiny_prompts, tiny_tokenizer
    from trainer_runs import generation_batches

    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    args = OffPolicyGRPOConfig(
        str(folder / mode), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_generations=4,
        max_completion_length=6, max_steps=2, logging_steps=1, save_strategy="no", write_report=False,
        noise_floor_steps=0, offpolicy="paper/tis", on_bad_rollout=mode,
    )  # fmt: skip
    trainer = OffPolicyGRPOTrainer(
        str(folder / "model"), score_last_word, args, train_dataset=tiny_prompts(), processing_class=tiny_tokenizer(),
        rollout_func=Broken(rank),
    )  # fmt: skip
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


@pytest.mark.integration
def test_one_rank_sees_it_and_both_go_on_or_both_stop(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    printed = two_ranks.launch_script(__file__, tmp_path)
    first, second = (json.loads(text.strip().splitlines()[-1]) for text in printed)

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


if __name__ == "__main__":
    import os

    own = int(os.environ["RANK"])
    done = {mode: train(Path(sys.argv[1]), mode, own) for mode in ("drop", "raise")}
    print(json.dumps(done))
