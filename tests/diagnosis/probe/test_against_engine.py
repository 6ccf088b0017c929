"""Two settings of a real vLLM, and an exact one: what the probe finds from the command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from engines.server.servers import Server
from processes import run_command
from tiny_models import save_tiny_model

REAL = Path(__file__).parents[3] / ".cache/SmolLM2-135M-Instruct"

pytestmark = [pytest.mark.vllm, pytest.mark.integration]


def probe(folder: Path, model: Path, *options: str, status: int = 0) -> dict[str, Any]:
    """``probe.json`` of the model; with another exit status the error."""
    prompts, out = folder / "prompts.txt", folder / "out"
    prompts.write_text("w1 w2\nw3\nw4 w9\nw50 w51 w5\n")
    common = ["--model", str(model), "--samples", "4", "--max-tokens", "12", "--no-hypotheses", "--output", str(out)]
    words = [] if model == REAL else ["--prompts", str(prompts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "trl_offpolicy", "probe", *common, *words, *options]
    done = run_command(command, seconds=900, env=environment)
    assert done.returncode == status, done.stderr[-3000:]
    if status:
        return {"error": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads((out / "probe.json").read_text())
    return {**found, "printed": done.stdout, "page": (out / "probe.html").read_text()}


def pairs_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {pair["name"]: pair for pair in found["against"]["pairs"]}


def test_an_exact_engine_is_at_the_floor_and_bfloat16_is_not(tmp_path: Path) -> None:
    """One first engine answers both: it is exact, and the second differs from it by its dtype alone."""
    model = save_tiny_model(tmp_path / "model")
    found = probe(tmp_path, model, "--exact", "--against", "dtype=bfloat16,OMP_NUM_THREADS=2")
    exact, against, pairs = found["exact"], found["against"], pairs_of(found)
    assert exact["at_floor"] and exact["kl_k3"] < 2e-10 and "max_num_seqs=16" in exact["applied"]
    assert found["attribution"]["cause"] == "none"
    # the weights are compared through the trainer: the second engine holds them rounded
    assert against["weights"] == "equal"
    assert ["dtype", "float32", "bfloat16"] in against["settings"]
    assert ["OMP_NUM_THREADS", "1", "2"] in against["settings"]
    assert not {name for name, *_ in against["settings"]} & {"max_num_seqs", "enable_prefix_caching", "enforce_eager"}
    assert against["matters"] and against["nearer"] == "first" and against["cause"] == ""
    assert pairs["first_trainer"]["kl_k3"] < 2e-10 < 1e-6 < pairs["second_trainer"]["kl_k3"]
    # k3 of the two directions differs in third order, more with some CPUs' bfloat16 than with others'
    assert pairs["first_second"]["kl_k3"] == pytest.approx(pairs["second_trainer"]["kl_k3"], rel=0.3)
    assert pairs["first_second"]["tokens"] == found["tokens"]
    assert pairs["decode_prefill"]["kl_k3"] < 2e-10 and pairs["first_again"]["kl_k3"] < 2e-10
    assert "The first setting is nearer to the trainer" in " ".join(found["printed"].split())
    assert (
        "Against a second setting" in found["page"]
        and "engine and trainer are the same policy" in found["page"].lower()
    )


@pytest.mark.slow
def test_a_server_as_the_second_setting_and_one_with_other_weights(tmp_path: Path) -> None:
    model, other = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", seed=1)
    server = Server(model, tmp_path / "server.log").start()
    try:
        found = probe(tmp_path, model, "--engine-settings", "max_num_seqs=2", "--against", server.url)
        against = found["against"]
        assert against["weights"] == "equal" and ["max_num_seqs", "2", "16"] in against["settings"]
        assert not against["matters"] and against["nearer"] == "neither"
        message = probe(tmp_path, other, "--against", server.url, status=2)["error"]
        assert (
            "against must hold the same weights as the first engine, but" in message
            and "(16 tensors) differ" in message
        )  # norms are equal
    finally:
        server.kill()


def test_a_setting_with_which_vllm_does_not_start_is_one_line(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    message = probe(tmp_path, model, "--against", "no_such_argument=1", status=2)["error"]
    assert message.startswith("trl-offpolicy probe: against must be a setting with which the engine starts")
    assert "no_such_argument" in message


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the quickstart's model is not there (make quickstart)")
def test_exact_brings_the_quickstarts_engine_to_the_floor(tmp_path: Path) -> None:
    rounded = probe(tmp_path, REAL, "--weight-rounding", "int8")["metrics"]["mismatch/kl_k3"]
    found = probe(tmp_path, REAL, "--exact")
    assert found["exact"]["at_floor"] and found["exact"]["kl_k3"] < 2e-10 < 1e-5 < rounded
