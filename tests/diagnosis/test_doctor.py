"""The doctor on run folders of this kit and on logs of other frameworks, and its command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.cli import main
from trl_offpolicy.control import parse_control
from trl_offpolicy.diagnosis.doctor import examine, how_to_log, what_to_do
from trl_offpolicy.diagnosis.report.demo import DEMO_RUN
from trl_offpolicy.diagnosis.report.plots import figure_style
from trl_offpolicy.diagnosis.report.rollout_plots import draw_length_shares
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.antipatterns import find_antipatterns
from trl_offpolicy.run_folder.names import NAMES, frameworks, translate

MISMATCH = {"offpolicy/mismatch/kl_k3": 0.2, "offpolicy/mismatch/prob_pearson": 0.9}


def rows(metrics: dict[str, float], steps: int = 12) -> list[dict[str, Any]]:
    return [{"step": step, "reward": 0.5, "completions/mean_length": 20.0, **metrics} for step in range(1, steps + 1)]


def completion(length: int, *, kept: bool) -> dict[str, Any]:
    return {
        "step": 1,
        "completion_ids": list(range(length)),
        "completion_mask": [True] * length,
        "sampling_per_token_logps": [-1.0] * length,
        "old_per_token_logps": [-1.1] * length,
        "keep_mask": [kept] * length,
    }


def names(readings: dict[str, float], info: dict[str, Any] | None = None) -> list[str]:
    return [one.name for one in find_antipatterns(readings, info or {}, Thresholds())]


def test_a_faulty_run_gets_cause_fix_and_snippet(write_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(rows(MISMATCH))
    assert main(["doctor", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "verdict: critical" in out and "engine mismatch (branch A, since step 1)" in out
    assert "correlation of the two probabilities 0.9000 (10 % quantile of 12" in out
    assert "offpolicy: measure" in out and "float16" not in out  # no rounding comes to 0.2 nats


def test_json_says_the_same(write_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(rows(MISMATCH))
    assert main(["doctor", str(folder), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["verdict"] == "critical" and seen["findings"][0]["cause"] == "engine_mismatch"
    assert seen["findings"][0]["evidence"]["mismatch/kl_k3"] == pytest.approx(0.2)


def test_exit_status_for_scripts(write_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(rows({"offpolicy/mismatch/kl_k3": 0.03})))  # a notice
    assert main(["doctor", folder, "--fail-on", "warning"]) == 0
    assert main(["doctor", folder, "--fail-on", "notice"]) == 3
    assert main(["doctor", folder, "--fail-on", "notice", "--threshold", "kl_healthy=0.04"]) == 0
    capsys.readouterr()
    assert main(["doctor", folder, "--threshold", "kl_hihg=1"]) == 2
    error = capsys.readouterr().err
    assert "thresholds must be among" in error and "Did you mean 'kl_high'" in error
    assert main(["doctor", folder, "--threshold", "kl_high=high"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err
    assert main(["doctor", folder, "--with", "nobody"]) == 2
    assert "others must be among rldoctor, rlprobe, but got nobody" in capsys.readouterr().err
    assert main(["doctor", folder, "--threshold", "help"]) == 0
    assert "Liu 2026" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("framework", "metrics", "cause"),
    [
        ("verl", {"training/rollout_actor_probs_pearson_corr": 0.9, "rollout_corr/k3_kl": 0.1}, "engine_mismatch"),
        ("verl", {"rollout_corr/chi2_token": 0.5, "rollout_corr/rollout_is_eff_sample_size": 0.9}, "token_drift"),
        ("verl", {"rollout_corr/rollout_is_eff_sample_size": 0.2}, "weight_variance"),
        ("slime", {"train/mis_k3_kl": 0.1, "train/mis_kl": 0.09}, "engine_mismatch"),
        ("slime", {"train/mis_chi2_token": 1.5}, "weight_variance"),
        ("TRL", {"clip_ratio/region_mean": 0.4}, "clip_saturation"),
        ("SkyRL", {"policy/loss_metrics/clip_ratio": 0.4}, "clip_saturation"),
    ],
)
def test_logs_of_other_frameworks(tmp_path: Path, framework: str, metrics: dict[str, float], cause: str) -> None:
    loss = "regular" if framework == "SkyRL" else None
    path = tmp_path / "log.jsonl"
    lines = [{"step": s, "data": metrics} if framework == "verl" else {"step": s, **metrics} for s in range(1, 9)]
    path.write_text("\n".join(map(json.dumps, lines)))
    seen = examine(path, loss=loss)
    assert seen.frameworks[0] == framework and [one.cause for one in seen.diagnosis.findings] == [cause]
    assert examine(tmp_path, loss=loss).diagnosis == seen.diagnosis  # the only *.jsonl of the folder


def test_what_depends_on_the_loss_is_left_out_until_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps({"step": s, "data": {"actor/pg_clipfrac": 0.4}}) for s in range(1, 9)))
    assert main(["doctor", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "verdict: not judged" in out
        and "actor/pg_clipfrac is left out: what it counts depends on the policy loss" in out
    )
    assert main(["doctor", str(path), "--loss", "vanilla"]) == 0
    out = capsys.readouterr().out
    assert "saturated clip" in out and "left out" not in out
    assert main(["doctor", str(path), "--loss", "cispo"]) == 0
    assert "verdict: not judged" in capsys.readouterr().out
    assert main(["doctor", str(path), "--loss", "ppo-clip"]) == 2
    assert "loss must be among" in capsys.readouterr().err


def test_a_trainer_state_of_the_hugging_face_trainer(tmp_path: Path) -> None:
    state = {"log_history": [*rows({"clip_ratio/region_mean": 0.4}), {"step": 12, "train_runtime": 3.0}]}
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text(json.dumps(state))
    seen = examine(tmp_path)
    assert seen.metrics.parent.name == "checkpoint-12" and seen.diagnosis.findings[0].cause == "clip_saturation"


def test_our_own_names_win_over_translated_ones() -> None:
    row = translate({"offpolicy/mismatch/kl_k3": 0.1, "rollout_corr/k3_kl": 0.3, "train/mis_k3_kl": 0.2})
    assert row["offpolicy/mismatch/kl_k3"] == 0.1
    assert frameworks(["step", "loss"]) == ()


def test_every_translated_name_is_one_of_ours() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for table in NAMES.values():
        for name in (one.ours for names in table.values() for one in names):
            assert f"`{name.rsplit('/', 1)[-1]}`" in page or name in ("reward", "grad_norm"), name


def test_mismatch_behind_tool_output() -> None:
    tools = {"post_tool/kl_k3": 0.03, "post_tool/kl_k3_ratio": 5.0}
    name = "mismatch after tool calls averaged away"
    assert name in names(tools)
    assert name not in names({**tools, "post_tool/kl_k3_ratio": 2.0})
    assert name not in names({**tools, "post_tool/kl_k3": 0.001})  # too small to mean anything
    assert name not in names({})


def test_antipatterns() -> None:
    correction = "Correction(weight=TruncateWeight(max_weight=5.0, level='sequence', min_weight=None), keep=())"
    low = {"mismatch/ess_sequence": 0.3, "weight_applied/ess_sequence": 0.9}  # before the cap
    assert names(low, {"correction": correction}) == ["sequence weights because they sound principled"]
    assert names(low, {"correction": correction.replace("sequence'", "token'")}) == []
    assert names({"mismatch/ess_sequence": 0.6}, {"correction": correction}) == []
    earlier = {"weight_applied/ess_sequence": 0.3}  # an earlier log; weights by sequence: the same, capped
    assert names(earlier, {"correction": correction}) == ["sequence weights because they sound principled"]
    assert names({"total/kl_k3": 0.01}) == ["KL read as policy learning"]
    assert names({"total/kl_k3": 0.01, "mismatch/kl_k3": 0.01}) == []
    clipped = {"loss/clip_region_fraction": 0.3}
    assert names(clipped, {"objective": "Objective(policy_loss=PPOClip(low=0.2, high=0.4))"}) == [
        "clip widened against a high clip fraction"
    ]
    assert names(clipped, {"objective": "Objective(policy_loss=PPOClip(low=0.2, high=0.2))"}) == []
    assert names({"rollout/length_surge": 1.5}) == ["length surge taken for a reward issue"]
    assert names({"rollout/length_surge": 1.5}, {"control": repr(parse_control("act"))}) == []
    assert names({"mismatch/kl_k3": 0.01, "mismatch/logp_diff_max": 3.0}) == ["largest difference averaged away"]
    assert names({"mismatch/kl_k3": 0.01, "mismatch/prob_diff_max": 0.9}) == ["largest difference averaged away"]
    assert names({"mismatch/kl_k3": 0.2, "mismatch/logp_diff_max": 3.0}) == []


@pytest.mark.parametrize(("long_ones_dropped", "word"), [(True, "Long"), (False, "Short")])
def test_the_length_trap_is_shown_by_quarter(write_run: Any, long_ones_dropped: bool, word: str) -> None:
    part = [completion(n, kept=(n > 30) != long_ones_dropped or n % 4 == 0) for n in range(1, 61)]
    seen = examine(write_run(rows({"offpolicy/mismatch/kl_k3": 0.001}), [part]))
    assert seen.lengths is not None and seen.lengths.longest == (15, 30, 45, 60)
    (trap,) = [one for one in seen.antipatterns if one.name == "length trap"]
    assert trap.seen.startswith(word) and "up to 60" in trap.seen


def test_responses_of_one_length_are_one_group(write_run: Any) -> None:
    """Half of them end at the limit of 50 tokens: a border between quarters must not run through them."""
    part = [completion(n, kept=n < 50) for n in [*range(1, 31), *[50] * 30]]
    seen = examine(write_run(rows({"offpolicy/mismatch/kl_k3": 0.001}), [part]))
    assert seen.lengths is not None
    assert (seen.lengths.longest, seen.lengths.responses) == ((15, 30, 50), (15, 15, 30))
    assert seen.lengths.dropped == (0.0, 0.0, 1.0)
    with figure_style():
        (panel,) = draw_length_shares(seen.lengths)
    assert all(f">{text}<" in panel.svg for text in ("1-15", "16-30", "31-50", "30 responses"))


def test_no_length_trap_where_every_length_is_dropped_alike(write_run: Any) -> None:
    part = [completion(n, kept=n % 3 == 0) for n in range(1, 61)]
    seen = examine(write_run(rows({"offpolicy/mismatch/kl_k3": 0.001}), [part]))
    assert seen.antipatterns == () and seen.lengths is not None
    few = examine(write_run(rows({"offpolicy/mismatch/kl_k3": 0.001}), [part[:20]]))
    assert few.lengths is None


def test_second_opinions_of_the_real_packages(write_run: Any) -> None:
    """Entropy falling to nothing: rldoctor and rlprobe get our rows and see it, as this kit does."""
    pytest.importorskip("rl_doctor")
    pytest.importorskip("rlprobe")
    falling = [
        {**row, "entropy": 4.0 * math.exp(-step / 15), "loss": 0.0, "reward_std": 0.1, "grad_norm": 1.0}
        for step, row in enumerate(rows({"offpolicy/mismatch/kl_k3": 0.001}, steps=120))
    ]
    seen = examine(write_run(falling), others=("rldoctor", "rlprobe"))
    assert [one.cause for one in seen.diagnosis.findings] == ["entropy_collapse"]
    ours, theirs = seen.opinions
    assert ours.package == "rldoctor" and any("ntropy" in title for _, title, _ in ours.findings)
    assert theirs.package == "rlprobe" and any("ENTROPY_COLLAPSE" in title for _, title, _ in theirs.findings)


def test_rlprobe_reads_what_is_exported_and_not_the_run_folder(
    write_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rlprobe")
    from rlprobe.doctor.engine import diagnose as rlprobe_diagnose

    falling = [
        {**row, "entropy": 4.0 * math.exp(-step / 15), "loss": 0.0, "reward_std": 0.1, "grad_norm": 1.0}
        for step, row in enumerate(rows({"offpolicy/mismatch/kl_k3": 0.001}, steps=120))
    ]
    folder, exported = write_run(falling), tmp_path / "for_rlprobe"
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        rlprobe_diagnose(folder)
    assert main(["doctor", str(folder), "--export-rlprobe", str(exported)]) == 0
    assert str(exported) in capsys.readouterr().err
    found = rlprobe_diagnose(exported)
    assert "ENTROPY_COLLAPSE" in [one.signature_id for one in found]
    (direct,) = examine(folder, others=("rlprobe",)).opinions
    assert [title.split(":")[0] for _, title, _ in direct.findings] == [one.signature_id for one in found]


STOCK_TRL = {
    "sampling/sampling_logp_difference/mean": 1.7,
    "sampling/sampling_logp_difference/max": 12.0,
    "sampling/importance_sampling_ratio/mean": 0.21,
    "sampling/importance_sampling_ratio/min": 0.0,
    "sampling/importance_sampling_ratio/max": 2.9,
    "clip_ratio/region_mean": 0.0,
    "completions/mean_length": 200.0,
    "entropy": 0.6,
    "reward": 0.3,
}


def trainer_state(folder: Path, metrics: dict[str, float]) -> Path:
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": step, **metrics} for step in range(1, 21)]}))
    return path


def test_stock_trl_with_a_broken_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mean |log-ratio| of 1.7 and mean weight 0.21: at least 0.88 nats of KL, and the fix in GRPOConfig's fields."""
    path = trainer_state(tmp_path, STOCK_TRL)
    seen = examine(path)
    (finding,) = seen.diagnosis.findings
    assert (finding.cause, finding.severity) == ("engine_mismatch", "critical")
    assert finding.symptom.startswith(
        "KL k3 at equal weights, at least 0.8827 (bound from the means of 20 steps; limit"
    )
    assert seen.advice is not None and seen.advice.where.startswith("GRPOConfig")
    assert seen.advice.yaml.splitlines() == [  # no rounding comes to 0.88 nats; weights of 1, so that TRL logs it
        "vllm_importance_sampling_correction: true",
        "vllm_importance_sampling_mode: token_truncate",
        "vllm_importance_sampling_clip_min: 0.999999",
        "vllm_importance_sampling_clip_max: 1.0",
        "off_policy_mask_threshold: null",
    ]
    assert main(["doctor", str(path), "--fail-on", "notice"]) == 3
    assert "vllm_importance_sampling_correction" in capsys.readouterr().out
    # the mean weight is that after cap or mask: alone it says what they take away, not that the engine is at fault
    only = {key: value for key, value in STOCK_TRL.items() if "logp_difference" not in key}
    (finding,) = examine(trainer_state(tmp_path, only)).diagnosis.findings
    assert (finding.cause, finding.severity) == ("weight_variance", "notice")
    assert finding.evidence == {"capped/weight_mean": pytest.approx(0.79)}


