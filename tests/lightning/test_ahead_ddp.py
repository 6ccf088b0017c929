"""Two real processes under a strategy of Lightning share one server that samples ahead, and train as one does."""

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

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


def train(folder: Path, *, devices: int, ahead: dict[str, Any], strategy: str, cut: bool, agents: bool) -> None:
    """Four steps of 8 completions in all; every rank leaves what it saw in ``folder``."""
    import pandas as pd
    from agent_runs import Library, conversations, tool_tokenizer
    from lightning_runs import data, module, trainer
    from lightning_shards import Shards, strategy_of
    from rollouts.ahead.fake_server import FakeServer, note_submissions, server_class
    from tiny_models import tiny_model, tiny_prompts

    from lightning_module import RunFolder, engines

    made: list[FakeServer] = []
    note_submissions(pytest.MonkeyPatch())
    # the second batch has a prompt that is answered at once, on rank 0, and one whose responses a sync cuts, on rank 1
    options = {"free": 3} if cut else {}
    engines.ServerEngine = server_class(tiny_model(), made, **options)  # type: ignore[misc, assignment]
    watch, server = Shards(), {"type": "server", "base_url": "http://127.0.0.1:1"}
    given: dict[str, Any] = {"environment_factory": Library, "tokenizer": tool_tokenizer(), "reward_funcs": None}
    given |= {"sampling": {"max_tokens": 24}, "max_tool_calling_iterations": 2}
    sgd = partial(torch.optim.SGD, lr=0.02)
    ours = module(server, correction="paper/tis", optimizer=sgd, async_rollouts=ahead, **(given if agents else {}))
    run = RunFolder(str(folder / "run"), report=False)
    ranks = {"devices": devices, "strategy": strategy_of(strategy, on_gpu=False)} if devices > 1 else {}
    owner = trainer(folder, callbacks=[watch, run], max_steps=STEPS, **ranks)
    owner.fit(ours, data(conversations(16) if agents else tiny_prompts(), micro_batch_size=8 // devices))
    frame = pd.read_parquet(folder / "run" / "rollouts.parquet")
    lags = [sorted(set(step - part.policy_version)) for step, part in frame.groupby("step")]
    crossing = [len(set(versions)) > 1 for versions in frame[frame.step == 1].sort_values("group_id").policy_versions]
    seen = {
        "crossing": crossing,
        "weights": watch.weights,
        "logs": watch.logs,
        "asked": sorted(made[0].asked),
        "lags": lags,
    }
    torch.save({**seen, "world": owner.world_size}, folder / f"rank-{owner.global_rank}.pt")


def run(folder: Path, *flags: str, devices: int, ahead: dict[str, Any], strategy: str = "ddp") -> list[dict[str, Any]]:
    """What each rank saw. Flags are "cut" and "agents"."""
    folder.mkdir()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), str(devices), json.dumps(ahead), strategy, *flags]
    environment["DS_ACCELERATOR"] = "cpu"
    done = run_command(command, seconds=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(devices)]


EVERYWHERE = ("recompute_proximal", "snapshot", "balance", "ewma")


@pytest.mark.parametrize(
    ("strategy", "old_logps"),
    [
        *(pytest.param("ddp", name, marks=pytest.mark.integration) for name in ("recompute_proximal", "model")),
        *(pytest.param("ddp", name, marks=pytest.mark.slow) for name in EVERYWHERE if name != "recompute_proximal"),
        *(pytest.param(kind, name, marks=pytest.mark.slow) for kind in ("fsdp2", "zero3") for name in EVERYWHERE),
    ],
)
def test_two_processes_train_as_one(strategy: str, old_logps: str, tmp_path: Path) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    ahead = {"lag": 1, "old_logps": old_logps} | ({"ewma_decay": 0.5} if old_logps == "ewma" else {})
    (one,) = run(tmp_path / "1", devices=1, ahead=ahead)
    ranks = run(tmp_path / "2", devices=2, ahead=ahead, strategy=strategy)

    assert one["lags"] == ranks[0]["lags"] == [[min(step, 1)] for step in range(STEPS)]
    assert ranks[0]["asked"] == one["asked"] and not ranks[1]["asked"]  # the main rank asks for both
    assert_same(ranks, one)
    for log in ranks[0]["logs"]:
        assert ("offpolicy/staleness/kl_k3" in log) == (old_logps in ("snapshot", "model", "balance"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_ranks_have_rows_of_different_versions(strategy: str, tmp_path: Path) -> None:
    """All ranks gather the weights of all these versions, or one would wait for the other for ever."""
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    ahead = {"lag": 2, "partial": "continue", "old_logps": "snapshot"}
    (one,) = run(tmp_path / "1", "cut", devices=1, ahead=ahead)
    ranks = run(tmp_path / "2", "cut", devices=2, ahead=ahead, strategy=strategy)

    assert one["crossing"] == ranks[0]["crossing"] == [False] * 4 + [True] * 4
    assert ranks[0]["asked"] == one["asked"] and not ranks[1]["asked"]  # the main rank asks for both
    assert_same(ranks, one)


@pytest.mark.integration
def test_two_processes_sample_their_own_agents(tmp_path: Path) -> None:
    ahead = {"lag": 1, "old_logps": "snapshot"}
    (one,) = run(tmp_path / "1", "agents", devices=1, ahead=ahead)
    ranks = run(tmp_path / "2", "agents", devices=2, ahead=ahead)

    assert one["lags"] == ranks[0]["lags"] == [[min(step, 1)] for step in range(STEPS)]
    assert sorted(ranks[0]["asked"] + ranks[1]["asked"]) == one["asked"]  # each where its environments are
    assert len(ranks[0]["asked"]) == len(ranks[1]["asked"])
    assert_same(ranks, one)
    for rank in ranks:
        for step, row in enumerate(rank["logs"]):
            assert row["tools/call_frequency"] == pytest.approx(one["logs"][step]["tools/call_frequency"])
            assert row["offpolicy/mismatch/logp_diff_max"] < 2e-5


def assert_same(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """Weights after each step and numbers, on each of two ranks."""
    assert [rank["world"] for rank in ranks] == [2, 2] and one["world"] == 1
    for rank in ranks:
        for step in range(STEPS):
            for name, value in one["weights"][step].items():
                assert torch.allclose(rank["weights"][step][name], value, atol=2e-6), (step, name)
            for key in ("loss", "reward", "offpolicy/total/kl_k3", "offpolicy/rollout/version_lag_mean"):
                assert rank["logs"][step][key] == pytest.approx(one["logs"][step][key], abs=2e-5, rel=2e-5), key


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), devices=int(sys.argv[2]), ahead=json.loads(sys.argv[3]), strategy=sys.argv[4],
          cut="cut" in sys.argv, agents="agents" in sys.argv)  # fmt: skip
