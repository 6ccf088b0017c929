"""What the doctor says of changes: a run is compared with itself, and a change that is learning is no fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from trl_offpolicy.diagnosis.verdict.judge import Diagnosis, diagnose
from trl_offpolicy.run_folder.names import translate
from trl_offpolicy.run_folder.run_data import MetricsLog

Number = float | Callable[[int], float] | None
HEALTHY: dict[str, Number] = {"offpolicy/mismatch/kl_k3": 0.001, "offpolicy/mismatch/prob_pearson": 0.999}


def judged(steps: int, metrics: dict[str, Number]) -> Diagnosis:
    """A log with these metrics beside healthy ones: a number, a function of the step, or None = not logged."""
    logged = {name: value for name, value in (HEALTHY | metrics).items() if value is not None}
    rows = (
        {name: value(step) if callable(value) else value for name, value in logged.items()} for step in range(steps)
    )
    return diagnose(MetricsLog(tuple(translate({"step": float(step), **row}) for step, row in enumerate(rows))))


def found(steps: int, **metrics: Any) -> list[tuple[str, str]]:
    """Cause and severity of the findings; ``__`` stands for ``/``."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [(one.cause, one.severity) for one in judged(steps, named).findings]


def growing(step: int) -> float:
    return 1000.0 + 6 * step


@pytest.mark.parametrize(
    ("beside", "severity"),
    [
        ({"reward": lambda step: 0.2 + 0.003 * step}, "notice"),
        ({"reward": lambda step: -2 + 0.01 * step}, "notice"),
        ({"reward": lambda step: 0.2 + 0.003 * step, "entropy": lambda step: 1 - 0.005 * step}, "notice"),
        ({"reward": 0.5}, "warning"),  # longer for nothing
        ({"reward": 0.5, "offpolicy__mismatch__kl_k3": 0.03}, "critical"),
        ({"reward": lambda step: 0.8 - 0.001 * step}, "critical"),
        ({}, "critical"),
        ({"reward": lambda step: 0.2 + 0.003 * step, "offpolicy__mismatch__kl_k3": 0.03}, "critical"),
        ({"reward": lambda step: 0.2 + 0.003 * step, "offpolicy__staleness__kl_k1": 0.03}, "critical"),
        ({"reward": lambda step: 0.2 + 0.003 * step, "offpolicy__loss__clip_region_fraction": 0.3}, "critical"),
    ],
)
def test_responses_that_grow_with_the_reward_are_learned(beside: dict[str, Any], severity: str) -> None:
    """R1's reasoning grows for hundreds of steps; a collapse begins with the same curve and a reward that stands."""
    assert ("length_surge", severity) in found(150, completions__mean_length=growing, **beside)


@pytest.mark.parametrize("key", ["completions/clipped_ratio", "response_length/clip_ratio", "rollout/truncated_ratio"])
def test_a_length_that_the_limit_hides(key: str) -> None:
    cut = {key: lambda step: 0.02 + 0.004 * step}
    assert [(one.cause, one.severity) for one in judged(150, cut).findings] == [("length_surge", "warning")]
    learned = {**cut, "reward": lambda step: 0.2 + 0.003 * step}
    assert [(one.cause, one.severity) for one in judged(150, learned).findings] == [("length_surge", "notice")]
    assert judged(150, {key: 0.9}).verdict == "ok"  # as it was from the beginning


def test_an_entropy_that_was_always_low_has_not_collapsed() -> None:
    assert found(60, entropy=0.08) == []
    assert found(60, entropy=lambda step: 0.6 if step < 20 else 0.08) == [("entropy_collapse", "notice")]
    falls = found(60, entropy=lambda step: 0.6 * 0.95**step)
    assert falls == [("entropy_collapse", "warning")]


def test_an_entropy_that_rises_is_a_fault_only_while_the_reward_falls() -> None:
    explodes = {"entropy": lambda step: 0.3 * 1.03**step}
    assert found(80, **explodes) == []
    assert found(80, **explodes, reward=0.5) == []
    fell = found(80, **explodes, reward=lambda step: 0.5 if step < 50 else 0.4)
    assert fell == [("collapse", "warning")]


