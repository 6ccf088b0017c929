"""The decision tree: each branch is taken by its own symptom, and only by it."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.thresholds import Thresholds, thresholds_from
from trl_offpolicy.diagnosis.verdict.judge import diagnose
from trl_offpolicy.diagnosis.verdict.tree import TREE
from trl_offpolicy.run_folder.run_data import MetricsLog

HEALTHY = {
    "mismatch/kl_k3": 0.001,
    "mismatch/prob_pearson": 0.999,
    "mismatch/log_ppl_diff": 0.001,
    "mismatch/prob_diff_max": 0.1,
    "mismatch/chi2_token": 0.01,
    "mismatch/chi2_sequence": 0.3,
    "mismatch/nonfinite_fraction": 0.0,
    "staleness/kl_k3": 0.001,
    "weight_applied/ess_token": 0.98,
    "loss/clip_region_fraction": 0.02,
    "loss/entropy": 1.0,
    "rollout/response_length_mean": 100.0,
}


def log(steps: int = 12, **changed: Any) -> MetricsLog:
    """Healthy rows with some metrics replaced: a number, or a function of the step, or None = not logged.

    ``__`` stands for ``/``.
    """
    metrics = HEALTHY | {name.replace("__", "/"): value for name, value in changed.items()}
    metrics = {name: value for name, value in metrics.items() if value is not None}
    rows = [
        {"step": float(s), **{f"offpolicy/{k}": v(s) if callable(v) else v for k, v in metrics.items()}}
        for s in range(1, steps + 1)
    ]
    return MetricsLog(tuple(rows))


def causes(found: MetricsLog) -> list[tuple[str, str]]:
    return [(one.cause, one.severity) for one in diagnose(found).findings]


@pytest.mark.parametrize(
    ("lost", "critical"),
    [
        (lambda _step: True, True),
        (lambda step: step > 9, True),
        (lambda step: step > 10, False),
        (lambda step: step < 12, False),
        (lambda step: step % 3 == 0, False),
    ],
)
def test_a_reward_that_is_no_number_up_to_the_last_step_is_critical(lost: Any, critical: bool) -> None:
    rows = tuple({**row, "reward": math.nan if lost(row["step"]) else 0.5} for row in log().rows)
    found = [(one.cause, one.severity) for one in diagnose(MetricsLog(rows)).findings]
    assert found == ([("no_signal", "critical")] if critical else [])


def test_two_steps_without_a_reward_are_all_there_are() -> None:
    rows = tuple({**row, "reward": math.nan} for row in log(2).rows)
    (finding,) = diagnose(MetricsLog(rows)).findings
    assert finding.severity == "critical" and "reward functions" in finding.fix
    assert "NaN or infinite 2.0000 (of 2 steps" in finding.symptom


def test_a_healthy_run_is_ok() -> None:
    seen = diagnose(log())
    assert seen.findings == () and seen.verdict == "ok" and seen.steps == (1, 12)
    assert seen.line() == "ok  KL k3 0.001 nats per token" and seen.unknown == ("noise floor",)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"mismatch__prob_pearson": 0.94}, ("engine_mismatch", "critical")),
        ({"mismatch__kl_k3": 0.06}, ("engine_mismatch", "critical")),
        ({"mismatch__prob_pearson": 0.98}, ("engine_mismatch", "notice")),
        ({"mismatch__kl_k3": 0.03}, ("engine_mismatch", "notice")),
        ({"mismatch__prob_diff_max": 0.6}, ("engine_mismatch", "notice")),
        ({"mismatch__prob_diff_max": 0.6, "mismatch__kl_k3": None}, ("engine_mismatch", "warning")),
        ({"mismatch__prob_diff_max": 0.6, "mismatch__prob_pearson": 0.98}, ("engine_mismatch", "warning")),
        ({"mismatch__log_ppl_diff": 0.2}, ("engine_mismatch", "warning")),
        ({"mismatch__log_ppl_diff": -0.2}, ("engine_mismatch", "warning")),
        ({"mismatch__nonfinite_fraction": 0.01}, ("nonfinite", "warning")),
        ({"mismatch__kl_k3": math.inf}, ("nonfinite", "warning")),
        ({"mismatch__kl_k3": lambda step: math.nan if step > 9 else 0.001}, ("nonfinite", "warning")),
        ({"mismatch__nonfinite_fraction": 1.0}, ("engine_logprobs_missing", "critical")),
        ({"total__nonfinite_fraction": 1.0}, ("engine_logprobs_missing", "critical")),
        ({"staleness__kl_k3": 0.06}, ("policy_staleness", "warning")),
        ({"staleness__kl_k3": 0.03}, ("policy_staleness", "notice")),
        ({"rollout__version_lag_mean": 2.0, "total__kl_k3": 0.08}, ("policy_staleness", "warning")),
        ({"mismatch__chi2_token": 0.5}, ("token_drift", "warning")),
        ({"mismatch__chi2_token": 1.5}, ("weight_variance", "critical")),
        ({"weight_applied__ess_token": 0.4}, ("weight_variance", "critical")),
        ({"mismatch__chi2_sequence": 50.0}, ("sequence_variance", "notice")),
        ({"mismatch__ess_sequence": 0.4}, ("sequence_variance", "notice")),
        ({"total__ess_sequence": 0.4}, ("sequence_variance", "notice")),
        ({"mismatch__confident_disagreement_fraction": 0.006}, ("engine_mismatch", "notice")),
        ({"noise_floor__kl_k3": 0.03}, ("dropout", "warning")),
        ({"noise_floor__kl_k3": 0.06}, ("dropout", "critical")),
        ({"weight_applied__ess_sequence": 0.4}, ("weight_variance", "critical")),
        ({"loss__clip_region_fraction": 0.3}, ("clip_saturation", "notice")),
        ({"loss__clip_region_fraction": lambda step: 0.2 + 0.02 * step}, ("clip_saturation", "warning")),
        ({"rollout__response_length_mean": lambda step: 100.0 + 5 * step}, ("length_surge", "critical")),
        ({"rollout__length_surge": 1.3}, ("length_surge", "critical")),
    ],
)
def test_each_symptom_leads_to_its_cause(changed: dict[str, Any], expected: tuple[str, str]) -> None:
    assert causes(log(**changed)) == [expected]


def test_a_moderate_drift_with_a_low_ess_is_variance_not_drift() -> None:
    assert causes(log(mismatch__chi2_token=0.5, weight_applied__ess_token=0.4)) == [("weight_variance", "critical")]


def test_a_distance_at_the_noise_floor_is_no_engine_mismatch() -> None:
    noisy = {"mismatch__kl_k3": 0.03, "mismatch__prob_pearson": 0.9}
    assert causes(log(**noisy, noise_floor__kl_k3=0.019)) == []
    assert causes(log(**noisy, noise_floor__kl_k3=0.01)) == [("engine_mismatch", "critical")]


def test_a_noise_floor_that_is_a_fault_is_not_silent() -> None:
    """Attention dropout of 0.1: the trainer differs from itself by more than engines may differ."""
    seen = diagnose(log(mismatch__kl_k3=0.179, mismatch__prob_pearson=0.9, noise_floor__kl_k3=0.12))
    assert [(one.cause, one.severity) for one in seen.findings] == [("dropout", "critical")]


def test_total_without_lag_is_not_called_staleness() -> None:
    assert causes(log(total__kl_k3=0.08)) == []


def test_only_the_window_counts_and_since_names_the_first_step_of_the_stretch() -> None:
    late = log(60, mismatch__kl_k3=lambda step: 0.09 if 5 <= step <= 10 or step >= 45 else 0.001)
    (finding,) = diagnose(late).findings
    assert finding.since == 45 and finding.evidence == {
        "mismatch/kl_k3": pytest.approx(0.09 * 16 / 20 + 0.001 * 4 / 20)
    }
    assert causes(log(60, mismatch__kl_k3=lambda step: 0.09 if step <= 30 else 0.001)) == []


def test_a_single_spike_of_a_maximum_is_not_averaged_away() -> None:
    spike = log(20, mismatch__prob_diff_max=lambda step: 0.9 if step == 10 else 0.05)
    assert causes(spike) == [("engine_mismatch", "notice")]


def test_one_odd_batch_does_not_break_the_correlation() -> None:
    dips = {3: 0.94, 15: 0.93}
    one = log(20, mismatch__prob_pearson=lambda step: 0.94 if step == 3 else 0.999)
    assert causes(one) == []
    (finding,) = diagnose(log(20, mismatch__prob_pearson=lambda step: dips.get(step, 0.999))).findings
    assert finding.severity == "critical"
    assert (
        finding.symptom == "correlation of the two probabilities 0.9400 (10 % quantile of 20 steps; limit 0.9500, "
        "Liu 2026)"
    )


def test_a_mean_that_scatters_over_the_limit_is_no_finding() -> None:
    """Without a logged interval, that of the scatter between the steps counts: one step of 20 at 0.7 makes 0.06."""
    clip = {"loss__clip_region_fraction": lambda step: 0.02 + 4 * (step == 10)}
    seen = diagnose(log(20, **clip))
    assert seen.findings == () and seen.readings["loss/clip_region_fraction"] == pytest.approx(0.22)
    assert seen.readings["loss/clip_region_fraction_ci95"] == pytest.approx(2.093 * 4 * 0.05**0.5 / 20**0.5, rel=1e-3)


def test_only_the_mean_of_the_log_ratio_bounds_the_kl() -> None:
    """E|l| = 1.7 alone proves a KL of e^-1.7 - 1 + 1.7; a small largest value proves health."""

    def only(**values: float) -> MetricsLog:
        return MetricsLog(
            tuple({"step": float(s)} | {f"offpolicy/mismatch/{k}": v for k, v in values.items()} for s in range(8))
        )

    (finding,) = diagnose(only(logp_diff_mean=1.7)).findings
    assert finding.severity == "critical" and finding.evidence == {
        "atleast/mismatch/kl_k3": pytest.approx(math.exp(-1.7) - 1 + 1.7)
    }
    healthy = diagnose(only(logp_diff_mean=0.01, logp_diff_max=0.5))
    assert healthy.verdict == "ok" and healthy.line() == "ok  KL k3 at most 0.00297 nats per token"
    open_ = diagnose(only(logp_diff_mean=0.02, logp_diff_max=4.0))
    assert open_.verdict == "not judged" and open_.line() == (
        "not judged  KL k3 lies between 0.000199 and 0.2480 nats per token"
    )
    assert diagnose(only(logp_diff_mean=0.02)).line() == (
        "not judged  KL k3 is at least 0.000199 nats per token, and nothing bounds it from above"
    )


def test_a_sync_that_rounds_most_of_a_step_away() -> None:
    assert causes(log(rollout__sync_visible_fraction=0.6)) == []
    for kl, severity in ((0.0016, "notice"), (0.022, "warning")):
        found = causes(log(rollout__sync_visible_fraction=0.05, mismatch__kl_k3=kl))
        assert ("sync_rounding", severity) in found, kl


@pytest.mark.parametrize(
    "apart",
    [
        {"mismatch__prob_pearson": 0.94},
        {"mismatch__log_ppl_diff": 0.2},
        {"mismatch__kl_k3_ci95": 0.1, "total__kl_k3_ci95": 0.1},
    ],
    ids=["correlation", "perplexity", "a wide interval"],
)
def test_rounding_is_a_warning_where_engine_and_trainer_are_or_may_be_apart(apart: dict[str, float]) -> None:
    found = causes(log(rollout__sync_visible_fraction=0.05, mismatch__kl_k3=0.001, **apart))
    assert ("sync_rounding", "warning") in found and ("sync_rounding", "notice") not in found


@pytest.mark.parametrize("more", [{}, {"total__kl_k3": 0.0016}, {"total__kl_k3": 0.0016, "noise_floor__kl_k3": 0.001}])
def test_rounding_that_the_engine_survives_asks_for_no_change(more: dict[str, float]) -> None:
    """Measured on an H200: a bfloat16 engine beside float32 weights sees 4.7 % of a step of 1e-6, at KL k3 0.0016."""
    (finding,) = diagnose(log(rollout__sync_visible_fraction=0.0466, mismatch__kl_k3=0.0016, **more)).findings
    assert finding.instead.startswith("Nothing yet") and finding.fix == finding.instead and not finding.snippet


def test_a_negative_kl_within_its_interval_is_chance() -> None:
    assert causes(log(mismatch__kl_k1=-0.004)) == [("engine_mismatch", "notice")]
    assert causes(log(mismatch__kl_k1=-0.004, mismatch__kl_k1_ci95=0.005)) == []


def test_an_entropy_of_zero_was_not_measured() -> None:
    assert causes(log(loss__entropy=0.0)) == []


def test_a_queue_adds_its_lag_to_that_of_several_steps_on_one_generation() -> None:
    minibatches = {"rollout__version_lag_mean": 7.5, "rollout__version_lag_max": 15.0}
    assert causes(log(**minibatches)) == [("policy_staleness", "notice")]  # old tokens, but no queue
    queue = {"rollout__version_lag_mean": 11.5, "rollout__version_lag_max": 15.0}
    queue["weight_applied__ess_token"] = math.nan
    assert diagnose(log(**queue)).readings["uncorrected/version_lag"] == 8.0
    assert causes(log(**queue)) == [("policy_staleness", "warning")]
    assert causes(log(**queue | {"weight_applied__ess_token": 0.9})) == [("policy_staleness", "notice")]


def test_without_log_probs_nothing_else_is_named() -> None:
    """A correlation of no token is 0: that says nothing about the engine's precision."""
    empty = {"mismatch__prob_pearson": 0.0, "mismatch__kl_k3": 0.06, "mismatch__chi2_token": 5.0}
    seen = diagnose(log(mismatch__nonfinite_fraction=1.0, **empty, rollout__length_surge=1.5))
    assert [one.cause for one in seen.findings] == ["engine_logprobs_missing", "length_surge"]


