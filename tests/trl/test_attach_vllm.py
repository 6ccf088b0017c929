"""attach on a stock trainer with a real vLLM: what TRL itself says about its ratios is what is measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import run_command

SCRIPT = Path(__file__).with_name("attach_run.py")


def attached(folder: Path, *options: str) -> list[dict[str, float]]:
    """The logged rows of a run of the script."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), *options]
    done = run_command(command, seconds=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


@pytest.mark.slow
@pytest.mark.vllm
def test_the_log_probs_that_rloo_does_not_ask_for_are_measured(tmp_path: Path) -> None:
    """Three steps of TRL's RLOO with its own engine; seen: 0.021, 0.024, 0.044 nats, which bfloat16 makes."""
    differences = [row["offpolicy/mismatch/logp_diff_mean"] for row in attached(tmp_path, "--rloo")]
    assert len(differences) == 3 and all(1e-3 < one < 0.1 for one in differences), differences


@pytest.mark.slow
@pytest.mark.vllm
def test_trls_own_engine_gets_its_weights_on_a_cpu(tmp_path: Path) -> None:
    """The third step's log-probs agree as the first's do, though every step moves the weights by about 0.01."""
    rows = attached(tmp_path, "--stock")
    differences = [row["offpolicy/mismatch/logp_diff_mean"] for row in rows]
    assert len(differences) == 3 and max(differences) < 2 * differences[0] + 1e-4, differences


@pytest.mark.slow
@pytest.mark.vllm
def test_trls_own_numbers_are_the_measured_ones(tmp_path: Path) -> None:
    """INT4 rollouts under TRL's token truncation at 1.05."""
    rows = attached(tmp_path, "--correction")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        for theirs, ours in (
            ("sampling/sampling_logp_difference/mean", "mismatch/logp_diff_mean"),
            ("sampling/sampling_logp_difference/max", "mismatch/logp_diff_max"),
            ("sampling/importance_sampling_ratio/mean", "weight_applied/mean"),
            ("sampling/importance_sampling_ratio/max", "weight_applied/max"),
        ):
            assert row[f"offpolicy/{ours}"] == pytest.approx(row[theirs], rel=1e-4), ours
        assert row["offpolicy/mismatch/logp_diff_mean"] > 0.1 and row["offpolicy/weight/truncated_fraction"] > 0
        assert row["offpolicy/control/verdict"] == 3
