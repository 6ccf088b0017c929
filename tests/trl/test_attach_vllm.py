"""attach on a stock trainer with a real vLLM: what TRL itself says about its ratios is what is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("attach_run.py")


@pytest.mark.slow
@pytest.mark.vllm
def test_trls_own_numbers_are_the_measured_ones(tmp_path: Path) -> None:
    """INT4 rollouts under TRL's token truncation at 1.05."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--correction"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.strip().splitlines()[-1])
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
