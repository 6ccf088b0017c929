"""NeMo-RL: YAML with ``defaults:`` of a file beside it, and overrides ``a.b=c``.

Read at NeMo-RL 7ea279abf, ``examples/configs/grpo_math_1B.yaml`` and ``recipes/llm``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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
    one_of,
    optional,
    switch,
    text,
    top_k,
    whole,
)

_LOSS = (
    "use_importance_sampling_correction",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "sequence_level_importance_ratios",
    "token_level_loss",
    "ratio_clip_min",
    "ratio_clip_max",
    "ratio_clip_c",
    "use_cispo",
    "disable_ppo_ratio",
    "force_on_policy_ratio",
    "reference_policy_kl_penalty",
    "reference_policy_kl_type",
    "kl_input_clamp_value",
    "kl_output_clamp_value",
    "use_kl_in_reward",
    "use_on_policy_kl_approximation",
    "positive_example_nll_weight",
)
TORCH, MEGATRON = "policy.optimizer.kwargs", "policy.megatron_cfg.optimizer"
VLLM = "policy.generation.vllm_cfg"


def _is_megatron(source: Source) -> bool:
    return source.get("policy.megatron_cfg.enabled", False) is True


def _batch(source: Source) -> Iterable[Found]:
    names = (
        "grpo.num_prompts_per_step",
        "grpo.num_generations_per_prompt",
        "policy.train_global_batch_size",
        "cluster.num_nodes",
        "cluster.gpus_per_node",
        "policy.train_micro_batch_size",
    )
    if not source.has(*names[:3]):
        return
    prompts, generations, step, nodes, devices, micro = (shared.given_or(source, name) for name in names)
    keys = source.given(*names)
    if None in (prompts, generations, step, nodes, devices):
        missing = [name for name in names[:5] if source.get(name) is None]
        why = f"{', '.join(missing)} is not known; give it as an override"
        yield from shared.sizes_unknown(source, names, names[1], why)
        return
    engines = 0
    if source.get("policy.generation.colocated.enabled", True) is False:
        own = "policy.generation.colocated.resources"
        engines = (source.get(f"{own}.num_nodes") or 1) * (source.get(f"{own}.gpus_per_node") or devices)
        keys += source.given(f"{own}.num_nodes", f"{own}.gpus_per_node")
    where = "cluster.num_nodes x cluster.gpus_per_node" + (f", less {engines} of the engines" if engines else "")
    yield from shared.batch(
        shared.Batch(keys, prompts, generations, step, micro, max(nodes * devices - engines, 1), where)
    )


def _per_step(source: Source) -> shared.Steps:
    return shared.steps_per_generation(_batch(source))


def _counted(source: Source) -> Iterable[Found]:
    on, every = "checkpointing.enabled", "checkpointing.save_period"
    if source.has(on) and not source.settings.values[on]:
        yield Carried((on,), {"save_strategy": "no"})
        yield from shared.left(source, {every: f"{on} is off"})
    else:
        yield from shared.saving(source, every, _per_step(source))
        yield from shared.left(source, {on: f"{every} decides"})
    yield from shared.last_step(source, "grpo.max_num_steps", _per_step(source))


def _optimizer(source: Source) -> Iterable[Found]:
    """The optimizer and schedule of the backend that is on; those of the other one are not read."""
    mine, other = (MEGATRON, TORCH) if _is_megatron(source) else (TORCH, MEGATRON)
    adam = {
        "lr": "learning_rate",
        "weight_decay": "weight_decay",
        "eps": "adam_epsilon",
        "adam_eps": "adam_epsilon",
        "adam_beta1": "adam_beta1",
        "adam_beta2": "adam_beta2",
    }
    for name, field in adam.items():
        key = f"{mine}.{name}"
        if source.has(key):
            yield Carried((key,), {field: number(key, source.settings.values[key])})
    yield from shared.betas(source, f"{mine}.betas")
    unread = tuple(key for key in source.settings.values if key.startswith(f"{other}."))
    if unread:
        yield Left(unread, f"policy.megatron_cfg.enabled is {str(_is_megatron(source)).lower()}", f"{other}.*")
    yield from _schedule(source)


def _schedule(source: Source) -> Iterable[Found]:
    """Torch's LinearLR, then ConstantLR: a warmup. Megatron's has names of its own."""
    key, megatron = "policy.scheduler", "policy.megatron_cfg.scheduler"
    if _is_megatron(source):
        yield from _megatron_schedule(source, megatron)
        yield from shared.left(source, {key: "policy.megatron_cfg.scheduler is read"})
        return
    steps = source.settings.values.get(key)
    if steps is None:
        return
    names = [one.get("name", "").rpartition(".")[2] for one in steps if isinstance(one, dict) and "name" in one]
    if names == ["LinearLR", "ConstantLR"] and steps[0].get("kwargs", {}).get("end_factor", 1.0) == 1.0:
        warmup = whole(f"{key}[0].kwargs.total_iters", steps[0].get("kwargs", {}).get("total_iters", 5))
        yield _warmup((key,), "constant", warmup, _per_step(source))
    else:
        yield Left((key,), f"the schedule {names} has no counterpart here; set lr_scheduler_type and warmup_steps")


def _megatron_schedule(source: Source, section: str) -> Iterable[Found]:
    """Megatron's names; a cosine ends at ``min_lr`` of the optimizer."""
    least = f"{MEGATRON}.min_lr"
    style, warmup = source.get(f"{section}.lr_decay_style"), source.get(f"{section}.lr_warmup_iters", 0) or 0
    keys = source.given(f"{section}.lr_decay_style", f"{section}.lr_warmup_iters")
    floor = number(least, source.get(least) or 0)
    to_floor = style == "cosine" and floor > 0
    if style in ("constant", "cosine", "linear"):
        found = _warmup(keys, style, whole(f"{section}.lr_warmup_iters", warmup), _per_step(source))
        if to_floor:
            own = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": floor}}
            found = replace(found, keys=(*keys, *source.given(least)), fields={**found.fields, **own})
        yield found
    if not to_floor:
        ends = "at the whole rate" if style == "constant" else "at 0"
        yield from shared.left(source, {least: f"the schedule ends {ends} here"})
    yield from shared.left(
        source,
        {
            f"{section}.lr_decay_iters": "the schedule ends with the last step here",
            f"{section}.lr_warmup_init": "the warmup begins at 0 here",
        },
    )


