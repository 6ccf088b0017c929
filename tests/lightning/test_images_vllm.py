"""A real vLLM in this process that sees images: its log-probs are the trainer's, before and after a sync."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import run_command

pytestmark = [pytest.mark.integration, pytest.mark.vllm]

ROOT = Path(__file__).resolve().parents[2]


def test_engine_and_trainer_see_the_same_images_after_every_sync(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "lightning" / "image_vllm_run.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = run_command(command, seconds=550, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(logs) == 3
    for log in logs:
        # float32 both; the engine never samples the image token, which has a percent of this tiny model's mass
        assert log["offpolicy/mismatch/kl_k3"] < 1e-3
        assert log["offpolicy/rollout/sync_agreement"] > 0.9999
        assert log["grad_norm"] > 0
