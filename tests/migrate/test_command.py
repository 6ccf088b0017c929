"""The command ``migrate``: recognition, errors, older names, wrong values, what it prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    source = str(write(tmp_path, VERL))
    assert main(["migrate", source]) == 0
    printed = capsys.readouterr().out
    assert main(["migrate", source, "--output", str(target)]) == 0
    assert target.read_text() == printed and "\n# still to set:\n" in printed  # the lists too, as comments
    assert capsys.readouterr().out.endswith(f"written: {target}\n")


def test_what_comes_from_this_machine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    script = write(tmp_path, "python3 -m verl.trainer.main_ppo data.train_files=$HOME/a.parquet", "run.sh")
    printed, lists = migrated(script)
    assert yaml.safe_load(printed)["train_files"] == ["/home/me/a.parquet"]
    assert "  data.train_files -> train_files: [/home/me/a.parquet] (from $HOME of this machine)" in lists


def test_variables_of_a_yaml_file_are_those_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("OURS", "/here")  # may be another one where the file is used
    text = (
        VERL + 'data: {train_files: "${oc.env:HOME}/a.parquet"}\ntrainer: {default_local_dir: "${oc.env:OURS}/run"}\n'
    )
    printed, lists = migrated(write(tmp_path, text))
    fields = yaml.safe_load(printed)
    assert fields["train_files"] == ["/home/me/a.parquet"] and fields["output_dir"] == "TO_SET"
    assert "  data.train_files -> train_files: [/home/me/a.parquet] (from $HOME of this machine)" in lists


def test_sizes_that_do_not_divide_are_to_be_set(tmp_path: Path) -> None:
    sizes = "data: {train_batch_size: 250}\ntrainer: {nnodes: 1, n_gpus_per_node: 3}\n"
    printed, lists = migrated(write(tmp_path, ACTOR % "lr: 1e-6" + sizes), name="verl")
    fields, text = yaml.safe_load(printed), "\n".join(lists)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    assert all(fields[name] == "TO_SET" for name in names) and "do not divide among 3 devices" in text
    assert all(f"# to set, {name}: " in printed and f"  {name}: " in text for name in names)


def test_overrides_stand_before_and_behind_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(write(tmp_path, VERL)), str(tmp_path / "ours.yaml")
    cap = "algorithm.rollout_correction.rollout_is_threshold"
    for words in (
        [source, "--output", target, f"{cap}=3"],
        ["--output", target, source, f"{cap}=3"],
        [source, f"{cap}=2.5", "--output", target, f"{cap}=3"],
    ):
        assert main(["migrate", *words]) == 0
        assert yaml.safe_load(Path(target).read_text())["offpolicy"]["correction"]["weight"]["max_weight"] == 3.0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["migrate", source, "--outptu", target])
    assert "must be one of --help, but got --outptu. Did you mean '--output'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", "has none of their settings; name its framework with --framework NAME."),
        ("algorithm: {adv_estimator: rloo}\nloss_fn: {use_cispo: true}\n", "has settings of verl and nemo-rl;"),
    ],
)
def test_an_unclear_file_asks_for_the_framework(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert main(["migrate", str(write(tmp_path, text))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    known = write(tmp_path, f"{text}actor_rollout_ref: {{rollout: {{n: 2}}}}\n")
    assert main(["migrate", str(known), "--framework", "verl"]) == 0


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


@pytest.mark.parametrize(
    ("framework", "name", "text", "missing"),
    [
        ("verl", "a.yaml", "actor_rollout_ref: {rollout: {n: 8, name: vllm}}", ""),
        ("verl", "b.yaml", "actor_rollout_ref: {rollout: {n: 8}, actor: {ppo_mini_batch_size: 32}}",
         "actor_rollout_ref.actor.ppo_mini_batch_size: not all batch sizes are known; give data.train_batch_size=..."),
        ("skyrl", "c.yaml", "generator: {n_samples_per_prompt: 8}", ""),
        ("slime", "d.sh", "python3 train.py --n-samples-per-prompt 8 --use-tis --micro-batch-size 2",
         "--micro-batch-size: prompts, responses and devices are not all known"),
        ("areal", "e.yaml", "gconfig: {n_samples: 8}\nactor: {ppo_n_minibatches: 2}",
         "actor.ppo_n_minibatches: prompts, responses and devices are not all known"),
        ("openrlhf", "f.sh", "python3 -m openrlhf.cli.train_ppo_ray --rollout.n_samples_per_prompt 8", ""),
        ("nemo-rl", "g.yaml", "grpo: {num_generations_per_prompt: 8}", ""),
        ("prime-rl", "h.toml", "[orchestrator]\ngroup_size = 8\n", ""),
    ],
)  # fmt: skip
def test_the_responses_of_a_prompt_are_carried_without_the_other_sizes(
    tmp_path: Path, framework: str, name: str, text: str, missing: str
) -> None:
    printed, lists = migrated(write(tmp_path, text, name), name=framework)
    assert yaml.safe_load(printed)["num_generations"] == 8
    assert missing in " ".join(" ".join(lists).split()) and "unknown to this kit" not in " ".join(lists)


@pytest.mark.parametrize(
    ("framework", "name", "text", "generations"),
    [
        ("verl", "a.yaml", "actor_rollout_ref: {rollout: {name: vllm}}", 1),
        ("areal", "e.yaml", "gconfig: {max_new_tokens: 100}", 1),
        ("openrlhf", "f.sh", "python3 -m openrlhf.cli.train_ppo_ray --rollout.max_new_tokens 100", 1),
        ("prime-rl", "h.toml", "[orchestrator]\nseq_len = 100\n", 1),
        ("skyrl", "c.yaml", "generator: {sampling_params: {temperature: 0.9}}", 5),
    ],
)  # fmt: skip
def test_a_framework_s_default_responses_of_a_prompt_do_not_become_trls(
    tmp_path: Path, framework: str, name: str, text: str, generations: int
) -> None:
    printed, lists = migrated(write(tmp_path, text, name), name=framework)
    said = "(its default): 1 response of a prompt, and GRPO needs at least 2: set num_generations"
    assert (said in " ".join(" ".join(lists).split())) == (generations == 1)
    assert yaml.safe_load(printed)["num_generations"] == ("TO_SET" if generations == 1 else generations)


def test_areals_default_learning_rate_does_not_become_trls(tmp_path: Path) -> None:
    printed, _ = migrated(write(tmp_path, "actor: {optimizer: {beta1: 0.9}}", "e.yaml"), name="areal")
    assert yaml.safe_load(printed)["learning_rate"] == 1e-3


def test_a_setting_is_never_suggested_for_itself(tmp_path: Path) -> None:
    """One that acts together with others only, here the devices without any batch size."""
    _, lists = migrated(write(tmp_path, VERL + "trainer: {nnodes: 2}\n"))
    (line,) = [line for line in lists if "trainer.nnodes" in line]
    assert line.strip() == "trainer.nnodes: it acts only together with settings that are not given here"


@pytest.mark.parametrize(
    ("framework", "name", "text", "kl"),
    [
        ("openrlhf", "a.sh", "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator rloo",
         {"coef": 0.01, "estimator": "k1"}),
        ("openrlhf", "b.sh", "python3 -m openrlhf.cli.train_ppo_ray --algo.kl.init_coef 0.05 --algo.kl.estimator k3",
         {"coef": 0.05, "estimator": "k3"}),
        ("areal", "c.yaml", "actor: {kl_ctl: 0.02, kl_estimator: k2, ppo_n_minibatches: 2}",
         {"coef": 0.02, "estimator": "k2"}),
        ("areal", "d.yaml", "actor: {ppo_n_minibatches: 2}\nref: {path: a/b}", {"coef": 0.1, "estimator": "k1"}),
        ("skyrl", "e.yaml", "trainer: {algorithm: {use_kl_loss: false, use_kl_in_reward: true, kl_loss_coef: 0.3}}",
         {"coef": 0.3, "estimator": "k3"}),
    ],
)  # fmt: skip
def test_a_kl_in_the_reward_stays_there(
    tmp_path: Path, framework: str, name: str, text: str, kl: dict[str, object]
) -> None:
    printed, lists = migrated(write(tmp_path, text, name), name=framework)
    fields = yaml.safe_load(printed)
    assert fields["offpolicy"]["objective"]["kl"] == {**kl, "max_value": 10.0, "place": "reward"}
    assert "beta" not in fields and any("offpolicy.objective.kl" in line and "in the reward" in line for line in lists)
    assert not any(line.strip().startswith(":") for line in lists)


def test_areal_without_a_reference_model_gets_no_kl_by_default(tmp_path: Path) -> None:
    printed, _ = migrated(write(tmp_path, "actor: {ppo_n_minibatches: 2, use_decoupled_loss: true}"), name="areal")
    assert "kl:" not in printed


def test_a_default_that_is_not_carried_has_its_name(tmp_path: Path) -> None:
    script = write(tmp_path, "python3 -m openrlhf.cli.train_ppo_ray --algo.kl.init_coef 0", "train.sh")
    _, lists = migrated(script)
    assert any(
        line.strip().startswith("--algo.advantage.estimator (its default): the estimator 'gae'") for line in lists
    )


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: write(folder, "# nothing yet\n"), [], "config.yaml' is empty."),
        (lambda folder: folder, [], "is a folder: name the configuration in it."),
        (
            lambda folder: write(folder, VERL),
            ["--output", "/nonexistent/a.yaml"],
            "must be a file in an existing folder",
        ),
        (lambda folder: write(folder, VERL), ["--output", "."], "--output must be a file, but got the folder '.'"),
        (lambda folder: write(folder, VERL), ["--framework", "slime"], "slime knows no setting of"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_plain_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, options: list[str], message: str
) -> None:
    assert main(["migrate", str(make(tmp_path)), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err and "Errno" not in err


def test_the_framework_of_a_wrong_name_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"It has settings of verl\.$"):
        migrate(write(tmp_path, VERL), name="slime")


def test_only_the_file_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["migrate"])
    assert capsys.readouterr().err.endswith("the following arguments are required: FILE\n")


def test_a_default_that_the_yaml_holds_is_said_to_be_written(tmp_path: Path) -> None:
    """verl's own defaults, given in the file: each line says where the YAML has it, or that it has it nowhere."""
    actor = "actor: {clip_ratio_c: 3.0, entropy_coeff: 0, kl_loss_coef: 0.001, use_kl_loss: true, clip_ratio_low: 0.2}"
    printed, lists = migrated(write(tmp_path, f"{VERL}actor_rollout_ref: {{{actor}}}\n"))
    offpolicy = yaml.safe_load(printed)["offpolicy"]
    said = {line.strip().partition(" -> ")[0]: line.partition(" -> ")[2] for line in lists if " -> " in line}
    written = {keys: to.removeprefix("written as ") for keys, to in said.items() if to.startswith("written as ")}
    assert set(written) == {
        "algorithm.rollout_correction.rollout_is_threshold",
        "actor_rollout_ref.actor.clip_ratio_c",
        "actor_rollout_ref.actor.kl_loss_coef",
    }
    for place in written.values():
        path, value = place.split(": ")
        found = {"offpolicy": offpolicy}
        for part in path.split("."):
            found = found[part]
        assert found == float(value)
    (nothing,) = [keys for keys, to in said.items() if to.startswith("nothing to write")]
    assert set(nothing.split(", ")) == {
        f"actor_rollout_ref.actor.{name}" for name in ("entropy_coeff", "clip_ratio_low")
    }


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("rollout: {foo_bar: 1}", ""),
        ("rollout: {temperatur: 1}", "actor_rollout_ref.rollout.temperature"),
        ("actor: {clip_ratio_hihg: 0.3}", "actor_rollout_ref.actor.clip_ratio_high"),
        ("actor: {optimm: {lr: 0.3}}", "actor_rollout_ref.actor.optim.lr"),
        ("actor: {entropy_bonus_schedule: 0.3}", ""),
    ],
)
def test_only_a_near_name_is_suggested(tmp_path: Path, setting: str, meant: str) -> None:
    _, lists = migrated(write(tmp_path, f"{VERL}actor_rollout_ref: {{{setting}}}\n"))
    (line,) = [line for line in lists if "unknown to this kit" in line]
    assert line.endswith(f"(did you mean {meant}?)" if meant else "unknown to this kit")


