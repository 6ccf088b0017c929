"""The run folder: crash-safe metrics, archived and resumed runs, rollouts in parts."""

import json
import math
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from trl_offpolicy.run_folder import layout
from trl_offpolicy.run_folder.worst import read_worst
from trl_offpolicy.run_folder.writer import (
    RolloutRecorder,
    RunFolderWriter,
    append_metrics,
    keep_evaluation,
    prepare_run_folder,
)

NAN = float("nan")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in lines(folder / "metrics.jsonl")]


# ---------------------------------------------------------------------------------------------------- metrics


def test_each_step_is_one_line_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"

    append_metrics(path, 1, {"loss": 0.5, "note": "warm-up"})
    assert [row["step"] for row in lines(path)] == [1]
    append_metrics(path, 2, {"loss": 0.25})

    assert [(row["step"], row["loss"]) for row in lines(path)] == [(1, 0.5), (2, 0.25)]
    assert lines(path)[0]["note"] == "warm-up"
    assert lines(path)[0]["time"] > 1.6e9


def test_values_that_are_not_finite_become_null(tmp_path):
    append_metrics(tmp_path / "m", 0, {"a": NAN, "b": math.inf, "c": -math.inf, "d": 0.0, "e": None})

    row = lines(tmp_path / "m")[0]  # strict JSON: no bare NaN
    assert [row[key] for key in "abcde"] == [None, None, None, 0.0, None]


def test_values_that_are_not_scalars_are_left_out(tmp_path):
    append_metrics(tmp_path / "m", 0, {"list": [1], "tensor": torch.ones(2), "flag": True})

    assert set(lines(tmp_path / "m")[0]) == {"step", "time", "flag"}


# ----------------------------------------------------------------------------------------- archive and resume


def old_run(folder: Path) -> None:
    for step in (1, 2, 3):
        append_metrics(folder / "metrics.jsonl", step, {"loss": 0.1 * step})
    (folder / "run.json").write_text("{}")
    (folder / "rollouts.parquet").mkdir()
    for step in (0, 1, 2):
        for rank in (0, 1):
            (folder / "rollouts.parquet" / f"part-{step:07d}-{rank:04d}.parquet").write_bytes(b"PAR1")


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rollouts.parquet").iterdir())


def test_the_folder_is_made(tmp_path):
    prepare_run_folder(tmp_path / "a" / "b", resumed_step=0)

    assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a" / "b" / "_previous").exists()


def test_a_new_run_archives_the_old_one(tmp_path):
    old_run(tmp_path)
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "checkpoint-3").mkdir()

    prepare_run_folder(tmp_path, resumed_step=0)

    assert {path.name for path in tmp_path.iterdir()} == {"_previous"}
    (archive,) = (tmp_path / "_previous").iterdir()
    assert {path.name for path in archive.iterdir()} == {
        "metrics.jsonl",
        "run.json",
        "rollouts.parquet",
        "report.html",
        "checkpoint-3",  # else a later resume of the new run would go on from it
    }
    assert steps(archive) == [1, 2, 3]
    assert len(parts(archive)) == 6


def test_runs_started_in_one_second_do_not_overwrite_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    for step in (7, 8, 9):
        append_metrics(tmp_path / "metrics.jsonl", step, {})
        (tmp_path / "rollouts.parquet").mkdir()
        prepare_run_folder(tmp_path, resumed_step=0)

    archives = sorted((tmp_path / "_previous").iterdir())
    assert [path.name for path in archives] == ["20260101-000000", "20260101-000000-2", "20260101-000000-3"]
    assert [steps(path) for path in archives] == [[7], [8], [9]]
    assert all(parts(path) == [] for path in archives)


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    """Metrics come after a step, rollouts before it: checkpoint 2 has metrics 1, 2 and rollouts 0, 1."""
    old_run(tmp_path)

    prepare_run_folder(tmp_path, resumed_step=2)

    assert steps(tmp_path) == [1, 2]
    assert [name[:12] for name in parts(tmp_path)] == [
        "part-0000000",
        "part-0000000",
        "part-0000001",
        "part-0000001",
    ]
    assert not (tmp_path / "_previous").exists()
    assert (tmp_path / "run.json").exists()


