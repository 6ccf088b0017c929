"""Updates accepted or rejected after their sync: the rule on numbers, and a sync whose engine rounds its weights."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from trl_offpolicy.control import AcceptUpdate, Action, UpdateGate, parse_control
from trl_offpolicy.control.acceptance import gate_of
from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.engines.sync import WeightSync
from trl_offpolicy.run_folder.run_data import MetricsLog

ROWS = [[0, 1, 2, 3], [3, 2, 1, 0]]


def gate(model: nn.Module, notes: list[Action], **options: Any) -> UpdateGate:
    return UpdateGate(AcceptUpdate(**options), lambda: dict(model.named_parameters()), notes.append)


def set_to(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def judged(gaps: list[float], **options: Any) -> tuple[list[bool], list[float], list[Action]]:
    """Update n has the weight n. Whether each stays, the weights after it, and the notes."""
    model, notes = nn.Linear(1, 1, bias=False), list[Action]()
    one, stays, weights = gate(model, notes, **options), [], []
    for update, gap in enumerate(gaps):
        set_to(model, float(update))
        stays.append(one.accepts(update, math.exp(-gap)))
        if not stays[-1]:
            one.restore()
        weights.append(model.weight.item())
    return stays, weights, notes


def test_an_update_far_above_the_usual_gap_is_taken_back() -> None:
    stays, weights, notes = judged([0.01, 0.012, 0.025, 0.011, 0.0215])
    assert stays == [True, True, False, True, True]  # the usual gap is 0.011, at most twice that
    assert weights == [0, 1, 1, 3, 4]
    assert [(a.step, a.what, a.before, a.after) for a in notes] == [(2, "update", 1, 0)]
    assert notes[0].why == "the gap to the engine is 0.025 nats, above 0.022"


def test_the_median_is_of_the_last_accepted_ones_and_small_gaps_are_never_rejected() -> None:
    assert judged([0.01, 0.1], history=1)[0] == [True, False]
    grown = judged([0.01, 0.019, 0.035, 0.06], history=1)[0]
    assert grown == [True] * 4  # each is below twice the one before
    assert judged([1e-6, 5e-4, 9e-4])[0] == [True] * 3  # below `least`
    assert judged([1e-6, 2e-3])[0] == [True, False]


def test_after_three_rejections_in_a_row_the_run_goes_on() -> None:
    stays, weights, _ = judged([0.01, 0.1, 0.1, 0.1, 0.1, 0.01])
    assert stays == [True, False, False, False, True, True]
    assert weights == [0, 0, 0, 0, 4, 5]
    assert judged([0.01, 0.1, 0.1], patience=1)[0] == [True, False, True]


def test_the_first_update_after_a_resume_stays_but_a_large_gap_is_no_usual_one() -> None:
    model, notes = nn.Linear(1, 1, bias=False), list[Action]()
    whole = gate(model, notes)
    assert all(whole.accepts(update, math.exp(-0.002)) for update in range(3))
    resumed = gate(model, notes)
    resumed.load_state_dict(whole.state_dict())
    assert not whole.accepts(3, math.exp(-0.5)) and resumed.accepts(3, math.exp(-0.5))
    assert not resumed.accepts(4, math.exp(-0.1))  # its bound is still that of gaps of 0.002
    assert resumed.accepts(5, math.exp(-0.003)) and resumed.state_dict()["gaps"] == pytest.approx([0.002] * 3 + [0.003])


def test_rejections_are_counted_and_named() -> None:
    model, notes = nn.Linear(1, 1, bias=False), list[Action]()
    one = gate(model, notes)
    for update, gap in enumerate([0.01, 0.1, 0.1, 0.01, 0.1]):
        one.accepts(update, math.exp(-gap))
    assert one.rejected == len(notes) == 3 and {note.controller for note in notes} == {"accept_update"}


def test_a_gap_at_the_bound_stays() -> None:
    """The bound is then ``least``, the very number that the gate makes of the agreement."""
    one = gate(nn.Linear(1, 1, bias=False), [], least=-math.log(0.25))
    assert one.accepts(0, math.exp(-0.01)) and one.accepts(1, 0.25) and not one.accepts(2, 0.01)


def test_the_gate_of_a_run_is_that_of_its_rule() -> None:
    model, notes = nn.Linear(1, 1, bias=False), list[Action]()

    def parameters() -> dict[str, nn.Parameter]:
        return dict(model.named_parameters())

    assert gate_of((), parameters, notes.append) is None and gate_of((object(),), parameters, notes.append) is None
    one = gate_of((object(), AcceptUpdate(growth=5.0)), parameters, notes.append)
    assert one is not None
    set_to(model, 1.0)
    assert one.accepts(0, math.exp(-0.01)) and one.accepts(1, math.exp(-0.04))  # below five times the usual gap
    set_to(model, 2.0)
    assert not one.accepts(2, math.exp(-0.2)) and len(notes) == 1
    one.restore()
    assert model.weight.item() == 1.0


class Rounding:
    """An engine that holds the weights in steps of ``width``, and says how likely it finds each next token."""

    def __init__(self, model: nn.Linear) -> None:
        self.model, self.weight, self.width, self.sent = model, torch.zeros(4, 4), 1e-3, list[int]()

    def send(self, version: int) -> SyncReport:
        self.weight = (self.model.weight.detach() / self.width).round() * self.width
        self.sent.append(version)
        return SyncReport(version=version, kind="memory", bytes=64, seconds=0.0)

    def answer(self, ids: Any) -> list[list[float]]:
        return scores(self.weight, ids)


def scores(weight: torch.Tensor, ids: Any) -> list[list[float]]:
    table = weight.log_softmax(-1)
    return [[table[a, b].item() for a, b in pairwise(row)] for row in ids]


def test_a_sync_that_is_rejected_sends_the_accepted_weights_again_and_proves_them() -> None:
    torch.manual_seed(0)
    model, notes = nn.Linear(4, 4, bias=False), list[Action]()
    engine = Rounding(model)
    sync = WeightSync(ROWS, lambda ids: scores(model.weight.detach(), ids))
    sync.gate = gate(model, notes, least=1e-6)
    held, widths = [], [1e-3, 1e-3, 1.6e-2, 1e-3]
    for version, width in enumerate(widths):
        if version:
            with torch.no_grad():
                model.weight += 0.2 * torch.randn(4, 4)  # the proof admits a fifth of how far the trainer moved
        engine.width = width
        candidate = model.weight.detach().clone()
        report = sync(version, send=engine.send, answer=engine.answer)
        held.append(torch.equal(model.weight, candidate))
        torch.testing.assert_close(engine.weight, model.weight.detach(), atol=width, rtol=0)
        wanted = [abs(a - b) for x, y in zip(engine.answer(ROWS), scores(model.weight.detach(), ROWS), strict=True)
                  for a, b in zip(x, y, strict=True)]  # fmt: skip
        assert report.agreement == pytest.approx(math.exp(-sum(wanted) / len(wanted)), rel=1e-6)
    assert held == [True, True, False, True]
    assert engine.sent == [0, 1, 2, 2, 3] and [action.step for action in notes] == [2]


def test_without_a_gate_or_a_proof_every_update_stays() -> None:
    model = nn.Linear(4, 4, bias=False)
    engine, sync = Rounding(model), WeightSync()
    sync.gate = gate(model, [])
    for version in range(3):
        assert sync(version, send=engine.send, answer=engine.answer).agreement is None
    assert engine.sent == [0, 1, 2] and not sync.proves


def test_it_runs_only_if_it_is_named() -> None:
    spec = parse_control({"controllers": {"accept_update": {"growth": 3}}})
    assert spec is not None and spec.controllers == (AcceptUpdate(growth=3),)
    every = parse_control("act")
    assert every is not None and "accept_update" not in [item.name for item in every.controllers]
    rule = AcceptUpdate()
    assert rule.step(rule.start(), MetricsLog(()), 1) == (rule.start(), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth": 1.0}, r"growth must be above 1 \(the usual gap\), but got 1.0"),
        ({"growth": -1.0}, "growth must be positive and finite, but got -1.0"),
        ({"history": 0}, "history must be a whole number of at least 1, but got 0"),
        ({"least": 0}, "least must be positive and finite, but got 0"),
        ({"patience": 0}, "patience must be a whole number of at least 1, but got 0"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptUpdate(**options)


def test_a_resumed_run_judges_by_what_was_accepted_before() -> None:
    model = nn.Linear(1, 1, bias=False)
    first, resumed = gate(model, []), gate(model, [])
    for update, gap in enumerate([0.01, 0.012, 0.1]):
        first.accepts(update, math.exp(-gap))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.accepts(2, math.exp(-0.011))  # the first sync brings the weights of the checkpoint
    assert not resumed.accepts(3, math.exp(-0.05)) and resumed.rejected == 2
