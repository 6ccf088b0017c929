"""The run whose updates the engine cannot see, shortened: real model, real vLLM in bfloat16, float32 trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import run_command

from trl_offpolicy.run_folder.syncs import read_syncs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_bfloat16_engine_does_not_see_steps_of_1e_6(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/sub_ulp.py", "--steps", "3", "--only", "hidden", "--out", str(tmp_path)]
    done = run_command(command, seconds=1700, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:] + (tmp_path / "hidden" / "log.txt").read_text()[-3000:]
    syncs = read_syncs(tmp_path / "hidden")
    assert [(sync.trainer_dtype, sync.engine_dtype) for sync in syncs] == [("float32", "bfloat16")] * 3
    changed, visible = [sync.changed for sync in syncs[1:]], [sync.visible for sync in syncs[1:]]
    assert all(share is not None and share > 0.9 for share in changed)  # nearly every weight moves in the trainer
    assert all(share is not None and 0.0 < share < 0.1 for share in visible)  # the engine gets a few of them
    assert len({sync.checksum for sync in syncs}) == 3
    summary = json.loads((tmp_path / "hidden" / "summary.json").read_text())
    assert 0 < summary["trainer moved"] < summary["apart"]  # less than what rounding keeps the two apart
    assert "| hidden | float32 | bfloat16 | 1e-06 |" in done.stdout
