"""Routing replay in Lightning with a real vLLM: R3 replays what the engine reported, with both sources of its routing.

As tests/engines/routing/test_moe_vllm.py has it for TRL, whose helpers it shares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines.routing.test_moe_vllm import check_r3, environment, run
from engines.server.servers import Server
from tiny_models import save_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


def trained(source: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    printed = run(source, str(Path(__file__).with_name("moe_run.py")), str(folder), *flags)
    found: list[dict[str, Any]] = json.loads(printed.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("source", ["callbacks", "report"])
def test_a_training_run_with_r3(source: str, tmp_path: Path) -> None:
    check_r3(trained(source, tmp_path, "--replay", "r3"))


def test_r3_lowers_the_mismatch_of_a_run_with_rounded_weights(tmp_path: Path) -> None:
    free, replayed = (
        trained("callbacks", tmp_path / mode, "--replay", mode, "--rounding", "int4")[0] for mode in ("none", "r3")
    )
    assert free["routing/flip_fraction"] > 0 and replayed["routing/flip_fraction"] > 0
    assert replayed["mismatch/logp_diff_mean"] < free["mismatch/logp_diff_mean"]
    assert replayed["mismatch/kl_k3"] < free["mismatch/kl_k3"]


def test_a_training_run_with_r3_and_a_server(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    flags = ("--max-model-len", "64", "--", "--max-num-seqs", "16", "--enable-return-routed-experts")
    server = Server(model, tmp_path / "log", flags=flags, environment=environment("report")).start()
    try:
        for transfer in ("folder", "broadcast"):
            check_r3(trained("callbacks", tmp_path, "--replay", "r3", "--url", server.url, "--transfer", transfer))
    finally:
        server.kill()
