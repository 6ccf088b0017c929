"""Two real processes through Lightning's own DDP strategy, compared with one process on the same completions."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def train(
    folder: Path,
    *,
    devices: int,
    strategy: Any = "auto",
    tools: bool = False,
    perturbation: float | None = None,
    trim: Any = True,
    uneven: bool = False,
) -> None:
    """Two steps of 8 completions in all; every rank leaves what it saw in ``folder``.

    Args:
        uneven: one rank's prompts are long and the other's short, in two micro-batches a step.
    """
    import lightning.pytorch as pl
    from lightning_runs import Watch, data, module, trainer
    from tiny_models import WORDS, tiny_prompts

    from lightning_module import RunFolder, rollouts
    from trl_offpolicy.rollouts import perturbed_forward

    moved: list[bool] = []
    deal = rollouts.balanced

    def dealing(rows: Any, *rest: Any) -> Any:
        found = deal(rows, *rest)
        moved.append(found[0] is not rows)
        return found

    rollouts.balanced = dealing
    drawn: list[float] = []
    normal = perturbed_forward._normal

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        noise = normal(hidden)
        drawn.append(float(noise.flatten()[0]))
        return noise

    perturbed_forward._normal = noted
    pl.seed_everything(1, verbose=False)
    watch = Watch()
    plain = {"correction": CORRECTION, "entropy": ENTROPY}
    prompts, engine, options = agent() if tools else (tiny_prompts(), Echo(), plain)
    if uneven:  # two by two, as a rank takes them in a step
        prompts = [{"prompt": " ".join(WORDS[i : i + (40, 3)[i // 2 % 2]])} for i in range(32)]
        options = {"correction": CORRECTION}  # terms of entropy tie rows to the micro-batch that they were drawn into
    ours = module(engine, optimizer=partial(torch.optim.SGD, lr=0.1), correct_threshold=0.5,
                  perturbation=perturbation, trim_padding=trim, **options)  # fmt: skip
    owner = trainer(
        folder, devices=devices, strategy=strategy, max_steps=2,
        accumulate_grad_batches=1 + uneven,
        callbacks=[watch, RunFolder(str(folder / "run"), report=False)],
    )  # fmt: skip
    sizes = {"micro_batch_size": 8 // devices, "val_dataset": [*prompts][:5], "val_batch_size": 2}
    owner.fit(ours, data(prompts, **sizes))
    held_out = owner.validate(ours, data(prompts, **sizes), verbose=False)[0]
    owner.save_checkpoint(folder / "last.ckpt")
    perturbed_forward._normal, rollouts.balanced = normal, deal
    seen = {"logs": watch.logs, "weights": watch.weights, "losses": watch.losses, "held_out": held_out,
            "world": owner.world_size, "drawn": drawn, "moved": moved}  # fmt: skip
    torch.save(seen, folder / f"rank-{owner.global_rank}.pt")


def agent() -> tuple[Any, Any, dict[str, Any]]:
    """Prompts, an engine whose turns depend on their context alone, and the settings of an agent with tools."""
    from scripted_agents import Script, ScriptedEngine, add, byte_model, byte_tokenizer, later

    settings = {
        "model": byte_model(), "tokenizer": byte_tokenizer(), "tools": [add, later], "correction": "paper/turn-is",
        "sampling": {"max_tokens": 300}, "max_tool_calling_iterations": 2, "check_token_ids": "raise",
        "reward_funcs": lambda completions, **_: [float(len(str(one)) % 7) for one in completions],
    }  # fmt: skip
    prompts = [{"prompt": [{"role": "user", "content": f"What is {i:02} + 4?"}]} for i in range(32)]
    return prompts, ScriptedEngine(Script(model=byte_model, forgetful=True)), settings


ENTROPY = {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 0.0}
"""The quantile is that of both ranks. The coefficient moves alike; its bonus, a mean of rank means, is not in force."""


CORRECTION = {
    "preset": "paper/tis",
    "correction": {
        "keep": [
            {"type": "ratio_band", "level": "sequence_mean", "low": 0.7, "high": 1.4},
            {"type": "group_rejection"},
        ],
        "normalize": "kept",
    },
}


def Echo() -> Any:
    """An engine whose completions depend on the prompt alone, so that one and two processes sample the same."""
    from lightning_runs import Played
    from trainer_runs import Engine

    class Repeat(Played):
        def generate(self, prompt_ids: Any, sampling: Any, *, n: int = 1) -> Any:
            prompts, completions, logprobs = [], [], []
            for ids in prompt_ids:
                words = Engine(shift=0.1, noise=0.3)
                words.random.manual_seed(sum(ids) + (self.version or 0))
                for _ in range(n):
                    prompts.append(list(ids))
                    completions.append(words._words())
                    logprobs.append(words._score(self.source.model, prompts[-1], completions[-1]))
            self.calls.append({"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs})
            return super().generate(prompt_ids, sampling, n=n)

    return Repeat([])


def start(folder: Path, **options: Any) -> None:
    """Run :func:`train` in a process of its own; Lightning starts the second one."""
    folder.mkdir()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), json.dumps(options)]
    done = run_command(command, seconds=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def loaded(folder: Path, rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = torch.load(folder / f"rank-{rank}.pt", weights_only=False)
    return seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    start(folder / "two", devices=2, strategy="ddp")
    torch.set_num_threads(1)
    (folder / "one").mkdir()
    train(folder / "one", devices=1)
    return folder


def test_two_processes_train_as_one(runs: Path) -> None:
    """Weights, loss and every logged number, wide scope (groups, normaliser over all ranks) included."""
    one, ranks = loaded(runs / "one", 0), [loaded(runs / "two", rank) for rank in range(2)]
    assert [rank["world"] for rank in ranks] == [2, 2] and one["world"] == 1
    for step in range(2):
        for name, value in one["weights"][step].items():
            assert torch.equal(ranks[0]["weights"][step][name], ranks[1]["weights"][step][name])
            assert torch.allclose(ranks[0]["weights"][step][name], value, atol=2e-6), name
        for rank in ranks:
            same_numbers(rank["logs"][step], one["logs"][step])
    assert ranks[0]["losses"][0] != ranks[1]["losses"][0]  # each trained on rows of its own


def test_rows_that_change_ranks_teach_the_same(tmp_path: Path) -> None:
    start(tmp_path / "two", devices=2, strategy="ddp", trim="ranks", uneven=True)
    torch.set_num_threads(1)
    (tmp_path / "one").mkdir()
    train(tmp_path / "one", devices=1, uneven=True)
    one, ranks = loaded(tmp_path / "one", 0), [loaded(tmp_path / "two", rank) for rank in range(2)]
    assert any(ranks[0]["moved"]) and ranks[0]["moved"] == ranks[1]["moved"]
    for step in range(2):
        for name, value in one["weights"][step].items():
            assert torch.equal(ranks[0]["weights"][step][name], ranks[1]["weights"][step][name])
            assert torch.allclose(ranks[0]["weights"][step][name], value, atol=2e-6), name
        for rank in ranks:
            same_numbers(rank["logs"][step], one["logs"][step])


def same_numbers(logs: dict[str, float], expected: dict[str, float]) -> None:
    from trainer_runs import TIMES

    skip = {*TIMES, "offpolicy/rollout/sync_seconds"}
    assert set(logs) == set(expected) and len(logs) > 100
    for key in set(logs) - skip:
        assert logs[key] == pytest.approx(expected[key], abs=2e-5, rel=2e-5), key


def test_two_processes_with_tools_train_as_one(tmp_path: Path) -> None:
    """Each rank runs its own loop, with other numbers of rounds; tool calls are counted over all ranks."""
    start(tmp_path / "two", devices=2, strategy="ddp", tools=True)
    (tmp_path / "one").mkdir()
    train(tmp_path / "one", devices=1, tools=True)
    one, ranks = loaded(tmp_path / "one", 0), [loaded(tmp_path / "two", rank) for rank in range(2)]
    for rank in ranks:
        for step in range(2):
            same_numbers(rank["logs"][step], one["logs"][step])
        assert rank["held_out"] == pytest.approx(one["held_out"])
    assert one["logs"][0]["tools/call_frequency"] > 0.5 and one["held_out"]["eval_tools/call_frequency"] > 0


def test_each_rank_has_noise_of_its_own_and_the_scales_are_one(tmp_path: Path) -> None:
    """``seed_everything`` gives both ranks one seed."""
    start(tmp_path / "two", devices=2, strategy="ddp", perturbation=0.05)
    one, other = (loaded(tmp_path / "two", rank) for rank in range(2))

    assert len(one["drawn"]) == 4 and not set(one["drawn"]) & set(other["drawn"])
    scales = [[row["offpolicy/perturbation/std"] for row in rank["logs"]] for rank in (one, other)]
    assert scales[0] == scales[1] and scales[0][0] != scales[0][1]
    for name, value in one["weights"][-1].items():
        assert torch.equal(value, other["weights"][-1][name])


def test_held_out_numbers_are_those_of_all_ranks(runs: Path) -> None:
    one, ranks = loaded(runs / "one", 0)["held_out"], [loaded(runs / "two", rank)["held_out"] for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert 0 < one["eval_pass@1"] <= 1 and ranks[0] == pytest.approx(one)


def test_the_run_folder_of_two_ranks_is_one(runs: Path) -> None:
    lines = (runs / "two" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [1, 2]
    parts = sorted(path.name for path in (runs / "two" / "run" / "rollouts.parquet").glob("part-*"))
    assert parts == [f"part-000000{step}-000{rank}.parquet" for step in range(2) for rank in range(2)]


def test_a_checkpoint_holds_the_state_of_every_rank(runs: Path) -> None:
    state = torch.load(runs / "two" / "last.ckpt", weights_only=True)["offpolicy"]
    assert len(state["ranks"]) == 2
    first, second = (rank["random"]["torch"] for rank in state["ranks"])
    assert len(first) == len(second) and not torch.equal(first, second)  # test_ddp_resume.py goes on from them


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = json.loads(sys.argv[2])
    train(Path(sys.argv[1]), **options)
