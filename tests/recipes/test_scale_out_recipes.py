"""Recipes with servers or several ranks: the configuration is what the README says; the entry point runs with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from engines.server.servers import Server
from safetensors.torch import load_file
from scale_out.launching import ROOT
from scale_out.smoke import ONE_PROCESS, ranks_that_recorded, run_recipe, save_chat_model, training_rows

from trl_offpolicy.cli.recipes import find
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

RECIPES = ROOT / "recipes"
AGREE = 2e-4
BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 8}
CONFIG = "--config_file", str(RECIPES / "accelerate" / "cpu_zero3.yaml")


def config(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((RECIPES / name / "config.yaml").read_text()))


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("zero3_7b", ["TruncateWeight", "OutlierVeto"]),
        ("fsdp2_7b", ["TruncateWeight", "RatioBand"]),
        ("lora_server", ["TruncateWeight"]),
        ("async_rollouts", ["TruncateWeight"]),
    ],
)
def test_the_configuration_is_one(name: str, terms: list[str], tmp_path: Path) -> None:
    spec = config(name)
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
    args = OffPolicyGRPOConfig(str(tmp_path), **plain, offpolicy=spec["offpolicy"], engine=spec["engine"])
    correction = args.preset.objective.correction
    assert correction is not None
    assert [type(term).__name__ for term in (*correction.weights, *correction.keep)] == terms
    settings = EngineSettings.parse(spec["engine"])
    (settings.check_colocate if spec["vllm_mode"] == "colocate" else settings.check_server)()


@pytest.mark.parametrize(
    ("name", "learners"), [("zero3_7b", 4), ("fsdp2_7b", 8), ("lora_server", 1), ("async_rollouts", 1)]
)
def test_the_batch_holds_whole_groups(name: str, learners: int) -> None:
    spec = config(name)
    rows = spec["per_device_train_batch_size"] * spec["gradient_accumulation_steps"] * learners
    assert rows == (24 if learners == 1 else 256) and rows % spec["num_generations"] == 0
    readme = (RECIPES / name / "README.md").read_text()
    assert f"{rows // spec['num_generations']} prompts x {spec['num_generations']}" in readme


@pytest.mark.parametrize(
    "name", ["zero3_7b", "fsdp2_7b", "lora_server", "async_rollouts", "moe_replay", "truncated_sampling"]
)
def test_the_readme_names_files_that_exist_and_no_number_without_a_run(name: str) -> None:
    text = (RECIPES / name / "README.md").read_text()
    for path in re.findall(r"(?<!tests/)recipes/[\w/.]+\.(?:yaml|py)", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\(([\w/.]+\.(?:png|svg|md))\)", text):
        assert (RECIPES / name / path).is_file(), path
    if not find(name).ran:
        count = 4 if find(name).model == "SmolLM2-135M" else 5  # without a plot
        assert len(re.findall(r"^\| [^|]+ \| not yet run", text, re.MULTILINE)) == count, "a number needs a run"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def of_syncs(folder: Path, quantity: str) -> list[float]:
    """A quantity of every sync. An evaluation between two steps has made the sync of its step, and logs it."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [value for row in logged for key, value in row.items() if key.endswith(f"rollout/sync_{quantity}")]


def assert_trained(folder: Path, *, steps: int, ranks: int) -> list[dict[str, Any]]:
    rows = training_rows(folder)
    assert len(rows) == steps and ranks_that_recorded(folder) == set(range(ranks))
    agreed = of_syncs(folder, "agreement")
    assert len(agreed) >= steps and min(agreed) > 1 - AGREE
    for row in rows:
        assert row["offpolicy/mismatch/logp_diff_max"] < AGREE
    return rows


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_zero3_7b_runs_on_two_processes_and_a_server(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    server = Server(model, tmp_path / "log", flags=("--max-model-len", "512", "--", "--max-num-seqs", "16")).start()
    try:
        run_recipe(
            "zero3_7b", tmp_path / "run", launch=CONFIG, model_name_or_path=model, vllm_server_base_url=server.url,
            max_steps=2, learning_rate=0.01, warmup_steps=0, **BATCH,
        )  # fmt: skip
    finally:
        server.kill()
    assert_trained(tmp_path / "run", steps=2, ranks=2)
    saved, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", model))
    assert saved.keys() == start.keys() and all(saved[name].shape == start[name].shape for name in start)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_fsdp2_7b_runs_on_two_processes_with_an_engine_each(model: Path, tmp_path: Path) -> None:
    run_recipe(
        "fsdp2_7b",
        tmp_path / "run",
        launch=("--config_file", str(RECIPES / "accelerate" / "cpu_fsdp2.yaml")),
        script="tests/scale_out/fsdp2_on_cpu.py",  # which runs recipes/grpo.py
        accelerator_config={"use_configured_state": True},
        model_name_or_path=model,
        engine={"dtype": "float32"},
        vllm_max_model_length=512,
        max_steps=2,
        **BATCH,
    )
    assert_trained(tmp_path / "run", steps=2, ranks=2)
    saved, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", model))
    assert saved.keys() == start.keys() and all(saved[name].shape == start[name].shape for name in start)


def run_behind_a_server(name: str, model: Path, folder: Path, *, steps: int) -> None:
    """A recipe into ``folder/run`` beside a real vLLM server, with a learning rate that a few steps show."""
    flags = ("--max-model-len", "64", "--", "--max-num-seqs", "16")
    server = Server(model, folder / "log", lora_rank=16, flags=flags).start()
    try:
        run_recipe(
            name, folder / "run", launch=ONE_PROCESS, model_name_or_path=model,
            vllm_server_base_url=server.url, max_steps=steps, learning_rate=0.05, warmup_steps=0,
        )  # fmt: skip
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_lora_server_sends_the_adapter_alone(model: Path, tmp_path: Path) -> None:
    run_behind_a_server("lora_server", model, tmp_path, steps=2)
    assert_trained(tmp_path / "run", steps=2, ranks=1)
    adapter = load_file(tmp_path / "run" / "adapter_model.safetensors")
    size = sum(tensor.nbytes for tensor in adapter.values())
    sent = of_syncs(tmp_path / "run", "bytes")
    assert len(sent) >= 2 and all(count == pytest.approx(size, rel=0.05) for count in sent)
    assert all(torch.isfinite(tensor).all() for tensor in adapter.values())


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_async_rollouts_samples_one_batch_ahead(model: Path, tmp_path: Path) -> None:
    run_behind_a_server("async_rollouts", model, tmp_path, steps=3)
    rows = training_rows(tmp_path / "run")
    assert [row["offpolicy/rollout/version_lag_mean"] for row in rows] == [0, 1, 1]
    assert min(of_syncs(tmp_path / "run", "agreement")) > 1 - AGREE
