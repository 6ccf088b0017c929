"""Controllers on logs that are made up: what they do, when they take it back, and that they can be checkpointed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

import trl_offpolicy as op
from trl_offpolicy.control import Action, Escalation, ESSStep, LengthGuard, Resync, append_actions, read_actions
from trl_offpolicy.run_folder.run_data import MetricsLog

LENGTH = "offpolicy/rollout/response_length_mean"


def play(controller: Any, rows: list[dict[str, float]], *, through_json: bool = False) -> tuple[Any, list[Action]]:
    """The last state and all actions; the state goes through JSON at every step where asked."""
    state, actions = controller.start(), []
    for place in range(len(rows)):
        log = MetricsLog(tuple(rows[: place + 1]))
        state, action = controller.step(state, log, int(rows[place]["step"]))
        actions += [] if action is None else [action]
        if through_json:
            state = type(state)(**json.loads(json.dumps(asdict(state))))
    return state, actions


def lengths(*values: float, key: str = LENGTH) -> list[dict[str, float]]:
    return [{"step": step, key: value} for step, value in enumerate(values, 1)]


# ------------------------------------------------------------------------------------------------------- length guard

GUARD = LengthGuard(window=3)


@pytest.mark.parametrize("key", [LENGTH, "completions/mean_length"])
def test_a_surge_halves_and_a_level_length_takes_it_back(key: str) -> None:
    state, actions = play(GUARD, lengths(10, 10, 10, 10, 12.5, *[12.5] * 6, key=key))
    assert [(a.step, a.before, a.after) for a in actions] == [(5, 1.0, 0.5), (8, 0.5, 1.0)]
    assert state.scale == 1.0 and "x 1.25" in actions[0].why and "level" in actions[1].why


def test_two_surges_are_two_halvings_and_come_back_one_by_one() -> None:
    rows = lengths(10, 10, 10, 10, 13, 13, 13, 17, *[17] * 8)
    scales = [action.after for action in play(GUARD, rows)[1]]
    assert scales == [0.5, 0.25, 0.5, 1.0]


def test_nothing_before_the_window_nor_at_the_limit_nor_when_it_shrinks() -> None:
    assert play(GUARD, lengths(10, 20, 30))[1] == []  # three steps ago nothing was logged
    assert play(GUARD, lengths(10, 10, 10, 12))[1] == []  # 1.2 is not above 1.2
    assert play(GUARD, lengths(20, 20, 20, 10, 10))[1] == []


def test_the_scale_has_a_floor() -> None:
    growing = lengths(*[1.5**step for step in range(30)])
    state, actions = play(LengthGuard(window=1, smallest=0.25), growing)
    assert state.scale == 0.25 and len(actions) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.5}, "factor must be a fraction in \\(0, 1\\), but got 1.5"),
        ({"level": 1.3}, r"level must be below surge \(1.2\), but got 1.3"),
        ({"window": 0}, "window must be a whole number of at least 1, but got 0"),
        ({"smallest": 0.9}, r"smallest must be at most factor \(0.5\)"),
        ({"surge": float("nan")}, "surge must be a finite number"),
    ],
)
def test_a_guard_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthGuard(**options)


# ----------------------------------------------------------------------------------------------------------- ESS step


def ess(*values: float) -> list[dict[str, float]]:
    return [{"step": step, "offpolicy/total/ess_sequence": value} for step, value in enumerate(values, 1)]


def test_the_step_follows_the_root_of_the_ess() -> None:
    """VCPO: sqrt(min(1, ESS / base))."""
    assert play(ESSStep(), ess(0.25))[0].scale == pytest.approx(0.5)
    assert play(ESSStep(rule="linear"), ess(0.25))[0].scale == pytest.approx(0.25)
    assert play(ESSStep(base=0.5), ess(0.25))[0].scale == pytest.approx(0.5**0.5)
    state, actions = play(ESSStep(), ess(0.25, 0.26, 1.0, 1.0))
    assert state.scale == 1.0 and [(a.step, a.after) for a in actions] == [(1, 0.5), (3, 1.0)]  # 0.26: too little
    assert play(ESSStep(), ess(0.0))[0].scale == 1 / 16
    assert play(ESSStep(), [*ess(0.25), {"step": 2}])[1][-1].step == 1  # not logged: as it was


def test_the_ess_is_of_products_whatever_the_weights_are() -> None:
    """current/sampling first, else old/sampling; the mean weight of a response only by name."""
    mismatch, applied = "offpolicy/mismatch/ess_sequence", "offpolicy/weight/ess_sequence"
    (row,) = ess(0.25)
    assert play(ESSStep(), [{**row, mismatch: 0.81, applied: 1.0}])[0].scale == pytest.approx(0.5)
    assert play(ESSStep(), [{"step": 1, mismatch: 0.81, applied: 1.0}])[0].scale == pytest.approx(0.9)
    assert play(ESSStep(), [{"step": 1, applied: 0.25}])[1] == []
    assert play(ESSStep(metric=applied), [{"step": 1, applied: 0.25}])[0].scale == pytest.approx(0.5)


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match=r"rule must be one of \['sqrt', 'linear'\], but got 'cube'"):
        ESSStep(rule="cube")


# --------------------------------------------------------------------------------------------------------- escalation

LADDER = Escalation(patience=2, calm=3)


def mismatch(chi2: float, *, pearson: float = 0.99, **other: float) -> dict[str, float]:
    row = {"offpolicy/mismatch/chi2_token": chi2, "offpolicy/mismatch/prob_pearson": pearson}
    return row | {f"offpolicy/{key.replace('__', '/')}": value for key, value in other.items()}


def at_steps(*rows: dict[str, float]) -> list[dict[str, float]]:
    return [{"step": step, **row} for step, row in enumerate(rows, 1)]


def levels(*rows: dict[str, float], ladder: Escalation = LADDER) -> list[int]:
    """Each reading is seen ``patience`` times or as often as it is given."""
    return [int(action.after) for action in play(ladder, at_steps(*rows))[1]]


def test_chi_square_asks_for_rejection_then_for_weights_then_for_a_fix() -> None:
    assert levels(mismatch(0.2), mismatch(0.2)) == []
    assert levels(*[mismatch(0.4)] * 6) == [1]  # RS alone works below 2
    assert levels(*[mismatch(3.0)] * 6) == [1, 2]
    assert levels(*[mismatch(5.0)] * 6) == [1, 2, 3]


def test_one_reading_alone_changes_nothing() -> None:
    assert levels(mismatch(0.4), mismatch(0.1), mismatch(0.4), mismatch(0.1)) == []


def test_what_rejection_drops_counts_under_rejection_only() -> None:
    much, most = {"keep__dropped_sequence_fraction": 0.15}, {"keep__dropped_sequence_fraction": 0.3}
    assert levels(*[mismatch(0.1, **most)] * 6) == []
    assert levels(*[mismatch(0.4)] * 2, *[mismatch(0.4, **much)] * 6) == [1, 2]
    assert levels(*[mismatch(0.4)] * 2, *[mismatch(0.4, **most)] * 4) == [1, 2, 3]
    for low in ({"weight_applied__ess_sequence": 0.2}, {"weight_applied__ess_token": 0.2}):
        assert levels(*[mismatch(0.4)] * 2, *[mismatch(0.4, **low)] * 4) == [1, 2, 3]
    assert levels(*[mismatch(0.4, kept__ess_sequence=0.02)] * 8) == [1]  # products over long responses always are


def test_a_low_pearson_goes_all_the_way() -> None:
    state, actions = play(LADDER, at_steps(*[mismatch(0.1, pearson=0.9)] * 6))
    assert state.level == 3 and "Pearson 0.900 below 0.95" in actions[-1].why


def test_it_comes_down_after_a_calm_stretch_and_not_at_the_threshold() -> None:
    """Hysteresis: below 0.3, but not below half of it."""
    up = [mismatch(0.4)] * 2
    assert levels(*up, *[mismatch(0.2)] * 9) == [1]
    assert levels(*up, *[mismatch(0.1)] * 2, mismatch(0.2), *[mismatch(0.1)] * 2) == [1]
    assert levels(*up, *[mismatch(0.1)] * 3) == [1, 0]
    assert levels(*[mismatch(3.0)] * 4, *[mismatch(0.1)] * 6) == [1, 2, 1, 0]


def test_rows_that_say_nothing_change_nothing() -> None:
    assert levels(mismatch(0.4), {}, mismatch(0.4)) == [1]
    assert play(LADDER, at_steps(mismatch(float("nan"))))[0] == LADDER.start()


def test_the_ladder_adds_to_the_configured_correction() -> None:
    base, rejecting, both = LADDER.ladder(op.Correction())
    assert base == op.Correction()
    assert rejecting.keep == (op.RatioBand(level="sequence_mean", low=0.99, high=1.01),) and not rejecting.weights
    assert both.keep == rejecting.keep and both.weights == (op.TruncateWeight(max_weight=2.0),)
    tis = op.Correction(weight=op.TruncateWeight(max_weight=3.0))
    assert LADDER.ladder(tis)[2].weights == tis.weights  # one weight on old/sampling, not two
    masked = op.Correction(keep=(op.RatioBand(level="sequence_mean", low=0.9, high=1.1),))
    assert LADDER.ladder(masked)[1] is masked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chi2": [1, 2]}, "chi2 must be 3 ascending positive numbers"),
        ({"dropped": (0.5, 0.1)}, "dropped must be 2 ascending"),
        ({"relax": 1.0}, r"relax must be a fraction in \(0, 1\), but got 1.0"),
        ({"systems": "panic"}, r"systems must be one of \['stop', 'warn'\]"),
        ({"low": 2.0}, "low"),
    ],
)
def test_an_escalation_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Escalation(**options)


# ------------------------------------------------------------------------------------------------------------- resync

AGAIN = Resync(patience=2, forget=3)


def kinds(*rows: dict[str, float]) -> list[tuple[int, str]]:
    return [(action.step, action.what) for action in play(AGAIN, at_steps(*rows))[1]]


BAD, GOOD = mismatch(0.1, pearson=0.9), mismatch(0.1)


def test_it_syncs_once_and_then_stops() -> None:
    assert kinds(BAD) == []
    assert kinds(GOOD, BAD, BAD, GOOD) == [(3, "resync")]
    assert kinds(BAD, BAD, BAD, BAD) == [(2, "resync"), (4, "stop")]


def test_after_a_good_stretch_there_is_another_try() -> None:
    assert kinds(BAD, BAD, GOOD, GOOD, BAD, BAD) == [(2, "resync"), (6, "stop")]
    assert kinds(BAD, BAD, GOOD, GOOD, GOOD, BAD, BAD) == [(2, "resync"), (7, "resync")]


def test_the_probe_is_compared_with_the_first_sync() -> None:
    def agreement(value: float) -> dict[str, float]:
        return {"offpolicy/rollout/sync_agreement": value}

    assert kinds(agreement(0.9), agreement(0.86), agreement(0.86)) == []  # the run's own level, less than 5 % down
    assert kinds(agreement(0.9), agreement(0.8), agreement(0.8)) == [(3, "resync")]


# -------------------------------------------------------------------------------------------------- states and actions


@pytest.mark.parametrize(
    ("controller", "rows"),
    [
        (GUARD, lengths(10, 10, 10, 10, 13, 13, 13, 17, *[17] * 8)),
        (ESSStep(), ess(0.25, 0.3, 1.0)),
        (LADDER, at_steps(*[mismatch(3.0)] * 4, *[mismatch(0.1)] * 6)),
        (AGAIN, at_steps(BAD, BAD, GOOD, GOOD, BAD, BAD)),
    ],
    ids=lambda value: getattr(value, "name", "rows"),
)
def test_states_survive_json_at_every_step(controller: Any, rows: list[dict[str, float]]) -> None:
    assert play(controller, rows, through_json=True) == play(controller, rows)
    assert play(controller, rows)[1]


def test_actions_are_reversible_and_listed(tmp_path: Any) -> None:
    action = Action(7, "length_guard", "learning_rate_scale", 1.0, 0.5, "because")
    back = action.reverse(9)
    assert (back.before, back.after, back.step) == (0.5, 1.0, 9) and back.reverse(7, "because") == action
    with pytest.raises(ValueError, match="what must be a setting, but got 'resync'"):
        Action(1, "resync", "resync", 0, 1, "").reverse(2)
    append_actions(tmp_path / "actions.jsonl", (action,))
    append_actions(tmp_path / "actions.jsonl", (back,))
    with (tmp_path / "actions.jsonl").open("a") as file:
        file.write('{"step": 10, "contr')  # killed here
    assert read_actions(tmp_path / "actions.jsonl") == (action, back)
    assert action.line() == "step 7: length_guard: learning_rate_scale 1 -> 0.5: because"
    assert read_actions(tmp_path / "nothing") == ()
