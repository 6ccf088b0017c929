"""What ranks draw is independent, and what a validation draws is not taken from training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from processes import run_command

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.integration


class Drawn(pl.Callback):
    """Keeps the completions that this rank trains on, and the share of copies that is logged."""

    def __init__(self) -> None:
        self.completions: list[tuple[int, ...]] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = pl_module.generation._buffer.micro_batches[batch.slot]
        kept = zip(rows["completion_ids"], rows["completion_mask"].bool(), strict=True)
        self.completions += [tuple(ids[mask].tolist()) for ids, mask in kept]
        self.logs.append(dict(pl_module.step_logs))


def sample_one_prompt(folder: Path, engine: str, *, devices: int) -> None:
    """Two steps on copies of one prompt, under the seed that Lightning's command line sets on all ranks."""
    from lightning_runs import data, module, trainer
    from tiny_models import save_tiny_model, tiny_prompts

    pl.seed_everything(1, verbose=False)
    ours = module(
        {"type": "vllm", "max_model_len": 64, "dtype": "float32"} if engine == "vllm" else engine,
        model=str(save_tiny_model(folder / f"model-{os.environ.get('LOCAL_RANK', 0)}")),
        tokenizer=None,
        sampling={"max_tokens": 12},
    )
    drawn = Drawn()
    owner = trainer(folder, devices=devices, strategy="ddp", max_steps=2, callbacks=[drawn])
    prompts = tiny_prompts(1)
    same = prompts.select([0] * 16) if hasattr(prompts, "select") else [prompts[0]] * 16
    owner.fit(ours, data(same, micro_batch_size=8))
    torch.save((drawn.completions, drawn.logs), folder / f"rank-{owner.global_rank}.pt")


def run_again(folder: Path) -> None:
    """Training, validation and test in the same processes, without Lightning's seed: the rank's seed after each."""
    from lightning_runs import data, module, trainer
    from tiny_models import tiny_prompts

    torch.manual_seed(5)
    ours, seeds = module(), []
    owner = trainer(folder, devices=2, strategy="ddp", max_steps=1)
    prompts = data(val_dataset=tiny_prompts(4), val_batch_size=2)
    for run in (owner.fit, owner.validate, owner.test):
        run(ours, datamodule=prompts)
        seeds.append(torch.initial_seed())
    torch.save((seeds, torch.rand(8)), folder / f"rank-{owner.global_rank}.pt")


def in_processes(folder: Path, engine: str) -> list[Any]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # seed_everything of an earlier test left its seed in this process's environment
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    environment = {**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), engine]
    done = run_command(command, seconds=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm])])
def test_two_ranks_draw_apart(tmp_path: Path, engine: str) -> None:
    (first, logs), (second, _) = in_processes(tmp_path, engine)
    assert len(first) == len(second) == 16
    # twelve tokens of a model that knows nothing: equal ones are a seed that both ranks have
    long = [{row for row in rows if len(row) > 6} for rows in (first, second)]
    assert min(map(len, long)) > 4 and not long[0] & long[1]
    assert all(row["offpolicy/rollout/copied_fraction"] == 0.0 for row in logs)
    assert all(row["offpolicy/rollout/distinct_fraction"] > 0.8 for row in logs)


@pytest.mark.slow
def test_a_further_run_does_not_move_a_ranks_seed_again(tmp_path: Path) -> None:
    (first, drawn), (second, others) = in_processes(tmp_path, "again")
    assert first == [5, 5, 5] and second == [6, 6, 6]
    assert not torch.equal(drawn, others)


def trained(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], list[tuple[int, ...]]]:
    """Weights after three steps, and what was sampled for them."""
    from lightning_runs import data, module, trainer
    from tiny_models import tiny_prompts

    pl.seed_everything(1, verbose=False)
    drawn = Drawn()
    ours = module(learning_rate=1e-2)
    held_out = {"val_dataset": tiny_prompts(3), "val_batch_size": 2} if options else {}
    trainer(folder, max_steps=3, callbacks=[drawn], **options).fit(ours, data(**held_out))
    return ours.policy.state_dict(), drawn.completions


def test_validation_changes_nothing_of_training(tmp_path: Path) -> None:
    without, plain = trained(tmp_path / "without")
    validated, same = trained(
        tmp_path / "with", val_check_interval=1, num_sanity_val_steps=1, check_val_every_n_epoch=None
    )
    assert plain == same
    assert all(torch.equal(without[name], validated[name]) for name in without)


def test_every_validation_draws_the_same_noise(tmp_path: Path) -> None:
    """With frozen weights two validations give one number, whatever training drew in between."""
    from lightning_runs import data, module, trainer
    from tiny_models import tiny_prompts

    pl.seed_everything(1, verbose=False)
    ours, owner = module(), trainer(tmp_path)
    found = []
    for _ in range(2):
        found.append(owner.validate(ours, data(val_dataset=tiny_prompts(3), val_batch_size=2), verbose=False)[0])
        torch.rand(7)
    assert found[0] == found[1] and found[0]["eval_completions/mean_length"] > 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "again":
        run_again(Path(sys.argv[1]))
    else:
        sample_one_prompt(Path(sys.argv[1]), sys.argv[2], devices=2)
