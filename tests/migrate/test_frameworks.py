"""Every framework's files: what they become, and that the printed YAML loads and means what the framework computes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import ModelConfig, TrlParser

from recipes.grpo import RecipeArguments
from trl_offpolicy import presets
from trl_offpolicy.cli.migrate import migrated
from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.migrate import migrate
from trl_offpolicy.presets.preset import Preset

MACHINE = {"use_cpu": True, "bf16": False, "report_to": "none"}
"""What a test machine needs beside the printed YAML."""


@dataclass(frozen=True)
class Case:
    """A file, and what it is to become.

    Args:
        framework: whose file it is.
        name: of the file; its ending says how it is read.
        text: its content.
        options: of ``presets.from_<framework>``, which compute the same correction.
        fields: fields of the printed YAML.
        overrides: on the command line.
        unknown: a setting that must be listed as unknown.
    """

    framework: str
    name: str
    text: str
    options: dict[str, Any]
    fields: dict[str, Any]
    overrides: tuple[str, ...] = ()
    unknown: tuple[str, ...] = field(default=())


VERL_YAML = """
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B, lora_rank: 32, lora_alpha: 64, target_modules: all-linear}
  actor:
    optim: {lr: 1e-6, lr_warmup_steps: 10, weight_decay: 0.1, betas: [0.9, 0.95]}
    ppo_mini_batch_size: 32
    ppo_micro_batch_size_per_gpu: 4
    clip_ratio_high: 0.28
    use_kl_loss: true
    kl_loss_coef: 0.002
    grad_clip: 0.5
    fsdp_config: {param_offload: false}
  rollout: {name: vllm, n: 8, temperature: 0.9, top_p: 0.95, top_k: -1, gpu_memory_utilization: 0.6}
algorithm:
  adv_estimator: grpo
  rollout_correction: {rollout_is: token, rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.01}
  a_new_option: 1
data: {train_batch_size: 128, max_prompt_length: 512, max_response_length: "${mul:2,1024}", train_files: a.parquet}
trainer: {nnodes: 1, n_gpus_per_node: 4, total_epochs: 3, save_freq: 10, total_training_steps: null}
"""
VERL_SH = """#!/usr/bin/env bash
set -xeuo pipefail
rollout_is="sequence"          # the product of ratios
LR=${LR:-5e-7}
max_response_length=$((1024 * 4))
DATA=(
    # files of the data
    data.train_batch_size=128 data.max_response_length=${max_response_length}
    data.train_files="['$HOME/train.parquet']"
)
if [ "$DEVICE" = npu ]; then
    LR=1e-5
fi
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    algorithm.adv_estimator=rloo \\
    algorithm.rollout_correction.rollout_is=${rollout_is} \\
    algorithm.rollout_correction.rollout_rs=\\'token_k1,seq_max_k2\\' \\
    algorithm.rollout_correction.rollout_rs_threshold=\\'0.6_1.6,2.5\\' \\
    algorithm.rollout_correction.bypass_mode=true \\
    algorithm.rollout_correction.loss_type=reinforce \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.optim.lr=${LR} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.name=vllm +actor_rollout_ref.rollout.a_new_option=1 "$@"
echo "done: ${rollout_is}"
"""
SKYRL_SH = """
: "${LOGGER:="console"}"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
  trainer.policy.model.path="Qwen/Qwen3-1.7B-Base" trainer.algorithm.policy_loss_type="dual_clip" \\
  trainer.algorithm.eps_clip_low=0.2 trainer.algorithm.eps_clip_high=0.28 trainer.algorithm.clip_ratio_c=10.0 \\
  trainer.algorithm.use_kl_loss=false trainer.algorithm.off_policy_correction.tis_ratio_type=token \\
  trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric \\
  trainer.train_batch_size=64 trainer.policy_mini_batch_size=16 trainer.micro_train_batch_size_per_gpu=4 \\
  trainer.placement.policy_num_gpus_per_node=4 trainer.placement.colocate_all=true trainer.epochs=2 \\
  trainer.policy.optimizer_config.lr=1e-6 trainer.policy.optimizer_config.num_warmup_steps=16 \\
  generator.n_samples_per_prompt=8 generator.sampling_params.max_generate_length=2048 \\
  generator.inference_engine.backend=vllm trainer.logger="$LOGGER" trainer.a_new_option=3
