"""A real vLLM server that samples ahead of Lightning: versions, lags, a resume, an adapter, two ranks, tools."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.server.servers import Server, long_context_server
from processes import run_command

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("ahead_run.py")
AGREE = 2e-3
"""Nats, as in ``tests/rollouts/ahead/test_server_ahead.py``; weights of another version are 3 away or more there."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "8", "--max-loras", "3")
    with long_context_server(tmp_path_factory.mktemp("server"), *flags, lora_rank=8) as running:
        yield running


def run(server: Server, folder: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), server.url, "--model", str(server.model)]
    root = str(SCRIPT.parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_command([*command, *flags], seconds=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"mismatch'))))


def test_an_adapter_one_step_off_policy(server: Server, tmp_path: Path) -> None:
    """First, because an adapter needs the base weights that the server was started with."""
    result = run(server, tmp_path, "--lora", "--old-logps", "snapshot")
    assert result["lags"] == [[0], [1], [1], [1]]
    assert len(result["mismatch"]) == 4 and max(result["mismatch"]) < AGREE
    assert min(result["total"][1:]) > 10 * AGREE
    assert max(result["bytes"]) < 100_000


def test_responses_end_under_the_adapter_that_they_began_with(server: Server, tmp_path: Path) -> None:
    """No sync waits for them or cuts them."""
    flags = ("--lora", "--partial", "keep", "--lag", "2", "--old-logps", "snapshot", "--length", "200", "--steps", "5")
    result = run(server, tmp_path, *flags)
    assert max(map(max, result["lags"])) == 2 and result["crossing"] == [0.0] * 5
    assert len(result["mismatch"]) == 5 and max(result["mismatch"]) < AGREE
    assert min(result["total"][2:]) > 10 * AGREE


def test_a_preset_leaves_responses_the_adapter_that_they_began_with(server: Server, tmp_path: Path) -> None:
    """DORA by name: lag, versions and transfer are set, and the server is the user's own."""
    result = run(server, tmp_path, "--lora", "--preset", "paper/dora", "--length", "200", "--steps", "5")
    assert max(map(max, result["lags"])) == 2 and result["crossing"] == [0.0] * 5
    assert max(result["bytes"]) < 100_000  # the adapter alone


def test_one_step_off_policy_and_a_resume(server: Server, tmp_path: Path) -> None:
    whole = run(server, tmp_path / "whole")
    assert whole["lags"] == [[0], [1], [1], [1]]
    assert whole["lag"] == [0, 1, 1, 1] and whole["crossing"] == [0.0] * 4
    assert len(whole["mismatch"]) == 1 and whole["mismatch"][0] < AGREE  # only where the weights are those that sampled
    assert min(whole["total"][1:]) > 10 * AGREE
    assert min(whole["agreement"]) > 1 - AGREE

    run(server, tmp_path / "parts", "--steps", "2", "--save", "2")
    resumed = run(server, tmp_path / "parts", "--resume", "2")
    assert resumed["prompts"] == whole["prompts"]
    assert resumed["lags"] == [[0], [1], [0], [1]]


@pytest.mark.parametrize(("transfer", "old"), [("folder", "snapshot"), ("broadcast", "snapshot"), ("folder", "model")])
def test_responses_cut_at_a_sync_have_exact_versions(server: Server, tmp_path: Path, transfer: str, old: str) -> None:
    """Scored with the weights of each token's own version, here or in a second model, the trainer agrees."""
    flags = ("--lag", "2", "--old-logps", old, "--length", "200", "--steps", "5", "--transfer", transfer)
    result = run(server, tmp_path, *flags)

    assert max(map(max, result["lags"])) == 2 and result["in_order"]
    assert max(result["crossing"]) > 0.2
    assert len(result["mismatch"]) == 5 and max(result["mismatch"]) < AGREE
    assert min(result["total"][2:]) > 10 * AGREE


@pytest.mark.parametrize("flags", [("--lag", "1"), ("--lag", "2", "--devices", "2", "--steps", "5")])
def test_episodes_with_tools_are_sampled_ahead(server: Server, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """At lag 2 syncs cut turns, here of two ranks. Each token has its version, whatever the tool said in between."""
    lag = int(flags[1])
    result = run(server, tmp_path, "--tools", "--old-logps", "snapshot", "--length", "200", *flags)

    assert max(map(max, result["lags"])) == lag and result["in_order"]
    assert min(result["called"]) > 0 and result["turns"] > 3
    assert (max(result["crossing"]) > 0) == (lag > 1)
    assert max(result["mismatch"]) < AGREE
    assert min(result["total"][lag:]) > 10 * AGREE
    assert result["processes"] == (2 if "--devices" in flags else 1)


def test_two_ranks_share_the_server(server: Server, tmp_path: Path) -> None:
    result = run(server, tmp_path, "--old-logps", "snapshot", "--devices", "2")

    assert result["processes"] == 2
    assert result["lags"] == [[0], [1], [1], [1]]
    assert len({prompt for step in result["prompts"] for prompt in step}) == 4 * 4
    assert result["distinct"] == [[4, 4]] * 4 * 4
    assert max(result["mismatch"]) < AGREE


def test_two_ranks_that_ask_the_same_draw_apart(server: Server, tmp_path: Path) -> None:
    """Two groups of four on each rank, all of one prompt: no completion of the sixteen is drawn twice."""
    result = run(server, tmp_path, "--one-prompt", "--devices", "2")

    assert result["processes"] == 2 and list(map(len, result["prompts"])) == [1] * 4
    assert result["distinct"] == [[16, 16]] * 4
