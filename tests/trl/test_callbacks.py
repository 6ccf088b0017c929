"""The short progress line and the run folder's closing report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from trl_offpolicy.diagnosis.report.closing import closing_report
from trl_offpolicy.run_folder.writer import RunFolderWriter
from trl_offpolicy.trl.callbacks import RunFolderCallback, short_line

LOGS = {
    "loss": 0.01234,
    "reward": 0.5,
    "completions/mean_length": 7.25,
    "offpolicy/mismatch/kl_k3": 0.00321,
    "offpolicy/weight_applied/ess_token": 0.987,
    "offpolicy/keep/dropped_token_fraction": 0.125,
    "offpolicy/mismatch/tv": 0.5,
}


def test_short_line_shows_what_a_person_follows() -> None:
    line = short_line(3, LOGS)
    assert line == "step    3  loss 0.0123  reward 0.500  length 7.2  KL k3 3.21e-03  ESS 0.987  dropped 12.5%"


def test_short_line_of_an_evaluation_and_of_nothing() -> None:
    assert short_line(9, {"eval_reward": 0.25, "epoch": 1.0}) == "held out    9  reward 0.250"
    assert short_line(9, {"train_runtime": 3.0}) == ""


def with_report(folder: Path, info: dict[str, str]) -> RunFolderCallback:
    return RunFolderCallback(RunFolderWriter(folder, info, report=partial(closing_report, decode=None)))


def test_run_folder_holds_info_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(seed=7)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    callback = with_report(tmp_path, {"model": "tiny"})
    callback.on_train_begin(args, state, None)  # type: ignore[arg-type]
    state.global_step = 1
    callback.on_log(args, state, None, logs={**LOGS, "nan": float("nan")})  # type: ignore[arg-type]
    callback.on_train_end(args, state, None)  # type: ignore[arg-type]
    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["model"], info["seed"]) == ("tiny", 7) and "torch" in info["versions"]
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["step"] == 1 and row["reward"] == 0.5 and row["nan"] is None
    assert (tmp_path / "report.html").exists()
    assert "report.html" in capsys.readouterr().out


def test_a_failing_report_does_not_cost_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(seed=7)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    callback = with_report(tmp_path, {})
    callback.on_train_begin(args, state, None)  # type: ignore[arg-type]
    callback.on_train_end(args, state, None)  # type: ignore[arg-type]  # nothing was logged
    assert "report failed" in caplog.text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    args = SimpleNamespace(seed=7)
    state = SimpleNamespace(is_world_process_zero=False, global_step=0)
    callback = with_report(tmp_path / "run", {})
    callback.on_train_begin(args, state, None)  # type: ignore[arg-type]
    callback.on_log(args, state, None, logs=LOGS)  # type: ignore[arg-type]
    callback.on_train_end(args, state, None)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