@pytest.mark.parametrize("shift", [0.0, -0.5, -2.0])
def test_a_reward_may_be_negative(shift: float) -> None:
    """Up by one, then down by half for a hundred steps and more."""

    def reward(step: int) -> float:
        return shift + (step / 100 if step < 100 else 1.0 if step < 150 else 0.5)

    assert found(300, reward=reward) == [("collapse", "warning")]
    assert found(150, reward=reward) == []


@pytest.mark.parametrize("shift", [0.0, -0.5, -2.0])
@pytest.mark.parametrize("since", [15, 60, 200])
@pytest.mark.parametrize("every", [1, 10])
def test_a_reward_that_is_lost_is_critical_at_once(shift: float, since: int, every: int) -> None:
    """From 0.8 to 0.02 of the way, also in a log of every tenth step."""
    draw = random.Random(since)

    def reward(step: int) -> float:
        way = min(step / 100, 0.8) if step < 200 else 0.02
        return shift + way + draw.gauss(0, 0.02)

    steps = range(0, 200 + since * every, every) if every > 1 else range(200 + since)
    rows = tuple(translate({"step": float(step), "reward": reward(step), "entropy": 0.5}) for step in steps)
    (finding,) = diagnose(MetricsLog(rows)).findings
    # a fall by 0.78 is two thirds of a best reward of -1.2: that may be another scale, and is no loss of all
    expected = {"critical"} if shift > -1 else {"warning", "notice"}
    assert finding.cause == "collapse" and finding.severity in expected


def test_a_lost_reward_comes_before_what_else_grows() -> None:
    seen = found(
        200,
        reward=lambda step: 0.6 if step < 150 else 0.01,
        completions__mean_length=lambda step: 300.0 if step < 150 else 4000.0,
    )
    assert seen == [("collapse", "critical"), ("length_surge", "critical")]


@pytest.mark.parametrize(
    "reward",
    [
        lambda step: -1 - 1e-4 * (step >= 40),
        lambda step: -2 - 0.001 * step,
        lambda step: -1 + 0.1 * (20 <= step < 40),
    ],
)
def test_a_small_change_of_a_negative_reward_is_no_collapse(reward: Callable[[int], float]) -> None:
    assert found(60, reward=reward) == []


def test_a_creep_does_not_make_up_for_a_fall() -> None:
    """.8 to .25, and then .0003 a step: after five hundred steps less than a third has come back."""
    creeps = found(700, reward=lambda step: 0.8 if step < 200 else 0.25 + 0.0003 * (step - 200))
    assert creeps == [("collapse", "warning")]
    rises = found(300, reward=lambda step: 0.8 if step < 190 else 0.35 + 0.0015 * (step - 190))
    assert rises == [("collapse", "notice")]


def test_huge_numbers_are_judged_without_an_error() -> None:
    for value in (-800.0, -1e300):
        seen = judged(12, {"offpolicy/mismatch/kl_k3": None, "offpolicy/mismatch/kl_k1": value})
        assert seen.verdict == "critical" and seen.line()
    assert judged(60, {"grad_norm": 1e200, "offpolicy/mismatch/logp_diff_mean": 1e200}).line()


def test_responses_that_shrink_to_nothing() -> None:
    """A reward won by empty responses: it does not fall."""
    short = found(120, completions__mean_length=lambda step: 400.0 * 0.95**step, reward=0.9)
    assert short == [("collapse", "warning")]
    assert found(120, completions__mean_length=lambda step: 400.0 * 0.99**step, reward=0.9) == []


def test_a_gradient_that_stays_large_is_said_before_the_reward_falls() -> None:
    assert found(60, grad_norm=lambda step: 0.3 if step < 40 else 30.0, reward=0.5) == [("collapse", "notice")]
    assert found(60, grad_norm=lambda step: 30.0 if step == 40 else 0.3, reward=0.5) == []


def test_noise_of_the_lengths_is_no_surge() -> None:
    """Batches whose mean length scatters by a third of it: no surge in forty runs."""
    for seed in range(40):
        draw = random.Random(seed)
        noise = [draw.gauss(0, 80) for _ in range(150)]
        assert found(150, completions__mean_length=lambda step, noise=noise: 250.0 + noise[step]) == []