def _warmup(keys: tuple[str, ...], style: str, steps: int, per_step: shared.Steps) -> Carried:
    name = "constant_with_warmup" if style == "constant" and steps else style
    fields = {"lr_scheduler_type": name, **({"warmup_steps": steps * per_step.number} if steps else {})}
    said = [part for part in (shared.times(per_step), "the warmup begins at 0 here") if part]
    return Carried(keys, fields, "; ".join(said) if steps else "")


def _advantages(source: Source) -> Iterable[Found]:
    names = (
        "grpo.normalize_rewards",
        "grpo.use_leave_one_out_baseline",
        "grpo.adv_estimator.name",
        "grpo.adv_estimator.minus_baseline",
        "grpo.adv_estimator.normalize_rewards",
        "grpo.adv_estimator.use_leave_one_out_baseline",
    )
    keys = source.given(*names)
    if not any(key.startswith("grpo.") for key in source.settings.values):
        return
    if unknown := source.unknown(*names):
        why = f"{unknown[0]} is not known, and the advantages depend on it; set offpolicy.advantages, or give it"
        yield Left(keys, why, "" if keys else unknown[0], shared.ADVANTAGES_TO_SET, default=False)
        return
    kind = source.get(names[2], "grpo")
    by_std = source.get(names[4], source.get(names[0], True))
    leave_one_out = source.get(names[5], source.get(names[1], True))
    found: Any = None
    if kind == "reinforce_plus_plus" and source.get(names[3], True):
        found = "reinforce_plus_plus_baseline"
    elif kind == "gdpo" and by_std and not leave_one_out:  # leaving out its own reward changes even signs
        found = "gdpo"
    elif kind == "grpo":
        plain = {"type": "grpo", "epsilon": 1e-6} if by_std else "dr_grpo"
        scaled = {"type": "rloo", "scale": "others", "epsilon": 1e-6} if by_std else "rloo"
        found = scaled if leave_one_out else plain
    if found is None:
        how = f"{kind!r} with normalize_rewards={by_std} and use_leave_one_out_baseline={leave_one_out}"
        yield shared.no_estimator(keys, how)
    else:
        why = "NeMo-RL divides the tokens' variance by n, this kit by n - 1" if kind == "reinforce_plus_plus" else ""
        yield Carried(keys, {"offpolicy.advantages": found}, why if keys else "the default of grpo.adv_estimator")


