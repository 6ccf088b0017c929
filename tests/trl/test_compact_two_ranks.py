"""Sorted, trimmed and shared micro-batches on two processes: the same optimizer steps as on the plain path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import two_ranks

RUNS: dict[str, tuple[Any, Any]] = {
    "plain": (False, False),
    "trimmed": (True, False),
    "shared": (True, True),
    "ranks": ("ranks", False),
}


def train(folder: Path, name: str, rank: int) -> dict[str, Any]:
    """Three steps of 2 x 2 x 4 rows under DDP, with a reference model: gradients and metrics of each.

    Every other prompt is long: where both of a rank's are, rows that change ranks pay.
    """
    from both_trainers import WatchTRL
    from datasets import Dataset
    from tiny_models import WORDS
    from trainer_runs import Engine, records

    engine = Engine(noise=0.3)
    engine.random.manual_seed(rank)  # or both ranks would say the same words
    trim, share = RUNS[name]
    prompts = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + (4 + i % 7, 40)[i % 2]]) for i in range(24)]})
    trainer = two_ranks.tiny_trainer(
        folder, name, engine, prompts=prompts, per_device_train_batch_size=4, learning_rate=2e-2, optim="sgd",
        max_grad_norm=1e9, max_steps=3, beta=0.1, trim_padding=trim, share_prefix=share,
    )  # fmt: skip
    shared = []
    original = trainer._compact._shared.prompts
    trainer._compact._shared.prompts = lambda *given: shared.append(original(*given)) or shared[-1]  # type: ignore[method-assign,func-returns-value]
    split, moved = trainer._compact.split, []

    def noted(rows: Any, parts: int) -> Any:
        found = split(rows, parts)
        moved.append(set(rows["group_ids"].tolist()) != {n for part in found for n in part["group_ids"].tolist()})
        return found

    trainer._compact.split = noted  # type: ignore[method-assign]
    watch = WatchTRL(trainer.model)
    trainer.add_callback(watch)
    trainer.train()
    return {
        "gradients": watch.gradients,
        "shared": sum(found is not None for found in shared),
        "moved": moved,
        "records": records(trainer) if rank == 0 else None,
    }


def train_all(folder: Path, rank: int) -> dict[str, Any]:
    return {name: train(folder, name, rank) for name in RUNS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes say, by rank."""
    said, _ = two_ranks.trained(__file__, tmp_path_factory.mktemp("ranks"))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trimmed", "shared", "ranks"])
def test_the_steps_are_those_of_the_plain_path(ranks: list[dict[str, Any]], name: str) -> None:
    from both_trainers import distance

    assert [said["plain"]["shared"] for said in ranks] == [0, 0]
    assert all((said[name]["shared"] > 0) == (name == "shared") for said in ranks)
    assert all(any(said[name]["moved"]) == (name == "ranks") for said in ranks)  # rows of the other rank
    for said in ranks:
        assert len(said[name]["gradients"]) == 3
        for ours, theirs in zip(said[name]["gradients"], said["plain"]["gradients"], strict=True):
            assert max(float(gradient.abs().max()) for gradient in theirs.values()) > 1e-3
            assert distance(ours, theirs) < 1e-4
    for ours, theirs in zip(ranks[0][name]["records"], ranks[0]["plain"]["records"], strict=True):
        for key in ("loss", "grad_norm", "kl", "offpolicy/mismatch/kl_k1"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key


if __name__ == "__main__":
    two_ranks.leave(train_all)
