"""The command ``migrate``: recognition, errors, older names, wrong values, what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trl_offpolicy import presets
from trl_offpolicy.cli.commands import main
from trl_offpolicy.cli.migrate import migrated
from trl_offpolicy.migrate import NAMES, framework, migrate
from trl_offpolicy.presets.parsing import parse_correction

VERL = "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}}\n"


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_what_is_printed_is_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(write(tmp_path, VERL)), "algorithm.rollout_correction.rollout_is_threshold=3"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and yaml.safe_load(out)["offpolicy"]["correction"] == {
        "weight": {"type": "truncate", "max_weight": 3.0}
    }
    assert "# not carried" not in out and "# still to set:" in out


def test_the_output_option_writes_the_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "ours.yaml"
    assert main(["migrate", str(write(tmp_path, VERL)), "--output", str(target)]) == 0
    assert "offpolicy" in yaml.safe_load(target.read_text())
    assert capsys.readouterr().out.endswith(f"written: {target}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", "has none of their settings; name its framework with --framework NAME."),
        ("actor_rollout_ref: {rollout: {n: 2}}\nloss_fn: {use_cispo: true}\n", "has settings of verl and nemo-rl;"),
    ],
)
def test_an_unclear_file_asks_for_the_framework(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert main(["migrate", str(write(tmp_path, text))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert main(["migrate", str(write(tmp_path, text)), "--framework", "verl"]) == 0


def test_an_unknown_framework_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["migrate", str(write(tmp_path, VERL)), "--framework", "other"])
    assert stop.value.code == 2 and "invalid choice: 'other'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="framework must be one of"):
        migrate(write(tmp_path, VERL), name="other")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("verl", "actor_rollout_ref: {actor: {optim: {lr: fast}}}", "optim.lr must be a number, but got 'fast'."),
        ("verl", "algorithm: {rollout_correction: {rollout_is: word}}", "rollout_correction.rollout_is must be one of"),
        ("skyrl", "trainer: {epochs: many}", "trainer.epochs must be a number, but got 'many'."),
        ("slime", "tis_mode: cut\ntis_level: token", "tis_mode must be one of"),
        ("areal", "actor: {rejection_sampling: {upper: 0.5}}", "actor.rejection_sampling.upper must be above 1"),
        ("openrlhf", "rollout: {temperature: hot}", "rollout.temperature must be a number, but got 'hot'."),
        ("nemo-rl", "loss_fn: {token_level_loss: 3}", "loss_fn.token_level_loss must be True or False, but got 3."),
        ("prime-rl", "loss: {type: other}", "loss.type must be one of ['default', 'ipo'], but got 'other'."),
        ("ms-swift", "rollout_importance_sampling_mode: all", "rollout_importance_sampling_mode must be one of"),
        ("trl", "use_vllm: true\nvllm_importance_sampling_mode: all", "vllm_importance_sampling_mode must be"),
    ],
)
def test_a_wrong_value_names_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    assert main(["migrate", str(write(tmp_path, text)), "--framework", name]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


OLD = [
    ("verl", "actor_rollout_ref: {actor: {tis_imp_ratio_cap: 2.0}}", "{weight: {type: truncate, max_weight: 2.0}}",
     "rollout_is: token"),
    ("verl", "algorithm: {rollout_correction: {rollout_token_veto_threshold: 1e-4}}",
     "{keep: [{type: outlier_veto, low: 1.0e-4, high: null}]}", "seq_max_k2"),
    ("verl", "algorithm: {rollout_correction: {rollout_rs: geometric, rollout_rs_threshold: 2.0}}",
     "{keep: [{type: ratio_band, low: 0.5, high: 2.0}]}", "seq_mean_k1"),
    ("verl", "algorithm: {rollout_is: on, rollout_is_threshold: 2, rollout_is_level: sequence, rollout_is_mode: clip}",
     "{weight: {type: band, low: 0.5, high: 2.0, level: sequence}, "
     "keep: [{type: outlier_veto, low: 1.0e-4, high: null}]}",
     "algorithm.rollout_correction"),
    ("skyrl", "trainer: {algorithm: {use_tis: true, tis_imp_ratio_cap: 3.0}}",
     "{weight: {type: truncate, max_weight: 3.0}, measure_on: remaining}", "off_policy_correction.tis_ratio_type"),
    ("areal", "actor: {use_decoupled_loss: true, behave_imp_weight_cap: 5.0, behave_imp_weight_mode: token_truncate}",
     "{weight: {type: truncate, max_weight: 5.0}}", "actor.rejection_sampling"),
    ("openrlhf", "{enable_vllm_is_correction: true, vllm_is_truncated_threshold: 3.0}",
     "{weight: {type: truncate, max_weight: 3.0}}", "algo.advantage.is_correction_threshold"),
    ("prime-rl", "trainer: {loss: {ipo_mask_low: 0.1, ipo_mask_high: 0.1, kl_tau: 0.0}}",
     "{weight: {type: raw, ratio: current/sampling}, keep: [{type: divergence_band, statistic: binary_tv, "
     "level: token, high: 0.1, ratio: current/sampling}]}", "ipo_threshold"),
    ("trl", "{use_vllm: true, vllm_importance_sampling_cap: 3.0, vllm_importance_sampling_mode: token_mask}",
     "{weight: {type: band, low: null, high: 3.0}}", "vllm_importance_sampling_clip_max"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "correction", "successor"), OLD)
def test_an_older_option_names_its_successor(
    tmp_path: Path, name: str, text: str, correction: str, successor: str
) -> None:
    printed, lists = migrated(write(tmp_path, text), name=name)
    wanted = parse_correction(yaml.safe_load(correction), where="offpolicy.correction")
    assert parse_correction(yaml.safe_load(printed)["offpolicy"]["correction"], where="offpolicy.correction") == wanted
    assert any(successor in line for line in lists)


def test_an_older_option_acts_in_place_too(tmp_path: Path) -> None:
    path = write(tmp_path, OLD[1][1])
    found = presets.from_mapping({"framework": "verl", "file": str(path)}, where="offpolicy").correction
    assert found is not None and found.keep[0].name == "outlier_veto"


@pytest.mark.parametrize(
    ("spec", "message"),
    [({"file": "x.yaml"}, "offpolicy.framework must be one of"),
     ({"framework": "verl", "file": "x.yaml", "options": {"rollout_is": "token"}}, "both give the correction; set one"),
     ({"framework": "verl", "file": "absent.yaml"}, "file must be an existing file")],
)  # fmt: skip
def test_a_wrong_mapping_with_a_file_is_an_error(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        presets.from_mapping(spec, where="offpolicy")


@pytest.mark.parametrize("setting", ["rollout_iss: token", "rollout_is_treshold: 3", "anything: 1"])
def test_a_misspelt_option_is_an_error_in_place(tmp_path: Path, setting: str) -> None:
    path = write(tmp_path, f"algorithm: {{rollout_correction: {{rollout_is: token, {setting}}}}}")
    with pytest.raises(ValueError, match=r"rollout_correction\.\w+ of .* is unknown to this kit"):
        presets.from_mapping({"framework": "verl", "file": str(path)}, where="offpolicy")


def test_an_estimator_without_a_counterpart_is_listed(tmp_path: Path) -> None:
    _, lists = migrated(write(tmp_path, VERL + "trainer: {nnodes: 1}\n"), ["algorithm.adv_estimator=gae"])
    assert any(line.strip().startswith("algorithm.adv_estimator: adv_estimator 'gae' needs a critic") for line in lists)


def test_every_option_of_every_framework_is_a_real_one() -> None:
    """The tables name options that ``from_<framework>`` knows: an unknown one would raise UnknownOptionError."""
    for name in NAMES:
        for option in framework(name).options.values():
            try:
                presets.FRAMEWORKS[name](**{option: object()})
            except presets.UnknownOptionError as error:  # pragma: no cover
                raise AssertionError(f"{name}: {error}") from None
            except (ValueError, TypeError, NotImplementedError):
                pass