def test_lengths_that_come_back_are_no_surge() -> None:
    """Easy and hard parts of the data take turns."""
    assert found(400, completions__mean_length=lambda step: 400.0 if step // 60 % 2 else 250.0) == []


@pytest.mark.parametrize("since", [20, 60, 95])
def test_a_fall_of_less_than_a_hundred_steps_is_said_at_once(since: int) -> None:
    assert found(150 + since, reward=lambda step: 0.6 if step < 150 else 0.3) == [("collapse", "notice")]


@pytest.mark.parametrize("mean", [0.5, 0.02, 0.0, -1.0])
def test_noise_is_no_fall(mean: float) -> None:
    """A reward that stands still, with the noise of a batch: no alarm in forty runs of 400 steps."""
    alarms = 0
    for seed in range(40):
        draw = random.Random(seed)
        noise = [draw.gauss(0, 0.03) for _ in range(400)]
        alarms += bool(found(400, reward=lambda step, noise=noise: mean + noise[step]))
    assert alarms == 0


def test_a_mismatch_that_grows_is_said_before_it_is_large() -> None:
    assert found(60, offpolicy__mismatch__kl_k3=lambda step: 0.001 + 0.0002 * step) == [("engine_mismatch", "notice")]
    assert found(60, offpolicy__mismatch__kl_k3=lambda step: 1e-6 * 1.1**step) == []  # large only beside nothing
    only = {
        "offpolicy/mismatch/kl_k3": None,
        "offpolicy/mismatch/logp_diff_mean": lambda step: 0.02 + 0.002 * step,
    }
    assert [one.cause for one in judged(60, only).findings] == ["engine_mismatch"]


def test_a_negative_kl_k1_bounds_kl_k3_from_below() -> None:
    """The mean log-ratio is 0.4: by Jensen's inequality E r >= e^0.4, so k3 is at least 0.09."""
    seen = judged(12, {"offpolicy/staleness/kl_k1": -0.4})
    assert seen.readings["atleast/staleness/kl_k3"] == pytest.approx(0.0918, abs=1e-4)
    assert ("policy_staleness", "warning") in [(one.cause, one.severity) for one in seen.findings]
    assert "atleast/staleness/kl_k3" not in judged(12, {"offpolicy/staleness/kl_k1": 0.4}).readings


def test_a_mismatch_that_grows_thirtyfold_is_a_warning_and_no_rounding() -> None:
    grows = {"offpolicy__mismatch__kl_k3": None}
    assert found(60, **grows, offpolicy__mismatch__logp_diff_mean=lambda step: 0.01 if step < 30 else 0.15) == [
        ("engine_mismatch", "warning")
    ]


@pytest.mark.parametrize(
    ("beside", "severity"),
    [
        ({"reward": 0.0, "grad_norm": 0.0}, "warning"),
        ({"reward": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 1e-3}, "warning"),  # only the KL term has a gradient
        ({"reward": lambda step: min(0.2 + 0.02 * step, 1.0), "frac_reward_zero_std": 0.98}, "notice"),  # solved
        ({"reward": lambda step: max(1.0 - 0.02 * step, 0.0), "frac_reward_zero_std": 0.98}, "warning"),
        ({"reward": 0.1, "frac_reward_zero_std": 0.8, "grad_norm": 0.1}, None),  # a task that is hard
        ({"reward": 0.1, "grad_norm": lambda step: 0.0 if step % 2 else 0.1}, None),
    ],
)
def test_a_run_without_anything_to_learn_from(beside: dict[str, Any], severity: str | None) -> None:
    told = [one for one in found(60, **beside) if one[0] == "no_signal"]
    assert told == ([] if severity is None else [("no_signal", severity)])


def test_one_far_token_of_a_log_without_kl_is_a_notice_with_the_next_test() -> None:
    unlogged: dict[str, Number] = {"offpolicy/mismatch/kl_k3": None, "offpolicy/mismatch/prob_pearson": 0.999}
    stock = {"sampling/sampling_logp_difference/mean": 0.03, "sampling/sampling_logp_difference/max": 6.0}
    (finding,) = judged(40, unlogged | stock).findings
    assert finding.severity == "notice" and "trl_offpolicy.attach" in finding.fix and not finding.snippet
    (finding,) = judged(40, unlogged | stock | {"sampling/sampling_logp_difference/mean": 0.09}).findings
    assert finding.severity == "warning" and finding.snippet
    (finding,) = judged(40, unlogged | stock | {"sampling/sampling_logp_difference/max": 9.0}).findings
    assert finding.severity == "warning"
    # a KL that was logged decides by itself
    assert ("engine_mismatch", "critical") in found(40, offpolicy__mismatch__kl_k3=0.2)
