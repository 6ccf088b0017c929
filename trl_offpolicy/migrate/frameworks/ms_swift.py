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
    drawn,
    number,
    plain,
    strategy,
    switch,
    text,
    top_k,
    whole,
)

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
"""Losses of which the preset sets the denominator."""
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
ACCELERATE = ("zero2", "zero3", "zero3_offload", "fsdp1", "fsdp2")
"""Files of recipes/accelerate that ms-swift has under the same name."""
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
    option = {"option.loss_type": kind if kind in LOSS_TYPES else None} if kind != "grpo" else {}
    if kind in (*LOSS_TYPES, "cispo", "sapo"):
        why = "" if source.has(key) else "the default of loss_type"
        yield Carried(source.given(key), {"loss_type": kind, **option}, why)
    else:
        yield shared.no_loss(source.given(key), kind)
        yield Carried((), option)
    if not source.has(level):
        return
    given = source.settings.values[level]
    if given == "sequence_token":
        why = "set offpolicy.objective.policy_loss: {type: gspo_token} and leave out loss_type"
        yield Left((level,), why, to_set=shared.LOSS_TO_SET)
    elif given in ("token", "sequence"):
        yield Carried((level,), {level: given})
    else:
        raise ValueError(f"{level} must be token, sequence or sequence_token, but got {given!r}.")


def _advantages(source: Source) -> Iterable[Found]:
    """The estimator and what its advantages are divided by, whose default depends on both estimator and backend."""
    names = ("advantage_estimator", "scale_rewards")
    if unknown := source.unknown(*names):
        why = f"{_shown(source, unknown[0])} is not known, and the advantages depend on it; set offpolicy.advantages"
        yield Left(source.given(*names), why, "" if source.has(*names) else unknown[0], shared.ADVANTAGES_TO_SET)
        return
    keys, kind, scale = source.given(*names), source.get(names[0]) or "grpo", source.get(names[1])
    if scale is None and kind != "grpo":
        scale = "group" if _is_megatron(source) else {"rloo": "none", "reinforce_plus_plus": "batch"}.get(kind)
    if scale == "gdpo":
        yield Carried(keys, {"offpolicy.advantages": "gdpo"})
    elif kind == "grpo":
        yield from (Carried((key,), {}, "TRL's own advantages") for key in source.given(names[0]))
        yield from (Carried((key,), {"scale_rewards": scale}) for key in source.given(names[1]))
    elif (kind, scale) == ("rloo", "none"):
        yield Carried(keys, {"offpolicy.advantages": "rloo"})
    elif (kind, scale) == ("reinforce_plus_plus", "batch"):
        why = "ms-swift divides by the deviation over the batch's responses, this kit over their tokens"
        yield Carried(keys, {"offpolicy.advantages": "reinforce_plus_plus_baseline"}, why)
    elif (kind, scale) == ("reinforce_plus_plus", "group"):
        yield Carried(keys, {"scale_rewards": "group"}, "the group's mean and deviation: TRL's own advantages")
    else:
        yield shared.no_estimator(keys, f"{kind!r} with scale_rewards={scale!r}")


def _kl(source: Source) -> Iterable[Found]:
    """The KL is in the reward where the file says so, and without Megatron by default with every estimator but grpo."""
    key, kind = "kl_in_reward", source.get("advantage_estimator") or "grpo"
    if source.unknown(key, "beta", *(() if source.has(key) else ("advantage_estimator",))):
        why = "the place of the KL term or beta is not known: set beta, or offpolicy.objective.kl with place: reward"
        yield Left(source.given(key), why, "" if source.has(key) else "the KL term", default=False)
        return
    given = source.get(key)
    in_reward = kind != "grpo" and not _is_megatron(source) if given is None else switch(_shown(source, key), given)
    if not in_reward:
        yield from shared.left(source, {key: "off: beta is in the loss"})
        return
    coef = number(_shown(source, "beta"), 0.04 if source.get("beta") is None else source.get("beta"))
    if coef == 0:
        yield from shared.left(source, {key: "beta is 0: no KL term"})
        return
    why = "in the reward, as there" if given is not None else f"in the reward, the default of the estimator {kind}"
    yield shared.reward_kl(source.given(key, "beta"), coef, "k1", why, max_value=None)
    yield Carried((), {"option.beta": 0.0}, "the KL is in the reward")


