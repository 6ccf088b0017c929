"""A real vLLM and adapters whose scale or base it does not know, and a head that it would drop."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import run_command

AGREE = 2e-4  # nats: float32 on both sides of a two-layer model

pytestmark = [pytest.mark.vllm, pytest.mark.integration]


def test_adapters_reach_the_engine_as_the_trainer_computes_them(tmp_path: Path) -> None:
    script = Path(__file__).with_name("adapters_run.py")
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = run_command([sys.executable, str(script), str(tmp_path)], seconds=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert {name: one[0] for name, one in found.items() if name != "head"} == {
        "plain": "adapter", "scaled": "memory", "pissa": "memory", "scaled, alone": "adapter",
    }  # fmt: skip
    assert max(found[name][1] for name in ("plain", "scaled", "pissa")) < AGREE
    assert found["scaled, alone"][1] > 100 * AGREE  # vLLM scales it as the configuration says of all layers
    assert "the engine's head is its embeddings: it would drop the other" in found["head"][0]