def test_nonfinite_values_and_missing_metrics_are_left_out() -> None:
    rows = ({"step": 1.0, "loss": 0.1}, {"step": 2.0, "offpolicy/mismatch/kl_k3": math.nan})
    seen = diagnose(MetricsLog(rows))
    assert seen.findings == () and "agreement of engine and trainer" in seen.unknown
    assert seen.verdict == "not judged" and seen.line().startswith("not judged  no distance")
    # what is found all the same is said, and the agreement is still listed as unknown
    clipped = diagnose(MetricsLog(tuple({**row, "offpolicy/loss/clip_region_fraction": 0.4} for row in rows)))
    assert clipped.verdict == "notice" and "agreement of engine and trainer" in clipped.unknown


def test_what_the_interval_leaves_open_is_no_finding() -> None:
    """20 rows of KL 0.06 +- 0.02 make a mean of 0.06 +- 0.0045; a single one may as well lie below 0.05."""
    noisy = {"mismatch__kl_k3": 0.06, "mismatch__kl_k3_ci95": 0.02}
    assert causes(log(1, **noisy)) == [("engine_mismatch", "notice")]
    (finding,) = diagnose(log(20, **noisy)).findings
    assert finding.severity == "critical"
    assert "KL k3 at equal weights 0.06 ± 0.004 (mean of 20 steps; limit 0.05, Liu 2026)" in finding.symptom
    wide = {"mismatch__kl_k3": 0.06, "mismatch__kl_k3_ci95": lambda step: math.nan if step == 3 else 0.5}
    assert causes(log(20, **wide)) == [("engine_mismatch", "critical")]  # an interval is missing: the mean decides
    assert causes(log(20, weight_applied__ess_token=0.45, weight_applied__ess_token_ci95=0.3)) == []


