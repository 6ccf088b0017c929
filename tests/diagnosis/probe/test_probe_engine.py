"""Asking a real vLLM in this process: what is equal is equal bit for bit, and each fault is seen with both values."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, get_args

import pytest
from processes import run_command
from tiny_models import save_tiny_model

from trl_offpolicy.diagnosis.attribution.evidence import Compared

SCRIPT = Path(__file__).with_name("proof_run.py")
REAL = Path(__file__).parents[3] / ".cache/SmolLM2-135M-Instruct"
ALL = sorted(get_args(Compared))
FAULTS = {
    "stale": ("stale_weights", "all weights (21 of 21 differ)"),
    "partial": ("stale_weights", "layer 1 (9 of 21 differ)"),
    "one_norm": ("stale_weights", "model.norm.weight (1 of 21 differ)"),
    "head": ("stale_weights", "lm_head.weight (1 of 21 differ)"),
    "adapter_missing": ("wrong_adapter", "share of the adapter"),
    "adapter_halved": ("wrong_adapter", "share of the adapter"),
    "rounded": ("precision", "rounding of 14 of 21 weights"),
    "theta": ("model_config", "rope_parameters.rope_theta"),
    "epsilon": ("model_config", "epsilon of the norm (1 of 5 differ, e.g. model.layers.1.input_layernorm)"),
    "penalty": ("logit_processors", "repetition_penalty"),
    "bias": ("logit_processors", "logit_bias"),
    "cooler": ("temperature", "temperature"),
    "bos": ("prompt_difference", "ids of the prompts (4 of 4 requests differ; the engine has 1 in front)"),
    "cut": ("prompt_difference", "ids of the prompts (4 of 4 requests differ; the engine lacks 3 in front)"),
}
VALUES = {
    "adapter_missing": ("none: the base model", "1 time"),
    "adapter_halved": ("0.5 times", "1 time"),
    "rounded": ("int8", "none"),
    "theta": ("10000", "3000"),
    "penalty": ("1.3", "1"),
    "cooler": ("0.7", "1"),
}

pytestmark = [pytest.mark.vllm, pytest.mark.integration]


@cache
def run(folder: str, *words: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(SCRIPT), folder, *words]
    done = run_command(command, seconds=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@cache
def tiny() -> dict[str, Any]:
    """All scenarios with one engine: it takes longer to start than to ask."""
    return run(str(save_tiny_model(Path(mkdtemp()))), "clean", "adapter_merged", *FAULTS)


@pytest.mark.parametrize("name", ["clean", "adapter_merged"])
def test_a_clean_pair_is_compared_in_everything_and_equal(name: str) -> None:
    assert tiny()[name]["seen"] == [] and tiny()[name]["compared"] == ALL


@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_is_seen(name: str) -> None:
    cause, what = FAULTS[name]
    first, *others = tiny()[name]["seen"]
    assert first["cause"] == cause and first["what"].startswith(what)
    assert first["engine"] != first["trainer"]
    assert (first["engine"], first["trainer"]) == VALUES.get(name, (first["engine"], first["trainer"]))
    assert {one["cause"] for one in others} <= {cause}


def test_what_the_engine_was_told_and_the_trainer_was_not() -> None:
    """One engine in bfloat16, with raw log-probs at temperature 0.7 and another RoPE theta: all of it is seen."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    arguments = {"dtype": "bfloat16", "logprobs_mode": "raw_logprobs", "temperature": 0.7, "hf_overrides": rope}
    folder = str(save_tiny_model(Path(mkdtemp())))
    found = run(folder, json.dumps(arguments), "clean", "stale")
    seen = {one["what"].split(" (")[0]: (one["cause"], one["engine"], one["trainer"]) for one in found["clean"]["seen"]}
    assert seen["rope_parameters.rope_theta"] == ("model_config", "500", "10000")
    assert seen["which log-probs it reports"] == ("unreported_sampling", "raw_logprobs", "processed_logprobs")
    assert seen["dtype"] == ("precision", "bfloat16", "float32")
    assert seen["angles of the rotary embedding"][0] == "model_config"
    # float32 weights that were rounded to the engine's bfloat16 are equal, bit for bit
    assert "weights" in found["clean"]["compared"] and "stale_weights" not in {one[0] for one in seen.values()}
    assert found["stale"]["seen"][0]["cause"] == "stale_weights"


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the quickstart's model is not there (make quickstart)")
def test_the_quickstarts_model() -> None:
    found = run(str(REAL), "clean", "stale", "partial", "adapter_missing", "adapter_halved", "adapter_merged")
    assert found["clean"]["seen"] == found["adapter_merged"]["seen"] == []
    assert found["clean"]["compared"] == ALL
    causes = {name: [one["cause"] for one in value["seen"]] for name, value in found.items()}
    assert causes["stale"] == causes["partial"] == ["stale_weights"]
    assert causes["adapter_missing"] == causes["adapter_halved"] == ["wrong_adapter"]
    assert found["partial"]["seen"][0]["what"].startswith("layer 1 (9 of 272 differ)")