def test_not_judged_has_an_exit_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trainer_state(tmp_path, {"reward": 0.3, "clip_ratio/region_mean": 0.0, "entropy": 0.6})
    assert examine(path).diagnosis.verdict == "not judged"
    assert main(["doctor", str(path)]) == 0
    assert "verdict: not judged  no distance between sampler and trainer was logged" in capsys.readouterr().out
    assert [main(["doctor", str(path), "--fail-on", severity]) for severity in ("notice", "critical")] == [4, 4]
    capsys.readouterr()
    assert main(["doctor", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "not judged"
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "with 4 if the verdict is 'not judged'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("metrics", "found", "key"),
    [
        ({"policy/rollout_train_logprobs_abs_diff_max": 9.0, "policy/rollout_train_logprobs_abs_diff_mean": 0.02},
         ("engine_mismatch", "warning"), "trainer.algorithm.off_policy_correction.tis_ratio_type"),
        ({"actor/ppo_kl": 0.08}, ("policy_staleness", "warning"), "actor_rollout_ref.actor.ppo_epochs"),
        ({"train/ppo_kl": 0.08}, ("policy_staleness", "warning"), "num_steps_per_rollout"),
        ({"train/train_rollout_logprob_abs_diff": 0.5}, ("engine_mismatch", "critical"), "use_tis"),
        ({"policy/loss_metrics/token_mask_ratio": 0.4}, ("correction_limit", "critical"),
         "trainer.algorithm.off_policy_correction.tis_ratio_type"),
        ({"rollout_corr/rollout_is_oob_ratio": 0.4}, ("correction_limit", "critical"),
         "algorithm.rollout_correction.rollout_is"),
        ({"rollout_corr/kl": 0.08}, ("engine_mismatch", "critical"), "actor_rollout_ref.rollout.dtype"),
    ],
)  # fmt: skip
def test_what_only_others_log_is_judged_and_mended_in_their_keys(
    tmp_path: Path, metrics: dict[str, float], found: tuple[str, str], key: str
) -> None:
    import yaml

    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps({"step": step, **metrics}) for step in range(1, 9)))
    seen = examine(path)
    assert [(one.cause, one.severity) for one in seen.diagnosis.findings] == [found]
    assert seen.advice is not None
    place = yaml.safe_load(seen.advice.yaml)
    for part in key.split("."):
        assert part in place, (key, seen.advice.yaml)
        place = place[part]


