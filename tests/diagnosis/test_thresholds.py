"""Every documented threshold decides something: on one side of it the answer is another than on the other side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from trl_offpolicy.control import Escalation, ESSStep, LengthGuard, Resync, parse_control
from trl_offpolicy.control.escalation import Signals
from trl_offpolicy.control.spec import CONTROLLERS
from trl_offpolicy.diagnosis.thresholds import Thresholds, limits_of, thresholds_from
from trl_offpolicy.diagnosis.verdict.antipatterns import find_antipatterns
from trl_offpolicy.diagnosis.verdict.judge import diagnose
from trl_offpolicy.diagnosis.verdict.sga import sga_cell
from trl_offpolicy.diagnosis.verdict.tree import APPLIED_ESS, SYNC_ROUNDING, TREE
from trl_offpolicy.run_folder.run_data import MetricsLog

HEALTHY = {
    "mismatch/kl_k3": 0.001,
    "mismatch/prob_pearson": 0.999,
    "mismatch/log_ppl_diff": 0.001,
    "mismatch/prob_diff_max": 0.1,
    "mismatch/chi2_token": 0.01,
    "staleness/kl_k3": 0.001,
    "loss/clip_region_fraction": 0.02,
}
STEP = 0.02
"""How far on either side of a threshold its reading is put, as a share of it."""
Answer = Callable[[float, Thresholds], Any]


class Walk(NamedTuple):
    """``answer`` to a reading and thresholds; what it must be just below the threshold, and just above."""

    answer: Answer
    below: Any
    above: Any


def log_of(rows: list[dict[str, float | None]]) -> MetricsLog:
    return MetricsLog(
        tuple(
            {
                "step": float(step),
                **{f"offpolicy/{key}": value for key, value in (HEALTHY | row).items() if value is not None},
            }
            for step, row in enumerate(rows, 1)
        )
    )


def findings(log: MetricsLog, limits: Thresholds) -> set[str]:
    return {f"{one.cause} {one.severity}" for one in diagnose(log, limits).findings}


def verdict(metric: str, *, sign: float = 1.0, **others: float) -> Answer:
    """The doctor's findings, one metric (times ``sign``) being the reading; ``__`` in others stands for ``/``."""
    rest = {name.replace("__", "/"): value for name, value in others.items()}
    return lambda value, limits: findings(log_of([rest | {metric: sign * value}] * 12), limits)


def at_floor(value: float, limits: Thresholds) -> set[str]:
    return findings(log_of([{"mismatch/kl_k3": 0.03, "noise_floor/kl_k3": 0.03 / value}] * 12), limits)


def rising_clip(value: float, limits: Thresholds) -> set[str]:
    clip = "loss/clip_region_fraction"
    return findings(log_of([{clip: 0.3}] * 6 + [{clip: 0.3 * value}] * 6), limits)


def jump_of_the_length(value: float, steps: int = 300) -> MetricsLog:
    """Responses are a quarter longer from ``value`` steps before the end on; the five rows of the mean are included."""
    key = "rollout/response_length_mean"
    return log_of([{key: 100.0 if step < steps - value + 4 else 125.0} for step in range(1, steps + 1)])


def habits(metric: str, **others: float) -> Answer:
    rest = {name.replace("__", "/"): value for name, value in others.items()}
    return lambda value, limits: [one.name for one in find_antipatterns(rest | {metric: value}, {}, limits)]


def length_trap(value: float, limits: Thresholds) -> list[str]:
    """Of the shortest quarter a fifth is dropped, of the others ``value`` times that."""
    lengths, quarter = np.arange(1, 4001), np.arange(1000)
    dropped = [quarter < 200, *[quarter < round(200 * value)] * 3]
    rollouts: Any = SimpleNamespace(trainable=lengths, kept=np.where(np.concatenate(dropped), 0, lengths))
    return [one.name for one in find_antipatterns({}, {}, limits, rollouts)]


def controller(name: str, limits: Thresholds) -> Any:
    spec = parse_control({"controllers": [name], "thresholds": asdict(limits)})
    assert spec is not None
    return spec.controllers[0]


