"""``trl-offpolicy demo``: the recorded run is a real one, and the doctor finds its fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_offpolicy.cli import main
from trl_offpolicy.diagnosis.report.demo import DEMO_RUN
from trl_offpolicy.run_folder.run_data import read_metrics


@pytest.mark.integration
def test_the_demo_names_the_fault_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--output", str(tmp_path / "demo.html")]) == 0
    out = capsys.readouterr().out
    assert "verdict: critical" in out and "engine mismatch" in out
    assert "other weights" in out or "stale engine weights" in out
    assert "Why engine and trainer differ" in (tmp_path / "demo.html").read_text()


def test_the_recorded_run_drifts_from_equal_weights() -> None:
    series = read_metrics(DEMO_RUN).series("offpolicy/mismatch/kl_k3")
    assert series.values[0] < 1e-6 < 0.05 < series.values[-1]
    assert sum(path.stat().st_size for path in DEMO_RUN.iterdir()) < 400_000
