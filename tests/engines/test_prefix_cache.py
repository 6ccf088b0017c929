"""Keys and values of old weights: a real engine that keeps its prefix cache across a sync gives wrong log-probs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import run_command

AGREE = 2e-4  # nats


@pytest.mark.slow
@pytest.mark.vllm
def test_a_prefix_cache_kept_across_a_sync_is_another_policy(tmp_path: Path) -> None:
    script = Path(__file__).with_name("prefix_cache_run.py")
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = run_command(command, seconds=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["same weights"]["sampled"] < AGREE and found["reset"]["sampled"] < AGREE
    assert found["kept"]["sampled"] > 0.1  # nats: of neither policy
    assert max(case["probe"] for case in found.values()) < AGREE  # the proof of a sync does not see it
