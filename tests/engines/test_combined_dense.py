"""Old policies and the replay buffer with a real vLLM server, against what plain forwards with copied weights give."""

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

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).with_name("combined_run.py")
LIGHTNING = Path(__file__).resolve().parents[1] / "lightning" / "replay_run.py"
ACCELERATE = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"
AGREE = 2e-3
"""Nats, as in ``tests/rollouts/ahead/test_server_ahead.py``; weights of another version are 3 away or more there."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with long_context_server(tmp_path_factory.mktemp("server"), "--max-num-seqs", "8") as running:
        yield running


@pytest.fixture(params=[None, "cpu_fsdp2", "cpu_zero3"])
def strategy(request: pytest.FixtureRequest) -> str | None:
    """One process, or two that share the weights as ``recipes/accelerate/STRATEGY.yaml`` says."""
    if "zero" in (request.param or ""):
        pytest.importorskip("deepspeed")
    return request.param


def run(
    server: Server, folder: Path, *flags: str, strategy: str | None = None, script: Path = SCRIPT
) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """By step: what was logged, and what was computed again."""
    launcher = [sys.executable]
    if strategy is not None:
        config = str(ACCELERATE / f"{strategy}.yaml")
        launcher += ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    command = [*launcher, str(script), str(folder), server.url, "--model", str(server.model), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_command(command, seconds=1200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"logged')))
    assert all(bool(again.get("sharded")) == (strategy is not None) for again in found["computed"])
    return list(zip(found["logged"], found["computed"], strict=True))


def test_balance(server: Server, tmp_path: Path, strategy: str | None) -> None:
    """Batches of several versions: old is their mixture, and the engine's log-probs moved along with it."""
    # a lag of 1.5 mixes versions by itself; whether a sync cuts requests in flight is a question of speed
    pace = ("--lag", "2", "--length", "100") if strategy is None else ("--lag", "1.5", "--length", "32")
    flags = ("--ahead", "balance", "--partial", "continue", "--steps", "5")
    steps = run(server, tmp_path, *flags, *pace, strategy=strategy)
    assert max(again["versions"] for _, again in steps) >= 2
    for logged, again in steps:
        assert logged["mismatch"] < AGREE and again["mixture_old/max"] < AGREE
        assert logged["staleness"] == pytest.approx(again["now_mixture/mean"], abs=AGREE)
    # with the version of each token alone in its denominator the engine's log-probs would stay where they are
    assert max(again["then_mu/max"] for _, again in steps) > 10 * AGREE


def test_ewma(server: Server, tmp_path: Path, strategy: str | None) -> None:
    """The proximal policy is the average of the weights; the engine's log-probs are of the version that sampled."""
    steps = run(server, tmp_path, "--ahead", "ewma", "--length", "32", strategy=strategy)
    assert [again["lag"] for _, again in steps] == [0, 1, 1, 1]
    for logged, again in steps:
        assert again["then_mu/max"] < AGREE and again["average_proximal/max"] < AGREE
        assert logged["total"] == pytest.approx(again["now_mu/mean"], abs=AGREE)
    for _, again in steps[1:]:
        assert again["average_now/mean"] > 10 * AGREE  # the weights of now are no average
    assert steps[0][0]["mismatch"] < AGREE and steps[1][0]["mismatch"] is None


def test_a_second_model(server: Server, tmp_path: Path) -> None:
    """It scores each token with the weights that sampled it, and the weights that are trained stay where they are."""
    flags = ("--ahead", "model", "--lag", "1.5", "--partial", "continue", "--length", "32", "--steps", "5")
    steps = run(server, tmp_path, *flags)
    assert max(again["versions"] for _, again in steps) >= 2
    for logged, again in steps:
        assert logged["mismatch"] < AGREE and again["then_old/max"] < AGREE and again["then_mu/max"] < AGREE
        assert logged["total"] == pytest.approx(again["now_mu/mean"], abs=AGREE)
        assert again["exchanges"] == 0
    assert max(again["now_then/max"] for _, again in steps) > 10 * AGREE  # the weights of now are no old policy


@pytest.mark.parametrize("script", [SCRIPT, LIGHTNING], ids=["trl", "lightning"])
def test_a_replay_buffer_with_a_kl_term(server: Server, tmp_path: Path, script: Path) -> None:
    """Two fresh groups and a replayed one: each keeps the log-probs of the engine that sampled it."""
    steps = run(server, tmp_path, "--buffer", "1", "--beta", "0.1", "--length", "32", script=script)
    assert [again["rows"] for _, again in steps] == [8, 12, 12, 12]  # at first nothing is there to be replayed
    assert all(again["lag"] >= 1 and again["versions"] >= 2 for _, again in steps[1:])
    for logged, again in steps:
        assert again["then_mu/max"] < AGREE
        assert logged["total"] == pytest.approx(again["now_mu/mean"], abs=AGREE)
        assert logged["kl"] == pytest.approx(again["k3/mean"], rel=5e-3, abs=1e-6)
        assert logged["loss"] == pytest.approx(again["loss"] + 0.1 * again["k3/mean"], rel=5e-3, abs=1e-4)
    assert steps[0][0]["total"] < AGREE < steps[-1][0]["total"] / 10
    assert steps[-1][0]["kl"] > 0.01


@pytest.mark.parametrize("script", [SCRIPT, LIGHTNING], ids=["trl", "lightning"])
def test_a_replay_buffer_with_weights_of_the_whole_batch(server: Server, tmp_path: Path, script: Path) -> None:
    """Decided on fresh and replayed rows together, which the loss then takes: their mean is 1 over all of them."""
    steps = run(server, tmp_path, "--buffer", "1", "--wide", "--length", "32", script=script)
    assert [again["rows"] for _, again in steps] == [8, 12, 12, 12]
    for logged, again in steps:
        assert again["then_mu/max"] < AGREE and again["decided_off"] < AGREE
        assert logged["loss"] == pytest.approx(again["loss_wide"], rel=5e-3, abs=1e-4)
    # with the weights as they are it would be another loss
    assert max(again["wide_by"] for _, again in steps) > 10 * AGREE
    assert max(abs(again["loss"] - again["loss_wide"]) for _, again in steps) > 1e-3