def _adapter(source: Source) -> Iterable[Found]:
    section = "policy.megatron_cfg.peft" if _is_megatron(source) else "policy.dtensor_cfg.lora_cfg"
    names = (f"{section}.dim", f"{section}.alpha", f"{section}.target_modules", f"{section}.dropout")
    yield from shared.lora(source, *names, on=f"{section}.enabled", every_linear=True)
    chosen = {"match_all_linear": "all-linear is that", "exclude_modules": "none is left out"}
    if source.get(f"{section}.match_all_linear") is False:
        chosen["match_all_linear"] = "off: target_modules decide, and without them all linear layers"
    if source.get(f"{section}.exclude_modules"):
        chosen["exclude_modules"] = "leave them out of lora_target_modules: there is no field for it here"
    yield from shared.left(source, {f"{section}.{name}": why for name, why in chosen.items()})


def _engine(source: Source) -> Iterable[Found]:
    backend, together = "policy.generation.backend", "policy.generation.colocated.enabled"
    if any(key.startswith("policy.generation.") for key in source.settings.values):
        name = text(backend, source.get(backend) or "vllm")
        mode = "colocate" if switch(together, source.get(together, True)) else "server"
        why = "" if name == "vllm" else f"{name} there, vLLM here"
        why += "" if mode == "colocate" else f"{'; ' * bool(why)}set vllm_server_base_url"
        yield Carried(source.given(backend, together), {"use_vllm": True, "vllm_mode": mode}, why)
    precision = f"{VLLM}.precision"
    if source.has(precision):
        asked = one_of("bfloat16", "float16", "float32", "auto", "fp8")(precision, source.settings.values[precision])
        fields, why = {"engine.dtype": asked}, ""
        if asked == "fp8":
            fields, why = (
                {"engine.dtype": "bfloat16", "engine.quantization": "fp8"},
                "no dtype of vLLM: quantised weights",
            )
        yield Carried((precision,), fields, why)
    for key, (argument, convert) in {
        f"{VLLM}.enforce_eager": ("enforce_eager", switch),
        f"{VLLM}.kv_cache_dtype": ("kv_cache_dtype", text),
    }.items():
        if source.has(key):
            yield Carried((key,), {f"engine.{argument}": convert(key, source.settings.values[key])})


