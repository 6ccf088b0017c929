"""The table of a recipe over seeds, from folders of runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import recipe_seeds


def run_of(folder: Path, seed: int, before: float, after: float, kl: list[float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"seed": seed, "command": "train"}))
    (folder / "evaluation.json").write_text(
        json.dumps({"before": {"eval_reward": before}, "after": {"eval_reward": after}})
    )
    rows = [{"step": step, "offpolicy/mismatch/kl_k3": value} for step, value in enumerate(kl, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_mean_and_interval_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_of(tmp_path / "a", 1, 0.1, 0.4, [0.01, 0.03])
    second = run_of(tmp_path / "b", 2, 0.1, 0.2, [0.04, 0.04])
    out = tmp_path / "results" / "seeds.json"
    monkeypatch.setattr(sys, "argv", ["recipe_seeds.py", f"ours={first},{second}", "--out", str(out)])
    assert recipe_seeds.main() == 0
    # by hand: gains .3 and .1, t of one degree of freedom 12.706, standard error .1
    assert "| ours | 2 | 0.100 ± 0.000 | 0.300 ± 1.271 | +0.200 ± 1.271 | 0.03 ± 0.13 |" in capsys.readouterr().out
    assert [run["offpolicy/mismatch/kl_k3"] for run in json.loads(out.read_text())["ours"]] == [0.02, 0.04]
    assert [run["seed"] for run in json.loads(out.read_text())["ours"]] == [1, 2]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "a", 1, 0.1, 0.4, [0.01])
    with pytest.raises(ValueError, match=r"--columns must be logged by every run, but .*/a has no step_time"):
        recipe_seeds.numbers_of(folder, ["step_time"])
    (folder / "evaluation.json").write_text(json.dumps({"before": {"eval_reward": 0.1}}))
    with pytest.raises(ValueError, match=r"must have an evaluation before and after, but has before"):
        recipe_seeds.numbers_of(folder, [])
