"""Strategies that shard: two real processes, weights whole for the engine, the same training as DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, kind: str) -> list[dict[str, Any]]:
    script = ROOT / "tests" / "lightning" / "sharded_run.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", str(script), str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{kind}-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_fsdp2_shards_and_trains_as_ddp(tmp_path: Path) -> None:
    whole, parts = run(tmp_path, "ddp")[0], run(tmp_path, "fsdp2")
    assert not whole["sharded"] and whole["share"] == 1.0
    for part in parts:
        assert part["sharded"] and part["share"] == pytest.approx(0.5) and part["world"] == 2
        assert_same(part, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_fsdp_and_zero_3_train_as_ddp(kind: str, tmp_path: Path) -> None:
    """Needs two GPUs; not run by us so far."""
    whole = run(tmp_path, "ddp")[0]
    for part in run(tmp_path, kind):
        for name, value in whole["engine"].items():
            assert torch.allclose(part["engine"][name].cpu(), value, atol=1e-4), name


def assert_same(part: dict[str, Any], whole: dict[str, Any]) -> None:
    """Weights after every step, those that the engine was given, loss and gradient norm."""
    first, last = whole["weights"][0], whole["weights"][-1]
    assert max(float((last[name] - first[name]).abs().max()) for name in first) > 1e-2  # they move
    for mine, theirs in [*zip(part["weights"], whole["weights"], strict=True), (part["engine"], whole["engine"])]:
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.allclose(mine[name], value, atol=1e-5), name
    for key in ("loss", "grad_norm", "offpolicy/mismatch/kl_k3"):
        assert part["logs"][-1][key] == pytest.approx(whole["logs"][-1][key], rel=1e-4, abs=1e-6)
