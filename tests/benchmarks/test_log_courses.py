"""The doctor on made-up courses of runs: few false alarms, and what is broken is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.log_courses.curves import SCENARIOS, Course, measured
from benchmarks.log_courses.run import LENGTHS, alarms, main, verdicts

ROOT = Path(__file__).resolve().parents[2]
AMBIGUOUS = "harder_data"
"""A reward that halves at once: a collapse looks the same."""


def share(steps: int, every: int, *, healthy: bool) -> float:
    kinds = [one for one in SCENARIOS.values() if one.healthy == healthy and one.name != AMBIGUOUS]
    return mean(alarms(verdicts(one, steps, every, 4)) for one in kinds)


@pytest.mark.parametrize(("steps", "every"), LENGTHS)
def test_healthy_runs_are_left_alone_and_broken_ones_are_not(steps: int, every: int) -> None:
    assert share(steps, every, healthy=True) <= 0.03
    assert share(steps, every, healthy=False) >= 0.6


def test_a_batch_measures_the_course_with_its_noise() -> None:
    draw = np.random.default_rng(0)
    seen = measured(Course(0.4, 600, batch=64), 4000, draw)
    assert seen["reward"].mean() == pytest.approx(0.4, abs=0.01) and seen["length"].mean() == pytest.approx(
        600, rel=0.01
    )
    # eight prompts, half of the variance between them, half between the 64 responses
    assert seen["reward"].std() == pytest.approx((0.24 * (0.5 / 8 + 0.5 / 64)) ** 0.5, rel=0.05)


def test_the_committed_counts_are_of_every_kind(tmp_path: Path) -> None:
    found = json.loads((ROOT / "benchmarks" / "log_courses" / "results.json").read_text())
    assert found["verdicts"].keys() == SCENARIOS.keys()
    for by_length in found["verdicts"].values():
        assert all(sum(counts.values()) == found["seeds"] for counts in by_length.values())
    out = tmp_path / "counts.json"
    assert main(["--only", "plateau", "--seeds", "2", "--output", str(out)]) == 0
    assert json.loads(out.read_text())["verdicts"].keys() == {"plateau"}


def test_no_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "0"])
    assert "--seeds must be at least 1, but got 0." in capsys.readouterr().err