def level(signal: str, *, at: int = 1) -> Answer:
    """The level that the escalation asks for."""
    quiet = Signals(chi2=0.0, pearson=1.0, ess=1.0, dropped=0.0)

    def answer(value: float, limits: Thresholds) -> int:
        return int(controller("escalation", limits).demand(quiet._replace(**{signal: value}), at, 1.0)[0])

    return answer


def ess_lowers(value: float, limits: Thresholds) -> bool:
    """Whether the learning rate is lowered at this ESS of 16 tokens."""
    item = replace(controller("ess_step", limits), resolution=1e-6)
    log = log_of([{"staleness/product_variance": -math.log(value) / 16}] * 3)
    return item.step(item.start(), log, log.steps[-1])[1] is not None


def resync_is_off(value: float, limits: Thresholds) -> bool:
    item = controller("resync", limits)
    state, _ = item.step(item.start(), log_of([{"mismatch/prob_pearson": value}]), 1)
    return bool(state.off > 0)


def guard_acts(log: MetricsLog, limits: Thresholds) -> bool:
    item = controller("length_guard", limits)
    return item.step(item.start(), log, log.steps[-1])[1] is not None


def guard_at_growth(value: float, limits: Thresholds) -> bool:
    key = "rollout/response_length_mean"
    return guard_acts(log_of([{key: 100.0}] * 150 + [{key: 100.0 * value}]), limits)


def guard_at_jump(value: float, limits: Thresholds) -> bool:
    return guard_acts(jump_of_the_length(value + 4), limits)


