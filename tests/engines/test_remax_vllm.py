"""ReMax with a real vLLM: the baseline is the greedy completion of the policy at that step, in both trainers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run_command

SCRIPT = Path(__file__).with_name("remax_run.py")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.integration]


def run(folder: Path, *flags: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(SCRIPT), str(folder), *flags]
    done = run_command(command, seconds=550, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize("trainer", ["trl", "lightning"])
def test_the_baseline_is_greedy_at_the_weights_of_the_step(trainer: str, tmp_path: Path) -> None:
    seen = run(tmp_path, trainer)
    assert len(seen["errors"]) == 3 and max(seen["errors"]) < 1e-6 and min(seen["largest"]) > 0.01
    assert max(seen["changed"][1:]) > 0  # the first weights would have given other completions


@pytest.mark.parametrize("trainer", ["trl", "lightning"])
def test_an_engine_that_stays_behind_is_seen(trainer: str, tmp_path: Path) -> None:
    errors = run(tmp_path, trainer, "--no-sync")["errors"]
    assert errors[0] < 1e-6 < 0.01 < max(errors[1:])
