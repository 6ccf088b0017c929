"""Controllers on logs that are made up: what they do, when they take it back, and that they can be checkpointed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

import trl_offpolicy as op
from trl_offpolicy.control import (
    Action,
    Escalation,
    ESSStep,
    LengthGuard,
    Resync,
    StalenessCeiling,
    append_actions,
    read_actions,
)
from trl_offpolicy.control.session import admitted_by
from trl_offpolicy.control.spec import parse_control
from trl_offpolicy.control.supervisor import Supervisor
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


def test_a_step_of_masked_responses_is_no_level_length() -> None:
    state, actions = play(GUARD, lengths(10, 10, 10, 10, 13, 0, 0, 0))
    assert state.scale == 0.5 and len(actions) == 1


# -------------------------------------------------------------------------------------------------- staleness ceiling


def lags(*values: float | None) -> list[dict[str, float]]:
    key = "offpolicy/rollout/version_lag_max"
    return [{"step": step, **({} if lag is None else {key: lag})} for step, lag in enumerate(values, 1)]


def products(controller: StalenessCeiling, values: list[float]) -> list[float]:
    """Learning rate times lag, step by step: by brute force over the actions."""
    changes = {action.step: action.after for action in play(controller, lags(*values))[1]}
    scale, found = 1.0, []
    for step, lag in enumerate(values, 1):
        scale = changes.get(step, scale)
        found.append(scale * lag)
    return found


def test_the_learning_rate_times_the_lag_stays_within_that_of_the_lag_it_was_tuned_for() -> None:
    values = [0.0, 1.0, 2.0, 3.0, 8.0, 16.0, 4.0, 2.0]
    assert products(StalenessCeiling(lag=2, window=1), values) == pytest.approx([0, 1, 2, 2, 2, 2, 2, 2])
    assert max(products(StalenessCeiling(lag=4, window=3), values)) == pytest.approx(4.0)
    actions = play(StalenessCeiling(lag=2, window=1), lags(*values))[1]
    assert [(a.step, a.after) for a in actions] == [(4, 2 / 3), (5, 1 / 4), (6, 1 / 8), (7, 1 / 2), (8, 1.0)]
    assert actions[1].why == "the largest lag is 8 optimizer steps (the learning rate was tuned for 2)"


def test_the_largest_lag_of_the_window_counts_and_a_row_without_one_changes_nothing() -> None:
    controller = StalenessCeiling(lag=1, window=3)
    actions = play(controller, lags(4, 1, 1, 1, None, 8))[1]
    assert [(a.step, a.after) for a in actions] == [(1, 1 / 4), (4, 1.0), (6, 1 / 8)]
    assert play(controller, lags(None, None))[1] == []


def test_the_ceiling_has_a_floor_and_small_changes_are_not_made() -> None:
    assert play(StalenessCeiling(window=1, smallest=0.25), lags(100))[0].scale == 0.25
    assert play(StalenessCeiling(lag=20, window=1), lags(21))[1] == []  # 0.952, less than 5 % below 1
    state, actions = play(StalenessCeiling(window=1), lags(4, 2), through_json=True)
    assert state.scale == 0.5 and len(actions) == 2
    assert play(StalenessCeiling(lag=2.9, window=3), lags(3, 6, 3, 1, 1, 1))[0].scale == 1.0  # .967 is not the end


def test_a_long_window_reads_lags_that_only_older_rows_hold() -> None:
    """The supervisor keeps a few numbers of older rows: the lag is one of them."""
    spec = parse_control({"policy": "act", "controllers": {"staleness_ceiling": {"lag": 1, "window": 50}}})
    assert spec is not None
    supervisor, scales = Supervisor(spec), []
    state = supervisor.start()
    for row in lags(8, *[1.0] * 55):
        state = supervisor.observe(state, int(row["step"]), row)[0]
        scales.append(state.controllers["staleness_ceiling"].scale)
    assert scales[49] == 1 / 8 and scales[50] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lag": 0}, "lag must be .*positive.*, but got 0"),
        ({"window": 0}, "window must be a whole number of at least 1, but got 0"),
        ({"smallest": 2}, "smallest must be at most 1, but got 2"),
    ],
)
def test_a_ceiling_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StalenessCeiling(**options)


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


TOTAL = "offpolicy/total/ess_sequence"


def drift(*variances: float, group: str = "staleness", **other: float) -> list[dict[str, float]]:
    """Rows with the variance of the log products per token: the ESS of 16 tokens is exp(-16 D)."""
    shared = {f"offpolicy/{key.replace('__', '/')}": value for key, value in other.items()}
    key = f"offpolicy/{group}/product_variance"
    return [{"step": step, key: value, **shared} for step, value in enumerate(variances, 1)]


def of_ess(*shares: float) -> list[float]:
    """The variances that give these ESS."""
    return [-math.log(share) / 16 for share in shares]


def scales(rows: list[dict[str, float]], **options: Any) -> list[float]:
    return [round(action.after, 4) for action in play(ESSStep(**options), rows)[1]]


def test_the_learning_rate_falls_while_the_ess_is_below_the_base_and_no_further_than_the_floor() -> None:
    """From the third row on, by sqrt(ESS / 0.5) a row."""
    assert scales(drift(*of_ess(0.51, 0.51, 0.51, 0.51))) == []
    assert scales(drift(*of_ess(0.32, 0.32))) == []  # two rows say nothing
    assert scales(drift(*of_ess(0.32, 0.32, 0.32, 0.32))) == [0.8, 0.64]
    assert scales(drift(*of_ess(0.32, 0.32, 0.32)), rule="linear") == [0.64]
    assert scales(drift(*of_ess(*[1e-6] * 9))) == [0.5, 0.25, 0.125, 0.0625]
    assert scales(drift(*of_ess(0.9, 0.9, 1e-6, 0.9, 0.9, 0.9))) == []  # one odd row is not the median


def test_it_comes_back_step_by_step_and_to_exactly_one() -> None:
    rows = drift(*of_ess(*[0.08] * 3, *[0.9] * 60))
    state, actions = play(ESSStep(calm=4, back=1.5), rows)
    assert state.scale == 1.0 and actions[-1].after == 1.0
    lowered = [action for action in actions if action.after < action.before]
    raised = [action for action in actions if action.after > action.before]
    assert len(lowered) == 3 and len(raised) == 6
    gaps = [after.step - before.step for before, after in pairwise(raised)]
    assert gaps == [4] * 5


def test_only_drift_by_training_counts() -> None:
    """A learning rate changes current/old. What the engine differs by is there at any learning rate."""
    bad = of_ess(*[0.08] * 3)
    assert scales(drift(*bad)) == [0.5]
    assert scales(drift(*bad, group="mismatch")) == []
    assert scales(drift(*bad, group="total")) == [0.5]  # with lag and without old log-probs
    same = [
        {**one, **other} for one, other in zip(drift(*bad, group="total"), drift(*bad, group="mismatch"), strict=True)
    ]
    assert scales(same) == []  # all of it is mismatch
    (excess,) = of_ess(0.32)
    assert scales(drift(*[0.1 + excess] * 3, group="total", mismatch__product_variance=0.1)) == [0.8]
    assert scales(drift(*bad, group="total", staleness__product_variance=0.001)) == []
    assert play(ESSStep(), [*drift(*bad), {"step": 4}])[1][-1].step == 3  # not logged: as it was


def test_a_step_without_fresh_responses_has_the_usual_mismatch() -> None:
    """Sampled ahead, only every third step holds a response of the current weights. Training moved nothing."""
    rows = drift(*[0.1] * 30, group="total")
    for row in rows[::3]:
        row["offpolicy/mismatch/product_variance"] = 0.1
    assert scales(rows) == []


def test_a_log_without_the_variance_gives_it_from_the_products() -> None:
    """ESS^(1 / length) is the ESS of a token."""
    share = 0.32 ** (100 / 16)
    rows = [{"step": step, "offpolicy/staleness/ess_sequence": share, LENGTH: 100.0} for step in (1, 2, 3)]
    assert scales(rows) == [0.8]
    assert scales([{key: value for key, value in row.items() if key != LENGTH} for row in rows]) == []


def test_vcpo_follows_a_named_metric_up_and_down() -> None:
    """sqrt(min(1, ESS / base)), of the newest row."""
    rows = [{"step": step, TOTAL: value} for step, value in enumerate((0.25, 0.26, 1.0, 1.0), 1)]
    state, actions = play(ESSStep(metric=TOTAL, base=1.0), rows)
    assert state.scale == 1.0 and [(a.step, a.after) for a in actions] == [(1, 0.5), (3, 1.0)]  # 0.26: too little
    assert scales(rows[:1], metric=TOTAL, base=0.5) == [0.7071]
    assert scales(rows[:1], metric=TOTAL, base=1.0, rule="linear") == [0.25]
    assert scales([{"step": 1, TOTAL: 0.0}], metric=TOTAL) == [0.0625]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"back": 1.0}, r"back must be at least 1 \+ resolution \(1.05\), but got 1.0"),
        ({"back": 1.04}, "never be raised"),
        ({"resolution": 0.5}, "never be lowered"),
        ({"calm": 0}, "calm must be a whole number of at least 1, but got 0"),
        ({"base": 1.5}, "base must be at most 1, but got 1.5"),
    ],
)
def test_a_step_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ESSStep(**options)


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
    assert levels(*[mismatch(0.4, kept__ess_sequence=0.02)] * 8) == [1]  # of long responses, which are always low
    for variance, reached in ((0.074, [1]), (0.077, [1, 2, 3])):  # an ESS of 0.306 and 0.292: the limit is 0.3
        assert levels(*[mismatch(0.4)] * 2, *[mismatch(0.4, kept__product_variance=variance)] * 4) == reached


def test_a_low_ess_of_sequences_asks_for_rejection_and_stays_until_the_drift_is_halved() -> None:
    """Limit 0.5: a variance of 0.0433 a token. Going down at a power of one half: 0.0217."""

    def row(variance: float) -> dict[str, float]:
        return mismatch(0.1, mismatch__product_variance=variance)

    assert levels(*[row(0.042)] * 6) == [] and levels(*[row(0.045)] * 6) == [1]
    assert levels(*[row(0.045)] * 2, *[row(0.023)] * 9) == [1]
    assert levels(*[row(0.045)] * 2, *[row(0.020)] * 9) == [1, 0]
    action = play(LADDER, at_steps(*[row(0.1)] * 2))[1][0]
    assert "ESS of 16 tokens 0.20 below 0.5 in 2 readings" in action.why
    only_total = {"offpolicy/total/chi2_token": 0.1, "offpolicy/total/product_variance": 0.1}
    assert levels(*[only_total] * 6) == [1]


def test_a_low_pearson_goes_all_the_way() -> None:
    state, actions = play(LADDER, at_steps(*[mismatch(0.1, pearson=0.9)] * 6))
    assert state.level == 3 and "Pearson 0.900 below 0.95" in actions[-1].why


def test_a_run_that_is_resumed_at_the_top_unmended_is_stopped_again() -> None:
    bad = mismatch(0.1, pearson=0.9)
    actions = play(LADDER, at_steps(*[bad] * 8))[1]
    assert [(action.step, action.what) for action in actions[2:]] == [(6, "correction_level"), (8, "stop")]
    assert "still Pearson 0.900 below 0.95 in 2 readings" in actions[-1].why
    quiet = Escalation(patience=2, calm=3, systems="warn")
    assert levels(*[bad] * 20, ladder=quiet) == [1, 2, 3]


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


def test_a_level_that_the_loss_refuses_is_the_one_below_it() -> None:
    """PPO-IS holds current/sampling: a weight on old/sampling would count that factor twice, and raises."""
    own_ratio = op.Objective(policy_loss=op.losses.PPOIS(), correction=op.Correction())
    base, rejecting, both = LADDER.ladder(op.Correction(), admitted_by(own_ratio))
    assert rejecting.keep and both is rejecting
    clipped = op.Objective(policy_loss=op.losses.PPOClip(), correction=op.Correction())
    assert LADDER.ladder(op.Correction(), admitted_by(clipped)) == LADDER.ladder(op.Correction())
    assert LADDER.ladder(base, lambda correction: False) == (base, base, base)


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


def test_responses_from_before_the_sync_do_not_stop_the_run() -> None:
    """A generation of four optimizer steps, then the one that was sampled after the sync."""

    def passes(row: dict[str, float]) -> list[dict[str, float]]:
        return [{**row, "offpolicy/rollout/version_lag_max": float(lag)} for lag in range(4)]

    assert kinds(*passes(BAD), *passes(GOOD)) == [(2, "resync")]
    assert kinds(*passes(BAD), *passes(BAD))[:2] == [(2, "resync"), (6, "stop")]


def test_responses_that_are_always_old_are_waited_for_a_while_only() -> None:
    """As with replay, whose responses may be of any age."""
    old = {**BAD, "offpolicy/rollout/version_lag_max": 50.0}
    assert kinds(*[old] * 12)[:2] == [(2, "resync"), (7, "stop")]  # `forget` readings later
    near, far = ({"offpolicy/rollout/sync_agreement": value} for value in (0.9, 0.5))
    assert kinds(near, *[{**far, **old}] * 5)[:2] == [(3, "resync"), (5, "stop")]  # a proof is of no response


def test_a_step_without_the_mismatch_is_no_reading_of_drift() -> None:
    drift = {"offpolicy/total/prob_pearson": 0.5, "offpolicy/total/chi2_token": 9.0}
    assert kinds(*[GOOD, drift, drift] * 5) == []
    assert levels(*[mismatch(0.1), drift, drift] * 5) == []


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
        (ESSStep(calm=2), drift(*of_ess(*[0.25] * 4, *[1.0] * 9))),
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