def test_the_findings_of_one_run_get_one_configuration(write_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stale = {"offpolicy/staleness/kl_k3": 0.2, "offpolicy/mismatch/chi2_token": 0.5, "offpolicy/mismatch/tv": 0.2}
    assert main(["doctor", str(write_run(rows(MISMATCH | stale)))]) == 0
    out = capsys.readouterr().out
    assert out.count("yaml ") == 1 and out.count("offpolicy: measure") == 1
    assert "later" in out and "policy staleness: offpolicy: paper/geometric-mask" in out
    assert "bias and variance: total variation 0.2000, token chi-square 0.5000." in out


def test_a_package_that_is_missing_is_named(
    write_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rl_doctor", None)
    assert main(["doctor", str(write_run(rows(MISMATCH))), "--with", "rldoctor"]) == 1
    assert "rl_doctor is not installed" in capsys.readouterr().err


def test_what_to_judge_again_follows_its_label(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(DEMO_RUN)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "then judge again: " in text and "then Then" not in text


def verl_log(folder: Path, metrics: dict[str, float], steps: int = 12) -> Path:
    path = folder / "verl.jsonl"
    path.write_text("".join(json.dumps({"step": step, "data": metrics}) + "\n" for step in range(steps)))
    return path


def test_no_precision_is_advised_where_the_probabilities_do_not_correlate(tmp_path: Path) -> None:
    """Other positions on the two sides (verl-omni 231): a correlation of 0.13 is no rounding."""
    key = "training/rollout_actor_probs_pearson_corr"
    found = examine(verl_log(tmp_path, {key: 0.133, "actor/pg_clipfrac": 0.0}))
    assert found.advice is not None and "float16" not in found.advice.yaml
    rounded = examine(verl_log(tmp_path, {key: 0.94, "actor/pg_clipfrac": 0.0}))
    assert rounded.advice is not None and "float16" in rounded.advice.yaml


def test_one_token_of_a_healthy_mixture_of_experts_asks_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of a healthy run of verl (its issue 7242): no setting is advised for a single token."""
    path = verl_log(
        tmp_path,
        {
            "training/rollout_probs_diff_max": 0.611,
            "training/rollout_actor_probs_pearson_corr": 0.9925,
            "rollout_corr/k3_kl": 0.0052,
        },
    )
    seen = examine(path)
    assert seen.diagnosis.verdict == "notice" and seen.advice is None
    assert what_to_do(seen).startswith("Nothing yet") and seen.as_dict()["findings"][0]["snippet"] == ""
    assert main(["doctor", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "fix Nothing yet: KL k3 and the correlation are healthy" in printed and "settings (" not in printed


@pytest.mark.parametrize(
    ("metrics", "setting"),
    [
        ({"actor/ppo_kl": 0.001, "actor/entropy": 0.4}, "actor_rollout_ref.rollout.calculate_log_probs=True"),
        ({"train/ppo_kl": 0.001, "train/entropy_loss": 0.4}, "--get-mismatch-metrics"),
        ({"clip_ratio/region_mean": 0.0, "entropy": 0.4}, "vllm_importance_sampling_correction=True"),
        ({"rollout_corr/k3_kl": 0.001}, ""),
        (
            {"sampling/sampling_logp_difference/mean": 0.02, "sampling/sampling_logp_difference/max": 3.0},
            "trl_offpolicy.attach",
        ),
    ],
)
def test_what_was_not_judged_can_be_logged(tmp_path: Path, metrics: dict[str, float], setting: str) -> None:
    told = how_to_log(examine(verl_log(tmp_path, metrics)))
    assert (setting in told) and bool(told) == bool(setting)


def test_a_rate_that_was_rounded_away_is_not_halved(tmp_path: Path) -> None:
    """verl's console prints three decimals: 1e-6 is 0.000."""
    lines = (
        f"step:{step} - actor/lr:0.000 - actor/grad_norm:1.0 - critic/score/mean:{0.9 if step < 40 else 0.1}\n"
        for step in range(60)
    )
    (tmp_path / "verl.log").write_text("".join(lines))
    advice = examine(tmp_path / "verl.log").advice
    assert advice is not None and advice.yaml == "" and "was not logged" in advice.later[0]
