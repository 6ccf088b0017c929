"""The choice of a correction: the rule on numbers, the estimates against exact sums, one session for every trainer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_offpolicy as op

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.certificates.mdp import process, space
from trl_offpolicy.control import read_actions
from trl_offpolicy.control.auto import (
    AutoRule,
    AutoSession,
    AutoState,
    Estimate,
    candidates_of,
    on_cpu,
    starting_preset,
)
from trl_offpolicy.correction.comparing import compare, packed, unpacked
from trl_offpolicy.presets import from_mapping
from trl_offpolicy.presets.auto import AutoOptions
from trl_offpolicy.presets.parsing import plain_method
from trl_offpolicy.presets.preset import auto_preset

MASK = space(3, 4).mask
RULE = AutoRule(AutoOptions(ess_floor=0.5, tolerance=0.05, token_tolerance=0.005, margin=0.2, patience=3))


def estimate(missed: float, ess: float, token: float = 0.0, **other: float) -> Estimate:
    values = {"cut_mass": 0.0, "second_moment": 1.0, **other}
    return Estimate(name="any", missed=missed, ess=ess, missed_token=token, **values)


NONE, RAW, CAPPED, TOKEN = estimate(0.4, 1.0, 0.1), estimate(0.0, 0.3), estimate(0.2, 0.6), estimate(0.39, 0.9)


# ---------------------------------------------------------------------------------------------------------- the rule


def test_the_least_biased_that_holds_the_floor():
    assert RULE.best([NONE, RAW, CAPPED, TOKEN]) == 2
    assert RULE.best([NONE, replace(RAW, ess=0.5), CAPPED, TOKEN]) == 1
    assert RULE.best([NONE, replace(RAW, ess=0.5, ess_error=0.01), CAPPED, TOKEN]) == 2  # not sure enough
    assert RULE.best([NONE, RAW, replace(CAPPED, ess=0.4), TOKEN]) == 3  # equal in missed mass, better by token


def test_without_bias_to_speak_of_the_least_variance():
    close = [estimate(0.04, 1.0, 0.01), estimate(0.0, 0.8), estimate(0.01, 0.9)]
    assert RULE.best(close) == 0
    assert RULE.best([replace(close[0], missed=0.06), *close[1:]]) == 2
    assert RULE.best([close[1], close[1]]) == 0  # equal: the earlier one


def test_a_limit_of_the_second_moment():
    rule = AutoRule(replace(RULE.options, max_second_moment=1.5))
    assert rule.best([NONE, RAW, replace(CAPPED, second_moment=1.6), TOKEN]) == 3


def test_if_none_holds_the_largest_effective_sample_size():
    assert RULE.best([RAW, replace(RAW, ess=0.4)]) == 1


def test_the_first_generation_decides_at_once():
    state, why = RULE.step(AutoState(), [NONE, RAW, CAPPED, TOKEN])
    assert state == AutoState(2, 0, (0, 0, 0, 0)) and "first generation" in why


def test_a_change_takes_patience_and_a_margin():
    calm, drifted = [estimate(0.1, 1.0), CAPPED], [estimate(0.3, 1.0), CAPPED]
    state, _ = RULE.step(AutoState(), calm)
    assert state.choice == 0
    seen = []
    for found in (drifted, drifted, calm, drifted, drifted, drifted, drifted):
        state, why = RULE.step(state, found)
        seen.append((state.choice, bool(why)))
    assert seen == [(0, False)] * 5 + [(1, True), (1, False)]
    assert (state.revisions, state.better) == (1, (0, 0))
    within_margin = [estimate(0.24, 1.0), CAPPED]
    state = AutoState(0, 0, (0, 0))
    for _ in range(10):
        state, why = RULE.step(state, within_margin)
        assert state.choice == 0 and not why


def test_of_those_that_have_lasted_the_best_takes_over():
    """Which of two is the best may change from one generation to the next; that must not delay the change for ever."""
    state = AutoState(0, 0, (0, 0, 0))
    for number in range(3):
        two = [estimate(0.1, 0.9), estimate(0.2, 0.9)]
        state, _ = RULE.step(state, [estimate(0.5, 1.0), *(two if number % 2 else reversed(two))])
    assert state.choice == 2


def test_one_in_use_that_no_longer_holds_is_left():
    state = AutoState(0, 0, (0, 0))
    broken = [estimate(0.0, 0.4), estimate(0.4, 1.0)]
    for _ in range(2):
        state, _ = RULE.step(state, broken)
        assert state.choice == 0
    assert RULE.step(state, broken)[0].choice == 1
    assert RULE.step(AutoState(0, 0, (0, 0)), [replace(broken[0], ess=0.24), broken[1]])[0].choice == 1  # at once
    # less variance at the same bias is worth a change too, if it is much less
    free = [estimate(0.0, 0.6), estimate(0.01, 0.9)]
    assert RULE.is_better(free[1], free[0]) and not RULE.is_better(replace(free[1], ess=0.7), free[0])


def test_where_the_products_are_lost_the_tokens_decide():
    lost = [estimate(0.99, 1.0, 0.1), estimate(1.0, 0.9, 0.01)]
    assert RULE.best(lost) == 1 and RULE.is_better(lost[1], lost[0]) and not RULE.is_better(lost[0], lost[1])


# ------------------------------------------------------------------------------------------------------ the estimates


def batch(noise: float, rows: int = 64, length: int = 32, seed: int = 0, shift: float = 0.0) -> op.PolicyBatch:
    """Log-ratios of mean -noise^2 / 2 + shift: at shift 0 every token's ratio has mean 1 under the sampler."""
    generator = torch.Generator().manual_seed(seed)
    sampling = -2 * torch.rand(rows, length, generator=generator) - 0.1
    log_ratio = noise * torch.randn(rows, length, generator=generator) - noise**2 / 2 + shift
    return op.PolicyBatch(
        per_token_logps=sampling + log_ratio,
        sampling_per_token_logps=sampling,
        completion_mask=torch.ones(rows, length).bool(),
        advantages=torch.randn(rows, generator=generator),
        group_ids=torch.arange(rows) // 4,
    )


