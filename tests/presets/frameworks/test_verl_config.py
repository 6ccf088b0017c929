"""verl's configuration pasted as it is: sections, what is not about the loss, misspelt names."""

import math
import warnings

import pytest
import torch

from trl_offpolicy import advantages, losses, presets
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.presets.frameworks.options import UnknownOptionError

TARGET = {"_target_": "verl.workers.config.SomeConfig"}
ACTOR = {  # the names and defaults of verl 0.9.1's dp_actor.yaml
    **TARGET,
    "rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}",
    "strategy": "fsdp",
    "ppo_mini_batch_size": 256,
    "ppo_micro_batch_size": None,
    "ppo_micro_batch_size_per_gpu": None,
    "use_dynamic_bsz": False,
    "ppo_max_token_len_per_gpu": 16384,
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "freeze_vision_tower": False,
    "policy_loss": {
        **TARGET,
        "loss_mode": "vanilla",
        "clip_cov_ratio": 0.0002,
        "clip_cov_lb": 1.0,
        "clip_cov_ub": 5.0,
        "kl_cov_ratio": 0.0002,
        "ppo_kl_coef": 0.1,
        "dro_beta": None,
    },
    "clip_ratio_c": 3.0,
    "loss_agg_mode": "token-mean",
    "loss_scale_factor": None,
    "entropy_coeff": 0,
    "calculate_entropy": False,
    "calculate_sum_pi_squared": False,
    "use_kl_loss": False,
    "use_prefix_grouper": False,
    "use_torch_compile": True,
    "kl_loss_coef": 0.001,
    "kl_loss_type": "low_var_kl",
    "ppo_epochs": 1,
    "shuffle": False,
    "data_loader_seed": 42,
    "checkpoint": {**TARGET, "save_contents": ["model", "optimizer", "extra"]},
    "optim": {**TARGET, "lr": 1e-6},
    "use_fused_kernels": False,
    "profiler": {**TARGET, "enable": False},
    "qat": {"enable": False},
    "grad_clip": 1.0,
    "ulysses_sequence_parallel_size": 1,
    "entropy_from_logits_with_chunking": False,
    "entropy_from_logits_chunk_size": 2048,
    "entropy_checkpointing": False,
    "pad_to_length": False,
    "fsdp_config": {**TARGET, "param_offload": False},
    "use_remove_padding": True,
}
ALGORITHM = {
    **TARGET,
    "gamma": 1.0,
    "lam": 1.0,
    "adv_estimator": "grpo",
    "norm_adv_by_std_in_grpo": True,
    "filter_groups": {**TARGET, "enable": False},
    "use_kl_in_reward": False,
    "kl_penalty": "kl",
    "kl_ctrl": {**TARGET, "type": "fixed", "kl_coef": 0.001},
    "use_pf_ppo": False,
    "pf_ppo": {"reweight_method": "pow", "weight_pow": 2.0},
    "rollout_correction": {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
        "rollout_is_batch_normalize": False,
    },
}


