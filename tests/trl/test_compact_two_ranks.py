"""Sorted, trimmed and shared micro-batches on two processes: the same optimizer steps as on the plain path."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from tiny_models import save_tiny_model

RUNS: dict[str, tuple[bool, Any]] = {"plain": (False, False), "trimmed": (True, False), "shared": (True, True)}


def train(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """Three steps of 2 x 2 x 4 rows under DDP, with a reference model: gradients and metrics of each."""
    from both_trainers import WatchTRL
    from datasets import Dataset
    from tiny_models import WORDS, score_last_word, tiny_tokenizer
    from trainer_runs import Engine, records

    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    engine = Engine(noise=0.3)
    engine.random.manual_seed(rank)  # or both ranks would say the same words
    trim, share = RUNS[name]
    args = OffPolicyGRPOConfig(
        str(folder / name), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
        max_completion_length=6, learning_rate=2e-2, optim="sgd", max_grad_norm=1e9, max_steps=3, logging_steps=1,
        save_strategy="no", write_report=False, noise_floor_steps=0, beta=0.1, trim_padding=trim, share_prefix=share,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 4 + i % 7]) for i in range(24)]})
    trainer = OffPolicyGRPOTrainer(
        str(folder / "model"), score_last_word, args, train_dataset=prompts, processing_class=tiny_tokenizer(),
        rollout_func=engine,
    )  # fmt: skip
    shared = []
    original = trainer._compact._shared.prompts
    trainer._compact._shared.prompts = lambda *given: shared.append(original(*given)) or shared[-1]  # type: ignore[method-assign,func-returns-value]
    watch = WatchTRL(trainer.model)
    trainer.add_callback(watch)
    trainer.train()
    return {
        "gradients": watch.gradients,
        "shared": sum(found is not None for found in shared),
        "records": records(trainer) if rank == 0 else None,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model")
    two_ranks.launch_script(__file__, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trimmed", "shared"])
def test_the_steps_are_those_of_the_plain_path(ranks: list[dict[str, Any]], name: str) -> None:
    from both_trainers import distance

    assert [said["plain"]["shared"] for said in ranks] == [0, 0]
    assert all((said[name]["shared"] > 0) == (name == "shared") for said in ranks)
    for said in ranks:
        assert len(said[name]["gradients"]) == 3
        for ours, theirs in zip(said[name]["gradients"], said["plain"]["gradients"], strict=True):
            assert max(float(gradient.abs().max()) for gradient in theirs.values()) > 1e-3
            assert distance(ours, theirs) < 1e-4
    for ours, theirs in zip(ranks[0][name]["records"], ranks[0]["plain"]["records"], strict=True):
        for key in ("loss", "grad_norm", "kl", "offpolicy/mismatch/kl_k1"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = int(os.environ["RANK"])
    torch.save({name: train(Path(sys.argv[1]), name, here) for name in RUNS}, Path(sys.argv[1]) / f"{here}.pt")