"""
SKYRL_YAML = """
trainer:
  policy: {model: {path: Qwen/Qwen2.5-0.5B-Instruct}}
  algorithm:
    policy_loss_type: gspo
    eps_clip_low: 0.0003
    eps_clip_high: 0.0004
    loss_reduction: sequence_mean
    off_policy_correction: {sequence_mask_metric: product, product_mask_high: 3.0, outlier_token_is_threshold_low: 1e-4}
"""
SLIME_SH = """
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   #--hf-checkpoint /root/Qwen3-4B-FP8
   --save /root/Qwen3-4B_slime/ --save-interval 20
)
GRPO_ARGS=(
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28 --use-tis --tis-clip 3.0 --tis-clip-low 0.5
)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"env_vars": {"A": "1"}}' \\
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} \\
   ${CKPT_ARGS[@]} ${GRPO_ARGS[@]} --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 \\
   --global-batch-size 256 --rollout-max-response-len 8192 --rollout-temperature 0.8 --lr 1e-6 \\
   --lr-decay-style constant --rollout-num-gpus-per-engine 2 --a-new-flag 7
"""
SLIME_YAML = """
use_tis: true
use_rs: true
tis_mode: clip
tis_lower_bound: 0.5
tis_upper_bound: 2.0
rs_level: geometric
rs_lower_bound: 0.99
rs_upper_bound: 1.01
rs_veto_threshold: 1.0e-4
a_new_option: 1
"""
AREAL_YAML = """
seed: 1
total_train_epochs: 10
trial_name: trial0
cluster: {n_nodes: 1, fileroot: /tmp/areal}
rollout: {backend: "sglang:d4p1t1", max_head_offpolicyness: 2, consumer_batch_size: "${train_dataset.batch_size}"}
gconfig: {n_samples: 4, max_new_tokens: 1024, temperature: 1.0, greedy: false}
actor:
  backend: "fsdp:d4p1t1"
  path: Qwen/Qwen2.5-1.5B-Instruct
  optimizer: {type: adam, lr: 1.70e-5, weight_decay: 0.017, lr_scheduler_type: constant, warmup_steps_proportion: 0.001}
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  rejection_sampling: {level: token, action: clamp, metric: ratio, upper: 5.0, lower: 0.2}
  reward_norm: {mean_level: group, std_level: null, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  a_new_option: 1
sglang: {mem_fraction_static: 0.8, context_length: 32768}
train_dataset: {batch_size: 64, path: openai/gsm8k}
"""
AREAL_OLD = """
gconfig: {n_samples: 8, max_new_tokens: 512}
actor:
  path: Qwen/Qwen2.5-1.5B-Instruct
  use_decoupled_loss: true
  behave_imp_weight_cap: 4.0
  behave_imp_weight_mode: sequence_mask
"""
OPENRLHF_SH = """
MODEL_PATH="Qwen/Qwen3-4B-Thinking-2507"
WORK_DIR=$(cd "$SCRIPT_DIR/../.." && pwd)
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path ${MODEL_PATH} --ckpt.output_dir ${WORK_DIR}/exp --ckpt.save_steps 5 \\
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 4 --train.colocate_all \\
   --algo.kl.use_loss --algo.kl.init_coef 1e-4 --algo.kl.estimator k2 --algo.advantage.estimator group_norm \\
   --actor.eps_clip_low_high 0.2 0.27 --train.batch_size 128 --rollout.batch_size 64 \\
   --rollout.n_samples_per_prompt 8 --train.micro_batch_size 2 --rollout.max_new_tokens 2048 \\
   --actor.adam.lr 5e-7 --data.prompt_dataset zhuzilin/dapo-math-17k --data.input_key prompt --data.label_key label \\
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 4.0 \\
   --algo.advantage.is_correction_type icepop --algo.a_new_flag 1
"""
OPENRLHF_OLD = """
python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B --actor_num_gpus_per_node 2 \\
   --enable_vllm_is_correction --vllm_is_truncated_threshold 2 --init_kl_coef 0 --advantage_estimator rloo \\
   --rollout_batch_size 32 --train_batch_size 64 --n_samples_per_prompt 4 --micro_train_batch_size 4 \\
   --actor_learning_rate 1e-6 --temperature 0.7 --max_new_tokens 512 --num_episodes 2
"""
NEMO_YAML = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 8, max_num_steps: 500, seed: 7,
       normalize_rewards: true, use_leave_one_out_baseline: false, async_grpo: {enabled: false}}
loss_fn:
  reference_policy_kl_penalty: 0.0001
  reference_policy_kl_type: k2
  ratio_clip_min: 0.2
  ratio_clip_max: 0.27
  use_importance_sampling_correction: true
  truncated_importance_sampling_ratio: 5.0
  truncated_importance_sampling_ratio_min: 0.5
  truncated_importance_sampling_type: icepop
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 64
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    top_k: null
    colocated: {enabled: true}
    vllm_cfg: {tensor_parallel_size: 1, max_model_len: "${policy.max_total_sequence_length}"}
  a_new_option: 1
cluster: {gpus_per_node: 4, num_nodes: 1}
"""
NEMO_CISPO = """
loss_fn:
  reference_policy_kl_penalty: 0.0
  ratio_clip_min: 1.0
  ratio_clip_max: 5.0
  use_importance_sampling_correction: true
  use_cispo: true
policy: {model_name: Qwen/Qwen3-30B-A3B}
"""
PRIME_TOML = """
max_steps = 200
seq_len = 8192
[deployment]
num_train_gpus = 2
[ckpt]
interval = 50
[model]
name = "PrimeIntellect/Qwen3-1.7B-Wordle-SFT"
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 8
a_new_option = 1
[orchestrator.train.sampling]
max_completion_tokens = 1024
[trainer.optim]
lr = 3e-6
[trainer.loss]
dppo_mask_low = 0.1
dppo_mask_high = 0.3
kl_tau = 0.0
"""
PRIME_IPO = """
[model]
name = "Qwen/Qwen3-0.6B"
[optim]
lr = 3e-6
[loss]
type = "ipo"
ipo_threshold = 0.15
"""
SWIFT_SH = """
CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 \\
swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset AI-MO/NuminaMath-TIR#10000 \\
    --torch_dtype bfloat16 --beta 0.001 --epsilon 3e-4 --epsilon_high 4e-4 --steps_per_generation 32 \\
    --importance_sampling_level sequence --num_train_epochs 1 --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 8 --num_generations 16 --tuner_type full --reward_funcs accuracy format \\
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.6 --vllm_max_model_len 16384 \\
    --max_completion_length 8192 --learning_rate 1e-6 --warmup_ratio 0.05 --log_completions true \\
    --rollout_importance_sampling_mode sequence_mask --rollout_importance_sampling_threshold 3 --a_new_flag x
"""
SWIFT_YAML = """
rlhf_type: grpo
model: Qwen/Qwen2.5-VL-3B-Instruct
beta: 0
loss_type: cispo
epsilon_high: 5.0
lora_rank: 16
rollout_importance_sampling_mode: token_truncate
off_policy_sequence_mask_delta: 0.1
use_vllm: true
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
temperature: 1.0
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-1.5B
output_dir: run
use_vllm: true
vllm_mode: colocate
vllm_importance_sampling_mode: token_truncate
vllm_importance_sampling_clip_max: 2.0
loss_type: dr_grpo
beta: 0.04
learning_rate: 1e-6
reward_funcs: [accuracy_reward]
a_new_option: 1
"""
TRL_OLD = """
model_name_or_path: Qwen/Qwen2.5-1.5B
use_vllm: true
vllm_importance_sampling_cap: 4.0
off_policy_mask_threshold: 0.1
num_generations: 4
"""
RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
CASES = {
    "verl yaml": Case(
        "verl", "ppo.yaml", VERL_YAML,
        {"rollout_is": "token", **RS, "adv_estimator": "grpo", "clip_ratio_high": 0.28, "use_kl_loss": True,
         "kl_loss_coef": 0.002},
        {"model_name_or_path": "Qwen/Qwen2.5-7B", "learning_rate": 1e-6, "lr_scheduler_type": "constant_with_warmup",
         "warmup_steps": 40, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.5, "num_generations": 8,
         "per_device_train_batch_size": 4, "gradient_accumulation_steps": 16, "steps_per_generation": 64,
         "max_completion_length": 2048, "vllm_max_model_length": 2560, "temperature": 0.9, "top_p": 0.95, "top_k": 0,
         "use_vllm": True, "use_peft": True, "lora_r": 32, "num_train_epochs": 3, "save_steps": 40},
        unknown=("algorithm.a_new_option",),
    ),
    "verl script": Case(
        "verl", "run.sh", VERL_SH,
        {"rollout_is": "sequence", "rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.6_1.6,2.5",
         "bypass_mode": True, "loss_type": "reinforce", "adv_estimator": "rloo"},
        {"learning_rate": 5e-7, "max_completion_length": 4096, "num_generations": 4,
         "gradient_accumulation_steps": 256},
        ("trainer.n_gpus_per_node=2",), ("actor_rollout_ref.rollout.a_new_option",),
    ),
    "skyrl script": Case(
        "skyrl", "run_dapo.sh", SKYRL_SH, {"tis_ratio_type": "token", "sequence_mask_metric": "geometric"},
        {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 10.0, "beta": 0.0, "num_generations": 8, "warmup_steps": 16,
         "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "steps_per_generation": 32,
         "vllm_mode": "colocate", "max_completion_length": 2048, "num_train_epochs": 2},
        unknown=("trainer.a_new_option",),
    ),
    "skyrl yaml": Case(
        "skyrl", "config.yaml", SKYRL_YAML,
        {"sequence_mask_metric": "product", "product_mask_high": 3.0, "outlier_token_is_threshold_low": 1e-4},
        {"model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "learning_rate": 1e-6},
    ),
    "slime script": Case(
        "slime", "run-qwen3-4B.sh", SLIME_SH, {"tis_mode": "clip", "tis_lower_bound": 0.5, "tis_upper_bound": 3.0},
        {"model_name_or_path": "/root/Qwen3-4B", "epsilon_high": 0.28, "max_steps": 300, "save_steps": 20,
         "num_generations": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 32,
         "temperature": 0.8, "vllm_tensor_parallel_size": 2, "lr_scheduler_type": "constant", "weight_decay": 0.01},
        unknown=("--a-new-flag",),
    ),
    "slime mis.yaml": Case(
        "slime", "mis.yaml", SLIME_YAML,
        {"use_rs": True, "tis_mode": "clip", "tis_lower_bound": 0.5, "rs_level": "geometric", "rs_lower_bound": 0.99,
         "rs_upper_bound": 1.01, "rs_veto_threshold": 1e-4}, {}, unknown=("a_new_option",),
    ),
    "areal yaml": Case(
        "areal", "gsm8k_grpo.yaml", AREAL_YAML,
        {"level": "token", "action": "clamp", "metric": "ratio", "upper": 5.0, "lower": 0.2},
        {"learning_rate": 1.7e-5, "epsilon": 0.4, "beta": 0.0, "num_generations": 4, "warmup_steps": 0.001,
         "per_device_train_batch_size": 1, "gradient_accumulation_steps": 32, "steps_per_generation": 64,
         "vllm_mode": "server", "vllm_gpu_memory_utilization": 0.8, "max_completion_length": 1024, "seed": 1},
        unknown=("actor.a_new_option",),
    ),
    "areal old": Case(
        "areal", "old.yaml", AREAL_OLD,
        {"level": "sequence", "action": "mask", "metric": "ratio", "upper": 4.0, "use_decoupled_loss": True},
        {"max_completion_length": 512},
    ),
    "openrlhf script": Case(
        "openrlhf", "train.sh", OPENRLHF_SH,
        {"enable_vllm_is_correction": True, "vllm_is_correction_type": "icepop",
         "vllm_is_truncated_threshold": [0.5, 4.0]},
        {"epsilon_high": 0.27, "num_generations": 8, "per_device_train_batch_size": 2, "steps_per_generation": 64,
         "gradient_accumulation_steps": 16, "save_steps": 20, "dataset_name": "zhuzilin/dapo-math-17k",
         "question_column": "prompt", "lr_scheduler_type": "cosine_with_min_lr", "adam_beta2": 0.95},
        unknown=("--algo.a_new_flag",),
    ),
    "openrlhf old": Case(
        "openrlhf", "old.sh", OPENRLHF_OLD,
        {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.0, 2]},
        {"model_name_or_path": "Qwen/Qwen2.5-1.5B", "temperature": 0.7, "beta": 0.0, "num_generations": 4,
         "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "steps_per_generation": 16},
    ),
    "nemo-rl yaml": Case(
        "nemo-rl", "prorl.yaml", NEMO_YAML,
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop",
         "truncated_importance_sampling_ratio": 5.0, "truncated_importance_sampling_ratio_min": 0.5,
         "ratio_clip_max": 0.27, "reference_policy_kl_penalty": 1e-4, "reference_policy_kl_type": "k2"},
        {"learning_rate": 5e-6, "warmup_steps": 200, "max_steps": 2000, "num_generations": 8, "seed": 7,
         "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 16,
         "max_completion_length": 512, "vllm_max_model_length": 512, "top_k": 0},
        unknown=("policy.a_new_option",),
    ),
    "nemo-rl cispo": Case(
        "nemo-rl", "cispo.yaml", NEMO_CISPO,
        {"use_importance_sampling_correction": True, "use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0,
         "reference_policy_kl_penalty": 0.0}, {"model_name_or_path": "Qwen/Qwen3-30B-A3B"},
    ),
    "prime-rl toml": Case(
        "prime-rl", "rl.toml", PRIME_TOML, {"dppo_mask_low": 0.1, "dppo_mask_high": 0.3, "kl_tau": 0.0},
        {"max_steps": 200, "save_steps": 50, "num_generations": 16, "gradient_accumulation_steps": 256,
         "learning_rate": 3e-6, "max_completion_length": 1024, "vllm_mode": "server"},
        unknown=("orchestrator.a_new_option",),
    ),
    "prime-rl trainer": Case(
        "prime-rl", "train.toml", PRIME_IPO, {"type": "ipo", "ipo_threshold": 0.15}, {"learning_rate": 3e-6},
    ),
    "ms-swift script": Case(
        "ms-swift", "gspo.sh", SWIFT_SH,
        {"rollout_importance_sampling_mode": "sequence_mask", "rollout_importance_sampling_threshold": 3,
         "beta": 0.001},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4,
         "num_generations": 16, "steps_per_generation": 32, "weight_decay": 0.1, "lr_scheduler_type": "cosine",
         "warmup_steps": 0.05, "vllm_max_model_length": 16384, "temperature": 0.9},
        unknown=("--a_new_flag",),
    ),
    "ms-swift yaml": Case(
        "ms-swift", "rlhf.yaml", SWIFT_YAML,
        {"rollout_importance_sampling_mode": "token_truncate", "off_policy_sequence_mask_delta": 0.1, "beta": 0,
         "loss_type": None},
        {"loss_type": "cispo", "epsilon_high": 5.0, "use_peft": True, "lora_r": 16, "lora_alpha": 32,
         "lora_target_modules": ["all-linear"], "top_p": 0.9, "top_k": 50, "learning_rate": 1e-4},
    ),
    "trl yaml": Case(
        "trl", "grpo.yaml", TRL_YAML,
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
        {"loss_type": "dr_grpo", "beta": 0.04, "learning_rate": 1e-6}, unknown=("a_new_option",),
    ),
    "trl old": Case(
        "trl", "old.yaml", TRL_OLD, {"vllm_importance_sampling_clip_max": 4.0}, {"off_policy_mask_threshold": 0.1},
    ),
}  # fmt: skip


