"""OffPolicyObserver on two processes: numbers, records and findings are those of one process with all rows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from processes import run_command

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(folder: Path, kind: str) -> tuple[list[dict[str, Any]], pd.DataFrame, list[dict[str, float]], str]:
    """Rows of the metrics, recorded rollouts, what each rank logged last, and what was printed."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "lightning" / "observer_run.py"), str(folder), kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_command(command, seconds=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / kind / "metrics.jsonl").read_text().splitlines()
    logged = [torch.load(path, weights_only=True) for path in sorted(folder.glob(f"{kind}-*.pt"))]
    return (
        [json.loads(line) for line in lines],
        pd.read_parquet(folder / kind / "rollouts.parquet"),
        logged,
        done.stdout,
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("one"), "one")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_are_observed_as_one(kind: str, one: Any, tmp_path: Path) -> None:
    expected, frame, _, _ = one
    rows, recorded, logged, printed = run(tmp_path, kind)
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [1, 2, 3]
    for row, wanted in zip(rows, expected, strict=True):
        names = {name for name in wanted if name.startswith("offpolicy/") and "/time/" not in name}
        assert names == {name for name in row if name.startswith("offpolicy/") and "/time/" not in name}
        assert len(names) > 20
        for name in names:
            assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5, nan_ok=True), name
    assert len(logged) == 2
    assert logged[0] == pytest.approx(logged[1], nan_ok=True)  # every rank has the numbers of all

    def by_words(found: pd.DataFrame) -> pd.DataFrame:
        return found.sort_values(["step", "completion"]).reset_index(drop=True)

    recorded, frame = by_words(recorded), by_words(frame)
    assert len(recorded) == 3 * 8 and recorded["completion"].tolist() == frame["completion"].tolist()
    assert recorded["reward"].tolist() == frame["reward"].tolist()
    assert printed.count("[control] step 1:") == one[3].count("[control] step 1:") > 0  # by one rank alone
