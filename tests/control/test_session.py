"""A control session without a trainer: what is put in force, printed, written, agreed on and remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.control import parse_control, read_actions
from trl_offpolicy.control.session import ControlSession, admitted_by, lacking
from trl_offpolicy.run_folder.writer import append_metrics

GUARD = {"controllers": {"length_guard": {"window": 2}}}
ESCALATION = {"controllers": {"escalation": {"patience": 1, "systems": "warn"}}}
LENGTH = "offpolicy/rollout/response_length_mean"
CHI2 = "offpolicy/mismatch/chi2_token"
HEALTHY = {"loss": 0.1, LENGTH: 4.0, "offpolicy/mismatch/kl_k3": 1e-4, CHI2: 1e-3}


class Lent:
    """What a trainer lends, recorded."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.corrections: list[Any] = []
        self.sent: list[dict[str, Any]] = []
        self.resyncs = 0
        self.main: dict[str, Any] = {}
        """What the main rank has in its row."""

    def session(self, control: Any, **given: Any) -> ControlSession:
        spec = parse_control(control)
        assert spec is not None
        return ControlSession(
            spec, say=self.lines.append, broadcast=self.broadcast, correct=self.corrections.append, resync=self.resync,
            **given,
        )  # fmt: skip

    def broadcast(self, row: dict[str, Any]) -> dict[str, Any]:
        self.sent.append(row)
        return {**row, **self.main}

    def resync(self) -> None:
        self.resyncs += 1


def observe(session: ControlSession, step: int, logs: dict[str, Any], **ranks: Any) -> dict[str, float]:
    return session.observe(step, logs, **{"responses": 8, "world_size": 1, "is_main": True, **ranks})


def lengths(session: ControlSession, values: list[float], **ranks: Any) -> list[float]:
    rows = [observe(session, step, {**HEALTHY, LENGTH: value}, **ranks) for step, value in enumerate(values, 1)]
    return [row["offpolicy/control/learning_rate_scale"] for row in rows]


def test_a_decision_is_in_force_and_listed(tmp_path: Path) -> None:
    lent = Lent()
    session = lent.session(GUARD)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    session.begin(tmp_path / "run", 0, optimizer=optimizer)
    assert lengths(session, [4.0, 4.0, 8.0]) == [1.0, 1.0, 0.5]
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -0.5 and optimizer.param_groups[0]["lr"] == 1.0
    (action,) = read_actions(tmp_path / "run" / "actions.jsonl")
    assert (action.step, action.after) == (3, 0.5) and f"[control] {action.line()}" in lent.lines
    session.end()
    optimizer.step()
    assert weight.item() == -1.5  # nothing is left on the optimizer


def test_only_the_main_rank_prints_and_writes_and_a_dry_run_only_prints(tmp_path: Path) -> None:
    for is_main, records in ((False, True), (True, False)):
        lent = Lent()
        session = lent.session(GUARD)
        session.begin(tmp_path, 0, records=records)
        assert lengths(session, [4.0, 4.0, 8.0], is_main=is_main)[-1] == 0.5
        assert bool(lent.lines) == is_main and not (tmp_path / "actions.jsonl").exists()


@pytest.mark.parametrize(("control", "ranks", "asked"), [(GUARD, 2, 3), (GUARD, 1, 0), ("warn", 2, 0), ("stop", 2, 3)])
def test_ranks_agree_where_something_may_be_done(tmp_path: Path, control: Any, ranks: int, asked: int) -> None:
    lent = Lent()
    session = lent.session(control)
    session.begin(tmp_path, 0)
    for step in (1, 2, 3):
        observe(session, step, HEALTHY, world_size=ranks, is_main=False)
    assert len(lent.sent) == asked


def test_a_rank_decides_by_the_row_of_the_main_one(tmp_path: Path) -> None:
    lent = Lent()
    session = lent.session(GUARD)
    session.begin(tmp_path, 0)
    assert lengths(session, [4.0, 4.0], world_size=2, is_main=False) == [1.0, 1.0]
    lent.main = {LENGTH: 8.0}
    assert observe(session, 3, HEALTHY, world_size=2)["offpolicy/control/learning_rate_scale"] == 0.5


def test_levels_of_an_escalation_are_taken_into_use_and_a_checkpoint_brings_them_back() -> None:
    lent, base = Lent(), op.Correction()
    session = lent.session(ESCALATION, base=base)
    observe(session, 1, {**HEALTHY, CHI2: 1e9})
    observe(session, 2, {**HEALTHY, CHI2: 1e9})
    rejecting, both = lent.corrections
    assert rejecting.keep and not rejecting.weights and both.weights
    again = Lent()
    resumed = again.session(ESCALATION, base=base)
    resumed.load_state_dict(session.state_dict())
    assert again.corrections == [both] and resumed.state == session.state
    resumed.load_state_dict({})  # anew
    assert again.corrections[-1] is base and not resumed.state.rows