def one_warning(**options):
    with pytest.warns(UserWarning, match=r"^Not about the loss, and not used here: ") as caught:
        preset = presets.from_verl(**options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return preset, str(caught[0].message)


def test_the_actor_as_it_is():
    preset, said = one_warning(**ACTOR)

    assert preset.objective == presets.from_verl().objective
    unused = {
        "rollout_n", "strategy", "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
        "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "freeze_vision_tower", "calculate_entropy",
        "calculate_sum_pi_squared", "use_prefix_grouper", "use_torch_compile", "ppo_epochs", "shuffle",
        "data_loader_seed", "checkpoint", "optim", "use_fused_kernels", "profiler", "qat", "grad_clip",
        "ulysses_sequence_parallel_size", "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size",
        "entropy_checkpointing", "pad_to_length", "fsdp_config", "use_remove_padding",
    }  # fmt: skip
    listed = {name for part in said.split(": ", 1)[1].split(";") for name in part.split(" (")[0].strip().split(", ")}
    assert listed == unused
    assert "clip_ratio" not in said and "_target_" not in said
    assert "(how verl places and runs the model)" in said


def test_all_of_the_configuration_or_its_parts_say_the_same():
    actor = {
        **ACTOR,
        "clip_ratio_high": 0.28,
        "policy_loss": {**ACTOR["policy_loss"], "loss_mode": "kl_cov", "kl_cov_ratio": None},
        "use_kl_loss": True,
        "kl_loss_coef": "1e-3",  # as PyYAML reads it
        "kl_loss_type": "k3+",
        "entropy_coeff": 0.01,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "loss_scale_factor": 2048,
    }
    correction = {**ALGORITHM["rollout_correction"], "rollout_is": "token", "rollout_is_threshold": "1e9"}
    algorithm = {**ALGORITHM, "norm_adv_by_std_in_grpo": False, "rollout_correction": correction}
    whole = {
        "actor_rollout_ref": {"actor": actor, "rollout": {"n": 8}, "ref": {}, "model": {"path": "x"}, **TARGET},
        "algorithm": algorithm,
        "trainer": {"use_v1": True, "total_epochs": 3, "logger": ["console"]},
        "data": {"train_batch_size": 64},
        "critic": None,
        "ray_kwargs": {},
    }
    flat = {**actor, **actor["policy_loss"], **algorithm, **correction}
    del flat["policy_loss"], flat["rollout_correction"]

    built = []
    for options in (whole, {"actor": actor, "algorithm": algorithm}, {**actor, **algorithm}, flat):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            built.append(presets.from_verl(**options))
        said = [str(warning.message) for warning in caught]
        assert sum(text.startswith("Not about the loss") for text in said) == 1
        assert sum("is taken as no cap" in text for text in said) == 1

    assert all(preset == built[0] for preset in built)
    objective = built[0].objective
    assert objective.policy_loss == losses.KLCov(fraction=0.0002, coef=0.1)
    assert objective.kl == KLPenalty(coef=0.001, estimator="k3+", max_value=10.0)
    assert (objective.entropy_coef, objective.entropy_aggregation) == (0.01, "loss")
    assert (objective.aggregation, objective.max_length) == ("seq_mean_token_sum_norm", 2048)
    assert built[0].advantages == advantages.GRPO(scale="none", epsilon=1e-6, alone="return")


def test_the_rest_of_a_section_that_is_not_about_the_loss_is_named_once():
    _, said = one_warning(trainer={"use_v1": False, "total_epochs": 3, "nnodes": 2})

    assert said.count("the rest of trainer") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actor": {"clip_ratio_hihg": 0.3}}, r"^actor\.clip_ratio_hihg is not an option of verl's actor, .*_high'"),
        ({"policy_loss": {"loss_mod": "gspo"}}, r"^policy_loss\.loss_mod is not an option .*Did you mean 'loss_mode'"),
        ({"algorithm": {"adv_estimater": "grpo"}}, r"^algorithm\.adv_estimater is .*Did you mean 'adv_estimator'"),
        ({"algorithm": {"rollout_correction": {"rollout_iss": 1}}}, r"^algorithm\.rollout_correction\.rollout_iss is"),
        ({"optimm": {}}, r"^optimm is not an option of verl's configuration, .*Did you mean 'optim'"),
        ({"actor": {"loss_mode": "gspo"}}, r"^actor\.loss_mode is not an option of verl's actor"),  # in policy_loss
    ],
)
def test_misspelt_names_still_raise(options, message):
    with pytest.raises(UnknownOptionError, match=message):
        presets.from_verl(**options)


def test_sections_are_mappings_and_options_are_given_once():
    with pytest.raises(ValueError, match=r"^policy_loss must be a mapping of verl's options, but got 'gspo'"):
        presets.from_verl(policy_loss="gspo")
    with pytest.raises(ValueError, match=r"^clip_ratio and actor\.clip_ratio must be the same, but got 0\.1 and 0\.2"):
        presets.from_verl(clip_ratio=0.1, actor={"clip_ratio": 0.2})
    twice = presets.from_verl(clip_ratio_low=None, clip_ratio=0.1, actor={"clip_ratio": 0.1, "clip_ratio_low": None})
    assert twice.objective.policy_loss.low == 0.1


def test_what_verls_trainer_overwrites_is_not_read():
    correction = {"rollout_is": "sequence", "rollout_is_threshold": 3.0}
    policy_loss = {"loss_mode": "bypass_mode", "rollout_correction": correction}
    preset, said = one_warning(policy_loss=policy_loss, bypass_mode=True)

    assert preset.correction.weights == ()
    assert "rollout_correction (of policy_loss; verl's trainers read algorithm.rollout_correction)" in said


