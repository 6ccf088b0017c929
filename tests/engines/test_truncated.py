"""Truncated sampling with a real vLLM: ratios have mean 1 with the trainer's cut, and the kept mass without."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from processes import run_command

SCRIPT = Path(__file__).with_name("truncated_run.py")
AGREE = 2e-4  # nats: float32 on both sides of a two-layer model agrees to about 1e-5
CUTS = ("top_p 0.8", "top_k 20", "min_p 0.05", "all three")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


@cache
def run(*flags: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(SCRIPT), mkdtemp(), *flags]
    done = run_command(command, seconds=1100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_top_p_in_the_configuration_is_all_it_takes() -> None:
    for row in run()["trained"]:
        assert row["logp_diff_max"] < AGREE
        assert row["outside"] == 0
    first, second = (row["kl"] for row in run()["trained"])
    assert 0.015 < first < 0.03  # reference = policy: -log m - 1 + m for a kept mass m of about 0.8
    assert second > 10 * first  # the policy has moved


@pytest.mark.parametrize("cut", CUTS)
def test_mean_ratio_is_one_with_the_cut_and_the_kept_mass_without(cut: str) -> None:
    """One token's ratio is the kept mass without the cut; with it nothing but rounding is left."""
    result = run()["cuts"][cut]
    assert result["tokens"] > 3000
    assert abs(result["with"]["mean"] - 1) < 5 * result["with"]["error"] + 1e-6
    assert result["with"]["largest"] < AGREE
    assert result["outside"] == 0
    assert 0.75 < result["without"]["mean"] < 0.92
    assert 1 - result["without"]["mean"] > 50 * result["without"]["error"]


def test_nothing_is_cut_where_the_engine_cuts_nothing() -> None:
    result = run()["cuts"]["none"]
    assert result["with"] == result["without"] and "outside" not in result


def test_with_a_mismatch_tokens_at_the_edge_are_counted() -> None:
    """8-bit weights: the sets differ at the edge, a few tokens are sampled that the trainer would have cut."""
    result = run("--rounding", "int8", "--prompts", "16")["cuts"]["top_p 0.8"]
    assert 0 < result["outside"] < 0.05
    assert abs(result["with"]["mean"] - 1) < 0.02
    assert result["without"]["mean"] < 0.85