def test_a_level_that_the_loss_refuses_does_not_end_the_run() -> None:
    """Level 2 adds a weight on old/sampling, which the ratio of PPO-IS holds already: the objective raises."""
    objective = op.Objective(policy_loss=op.losses.PPOIS(), correction=op.Correction())
    lent = Lent()
    session = lent.session(ESCALATION, base=objective.correction, admits=admitted_by(objective))
    for step in (1, 2):
        observe(session, step, {**HEALTHY, CHI2: 1e9})
    assert session.state.controllers["escalation"].level == 2
    assert [bool(used.weights) for used in lent.corrections] == [False, False]
    for used in lent.corrections:
        replace(objective, correction=used)  # does not raise


def test_a_resync_is_asked_for_and_then_a_stop() -> None:
    lent = Lent()
    session = lent.session({"controllers": {"resync": {"patience": 1}}})
    row = {**HEALTHY, "offpolicy/mismatch/prob_pearson": 0.1}
    observe(session, 1, row)
    assert lent.resyncs == 1 and not session.stop
    observe(session, 2, row)
    assert lent.resyncs == 1 and "still so after the sync at step 1" in session.stop


def test_a_run_that_goes_on_without_a_state_takes_the_rows_of_its_folder(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        append_metrics(tmp_path / "metrics.jsonl", step, HEALTHY)
    session = Lent().session("warn")
    session.begin(tmp_path, 2)
    assert [row["step"] for row in session.state.rows] == [1, 2]
    fresh = Lent().session("warn")
    fresh.begin(tmp_path, 0)
    assert not fresh.state.rows


def test_numbers_of_the_gradient_are_added() -> None:
    session = Lent().session({"gradient_cosine": True})
    weight = torch.nn.Parameter(torch.zeros(2))
    for gradient in ([1.0, 0.0], [0.0, 1.0]):
        weight.grad = torch.tensor(gradient)
        session.compare_gradient([weight])
    added = observe(session, 1, {**HEALTHY, "grad_norm": 2.0, "offpolicy/gradient/power": 11.0})
    assert added["offpolicy/gradient/cosine_previous"] == 0.0
    assert (added["offpolicy/gradient/signal"], added["offpolicy/gradient/noise"]) == (4.0, 1.0)
    assert "offpolicy/gradient/cosine_previous" not in observe(session, 2, HEALTHY)


def test_what_controllers_lack() -> None:
    weighted = op.presets.get("paper/tis").correction
    whole = {"has_sampler": True, "needs_whole_batch": False, "resync_needs": "", "accept_needs": ""}
    assert lacking(None, **whole) == {}
    assert set(lacking(None, **{**whole, "has_sampler": False})) == {"escalation", "ess_step"}
    assert lacking(weighted, **{**whole, "needs_whole_batch": True}) == {"escalation": "a correction of row scope"}
    assert lacking(weighted, **{**whole, "resync_needs": "vLLM"}) == {"resync": "vLLM"}
    for measure, proved, missing in (
        ("full", False, set()), ("core", True, set()), ("core", False, {"resync"}), (("mismatch",), False, set()),
        ("off", True, {"escalation", "ess_step"}), ("off", False, {"escalation", "ess_step", "resync"}),
        (("staleness",), True, {"escalation"}), (("staleness", "total"), False, set()),
    ):  # fmt: skip
        measured = replace(weighted, measure=measure)
        found = lacking(measured, **{**whole, "accept_needs": "" if proved else "a proved sync"})
        assert set(found) - {"accept_update"} == missing, measure


def test_the_judge_of_updates_is_in_the_state_of_a_session_whichever_is_there_first() -> None:
    spec = {"controllers": ["accept_update"]}
    weight = torch.nn.Parameter(torch.zeros(2))
    session = Lent().session(spec)
    gate = session.gate(lambda: {"w": weight}, is_main=True)
    assert gate is not None and gate.accepts(0, 0.99) and not gate.accepts(1, 0.5)
    state = session.state_dict()
    for gate_first in (True, False):
        other = Lent().session(spec)
        found = other.gate(lambda: {"w": weight}, is_main=True) if gate_first else None
        other.load_state_dict(state)
        found = found or other.gate(lambda: {"w": weight}, is_main=True)
        assert found is not None and found.rejected == 1 and found.state_dict() == gate.state_dict()