def _shown(source: Source, key: str) -> str:
    return source.settings.shown(key)


def _sizes(source: Source) -> Iterable[Found]:
    """Without sizes ms-swift takes 1 a device and accumulates 16 responses a step; TRL takes 8 and accumulates none."""
    if _is_megatron(source):
        return
    theirs = {
        "per_device_train_batch_size": "1 there, and 8 in TRL: set it",
        "gradient_accumulation_steps": "as many as make 16 responses a step there, and 1 in TRL: set it",
    }
    for key, why in theirs.items():
        if source.get(key) is None and not source.unknown(key):
            yield Left(source.given(key), why, pattern=key, to_set=shared.to_set(key))


def _sharding(source: Source) -> Iterable[Found]:
    """A file of the user's is carried; ms-swift's own are named by a word, as ``zero3`` and ``fsdp2``."""
    for key in source.given("deepspeed", "fsdp"):
        given = source.settings.values[key]
        if isinstance(given, str) and given.startswith(("zero", "fsdp")) and "." not in given:
            ours = f"recipes/accelerate/{given}.yaml" if given in ACCELERATE else "one of recipes/accelerate"
            yield Left((key,), f"a file of ms-swift's; accelerate's is {ours}, for --config_file")
        else:
            yield Carried((key,), {key: given})


def _tuner_of(source: Source) -> str:
    """The tuner that is trained: LoRA by default, a full model under Megatron, whose batch sizes have other names."""
    given = source.settings.values.get("tuner_type")
    return text("tuner_type", given or ("full" if _is_megatron(source) else "lora"))


def _is_megatron(source: Source) -> bool:
    return source.has("micro_batch_size", "global_batch_size", "train_iters")


def _tuner(source: Source) -> Iterable[Found]:
    kind = _tuner_of(source)
    names = ("lora_rank", "lora_alpha", "target_modules")
    if kind == "full":
        yield Carried(source.given("tuner_type"), {}, "a full model is the default here")
        yield from shared.left(source, dict.fromkeys(names, "no adapter is trained"))
    elif kind == "lora":
        for found in shared.lora(source, *names):
            if not isinstance(found, Carried):
                yield found
                continue
            fields = {name: value for name, value in found.fields.items() if name != "lora_dropout"}
            said = ["" if source.has("tuner_type") else "the default of tuner_type", found.why]
            yield Carried((*source.given("tuner_type"), *found.keys), fields, "; ".join(filter(None, said)))
    else:
        yield Left(source.given("tuner_type", *names), f"the tuner {kind!r} has no counterpart here")


def _megatron_schedule(source: Source) -> Iterable[Found]:
    """Megatron's schedule: a cosine down to ``min_lr``, which is no ratio."""
    names = ("lr_decay_style", "min_lr", "lr_warmup_iters", "lr_warmup_fraction")
    keys = source.given(*names)
    if unknown := source.unknown(*names):
        why = f"{_shown(source, unknown[0])} is not known: set lr_scheduler_type, lr_scheduler_kwargs and warmup_steps"
        yield Left(keys, why, pattern="the schedule", default=False)
        return
    style = text(names[0], source.get(names[0]) or "cosine")
    if style not in ("constant", "linear", "cosine"):
        why = f"the schedule {style!r} has no counterpart here; set lr_scheduler_type and warmup_steps"
        yield Left(keys, why)
        return
    least, rate = source.get(names[1]) or 0, source.get("lr", source.get("learning_rate"))
    warmup = source.get(names[2]) or source.get(names[3]) or 0
    fields: dict[str, Any] = {"lr_scheduler_type": style}
    if style == "constant" or (style == "cosine" and least == rate):
        fields["lr_scheduler_type"] = "constant_with_warmup" if warmup else "constant"
    elif style == "cosine" and least:
        own = {"min_lr": number(_shown(source, names[1]), least)}
        fields |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": own}
    elif style == "linear" and least:
        yield from shared.left(source, {names[1]: "the linear schedule ends at 0 here"})
        keys = tuple(key for key in keys if key != names[1])
    if warmup:
        fields["warmup_steps"] = number(_shown(source, names[2]), warmup)
    yield Carried(keys, fields, "" if source.has(*names) else "the default of lr_decay_style")