def written(case: Case, folder: Path) -> Path:
    path = folder / case.name
    path.write_text(case.text)
    return path


def loaded(text: str, folder: Path) -> OffPolicyGRPOConfig:
    """The configuration of the printed YAML, as recipes/grpo.py reads it."""
    values = {**MACHINE, **yaml.safe_load(text), "output_dir": str(folder / "run")}
    parser = TrlParser((RecipeArguments, OffPolicyGRPOConfig, ModelConfig))
    found: OffPolicyGRPOConfig = parser.parse_dict(values)[1]
    return found


def expected(case: Case) -> Preset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return presets.FRAMEWORKS[case.framework](**case.options)


@pytest.mark.parametrize("name", CASES)
def test_the_printed_yaml_loads_and_has_the_correction(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    text, lists = migrated(written(case, tmp_path), case.overrides)
    fields = yaml.safe_load(text)
    assert {key: fields.get(key) for key in case.fields} == case.fields
    found, meant = loaded(text, tmp_path).preset, expected(case)
    keep = [
        term for term in found.correction.keep if type(term).__name__ != "OffPolicySequenceMask" or "trl" not in name
    ]
    assert found.correction.weights == meant.correction.weights
    assert tuple(keep) == meant.correction.keep
    assert found.correction.normalize == meant.correction.normalize
    assert found.objective.mode == meant.objective.mode
    assert found.objective.kl_on == meant.objective.kl_on
    unknown = next((line for line in lists if "unknown to this kit" in line), "")
    for setting in case.unknown:
        assert setting in unknown, lists
    if not case.unknown:
        assert unknown == ""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.overrides])
