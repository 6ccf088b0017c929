"""A real vLLM that gets only what changed answers as one that gets everything."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run_command

SCRIPT = Path(__file__).with_name("changed_run.py")
AGREE = 2e-4  # nats
pytestmark = [pytest.mark.vllm, pytest.mark.integration]


def run(folder: Path, kind: str, *flags: str) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, str(SCRIPT), str(folder), kind, *flags]
    done = run_command(command, seconds=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "target"),
    [("llama", "o_proj"), pytest.param("qwen3_moe", "q_proj", marks=pytest.mark.slow)],
)
def test_the_engine_agrees_after_syncs_of_the_adapted_modules_alone(tmp_path, kind, target):
    result, said = run(tmp_path, kind, "--target", target)
    first, *later = result["reports"]
    assert first["whole"] and first["bytes"] == result["total"]
    assert not any(one["whole"] for one in later) and len({one["bytes"] for one in later}) == 1
    assert 0 < later[0]["bytes"] < result["total"] / 2
    assert min(result["moved"]) > 100 * AGREE  # else an engine that keeps old weights would agree as well
    assert max(result["apart"]) < AGREE
    assert all(one["changed"] > 0 for one in later)  # counted over all weights, also those that are left out
    if kind == "llama":  # of experts vLLM says so at whole syncs as well
        assert "Failed to load" not in said and "not loaded" not in said


def test_an_engine_that_was_changed_otherwise_fails_its_proof_and_gets_everything(tmp_path):
    result, said = run(tmp_path, "llama", "--spoil")
    assert [one["whole"] for one in result["reports"]] == [True, False, True, True]
    assert [one["bytes"] == result["total"] for one in result["reports"]] == [True, False, True, True]
    assert "from now on all are" in said
    assert max(result["apart"]) < AGREE
