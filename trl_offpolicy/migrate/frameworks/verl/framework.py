"""verl's table: which settings become which fields here. Read at verl 1dda039b9 (0.9.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd
from typing import Any

from trl_offpolicy.migrate import shared
from trl_offpolicy.migrate.frameworks.verl.asynchronous import (
    TOTAL_PROMPTS,
    all_prompts,
    asynchronous,
    generations_of_a_version,
    has_own_devices,
    prompts_of,
    routing_replay,
    trainer_of,
)
from trl_offpolicy.migrate.frameworks.verl.older import WHOLE_MICRO, older_options
from trl_offpolicy.migrate.frameworks.verl.paths import ACTOR, CORRECTION, MODEL, ROLLOUT
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

REWARD = ("custom_reward_function", "reward.custom_reward_function")
"""Where the user's reward function is named: to 0.6, and now."""
FILES = (".parquet", ".json", ".jsonl")
_CORRECTION = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "bypass_mode",
    "loss_type",
)
_ACTOR = (
    "loss_agg_mode",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
    "loss_scale_factor",
    "entropy_coeff",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
)
_POLICY_LOSS = (
    "loss_mode",
    "clip_cov_ratio",
    "clip_cov_lb",
    "clip_cov_ub",
    "kl_cov_ratio",
    "ppo_kl_coef",
    "dro_beta",
)
_ALGORITHM = ("adv_estimator", "norm_adv_by_std_in_grpo", "gamma", "handle_zero_tail", "use_kl_in_reward", "use_pf_ppo")

OPTIONS = {
    **{f"{CORRECTION}.{name}": name for name in _CORRECTION},
    **{f"{ACTOR}.{name}": name for name in _ACTOR},
    **{f"{ACTOR}.policy_loss.{name}": name for name in _POLICY_LOSS},
    **{f"algorithm.{name}": name for name in _ALGORITHM},
    "trainer.use_v1": "use_v1",
}
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}.n": 1,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    f"{MODEL}.lora.rank": 0,
    f"{MODEL}.lora.alpha": 32,
    f"{MODEL}.lora.target_modules": "all-linear",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "data.train_files": None,
    "data.val_files": None,
    "data.val_max_samples": -1,
    f"{ACTOR}.optim.min_lr": 0.0,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    **{f"{section}.{name}": None for section in REWARD for name in ("path", "name")},
}