def test_a_line_cut_short_by_a_kill_is_cut_at_resume(tmp_path):
    old_run(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole[:-20])  # inside the line of step 3

    prepare_run_folder(tmp_path, resumed_step=3)
    append_metrics(tmp_path / "metrics.jsonl", 4, {"loss": 0.4})

    assert steps(tmp_path) == [1, 2, 4]  # every line is whole JSON again


def test_resuming_is_safe_twice_and_leaves_no_temporary_file(tmp_path):
    old_run(tmp_path)

    prepare_run_folder(tmp_path, resumed_step=1)
    prepare_run_folder(tmp_path, resumed_step=1)

    assert steps(tmp_path) == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "run.json", "rollouts.parquet"}


def test_a_kill_while_cutting_loses_no_metrics(tmp_path, monkeypatch):
    old_run(tmp_path)

    def killed(self, text, *args, **kwargs):
        with self.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_run_folder(tmp_path, resumed_step=2)

    assert steps(tmp_path) == [1, 2, 3]


def test_resuming_in_an_empty_folder(tmp_path):
    prepare_run_folder(tmp_path, resumed_step=5)

    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------- rollouts


def rollout(**changes):
    """Two completions: tokens 7 8 9 (8 is a tool token) and 5."""
    return {
        "prompt_ids": torch.tensor([[0, 3], [1, 2]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[7, 8, 9], [5, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "completion_mask": torch.tensor([[True, False, True], [True, False, False]]),
        "sampling_per_token_logps": torch.tensor([[-0.5, NAN, -1.5], [-2.0, NAN, NAN]]),
        "old_per_token_logps": torch.tensor([[-0.25, -1.0, -1.25], [-2.5, 0.0, 0.0]], dtype=torch.bfloat16),
        "weights": torch.tensor([[1.5, 0.0, 1.25], [0.5, 0.0, 0.0]]),
        "keep_mask": torch.tensor([[True, False, False], [True, False, False]]),
        "reward": torch.tensor([1.0, 0.0]),
        "advantage": torch.tensor([0.75, -0.75]),
        "group_id": torch.tensor([4, 4]),
        "policy_version": torch.tensor([2, 2]),
        **changes,
    }


def recorder(folder: Path, rank: int = 0) -> RolloutRecorder:
    return RolloutRecorder(folder, lambda ids: " ".join(map(str, ids)), rank)


def test_one_row_a_completion_without_padding(tmp_path):
    writer = recorder(tmp_path)

    writer.add(3, **rollout())
    writer.flush()

    assert parts(tmp_path) == ["part-0000003-0000.parquet"]
    first, second = pd.read_parquet(tmp_path / "rollouts.parquet").to_dict("records")
    assert (first["step"], first["policy_version"], first["group_id"]) == (3, 2, 4)
    assert (first["prompt"], first["completion"]) == ("3", "7 8 9")
    assert (first["reward"], first["advantage"]) == (1.0, 0.75)
    assert first["completion_ids"].tolist() == [7, 8, 9]
    assert first["completion_mask"].tolist() == [True, False, True]
    assert first["old_per_token_logps"].tolist() == [-0.25, -1.0, -1.25]
    assert first["weights"].tolist() == [1.5, 0.0, 1.25]
    assert first["keep_mask"].tolist() == [True, False, False]
    assert (first["sampling_per_token_logps"][[0, 2]]).tolist() == [-0.5, -1.5]
    assert math.isnan(first["sampling_per_token_logps"][1])
    assert (second["prompt"], second["completion"], second["reward"]) == ("1 2", "5", 0.0)
    assert second["sampling_per_token_logps"].tolist() == [-2.0]


def test_micro_batches_of_one_step_share_a_part(tmp_path):
    """Of other widths, and one with something that the other lacks."""
    writer = recorder(tmp_path)
    cut = {name: value[:, :1] for name, value in rollout().items() if name in layout.TOKEN_COLUMNS}
    lacking = {"attention_mask": torch.ones(2, 1), "weights": None, "reward": torch.tensor([0.5, NAN])}

    writer.add(3, **rollout())
    writer.add(3, **rollout(**{**cut, **lacking}))
    writer.flush()

    rows = pd.read_parquet(tmp_path / "rollouts.parquet").to_dict("records")
    assert [row["completion"] for row in rows] == ["7 8 9", "5", "7", "5"]
    assert [row["old_per_token_logps"].tolist() for row in rows] == [[-0.25, -1.0, -1.25], [-2.5], [-0.25], [-2.5]]
    assert rows[0]["weights"].tolist() == [1.5, 0.0, 1.25] and rows[2]["weights"] is None
    assert rows[2]["reward"] == 0.5 and math.isnan(rows[3]["reward"])
    (worst, *_) = read_worst(tmp_path / layout.WORST_FOLDER)
    assert (worst["mean_abs_log_ratio"], worst["completion_mask"]) == (0.5, [True])  # the one of token 5
    assert [one["mean_abs_log_ratio"] for one in read_worst(tmp_path / layout.WORST_FOLDER)] == [0.5, 0.5, 0.25, 0.25]


def test_absent_tensors_are_null(tmp_path):
    writer = recorder(tmp_path)

    writer.add(0, **rollout(sampling_per_token_logps=None, reward=None, group_id=None))
    writer.flush()

    table = pd.read_parquet(tmp_path / "rollouts.parquet")
    assert table[["sampling_per_token_logps", "reward", "group_id"]].isna().all().all()
    assert table["weights"].notna().all()


def test_one_part_a_step_and_rank(tmp_path):
    for rank in (0, 1):
        writer = recorder(tmp_path, rank)
        for step in (4, 5):
            writer.add(step, **rollout())
            writer.add(step, **rollout())  # a second micro-batch
        writer.flush()

    assert parts(tmp_path) == [f"part-000000{step}-000{rank}.parquet" for step in (4, 5) for rank in (0, 1)]
    assert pd.read_parquet(tmp_path / "rollouts.parquet")["step"].value_counts().to_dict() == {4: 8, 5: 8}


def test_flush_writes_each_rollout_once(tmp_path):
    writer = recorder(tmp_path)
    writer.flush()
    assert not (tmp_path / "rollouts.parquet").exists()

    writer.add(1, **rollout())
    writer.flush()
    writer.add(2, **rollout())
    writer.flush()
    writer.flush()

    assert len(pd.read_parquet(tmp_path / "rollouts.parquet")) == 4


def test_recording_holds_no_graph(tmp_path):
    writer = recorder(tmp_path)
    logps = torch.zeros(2, 3, requires_grad=True)

    writer.add(0, **rollout(old_per_token_logps=logps * 2))

    assert not writer._pending[0][1]["old_per_token_logps"].requires_grad


def test_a_kill_while_writing_leaves_a_readable_folder(tmp_path, monkeypatch):
    import pyarrow.parquet

    writer = recorder(tmp_path)
    writer.add(0, **rollout())
    writer.flush()

    def killed(table, path):
        Path(path).write_bytes(b"PAR1 half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(pyarrow.parquet, "write_table", killed)
    writer.add(1, **rollout())
    with pytest.raises(KeyboardInterrupt):
        writer.flush()

    assert pd.read_parquet(tmp_path / "rollouts.parquet")["step"].unique().tolist() == [0]
    assert list((tmp_path / "rollouts.parquet").glob("part-*")) == [
        tmp_path / "rollouts.parquet" / "part-0000000-0000.parquet"
    ]


# --------------------------------------------------------------------------------------------------- run info


def test_run_info_takes_what_json_does_not_know(tmp_path):
    RunFolderWriter(tmp_path, {"folder": Path("x")}).begin(0, seed=1)

    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["seed"], info["folder"]) == (1, "x")
    assert info["versions"]["torch"] == torch.__version__
    assert "trl" in info["versions"] and info["command"]


def test_a_run_from_its_beginning_to_its_report(tmp_path):
    reported = []
    writer = RunFolderWriter(str(tmp_path), {}, report=reported.append)

    writer.begin(0, seed=1)
    for step in (1, 2, 3):
        writer.log(step, {"loss": 0.5})
    assert not reported
    writer.end()
    assert steps(tmp_path) == [1, 2, 3] and reported == [tmp_path]

    RunFolderWriter(tmp_path, {}).begin(2, seed=1)  # goes on from a checkpoint
    assert steps(tmp_path) == [1, 2]


def test_columns_of_a_part_are_those_of_the_layout(tmp_path):
    writer = recorder(tmp_path)
    writer.add(0, **rollout())
    writer.flush()

    assert list(pd.read_parquet(tmp_path / "rollouts.parquet")) == [
        *layout.ROW_COLUMNS,
        *layout.TOKEN_COLUMNS,
        *layout.PROMPT_COLUMNS,
    ]


# ---------------------------------------------------------------------------------------------------- evaluation.json


def test_the_first_and_the_last_evaluation_are_kept(tmp_path):
    writer = RunFolderWriter(tmp_path, {})
    writer.begin(0, seed=1)
    for step, reward in ((0, 0.125), (2, 0.25), (4, 0.5)):
        writer.log(step, {"loss": 0.1})
        writer.log(step, {"eval_reward": reward, "eval_rewards/f/mean": reward, "eval_pass@1": 1.0, "eval_loss": 1.0})
        found = json.loads((tmp_path / "evaluation.json").read_text())
        row = {"eval_reward": reward, "eval_rewards/f/mean": reward, "eval_pass@1": 1.0}
        assert found["after"] == (None if step == 0 else {"step": step, **row})
        assert found["before"] == {"step": 0, **row, "eval_reward": 0.125, "eval_rewards/f/mean": 0.125}
    writer.leave()


def test_a_run_without_held_out_prompts_has_no_evaluation_and_a_new_run_begins_anew(tmp_path):
    writer = RunFolderWriter(tmp_path, {})
    writer.begin(0, seed=1)
    writer.log(1, {"loss": 0.1})
    assert not (tmp_path / "evaluation.json").exists()
    writer.log(1, {"eval_reward": 0.5})
    writer.begin(0, seed=1)
    assert not (tmp_path / "evaluation.json").exists()  # it is in _previous
    writer.log(1, {"eval_reward": 0.25})
    assert json.loads((tmp_path / "evaluation.json").read_text())["before"]["eval_reward"] == 0.25
    writer.leave()


def test_a_resumed_run_forgets_the_evaluations_after_its_checkpoint(tmp_path):
    for step in (2, 4, 8):
        keep_evaluation(tmp_path, step, {"eval_reward": float(step)})
    path = tmp_path / "evaluation.json"

    prepare_run_folder(tmp_path, resumed_step=3)
    assert json.loads(path.read_text()) == {"before": {"step": 2, "eval_reward": 2.0}, "after": None}
    keep_evaluation(tmp_path, 4, {"eval_reward": 0.5})
    assert json.loads(path.read_text())["after"] == {"step": 4, "eval_reward": 0.5}
    prepare_run_folder(tmp_path, resumed_step=1)
    assert not path.exists()


def test_no_token_of_the_command_line_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "abc123", "--api-key=abc123", "--x", "hf_abcdefghij"])
    RunFolderWriter(tmp_path, {}).begin(0, seed=0)
    text = (tmp_path / "run.json").read_text()
    assert "abc123" not in text and "abcdefghij" not in text and "train.py --hub_token '***'" in text
