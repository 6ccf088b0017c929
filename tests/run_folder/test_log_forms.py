"""The forms of other frameworks' logs: the console, W&B's exports, lists of rows; what is no number, what is run again.

The lines have the form of those that people pasted in the frameworks' issues (verl #106 and #1037, TRL #3452, ms-swift
#5890, ProRL-Agent-Server #40, SkyRL #1864).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.run_folder.run_data import MetricsLog, read_metrics

VERL = (
    "\x1b[36m(TaskRunner pid=87031)\x1b[0m step:{step} - actor/entropy_loss:0.321 - actor/grad_norm:{norm} - "
    "critic/score/mean:0.891 - training/global_step:{step}.000 - rollout_corr/k3_kl:0.0006\n"
)
LOST = VERL.replace("{norm}", "nan").replace("0.321", "nan").replace("0.0006", "nan")
TRL = "{{'loss': '{loss}', 'grad_norm': 0.08, 'reward': 1.7, 'completions/mean_length': 232.8, 'epoch': 0.31}}\n"
SLIME = (
    "[2026-06-10 10:11:12] model.py:660 - step {step}: {{'train/loss': 0.1, 'train/ppo_kl': -7.4e-12, "
    "'train/grad_norm': nan, 'train/step': {step}}}\n"
)
BAR = "Training:  12%|###       | 3/25 [00:10<01:20,  3.6s/it]\n"


def read(folder: Path, name: str, text: str) -> MetricsLog:
    (folder / name).write_text(text)
    return read_metrics(folder / name)


def test_verls_console_is_read(tmp_path: Path) -> None:
    text = "".join(BAR + VERL.format(step=step, norm="0.006") for step in (80, 81))
    log = read(tmp_path, "verl.log", f"loading weights\n{text}")
    assert log.steps == [80, 81] and log.frameworks == ("verl",) and log.skipped_lines == 0
    assert log.rows[0]["actor/grad_norm"] == 0.006 and log.rows[0]["offpolicy/mismatch/kl_k3"] == 0.0006


def test_what_trl_prints_is_counted(tmp_path: Path) -> None:
    text = TRL.format(loss="0.5") + BAR + "{'eval_loss': 0.1}\n" + TRL.format(loss="-0.25")
    log = read(tmp_path, "trl.log", text + "{'train_runtime': 12.5, 'epoch': 1.0}\n")
    assert log.steps == [1, 2] and log.series("loss").values == [0.5, -0.25]


def test_what_slime_prints_has_its_step(tmp_path: Path) -> None:
    log = read(tmp_path, "slime.log", SLIME.format(step=1) + SLIME.format(step=28))
    assert log.steps == [1, 28] and log.series("train/grad_norm").nonfinite == 2
    assert log.series("train/loss").values == [0.1, 0.1]


def test_a_list_of_rows_and_a_bare_history_are_read(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}]
    assert read(tmp_path, "a.json", json.dumps(rows)).series("loss").values == [0.1, 0.2]
    assert read(tmp_path, "b.json", json.dumps({"log_history": rows})).steps == [1, 2]


def test_ms_swifts_step_of_all_steps_is_read(tmp_path: Path) -> None:
    rows = [{"loss": 0.1, "global_step/max_steps": "1/547"}, {"loss": 0.2, "global_step/max_steps": "2/547"}]
    assert read(tmp_path, "logging.jsonl", "".join(json.dumps(row) + "\n" for row in rows)).steps == [1, 2]


def test_trls_names_in_wandb_are_trls(tmp_path: Path) -> None:
    names = "_step,train/reward,train/grad_norm,train/sampling/sampling_logp_difference/mean\n"
    log = read(tmp_path, "wandb.csv", names + "1,0.5,0.1,0.2\n2,,0.3,\n")
    assert log.frameworks == ("TRL",) and log.steps == [1, 2] and log.series("reward").values == [0.5]
    slime = read(tmp_path, "s.jsonl", '{"train/step": 1, "train/grad_norm": 0.1, "train/ppo_kl": 0.0}\n')
    assert slime.frameworks == ("slime",)


def test_a_panel_of_wandb_is_one_metric(tmp_path: Path) -> None:
    text = '"Step","my - run - train/reward","my - run - train/reward__MIN"\n"5","0.25","0.1"\n'
    assert read(tmp_path, "panel.csv", text).rows == ({"reward": 0.25, "step": 5},)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tb.csv", "Wall time,Step,Value\n1.5,5,0.1\n", "must name its metrics, but TensorBoard's CSV"),
        ("a.json", "", r"a\.json must be JSON, but cannot be read"),
        ("b.json", '{"a": 1}', "must hold a log_history or a list of rows"),
        ("c.log", "nothing here\n", "These forms are read: JSON lines, trainer_state"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, name, text)


def test_a_run_that_lost_its_numbers_is_critical_and_judged_before(tmp_path: Path) -> None:
    text = "".join(LOST.format(step=step) if step > 40 else VERL.format(step=step, norm="0.1") for step in range(1, 61))
    log = read(tmp_path, "verl.log", text)
    assert log.broken == ("actor/grad_norm", 41)
    found = examine(tmp_path / "verl.log").diagnosis
    assert (found.verdict, found.steps, found.findings) == ("critical", (21, 40), ())
    assert found.line().startswith("critical  actor/grad_norm is NaN or infinite from step 41 to the last")
    assert found.as_dict()["broken"] == {"metric": "actor/grad_norm", "since": 41}


def test_a_run_without_a_number_from_the_start_is_critical(tmp_path: Path) -> None:
    read(tmp_path, "verl.log", "".join(LOST.format(step=step) for step in (1, 2, 3)))
    found = examine(tmp_path / "verl.log").diagnosis
    assert found.verdict == "critical" and "no step before it was logged" in found.no_number()


@pytest.mark.parametrize("norms", [["nan", "0.1", "0.1"], ["0.1", "nan", "nan"]])
def test_single_steps_without_a_number_are_mixed_precisions(tmp_path: Path, norms: list[str]) -> None:
    text = "".join(VERL.format(step=step, norm=norm) for step, norm in enumerate(norms, 1))
    assert read(tmp_path, "verl.log", text).broken is None


def test_a_resumed_run_is_judged_by_what_counts(tmp_path: Path) -> None:
    steps = [*range(1, 31), *range(21, 26)]
    rows = [{"step": step, "loss": float(place)} for place, step in enumerate(steps)]
    log = read(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert log.steps == list(range(1, 26)) and log.series("loss").values[-1] == 34.0
    assert log.remarks[0].startswith("A step was logged again") and "9 rows of the earlier run" in log.remarks[0]


@pytest.mark.parametrize("updates", [1, 4])
def test_slimes_rollouts_are_at_their_optimizer_steps(tmp_path: Path, updates: int) -> None:
    """slime counts rollouts in ``rollout/step`` and optimizer steps in ``train/step``, in rows of their own."""
    rows = []
    for rollout in range(12):
        rows.append({"rollout/step": rollout, "rollout/raw_reward": 0.1 * rollout, "rollout/response_len/mean": 400})
        first = rollout * updates
        rows += [{"train/step": step, "train/loss": 0.1} for step in range(first, first + updates)]
    log = read(tmp_path, "slime.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert log.skipped_lines == 0 and log.steps == list(range(12 * updates))
    rewards = log.series("reward")
    assert rewards.steps == [updates * (rollout + 1) - 1 for rollout in range(12)] and rewards.values[-1] == 0.1 * 11
    # a log of rollouts alone counts them
    alone = read(tmp_path, "alone.jsonl", "".join(json.dumps(row) + "\n" for row in rows if "rollout/step" in row))
    assert alone.steps == list(range(12))


def test_a_log_of_ms_swift_is_answered_in_its_arguments(tmp_path: Path) -> None:
    row = {"reward": 0.5, "completions/mean_length": 200, "rollout_correction/k3_kl": 0.04, "entropy": 0.5}
    text = "".join(json.dumps({"global_step/max_steps": f"{step}/20", **row}) + "\n" for step in range(1, 20))
    (tmp_path / "logging.jsonl").write_text(text)
    seen = examine(tmp_path / "logging.jsonl")
    assert seen.frameworks[0] == "ms-swift" and [one.cause for one in seen.diagnosis.findings] == ["engine_mismatch"]
    assert seen.advice is not None and "torch_dtype: float16" in seen.advice.yaml


def test_numbers_as_numpy_prints_them(tmp_path: Path) -> None:
    """verl prints ``np.float64(0.5)`` under numpy 2, and TRL's dictionaries may hold them too."""
    line = "step:3 - actor/grad_norm:np.float64(nan) - critic/score/mean:np.float32(0.5) - actor/entropy:0.2\n"
    (row,) = read(tmp_path, "verl.log", line).rows
    assert row["reward"] == 0.5 and math.isnan(row["grad_norm"]) and row["offpolicy/loss/entropy"] == 0.2
    (row,) = read(tmp_path, "trl.log", "{'loss': np.float64(0.25), 'reward': np.float64(1.5)}\n").rows
    assert row["loss"] == 0.25 and row["reward"] == 1.5


