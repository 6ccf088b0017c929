"""The colocate engine with a real vLLM: weights arrive, arguments arrive, and the test can fail."""

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
from processes import run_command

SCRIPT = Path(__file__).with_name("colocate_run.py")
AGREE = 2e-4  # nats: float32 on both sides of a two-layer model agrees to about 1e-6

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def start(*flags: str, launcher: tuple[str, ...] = (), threads: int = 2) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, *launcher, str(SCRIPT), mkdtemp(), *flags]
    return run_command(command, seconds=600, env=environment)


@cache
def run(*flags: str, threads: int = 2) -> dict[str, Any]:
    done = start(*flags, threads=threads)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_engine_and_trainer_agree_after_large_steps() -> None:
    result = run()
    assert result["moved"] > 0.01
    assert len(result["mismatch"]) == 3
    assert max(result["mismatch"]) < AGREE


def test_without_sync_the_same_run_disagrees() -> None:
    mismatch = run("--no-sync")["mismatch"]
    assert mismatch[0] < AGREE  # the engine starts at the trainer's weights
    assert min(mismatch[1:]) > 100 * AGREE


@pytest.mark.parametrize(
    ("flags", "least", "most"),
    [
        ((), 0.9, 1.0),
        pytest.param(("--lora",), 0.01, 0.9, marks=pytest.mark.slow),
        pytest.param(("--lora", "--transfer", "adapter"), 0.1, 1.0, marks=pytest.mark.slow),
    ],
)
def test_every_sync_is_recorded_with_what_changed(flags: tuple[str, ...], least: float, most: float) -> None:
    syncs = run(*flags)["syncs"]
    assert len(syncs) == 3 and syncs[0][0] is None
    assert all(least < changed <= most for changed, _, _ in syncs[1:])
    assert all(visible is None for _, visible, _ in syncs)  # float32 on both sides: every change is visible
    assert len({checksum for _, _, checksum in syncs}) == 3


@pytest.mark.slow
def test_an_engine_of_less_precision_sees_large_steps() -> None:
    syncs = run("--dtype", "bfloat16")["syncs"]
    assert all(visible > 0.9 for _, visible, _ in syncs[1:])  # a rate of 0.01: far above the spacing of bfloat16


def test_engine_arguments_reach_vllm() -> None:
    result = run()
    assert (result["dtype"], result["max_model_len"], result["enforce_eager"]) == ("torch.float32", 64, True)


def test_lora_weights_are_merged_into_the_engine() -> None:
    result = run("--lora")
    assert result["moved"] > 0.01
    assert max(result["mismatch"]) < AGREE


def test_weight_rounding_is_a_real_but_small_mismatch() -> None:
    mismatch = run("--rounding", "int8")["mismatch"]
    assert all(AGREE < value < 1.0 for value in mismatch)


QARL = json.dumps({"preset": "paper/qarl", "options": {"rounding": "int8"}})
QERL = json.dumps({"preset": "paper/qerl", "options": {"rounding": "int8", "start": 0.3, "end": 0.1, "stages": 3}})


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--rounding", "int8", "--rounded-learner"), marks=pytest.mark.slow),
        ("--rounding", "int8", "--rounded-learner", "--lora"),
        pytest.param(("--preset", QARL), marks=pytest.mark.slow),
    ],
)
def test_a_learner_that_rounds_as_its_engine_does_agrees_with_it(flags: tuple[str, ...]) -> None:
    result = run(*flags)
    assert result["moved"] > 0.01
    assert max(result["mismatch"]) < AGREE < min(run("--rounding", "int8")["mismatch"])
    assert min(result["agreement"]) > 1 - AGREE


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--lora", "--transfer", "adapter")])
def test_noise_on_the_norms_is_in_the_rollouts_of_the_training_alone(flags: tuple[str, ...]) -> None:
    """Three stages in three steps: none, 0.3, 0.1. Proofs and the evaluation at the end are without it."""
    result = run("--noise", *flags)
    # What is reported is the noise that was drawn: over 320 weights its size is that asked for within some 4 %.
    assert result["noise"] == pytest.approx([0.0, 0.3, 0.1], rel=0.2)
    first, large, small = result["mismatch"]
    assert first < AGREE and large > small > 100 * AGREE
    assert min(result["agreement"]) > 1 - AGREE and result["held_out"] < AGREE


def test_a_preset_brings_the_noise_of_a_rounded_engine() -> None:
    """QeRL by name: the first step has the rounding of INT8 alone, the others the noise on the norms as well."""
    result = run("--preset", QERL)
    assert result["noise"] == pytest.approx([0.0, 0.3, 0.1], rel=0.2)
    first, large, small = result["mismatch"]
    assert AGREE < first < small < large
    assert first == pytest.approx(run("--rounding", "int8")["mismatch"][0])


@pytest.mark.slow
def test_the_tokens_taken_of_a_draft_are_counted() -> None:
    """Speculation by n-grams: the policy's distribution, and so its log-probs, stay as they are.

    numba, which finds the n-grams, sets another number of threads than the engine has started with.
    """
    result = run("--drafts", threads=1)
    assert len(result["taken"]) == 3 and all(0 <= share <= 1 for share in result["taken"])
    assert max(result["mismatch"]) < AGREE and min(result["agreement"]) > 1 - AGREE
    assert run()["taken"] == []


def test_every_sync_is_proven_and_logged() -> None:
    result = run()
    assert len(result["agreement"]) == 3
    assert min(result["agreement"]) > 1 - AGREE
    assert set(result["bytes"]) == {296_192}


def test_a_sync_that_gets_lost_stops_the_run_with_the_cause() -> None:
    done = start("--lost-sync")
    assert done.returncode != 0
    assert "SyncError: After the sync of version 1" in done.stderr
    assert "Stale weights: its answers did not move" in done.stderr


def test_the_adapter_alone_gives_the_same_policy_for_a_fraction_of_the_bytes() -> None:
    merged, alone = run("--lora"), run("--lora", "--transfer", "adapter")
    assert max(alone["mismatch"]) < AGREE
    assert min(alone["agreement"]) > 1 - AGREE
    assert alone["moved"] > 0.01
    assert max(alone["bytes"]) < merged["bytes"][0] / 4


@pytest.mark.slow
def test_two_processes_each_with_an_engine() -> None:
    """One group of 16 lies on both: with the same seed for both engines half of it would be copies."""
    done = start("--generations", "16", launcher=TWO_RANKS)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])  # of the main rank: the metrics are those of both
    assert result["ranks"] == 2
    assert max(result["copied"]) == 0.0 and result["distinct"][0] > 0.8
    assert len(result["mismatch"]) == 3 and max(result["mismatch"]) < AGREE
    assert min(result["agreement"]) > 1 - AGREE


@pytest.mark.slow
def test_the_engines_of_two_processes_have_the_same_noise() -> None:
    done = start("--noise", launcher=TWO_RANKS)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    one, other = result["noisy_norms"]
    assert one == other and len(set(one)) > 1  # and each version has noise of its own
    assert result["noise"] == pytest.approx([0.0, 0.3, 0.1], rel=0.2)