def test_the_worst_comes_first() -> None:
    seen = diagnose(log(mismatch__nonfinite_fraction=0.1, staleness__kl_k3=0.03, mismatch__kl_k3=0.2))
    assert [one.severity for one in seen.findings] == ["critical", "warning", "notice"]
    assert seen.verdict == "critical" and "engine mismatch" in seen.line() and "(+2 more)" in seen.line()


def test_length_surge_compares_with_a_hundred_steps_before() -> None:
    slow = log(300, rollout__response_length_mean=lambda step: 100.0 * 1.0015**step)
    assert causes(slow) == []  # 16 % in 100 steps, 57 % over the whole run
    assert causes(log(300, rollout__response_length_mean=lambda step: 100.0 * 1.0025**step)) != []


def test_limits_can_be_moved() -> None:
    strict = thresholds_from({"kl_high": 0.0009, "kl_healthy": 0.0005})
    assert diagnose(log(), strict).verdict == "critical"
    with pytest.raises(ValueError, match=r"kl_healthy must not exceed kl_high"):
        thresholds_from({"kl_high": 0.001})
    with pytest.raises(ValueError, match=r"thresholds must be among .*, but got kl_low"):
        thresholds_from({"kl_low": 0.1})
    with pytest.raises(ValueError, match=r"ess_healthy must be a positive number, but got -1"):
        replace(Thresholds(), ess_healthy=-1)