REWARD = "custom_reward_function: {{path: {path}, name: {name}}}\n"


@pytest.mark.parametrize(
    ("path", "name", "reward"),
    [
        ("a/score.py", "mine", "a/score.py:mine"),
        ("a/score.py", "null", "a/score.py:compute_score"),
        ("pkg://my.rewards", "mine", "my.rewards:mine"),
        ("pkg://my/rewards", "mine", "my.rewards:mine"),
        ("file:///a/score.py", "mine", "/a/score.py:mine"),
    ],
)
def test_verls_reward_function_and_files_are_carried(tmp_path: Path, path: str, name: str, reward: str) -> None:
    data = "data: {train_files: ['a.parquet', b.parquet], val_files: c.parquet}\n"
    printed, lists = migrated(write(tmp_path, VERL + data + REWARD.format(path=path, name=name)))
    fields = yaml.safe_load(printed)
    assert fields["reward"] == reward
    assert (fields["train_files"], fields["val_files"]) == (["a.parquet", "b.parquet"], ["c.parquet"])
    to_set = lists[lists.index("still to set:") + 1 :]
    assert [line.strip().partition(":")[0] for line in to_set] == ["model_name_or_path", "output_dir"]


def test_held_out_files_are_left_where_those_of_training_are(tmp_path: Path) -> None:
    printed, lists = migrated(write(tmp_path, VERL + "data: {train_files: a.arrow, val_files: c.parquet}\n"))
    assert not {"train_files", "val_files"} & yaml.safe_load(printed).keys()
    assert "recipes/grpo.py reads val_files only beside train_files" in "\n".join(lists)