def _optimizer(source: Source) -> Iterable[Found]:
    if _is_megatron(source):
        yield from _megatron_schedule(source)
        yield from _rate(source)
        return
    names = ("lr_scheduler_type", "warmup_steps", "warmup_ratio")
    kind = text(names[0], source.get(names[0]) or "cosine")
    warmup = source.get(names[1]) or source.get(names[2]) or 0
    fields = {names[0]: kind, **({"warmup_steps": number(names[2], warmup)} if warmup else {})}
    yield Carried(source.given(*names), fields, "" if source.has(*names) else "the default of lr_scheduler_type")
    yield from _rate(source)


def _rate(source: Source) -> Iterable[Found]:
    if not source.has("learning_rate", "lr"):
        rate, tuner = (1e-5, "a full model") if _tuner_of(source) == "full" else (1e-4, "an adapter")
        yield Carried((), {"learning_rate": rate}, f"the default of learning_rate for {tuner}")


def _megatron(source: Source) -> Iterable[Found]:
    """Megatron's batch sizes count responses: micro on a device, global in an optimizer step."""
    names = ("micro_batch_size", "global_batch_size", "steps_per_generation", "num_generations", "train.gpus")
    if not source.has("global_batch_size"):
        return
    step, generations = shared.given_or(source, names[1]), shared.given_or(source, names[3], 8)
    steps = shared.given_or(source, names[2], 1)
    where = "train.gpus" if source.has("train.gpus") else "nproc_per_node"
    devices = source.get(where)
    keys = source.given(*names, where)
    if None in (step, generations, steps) or devices is None or step * steps % generations:
        missing = "the number of devices is not in the file" if devices is None else "the sizes do not divide"
        why = f"{missing}; set per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation"
        yield Left(keys, f"{why} and num_generations", to_set=shared.SIZE_FIELDS)
        return
    micro = source.get(names[0])
    yield from shared.batch(
        shared.Batch(
            keys, step * steps // generations, generations, step, micro, whole(where, devices), _shown(source, where)
        )
    )


def _one_server(key: str, value: Any) -> Any:
    """A host or a port; ms-swift takes lists of them as well."""
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def _mappings(source: Source) -> Iterable[Found]:
    yield from shared.mapping_fields(source, ("gradient_checkpointing_kwargs",))


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
        "temperature": Row("temperature", drawn, default=0.9),
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
        "save_strategy": Row("save_strategy", strategy),
        "vllm_server_host": Row("vllm_server_host", _one_server, null="several servers there, one here: set it"),
        "vllm_server_port": Row("vllm_server_port", _one_server, null="several servers there, one here: set it"),
        **{name: Row(name, plain) for name in _SAME},
    },
    steps=(_loss, _advantages, _kl, _sizes, _tuner, _megatron, _optimizer, _sharding, _mappings),
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
        **shared.names("", "reward_* cosine_* repetition_* soft_*", shared.REWARD),
        **shared.names("", "dynamic_sample max_resample_times", "dynamic sampling has no counterpart here"),
        **shared.names(
            "",
            "multi_turn_scheduler max_turns completion_length_limit_scope use_gym_env gym_env vllm_server_pass_dataset",
            shared.TOOLS,
        ),
        **shared.names(
            "", "chord_* real_tau fipo_* rlsd_* sdar_* advantage_reweight teacher_* opd_*", shared.OTHER_MODELS
        ),
        "async_generate": shared.ASYNC,
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
