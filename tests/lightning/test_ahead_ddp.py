"""Two real processes under Lightning's DDP share one server that samples ahead, and train as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


def train(folder: Path, *, devices: int, ahead: dict[str, Any], agents: bool = False) -> None:
    """Four steps of 8 completions in all; every rank leaves what it saw in ``folder``."""
    import pandas as pd
    from agent_runs import Library, conversations, tool_tokenizer
    from lightning_runs import Watch, data, module, trainer
    from rollouts.ahead.fake_server import FakeServer, server_class
    from tiny_models import tiny_model, tiny_prompts

    from lightning_module import RunFolder, engines

    made: list[FakeServer] = []
    engines.ServerEngine = server_class(tiny_model(), made)  # type: ignore[misc, assignment]
    watch, server = Watch(), {"type": "server", "base_url": "http://127.0.0.1:1"}
    options: dict[str, Any] = {"environment_factory": Library, "tokenizer": tool_tokenizer(), "reward_funcs": None}
    options |= {"sampling": {"max_tokens": 24}, "max_tool_calling_iterations": 2}
    sgd = partial(torch.optim.SGD, lr=0.02)
    ours = module(server, correction="paper/tis", optimizer=sgd, async_rollouts=ahead, **(options if agents else {}))
    run = RunFolder(str(folder / "run"), report=False)
    ranks = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    owner = trainer(folder, callbacks=[watch, run], max_steps=STEPS, **ranks)
    owner.fit(ours, data(conversations(16) if agents else tiny_prompts(), micro_batch_size=8 // devices))
    frame = pd.read_parquet(folder / "run" / "rollouts.parquet")
    lags = [sorted(set(step - part.policy_version)) for step, part in frame.groupby("step")]
    seen = {"weights": watch.weights, "logs": watch.logs, "asked": sorted(made[0].asked), "lags": lags}
    torch.save({**seen, "world": owner.world_size}, folder / f"rank-{owner.global_rank}.pt")


@pytest.mark.parametrize("old_logps", ["recompute_proximal", "snapshot", "balance"])
def test_two_processes_train_as_one(old_logps: str, tmp_path: Path) -> None:
    one, ranks = one_and_two_processes(tmp_path, {"ahead": {"lag": 1, "old_logps": old_logps}})

    assert ranks[0]["asked"] == one["asked"] and not ranks[1]["asked"]  # the main rank asks for both
    assert_same(one, ranks)
    for rank in ranks:
        for row in rank["logs"]:
            assert ("offpolicy/staleness/kl_k3" in row) == (old_logps != "recompute_proximal")


def test_two_processes_sample_their_own_agents(tmp_path: Path) -> None:
    options = {"ahead": {"lag": 1, "old_logps": "snapshot"}, "agents": True}
    one, ranks = one_and_two_processes(tmp_path, options)

    assert sorted(ranks[0]["asked"] + ranks[1]["asked"]) == one["asked"]  # where its environments are
    assert len(ranks[0]["asked"]) == len(ranks[1]["asked"])
    assert_same(one, ranks)
    for rank in ranks:
        for step, row in enumerate(rank["logs"]):
            assert row["tools/call_frequency"] == pytest.approx(one["logs"][step]["tools/call_frequency"])
            assert row["offpolicy/mismatch/logp_diff_max"] < 2e-5


def one_and_two_processes(folder: Path, options: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What :func:`train` leaves in one process, and on each of two ranks."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for devices in (1, 2):
        (folder / str(devices)).mkdir()
        command = [sys.executable, "-W", "ignore", __file__, str(folder / str(devices)), str(devices)]
        command.append(json.dumps(options))
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
    one = torch.load(folder / "1" / "rank-0.pt", weights_only=False)
    return one, [torch.load(folder / "2" / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


def assert_same(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Two ranks have trained as one process has."""
    assert [rank["world"] for rank in ranks] == [2, 2] and one["world"] == 1
    assert one["lags"] == ranks[0]["lags"] == [[min(step, 1)] for step in range(STEPS)]
    for rank in ranks:
        for step in range(STEPS):
            for name, value in one["weights"][step].items():
                assert torch.allclose(rank["weights"][step][name], value, atol=2e-6), (step, name)
            for key in ("loss", "reward", "offpolicy/total/kl_k3", "offpolicy/rollout/version_lag_mean"):
                assert rank["logs"][step][key] == pytest.approx(one["logs"][step][key], abs=2e-5, rel=2e-5), key


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), devices=int(sys.argv[2]), **json.loads(sys.argv[3]))