def decided(data: op.PolicyBatch, **options: Any) -> AutoSession:
    session = AutoSession(auto_preset(**options))
    session.decide_first(data, 0)
    return session


def name_of(session: AutoSession) -> str:
    assert session.state.choice is not None
    return session.candidates[session.state.choice].name


def test_what_it_chooses_as_the_mismatch_grows():
    assert name_of(decided(batch(0.0))) == "none"
    assert name_of(decided(batch(0.005))) == "none"
    assert name_of(decided(batch(0.1, rows=256))).startswith("sequence_")
    assert name_of(decided(batch(0.5))) in ("tis_5", "tis_2")
    assert name_of(decided(batch(0.01, length=1000, shift=-0.03))) in ("tis_5", "tis_2")  # equal weights, all missed


def test_the_estimates_come_near_the_exact_ones_and_so_does_the_choice():
    """Samples of a process that can be summed over: bias and variance in their exact order."""
    made = process(0.8, seed=1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(made.mu, 4096, replacement=True, generator=generator)
    data = op.PolicyBatch(
        per_token_logps=made.old[drawn].float(),
        sampling_per_token_logps=made.sampling[drawn].float(),
        completion_mask=MASK[drawn],
        advantages=made.advantages[drawn].float(),
    )
    session = decided(data)
    exact = {}
    for one in session.candidates:
        whole = replace(data, **{
            "per_token_logps": made.old.float(), "sampling_per_token_logps": made.sampling.float(),
            "completion_mask": MASK, "advantages": made.advantages.float(),
        })  # fmt: skip
        out = one.correction(whole)
        used = torch.where(out.keep_mask, out.weights, 0.0).double()
        exact[one.name] = (made.bias(used), made.variance(used))
    found = {one.name: one for one in session.estimates}
    caps = ["sequence_is", "sequence_tis_10", "sequence_tis_5", "sequence_tis_2"]
    assert [exact[name][0] for name in caps] == sorted(exact[name][0] for name in caps)
    assert [found[name].missed for name in caps] == sorted(found[name].missed for name in caps)
    assert [exact[name][1] for name in caps] == sorted((exact[name][1] for name in caps), reverse=True)
    assert [found[name].ess for name in caps] == sorted(found[name].ess for name in caps)
    # exactly too, the choice is the least biased of those that hold the floor, but for what the tolerance equates
    holding = [name for name, one in found.items() if session.rule.holds(one, in_use=False)]
    largest = float(made.advantages.abs().max())
    least = min(exact[name][0] for name in holding)
    assert exact[name_of(session)][0] <= least + 2 * 2**0.5 * largest * session.rule.options.tolerance
    for name, one in found.items():
        assert exact[name][0] <= 2 * 2**0.5 * largest * (one.missed + 0.02), name


def test_cut_mass_is_what_cap_band_and_mask_take():
    data = batch(0.4, rows=16)
    found = {one.name: one for one in decided(data).estimates}
    rho = (data.per_token_logps - data.sampling_per_token_logps).double().exp()
    product = rho.prod(-1)
    assert found["tis_2"].cut_mass == pytest.approx(float((rho - 2).clamp(min=0).sum() / rho.sum()), rel=1e-4)
    assert found["sequence_tis_2"].cut_mass == pytest.approx(
        float((product - 2).clamp(min=0).sum() / product.sum()), rel=1e-3, abs=1e-6
    )
    outside = torch.where((rho < 0.5) | (rho > 5), rho, 0.0)
    assert found["icepop"].cut_mass == pytest.approx(float(outside.sum() / rho.sum()), rel=1e-4)
    assert found["none"].cut_mass == 0.0 and found["sequence_is"].cut_mass == 0.0


@pytest.mark.parametrize("centre", ["aligned", "old_per_token_logps", "proximal_per_token_logps"])
def test_the_candidates_measure_what_the_loss_reports_of_them(centre):
    """Both take the ratio that the weights take, also where the current policy has moved on."""
    data = batch(0.3, rows=16)
    if centre != "aligned":
        moved = data.per_token_logps + 0.5 * torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        data = replace(data, **{"per_token_logps": moved, centre: data.per_token_logps})
    session = AutoSession(auto_preset())
    stats = compare({one.name: one.correction for one in session.candidates}, data, prefix="auto")
    for one in session.candidates:
        own = op.Objective(correction=one.correction)(data).stats
        for name in ("missed", "missed_token", "second_moment", "ess"):
            expected = float(own[f"estimator/{name}"])
            assert float(stats[f"auto/{one.name}/{name}"]) == pytest.approx(expected, rel=1e-6), (one.name, name)


def test_bounds_of_a_weight_on_the_current_policy_are_against_the_current_policy():
    data = batch(0.3, rows=16)
    moved = data.per_token_logps + 0.1
    whole = op.RawWeight(level="sequence", ratio="current/sampling")
    aged = replace(data, per_token_logps=moved, old_per_token_logps=data.per_token_logps)
    objective = op.Objective(policy_loss=op.losses.GPG(), correction=op.Correction(weight=whole))
    product = (moved - data.sampling_per_token_logps).sum(-1).double().exp()
    # the raw product misses nothing but what the mean of the batch says: far from 1 here
    mean = float(product.mean())
    expected = max(mean, 1.0) - min(mean, 1.0)
    assert expected > 0.5
    assert float(objective(aged).stats["estimator/missed"]) == pytest.approx(expected, rel=1e-4)
    assert not [key for key in op.Objective(mode="bypass")(aged).stats if "/estimator/" in key]


def test_splitting_a_generation_changes_nothing():
    data = batch(0.2, rows=16)
    session = AutoSession(auto_preset())
    corrections = {one.name: one.correction for one in session.candidates}
    whole = compare(corrections, data, prefix="auto").compute()
    parts = [data.__class__(**{**fields_of(data), **rows_of(data, part)}) for part in (slice(0, 5), slice(5, 16))]
    merged = compare(corrections, parts[0], prefix="auto").merge(compare(corrections, parts[1], prefix="auto"))
    assert merged.compute() == pytest.approx(whole, rel=1e-9)
    again = unpacked(packed(merged), torch.device("cpu"))
    assert on_cpu(again).compute() == pytest.approx(whole, rel=1e-9)


def fields_of(data: op.PolicyBatch) -> dict[str, Any]:
    names = ("per_token_logps", "sampling_per_token_logps", "completion_mask", "advantages", "group_ids")
    return {name: getattr(data, name) for name in names}


def rows_of(data: op.PolicyBatch, part: slice) -> dict[str, Any]:
    return {name: value[part] for name, value in fields_of(data).items()}


# ------------------------------------------------------------------------------------------------------- the session


def test_a_session_from_the_first_generation_to_a_revision(tmp_path):
    said, used = [], []
    session = AutoSession(auto_preset(patience=2), correct=used.append, say=said.append, records=tmp_path)
    assert session.undecided and session.metrics() == {}
    session.observe(batch(0.5))  # nothing before the first choice
    session.decide_first(batch(0.0), 0)
    assert name_of(session) == "none" and used == [op.Correction()]
    session.observe(batch(0.5))  # the rows that have decided already
    session.end_generation(1)
    assert session.state.better == (0,) * 9
    for step in (2, 3):
        session.observe(batch(0.5, seed=step))
        assert name_of(session) == "none"
        session.end_generation(step)
    assert name_of(session).startswith("tis") and used[-1] == session.correction
    first, second = read_actions(tmp_path / "actions.jsonl")
    assert (first.step, first.what, first.before) == (0, "correction_choice", -1)
    assert (second.step, second.before, second.after) == (3, 0, session.state.choice)
    assert said[-1].startswith("[auto] step 3: tis") and "better in 2 generations in a row" in second.why
    setting = json.loads(second.why.rpartition("offpolicy: ")[2])
    assert from_mapping(setting, where="offpolicy").correction == session.correction
    logged = session.metrics()
    assert logged["offpolicy/auto/choice"] == session.state.choice and logged["offpolicy/auto/revisions"] == 1.0
    assert [key for key, value in logged.items() if key.endswith("/chosen") and value == 1.0] == [
        f"offpolicy/auto/{name_of(session)}/chosen"
    ]


def test_a_checkpoint_goes_on_where_it_stopped():
    session = AutoSession(auto_preset(patience=3))
    session.decide_first(batch(0.0), 0)
    session.end_generation(1)
    for step in (2, 3):
        session.observe(batch(0.5, seed=step))
        session.end_generation(step)
    session.observe(batch(0.5, seed=4))
    state, pending = json.loads(json.dumps(session.state_dict())), session.pending()
    again = AutoSession(auto_preset(patience=3))
    again.load_state_dict(state)
    again.load_pending(pending, torch.device("cpu"))
    for one in (session, again):
        one.end_generation(4)
    assert again.state == session.state and again.metrics() == session.metrics()
    assert session.state.revisions == 1
    other = AutoSession(auto_preset(candidates=[
        {"name": "zero", "preset": "measure"}, {"name": "tis", "preset": "paper/tis"},
    ]))  # fmt: skip
    other.load_state_dict(state)
    assert other.undecided  # "none" is no candidate there: chosen anew


# -------------------------------------------------------------------------------------------------- what it may choose


def test_settings_of_the_correction_hold_for_all_candidates():
    veto = op.OutlierVeto(low=1e-4, high=100.0)
    base = op.Correction(keep=(veto,), nonfinite="drop", correct_threshold=0.5)
    preset = replace(auto_preset(), objective=op.Objective(correction=base))
    for one in candidates_of(preset):
        assert one.correction.keep[0] == veto and one.correction.nonfinite == "drop"
    assert candidates_of(preset)[0].correction == base
    assert starting_preset(preset).objective.needs_sampling


TWO = {"name": "none", "preset": "measure"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ess_floor": 1.5}, "ess_floor must"),
        ({"margin": 1.0}, "margin must"),
        ({"patience": 0}, "patience must"),
        ({"tolerance": -0.1}, "tolerance must"),
        ({"max_second_moment": 0.0}, "max_second_moment must"),
        ({"candidates": [TWO]}, "candidates must be a list of two or more"),
        ({"candidates": [TWO, TWO]}, "candidates must have different names"),
        ({"candidates": [TWO, {"preset": "paper/tis"}]}, "mappings with a name"),
        ({"candidates": [TWO, {"name": "a", "presett": "paper/tis"}]}, "candidates.a must have the keys"),
        ({"flor": 0.3}, "flor is not an option of AutoOptions"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        auto_preset(**options)


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ({"preset": "paper/ppo-is"}, "must set a weight and keep terms only"),
        ({"preset": "auto"}, "must set a weight and keep terms only"),
        ({"preset": "kit/ess-cap"}, "must be of row scope"),
        ({"preset": "paper/opsm"}, "must read 'old/sampling' only"),
        ({"preset": "paper/nothing"}, "preset must be one of"),
    ],
)
def test_candidates_that_cannot_be_swapped_are_named(candidate, message):
    preset = auto_preset(candidates=[TWO, {"name": "other", **candidate}])
    with pytest.raises(ValueError, match=message):
        AutoSession(preset)


def test_there_must_be_one_that_changes_nothing_and_one_that_weighs():
    tis = {"name": "tis", "preset": "paper/tis"}
    with pytest.raises(ValueError, match="one without weight and mask"):
        AutoSession(auto_preset(candidates=[tis, {**tis, "name": "again"}]))
    with pytest.raises(ValueError, match="one with a weight"):
        AutoSession(auto_preset(candidates=[TWO, {"name": "veto", "preset": "paper/product-mask"}]))


def test_it_is_written_as_it_was_read():
    spec = {"preset": "auto", "options": {"ess_floor": 0.3, "patience": 5}}
    preset = from_mapping(spec, where="offpolicy")
    assert preset.auto == AutoOptions(ess_floor=0.3, patience=5)
    written = plain_method(preset)
    assert (written["preset"], written["options"]) == ("auto", spec["options"])
    assert "sequence_tis_10" in preset.described()["candidates"]
