"""Replay where the weights are cut over two processes, with gradient checkpointing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import run_command

SCRIPT = Path(__file__).with_name("sharded_run.py")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_replay_is_that_of_one_process(strategy: str) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    done = run_command([*command, strategy], seconds=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["followed"] and rank["loss"] < 1e-5
        assert rank["gradient"] < 1e-3 < 0.05 < rank["free_gradient"], "without replay the gradient is another one"