FRAMEWORK = Framework(
    name="nemo-rl",
    entries=("run_grpo", "nemo_rl"),
    marks=(
        "loss_fn.*",
        "grpo.num_prompts_per_step",
        "policy.train_global_batch_size",
        "policy.generation.*",
        "policy.dtensor_cfg.*",
        "policy.megatron_cfg.*",
    ),
    options={f"loss_fn.{name}": name for name in _LOSS},
    rows={
        "policy.model_name": Row("model_name_or_path", text),
        "policy.max_grad_norm": Row("max_grad_norm", optional(number), null="null: no clip; set max_grad_norm: 0"),
        "grpo.max_num_epochs": Row("num_train_epochs", number),
        "grpo.seed": Row("seed", whole),
        "grpo.overlong_filtering": Row("mask_truncated_completions", switch),
        "policy.generation.max_new_tokens": Row("max_completion_length", whole),
        "policy.generation.temperature": Row("temperature", drawn),
        "policy.generation.top_p": Row("top_p", number),
        "policy.generation.top_k": Row("top_k", top_k, why="null there is 0 here: no top-k"),
        f"{VLLM}.gpu_memory_utilization": Row("vllm_gpu_memory_utilization", number),
        f"{VLLM}.tensor_parallel_size": Row("vllm_tensor_parallel_size", whole),
        f"{VLLM}.max_model_len": Row("vllm_max_model_length", whole),
        "checkpointing.checkpoint_dir": Row("output_dir", text),
        "data.shuffle": Row("shuffle_dataset", switch),
    },
    steps=(_batch, _counted, _optimizer, _advantages, _adapter, _engine),
    defaults={"cluster.num_nodes": 1},
    left={
        **shared.names(
            "grpo",
            "val_period val_start_at val_at_start val_at_end val_batch_size max_val_samples "
            "val_num_generations_per_prompt stop_at_validation_metric stop_at_validation_threshold",
            shared.EVALUATION,
        ),
        **shared.names(
            "grpo",
            "use_dynamic_sampling dynamic_sampling_max_gen_batches batch_multiplier",
            "dynamic sampling has no counterpart here",
        ),
        **shared.names("grpo", "reward_shaping reward_scaling", shared.REWARD),
        "reward_penalties": shared.REWARD,
        "grpo.max_rollout_turns": shared.TOOLS,
        "grpo.deduplicate_multimodal_data": shared.DATA,
        "grpo.async_grpo": shared.ASYNC,
        "grpo.adv_estimator": "set offpolicy.advantages (docs/objectives.md)",
        **shared.names(
            "grpo",
            "advantage_clip_low advantage_clip_high invalid_tool_call_advantage "
            "malformed_thinking_advantage calculate_advantages_on_gpu "
            "skip_reference_policy_logprobs_calculation",
            "has no counterpart here",
        ),
        "grpo.seq_logprob_error_threshold": "set offpolicy.correction.keep: [{type: divergence_band, ...}]",
        "checkpointing": shared.CHECKPOINTS,
        "policy.train_micro_batch_size": "counted with the batch sizes",
        "policy.max_total_sequence_length": "set vllm_max_model_length",
        "policy.precision": "set bf16 or fp16; bf16 is the default",
        "policy.logprob_batch_size": "old log-probs are scored with the micro-batches of the loss here",
        "policy.logprob_chunk_size": "old log-probs are scored with the micro-batches of the loss here",
        "policy.dynamic_batching": "batches are counted in responses here, not in tokens",
        "policy.sequence_packing": "batches are counted in responses here, not in tokens",
        **shared.names(
            "policy",
            "tokenizer hf_config_overrides generation_batch_size offload_optimizer_for_logprob "
            "dtensor_cfg megatron_cfg draft make_sequence_length_divisible_by router_replay",
            shared.MODEL,
        ),
        "policy.optimizer": "set the optimizer here: optim",
        "policy.scheduler": "set lr_scheduler_type and warmup_steps",
        "policy.generation.vllm_cfg.logprobs_mode": "log-probs are the processed ones here (docs/engines.md)",
        "policy.generation.vllm_cfg": shared.ENGINE,
        **shared.names(
            "policy.generation",
            "vllm_kwargs sglang_cfg sglang_server mcore_generation_config port_range_low port_range_high "
            "refit_transport refit_cfg real_quant_export_cpu_offload colocated",
            shared.ENGINE,
        ),
        **shared.names(
            "policy.generation",
            "stop_token_ids stop_strings val_temperature val_top_p val_top_k",
            "set generation_kwargs; evaluation samples as training does here",
        ),
        **shared.names("", "data env", shared.DATA),
        "logger": shared.LOGGING,
        "cluster": shared.MODEL,
        "data_plane": shared.MODEL,
        "on_policy_distillation": shared.OTHER_MODELS,
    },
)
