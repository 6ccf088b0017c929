"""TRL: YAML or flags of ``GRPOConfig``, ``ModelConfig`` and ``GRPOScriptArguments``. Only TRL's own correction changes.

Read at TRL 1.16; a test compares the names with the classes.
"""

from __future__ import annotations

from collections.abc import Iterable

from trl_offpolicy.migrate import shared
from trl_offpolicy.migrate.rules import Carried, Found, Framework, Left, Row, Source, plain, strategy

FIELDS = tuple(
    [
        "accelerator_config",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "attn_implementation",
        "auto_find_batch_size",
        "average_tokens_across_devices",
        "batch_eval_metrics",
        "beta",
        "bf16",
        "bf16_full_eval",
        "bnb_4bit_quant_storage",
        "bnb_4bit_quant_type",
        "cache_implementation",
        "cast_lm_head_to_fp32",
        "chat_template_kwargs",
        "data_seed",
        "dataloader_drop_last",
        "dataloader_in_order",
        "dataloader_multiprocessing_context",
        "dataloader_num_workers",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_prefetch_factor",
        "ddp_backend",
        "ddp_broadcast_buffers",
        "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "ddp_timeout",
        "debug",
        "deepspeed",
        "delta",
        "disable_dropout",
        "disable_tqdm",
        "do_eval",
        "do_predict",
        "do_train",
        "ds3_gather_for_generation",
        "dtype",
        "enable_jit_checkpoint",
        "entropy_coef",
        "entropy_coef_delta",
        "entropy_coef_max",
        "entropy_coef_min",
        "entropy_target",
        "epsilon",
        "epsilon_high",
        "eval_accumulation_steps",
        "eval_delay",
        "eval_do_concat_batches",
        "eval_on_start",
        "eval_steps",
        "eval_strategy",
        "eval_use_gather_object",
        "fp16",
        "fp16_full_eval",
        "fsdp",
        "fsdp_config",
        "full_determinism",
        "generation_batch_size",
        "generation_kwargs",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "greater_is_better",
        "hub_always_push",
        "hub_model_id",
        "hub_private_repo",
        "hub_revision",
        "hub_strategy",
        "hub_token",
        "ignore_data_skip",
        "importance_sampling_level",
        "include_for_metrics",
        "include_num_input_tokens_seen",
        "label_names",
        "label_smoothing_factor",
        "learning_rate",
        "length_column_name",
        "liger_kernel_config",
        "load_best_model_at_end",
        "load_in_4bit",
        "load_in_8bit",
        "local_rank",
        "log_completions",
        "log_completions_hub_repo",
        "log_level",
        "log_level_replica",
        "log_multimodal",
        "log_on_each_node",
        "log_unique_prompts",
        "logging_first_step",
        "logging_nan_inf_filter",
        "logging_steps",
        "logging_strategy",
        "lora_alpha",
        "lora_dropout",
        "lora_modules_to_save",
        "lora_r",
        "lora_target_modules",
        "lora_target_parameters",
        "lora_task_type",
        "loss_type",
        "lr_scheduler_kwargs",
        "lr_scheduler_type",
        "mask_truncated_completions",
        "max_completion_length",
        "max_grad_norm",
        "max_steps",
        "max_tool_calling_iterations",
        "metric_for_best_model",
        "min_p",
        "model_init_kwargs",
        "model_name_or_path",
        "model_revision",
        "multi_objective_aggregation",
        "neftune_noise_alpha",
        "num_completions_to_print",
        "num_generations",
        "num_generations_eval",
        "num_iterations",
        "num_train_epochs",
        "off_policy_mask_threshold",
        "optim",
        "optim_args",
        "optim_target_modules",
        "output_dir",
        "pad_to_multiple_of",
        "parallelism_config",
        "per_device_eval_batch_size",
        "per_device_train_batch_size",
        "prediction_loss_only",
        "project",
        "push_to_hub",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "remove_unused_columns",
        "repetition_penalty",
        "report_to",
        "restore_callback_states_from_checkpoint",
        "resume_from_checkpoint",
        "reward_weights",
        "router_aux_loss_coef",
        "run_name",
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "save_on_each_node",
        "save_only_model",
        "save_steps",
        "save_strategy",
        "save_total_limit",
        "scale_rewards",
        "seed",
        "shuffle_dataset",
        "skip_memory_metrics",
        "steps_per_generation",
        "sync_ref_model",
        "temperature",
        "tf32",
        "top_entropy_quantile",
        "top_k",
        "top_p",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_empty_cache_steps",
        "trackio_bucket_id",
        "trackio_space_id",
        "trackio_static_space_id",
        "train_sampling_strategy",
        "transformers_continuous_batching_config",
        "trust_remote_code",
        "use_adaptive_entropy",
        "use_bias_correction_kl",
        "use_bnb_nested_quant",
        "use_cache",
        "use_cpu",
        "use_dora",
        "use_liger_kernel",
        "use_peft",
        "use_rslora",
        "use_transformers_continuous_batching",
        "use_transformers_paged",
        "use_vllm",
        "vespo_k_neg",
        "vespo_k_pos",
        "vespo_lambda_neg",
        "vespo_lambda_pos",
        "vllm_enable_sleep_mode",
        "vllm_gpu_memory_utilization",
        "vllm_group_port",
        "vllm_max_model_length",
        "vllm_mode",
        "vllm_model_impl",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_structured_outputs_regex",
        "vllm_tensor_parallel_size",
        "warmup_steps",
        "weight_decay",
    ]
)
"""Fields of ``GRPOConfig`` and ``ModelConfig`` without those of TRL's own correction. They keep name and value."""
_IS = "vllm_importance_sampling"
_STRATEGIES = ("eval_strategy", "logging_strategy", "save_strategy")