def test_files_of_other_columns_and_a_reward_without_a_path_are_left(tmp_path: Path) -> None:
    data = "data: {train_files: a.parquet, prompt_key: question}\n" + REWARD.format(path="null", name="f")
    printed, lists = migrated(write(tmp_path, VERL + data))
    fields = yaml.safe_load(printed)
    assert "train_files" not in fields and fields["dataset_name"] == fields["reward"] == "TO_SET"
    text = "\n".join(lists)
    assert "data.prompt_key name other columns than recipes/grpo.py reads" in text
    assert "no path: verl chooses by data_source" in text
    assert "verl's own functions are verl.utils.reward_score:default_compute_score, where verl is installed" in text


ACTOR = "actor_rollout_ref: {actor: {ppo_mini_batch_size: 32, optim: {%s}}, rollout: {n: 8}}\n"
SIZES = "data: {train_batch_size: 128}\ntrainer: {nnodes: 1, n_gpus_per_node: 4}\n"


@pytest.mark.parametrize(
    ("optim", "fields"),
    [
        ("lr_warmup_steps: 10", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 40}),
        ("lr_warmup_steps_ratio: 0.1", {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}),
        ("lr_scheduler_type: cosine", {"lr_scheduler_type": "cosine"}),
        ("lr_scheduler_type: cosine, min_lr_ratio: 0.1",
         {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
    ],
)  # fmt: skip
def test_verls_schedule_moves_once_a_generation(tmp_path: Path, optim: str, fields: dict[str, Any]) -> None:
    printed, lists = migrated(write(tmp_path, ACTOR % optim + SIZES))
    found = yaml.safe_load(printed)
    names = ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs")
    assert {name: found[name] for name in names if name in found} == fields
    assert ("times 4 optimizer steps a generation" in " ".join(lists)) == ("warmup_steps: " in optim)


def test_verls_asynchronous_trainer_moves_the_schedule_more_often(tmp_path: Path) -> None:
    mode = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2"]
    printed, _ = migrated(write(tmp_path, ACTOR % "lr_warmup_steps: 10" + SIZES), mode)
    assert yaml.safe_load(printed)["warmup_steps"] == 20  # 4 optimizer steps a generation, in 2 parts


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (["trainer.test_freq=5"], {"eval_strategy": "steps", "eval_steps": 20, "eval_on_start": True}),
        (["trainer.test_freq=5", "trainer.val_before_train=false"],
         {"eval_strategy": "steps", "eval_steps": 20, "eval_on_start": False}),
        (["trainer.test_freq=-1", "trainer.val_before_train=true"], {"eval_strategy": "no"}),
        (["trainer.val_before_train=true"], {}),
    ],
)  # fmt: skip
def test_verls_evaluation_counts_generations(tmp_path: Path, given: list[str], fields: dict[str, Any]) -> None:
    printed, lists = migrated(write(tmp_path, ACTOR % "lr: 1e-6" + SIZES), given)
    found = yaml.safe_load(printed)
    assert {name: value for name, value in found.items() if name.startswith("eval_")} == fields
    assert any("set evaluation here" in line for line in lists) == (not fields)
    assert found.get("num_generations_eval") == (1 if "eval_steps" in fields else None)


