"""What 790 configurations of the frameworks' own repositories showed on 2026-11-28, each as the few lines that matter.

None of these files was known when the tables were written. The lines are written anew; the reference beside each says
where the like of it stands and how the framework reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from migrated_files import (
    CLIP,
    FULLY_ASYNC,
    LLAMA,
    MEGATRON_SWIFT,
    ONE_STEP,
    OPENRLHF,
    SKYRL,
    SLIME,
    SWIFT,
    VERL,
    carried,
    check_case,
)

from trl_offpolicy.cli.migrate import migrated
from trl_offpolicy.migrate.page import TO_SET

CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    # verl/experimental/one_step_off_policy/shell: bypass_mode is that trainer's default, its engine has own devices
    "verl one step off": (
        "a.sh", ONE_STEP + "rollout.nnodes=1",
        {"offpolicy.objective.mode": "bypass", "vllm_mode": "server"}, "rollout.nnodes: sampling ahead",
    ),
    "verl one step off, decoupled": (
        "a.sh", ONE_STEP + "algorithm.rollout_correction.bypass_mode=false",
        {"offpolicy.objective.mode": None, "vllm_mode": "server"}, "",
    ),
    # verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_4_12.sh: 4 mini-batches of 32 prompts a generation,
    # 16 optimizer steps between two syncs, by which it counts evaluations
    "verl fully async": (
        "a.sh", FULLY_ASYNC,
        {"num_generations": 16, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 16,
         "steps_per_generation": 64, "eval_steps": 160, "max_steps": 1600, "offpolicy.objective.mode": "bypass",
         "vllm_mode": "server"},
        "actor_rollout_ref.rollout.n decides",
    ),
    "verl v1, separate": (
        "a.sh", VERL + "trainer.v1.trainer_mode=separate_async",
        {"vllm_mode": "server", "offpolicy.objective.mode": None}, "trainer.v1.trainer_mode: sampling ahead is set by",
    ),
    # verl/examples/tuning/lora/run_qwen3_30b_a3b_megatron.sh
    "verl Megatron LoRA": (
        "a.sh", VERL + "actor_rollout_ref.model.lora.rank=32 actor_rollout_ref.model.lora.alpha=64",
        {"use_peft": True, "lora_r": 32, "lora_alpha": 64, "lora_target_modules": "all-linear"}, "",
    ),
    "verl Megatron LoRA, modules": (
        "a.sh", VERL + 'actor_rollout_ref.model.lora.rank=8 '
        'actor_rollout_ref.model.lora.target_modules=["linear_qkv","linear_fc2"]',
        {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}, "modules are Megatron's there",
    ),
    "verl Megatron schedule": (
        "a.sh", VERL + "actor_rollout_ref.actor.optim.lr_decay_style=cosine actor_rollout_ref.actor.optim.min_lr=1e-7",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs.min_lr": 1e-7}, "",
    ),
    "verl held-out rows": (
        "a.sh", VERL + "data.train_files=a.parquet data.val_files=b.parquet", {"eval_size": None}, "",
    ),
    "verl held-out rows, some": (
        "a.sh", VERL + "data.train_files=a.parquet data.val_files=b.parquet data.val_max_samples=100",
        {"eval_size": 100}, "",
    ),
    # verl-recipe/retool: groups of 30 held-out responses on 8 devices
    "verl held-out groups": (
        "a.sh", VERL + "trainer.test_freq=5 actor_rollout_ref.rollout.val_kwargs.n=30",
        {"num_generations_eval": 30, "per_device_eval_batch_size": 15}, "",
    ),
    # verl/examples/gmpo_trainer/run_qwen3_8b_fsdp.sh
    "verl GMPO with a KL term": (
        "a.sh",
        VERL + "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.use_kl_loss=True",
        {f"{CLIP}.type": "gmpo", "beta": None}, "actor_rollout_ref.actor.use_kl_loss: loss_agg_mode must be",
    ),
    # verl-recipe/gvpo: a loss that the recipe registers itself
    "verl a recipe's own loss": (
        "a.sh", "python3 -m recipe.gvpo.main actor_rollout_ref.actor.policy_loss.loss_mode=gvpo", {CLIP: TO_SET},
        "the program recipe.gvpo.main: code of its own may change",
    ),
    "verl without a name": ("a.sh", VERL + "trainer.experiment_name=null", {"run_name": None}, ""),
    "verl router replay": (
        "a.sh", VERL + "actor_rollout_ref.actor.megatron.router_replay.mode=R3", {}, "set routing_replay: r3",
    ),
    "shell arithmetic in brackets": (
        "a.sh", VERL + "data.max_response_length=$(((4*128)+1))", {"max_completion_length": 513}, "",
    ),
    # SkyRL: examples/train/algorithms/clip_cov_kl_cov/run_kl_cov.sh, reinforce++/run_reinforce++.sh
    "SkyRL KL-Cov": (
        "a.sh", SKYRL + "trainer.algorithm.policy_loss_type=kl_cov trainer.algorithm.kl_cov.kl_cov_frac=0.1",
        {f"{CLIP}.type": "kl_cov", f"{CLIP}.fraction": 0.1, f"{CLIP}.coef": 1.0}, "",
    ),
    "SkyRL REINFORCE++": (
        "a.sh", SKYRL + "trainer.algorithm.advantage_estimator=reinforce++",
        {"offpolicy.advantages.type": "reinforce_plus_plus", "offpolicy.advantages.discount": 1.0}, "",
    ),
    "SkyRL rollout_is": (
        "a.sh", SKYRL + "trainer.algorithm.policy_loss_type=rollout_is trainer.algorithm.eps_clip_low=0.2",
        {f"{CLIP}.type": "gpg", "offpolicy.objective.mode": "bypass", "offpolicy.correction.weight.type": "band",
         "offpolicy.correction.weight.low": 0.8, "offpolicy.correction.weight.high": 1.2}, "",
    ),
    "SkyRL another loss": (
        "a.sh", SKYRL + "trainer.algorithm.policy_loss_type=importance_sampling", {CLIP: TO_SET}, "no counterpart",
    ),
    # slime/utils/arguments.py names CISPO by the estimator
    "slime CISPO": (
        "a.sh", SLIME + "--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0",
        {f"{CLIP}.type": "cispo", f"{CLIP}.high": 5.0, f"{CLIP}.low": None, "epsilon": None}, "",
    ),
    "slime ahead": ("a.sh", SLIME.replace("train.py", "train_async.py"), {}, "train_async.py: sampling ahead"),
    # AReaL: examples/math; areal/utils/timeutil.py: one of the frequencies is enough
    "AReaL's own recipe": (
        "a.yaml", "gconfig: {n_samples: 4}\nsaver: {freq_epochs: 1, freq_steps: null}\nactor:\n  path: a\n"
        "  reward_norm: {mean_level: group, std_level: group, group_size: 4}\n"
        "  adv_norm: {mean_level: batch, std_level: batch}\n",
        {"offpolicy.advantages.type": "reinforce_plus_plus_baseline", "offpolicy.advantages.scale": "group",
         "save_strategy": "epoch"}, "",
    ),
    "AReaL REINFORCE": (
        "a.yaml", "gconfig: {n_samples: 4}\nactor: {path: a, discount: 0.9, adv_norm: {mean_level: batch}}\n",
        {"offpolicy.advantages.type": "reinforce_plus_plus", "offpolicy.advantages.discount": 0.9}, "",
    ),
    "AReaL M2PO": (
        "a.yaml", "gconfig: {n_samples: 4}\nactor: {path: a, use_decoupled_loss: true, m2_threshold: 0.04}\n",
        {"offpolicy.correction.keep": [{"type": "second_moment_budget", "budget": 0.04}]}, "",
    ),
    "AReaL without a clip's bound": (
        "a.yaml",
        "gconfig: {n_samples: 4}\nactor: {path: a, eps_clip: 0.0}\n",
        {"epsilon": TO_SET},
        "a bound of 0",
    ),
    "AReaL Megatron LoRA": (
        "a.yaml", "gconfig: {n_samples: 4}\nactor:\n  {path: a, use_lora: true, lora_rank: 8, lora_alpha: 16,\n"
        "   target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}\n",
        {"lora_target_modules": LLAMA}, "",
    ),
    "Megatron LoRA of some layers": (
        "a.yaml", "gconfig: {n_samples: 4}\n"
        "actor: {path: a, use_lora: true, lora_rank: 8, target_modules: ['*.layers.0.*.linear_qkv']}\n",
        {"lora_r": 8, "lora_target_modules": TO_SET}, "Megatron's names of modules",
    ),
    # NeMo-RL: examples/configs/grpo_math_1B.yaml and docs/guides/lora.md
    "NeMo-RL's default advantages": (
        "a.yaml", "grpo: {num_prompts_per_step: 8}\npolicy: {model_name: a, generation: {max_new_tokens: 9}}\n",
        {"offpolicy.advantages.type": "rloo", "offpolicy.advantages.scale": "others"}, "",
    ),
    "NeMo-RL LoRA of all layers": (
        "a.yaml", "policy:\n  model_name: a\n  dtensor_cfg:\n"
        "    lora_cfg: {enabled: true, dim: 128, alpha: 32, target_modules: [], match_all_linear: true}\n",
        {"lora_r": 128, "lora_target_modules": "all-linear"}, "",
    ),
    "NeMo-RL without checkpoints": (
        "a.yaml", "policy: {model_name: a, dtensor_cfg: {enabled: true}}\n"
        "checkpointing: {enabled: false, save_period: 10}\n", {"save_strategy": "no", "save_steps": None}, "",
    ),
    # ms-swift: examples/train/grpo/internal/rloo.sh; swift/arguments/rlhf_args.py:369-373
    "ms-swift RLOO": (
        "a.sh", SWIFT + "--advantage_estimator rloo --beta 0.001",
        {"offpolicy.objective.kl.place": "reward", "offpolicy.objective.kl.estimator": "k1",
         "offpolicy.objective.kl.coef": 0.001}, "",
    ),
    "ms-swift REINFORCE++": (
        "a.sh", SWIFT + "--advantage_estimator reinforce_plus_plus --beta 0 --scale_rewards batch",
        {"offpolicy.advantages": "reinforce_plus_plus_baseline", "offpolicy.objective.kl.place": None}, "",
    ),
    "ms-swift words of its own": (
        "a.sh", SWIFT + "--deepspeed zero3 --save_strategy no --vllm_mode server --vllm_server_host h "
        "--vllm_server_port 8001",
        {"deepspeed": None, "save_strategy": "no", "vllm_server_host": "h", "vllm_server_port": 8001},
        "recipes/accelerate/zero3.yaml",
    ),
    "ms-swift without a batch size": (
        "a.sh", "swift rlhf --rlhf_type grpo --num_generations 8", {"per_device_train_batch_size": TO_SET}, "1 there",
    ),
    # ms-swift: examples/ray/grpo/ray_grpo_colocate.yaml, megatron/grpo/dense_colocate.sh
    "ms-swift Megatron, constant": (
        "a.sh", "NPROC_PER_NODE=8 " + MEGATRON_SWIFT + "--min_lr 5e-5 --num_generations 8",
        {"lr_scheduler_type": "constant", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, "",
    ),
    "ms-swift Megatron, a least rate": (
        "a.sh", MEGATRON_SWIFT + "--min_lr 1e-6 --lr_warmup_fraction 0.05",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs.min_lr": 1e-6, "warmup_steps": 0.05,
         "per_device_train_batch_size": TO_SET}, "the number of devices is not in the file",
    ),
    # OpenRLHF: openrlhf/datasets/prompts_dataset.py takes lists of messages, and labels are optional
    "OpenRLHF without labels": (
        "a.sh", OPENRLHF + "--data.prompt_dataset a/b --data.input_key context_messages",
        {"question_column": "context_messages", "answer_column": None}, "without labels: no answers",
    ),
    # open-r1: recipes/DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml
    "TRL mappings": (
        "a.yaml", "model_name_or_path: a\nuse_vllm: true\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs: {min_lr_rate: 0.1}\nmodel_init_kwargs: {a: {b: 1}}\nsystem_prompt: Think.\n"
        "save_strategy: no\n",
        {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "model_init_kwargs": {"a": {"b": 1}}, "system_prompt": "Think.",
         "save_strategy": "no"}, "",
    ),
    # what a review of these changes found: other backends' defaults, and values that cannot be known
    "ms-swift Megatron RLOO": (
        "a.sh", MEGATRON_SWIFT + "--advantage_estimator rloo --beta 0.1",
        {"offpolicy.objective.kl.place": None, "offpolicy.advantages": TO_SET}, "'rloo' with scale_rewards='group'",
    ),
    "ms-swift Megatron REINFORCE++": (
        "a.sh", MEGATRON_SWIFT + "--advantage_estimator reinforce_plus_plus --beta 0",
        {"offpolicy.advantages": None, "scale_rewards": "group"}, "",
    ),
    "ms-swift, an unknown beta": (
        "a.sh", SWIFT + "--kl_in_reward true --beta $B", {"offpolicy.objective.kl.place": None},
        "the place of the KL term or beta is not known",
    ),
    "ms-swift, nodes": (
        "a.sh", "NNODES=4 NPROC_PER_NODE=8 " + MEGATRON_SWIFT + "--num_generations 8",
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}, "NPROC_PER_NODE x NNODES",
    ),
    "ms-swift, several servers": (
        "a.sh", SWIFT + "--vllm_mode server --vllm_server_host a b", {"vllm_server_host": None},
        "--vllm_server_host: several servers there",
    ),
    "ms-swift, offloaded": ("a.sh", SWIFT + "--deepspeed zero3_offload", {}, "recipes/accelerate/zero3_offload.yaml"),
    "AReaL M2PO, coupled": (
        "a.yaml", "gconfig: {n_samples: 4}\nactor: {path: a, use_decoupled_loss: false, m2_threshold: 0.04}\n",
        {"offpolicy.correction.keep": None}, "it drops nothing",
    ),
    "AReaL discounted groups": (
        "a.yaml", "gconfig: {n_samples: 4}\nactor:\n  path: a\n  discount: 0.9\n"
        "  reward_norm: {mean_level: group, std_level: group}\n", {"offpolicy.advantages": TO_SET}, "discounted by 0.9",
    ),
    "AReaL, an unknown discount": (
        "a.yaml", "gconfig: {n_samples: 4}\nactor:\n  path: a\n  discount: '${oc.env:G}'\n"
        "  reward_norm: {mean_level: group, std_level: group}\n", {"offpolicy.advantages": TO_SET}, "unknown actor",
    ),
    "NeMo-RL, an unknown switch": (
        "a.yaml", "grpo: {adv_estimator: {name: grpo, normalize_rewards: '${oc.env:L}'}}\n"
        "policy: {model_name: a, generation: {max_new_tokens: 9}}\n", {"offpolicy.advantages": TO_SET}, "is not known",
    ),
    "NeMo-RL, unknown checkpoints": (
        "a.yaml", "policy: {model_name: a, dtensor_cfg: {enabled: true}}\n"
        "checkpointing: {enabled: '${oc.env:C}', save_period: 10}\n", {"save_steps": 10}, "",
    ),
    "OpenRLHF, an unknown label": (
        "a.sh", OPENRLHF + "--data.prompt_dataset a/b --data.label_key $L", {"answer_column": TO_SET}, "",
    ),
    "SkyRL, an unknown bound": (
        "a.sh", SKYRL + "trainer.algorithm.policy_loss_type=rollout_is trainer.algorithm.eps_clip_low=$X",
        {CLIP: TO_SET}, "is null or not known",
    ),
    "slime, an unknown bound": (
        "a.sh", SLIME + "--advantage-estimator cispo --eps-clip $E", {CLIP: TO_SET}, "--eps-clip is not known",
    ),
    "verl held-out rows, no limit": (
        "a.sh", VERL + "data.train_files=a.parquet data.val_files=b.parquet data.val_max_samples=0",
        {"eval_size": None}, "",
    ),
    "verl fully async, an unknown part": (
        "a.sh", FULLY_ASYNC.replace("require_batches=4", "require_batches=$R"), {"num_generations": 16},
        "give async_training.require_batches=... as overrides",
    ),
}  # fmt: skip


def test_a_section_given_alone_takes_overrides_by_its_whole_path(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("actor: {ppo_mini_batch_size: 32, clip_ratio: 0.3, optim: {lr: 1e-5}}\n")
    printed, lists = migrated(path, ["actor_rollout_ref.actor.use_kl_loss=true"])
    assert yaml.safe_load(printed)["learning_rate"] == 1e-5 and not any("unknown to this kit" in line for line in lists)


@pytest.mark.parametrize("name", CASES)
def test_a_real_setting_means_here_what_it_means_there(name: str, tmp_path: Path) -> None:
    check_case(tmp_path, CASES[name])


def test_a_script_that_starts_another_is_read_with_it(tmp_path: Path) -> None:
    # SkyRL: examples/train/algorithms/gspo/run_gspo_gsm8k.sh
    (tmp_path / "run_gsm8k.sh").write_text(SKYRL + 'trainer.epochs=20 trainer.train_batch_size=64 "$@"\n')
    outer = "bash run_gsm8k.sh trainer.train_batch_size=32 trainer.algorithm.policy_loss_type=gspo\n"
    fields, _ = carried(tmp_path, "run_gspo.sh", outer)
    assert fields["num_train_epochs"] == 20 and fields[f"{CLIP}.type"] == "gspo_token"
    (tmp_path / "run_gsm8k.sh").unlink()
    _, lists = carried(tmp_path, "run_gspo.sh", outer)
    assert "it starts run_gsm8k.sh, which was not found: what that sets is missing here" in lists


def test_a_started_script_knows_what_was_exported(tmp_path: Path) -> None:
    inner = "N=${N:-4}\nM=${M:-2}\n" + SKYRL + 'generator.n_samples_per_prompt=$N trainer.epochs=$M "$@"\n'
    (tmp_path / "inner.sh").write_text(inner)
    fields, _ = carried(tmp_path, "a.sh", "export N=6\nM=3\nbash inner.sh trainer.policy_mini_batch_size=8\n")
    assert (fields["num_generations"], fields["num_train_epochs"]) == (6, 2)  # M is the outer script's own
    fields, _ = carried(tmp_path, "a.sh", "M=3 bash inner.sh trainer.policy_mini_batch_size=8\n")
    assert (fields["num_generations"], fields["num_train_epochs"]) == (4, 3)


def test_scripts_that_start_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "b.sh").write_text("bash a.sh trainer.epochs=2\n")
    _, lists = carried(tmp_path, "a.sh", "bash b.sh trainer.algorithm.use_kl_loss=false\n")
    assert "it starts a.sh, which is being read already" in lists


def test_further_trainings_of_a_script_are_told(tmp_path: Path) -> None:
    _, lists = carried(tmp_path, "a.sh", f"{VERL}\n{VERL}trainer.test_freq=1\n")
    assert "the script holds 2 trainings: the one with the most options is read" in lists
    _, lists = carried(tmp_path, "a.sh", f"ray start --head\n{VERL}trainer.test_freq=1\n")
    assert "trainings" not in lists
