"""Two ranks that draw their completions go on from a checkpoint exactly: each draws what it would have drawn."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from processes import run_command

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
RESUMED_AT = (2, 3)
"""After 2 steps a generation batch is used up; after 3 the next one is in the middle, and is in the checkpoint."""


class Drawn(pl.Callback):
    """Keeps the completions that this rank trains on, step by step."""

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = pl_module.generation._buffer.micro_batches[batch.slot]
        kept = zip(rows["completion_ids"], rows["completion_mask"].bool(), strict=True)
        self.steps.append([ids[mask].tolist() for ids, mask in kept])


def train(folder: Path, checkpoint: str | None) -> None:
    """Two optimizer steps on each generation batch of transformers' ``generate``; every rank leaves what it saw."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import data, module, trainer

    pl.seed_everything(1, verbose=False)
    drawn = Drawn()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    ours = module(optimizer=partial(torch.optim.SGD, lr=0.1), sampling={"max_tokens": 12})
    owner = trainer(folder, devices=2, strategy="ddp", max_steps=STEPS, enable_checkpointing=True,
                    callbacks=[drawn, saving])  # fmt: skip
    if checkpoint is not None:
        torch.rand(7)  # what a process draws before it resumes does not matter
    owner.fit(ours, data(steps_per_generation=2), ckpt_path=checkpoint, weights_only=checkpoint is not None or None)
    seen = {"drawn": drawn.steps, "weights": ours.policy.state_dict(), "state": torch.get_rng_state()}
    torch.save(seen, folder / f"rank-{owner.global_rank}.pt")


def ranks_of(folder: Path, checkpoint: Path | None = None) -> list[dict[str, Any]]:
    """What both ranks left; Lightning starts the second process."""
    folder.mkdir()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        str(folder),
        *([] if checkpoint is None else [str(checkpoint)]),
    ]
    done = run_command(command, seconds=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, ranks_of(folder)


@pytest.mark.parametrize("step", RESUMED_AT)
def test_each_rank_draws_what_the_whole_run_drew(
    whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path, step: int
) -> None:
    folder, unbroken = whole
    resumed = ranks_of(tmp_path / "resumed", folder / f"step={step}.ckpt")
    for mine, theirs in zip(resumed, unbroken, strict=True):
        assert len(theirs["drawn"]) == STEPS and mine["drawn"] == theirs["drawn"][step:]
        assert torch.equal(mine["state"], theirs["state"])
        assert all(torch.equal(mine["weights"][name], weight) for name, weight in theirs["weights"].items())
    first, second = (one["drawn"] for one in unbroken)
    assert not {tuple(row) for rows in first for row in rows} & {tuple(row) for rows in second for row in rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
