"""A real vLLM engine in a Lightning run: after every sync its log-probs are the trainer's; a missed sync stops it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.server.servers import Server
from processes import run_command
from tiny_models import DRAFTS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "lightning" / "vllm_run.py"), str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_command(command, seconds=550, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.vllm
def test_engine_and_trainer_agree_after_every_sync(tmp_path: Path) -> None:
    seen = run(tmp_path)
    assert len(seen["mismatch"]) == 3 and max(seen["mismatch"]) < 1e-4  # float32 both; weights move by 0.01 a step
    assert min(seen["agreement"]) > 0.9999 and min(seen["bytes"]) > 250_000
    assert min(seen["moved"]) > 1e-3 and 0 <= seen["eval_reward"] <= 6
    assert not seen["stopped"] and not seen["trl"]


@pytest.mark.slow
@pytest.mark.vllm
def test_noise_on_the_norms_is_in_the_rollouts_alone(tmp_path: Path) -> None:
    """Three stages in three steps: none, 0.3, 0.1; the proofs of the syncs are without it."""
    seen = run(tmp_path, "--noise")
    assert seen["noise"] == pytest.approx([0.0, 0.3, 0.1], rel=0.2) and not seen["stopped"]
    first, large, small = seen["mismatch"]
    assert first < 1e-4 and large > small > 0.01 and min(seen["agreement"]) > 0.9999


@pytest.mark.slow
@pytest.mark.vllm
def test_presets_bring_a_rounded_engine_and_a_learner_that_follows_it_or_its_noise(tmp_path: Path) -> None:
    """QaRL: both sides agree. QeRL: they differ by the rounding in the first step, then by the noise as well."""
    options = {"rounding": "int8"}
    qarl = run(tmp_path / "qarl", "--preset", json.dumps({"preset": "paper/qarl", "options": options}))
    assert max(qarl["mismatch"]) < 2e-4 and min(qarl["agreement"]) > 0.999 and min(qarl["moved"]) > 1e-3
    options |= {"start": 0.3, "end": 0.1, "stages": 3}
    qerl = run(tmp_path / "qerl", "--preset", json.dumps({"preset": "paper/qerl", "options": options}))
    assert qerl["noise"] == pytest.approx([0.0, 0.3, 0.1], rel=0.2)
    first, large, small = qerl["mismatch"]
    assert 2e-4 < first < small < large


@pytest.mark.slow
@pytest.mark.vllm
def test_the_tokens_taken_of_a_draft_are_counted(tmp_path: Path) -> None:
    seen = run(tmp_path, "--drafts")
    assert len(seen["taken"]) == 3 and all(share is None or 0 <= share <= 1 for share in seen["taken"])
    assert any(share is not None for share in seen["taken"]) and max(seen["mismatch"]) < 1e-4


@pytest.mark.slow
@pytest.mark.vllm
def test_turns_are_scored_as_the_engine_sampled_them(tmp_path: Path) -> None:
    """After a tool's answer too: the next turn's context is the same on both sides, id by id."""
    seen = run(tmp_path, "--tools")
    assert len(seen["mismatch"]) == 3 and max(seen["mismatch"]) < 1e-4
    assert min(seen["calls"][:2]) > 0.5 and min(seen["after_tools"][:2]) > 0.1  # later the model has other habits
    assert seen["not_sampled"] == [0.0] * 3 and not seen["stopped"] and not seen["trl"]


@pytest.mark.slow
@pytest.mark.vllm
def test_an_exact_engine_is_checked_at_the_first_generation(tmp_path: Path) -> None:
    seen = run(tmp_path, "--exact")["exact"]
    assert seen["at_floor"] and seen["kl_k3"] < 2e-10 and seen["tokens"] > 50
    assert "max_num_seqs=8" in seen["applied"] and "enable_prefix_caching=False" in seen["applied"]


@pytest.mark.slow
@pytest.mark.vllm
def test_an_adapter_is_merged_for_the_engine(tmp_path: Path) -> None:
    seen = run(tmp_path, "--lora")
    # float32 on both sides: 5e-6 at first, more as the logits of three large steps grow; int8 would be above 1e-3
    assert max(seen["mismatch"]) < 5e-4 and min(seen["agreement"]) > 0.9999


@pytest.mark.slow
@pytest.mark.vllm
def test_rounded_weights_are_a_mismatch_that_is_no_fault(tmp_path: Path) -> None:
    seen = run(tmp_path, "--rounding", "int8")
    assert min(seen["mismatch"]) > 1e-3 and not seen["stopped"] and max(seen["agreement"]) < 0.9999


@pytest.mark.slow
@pytest.mark.vllm
def test_a_sync_that_did_not_take_effect_stops_the_run(tmp_path: Path) -> None:
    seen = run(tmp_path, "--no-sync")
    assert "Stale weights" in seen["stopped"] and len(seen["mismatch"]) == 1


@pytest.mark.vllm
def test_the_executor_of_a_gpu_works_alone(tmp_path: Path) -> None:
    seen = run(tmp_path, "--launcher")
    assert len(seen["mismatch"]) == 3 and max(seen["mismatch"]) < 1e-4 and min(seen["agreement"]) > 0.9999


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("options", [(), ("--launcher",)], ids=["", "launcher"])
def test_two_ranks_each_with_an_engine(tmp_path: Path, options: tuple[str, ...]) -> None:
    seen = run(tmp_path, "--devices", "2", *options)
    assert seen["ranks"] == 2 and len(seen["mismatch"]) == 3
    assert max(seen["mismatch"]) < 1e-4 and min(seen["agreement"]) > 0.9999


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_gets_the_weights_or_the_adapter_from_one_or_two_ranks(
    tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    server = Server(model_folder(), tmp_path / "log", lora_rank=8).start()
    try:
        broadcast = ("--transfer", "broadcast", "--devices", "2")
        for name, options in (("lora", ("--lora",)), ("one", ()), ("two", ("--devices", "2")), ("cast", broadcast)):
            seen = run(tmp_path / name, "--server", server.url, "--model", str(model_folder()), *options)
            assert seen["ranks"] == (2 if "--devices" in options else 1) and not seen["stopped"]
            assert len(seen["mismatch"]) == 3 and max(seen["mismatch"]) < 1e-4
            assert min(seen["agreement"]) > 0.9999 and min(seen["moved"]) > 1e-3
            assert (max(seen["bytes"]) < 100_000) == (name == "lora")
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.vllm
def test_the_tokens_taken_of_a_servers_draft_are_counted(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    flags = (*Server.flags, "--speculative-config", json.dumps(DRAFTS))
    server = Server(model_folder(), tmp_path / "log", flags=flags).start()
    try:
        seen = run(tmp_path, "--server", server.url, "--model", str(model_folder()))
        assert not seen["stopped"] and any(share is not None for share in seen["taken"])
        assert max(seen["mismatch"]) < 1e-4 and min(seen["agreement"]) > 0.9999
    finally:
        server.kill()