def test_verls_responses_of_a_held_out_prompt_are_carried_where_it_evaluates(tmp_path: Path) -> None:
    kept = ["actor_rollout_ref.rollout.val_kwargs.n=4", "actor_rollout_ref.rollout.val_kwargs.top_p=0.9"]
    path = write(tmp_path, ACTOR % "lr: 1e-6" + SIZES)
    printed, lists = migrated(path, [*kept, "trainer.test_freq=5"])
    assert yaml.safe_load(printed)["num_generations_eval"] == 4
    assert any("val_kwargs.top_p" in line and "set evaluation here" in line for line in lists)
    assert "num_generations_eval" not in yaml.safe_load(migrated(path, kept)[0])


def test_a_mini_batch_above_the_prompts_of_a_generation_is_told(tmp_path: Path) -> None:
    for prompts, told in ((16, True), (128, False)):
        sizes = SIZES.replace("128", str(prompts))
        printed, lists = migrated(write(tmp_path, ACTOR % "lr: 1e-6" + sizes))
        assert any("32 prompts are more than the 16 of a generation" in line for line in lists) == told
        assert ("steps_per_generation" not in yaml.safe_load(printed)) == told  # one step a generation


def test_steps_are_not_multiplied_by_sizes_that_are_not_carried(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {actor: {clip_ratio: 0.2}}\ndata: {shuffle: true}\ntrainer: {save_freq: 10}\n"
    printed, lists = migrated(write(tmp_path, text))
    fields = yaml.safe_load(printed)
    assert fields["save_steps"] == 10 and "steps_per_generation" not in fields
    assert any("trainer.save_freq -> save_steps: 10 (generations there" in line for line in lists)


@pytest.mark.parametrize(
    ("framework", "name", "text"),
    [
        ("prime-rl", "a.toml", "[orchestrator]\ngroup_size = 8\n%s"),
        ("openrlhf", "a.sh", "python3 -m openrlhf.cli.train_ppo_ray --rollout.n_samples_per_prompt 8 %s"),
        ("slime", "a.sh", "python3 train.py --n-samples-per-prompt 8 --use-tis %s"),
    ],
)
def test_a_length_that_is_not_given_is_told(tmp_path: Path, framework: str, name: str, text: str) -> None:
    given = {
        "prime-rl": "[orchestrator.train.sampling]\nmax_completion_tokens = 99\n",
        "openrlhf": "--rollout.max_new_tokens 99",
        "slime": "--rollout-max-response-len 99",
    }
    printed, lists = migrated(write(tmp_path, text % "", name), name=framework)
    assert yaml.safe_load(printed)["max_completion_length"] == "TO_SET"
    assert any("(its default): responses may fill the context there" in line for line in lists)
    printed, lists = migrated(write(tmp_path, text % given[framework], name), name=framework)
    assert yaml.safe_load(printed)["max_completion_length"] == 99
    assert not any("responses may fill the context" in line for line in lists)


PRIME_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("framework", "name", "text", "adapter", "default"),
    [
        ("verl", "a.yaml", "actor_rollout_ref: {model: {lora_rank: 32}}", (32, 16, "all-linear"), "lora_alpha,"),
        ("verl", "a.yaml", "actor_rollout_ref: {model: {lora_rank: 32, lora_alpha: 8, target_modules: [q_proj]}}",
         (32, 8, ["q_proj"]), ""),
        ("skyrl", "a.yaml", "trainer: {policy: {model: {lora: {rank: 8}}}}", (8, 16, "all-linear"), "lora.alpha,"),
        ("openrlhf", "a.sh", "python3 -m openrlhf.cli.train_ppo_ray --ds.lora.rank 4", (4, 16, "all-linear"),
         "ds.lora.alpha,"),
        ("prime-rl", "a.toml", "[trainer.model.lora]\nrank = 8\n", (8, 32, PRIME_MODULES), "lora.alpha,"),
        ("prime-rl", "a.toml", "[trainer.model.lora]\nalpha = 64\n", (16, 64, PRIME_MODULES), "lora.rank,"),
        ("prime-rl", "a.toml", "[trainer.model.lora]\n", (16, 32, PRIME_MODULES), "lora.rank,"),
    ],
)  # fmt: skip
def test_an_adapter_keeps_the_frameworks_defaults(
    tmp_path: Path, framework: str, name: str, text: str, adapter: tuple[Any, ...], default: str
) -> None:
    printed, lists = migrated(write(tmp_path, text, name), name=framework)
    fields = yaml.safe_load(printed)
    names = ("lora_r", "lora_alpha", "lora_target_modules")
    assert fields["use_peft"] is True and tuple(fields[name] for name in names) == adapter
    said = " ".join(line for line in lists if "use_peft" in line)
    assert (f"{default}" in said and "the default" in said) if default else "the default" not in said


