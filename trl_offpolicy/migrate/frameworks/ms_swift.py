"""ms-swift: flags of ``swift rlhf --rlhf_type grpo`` (and ``megatron rlhf``), or the same as YAML.

Read at ms-swift 3602360a5, ``swift/rlhf_trainers/args_mixin.py`` and its page of command-line parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trl_offpolicy.migrate import shared
from trl_offpolicy.migrate.rules import (
    Carried,
    Found,
    Framework,
    Left,
    Row,
    Source,
    number,
    plain,
    switch,
    text,
    top_k,
    whole,
)

_SAME = [
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
    "num_train_epochs",
    "max_steps",
    "max_grad_norm",
    "adam_beta1",
    "adam_epsilon",
    "epsilon_high",
    "delta",
    "repetition_penalty",
    "use_vllm",
    "vllm_mode",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_server_base_url",
    "vllm_server_timeout",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "logging_steps",
    "seed",
    "data_seed",
    "output_dir",
    "run_name",
    "report_to",
    "log_completions",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "deepspeed",
    "fsdp",
    "bf16",
    "fp16",
    "dataloader_num_workers",
    "optim",
    "reward_weights",
    "top_entropy_quantile",
    "sync_ref_model",
    "ref_model_sync_steps",
    "ref_model_mixup_alpha",
    "lora_dropout",
    "use_liger_kernel",
]
"""Arguments that TRL has under the same name with the same meaning."""
DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "lora_rank": 8,
    "lora_alpha": 32,
    "target_modules": ["all-linear"],
}


def _loss(source: Source) -> Iterable[Found]:
    """TRL's loss types, and those for which the aggregation of another one is right."""
    key, level = "loss_type", "importance_sampling_level"
    kind = text(key, source.get(key) or "grpo")
    same = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
    if kind in same:
        yield Carried(source.given(key), {"loss_type": kind}, "" if source.has(key) else "the default of loss_type")
    else:
        yield Left(source.given(key), f"the loss {kind!r} has no counterpart here; set offpolicy.objective.policy_loss")
    if not source.has(level):
        return
    given = source.settings.values[level]
    if given == "sequence_token":
        yield Left((level,), "set offpolicy.objective.policy_loss: {type: gspo_token} and leave out loss_type")
    elif given in ("token", "sequence"):
        yield Carried((level,), {level: given})
    else:
        raise ValueError(f"{level} must be token, sequence or sequence_token, but got {given!r}.")


def _advantages(source: Source) -> Iterable[Found]:
    kind, scale = source.get("advantage_estimator", "grpo"), source.get("scale_rewards")
    if source.has("advantage_estimator"):
        if kind == "grpo":
            yield Carried(("advantage_estimator",), {}, "TRL's own advantages")
        elif kind == "rloo":
            yield Carried(("advantage_estimator",), {"offpolicy.advantages": "rloo"})
        else:
            yield Left(("advantage_estimator",), f"{kind!r} has no counterpart here; set offpolicy.advantages")
    if scale is None:
        return
    if scale == "gdpo":
        yield Carried(("scale_rewards",), {"offpolicy.advantages": "gdpo"})
    elif kind == "grpo":
        yield Carried(("scale_rewards",), {"scale_rewards": scale})
    else:
        yield Left(("scale_rewards",), f"advantage_estimator={kind} does not read it here")


def _tuner_of(source: Source) -> str:
    """The tuner that is trained: LoRA by default, a full model under Megatron, whose batch sizes have other names."""
    megatron = source.has("micro_batch_size", "global_batch_size", "train_iters")
    given = source.settings.values.get("tuner_type")
    return text("tuner_type", given or ("full" if megatron else "lora"))


def _tuner(source: Source) -> Iterable[Found]:
    kind = _tuner_of(source)
    names = ("lora_rank", "lora_alpha", "target_modules")
    if kind == "full":
        yield Carried(source.given("tuner_type"), {}, "a full model is the default here")
        yield from shared.left(source, dict.fromkeys(names, "no adapter is trained"))
    elif kind == "lora":
        found = next(iter(shared.lora(source, *names)))
        if isinstance(found, Carried):
            fields = {name: value for name, value in found.fields.items() if name != "lora_dropout"}
            said = ["" if source.has("tuner_type") else "the default of tuner_type", found.why]
            yield Carried((*source.given("tuner_type"), *found.keys), fields, "; ".join(filter(None, said)))
    else:
        yield Left(source.given("tuner_type", *names), f"the tuner {kind!r} has no counterpart here")


def _optimizer(source: Source) -> Iterable[Found]:
    names = ("lr_scheduler_type", "warmup_steps", "warmup_ratio")
    kind = text(names[0], source.get(names[0]) or "cosine")
    warmup = source.get(names[1]) or source.get(names[2]) or 0
    fields = {names[0]: kind, **({"warmup_steps": number(names[2], warmup)} if warmup else {})}
    yield Carried(source.given(*names), fields, "" if source.has(*names) else "the default of lr_scheduler_type")
    if not source.has("learning_rate", "lr"):
        rate, tuner = (1e-5, "a full model") if _tuner_of(source) == "full" else (1e-4, "an adapter")
        yield Carried((), {"learning_rate": rate}, f"the default of learning_rate for {tuner}")