def _mappings(source: Source) -> Iterable[Found]:
    yield from shared.mapping_fields(source, FIELDS)


def _warmup(source: Source) -> Iterable[Found]:
    """``warmup_ratio``, which transformers 5 took into ``warmup_steps``; it counted where that was 0."""
    share, steps = "warmup_ratio", "warmup_steps"
    if not source.has(share):
        return
    if source.settings.values.get(steps) or source.unknown(steps):
        yield Left((share,), f"{steps} decides")
    elif (value := source.settings.values[share]) is not None:
        yield Carried(source.given(share, steps), {steps: value}, f"a share of all steps: {steps} below 1", older=True)


def _unread(source: Source) -> Iterable[Found]:
    """Without vLLM, TRL's default, its correction is off, and so are its options."""
    key = "use_vllm"
    if key in source.settings.unknown or source.get(key, False) is not False:
        return
    why = "transformers samples from the trainer's own model, so TRL corrects nothing"
    yield Carried(
        source.given(key), {key: False, f"option.{key}": False}, why if source.has(key) else f"TRL's default: {why}"
    )
    keys = source.given(*(f"{_IS}_{name}" for name in ("correction", "mode", "clip_max", "clip_min")))
    if keys:
        yield Left(keys, "TRL reads it with use_vllm alone")


FRAMEWORK = Framework(
    name="trl",
    entries=("trl grpo",),
    marks=("model_name_or_path", f"{_IS}_*", "off_policy_mask_threshold"),
    options={f"{_IS}_{name}": f"{_IS}_{name}" for name in ("correction", "mode", "clip_max", "clip_min")},
    rows={
        name: Row(name, strategy if name in _STRATEGIES else plain)
        for name in ("dataset_name", "dataset_config", "system_prompt", *FIELDS)
    },
    steps=(_unread, _mappings, _warmup),
    left={
        "reward_funcs": shared.REWARD,
        "warmup_ratio": "null: not set",
        "reward_model_name_or_path": shared.REWARD,
        "dataset_*": shared.DATA,
        "datasets*": shared.DATA,
        "ignore_bias_buffers": shared.MODEL,
        "max_prompt_length": "TRL 1.16 does not cut prompts; set vllm_max_model_length",
        "offpolicy": "it is this kit's own field already",
    },
    renamed={
        f"{_IS}_cap": f"{_IS}_clip_max",
        "torch_dtype": "dtype",
        "per_gpu_train_batch_size": "per_device_train_batch_size",
    },
)
