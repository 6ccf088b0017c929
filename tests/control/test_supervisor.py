"""The supervisor on made-up rows: what is said once, when a run ends, and that its state is all it has."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.control import (
    CONTROL_METRICS,
    LENGTH_SURGE,
    ControlState,
    LearningRateScale,
    Outcome,
    Supervisor,
    parse_control,
)
from trl_offpolicy.control.supervisor import _WHOLE_ROWS
from trl_offpolicy.diagnosis.verdict.judge import diagnose
from trl_offpolicy.run_folder.run_data import MetricsLog

TOTAL = "offpolicy/total/ess_sequence"
GOOD = {"loss": 0.1, "offpolicy/mismatch/kl_k3": 1e-4, "offpolicy/mismatch/prob_pearson": 0.999}
BAD = {"loss": 0.1, "offpolicy/mismatch/kl_k3": 0.5, "offpolicy/mismatch/prob_pearson": 0.8}


def supervisor(spec: Any = "warn") -> Supervisor:
    parsed = parse_control(spec)
    assert parsed is not None
    return Supervisor(parsed)


def play(watcher: Supervisor, rows: list[dict[str, Any]], *, through_json: bool = False) -> list[Outcome]:
    state, outcomes = watcher.start(), []
    for step, row in enumerate(rows, 1):
        state, outcome = watcher.observe(state, step, row)
        outcomes.append(outcome)
        if through_json:
            state = watcher.restore(json.loads(json.dumps(state.as_dict())))
    return outcomes


def test_a_finding_is_said_when_it_is_new_and_again_after_a_window_without() -> None:
    """The verdict looks at 20 rows: means, and a low quantile of the correlation."""
    outcomes = play(supervisor(), [GOOD] * 2 + [BAD] * 3 + [GOOD] * 60 + [BAD] * 2)
    said = [(place + 1, line) for place, outcome in enumerate(outcomes) for line in outcome.lines]
    assert said[0] == (1, "step 1: ok  KL k3 1.00e-04 nats a token") or "ok  KL k3" in said[0][1]
    critical = [place for place, line in said if "critical" in line]
    assert critical[0] == 3 and critical[-1] == 67 and len(critical) == len(set(critical)) == 2
    assert any("Fix: " in line for _, line in said)
    recovered = [place for place, line in said if " ok " in line]
    assert recovered[0] == 1 and 40 < recovered[1] < 66


def test_the_metrics_are_those_of_the_page() -> None:
    spec = {"controllers": ["length_guard", "escalation", "resync"]}
    (outcome,) = play(supervisor(spec), [GOOD])
    assert set(outcome.metrics) == {f"offpolicy/control/{name}" for name in CONTROL_METRICS}
    (plain,) = play(supervisor(), [BAD])
    assert set(plain.metrics) == {f"offpolicy/control/{name}" for name in CONTROL_METRICS[:-3]}
    assert plain.metrics["offpolicy/control/verdict"] == 3.0 and outcome.metrics["offpolicy/control/verdict"] == 0.0


def test_stop_waits_for_its_patience_and_counts_anew_after_a_good_reading() -> None:
    def ends(rows: list[dict[str, Any]], patience: int = 3) -> list[int]:
        outcomes = play(supervisor({"policy": "stop", "patience": patience}), rows)
        return [place + 1 for place, outcome in enumerate(outcomes) if outcome.stop]

    assert ends([BAD] * 2) == [] and ends([BAD] * 3) == [3] and ends([BAD] * 6) == [3, 6]
    assert ends([BAD], patience=1) == [1]
    assert [place + 1 for place, outcome in enumerate(play(supervisor(), [BAD] * 6)) if outcome.stop] == []


def test_a_high_risk_alone_ends_a_run_too() -> None:
    risky = {"loss": 0.1, "offpolicy/mismatch/chi2_token_p95": 1.0}
    outcomes = play(supervisor({"policy": "stop", "patience": 2, "risk": 0.6}), [risky] * 5)
    assert [outcome.metrics["offpolicy/control/verdict"] for outcome in outcomes] == [
        -1.0
    ] * 5  # no distance was logged
    assert "collapse risk 0.63 (2 logging steps in a row)" in next(o.stop for o in outcomes if o.stop)
    assert not any(o.stop for o in play(supervisor({"policy": "stop", "patience": 2, "risk": 0.7}), [risky] * 5))


def test_the_scales_of_two_controllers_multiply() -> None:
    spec = {"controllers": {"length_guard": {"window": 2}, "ess_step": {"metric": TOTAL, "base": 1.0}}}
    rows = [{"offpolicy/total/ess_sequence": 0.25, "completions/mean_length": n} for n in (10.0, 10.0, 20.0)]
    outcomes = play(supervisor(spec), rows)
    assert [outcome.learning_rate_scale for outcome in outcomes] == [0.5, 0.5, 0.25]
    assert [len(outcome.actions) for outcome in outcomes] == [1, 0, 1]
    assert any("length_guard" in line for line in outcomes[2].lines)


@pytest.mark.parametrize("length", [64, 512, 4096])
@pytest.mark.parametrize(("sd", "ess"), [(0.02, 0.99), (0.1, 0.85), (0.3, 0.24), (0.5, 0.02)])
def test_the_length_of_the_responses_moves_neither_the_scale_nor_the_risk(sd: float, ess: float, length: int) -> None:
    """Log-ratios of one size. The ESS of whole products falls from 0.97 to 1 / 64 in this table, and stays there."""
    logged = op.presets.get("paper/tis").correction(drifted(sd, length)).stats.compute()
    assert logged["offpolicy/staleness/product_variance"] == pytest.approx(sd**2, rel=0.6)
    if sd >= 0.1 and length == 4096:
        assert logged[TOTAL] < 0.05
    outcomes = play(supervisor({"controllers": {"ess_step": {}}}), [logged] * 3)
    low = ess < 0.5
    assert (outcomes[-1].learning_rate_scale < 0.9) == low
    assert (outcomes[-1].metrics["offpolicy/control/risk_ess"] > 0.3) == low
    assert (outcomes[-1].metrics["offpolicy/control/collapse_risk"] > 0.3) == low


def test_the_tree_still_says_that_few_responses_would_count_as_wholes() -> None:
    logged = op.presets.get("paper/tis").correction(drifted(0.1, 512)).stats.compute()
    diagnosis = diagnose(MetricsLog(tuple({"step": step, **logged} for step in (1.0, 2.0, 3.0))))
    assert ("sequence_variance", "notice") in [(one.cause, one.severity) for one in diagnosis.findings]


def drifted(sd: float, length: int) -> op.PolicyBatch:
    """64 responses; log-ratios of the current and the sampling weights from N(-sd^2 / 2, sd^2), as E[rho] = 1 asks."""
    sampling = torch.full((64, length), -1.0)
    return op.PolicyBatch(
        per_token_logps=sampling - sd**2 / 2 + sd * torch.randn(64, length, generator=torch.Generator().manual_seed(0)),
        old_per_token_logps=sampling,
        sampling_per_token_logps=sampling,
        completion_mask=torch.ones(64, length).bool(),
        advantages=torch.zeros(64),
    )


def test_the_state_is_all_it_has() -> None:
    """Through JSON after every row: the same outcomes, across more rows than are kept whole."""
    spec = {"controllers": {"length_guard": {"window": 80}, "escalation": {"patience": 2, "calm": 5}, "ess_step": {}}}
    rows = []
    for place in range(120):
        row = {**(BAD if 30 <= place < 35 else GOOD), "completions/mean_length": 10.0 + (place > 90) * 5.0}
        row |= {"offpolicy/mismatch/chi2_token": 0.4 if place % 50 > 30 else 0.01, "offpolicy/mismatch/kl_k3_ci95": 1.0}
        rows.append({**row, "offpolicy/total/product_variance": 0.1 * (place % 40 > 30), "grad_norm": 1.0})
    plain, through = play(supervisor(spec), rows), play(supervisor(spec), rows, through_json=True)
    assert plain == through
    assert {action.controller for outcome in plain for action in outcome.actions} == {
        "length_guard", "escalation", "ess_step",
    }  # fmt: skip


def test_old_rows_are_dropped_and_rows_after_a_resume_replaced() -> None:
    watcher, state = supervisor(), ControlState()
    for step in range(1, 401):
        state, _ = watcher.observe(state, step, {**GOOD, "completions/mean_length": 4.0})
    first = [1, 2, 3, 4, 5]  # with which the verdict compares
    assert [int(row["step"]) for row in state.rows] == [*first, *range(200, 401)]
    assert (
        set(state.rows[0]) == {"step", "completions/mean_length", "offpolicy/mismatch/kl_k3"}
        and "loss" in state.rows[-_WHOLE_ROWS]
    )
    state, _ = watcher.observe(state, 300, GOOD)
    assert [int(row["step"]) for row in state.rows][-2:] == [299, 300]


def course(step: int) -> dict[str, float]:
    """A run whose entropy collapses, whose mismatch grows, and whose responses reach the limit."""
    return {
        "step": step, "offpolicy/loss/entropy": 1.5 * math.exp(-step / 60), "completions/mean_length": 100.0,
        "completions/clipped_ratio": min(1.0, step / 400), "offpolicy/mismatch/kl_k3": 5e-4 * math.exp(step / 100),
        "offpolicy/mismatch/prob_pearson": 0.999, "loss": 0.1, "reward": 0.5, "grad_norm": 1.0,
    }  # fmt: skip


def test_a_live_verdict_reads_what_the_report_reads() -> None:
    watcher, rows = supervisor(), [course(step) for step in range(1, 401)]
    state = watcher.start()
    for row in rows:
        state, _ = watcher.observe(state, int(row["step"]), row)
    live, whole = (diagnose(MetricsLog(tuple(kept)), watcher.spec.thresholds) for kept in (state.rows, rows))
    assert {one.cause for one in live.findings} == {one.cause for one in whole.findings}
    assert {"entropy_collapse", "engine_mismatch"} <= {one.cause for one in live.findings}


def test_a_window_of_the_users_is_remembered() -> None:
    watcher = supervisor({"policy": "warn", "thresholds": {"length_window": 400}})
    state = watcher.start()
    for step in range(1, 601):
        length = 100 * (1 + max(0, step - 200) / 800)
        state, outcome = watcher.observe(state, step, {**GOOD, "completions/mean_length": length})
    assert outcome.metrics[LENGTH_SURGE] == pytest.approx(1.48, abs=0.02)


def test_rows_are_remembered_where_few_steps_are_logged() -> None:
    watcher = supervisor({"controllers": {"staleness_ceiling": {"window": 100}}})
    state = watcher.start()
    for step in range(10, 3001, 10):
        state, _ = watcher.observe(state, step, {**GOOD, "offpolicy/rollout/version_lag_max": 1.0})
    assert sum("offpolicy/rollout/version_lag_max" in row for row in state.rows) >= 100


def test_a_checkpoint_without_a_controller_starts_it() -> None:
    state = supervisor({"controllers": ["ess_step"]}).start().as_dict()
    restored = supervisor({"controllers": ["ess_step", "length_guard"]}).restore(state)
    assert set(restored.controllers) == {"ess_step", "length_guard"}
    assert restored.controllers["length_guard"].scale == 1.0


# ------------------------------------------------------------------------------------------------------ learning rate


def test_the_scale_is_in_force_inside_a_step_only() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    other = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [other], "lr": 0.5}], lr=1.0)
    scale = LearningRateScale()
    scale.attach(optimizer)
    scale.value = 0.25
    for parameter in (weight, other):
        parameter.grad = torch.ones(1)
    inside: list[float] = []

    def closure() -> float:
        inside.append(scale.in_force(optimizer))
        return 0.0

    optimizer.step(closure)
    assert (weight.item(), other.item()) == (-0.25, -0.125) and inside == [0.25]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5] and scale.in_force(optimizer) == 0.25
    scale.detach()
    optimizer.step()
    assert weight.item() == -1.25


def test_a_step_that_raises_leaves_no_scale_behind() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scale = LearningRateScale()
    scale.attach(optimizer)
    scale.value = 0.5

    def fail() -> float:
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        optimizer.step(fail)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -0.5 and optimizer.param_groups[0]["lr"] == 1.0


def test_wrappers_are_taken_off_and_strangers_refused() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer, scale = torch.optim.SGD([weight], lr=1.0), LearningRateScale()
    scale.attach(Wrapper(Wrapper(optimizer)))
    scale.value = 0.5
    optimizer.step()
    assert weight.item() == -0.5
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer or wrap one, but got str"):
        scale.attach("adam")


def test_the_length_surge_is_logged_once_there_are_rows_to_compare() -> None:
    watcher = supervisor()
    state, seen = watcher.start(), []
    for step in range(1, 41):
        length = 10.0 if step <= 20 else 15.0
        state, outcome = watcher.observe(state, step, {"loss": 0.0, "completions/mean_length": length})
        seen.append(outcome.metrics.get(LENGTH_SURGE))
    assert seen[8] is None and seen[9] == 1.0 and seen[-1] == 1.5