@pytest.mark.parametrize(
    ("scheduler", "fields"),
    [
        ("type = 'constant'", {"lr_scheduler_type": "constant"}),
        ("type = 'linear'\ndecay_steps = 20\nmin_lr = 1e-6",
         {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 10,
          "lr_scheduler_kwargs": {"num_decay_steps": 20, "decay_type": "linear", "min_lr_ratio": 0.1}}),
        ("type = 'linear'\nwarmup_steps = 5\ndecay_steps = 0",
         {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}),
        ("type = 'cosine'", {"lr_scheduler_type": "cosine", "warmup_steps": 10}),
        ("type = 'cosine'\nwarmup_steps = 0\nmin_lr = 1e-7",
         {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}}),
    ],
)  # fmt: skip
def test_prime_rls_schedules_are_carried(tmp_path: Path, scheduler: str, fields: dict[str, Any]) -> None:
    text = f"max_steps = 100\n[trainer.optim]\nlr = 1e-5\n[trainer.scheduler]\n{scheduler}\n"
    found = yaml.safe_load(migrated(write(tmp_path, text, "a.toml"))[0])
    names = ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs")
    assert {name: found[name] for name in names if name in found} == fields


def test_prime_rls_linear_schedule_is_transformers_warmup_stable_decay() -> None:
    """Factors of the rate, step by step, by prime-rl's rule: up in 3 steps, 1, then down over the last 4."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kwargs = {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.0}
    schedule = get_scheduler("warmup_stable_decay", optimizer, 3, 10, kwargs)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    # prime-rl's last four are 1, 2/3, 1/3, 0: its least rate comes one step before the end
    assert rates == pytest.approx([0, 1 / 3, 2 / 3, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("text", "corrects"),
    [("", False), ("use_vllm: false\n", False), ("use_vllm: true\n", True)],
)
def test_a_stock_trl_file_without_vllm_corrects_nothing(tmp_path: Path, text: str, corrects: bool) -> None:
    path = write(tmp_path, f"model_name_or_path: a/b\nbeta: 0.1\nlearning_rate: 1e-6\n{text}")
    text, lists = migrated(path)
    printed = yaml.safe_load(text)
    method = printed["offpolicy"]
    assert any("use_vllm" in line and "correction.weight" in line for line in lists) is False
    assert printed.get("use_vllm", False) is corrects
    assert ("correction" in method if isinstance(method, dict) else False) is corrects
    in_place = presets.from_mapping({"framework": "trl", "file": str(path)}, where="offpolicy").correction
    # a file that does not speak of vLLM is a part of a configuration that does
    assert (in_place is not None and bool(in_place.weights)) is (corrects or "use_vllm" not in path.read_text())


@pytest.mark.parametrize(
    ("text", "rate", "adapter"),
    [("", 1e-4, True), ("tuner_type: full\n", 1e-5, False), ("global_batch_size: 64\n", 1e-5, False),
     ("learning_rate: 3e-6\n", 3e-6, True)],
)  # fmt: skip
def test_ms_swifts_learning_rate_is_that_of_what_it_trains(
    tmp_path: Path, text: str, rate: float, adapter: bool
) -> None:
    printed, _ = migrated(write(tmp_path, f"rlhf_type: grpo\nmodel: a/b\n{text}"))
    found = yaml.safe_load(printed)
    assert float(found["learning_rate"]) == rate and found.get("use_peft", False) is adapter


def test_areals_lengths_and_adapters_are_its_own_defaults(tmp_path: Path) -> None:
    file = "gconfig: {n_samples: 4}\nactor: {path: a/b, use_lora: true, target_modules: [all-linear]}\n"
    printed, _ = migrated(write(tmp_path, file))
    found = yaml.safe_load(printed)
    assert (found["max_completion_length"], found["lora_r"], found["lora_alpha"]) == (16384, 32, 16)