def spread(metric: str, *values: float, steps: int = 12) -> MetricsLog:
    """The values one after the other over the steps; names of the trainers themselves have no prefix."""
    rows = log_of([{}] * steps).rows
    key = metric if metric in ("reward", "grad_norm") else f"offpolicy/{metric}"
    return MetricsLog(tuple({**row, key: values[place * len(values) // steps]} for place, row in enumerate(rows)))


def negative_k1(value: float, limits: Thresholds) -> set[str]:
    """Of a thousand steps that share has a negative KL k1."""
    rows = [{"staleness/kl_k1": -0.01 if step < 1000 * value else 0.01} for step in range(1000)]
    return {f"{one.cause} {one.severity}" for one in diagnose(log_of(rows), limits, window=1000).findings}


def rising_noise(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("gradient/noise", 1.0, value, steps=40), limits)


def noise_of_weights(value: float, limits: Thresholds) -> set[str]:
    """Weights are switched on in the middle, and the noise with them."""
    rows = spread("gradient/noise", 1.0, value, steps=40).rows
    weighted = tuple({**row, "offpolicy/weight_applied/mean": 1.0} for row in rows[20:])
    return findings(MetricsLog((*rows[:20], *weighted)), limits)


def remedy(metric: str, **others: float) -> Answer:
    rest = {f"total/{name}": value for name, value in others.items()}

    def answer(value: float, limits: Thresholds) -> Any:
        cell = sga_cell(rest | {f"total/{metric}": value}, limits)
        return None if cell is None else cell.remedy

    return answer


def falling_entropy(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("loss/entropy", 1.0, 1.0, 0.1, 0.1 * value, steps=40), limits)


def low_entropy(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("loss/entropy", 1.0, value, steps=40), limits)


def fallen_entropy(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("loss/entropy", 0.19, 0.19 * value, steps=40), limits)


def lost_entropy(value: float, limits: Thresholds) -> set[str]:
    """It ends at that share of its start, and a tenth lower at the end than before."""
    return findings(spread("loss/entropy", 0.4, 0.4, 0.4 * value / 0.95, 0.4 * value / 1.05, steps=40), limits)


def reward_lost(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("reward", 1.0, 1.0, 1 - value, steps=60), limits)


def length_left(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("rollout/response_length_mean", 100.0, 100.0, 100.0 * value, steps=60), limits)


def rising_entropy(value: float, limits: Thresholds) -> set[str]:
    """The entropy grows while the reward falls by a tenth."""
    rows = zip(
        spread("loss/entropy", 0.3, 0.3 * value, steps=60).rows, spread("reward", 1.0, 0.9, steps=60).rows, strict=True
    )
    return findings(MetricsLog(tuple({**one, **other} for one, other in rows)), limits)


def rising_cut(value: float, limits: Thresholds) -> set[str]:
    rows = log_of([{}] * 40).rows
    shares = (0.1 if place < 20 else 0.1 + value for place in range(40))
    return findings(
        MetricsLog(tuple({**row, "completions/clipped_ratio": share} for row, share in zip(rows, shares, strict=True))),
        limits,
    )


def growing_mismatch(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("mismatch/kl_k3", 0.003, 0.003 * value, steps=40), limits)


def reward_fall(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("reward", 1.0, 1 - value, steps=60), limits)


def reward_gap(value: float, limits: Thresholds) -> set[str]:
    rows = spread("reward", 1.0).rows
    return findings(
        MetricsLog(tuple({**row, "offpolicy/rollout/reward_reweighted": 1 - value} for row in rows)), limits
    )


def queue_lag(value: float, limits: Thresholds) -> set[str]:
    lags = {"rollout/version_lag_mean": value, "rollout/version_lag_max": value}
    return findings(log_of([lags] * 12), limits)


def reward_drop(value: float, limits: Thresholds) -> set[str]:
    return findings(spread("reward", 1.0, 1 - value, steps=300), limits)


def drop_since(value: float, limits: Thresholds) -> set[str]:
    """The reward halves so long ago that the best mean over 20 steps of the last ``value`` steps is a third lower."""
    rows = log_of([{}] * 300).rows
    return findings(
        MetricsLog(tuple({**row, "reward": 1.0 if row["step"] <= 289 - value else 0.5} for row in rows)), limits
    )


def gradient_spike(value: float, limits: Thresholds) -> set[str]:
    rows = spread("grad_norm", 1.0, 1.0, 1.0, 1.0, 1.0, value, 1.0, 1.0, steps=48).rows
    return findings(MetricsLog(tuple({**row, "reward": 1.0 if row["step"] < 37 else 0.9} for row in rows)), limits)


def one_token(value: float, limits: Thresholds) -> set[str]:
    """A log without KL k3: the mean distance of the tokens, and one that is far."""
    far = {"mismatch/kl_k3": None, "mismatch/logp_diff_mean": value, "mismatch/logp_diff_max": 6.0}
    return findings(log_of([far] * 12), limits)


def still_groups(value: float, limits: Thresholds) -> set[str]:
    rows = log_of([{}] * 12).rows
    return findings(MetricsLog(tuple({**row, "frac_reward_zero_std": value} for row in rows)), limits)


def still_gradient(value: float, limits: Thresholds) -> set[str]:
    """Of a thousand steps that share has a gradient of 0."""
    rows = log_of([{}] * 1000).rows
    norms = (0.0 if step < 1000 * value else 1.0 for step in range(1000))
    log = MetricsLog(tuple({**row, "grad_norm": norm} for row, norm in zip(rows, norms, strict=True)))
    return {f"{one.cause} {one.severity}" for one in diagnose(log, limits, window=1000).findings}


def sync_rounds(value: float, limits: Thresholds) -> bool:
    return bool(SYNC_ROUNDING[0].taken({"rollout/sync_visible_fraction": value}, limits))


def lag_of_oapl(value: float, limits: Thresholds) -> list[str]:
    readings = {"rollout/version_lag_max": value * 0.5, "total/ess_sequence": 0.5}
    info = {"objective": "Objective(policy_loss=OAPL(beta=1.0))"}
    return [one.name for one in find_antipatterns(readings, info, limits)]


NO_NEED = "correction of what already agrees"
AGREEING = {"mismatch__tv_p95": 1e-5, "mismatch__chi2_sequence": 0.01, "weight_applied__mean": 1.0}


def without(name: str) -> dict[str, float]:
    return {key: value for key, value in AGREEING.items() if key != name}


ESS = next(one.metric for step in TREE for one in step.any_of if one.threshold == "ess_healthy")
CHI2, PEARSON = "mismatch/chi2_token", "mismatch/prob_pearson"
DROPPED, TOKENS = "keep/dropped_sequence_fraction", "keep/dropped_token_fraction"
BROKEN, OFF = {"engine_mismatch critical"}, {"engine_mismatch notice"}
VARIANCE, REJECT, BEYOND = {"weight_variance critical"}, {"rejection_limit warning"}, {"correction_limit critical"}
SURGE = {"length_surge critical"}
FAR, STALE, VERY_STALE = {"engine_mismatch warning"}, {"policy_staleness notice"}, {"policy_staleness warning"}
VARIES, COLLAPSE, NOT_YET = {"weight_variance notice"}, {"collapse warning"}, {"collapse notice"}
WALKS: dict[str, tuple[Walk, ...]] = {
    "pearson_healthy": (Walk(verdict(PEARSON), OFF, set()),),
    "pearson_broken": (
        Walk(verdict(PEARSON), BROKEN, OFF),
        Walk(level("pearson"), 3, 0),
        Walk(resync_is_off, True, False),
    ),
    "logprobs_missing": (
        Walk(verdict("mismatch/nonfinite_fraction"), {"nonfinite warning"}, {"engine_logprobs_missing critical"}),
        Walk(verdict("total/nonfinite_fraction"), set(), {"engine_logprobs_missing critical"}),
    ),
    "kl_healthy": (
        Walk(verdict("mismatch/kl_k3"), set(), OFF),
        Walk(verdict("staleness/kl_k3"), set(), STALE),
        Walk(verdict("noise_floor/kl_k3"), set(), {"dropout warning"}),
    ),
    "kl_high": (
        Walk(verdict("mismatch/kl_k3"), OFF, BROKEN),
        Walk(verdict("staleness/kl_k3"), STALE, VERY_STALE),
        Walk(verdict("noise_floor/kl_k3"), {"dropout warning"}, {"dropout critical"}),
    ),
    "log_ppl_high": tuple(
        Walk(verdict("mismatch/log_ppl_diff", sign=sign), set(), {"engine_mismatch warning"}) for sign in (1.0, -1.0)
    ),
    "prob_diff_high": (
        Walk(verdict("mismatch/prob_diff_max"), set(), OFF),
        Walk(verdict("mismatch/prob_diff_max", mismatch__kl_k3=None), set(), FAR),
        Walk(habits("mismatch/prob_diff_max", mismatch__kl_k3=0.01), [], ["largest difference averaged away"]),
    ),
    "chi2_moderate": (
        Walk(verdict(CHI2), set(), {"token_drift warning"}),
        Walk(verdict("total/chi2_token"), set(), {"token_drift warning"}),
        Walk(level("chi2"), 0, 1),
    ),
    "chi2_high": (Walk(verdict(CHI2), {"token_drift warning"}, VARIANCE),),
    "chi2_sequence_high": (Walk(verdict("mismatch/chi2_sequence"), set(), {"sequence_variance notice"}),),
    "chi2_reject": (
        Walk(verdict(CHI2), VARIANCE, VARIANCE | REJECT),
        Walk(verdict("total/chi2_token"), VARIANCE, VARIANCE | REJECT),
        Walk(level("chi2"), 1, 2),
    ),
    "chi2_systems": (
        Walk(verdict(CHI2), VARIANCE | REJECT, BEYOND),
        Walk(verdict("total/chi2_token"), VARIANCE | REJECT, BEYOND),
        Walk(level("chi2"), 2, 3),
    ),
    "ess_healthy": (
        Walk(verdict(ESS), VARIANCE, set()),
        Walk(level("ess_before"), 1, 0),
        Walk(ess_lowers, True, False),
    ),
    "ess_broken": (
        *(Walk(verdict(key, keep__dropped_token_fraction=0.05), BEYOND, VARIANCE) for key in APPLIED_ESS),
        Walk(level("ess"), 3, 0),
    ),
    "dropped_high": (
        Walk(verdict(DROPPED), set(), REJECT),
        Walk(verdict(TOKENS), set(), REJECT),
        Walk(level("dropped"), 0, 2),
    ),
    "dropped_broken": (
        Walk(verdict(DROPPED), REJECT, BEYOND),
        Walk(verdict(TOKENS), REJECT, BEYOND),
        Walk(level("dropped"), 2, 3),
    ),
    "clip_high": (Walk(verdict("loss/clip_region_fraction"), set(), {"clip_saturation notice"}),),
    "clip_rising": (Walk(rising_clip, {"clip_saturation notice"}, {"clip_saturation warning"}),),
    "length_surge": (Walk(verdict("rollout/length_surge"), set(), SURGE), Walk(guard_at_growth, False, True)),
    "length_window": (
        Walk(lambda value, limits: findings(jump_of_the_length(value), limits), SURGE, set()),
        Walk(guard_at_jump, True, False),
    ),
    "floor_factor": (Walk(at_floor, set(), OFF),),
    "logp_diff_spike": (
        Walk(habits("mismatch/logp_diff_max", mismatch__kl_k3=0.01), [], ["largest difference averaged away"]),
    ),
    "post_tool_ratio": (
        Walk(habits("post_tool/kl_k3_ratio", post_tool__kl_k3=0.03), [], ["mismatch after tool calls averaged away"]),
    ),
    "length_trap": (Walk(length_trap, [], ["length trap"]),),
    "ppl_ratio_low": (Walk(verdict("mismatch/ppl_ratio"), OFF, set()),),
    "logp_diff_outlier": (
        Walk(verdict("mismatch/logp_diff_max"), set(), OFF),
        Walk(verdict("mismatch/logp_diff_max", mismatch__kl_k3=None), set(), FAR),
    ),
    "k1_negative": (Walk(verdict("staleness/kl_k1", sign=-1.0), set(), OFF),),
    "k1_negative_share": (Walk(negative_k1, set(), OFF),),
    "weight_off": (
        Walk(lambda value, limits: verdict("weight/mean")(1 + value, limits), set(), OFF),
        Walk(lambda value, limits: verdict("weight_applied/mean")(1 - value, limits), set(), VARIES),
    ),
    "noise_rising": (
        Walk(rising_noise, set(), VARIES),
        Walk(noise_of_weights, set(), {"weight_variance warning"}),
    ),
    "tv_moderate": (
        Walk(verdict("mismatch/tv"), set(), {"token_drift notice"}),
        Walk(remedy("tv", chi2_token=0.1), "nothing", "token"),
    ),
    "entropy_low": (Walk(low_entropy, {"entropy_collapse notice"}, set()),),
    "entropy_fallen": (Walk(fallen_entropy, {"entropy_collapse notice"}, set()),),
    "entropy_falling": (Walk(falling_entropy, {"entropy_collapse warning"}, {"entropy_collapse notice"}),),
    "entropy_lost": (Walk(lost_entropy, {"entropy_collapse warning"}, {"entropy_collapse notice"}),),
    "entropy_rising": (Walk(rising_entropy, set(), COLLAPSE),),
    "cut_rising": (Walk(rising_cut, set(), {"length_surge warning"}),),
    "mismatch_growth": (Walk(growing_mismatch, set(), OFF),),
    "reward_gap": (Walk(reward_gap, set(), {"biased_reward notice"}),),
    "lag_high": (Walk(verdict("rollout/version_lag_max"), set(), STALE),),
    "lag_uncorrected": (Walk(queue_lag, set(), VERY_STALE),),
    "cosine_high": (Walk(verdict("gradient/cosine_previous"), set(), STALE),),
    "flip_high": (Walk(verdict("routing/flip_fraction"), set(), {"routing warning"}),),
    "expert_flip_high": (
        Walk(verdict("routing/expert_flip_mean"), set(), {"routing notice"}),
        Walk(habits("routing/expert_flip_mean", **AGREEING), [NO_NEED], []),
    ),
    "reward_drop": (Walk(reward_drop, set(), COLLAPSE), Walk(reward_fall, set(), NOT_YET)),
    "reward_drop_steps": (Walk(drop_since, NOT_YET, COLLAPSE),),
    "reward_lost": (Walk(reward_lost, {"collapse notice"}, {"collapse critical"}),),
    "logp_diff_small": (Walk(one_token, OFF, FAR),),
    "signal_lost": (
        Walk(still_groups, set(), {"no_signal warning"}),
        Walk(still_gradient, set(), {"no_signal warning"}),
    ),
    "length_left": (Walk(length_left, COLLAPSE, set()),),
    "gradient_spike": (
        Walk(lambda value, limits: findings(spread("grad_norm", 1.0, value, steps=60), limits), set(), NOT_YET),
        Walk(gradient_spike, set(), COLLAPSE),
    ),
    "confident_high": (Walk(verdict("mismatch/confident_disagreement_fraction"), set(), OFF),),
    "copied_high": (Walk(verdict("rollout/copied_fraction"), set(), {"repeated_draws critical"}),),
    "sync_visible_low": (Walk(sync_rounds, True, False),),
    "tv_budget": (Walk(habits("mismatch/tv_p95", **without("mismatch__tv_p95")), [NO_NEED], []),),
    "chi2_budget": (Walk(habits("mismatch/chi2_sequence", **without("mismatch__chi2_sequence")), [NO_NEED], []),),
    "lag_per_ess": (Walk(lag_of_oapl, [], ["more lag than the sample size bears"]),),
}
"""Threshold -> what it decides. One that decides nothing has no place among the documented ones."""


def test_every_threshold_is_walked() -> None:
    assert set(WALKS) == {one.name for one in fields(Thresholds)}, "WALKS must hold a walk for every threshold."


@pytest.mark.parametrize("name", WALKS)
def test_the_answer_changes_at_the_threshold(name: str) -> None:
    default = Thresholds()
    limit = getattr(default, name)
    for answer, below, above in WALKS[name]:
        assert answer(limit * (1 - STEP), default) == below
        assert answer(limit * (1 + STEP), default) == above
        # ... and it is this field that is read: the reading stays, the threshold moves past it
        assert answer(limit, replace(default, **{name: limit * (1 + STEP)})) == below
        assert answer(limit, replace(default, **{name: limit * (1 - STEP)})) == above


def test_controllers_have_no_numbers_of_their_own() -> None:
    """Their defaults are the thresholds; what a configuration says of the thresholds holds for them too."""
    assert Escalation() == Escalation(chi2=(0.3, 2.0, 4.0), dropped=(0.1, 0.25), ess=0.3, ess_low=0.5, pearson=0.95)
    assert ESSStep().base == 0.5
    assert Resync().pearson == 0.95 and (LengthGuard().surge, LengthGuard().window) == (1.2, 100)
    for cls in CONTROLLERS.values():
        assert limits_of(cls, Thresholds()) == {
            one.name: one.default for one in fields(cls) if "thresholds" in one.metadata
        }
    moved: Mapping[str, float] = {"chi2_systems": 6.0, "dropped_high": 0.2, "length_window": 50, "length_surge": 1.5}
    spec = parse_control({"controllers": {"escalation": {"ess": 0.2}, "length_guard": None}, "thresholds": moved})
    assert spec is not None and spec.thresholds == thresholds_from(moved)
    assert spec.controllers == (
        Escalation(chi2=(0.3, 2.0, 6.0), dropped=(0.2, 0.25), ess=0.2),
        LengthGuard(surge=1.5, window=50),
    )
    own = parse_control({"controllers": {"escalation": {"chi2": [1, 2, 3]}}, "thresholds": {"chi2_systems": 6.0}})
    assert own is not None and own.controllers == (Escalation(chi2=(1, 2, 3)),)  # what is given there wins


def test_nothing_is_rejected_no_limit_of_rejection() -> None:
    """An ESS that low without rejection is variance: rejection has not been tried."""
    assert all(verdict(key)(0.2, Thresholds()) == VARIANCE for key in APPLIED_ESS)