def test_a_file_is_read_in_place(name: str, tmp_path: Path) -> None:
    """``offpolicy: {framework, file}`` is the preset of the same options."""
    case = CASES[name]
    path = written(Case(case.framework, case.name, case.text.replace("a_new_option", "seed"), {}, {}), tmp_path)
    spec = {"framework": case.framework, "file": str(path)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = presets.from_mapping(spec, where="offpolicy")
    assert found.correction == expected(case).correction
    assert found.objective == expected(case).objective


@pytest.mark.parametrize("name", CASES)
def test_no_setting_is_dropped_silently(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    migration = migrate(written(case, tmp_path), case.overrides)
    named = {key for one in migration.found for key in one.keys} | set(migration.option_keys.values())
    given = {key for key, value in migration.settings.values.items() if value != {}} | set(migration.settings.unknown)
    renamed = {shown.partition(" ")[0].lstrip("-") for shown in map(migration.settings.shown, named)}
    assert {key for key in given if key not in named and key not in renamed} == set()


def test_a_temperature_at_which_nothing_is_drawn_is_not_carried(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref: {rollout: {n: 8, temperature: 0}}\nalgorithm: {adv_estimator: grpo}\n")
    with pytest.raises(ValueError, match=r"rollout.temperature must be above 0, since the loss divides by it, but got"):
        migrate(file)


def test_nemo_rls_fp8_is_a_quantisation_and_its_cosine_ends_at_min_lr(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2}\nloss_fn: {reference_policy_kl_penalty: 0.0}\n"
        "policy:\n  train_global_batch_size: 8\n  generation: {backend: vllm, vllm_cfg: {precision: fp8}}\n"
        "  megatron_cfg:\n    enabled: true\n    optimizer: {lr: 5.0e-6, min_lr: 5.0e-7}\n"
        "    scheduler: {lr_decay_style: cosine, lr_warmup_iters: 13, lr_decay_iters: 1000}\n"
    )
    text, lists = migrated(file)
    found = yaml.safe_load(text)
    assert found["engine"] == {"dtype": "bfloat16", "quantization": "fp8"}
    assert found["lr_scheduler_type"] == "cosine_with_min_lr"
    assert found["lr_scheduler_kwargs"] == {"min_lr": 5e-7} and "lr_decay_iters" in " ".join(lists)
