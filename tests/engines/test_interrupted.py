"""A trainer with vLLM in its process that is interrupted, or killed, in the middle of a step leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engines.test_launch import alive

SCRIPT = Path(__file__).with_name("colocate_run.py")


def hears_ctrl_c() -> None:
    """For a process that is started: under a shell's background job it would inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(trainer: Any, folder: Path, how: signal.Signals) -> None:
    """Wait for the second step of a trainer that has a session of its own, and send a signal; nothing must be left."""
    metrics = folder / "run" / "metrics.jsonl"
    end = time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert trainer.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-3000:]
        time.sleep(0.1)
    os.kill(trainer.pid, how)
    trainer.wait(timeout=120)
    end = time.monotonic() + 30
    while left := [pid for pid in processes() if session(pid) == trainer.pid and alive(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_of_a_colocated_engine_survives(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--steps", "5000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        trainer = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=hears_ctrl_c
        )
    interrupted(trainer, tmp_path, how)
    assert trainer.returncode != 0
