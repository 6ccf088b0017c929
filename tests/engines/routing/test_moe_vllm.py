"""Routing replay with a real vLLM: engine and trainer route alike at equal weights, and R3 takes flips out.

Each with both sources of the engine's routing: callbacks, and vLLM's own report (``enable_return_routed_experts``) from
its Model Runner V2, whose Triton kernels run in Triton's interpreter here.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from engines.server.servers import Server
from processes import run_command
from tiny_models import save_tiny_model
from triton_interpreter import interpreter_environment

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]
both = pytest.mark.parametrize("source", ["callbacks", "report"])


@cache
def environment(source: str) -> dict[str, str]:
    """Of a process in which vLLM's routing is read from its "callbacks" or from its "report"."""
    more = {}
    if source == "report":
        pytest.importorskip("triton", reason="constraints/slow.txt has it")
        more = interpreter_environment(Path(mkdtemp()))
    return {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **more}


def run(source: str, *command: str) -> str:
    done = run_command([sys.executable, *command], seconds=900, env=environment(source))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@cache
def compared(source: str) -> list[dict[str, Any]]:
    """Two seeds, the engine's weights at five precisions."""
    path = Path(mkdtemp()) / "found.json"
    responses, length = ("12", "24") if source == "report" else ("32", "32")
    options = ("--responses", responses, "--length", length, "--seeds", "2", "--json", str(path))
    run(source, str(ROOT / "benchmarks" / "moe_routing.py"), *options)
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


@cache
def trained(source: str, *flags: str, folder: str | None = None) -> list[dict[str, Any]]:
    printed = run(source, str(Path(__file__).with_name("moe_run.py")), folder or mkdtemp(), *flags)
    found: list[dict[str, Any]] = json.loads(printed.strip().splitlines()[-1])
    return found


def check_r3(rows: list[dict[str, Any]], *, moves_routers: bool = True) -> None:
    """At the first step of a generation the engine has the trainer's weights: nothing flips, nothing is stale."""
    assert len(rows) == 4
    for first in rows[::2]:
        assert first["routing/agreement"] >= 0.999
        assert first["mismatch/logp_diff_mean"] < 1e-4 and first["staleness/logp_diff_max"] < 1e-4
    assert min(row["routing/agreement"] for row in rows[1::2]) < 1 or not moves_routers


@both
def test_engine_and_trainer_route_alike_at_equal_weights(source: str) -> None:
    """The second seed's weights came by a sync: experts that arrive scrambled or not at all would route elsewhere."""
    equal = [row for row in compared(source) if row["rounding"] == "none"]
    assert len(equal) == 2
    for row in equal:
        assert row["agreement"] >= 0.999 and row["free"]["logp_diff_mean"] < 1e-4


@both
def test_coarser_weights_flip_more_and_replay_takes_the_jumps_out(source: str) -> None:
    for seed in (0, 1):
        rows = {row["rounding"]: row for row in compared(source) if row["seed"] == seed}
        assert rows["none"]["agreement"] > rows["int8"]["agreement"] > rows["int4"]["agreement"]
        assert rows["int4"]["flip_fraction"] > 0.05
        for rounding in ("int8", "int4"):
            free, replayed = rows[rounding]["free"], rows[rounding]["replayed"]
            assert replayed["logp_diff_mean"] < free["logp_diff_mean"]
            assert replayed["kl_k3"] < free["kl_k3"]


@both
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
def test_a_training_run_with_r3(source: str, lora: tuple[str, ...]) -> None:
    check_r3(trained(source, "--replay", "r3", *lora), moves_routers=not lora)


def test_a_training_run_with_r3_and_a_server(tmp_path: Path) -> None:
    """Its second weights came through a folder; vLLM's CPU worker would scramble the experts by itself."""
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    flags = ("--max-model-len", "64", "--", "--max-num-seqs", "16", "--enable-return-routed-experts")
    server = Server(model, tmp_path / "log", flags=flags, environment=environment("report")).start()
    try:
        check_r3(trained("callbacks", "--replay", "r3", "--url", server.url, folder=str(tmp_path)))
    finally:
        server.kill()


def test_experts_survive_a_sync_to_a_server(tmp_path: Path) -> None:
    """The model runner that vLLM takes on a CPU; vLLM's own reload leaves the experts in an order that it misreads."""
    server = Server(save_tiny_model(tmp_path / "model", "qwen3_moe"), tmp_path / "log").start()
    try:
        rows = trained("callbacks", "--replay", "r2", "--url", server.url, folder=str(tmp_path))
    finally:
        server.kill()
    assert len(rows) == 4
    for first in rows[::2]:
        assert first["mismatch/logp_diff_mean"] < 1e-4 and first["rollout/sync_agreement"] > 0.9999


@both
def test_r3_lowers_the_mismatch_of_a_run_with_rounded_weights(source: str) -> None:
    free, replayed = (trained(source, "--replay", mode, "--rounding", "int4")[0] for mode in ("none", "r3"))
    assert free["routing/flip_fraction"] > 0 and replayed["routing/flip_fraction"] > 0
    assert replayed["mismatch/logp_diff_mean"] < free["mismatch/logp_diff_mean"]
    assert replayed["mismatch/kl_k3"] < free["mismatch/kl_k3"]
