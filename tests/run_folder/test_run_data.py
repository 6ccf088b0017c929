from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info


def test_rows_are_sorted_and_eval_and_end_rows_left_out(write_run: Any) -> None:
    run = write_run(
        [
            {"step": 2, "time": 1.0, "reward": 0.5, "eval_reward": 9.0, "note": "text", "flag": True},
            {"step": 1, "time": 1.0, "reward": 0.25},
            {"step": 2, "time": 1.0, "epoch": 1.0, "eval_reward": 9.0},
            {"step": 2, "time": 1.0, "train_runtime": 3.0, "train_loss": 7.0},
        ]
    )
    log = read_metrics(run)
    assert log.rows == (
        {"step": 1.0, "time": 1.0, "reward": 0.25},
        {"step": 2.0, "time": 1.0, "reward": 0.5},
    )
    assert (log.steps, log.skipped_lines, log.repeated_rows) == ([1, 2], 0, 0)


def test_partial_last_line_is_skipped_counted_and_warned_about(write_run: Any) -> None:
    run = write_run([{"step": 1, "reward": 1.0}, "", "[3]", '{"reward": 2.0}', '{"step": 2, "rew'])
    with pytest.warns(UserWarning, match=r"skipped 3 line\(s\) .*\(line 3, 4, 5\)"):
        log = read_metrics(run)
    assert (log.steps, log.skipped_lines) == ([1], 3)


def test_bytes_cut_inside_a_character_do_not_stop_the_reading(write_run: Any) -> None:
    run = write_run([{"step": 1, "reward": 1.0}])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\n{"step": 2, "note": "\xe2\x82')
    with pytest.warns(UserWarning, match="skipped 1 line"):
        assert read_metrics(run).steps == [1]


def test_series_leaves_out_and_counts_null_nan_and_infinity(write_run: Any) -> None:
    values = (1.0, None, math.nan, math.inf, 3.0)
    run = write_run([{"step": step, "loss": 0.0, "x": value} for step, value in enumerate(values)])
    series = read_metrics(run).series("x")
    assert series == ([0, 4], [1.0, 3.0], 3)
    assert read_metrics(run).series("absent") == ([], [], 0)


def test_a_resumed_run_replaces_rows_and_split_rows_merge(write_run: Any) -> None:
    run = write_run([{"step": 1, "a": 1.0, "b": 2.0}, {"step": 1, "c": 3.0}, {"step": 1, "a": 5.0}])
    log = read_metrics(run)
    assert log.rows == ({"step": 1.0, "a": 5.0},)
    assert log.repeated_rows == 1


def test_ratio_group_is_total_only_without_mismatch(write_run: Any) -> None:
    total = {"step": 1, "offpolicy/total/kl_k1": 1.0}
    assert read_metrics(write_run([total])).ratio_group == "total"
    assert read_metrics(write_run([{**total, "offpolicy/mismatch/kl_k1": 1.0}])).ratio_group == "mismatch"
    assert read_metrics(write_run([{"step": 1, "loss": 1.0}])).ratio_group == "mismatch"


def test_missing_folder_file_and_rows_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run_dir must be an existing folder or log file, but got .*absent"):
        read_metrics(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"run_dir must contain metrics.jsonl or trainer_state.json, but got"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 1.0}\n')
    with pytest.raises(ValueError, match="must hold at least one training row, but got 0"):
        read_metrics(tmp_path)


def test_run_info_is_optional_and_unreadable_info_warns(tmp_path: Path) -> None:
    assert read_run_info(tmp_path) == {}
    (tmp_path / "run.json").write_text('{"seed": 3}')
    assert read_run_info(tmp_path) == {"seed": 3}
    for text, reason in (("{", "left out"), ("[1]", "must hold a JSON object, but got list")):
        (tmp_path / "run.json").write_text(text)
        with pytest.warns(UserWarning, match=reason):
            assert read_run_info(tmp_path) == {}


def test_kept_tokens_have_no_numbers_where_none_was_kept(write_run: Any) -> None:
    """The trainer logs 0, the sum of nothing: a perplexity ratio or a correlation of 0 would be false."""
    numbers = {"offpolicy/kept/ppl_ratio": 0.0, "offpolicy/mismatch/ppl_ratio": 1.1}
    rows = [
        {"step": 1, "offpolicy/keep/dropped_token_fraction": 0.5, **numbers, "offpolicy/kept/ppl_ratio": 1.01},
        {"step": 2, "offpolicy/keep/dropped_token_fraction": 1.0, **numbers},
    ]
    log = read_metrics(write_run(rows))
    assert log.series("offpolicy/kept/ppl_ratio") == ([1], [1.01], 0)
    assert log.series("offpolicy/mismatch/ppl_ratio").steps == [1, 2]
