"""The collapse risk on recorded runs that collapsed or did not, and part by part on made-up logs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.collapse.collapse_step import collapse_step
from trl_offpolicy.control import Risk, collapse_risk
from trl_offpolicy.control.risk import PARTS, ramp
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.run_folder.run_data import MetricsLog

RUNS = Path(__file__).parent / "runs"


def recorded(name: str) -> MetricsLog:
    columns = json.loads((RUNS / f"{name}.json").read_text())
    return MetricsLog(tuple(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)))


def walk(log: MetricsLog) -> list[Risk]:
    return [collapse_risk(MetricsLog(log.rows[: place + 1])) for place in range(len(log.rows))]


def log(rows: int, **columns: object) -> MetricsLog:
    """A number, or a list of one a row, by metric; ``__`` stands for a slash."""
    made = []
    for place in range(rows):
        row = {"step": float(place + 1)}
        for name, value in columns.items():
            key = name if "__" not in name else f"offpolicy/{name.replace('__', '/')}"
            row[key] = float(value[place] if isinstance(value, list) else value)  # type: ignore[arg-type]
        made.append(row)
    return MetricsLog(tuple(made))


# ---------------------------------------------------------------------------------------------------- recorded runs


@pytest.mark.parametrize(
    ("name", "part", "latest"),
    [("int3_ppo_is-1", "chi2", -20), ("lag8_fast-1", "chi2", -4), ("length_hack-1", "length", 4)],
)
def test_runs_that_collapse_are_seen(name: str, part: str, latest: int) -> None:
    """The alarm comes at most ``latest`` steps after the collapse (negative: before), and for the right reason.

    A hacked length shows when the reward is already falling: there the risk gives no lead on this task.
    """
    run = recorded(name)
    collapse = collapse_step(run, "learner_reward")
    assert collapse is not None
    risks = walk(run)
    place = next(place for place, risk in enumerate(risks) if risk.score >= 0.5)
    assert run.steps[place] - collapse <= latest
    assert max(risks[place].parts, key=lambda key: risks[place].parts[key]) == part


@pytest.mark.parametrize("name", ["float-3", "int3_tis-1"])
def test_runs_that_do_not_are_left_alone(name: str) -> None:
    run = recorded(name)
    assert collapse_step(run, "learner_reward") is None
    assert max(risk.score for risk in walk(run)) < 0.2


# ------------------------------------------------------------------------------------------------------- part by part


@pytest.mark.parametrize(
    ("part", "high", "low"),
    [
        ("chi2", {"mismatch__chi2_token_p95": 2.0}, {"mismatch__chi2_token_p95": 0.3}),
        # exp(-16 D): 0.09 and 0.5
        ("ess", {"mismatch__product_variance": 0.1505}, {"mismatch__product_variance": 0.0433}),
        (
            "ess",
            {"total__product_variance": 0.1505, "total__ess_sequence": 1.0},
            {"total__product_variance": 0.04, "total__ess_sequence": 1.0, "mismatch__product_variance": 0.2},
        ),
        (
            "ess",
            {"staleness__product_variance": 0.1505, "weight_applied__ess_sequence": 1.0},
            {"mismatch__product_variance": 0.2, "weight_applied__ess_sequence": 0.09},  # the weights correct it
        ),
        # products over whole responses, of an earlier log: long ones are low under any mismatch
        (
            "ess",
            {"mismatch__ess_sequence": 0.09, "completions/mean_length": 16.0},
            {"mismatch__ess_sequence": 0.01, "completions/mean_length": 1000.0},
        ),
        ("clip", {"loss__clip_region_fraction": 0.6}, {"loss__clip_region_fraction": 0.2}),
        ("clip", {"clip_ratio/region_mean": 0.6}, {"clip_ratio/region_mean": 0.2}),
        ("length", {"rollout__response_length_mean": [10.0] * 15 + [15.0] * 5}, {"completions/mean_length": 10.0}),
        (
            "length",
            {"completions/mean_length": [10.0] * 15 + [6.0] * 5},
            {"completions/mean_length": [10.0, 10.4] * 10},
        ),
        ("gradient", {"grad_norm": [1.0] * 19 + [10.0]}, {"grad_norm": [1.0] * 19 + [3.0]}),
    ],
)
def test_each_part_alone(part: str, high: dict[str, object], low: dict[str, object]) -> None:
    raised, level = collapse_risk(log(20, **high)), collapse_risk(log(20, **low))
    assert raised.parts[part] == pytest.approx(1.0, abs=0.01)
    assert raised.score == pytest.approx(1.0, abs=0.01)
    assert level.parts[part] == 0.0 and level.score == 0.0
    assert tuple(raised.parts) == PARTS


def test_parts_add_up_and_half_way_is_half() -> None:
    chi2, clip = (0.3 * 2.0) ** 0.5, (0.2 * 0.6) ** 0.5  # half way in the logarithm
    both = log(5, mismatch__chi2_token_p95=chi2, loss__clip_region_fraction=clip)
    risk = collapse_risk(both)
    assert risk.parts["chi2"] == pytest.approx(0.5) and risk.parts["clip"] == pytest.approx(0.5)
    assert risk.score == pytest.approx(0.75)


def test_weights_leave_staleness_to_be_seen() -> None:
    corrected = {"weight_applied__ess_sequence": 0.9, "mismatch__chi2_token_p95": 5.0, "total__chi2_token_p95": 5.0}
    assert collapse_risk(log(5, **corrected, staleness__chi2_token_p95=0.1)).score == 0.0
    assert collapse_risk(log(5, **corrected, staleness__chi2_token_p95=5.0)).parts["chi2"] == 1.0


def test_the_drift_of_both_kinds_counts_where_it_was_logged() -> None:
    stale = log(5, mismatch__chi2_token_p95=0.0, total__chi2_token_p95=5.0, total__chi2_token=0.0)
    assert collapse_risk(stale).parts["chi2"] == 1.0


def test_one_odd_row_raises_nothing_and_few_rows_say_nothing() -> None:
    assert collapse_risk(log(5, mismatch__chi2_token_p95=[0.0, 0.0, 0.0, 0.0, 9.0])).score == 0.0
    assert collapse_risk(log(2, mismatch__chi2_token_p95=9.0)).score == 0.0
    assert collapse_risk(log(5, mismatch__chi2_token_p95=float("nan"))).score == 0.0
    assert collapse_risk(MetricsLog(())).score == 0.0


def test_thresholds_are_those_of_the_diagnosis() -> None:
    rows = log(5, mismatch__chi2_token_p95=1.0)
    assert collapse_risk(rows).parts["chi2"] > 0.5
    assert collapse_risk(rows, Thresholds(chi2_moderate=1.0, chi2_high=2.0)).parts["chi2"] == 0.0


def test_ramp() -> None:
    assert [ramp(value, 2.0, 8.0) for value in (-1.0, 2.0, 4.0, 8.0, 9.0)] == pytest.approx([0, 0, 0.5, 1, 1])


# ------------------------------------------------------------------------------------------------- what a collapse is


def test_a_fall_that_lasts_is_a_collapse() -> None:
    fell = log(60, reward=[1.0] * 20 + [0.6] * 40)
    assert collapse_step(fell) == 23  # the third row of the median of five
    assert collapse_step(log(60, reward=[1.0] * 20 + [0.75] * 40)) is None
    assert collapse_step(log(60, reward=[1.0] * 20 + [0.6] * 20 + [0.95] * 20)) is None  # came back
    assert collapse_step(log(200, reward=[1.0] * 20 + [0.6] * 130 + [0.95] * 50)) == 23  # too late
    assert collapse_step(log(60, reward=[1.0] * 20 + [0.1] + [1.0] * 39)) is None  # one bad batch


def test_a_spike_counts_if_the_reward_falls_after_it() -> None:
    norms = [1.0] * 30 + [11.0] + [1.0] * 29
    assert collapse_step(log(60, reward=[1.0] * 30 + [0.85] * 30, grad_norm=norms)) == 31
    assert collapse_step(log(60, reward=1.0, grad_norm=norms)) is None
    assert collapse_step(log(60, reward=[1.0] * 30 + [0.85] * 30, grad_norm=[min(n, 9.0) for n in norms])) is None


def test_a_reward_that_was_not_logged_is_named() -> None:
    with pytest.raises(ValueError, match="reward must name a column of the log, but got 'learner_reward'"):
        collapse_step(log(3, reward=1.0), "learner_reward")