def _batch(source: Source) -> Iterable[Found]:
    names = (
        "data.train_batch_size",
        f"{ROLLOUT}.n",
        f"{ACTOR}.ppo_mini_batch_size",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        WHOLE_MICRO,
    )
    prompts = prompts_of(source)
    generations, mini, nodes, devices, micro, whole_micro = (shared.given_or(source, name) for name in names[1:])
    if not source.has(*names[:3]):
        yield from shared.responses_of_a_prompt(source, names[1])
        return
    if prompts is None or None in (generations, mini):
        parts = "async_training.require_batches"
        missing = [f"{name}=..." for name in names[:3] if source.get(name) is None]
        missing += [f"{parts}=..."] if prompts is None and source.get(names[0]) is not None else []
        why = f"not all batch sizes are known; give {' and '.join(missing)} as overrides"
        yield from shared.sizes_unknown(source, names, names[1], why)
        return
    if None in (nodes, devices):
        why = "the number of devices is not known; give trainer.nnodes=... and trainer.n_gpus_per_node=... as overrides"
        yield from shared.sizes_unknown(source, names, names[1], why)
        return
    if micro is None and whole_micro is not None:
        micro = max(whole_micro // (nodes * devices), 1)
    yield from shared.batch(
        shared.Batch(
            source.given(*names, *(["async_training.require_batches"] if trainer_of(source) == "fully_async" else [])),
            prompts,
            generations,
            min(mini, prompts) * generations,
            micro,
            nodes * devices,
            "trainer.nnodes x trainer.n_gpus_per_node",
        )
    )
    if mini > prompts:
        why = (
            f"{mini} prompts are more than the {prompts} of a generation, which verl refuses without use_dynamic_bsz: "
            "one optimizer step a generation here"
        )
        yield Left((), why, pattern=f"{ACTOR}.ppo_mini_batch_size")


def _per_step(source: Source) -> shared.Steps:
    return shared.steps_per_generation(_batch(source), source.get(f"{ACTOR}.ppo_epochs", 1))


def _per_schedule_step(source: Source) -> shared.Steps:
    """The schedule moves after each update of the actor: once a generation, or once a part of it (v1, async)."""
    steps, mode = _per_step(source), source.get("trainer.v1.trainer_mode", "sync")
    parts = source.get(f"trainer.v1.{mode}.parameter_sync_step", 4 if mode == "separate_async" else 1)
    return replace(steps, number=max(steps.number // parts, 1)) if isinstance(parts, int) and parts > 1 else steps


def _counted(source: Source) -> Iterable[Found]:
    per_step = _per_step(source)
    versions = generations_of_a_version(source)
    per_version = replace(per_step, number=per_step.number * versions, unit="a sync" if versions > 1 else per_step.unit)
    yield from shared.saving(source, "trainer.save_freq", per_version)
    yield from shared.last_step(source, "trainer.total_training_steps", per_step)
    yield from all_prompts(source, per_step)
    yield from _evaluation(source, per_version)


def _evaluation(source: Source, per_step: shared.Steps) -> Iterable[Found]:
    """``eval_steps``: generations there, optimizer steps here. verl evaluates before training too, by default."""
    every, before, responses = "trainer.test_freq", "trainer.val_before_train", f"{ROLLOUT}.val_kwargs.n"
    if not source.has(every):
        yield from shared.left(source, dict.fromkeys((before, responses), shared.EVALUATION))
        return
    value = source.settings.values[every]
    if value is None or value is False or whole(every, value) <= 0:
        yield Carried((every,), {"eval_strategy": "no"})
        yield from shared.left(source, dict.fromkeys((before, responses), f"{every} is off"))
        return
    fields = {
        "eval_strategy": "steps",
        "eval_steps": value * per_step.number,
        "eval_on_start": switch(before, source.get(before, True)),
    }
    if not source.unknown(responses):
        fields["num_generations_eval"] = whole(responses, source.get(responses) or 1)
        fields |= _evaluation_batch(source, fields["num_generations_eval"])
    sampled = "TRL samples held-out prompts as in training, where verl is greedy unless val_kwargs says otherwise"
    why = "; ".join(part for part in (shared.times(per_step), sampled) if part)
    yield Carried(source.given(every, before, responses), fields, why)


def _evaluation_batch(source: Source, responses: int) -> dict[str, int]:
    """``per_device_eval_batch_size`` where TRL's 8 a device do not hold whole groups of held-out responses."""
    nodes, devices = (shared.given_or(source, f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node"))
    processes = 1 if None in (nodes, devices) else nodes * devices
    if responses < 1 or 8 * processes % responses == 0:
        return {}
    least = responses // gcd(responses, processes)  # rows a device with whole groups over all of them
    return {"per_device_eval_batch_size": least * max(8 // least, 1)}


def _megatron_schedule(source: Source, kind: str) -> Iterable[Found]:
    """Megatron's own names: ``lr_decay_style`` and a least rate that is no ratio."""
    optim, least = f"{ACTOR}.optim", f"{ACTOR}.optim.min_lr"
    steps, share = f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio"
    rate = source.get(least)
    for one in shared.scheduler(source, kind, steps, share, _per_schedule_step(source)):
        if rate and isinstance(one, Carried) and one.fields["lr_scheduler_type"] == "cosine":
            own = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": number(least, rate)}}
            one = replace(one, keys=(*one.keys, least), fields={**one.fields, **own})
        yield one
    if not rate or source.get(kind) != "cosine":
        yield from shared.left(source, {least: "0, or no cosine: the schedule has no least rate"})


def _optimizer(source: Source) -> Iterable[Found]:
    optim = f"{ACTOR}.optim"
    kind, least = f"{optim}.lr_scheduler_type", f"{optim}.min_lr_ratio"
    yield from shared.betas(source, f"{optim}.betas")
    if source.has(megatron := f"{optim}.lr_decay_style"):
        yield from _megatron_schedule(source, megatron)
        yield from shared.left(source, dict.fromkeys((kind, least), f"{megatron} is read"))
        return
    found = shared.scheduler(
        source, kind, f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio", _per_schedule_step(source)
    )
    rate = source.get(least)
    if source.get(kind) != "cosine" or rate is None or number(source.settings.shown(least), rate) == 0:
        yield from found
        yield from shared.left(source, {least: "0, or no cosine: the schedule has no least rate"})
    else:
        for one in found:
            if isinstance(one, Carried):
                own = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": rate}}
                one = replace(one, keys=(*one.keys, least), fields={**one.fields, **own})
            yield one


def _adapter(source: Source) -> Iterable[Found]:
    """FSDP's adapter, or Megatron's, which has a section of its own."""
    plain = ("lora_rank", "lora_alpha", "target_modules")
    if source.get(f"{MODEL}.lora.rank"):
        names = (f"{MODEL}.lora.{name}" for name in ("rank", "alpha", "target_modules", "dropout"))
        yield from shared.lora(source, *names)
        yield from shared.left(source, {f"{MODEL}.{name}": f"{MODEL}.lora is read" for name in plain})
    else:
        yield from shared.lora(source, *(f"{MODEL}.{name}" for name in plain))


def _engine(source: Source) -> Iterable[Found]:
    name = f"{ROLLOUT}.name"
    if source.has(name):
        given = text(name, source.settings.values[name])
        if given in ("vllm", "sglang", "trtllm"):
            said = ["" if given == "vllm" else f"{given} there, vLLM here"]
            mode = "server" if has_own_devices(source) else "colocate"
            said.append("set vllm_server_base_url" if mode == "server" else "")
            yield Carried((name,), {"use_vllm": True, "vllm_mode": mode}, "; ".join(filter(None, said)))
        else:
            yield Left((name,), f"{given!r} is no engine here; without use_vllm, transformers samples")
    longest, lengths = f"{ROLLOUT}.max_model_len", ("data.max_prompt_length", "data.max_response_length")
    if source.has(longest) and source.settings.values[longest] is not None:
        value = whole(longest, source.settings.values[longest])
        yield Carried((longest,), {"vllm_max_model_length": value})
        yield from shared.left(source, {lengths[0]: "TRL does not cut prompts; vllm_max_model_length bounds both"})
    elif None not in (source.get(lengths[1]), source.settings.values.get(lengths[0])):
        total = sum(whole(key, source.get(key)) for key in lengths)
        why = "prompt + response; TRL does not cut prompts"
        yield Carried(source.given(lengths[0], longest), {"vllm_max_model_length": total}, why)
    else:
        yield from shared.left(source, {longest: "null: the model's own length"})
    if source.has(lengths[1]) and source.get(lengths[1]) is None:
        why = "null: the engine's own length there, and TRL's 512 tokens here: set max_completion_length"
        yield Left((lengths[1],), why, to_set=shared.to_set("max_completion_length"))
    settings = {
        f"{ROLLOUT}.enforce_eager": ("enforce_eager", switch),
        f"{ROLLOUT}.dtype": ("dtype", one_of("bfloat16", "float16", "float32", "auto")),
        f"{ROLLOUT}.max_num_seqs": ("max_num_seqs", whole),
    }
    for key, (argument, convert) in settings.items():
        if source.has(key):
            yield Carried((key,), {f"engine.{argument}": convert(key, source.settings.values[key])})


def _reward_kl(source: Source) -> Iterable[Found]:
    """The coefficient and the estimator of a KL in the reward; without one they are left."""
    penalty, kind, coef = "algorithm.kl_penalty", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef"
    if not switch("algorithm.use_kl_in_reward", source.get("algorithm.use_kl_in_reward", False)):
        return
    control = {name.rpartition(".")[2]: source.get(name, None) for name in source.given(kind, coef)}
    fields: dict[str, Any] = {"option.kl_ctrl": control} if control else {}
    fields |= {"option.kl_penalty": source.get(penalty, "kl")} if source.given(penalty) else {}
    if fields:
        yield Carried(source.given(penalty, kind, coef), fields)


def _refused_bounds(source: Source) -> Iterable[Found]:
    """Bounds of the clip that are no number above 0, as the -1 of rLLM's files."""
    for name in ("clip_ratio_low", "clip_ratio_high"):
        key = f"{ACTOR}.{name}"
        value = source.settings.values.get(key)
        if isinstance(value, int | float) and value <= 0:
            yield Left((key,), f"a bound of {value} is refused here: set epsilon", to_set=shared.to_set("epsilon"))


def _data(source: Source) -> Iterable[Found]:
    """Files of prompts, which recipes/grpo.py reads as verl does."""
    columns = {"data.prompt_key": "prompt", "data.reward_fn_key": "data_source"}
    other = [key for key, name in columns.items() if source.get(key, name) != name]
    for key in source.given(*columns):
        if key not in other:
            yield Carried((key,), {}, f"recipes/grpo.py reads the column {columns[key]}")
    yield from shared.left(source, dict.fromkeys(other, "recipes/grpo.py reads the columns prompt and data_source"))
    carries_training = False  # recipes/grpo.py takes val_files only beside train_files
    for key in source.given("data.train_files", "data.val_files"):
        value = source.settings.values[key]
        files = value if isinstance(value, list) else [value]
        if other:
            yield Left((key,), f"{shared.DATA}: {' and '.join(other)} name other columns than recipes/grpo.py reads")
        elif value is None or not all(isinstance(one, str) and one.endswith(FILES) for one in files):
            yield Left((key,), f"{shared.DATA}: recipes/grpo.py reads files that end with {', '.join(FILES)}")
        elif key == "data.val_files" and not carries_training:
            yield Left((key,), f"{shared.DATA}: recipes/grpo.py reads val_files only beside train_files")
        else:
            carries_training = True
            fields: dict[str, Any] = {key.removeprefix("data."): files}
            keys: tuple[str, ...] = (key,)
            if key == "data.val_files":  # verl reads all rows, or so many
                most = "data.val_max_samples"
                if not source.unknown(most):
                    number_of_rows = whole(most, source.get(most) or 0)
                    fields["eval_size"] = number_of_rows if number_of_rows > 0 else None
                keys += source.given(most)
            yield Carried(keys, fields)


def _reward(source: Source) -> Iterable[Found]:
    """The user's reward function; verl's own is chosen by the data's source."""
    for section in REWARD:
        inside = f"{section}.reward_kwargs."
        options = {key: value for key, value in source.settings.values.items() if key.startswith(inside)}
        keys = (f"{section}.path", f"{section}.name", *options)
        path, name = source.get(keys[0]), source.get(keys[1])
        if path is None:
            known = keys[0] not in source.settings.unknown
            why = "no path: verl chooses by data_source; set reward here" if known else "its path is not known"
            yield from shared.left(source, dict.fromkeys(keys, why))
            continue
        module = _module(text(source.settings.shown(keys[0]), path))
        fields: dict[str, Any] = {"reward": f"{module}:{name or 'compute_score'}"}
        if options:
            fields["reward_options"] = {key.removeprefix(inside): value for key, value in options.items()}
        yield Carried(source.given(*keys), fields, "recipes/grpo.py gives it verl's arguments")


def _module(path: str) -> str:
    """A file, or a module with dots, as recipes/grpo.py names it; verl also writes ``file://`` and ``pkg://a/b``."""
    if path.startswith("pkg://"):
        return path.removeprefix("pkg://").replace("/", ".")
    return path.removeprefix("file://")


def _program(source: Source) -> Iterable[Found]:
    """A recipe may bring code of its own, which no setting shows."""
    module = source.settings.entry.rpartition(" ")[2]
    if module.startswith("recipe.") and not trainer_of(source):
        why = "code of its own may change loss, advantages or data beside the settings: read it before you trust these"
        yield Left((), why, pattern=f"the program {module}", default=False)


_LENGTH = "TRL does not cut prompts; set vllm_max_model_length"
FRAMEWORK = Framework(
    name="verl",
    entries=("verl.trainer.", "verl.experimental", "recipe."),
    marks=(
        "actor_rollout_ref.*",
        "algorithm.rollout_correction.*",
        "algorithm.rollout_is*",
        "rollout_correction.*",
        "rollout_is",
        "rollout_rs",
        "actor.ppo_mini_batch_size",
        "algorithm.adv_estimator",
    ),
    options=OPTIONS,
    rows={
        f"{MODEL}.path": Row("model_name_or_path", optional(text)),
        f"{MODEL}.enable_gradient_checkpointing": Row("gradient_checkpointing", switch),
        f"{MODEL}.trust_remote_code": Row("trust_remote_code", switch),
        f"{ACTOR}.optim.lr": Row("learning_rate", number, default=1e-6),
        f"{ACTOR}.optim.weight_decay": Row("weight_decay", number, default=0.01),
        f"{ACTOR}.optim.clip_grad": Row("max_grad_norm", number),
        f"{ACTOR}.grad_clip": Row("max_grad_norm", number),
        f"{ACTOR}.ppo_epochs": Row("num_iterations", whole),
        "data.max_response_length": Row("max_completion_length", whole, default=512),
        "data.shuffle": Row("shuffle_dataset", switch),
        "data.seed": Row("data_seed", optional(whole), null="null: the seed of the run"),
        f"{ROLLOUT}.temperature": Row("temperature", drawn),
        f"{ROLLOUT}.top_p": Row("top_p", number),
        f"{ROLLOUT}.top_k": Row("top_k", top_k, why="-1 there is 0 here: no top-k"),
        f"{ROLLOUT}.gpu_memory_utilization": Row("vllm_gpu_memory_utilization", number),
        f"{ROLLOUT}.tensor_model_parallel_size": Row("vllm_tensor_parallel_size", whole),
        "trainer.total_epochs": Row("num_train_epochs", number, default=30),
        "trainer.default_local_dir": Row("output_dir", text),
        "trainer.experiment_name": Row("run_name", optional(text)),
    },
    steps=(
        _program,
        asynchronous,
        routing_replay,
        _batch,
        _reward_kl,
        _counted,
        _optimizer,
        _adapter,
        _engine,
        _data,
        _reward,
        older_options,
        _refused_bounds,
    ),
    defaults=DEFAULTS,
    left={
        "*_target_": "hydra's own",
        f"{ACTOR}.fsdp_config": shared.MODEL,
        f"{ACTOR}.megatron": shared.MODEL,
        f"{ACTOR}.strategy": shared.MODEL,
        f"{ACTOR}.use_dynamic_bsz": "batches are counted in responses here, not in tokens",
        f"{ACTOR}.ppo_max_token_len_per_gpu": "batches are counted in responses here, not in tokens",
        WHOLE_MICRO: "the responses of a forward pass over all devices; the batch sizes are not all known",
        f"{ACTOR}.policy_loss.rollout_correction": "verl's trainers read algorithm.rollout_correction",
        f"{ACTOR}.optim": "set the optimizer here: optim, adam_epsilon, lr_scheduler_kwargs",
        f"{ACTOR}.checkpoint": shared.CHECKPOINTS,
        f"{ACTOR}.shuffle": "TRL shuffles a generation batch always",
        f"{ACTOR}.data_loader_seed": "the seed of the run decides here",
        **shared.names(
            ACTOR,
            "torchtitan veomni engine model_config profiler profile qat router_replay rollout_n "
            "nccl_timeout freeze_vision_tower use_torch_compile use_fused_kernels use_prefix_grouper "
            "use_remove_padding pad_to_length ulysses_sequence_parallel_size calculate_entropy "
            "calculate_sum_pi_squared use_rollout_log_probs ppo_infer_micro_batch_size_per_gpu "
            "ppo_infer_max_token_len_per_gpu sum_pi_squared_checkpointing "
            "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing",
            shared.MODEL,
        ),
        "actor_rollout_ref.ref": shared.REFERENCE,
        f"{ROLLOUT}.log_prob_*": "old log-probs are scored with the micro-batches of the loss here",
        f"{ROLLOUT}.calculate_log_probs": "log-probs of the engine are always taken here",
        f"{ROLLOUT}.val_kwargs": shared.EVALUATION,
        f"{ROLLOUT}.multi_turn": shared.TOOLS,
        f"{ROLLOUT}.agent": shared.TOOLS,
        f"{ROLLOUT}.do_sample": "TRL always samples",
        f"{ROLLOUT}.prompt_length": _LENGTH,
        f"{ROLLOUT}.response_length": "data.max_response_length decides",
        **shared.names(
            ROLLOUT,
            "mode nnodes n_gpus_per_node full_determinism seed ignore_eos cudagraph_capture_sizes "
            "free_cache_engine data_parallel_size expert_parallel_size pipeline_model_parallel_size "
            "quantization trace max_num_batched_tokens enable_chunked_prefill enable_prefix_caching "
            "logprobs_mode scheduling_policy mtp load_format layered_summon disable_log_stats "
            "over_sample_rate multi_stage_wake_up engine_kwargs qat checkpoint_engine skip_tokenizer_init "
            "skip_rollout skip_dump_dir enable_rollout_routing_replay profiler "
            "moe_load_balance_metrics_interval prometheus quantization_config_file disaggregation "
            "limit_images update_weights_bucket_megabytes",
            shared.ENGINE,
        ),
        **shared.names(
            MODEL,
            "hf_config_path tokenizer_path use_shm custom_chat_template external_lib override_config "
            "enable_activation_offload use_remove_padding exclude_modules lora_adapter_path use_liger "
            "use_fused_kernels fused_kernel_options tiled_mlp mtp lora",
            shared.MODEL,
        ),
        "actor_rollout_ref.nccl_timeout": shared.MODEL,
        "algorithm.lam": "GAE alone reads it",
        "algorithm.kl_ctrl": "the KL in the reward alone reads it, and use_kl_in_reward is off (to verl 0.2 it was in "
        "the reward unless use_kl_loss: add algorithm.use_kl_in_reward=true if yours is so old)",
        "algorithm.kl_penalty": "the KL in the reward alone reads it",
        "algorithm.pf_ppo": "PF-PPO alone reads it",
        "algorithm.filter_groups": "dynamic sampling has no counterpart here",
        "algorithm.gdpo_*": shared.REWARD,
        "data.max_prompt_length": _LENGTH,
        **shared.names(
            "data",
            "tokenizer use_shm train_max_samples val_max_samples "
            "gen_batch_size val_batch_size tool_config_path function_tool_path return_raw_input_ids "
            "return_raw_chat return_full_prompt dataloader_num_workers image_patch_size "
            "validation_shuffle "
            "image_key video_key audio_key trust_remote_code custom_cls sampler datagen "
            "return_multi_modal_inputs apply_chat_template_kwargs mm_processor_kwargs",
            shared.DATA,
        ),
        **shared.names("data", "filter_overlong_prompts filter_overlong_prompts_workers truncation", shared.PROMPTS),
        "reward*": shared.REWARD,
        "critic": shared.CRITIC,
        "distillation": shared.OTHER_MODELS,
        "trainer.logger": "set report_to",
        "trainer.project_name": shared.TRACKED,
        "trainer.val_*": shared.EVALUATION,
        "trainer.log_val_generations": shared.EVALUATION,
        "trainer.resume_*": shared.CHECKPOINTS,
        "trainer.max_actor_ckpt_to_keep": "set save_total_limit",
        "trainer.max_critic_ckpt_to_keep": shared.CRITIC,
        "trainer.del_local_ckpt_after_load": shared.CHECKPOINTS,
        "trainer.critic_warmup": shared.CRITIC,
        "trainer.balance_batch": "trim_padding: ranks deals rows to the ranks by length",
        "trainer.rollout_data_dir": "record_rollouts writes rollouts.parquet here",
        **shared.names(
            "trainer",
            "validation_data_dir esi_redundant_time default_hdfs_dir device v1 use_legacy_worker_impl "
            "ray_wait_register_center_timeout",
            shared.MODEL,
        ),
        "ray_kwargs": shared.MODEL,
        "global_profiler": shared.LOGGING,
        "transfer_queue": shared.MODEL,
        "model_engine": shared.MODEL,
        "async_training": shared.ASYNC,
        "rollout.n": f"{ROLLOUT}.n decides",
        "rollout.nnodes": "the engine's own devices: trl-offpolicy serve runs there",
        "rollout.n_gpus_per_node": "the engine's own devices: trl-offpolicy serve runs there",
        "hydra": "hydra's own",
        "config_path": "the file was not read, see below",
        "sandbox_fusion": shared.REWARD,
        "skip": "rollouts are not stored to be skipped here",
    },
    renamed={
        f"{ACTOR}.optim.warmup_style": f"{ACTOR}.optim.lr_scheduler_type",
        **{name: f"{CORRECTION}.{name}" for name in _CORRECTION},
        **{f"{ACTOR}.{name}": f"{ACTOR}.policy_loss.{name}" for name in _POLICY_LOSS},  # of forks, before verl had them
    },
    prefixes={
        "rollout_correction": CORRECTION,
        "policy_loss": f"{ACTOR}.policy_loss",
        "actor": ACTOR,
        "rollout": ROLLOUT,
    },
    beside=("rollout.n", "rollout.nnodes", "rollout.n_gpus_per_node", TOTAL_PROMPTS),
)
