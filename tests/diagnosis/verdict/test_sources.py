"""Every numeric rule of the sources: a log that keeps it, one that breaks it, and the verdicts on both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import pytest
from source_rules import RULES, Rule, Value

from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.judge import diagnose
from trl_offpolicy.diagnosis.verdict.sga import Cell, sga_cell
from trl_offpolicy.run_folder.run_data import MetricsLog

HEALTHY: dict[str, Value] = {
    "mismatch/kl_k3": 0.001,
    "mismatch/prob_pearson": 0.999,
    "mismatch/ppl_ratio": 1.001,
    "mismatch/prob_diff_max": 0.1,
    "mismatch/chi2_token": 0.01,
    "staleness/kl_k3": 0.001,
    "loss/clip_region_fraction": 0.02,
    "loss/entropy": 1.0,
}
PLAIN = ("reward", "grad_norm")
"""Names that the trainers log without the kit's prefix."""


def at(value: Value, step: int, steps: int) -> float | None:
    """The number of one step; a tuple is spread evenly over the steps."""
    return value[step * len(value) // steps] if isinstance(value, tuple) else value


def log_of(metrics: Mapping[str, Value], steps: int) -> MetricsLog:
    rows = []
    for step in range(steps):
        numbers = {key: at(value, step, steps) for key, value in (HEALTHY | dict(metrics)).items()}
        named = {key if key in PLAIN else f"offpolicy/{key}": value for key, value in numbers.items()}
        rows.append({"step": float(step), **{key: value for key, value in named.items() if value is not None}})
    return MetricsLog(tuple(rows))


def verdict(metrics: Mapping[str, Value], steps: int) -> set[str]:
    return {f"{one.cause} {one.severity}" for one in diagnose(log_of(metrics, steps)).findings}


def said(text: str) -> set[str]:
    return set(text.split(", ")) if text else set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.source.split()[0]}: {rule.rule}")
def test_the_verdict_changes_where_the_source_says(rule: Rule) -> None:
    assert verdict(rule.inside, rule.steps) == said(rule.otherwise)
    assert verdict(rule.beyond, rule.steps) == said(rule.verdict)
    known = {one.name for one in fields(Thresholds)}
    assert rule.limits and set(rule.limits) <= known


@pytest.mark.parametrize(
    ("tv", "chi2", "chi2_sequence", "remedy"),
    [
        (0.07, 0.9, 9.0, "nothing"),
        (0.09, 0.9, 9.0, "token"),
        (0.07, 0.9, 11.0, "sequence"),
        (0.07, 1.1, 9.0, "sequence"),
        (0.09, 1.1, 9.0, "repair"),
        (0.09, 0.9, 11.0, "token"),
    ],
)
def test_bias_and_variance_have_four_answers(tv: float, chi2: float, chi2_sequence: float, remedy: str) -> None:
    numbers = {"tv": tv, "chi2_token": chi2, "chi2_sequence": chi2_sequence}
    readings = {f"total/{key}": value for key, value in numbers.items()}
    cell = sga_cell(readings, Thresholds())
    assert cell == Cell(remedy, tv, chi2, chi2_sequence)  # type: ignore[arg-type]
    # of both ratios it is the one that the loss sees; and an interval that reaches the limit decides nothing
    near = {f"mismatch/{key}": 0.0 for key in numbers}
    assert sga_cell(readings | near, Thresholds()) == cell
    wide = {f"total/{key}_ci95": value for key, value in numbers.items()}
    open_ = sga_cell(readings | wide, Thresholds())
    assert open_ is not None and open_.remedy == "nothing"
    assert sga_cell({"total/tv": tv}, Thresholds()) is None
