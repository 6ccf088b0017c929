"""Launch scripts of other frameworks as tests begin them, and what a file of theirs becomes here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trl_offpolicy.cli.migrate import migrated
from trl_offpolicy.migrate.nested import flatten

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 "
ONE_STEP = "python3 -m verl.experimental.one_step_off_policy.main_ppo actor_rollout_ref.rollout.name=vllm "
FULLY_ASYNC = (
    "python -m verl.experimental.fully_async_policy.fully_async_main data.train_batch_size=0 data.gen_batch_size=1 "
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 actor_rollout_ref.hybrid_engine=False "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 "
    "trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4 rollout.n=4 "
    "rollout.total_rollout_steps=51200 trainer.test_freq=10 async_training.require_batches=4 "
    "async_training.trigger_parameter_sync_step=4 "
)
SKYRL = "uv run -m skyrl.train.entrypoints.main_base trainer.algorithm.use_kl_loss=false "
SLIME = "python3 train.py --num-rollout 3 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
SWIFT = "swift rlhf --rlhf_type grpo --per_device_train_batch_size 8 "
MEGATRON_SWIFT = "megatron rlhf --rlhf_type grpo --micro_batch_size 4 --global_batch_size 64 --lr 5e-5 "
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator rloo --rollout.max_new_tokens 99 "
LORA = ("lora_r", "lora_alpha", "lora_target_modules")
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CLIP = "offpolicy.objective.policy_loss"


def carried(folder: Path, name: str, text: str) -> tuple[dict[str, Any], str]:
    """(our fields by their paths, the lists as one text) of a file."""
    path = folder / name
    path.write_text(text)
    printed, lists = migrated(path)
    fields = yaml.safe_load(printed)
    return fields | flatten(fields), " ".join(" ".join(lists).split())


def check_case(folder: Path, case: tuple[str, str, dict[str, Any], str]) -> None:
    """Assert that a file (its name and text) gives these fields, and that the lists say this."""
    file, text, expected, said = case
    fields, lists = carried(folder, file, text)
    assert {path: fields.get(path) for path in expected} == expected
    assert said in lists
