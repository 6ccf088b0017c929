"""``engine: {exact: true}`` in TRL: what it sets, what contradicts it, and the check of the first generation."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import run_command

from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.exact import prepare, wants_exact

SCRIPT = Path(__file__).with_name("exact_run.py")


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def make(**options: Any) -> OffPolicyGRPOConfig:
        given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "use_vllm": True}
        return OffPolicyGRPOConfig(**{**given, "engine": {"exact": True}, **options})

    return make


def test_one_line_switches_trls_default_of_bf16_off(config: Any) -> None:
    assert config().bf16 is False and config(engine='{"exact": true}').bf16 is False
    assert config(bf16=False, engine={}).bf16 is False and wants_exact({"exact": True}) and not wants_exact(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": True}, r"bf16 must be false with engine.exact: true, but got True: autocast"),
        ({"disable_dropout": False}, r"disable_dropout must be true with engine.exact: true, but got False"),
        ({"use_vllm": False}, r"use_vllm must be true with engine.exact: true, but got False"),
    ],
)
def test_a_contradiction_names_both_fields(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_a_16_bit_trainer_gets_its_head_in_float32() -> None:
    def prepared(dtype: str | None, **given: Any) -> bool:
        options = None if dtype is None else {"dtype": dtype}
        args = SimpleNamespace(model_init_kwargs=options, cast_lm_head_to_fp32=False)
        prepare(args, "folder", given)
        return args.cast_lm_head_to_fp32

    assert prepared("bfloat16") and not prepared("float32") and not prepared(None)
    with pytest.raises(ValueError, match=r"lora_dropout must be 0 with engine.exact: true, but got 0.1"):
        prepared(None, peft_config=SimpleNamespace(lora_dropout=0.1))


@pytest.fixture(autouse=True)
def torch_as_before() -> Any:
    """``prepare`` sets options of the whole process."""
    import torch

    precision = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)


@pytest.mark.integration
@pytest.mark.vllm
def test_the_first_generation_is_checked_and_run_json_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path)]
    done = run_command(command, seconds=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    exact = found["exact"]
    assert exact["at_floor"] and exact["kl_k3"] < 2e-10 and exact["tokens"] > 20 and found["bf16"] is False
    assert found["kl_k3"][0] == pytest.approx(exact["kl_k3"], abs=2e-10)
    assert "max_num_seqs=8" in exact["applied"] and "dtype=float32" in exact["applied"]
    assert any("batch-invariant kernels" in one for one in exact["keeps"])
    assert "engine.exact: engine and trainer are the same policy" in done.stdout + done.stderr
