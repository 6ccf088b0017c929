"""OffPolicyGRPOConfig: how TRL's fields and ``offpolicy`` become one objective."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from datasets import Dataset

import trl_offpolicy as op
from trl_offpolicy.presets import catalog
from trl_offpolicy.trl.config import OffPolicyGRPOConfig


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def make(**options: Any) -> OffPolicyGRPOConfig:
        return OffPolicyGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)

    return make


def test_default_is_tis_with_vllm_and_measuring_without(config: Any) -> None:
    assert config(use_vllm=True).preset.name == "paper/tis"
    preset = config().preset
    assert preset.name == "measure"
    assert preset.correction == op.Correction()


def test_trl_fields_shape_the_objective(config: Any) -> None:
    objective = config(loss_type="dr_grpo", epsilon=0.1, epsilon_high=0.3, beta=0.04).preset.objective
    assert objective.policy_loss == op.losses.PPOClip(low=0.1, high=0.3)
    assert objective.aggregation == "seq_mean_token_sum_norm"
    assert objective.kl == op.KLPenalty(coef=0.04, ratio_weighted=True)


def test_a_preset_brings_what_of_its_method_is_no_part_of_the_loss(config: Any) -> None:
    whole = config(use_vllm=True, offpolicy="deepseek-v3.2/whole")
    assert whole.routing_replay == "r3"
    vcpo = config(use_vllm=True, offpolicy="paper/vcpo").control_spec
    assert vcpo is not None and vcpo.policy == "act" and "ess_sequence" in repr(vcpo.controllers)
    own = config(use_vllm=True, offpolicy="paper/vcpo", control="stop")
    assert own.control == "stop"  # the configuration's word counts


def test_mapping_overrides_the_preset(config: Any) -> None:
    spec = {
        "preset": "paper/tis",
        "options": {"max_weight": 3.0},
        "correction": {"keep": [{"type": "ratio_band", "level": "sequence_mean", "low": 0.9, "high": None}]},
        "objective": {"policy_loss": {"type": "cispo", "high": 4.0}},
    }
    objective = config(use_vllm=True, offpolicy=spec).preset.objective
    assert objective.policy_loss == op.losses.CISPO(high=4.0)
    assert objective.correction == op.Correction(
        weight=op.TruncateWeight(max_weight=3.0), keep=(op.RatioBand(low=0.9, high=None),)
    )


def test_a_whole_configuration_of_verl_reaches_the_objective(config: Any) -> None:
    options = {
        "actor_rollout_ref": {
            "actor": {
                "optim": {"lr": 1e-6},
                "use_kl_loss": True,
                "kl_loss_coef": 0.05,
                "kl_loss_type": "mse",
                "entropy_coeff": 0.01,
                "loss_agg_mode": "seq-mean-token-sum-norm",
                "loss_scale_factor": 512,
                "policy_loss": {"loss_mode": "cispo"},
            }
        },
        "algorithm": {"adv_estimator": "rloo", "rollout_correction": {"rollout_is": "token"}},
    }
    with pytest.warns(UserWarning, match=r"^Not about the loss, and not used here: optim "):
        made = config(use_vllm=True, offpolicy={"framework": "verl", "options": options})
    with pytest.warns(UserWarning):
        preset = made.preset

    objective = preset.objective
    assert objective.kl == op.KLPenalty(coef=0.05, estimator="k2")
    assert made.beta == 0.05  # so that TRL loads the reference model
    assert (objective.entropy_coef, objective.entropy_aggregation, objective.max_length) == (0.01, "loss", 512)
    assert objective.policy_loss == op.losses.CISPO(low=0.8, high=1.2)
    assert objective.correction.weights == (op.TruncateWeight(max_weight=2.0),)
    assert preset.advantages == op.advantages.RLOO(alone="return")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"^the preset's kl and beta set the same quantity"):
        config(use_vllm=True, beta=0.04, offpolicy={"framework": "verl", "options": options})


def test_trl_off_policy_mask_joins_the_keep_terms(config: Any) -> None:
    correction = config(use_vllm=True, off_policy_mask_threshold=0.5).preset.correction
    assert correction.keep == (op.OffPolicySequenceMask(max_divergence=0.5),)
    assert correction.weight == op.TruncateWeight(max_weight=2.0)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("paper/tis", None),
        ({"advantages": "rloo"}, op.advantages.RLOO()),
        ({"advantages": {"type": "grpo", "scale": "none"}}, op.advantages.GRPO(scale="none")),
        ({"advantages": {"type": "optimal_token_baseline", "is_aware": True}},
         op.advantages.OptimalTokenBaseline(is_aware=True)),
        ({"advantages": None}, None),
    ],
)  # fmt: skip
def test_advantages_by_name_or_mapping(config: Any, spec: Any, expected: Any) -> None:
    assert config(use_vllm=True, offpolicy=spec).preset.advantages == expected


def test_a_preset_may_say_them_and_the_user_overrides(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = replace(op.presets.get("paper/tis"), advantages=op.advantages.RLOO())
    monkeypatch.setitem(catalog.PRESETS, "mine", catalog.Row(lambda: said, ""))
    assert config(use_vllm=True, offpolicy="mine").preset.advantages == op.advantages.RLOO()
    assert config(use_vllm=True, offpolicy={"preset": "mine", "advantages": "opo"}).preset.advantages == (
        op.advantages.OPO()
    )
    unscaled = {"use_vllm": True, "scale_rewards": "none"}
    assert config(**unscaled, offpolicy={"preset": "mine", "advantages": None}).preset.advantages is None
    with pytest.raises(ValueError, match="the preset's advantages and scale_rewards set the same quantity"):
        config(**unscaled, offpolicy="mine")


def test_what_a_weight_may_hold_depends_on_the_loss_beside_it(config: Any) -> None:
    weight = {"type": "raw", "ratio": "current/sampling"}
    spec = {"correction": {"weight": weight}, "objective": {"policy_loss": {"type": "gpg"}}}
    assert config(use_vllm=True, offpolicy=spec).preset.correction.weights[0].ratio == "current/sampling"
    with pytest.raises(ValueError, match="counted twice"):
        config(use_vllm=True, offpolicy={"correction": {"weight": weight}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_importance_sampling_correction": True}, "vllm_importance_sampling_correction must be False"),
        ({"offpolicy": "paper/tsi"}, "Did you mean 'paper/tis'"),
        ({"offpolicy": {"presets": "paper/tis"}}, r"offpolicy\.presets must be one of .* Did you mean 'preset'"),
        ({"offpolicy": {"preset": "paper/tis", "options": {"max_wieght": 3}}}, "max_wieght is not an option"),
        ({"offpolicy": {"correction": {"keep": [{"type": "ratio_band", "low": 0.9}]}}}, r"keep\[0\]\.high must be"),
        ({"offpolicy": {"correction": {"weight": {"type": "trunc"}}}}, r"offpolicy\.correction\.weight\.type"),
        ({"loss_type": "grpo", "offpolicy": {"objective": {"aggregation": "token_sum"}}}, "loss_type set the same"),
        ({"beta": 0.1, "offpolicy": {"objective": {"kl": {"coef": 0.1}}}}, "beta set the same quantity"),
        ({"off_policy_mask_threshold": 0.1, "offpolicy": "paper/opsm"}, "off_policy_mask_threshold and offpolicy"),
        ({"engine": "float32"}, "engine must be a mapping"),
        ({"engine": {"exact": "yes"}}, "engine.exact must be true or false, but got 'yes'"),
        ({"engine": {"weight_rounding": "int9"}}, r"engine\.weight_rounding\.type must be one of .* but got 'int9'"),
        ({"offpolicy": {"objective": 3}}, r"offpolicy\.objective must be a mapping of options, but got 3\.$"),
        ({"offpolicy": "{preset: measure"}, "offpolicy must be a name or a mapping in YAML or JSON, but got "),
        (
            {"offpolicy": {"preset": "paper/tis", "control": "act"}},
            r"^offpolicy\.control must be one of .* control is a field of its own, beside offpolicy\.$",
        ),
        ({"control": "wrn"}, r"^control must be one of .*'off'\], but got 'wrn'\. Did you mean 'warn'\?$"),
        ({"control": {"thresholds": {"kl_high": "x"}}}, r"^control\.thresholds\.kl_high must be .*, but got 'x'\.$"),
        ({"temperature": 0.0}, "temperature must be positive and finite, but got 0.0"),
        ({"noise_floor_steps": True}, "noise_floor_steps must be a whole number of at least 0, but got True"),
        ({"correct_threshold": "x"}, "correct_threshold must be a finite number, but got 'x'"),
        ({"record_rollouts": "yes"}, "record_rollouts must be True or False, but got 'yes'"),
        ({"check_token_ids": "wrn"}, "check_token_ids must be one of .* Did you mean 'warn'"),
    ],
)
def test_bad_options_are_named(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        config(use_vllm=True, **options)


@pytest.mark.parametrize("offpolicy", [None, "paper/tis", "measure"])
@pytest.mark.parametrize(
    ("name", "value"), [("mode", "sequence_truncate"), ("clip_max", 2.0), ("clip_max", None), ("clip_min", 0.5)]
)
def test_options_of_trl_own_correction_are_refused_beside_offpolicy(
    config: Any, offpolicy: Any, name: str, value: Any
) -> None:
    field = f"vllm_importance_sampling_{name}"
    with pytest.raises(ValueError) as error:
        config(use_vllm=True, offpolicy=offpolicy, **{field: value})
    start = f"{field} must be left out, because offpolicy takes the place of TRL's correction, but got {value!r} and"
    assert str(error.value).startswith(f"{start} offpolicy {offpolicy!r}. ")


def test_their_error_says_what_to_write(config: Any) -> None:
    given = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    with pytest.raises(ValueError) as error:
        config(use_vllm=True, **given)
    _, _, method = str(error.value).rstrip(".").rpartition("TRL's correction is offpolicy: ")
    made = config(use_vllm=True, offpolicy=yaml.safe_load(method)).preset.correction
    assert made == op.presets.from_trl(**given).correction


def test_numbers_with_an_exponent_are_numbers(config: Any) -> None:
    made = config(
        use_vllm=True,
        noise_floor_steps="1e2",
        correct_threshold="5e-1",
        control={"thresholds": {"kl_high": "1e-1"}},
        engine={"timeout": "1e2"},
    )
    assert (made.noise_floor_steps, made.correct_threshold) == (100, 0.5)
    assert made.control_spec is not None and made.control_spec.thresholds.kl_high == 0.1


def test_another_trainer_refuses_the_configuration(config: Any, fresh_model: Any, tokenizer: Any) -> None:
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    with pytest.raises(
        TypeError,
        match=r"^args must be that trainer's own configuration for GRPOTrainer, but got an OffPolicy"
        r"GRPOConfig, ",
    ):
        trl.GRPOTrainer(
            fresh_model(), lambda completions, **_: [0.0], config(), train_dataset=rows, processing_class=tokenizer
        )
    assert config().get_process_log_level() > 0  # a script may ask too


def test_another_trainer_refuses_the_configuration_before_it_loads_a_model(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", lambda name, **_: loaded.append(name))
    with pytest.raises(TypeError, match="configuration for GRPOTrainer"):
        trl.GRPOTrainer("some/model", lambda completions, **_: [0.0], config())
    assert loaded == []
    args = config()
    assert args.distributed_state is args.__dict__["distributed_state"] is not None  # a script may ask too
    assert pickle.loads(pickle.dumps(args)).distributed_state.num_processes == 1  # as training_args.bin is


@pytest.mark.parametrize(
    "text", ['{"dtype": "float32", "weight_rounding": "int8"}', "{dtype: float32, weight_rounding: int8}"]
)
def test_a_mapping_on_the_command_line_is_yaml_or_json(text: str, make_args: Any) -> None:
    assert make_args(engine=text).engine == {"dtype": "float32", "weight_rounding": "int8"}
