"""Strategies that shard: two real processes, weights whole for the engine, the training and resume of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from processes import run_command
from tiny_models import save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = ["fsdp2", "fsdp", "zero3"]
Seen = list[dict[str, Any]]


def run(folder: Path, kind: str, *flags: str) -> Seen:
    """What both ranks saw."""
    done = finished(folder, kind, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    name = kind + "".join(f"-{one}" for one in ("lora", "share") if f"--{one}" in flags)
    name += "-resumed" * ("--resume" in flags)
    ranks = 1 if kind == "one" else 2
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def finished(folder: Path, kind: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """The run, which may have failed."""
    script = ROOT / "tests" / "lightning" / "sharded_run.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if "--gpu" not in flags:
        environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, "-W", "ignore", str(script), str(folder), kind, *flags]
    return run_command(command, seconds=400, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharded")
    save_tiny_model(made / "model")
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Seen, Seen, Seen]:
    """One process: two steps, a third one after a resume, and two steps of an adapter."""
    return run(folder, "one"), run(folder, "one", "--resume"), run(folder, "one", "--lora")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", *STRATEGIES])
def test_it_shards_and_trains_as_one_process(kind: str, folder: Path, whole: tuple[Seen, Seen, Seen]) -> None:
    for part in run(folder, kind):
        assert part["share"] == pytest.approx(1.0 if kind == "ddp" else 0.5) and part["world"] == 2
        assert_same(part, whole[0][0])
        assert_saved(folder / f"{kind}-model", part["weights"][-1])
    for part in run(folder, kind, "--resume"):
        assert len(part["weights"]) == 1
        assert_same(part, whole[1][0])


@pytest.mark.integration
def test_lightnings_default_sizes_would_train_whole_copies_apart_and_are_refused(tmp_path: Path) -> None:
    failed = finished(tmp_path, "fsdp2-defaults")
    assert failed.returncode != 0 and not list(tmp_path.glob("*.pt"))
    assert (
        "strategy must be ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)" in failed.stderr
        and "but got data_parallel_size=1 and tensor_parallel_size=2" in failed.stderr
    ), failed.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_prompts_are_computed_once_on_shards(kind: str, folder: Path, whole: tuple[Seen, Seen, Seen]) -> None:
    assert whole[0][0]["shared"] == 0
    for part in run(folder, kind, "--share"):
        assert part["share"] == pytest.approx(0.5) and part["shared"] >= 2
        assert_same(part, whole[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRATEGIES)
def test_an_adapter_on_a_model_by_name(kind: str, folder: Path, whole: tuple[Seen, Seen, Seen]) -> None:
    """Under ZeRO-3 Lightning makes models inside DeepSpeed's zero.Init, where an adapter would start as noise."""
    for part in run(folder, kind, "--lora", "--named"):
        assert_same(part, whole[2][0])
    adapted = PeftModel.from_pretrained(tiny_model(), folder / f"{kind}-lora-model")
    for name, value in adapted.named_parameters():
        assert torch.equal(value, part["weights"][-1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_fsdp_and_zero_3_train_as_ddp_on_gpus(kind: str, tmp_path: Path) -> None:
    """Needs two GPUs; not run by us so far."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    whole = run(tmp_path, "ddp")[0]
    for part in run(tmp_path, kind, "--gpu"):
        for name, value in whole["engine"].items():
            assert torch.allclose(part["engine"][name].cpu(), value, atol=1e-4), name


def assert_same(part: dict[str, Any], whole: dict[str, Any]) -> None:
    """Weights after every step, those that the engine was given, loss, gradient norm, proof and validation."""
    for mine, theirs in [*zip(part["weights"], whole["weights"], strict=True), (part["engine"], whole["engine"])]:
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.allclose(mine[name], value, atol=1e-5), name
    for key in ("loss", "grad_norm", "offpolicy/mismatch/kl_k3"):
        assert part["logs"][-1][key] == pytest.approx(whole["logs"][-1][key], rel=1e-4, abs=1e-6), key
    assert part["logs"][-1]["offpolicy/rollout/sync_agreement"] > 0.999
    assert part["reward"] == pytest.approx(whole["reward"], abs=1e-6)


def assert_saved(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """What ``from_pretrained`` loads is what the ranks gathered after the last step, bit for bit."""
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").named_parameters())
    assert loaded.keys() == weights.keys()
    for name, value in loaded.items():
        assert torch.equal(value, weights[name]), name
    assert AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"] == [4, 5]


@pytest.mark.slow
def test_the_weights_of_these_runs_move(whole: tuple[Seen, Seen, Seen]) -> None:
    for first, last in ((seen[0]["weights"][0], seen[0]["weights"][-1]) for seen in (whole[0], whole[2])):
        assert max(float((last[name] - first[name]).abs().max()) for name in first) > 1e-2
