"""Routing replay with a real vLLM: engine and trainer route alike at equal weights, and R3 takes flips out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@cache
def compared() -> list[dict[str, Any]]:
    """Two seeds, the engine's weights at five precisions."""
    path = Path(mkdtemp()) / "found.json"
    options = ("--responses", "32", "--length", "32", "--seeds", "2", "--json", str(path))
    run(str(ROOT / "benchmarks" / "moe_routing.py"), *options)
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


@cache
def trained(*flags: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        run(str(Path(__file__).with_name("moe_run.py")), mkdtemp(), *flags).strip().splitlines()[-1]
    )
    return found


def test_engine_and_trainer_route_alike_at_equal_weights() -> None:
    """The second seed's weights came by a sync: experts that arrive scrambled or not at all would route elsewhere."""
    equal = [row for row in compared() if row["rounding"] == "none"]
    assert len(equal) == 2
    for row in equal:
        assert row["agreement"] >= 0.999 and row["free"]["logp_diff_mean"] < 1e-4


def test_coarser_weights_flip_more_and_replay_takes_the_jumps_out() -> None:
    for seed in (0, 1):
        rows = {row["rounding"]: row for row in compared() if row["seed"] == seed}
        assert rows["none"]["agreement"] > rows["int8"]["agreement"] > rows["int4"]["agreement"]
        assert rows["int4"]["flip_fraction"] > 0.05
        for rounding in ("int8", "int4"):
            free, replayed = rows[rounding]["free"], rows[rounding]["replayed"]
            assert replayed["logp_diff_mean"] < free["logp_diff_mean"]
            assert replayed["kl_k3"] < free["kl_k3"]


@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
def test_a_training_run_with_r3(lora: tuple[str, ...]) -> None:
    """At the first step of a generation the engine has the trainer's weights: nothing flips, nothing is stale."""
    rows = trained("--replay", "r3", *lora)
    assert len(rows) == 4
    for first in rows[::2]:
        assert first["routing/agreement"] >= 0.999
        assert first["mismatch/logp_diff_mean"] < 1e-4 and first["staleness/logp_diff_max"] < 1e-4


def test_r3_lowers_the_mismatch_of_a_run_with_rounded_weights() -> None:
    free, replayed = (trained("--replay", mode, "--rounding", "int4")[0] for mode in ("none", "r3"))
    assert free["routing/flip_fraction"] > 0 and replayed["routing/flip_fraction"] > 0
    assert replayed["mismatch/logp_diff_mean"] < free["mismatch/logp_diff_mean"]
    assert replayed["mismatch/kl_k3"] < free["mismatch/kl_k3"]