# ---------------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize(
    ("options", "estimator"),
    [
        ({}, None),
        ({"adv_estimator": "grpo"}, advantages.GRPO(epsilon=1e-6, alone="return")),
        ({"adv_estimator": "grpo_vectorized"}, advantages.GRPO(epsilon=1e-6, alone="return")),
        (
            {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
            advantages.GRPO(scale="none", epsilon=1e-6, alone="return"),
        ),
        ({"adv_estimator": "rloo"}, advantages.RLOO(alone="return")),
        ({"adv_estimator": "rloo_vectorized"}, advantages.RLOO()),
        ({"adv_estimator": "opo"}, advantages.OPO(alone="return")),
        (
            {"adv_estimator": "reinforce_plus_plus_baseline"},
            advantages.REINFORCEPlusPlusBaseline(alone="return"),
        ),
        ({"adv_estimator": "gpg"}, advantages.GPG(alone="return")),
        ({"adv_estimator": "remax"}, advantages.ReMax()),
        ({"adv_estimator": "grpo_passk"}, advantages.PassK(epsilon=1e-6)),
        (
            {"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": False},
            advantages.PassK(scale="none", epsilon=1e-6),
        ),
        ({"adv_estimator": "reinforce_plus_plus"}, advantages.REINFORCEPlusPlus()),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": 0.9}, advantages.REINFORCEPlusPlus(discount=0.9)),
        ({"adv_estimator": "optimal_token_baseline"}, advantages.OptimalTokenBaseline(alone="return")),
        (
            {"adv_estimator": "tir_optimal_token_baseline", "handle_zero_tail": False, "rollout_is": "token"},
            advantages.OptimalTokenBaseline(is_aware=True, multi_turn=True, alone="zero"),
        ),
        (
            {
                "adv_estimator": "optimal_token_baseline",
                "rollout_is": "token",
                "bypass_mode": True,
                "loss_type": "reinforce",
            },
            advantages.OptimalTokenBaseline(alone="return"),  # verl makes the weights in the loss then
        ),
    ],
)
def test_advantages(options, estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert presets.from_verl(**options).advantages == estimator


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adv_estimator": "gae"}, r"^adv_estimator 'gae' needs a critic"),
        ({"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}, r"^kl_ctrl\.type must be 'fixed' with"),
        ({"use_pf_ppo": True}, r"^use_pf_ppo must be False: "),
    ],
)
def test_what_has_no_counterpart_is_refused(options, message):
    with pytest.raises(NotImplementedError, match=message):
        presets.from_verl(algorithm=options)


def test_the_kl_in_the_reward():
    options = {"use_kl_in_reward": True, "kl_penalty": "low_var_kl+", "kl_ctrl": {"type": "fixed", "kl_coef": 0.02}}
    preset = presets.from_verl(algorithm=options)

    assert preset.objective.kl == KLPenalty(coef=0.02, estimator="k3", max_value=10.0, place="reward")
    assert presets.from_verl(use_kl_in_reward=True).objective.kl == KLPenalty(
        coef=0.001, estimator="k1", place="reward"
    )
    with pytest.raises(NotImplementedError, match=r"^use_kl_loss must be False with use_kl_in_reward"):
        presets.from_verl(use_kl_in_reward=True, use_kl_loss=True)
    with pytest.raises(ValueError, match=r"^kl_penalty must be one of"):
        presets.from_verl(use_kl_in_reward=True, kl_penalty="k7")


def test_advantage_options_without_effect_are_said():
    with pytest.warns(UserWarning, match=r"^norm_adv_by_std_in_grpo=False has no effect with adv_estimator='rloo'"):
        presets.from_verl(adv_estimator="rloo", norm_adv_by_std_in_grpo=False)
    with pytest.warns(UserWarning, match=r"^gamma=0.9 has no effect with adv_estimator='rloo'"):
        presets.from_verl(adv_estimator="rloo", gamma=0.9)
    with pytest.warns(UserWarning, match=r"^handle_zero_tail=False has no effect without adv_estimator"):
        presets.from_verl(handle_zero_tail=False)
    with pytest.warns(UserWarning, match=r"^adv_estimator 'gdpo' normalises over responses here"):
        assert presets.from_verl(adv_estimator="gdpo").advantages == advantages.GDPO()
    with pytest.raises(ValueError, match=r"^adv_estimator must be one of .*Did you mean 'rloo'"):
        presets.from_verl(adv_estimator="rlo")


def test_grpo_adds_verls_epsilon_to_the_spread():
    rewards = torch.tensor([1e-3, 0.0, 0.0])
    inputs = advantages.AdvantageInputs(rewards=rewards, group_ids=torch.zeros(3).long())

    found = presets.from_verl(adv_estimator="grpo").advantages(inputs)

    std = 1e-3 / math.sqrt(3)
    expected = [(r - 1e-3 / 3) / (std + 1e-6) for r in rewards.tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)  # with TRL's 1e-4 they are 15 % smaller
    with pytest.raises(ValueError, match=r"^epsilon must be positive and finite, but got 0"):
        advantages.GRPO(epsilon=0)