def _megatron(source: Source) -> Iterable[Found]:
    """Megatron's batch sizes count responses: micro on a device, global in an optimizer step."""
    names = ("micro_batch_size", "global_batch_size", "steps_per_generation", "num_generations", "train.gpus")
    if not source.has("global_batch_size"):
        return
    step, generations = shared.given_or(source, names[1]), shared.given_or(source, names[3], 8)
    steps, devices = shared.given_or(source, names[2], 1), source.get("train.gpus", source.get("nproc_per_node"))
    keys = source.given(*names)
    if None in (step, generations, steps) or devices is None or step * steps % generations:
        yield Left(
            keys,
            "the number of devices is not in the file; set per_device_train_batch_size, "
            "gradient_accumulation_steps, steps_per_generation and num_generations",
        )
        return
    micro = source.get(names[0])
    yield from shared.batch(
        shared.Batch(
            keys, step * steps // generations, generations, step, micro, whole("train.gpus", devices), "train.gpus"
        )
    )


FRAMEWORK = Framework(
    name="ms-swift",
    entries=("swift rlhf", "megatron rlhf"),
    marks=("rlhf_type", "rollout_importance_sampling_*", "tuner_type", "off_policy_sequence_mask_delta"),
    options={
        name: name
        for name in (
            "rollout_importance_sampling_mode",
            "rollout_importance_sampling_threshold",
            "off_policy_sequence_mask_delta",
            "beta",
        )
    },
    rows={
        "model": Row("model_name_or_path", text),
        "learning_rate": Row("learning_rate", number),
        "lr": Row("learning_rate", number),
        "weight_decay": Row("weight_decay", number, default=0.1),
        "adam_beta2": Row("adam_beta2", number, default=0.95),
        "temperature": Row("temperature", number, default=0.9),
        "top_k": Row("top_k", top_k, default=50, why="-1 there is 0 here: no top-k"),
        "top_p": Row("top_p", number, default=0.9),
        "epsilon": Row("epsilon", number),
        "max_completion_length": Row("max_completion_length", whole),
        "vllm_max_model_len": Row("vllm_max_model_length", whole),
        "vllm_enforce_eager": Row("engine.enforce_eager", switch),
        "overlong_filter": Row("mask_truncated_completions", switch),
        "tau_pos": Row("sapo_temperature_pos", number),
        "tau_neg": Row("sapo_temperature_neg", number),
        "train_iters": Row("max_steps", whole),
        "train.output_dir": Row("output_dir", text),
        **{name: Row(name, plain) for name in _SAME},
    },
    steps=(_loss, _advantages, _tuner, _megatron, _optimizer),
    defaults=DEFAULTS,
    left={
        "rlhf_type": "grpo is what is trained here",
        "log_rollout_offpolicy_metrics": "the mismatch is always measured here",
        "torch_dtype": "set dtype (of the weights that the optimizer keeps), bf16 or fp16",
        "max_length": "TRL does not cut prompts; set vllm_max_model_length",
        "truncation_strategy": "TRL does not cut prompts; set vllm_max_model_length",
        **shared.names(
            "",
            "dataset dataset_* val_dataset split_dataset_ratio columns system template template_* "
            "load_from_cache_file streaming interleave_prob external_plugins remove_unused_columns "
            "agent_template strict enable_thinking loss_scale",
            shared.DATA,
        ),
        **shared.names("", "reward_* cosine_* repetition_* soft_* kl_in_reward", shared.REWARD),
        **shared.names("", "dynamic_sample max_resample_times", "dynamic sampling has no counterpart here"),
        **shared.names(
            "",
            "multi_turn_scheduler max_turns completion_length_limit_scope use_gym_env gym_env vllm_server_pass_dataset",
            shared.TOOLS,
        ),
        **shared.names(
            "", "chord_* real_tau fipo_* rlsd_* sdar_* advantage_reweight teacher_* opd_*", shared.OTHER_MODELS
        ),
        **shared.names("", "async_generate vllm_server_host vllm_server_port", shared.ASYNC),
        **shared.names(
            "", "sleep_level offload_* move_model_batches vllm_* stop_words sglang_* lmdeploy_*", shared.ENGINE
        ),
        **shared.names("", "eval_* per_device_eval_batch_size num_generations_eval", shared.EVALUATION),
        **shared.names(
            "", "log_entropy logging_dir add_version create_checkpoint_symlink wandb_* swanlab_*", shared.LOGGING
        ),
        **shared.names(
            "", "resume_* save_only_model save_safetensors no_save_* ignore_data_skip finetune load", shared.CHECKPOINTS
        ),
        **shared.names(
            "",
            "freeze_* trainable_* train_type quant_* bnb_* attn_impl device_map ddp_* padding_free "
            "packing sequence_parallel_size nproc_per_node zero_hpz_partition_size use_hf model_* lora_* "
            "target_* tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
            "expert_* recompute_* attention_* cross_entropy_* gradient_accumulation_fusion moe_* min_lr "
            "lr_* optimizer_* train rollout colocate_groups mcore_* sequence_parallel merge_lora "
            "dynamic_batch_size router_replay_mode",
            shared.MODEL,
        ),
    },
    renamed={
        "train_type": "tuner_type",
        "train.tuner_type": "tuner_type",
        "train.lora_rank": "lora_rank",
        "train.lora_alpha": "lora_alpha",
        "rollout.vllm_gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "rollout.vllm_tensor_parallel_size": "vllm_tensor_parallel_size",
        "rollout.vllm_max_model_len": "vllm_max_model_len",
    },
)