def test_every_branch_has_a_cause_a_fix_and_known_thresholds() -> None:
    limits = {one.name for one in fields(Thresholds)}
    for step in TREE:
        assert step.cause in CAUSES
        for symptom in (*step.any_of, *step.all_of, *step.unless):
            assert isinstance(symptom.threshold, float) or symptom.threshold in limits
    for one in fields(Thresholds):
        assert one.metadata["meaning"] and one.metadata["source"]
    for cause in CAUSES.values():
        assert cause.confirm and cause.fix


@pytest.mark.parametrize("name", [name for name, cause in CAUSES.items() if cause.snippet])
def test_every_snippet_is_a_configuration_that_loads(name: str, tmp_path: Path) -> None:
    from trl_offpolicy.trl.config import OffPolicyGRPOConfig, resolve_preset

    settings = yaml.safe_load(CAUSES[name].snippet)
    assert len(settings) == len(CAUSES[name].snippet.splitlines())  # one key a line, none inside a comment
    assert not re.search("#.*: (true|false|[0-9])", CAUSES[name].snippet)
    assert settings.pop("lora_dropout", 0.0) == 0.0  # of TRL's ModelConfig, as recipes/grpo.py reads it
    args = OffPolicyGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{"bf16": False, **settings})
    assert resolve_preset(args).objective is not None


def test_a_metric_of_one_step_is_not_called_a_mean_of_all() -> None:
    key = "offpolicy/rollout/sync_visible_fraction"
    log = MetricsLog(tuple({"step": float(step), **({key: 0.2} if step == 2 else {})} for step in range(1, 4)))
    (finding,) = diagnose(log).findings
    assert "0.2000 (one step; limit" in finding.symptom
    assert finding.severity == "warning"  # nothing says that the engine agrees with the trainer all the same
