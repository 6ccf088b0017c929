"""OffPolicyGRPOTrainer with a real vLLM server: transfers, two processes, a server that dies and a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from engines.server.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("server_run.py")
AGREE = 2e-4


@pytest.fixture(scope="module")
def server(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model_folder(), tmp_path_factory.mktemp("server") / "log", lora_rank=8).start()
    yield running
    running.kill()


def start(server: Server, folder: Path, *flags: str, processes: int = 1) -> subprocess.Popen[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    command = [*launcher, str(SCRIPT), str(folder), server.url, "--model", str(server.model), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-3000:]
    return dict(json.loads(next(line for line in out.splitlines() if line.startswith("{"))))


@pytest.mark.parametrize(
    ("flags", "share"), [(("--lora", "--transfer", "adapter"), 0.25), ((), 1.0), (("--transfer", "broadcast"), 1.0)]
)
def test_engine_and_trainer_agree_through_a_server(
    server: Server, tmp_path: Path, flags: tuple[str, ...], share: float
) -> None:
    run = result(start(server, tmp_path, *flags))
    assert len(run["mismatch"]) == 3 and max(run["mismatch"]) < AGREE
    assert len(run["agreement"]) == 3 and min(run["agreement"]) > 1 - AGREE
    assert max(run["bytes"]) < share * 310_000
    assert not (tmp_path / "run" / "_engine_weights").exists()  # removed at the end


@pytest.mark.parametrize("transfer", ["folder", "broadcast"])
def test_two_processes_share_one_server(server: Server, tmp_path: Path, transfer: str) -> None:
    run = result(start(server, tmp_path, "--transfer", transfer, processes=2))
    assert run["processes"] == 2
    assert len(run["mismatch"]) == 3 and max(run["mismatch"]) < AGREE


def test_a_server_that_dies_for_good_costs_no_finished_work(server: Server, tmp_path: Path) -> None:
    running = start(server, tmp_path, "--steps", "4", "--pause-at", "2")
    while not (tmp_path / "waiting").exists():
        assert running.poll() is None, running.communicate()[1][-3000:]
        time.sleep(0.2)
    server.kill()
    (tmp_path / "go").touch()
    _, errors = running.communicate(timeout=200)
    assert running.returncode != 0
    assert "EngineUnreachable: No vLLM server answers" in errors
    assert "The state after step 2 is saved" in errors
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    rollouts = pd.read_parquet(tmp_path / "run" / "rollouts.parquet")
    assert len(rollouts) == 2 * 8
    server.start()
    again = result(start(server, tmp_path, "--steps", "4", "--resume"))
    assert again["steps"] == 4
    assert len(again["mismatch"]) == 4 and max(again["mismatch"]) < AGREE