def test_an_evaluation_does_not_erase_the_training_step(tmp_path: Path) -> None:
    """W&B's history has a row of its own for it, with a time and the same step."""
    rows = []
    for step in range(5):
        rows.append(
            {"_step": 2 * step, "train/global_step": step, "train/reward": 0.5, "_timestamp": 1.0, "_runtime": 1}
        )
        rows.append(
            {"_step": 2 * step + 1, "train/global_step": step, "eval/reward": 0.9, "_timestamp": 2.0, "_runtime": 2}
        )
    log = read(tmp_path, "wandb.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert log.series("reward").values == [0.5] * 5 and log.repeated_rows == 0


@pytest.mark.parametrize("spelling", ['"NaN"', '"Infinity"', '"-Infinity"', "NaN", "null"])
def test_every_spelling_of_no_number(tmp_path: Path, spelling: str) -> None:
    text = "".join(
        f'{{"step": {step}, "reward": 0.5, "grad_norm": {"0.1" if step < 20 else spelling}}}\n' for step in range(25)
    )
    assert read(tmp_path, "log.jsonl", text).broken == ("grad_norm", 20)


def test_a_gradient_of_zero_after_nan_is_no_recovery(tmp_path: Path) -> None:
    norms = ["0.1"] * 20 + ["NaN"] * 3 + ["0.0"] * 10
    text = "".join(f'{{"step": {step}, "reward": 0.5, "grad_norm": {norm}}}\n' for step, norm in enumerate(norms))
    assert read(tmp_path, "log.jsonl", text).broken == ("grad_norm", 20)
    again = text + '{"step": 33, "reward": 0.5, "grad_norm": 0.2}\n'
    assert read(tmp_path, "again.jsonl", again).broken is None


def test_only_training_steps_of_the_console_are_counted(tmp_path: Path) -> None:
    """A configuration, an evaluation with names of its own, and the same line of a second process are none."""
    step = "{'loss': 0.1, 'reward': 0.5, 'grad_norm': 0.2}\n"
    other = "{'loss': 0.1, 'reward': 0.6, 'grad_norm': 0.2}\n"
    text = (
        "{'learning_rate': 1e-06, 'seed': 42}\n"
        + step
        + step
        + "{'eval_loss': 0.1, 'reward': 9.0, 'epoch': 1}\n"
        + other
    )
    log = read(tmp_path, "trl.log", text)
    assert log.steps == [1, 2] and log.series("reward").values == [0.5, 0.6]


def bar(step: int, total: int) -> str:
    return f" {100 * step // total}%|##   | {step}/{total} [00:10<01:20,  3.6s/it]\n"


def test_the_trainings_bar_says_which_step_it_is(tmp_path: Path) -> None:
    """With ``logging_steps: 5`` the tenth printed row is step 50; bars of models, data and evaluations say nothing."""
    text = "Loading checkpoint shards: 100%|####| 80/80 [00:01<00:00]\n" + bar(7473, 7473)
    for step in range(5, 55, 5):
        text += bar(step - 1, 100).replace("\n", "\r") + bar(step, 100)
        text += f"{{'loss': 0.1, 'reward': {step / 100}}}\n"
        text += bar(1319, 1319) if step == 25 else ""
    assert read(tmp_path, "trl.log", text).steps == list(range(5, 55, 5))
    resumed = "".join(bar(step, 1000) + f"{{'loss': 0.1, 'reward': {step}}}\n" for step in range(501, 505))
    assert read(tmp_path, "resumed.log", resumed).steps == [501, 502, 503, 504]
    without = bar(4, 4) + "".join(f"{{'loss': 0.1, 'reward': {step}}}\n" for step in range(3))
    assert read(tmp_path, "without.log", without).steps == [1, 2, 3]


def test_rows_without_a_number_are_never_taken_for_a_second_process(tmp_path: Path) -> None:
    good = "".join(f"{{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.{step}}}\n" for step in range(9))
    log = read(tmp_path, "trl.log", good + "{'loss': nan, 'grad_norm': nan, 'reward': 0.0, 'epoch': 0.02}\n" * 5)
    assert len(log.rows) == 14 and log.broken == ("grad_norm", 10)


def test_a_live_log_of_slime_has_sampled_more_than_it_has_trained(tmp_path: Path) -> None:
    rows = []
    for rollout in range(5):
        rows.append({"rollout/step": rollout, "rollout/raw_reward": 0.1})
        rows += [{"train/step": 4 * rollout + step, "train/loss": 0.1} for step in range(4)] if rollout < 4 else []
    log = read(tmp_path, "slime.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert log.series("reward").steps == [3, 7, 11, 15, 19]


def test_a_step_that_a_table_names_twice_is_no_second_run(tmp_path: Path) -> None:
    log = read(tmp_path, "panel.csv", "Step,run - step,run - reward\n1,1,0.5\n2,2,0.6\n")
    assert log.steps == [1, 2] and log.series("reward").values == [0.5, 0.6]


def test_two_runs_in_one_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"panel.csv must hold one run, but reward is there of several\.$"):
        read(tmp_path, "panel.csv", "Step,one - reward,other - reward\n1,0.5,0.6\n")


def test_older_names_of_length_and_entropy(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "log.jsonl", '{"step": 1, "completion_length": 80, "actor/entropy_loss": 0.4}\n').rows
    assert row["offpolicy/rollout/response_length_mean"] == 80 and row["offpolicy/loss/entropy"] == 0.4


def test_numbers_that_are_none_are_told_and_text_under_our_names_is_none(tmp_path: Path) -> None:
    text = "\n".join(
        json.dumps({"step": step, "reward": None if step == 2 else 0.5, "offpolicy/mismatch/kl_k3": "abc"})
        for step in range(1, 5)
    )
    log = read(tmp_path, "log.jsonl", text)
    assert all(math.isnan(row["offpolicy/mismatch/kl_k3"]) for row in log.rows)
    assert log.remarks[0] == (
        "NaN, infinite or no number, and left out: offpolicy/mismatch/kl_k3 in 4, reward in 1 of 4 steps."
    )


def test_rows_without_a_step_that_is_known_say_which_keys_they_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"whole number under one of step, .* and its rows have iteration, kl"):
        read(tmp_path, "log.jsonl", '{"iteration": 1, "kl": 0.1}')
