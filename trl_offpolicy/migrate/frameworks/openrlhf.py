"""OpenRLHF: the flags of its launch scripts, dotted since ed62d0e2 (April 2026) and flat before.

Read at OpenRLHF 3c3be623, ``openrlhf/cli/train_ppo_ray.py``; flat names at ed62d0e2^.
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
    one_of,
    optional,
    switch,
    text,
    whole,
)

CORRECTION = "algo.advantage.is_correction"
OPTIONS = {
    f"{CORRECTION}_enable": "enable_vllm_is_correction",
    f"{CORRECTION}_type": "vllm_is_correction_type",
    f"{CORRECTION}_threshold": "vllm_is_truncated_threshold",
    "actor.policy_loss_type": "policy_loss_type",
}
DEFAULTS: dict[str, Any] = {
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.max_epochs": 1,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.eps_clip": 0.2,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.adam.betas": [0.9, 0.95],
    "ds.lora.alpha": 16,
    "ds.lora.target_modules": "all-linear",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.advantage.estimator": "gae",
}


def _threshold(source: Source) -> Iterable[Found]:
    """One number (to 2025) was a cap without a floor."""
    key = f"{CORRECTION}_threshold"
    given = source.settings.values.get(key)
    if isinstance(given, int | float) and not isinstance(given, bool):
        yield Carried((key,), {"option.vllm_is_truncated_threshold": [0.0, given]}, "now two numbers", older=True)
    icepop = "use_icepop"
    if source.has(icepop):
        kind = {"option.vllm_is_correction_type": "icepop"} if source.settings.values[icepop] else {}
        yield Carried((icepop,), kind, f"now --{CORRECTION}_type icepop", older=True)


def _clip(source: Source) -> Iterable[Found]:
    single, both, dual = "actor.eps_clip", "actor.eps_clip_low_high", "actor.dual_clip"
    keys = source.given(single, both, dual)
    if not keys:
        return
    bounds = source.get(both)
    if bounds is None:
        bounds = [number(single, source.get(single))] * 2
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ValueError(f"--{both} must be two numbers, low and high, but got {bounds!r}.")
    low, high = (number(f"--{both}", one) for one in bounds)
    cap = None if source.get(dual) is None else number(f"--{dual}", source.get(dual))
    if source.get("actor.policy_loss_type") == "gspo":  # the loss is the preset's own
        loss = "offpolicy.objective.policy_loss"
        fields: dict[str, Any] = {f"{loss}.low": low, f"{loss}.high": high}
        fields |= {} if cap is None else {f"{loss}.dual_clip": cap}
    else:
        fields = {"epsilon": low, **({} if high == low else {"epsilon_high": high})}
        fields |= {} if cap is None else {"delta": cap}
    yield Carried(keys, fields, "" if cap is None or "delta" not in fields else "TRL's delta is the dual clip")


_IN_REWARD = "in the reward, as there; OpenRLHF takes it after the group's normalisation, this kit before"


def _kl(source: Source) -> Iterable[Found]:
    """The KL is in the reward unless the loss is told to hold it; its default coefficient is not 0."""
    names = ("algo.kl.use_loss", "algo.kl.init_coef", "algo.kl.estimator")
    keys = source.given(*names)
    coef = number(f"--{names[1]}", source.get(names[1], 0.01))
    if coef == 0:
        yield Carried(keys, {"beta": 0.0}, "no KL term")
        return
    kind = one_of("k1", "k2", "k3")(f"--{names[2]}", source.get(names[2], "k1"))
    if source.get(names[0], False):
        yield shared.kl_term(keys, coef, kind, max_value=10.0)
    else:
        why = _IN_REWARD if keys else f"the default of --{names[1]}; {_IN_REWARD}"
        yield shared.reward_kl(keys, coef, kind, why)


def _advantages(source: Source) -> Iterable[Found]:
    key, plain = "algo.advantage.estimator", "algo.advantage.no_std_norm"
    kind = source.get(key, "gae")
    if kind is None:
        return
    found: dict[str, Any] = {
        "rloo": "rloo",
        "group_norm": {"type": "grpo", "epsilon": 1e-9},
        "dr_grpo": "dr_grpo",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
    }
    if kind in found and not (kind == "reinforce_baseline" and source.get(plain, False)):
        why = "OpenRLHF divides the tokens' variance by n, this kit by n - 1" if kind == "reinforce_baseline" else ""
        yield Carried(source.given(key), {"offpolicy.advantages": found[kind]}, why)
        yield from shared.left(source, {plain: f"{kind} does not read it"})
    else:
        how = f"{kind!r}{' without the deviation' * bool(source.get(plain, False))}"
        yield shared.no_estimator(source.given(key, plain), how, pattern=f"--{key}")


def _batch(source: Source) -> Iterable[Found]:
    names = (
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "train.batch_size",
        "actor.num_nodes",
        "actor.num_gpus_per_node",
        "train.micro_batch_size",
        "train.dynamic_batch_enable",
    )
    if not source.has(*names[:3]):
        yield from shared.responses_of_a_prompt(source, names[1])
        return
    prompts, generations, step, nodes, devices, micro = (shared.given_or(source, name) for name in names[:6])
    if None in (prompts, generations, step, nodes, devices):
        yield from shared.sizes_unknown(source, names, names[1], shared.SIZES)
        return
    dynamic = source.get(names[6], False) or not source.has(names[5])
    yield from shared.batch(
        shared.Batch(
            source.given(*names),
            prompts,
            generations,
            min(step, prompts * generations),
            None if dynamic else micro,
            nodes * devices,
            "--actor.num_nodes x --actor.num_gpus_per_node",
        )
    )


def _counted(source: Source) -> Iterable[Found]:
    per_step = shared.steps_per_generation(_batch(source), source.get("train.max_epochs", 1))
    yield from shared.saving(source, "ckpt.save_steps", per_step)


def _optimizer(source: Source) -> Iterable[Found]:
    yield from shared.scheduler(source, "actor.lr_scheduler", None, "actor.lr_warmup_ratio")
    least = source.get("actor.min_lr_ratio")
    if source.get("actor.lr_scheduler") == "cosine_with_min_lr" and least is not None:
        kwargs = {"lr_scheduler_kwargs": {"min_lr_rate": number("--actor.min_lr_ratio", least)}}
        yield Carried(
            source.given("actor.min_lr_ratio"),
            kwargs,
            "" if source.has("actor.min_lr_ratio") else "the default of actor.min_lr_ratio",
        )
    else:
        yield from shared.left(source, {"actor.min_lr_ratio": "cosine_with_min_lr alone reads it"})
    yield from shared.betas(source, "actor.adam.betas")


def _adapter(source: Source) -> Iterable[Found]:
    yield from shared.lora(source, "ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules", "ds.lora.dropout")


def _engine(source: Source) -> Iterable[Found]:
    yield from shared.no_length(source, "rollout.max_new_tokens")
    engines, together = "vllm.num_engines", ("train.colocate_all", "train.async_enable")
    if source.has(engines) and not whole(f"--{engines}", source.settings.values[engines]):
        yield Carried((engines,), {"use_vllm": False}, "0 engines: transformers samples")
        return
    colocated = source.get(together[0], False) and not source.get(together[1], False)
    mode = "colocate" if colocated else "server"
    keys = source.given(engines, together[0])
    yield Carried(keys, {"use_vllm": True, "vllm_mode": mode}, "" if colocated else "set vllm_server_base_url")
    if source.has("vllm.enforce_eager"):
        yield Carried(("vllm.enforce_eager",), {"engine.enforce_eager": True})


def _data(source: Source) -> Iterable[Found]:
    key = "data.prompt_dataset"
    if not source.has(key):
        return
    name = text(f"--{key}", source.settings.values[key])
    if "," in name:
        yield Left((key,), shared.DATA)
        return
    names = (key, "data.input_key", "data.label_key")
    columns = {"question_column": names[1], "answer_column": names[2]}
    fields: dict[str, Any] = {"dataset_name": name}
    for field, column in columns.items():
        if not source.unknown(column):
            fields[field] = source.get(column, "input" if column == names[1] else None)
    without = "answer_column" in fields and fields["answer_column"] is None
    yield Carried(source.given(*names), fields, "without labels: no answers" if without else "")
    if unknown := [field for field, column in columns.items() if source.unknown(column)]:
        yield Left((), "the column is not known", ", ".join(unknown), shared.to_set(*unknown), default=False)


_OLD = {
    "enable_vllm_is_correction": f"{CORRECTION}_enable",
    "vllm_is_correction_type": f"{CORRECTION}_type",
    "vllm_is_truncated_threshold": f"{CORRECTION}_threshold",
    "policy_loss_type": "actor.policy_loss_type",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "pretrain": "actor.model_name_or_path",
    "actor_learning_rate": "actor.adam.lr",
    "adam_betas": "actor.adam.betas",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "lr_scheduler": "actor.lr_scheduler",
    "max_norm": "actor.max_norm",
    "l2": "actor.adam.weight_decay",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "entropy_loss_coef": "actor.entropy_coef",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "lambd": "algo.advantage.lambd",
    "gamma": "algo.advantage.gamma",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "max_new_tokens": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "seed": "train.seed",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "colocate_all_models": "train.colocate_all",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "max_len": "data.max_len",
    "prompt_data": "data.prompt_dataset",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "enforce_eager": "vllm.enforce_eager",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "save_path": "ckpt.output_dir",
    "save_steps": "ckpt.save_steps",
    "logging_steps": "logger.logging_steps",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "lora_dropout": "ds.lora.dropout",
    "param_dtype": "ds.param_dtype",
    "agent_func_path": "train.agent_func_path",
    "remote_rm_url": "reward.remote_url",
}
FRAMEWORK = Framework(
    name="openrlhf",
    entries=("openrlhf",),
    marks=(
        "algo.advantage.*",
        "algo.kl.*",
        "actor.adam.*",
        "enable_vllm_is_correction",
        "vllm_is_*",
        "init_kl_coef",
        "micro_train_batch_size",
        "actor_learning_rate",
    ),
    options=OPTIONS,
    rows={
        "actor.model_name_or_path": Row("model_name_or_path", text),
        "actor.adam.lr": Row("learning_rate", number),
        "actor.adam.eps": Row("adam_epsilon", number),
        "actor.adam.weight_decay": Row("weight_decay", number),
        "actor.max_norm": Row("max_grad_norm", number),
        "actor.entropy_coef": Row("entropy_coef", optional(number), null="null: the entropy is always logged here"),
        "actor.gradient_checkpointing_enable": Row("gradient_checkpointing", switch),
        "train.max_epochs": Row("num_iterations", whole),
        "train.num_episodes": Row("num_train_epochs", number, default=1),
        "train.seed": Row("seed", whole),
        "rollout.max_new_tokens": Row("max_completion_length", whole),
        "rollout.temperature": Row("temperature", drawn),
        "rollout.top_p": Row("top_p", number),
        "data.max_len": Row("vllm_max_model_length", whole, why="prompt + response"),
        "vllm.gpu_memory_utilization": Row("vllm_gpu_memory_utilization", number),
        "vllm.tensor_parallel_size": Row("vllm_tensor_parallel_size", whole),
        "vllm.enable_sleep": Row("vllm_enable_sleep_mode", switch),
        "ckpt.output_dir": Row("output_dir", text),
        "logger.logging_steps": Row("logging_steps", whole),
        "logger.wandb.run_name": Row("run_name", text),
    },
    steps=(_threshold, _clip, _kl, _advantages, _batch, _counted, _optimizer, _adapter, _engine, _data),
    defaults=DEFAULTS,
    left={
        "ds.param_dtype": "set bf16 or fp16; bf16 is the default",
        "ds": shared.MODEL,
        "critic": shared.CRITIC,
        "critic_*": shared.CRITIC,
        "ref": shared.REFERENCE,
        "ref_*": shared.REFERENCE,
        "reward": shared.REWARD,
        "reward_*": shared.REWARD,
        "eval": shared.EVALUATION,
        "eval_*": shared.EVALUATION,
        "logger": shared.LOGGING,
        "*wandb*": shared.LOGGING,
        "use_tensorboard": shared.LOGGING,
        "ckpt": shared.CHECKPOINTS,
        **shared.names(
            "",
            "ckpt_path save_hf_ckpt disable_ds_ckpt max_ckpt_num max_ckpt_mem load_checkpoint "
            "best_metric_key save_value_network",
            shared.CHECKPOINTS,
        ),
        **shared.names(
            "data",
            "prompt_probs prompt_split input_template apply_chat_template max_samples image_key "
            "max_images_per_prompt dataloader_num_workers disable_fast_tokenizer",
            shared.DATA,
        ),
        **shared.names(
            "",
            "prompt_data_probs prompt_split input_template apply_chat_template max_samples image_key "
            "max_images_per_prompt prompt_max_len disable_fast_tokenizer use_ms",
            shared.DATA,
        ),
        **shared.names(
            "actor",
            "optim muon gradient_checkpointing_reentrant aux_loss_coef freeze_visual_encoder",
            "set it here: optim, gradient_checkpointing_kwargs, router_aux_loss_coef",
        ),
        **shared.names("vllm", "sync_backend sync_with_ray enable_prefix_caching", shared.ENGINE),
        **shared.names(
            "", "vllm_sync_backend vllm_sync_with_ray enable_prefix_caching vllm_generate_batch_size", shared.ENGINE
        ),
        **shared.names("rollout", "vllm_generate_batch_size", shared.ENGINE),
        "rollout.micro_batch_size": "old log-probs are scored with the micro-batches of the loss here",
        "*max_tokens_per_gpu": "batches are counted in responses here, not in tokens",
        **shared.names("train", "async_enable async_queue_size partial_rollout_enable", shared.ASYNC),
        "partial_rollout": shared.ASYNC,
        **shared.names(
            "train",
            "colocate_actor_ref colocate_critic_reward enable_ema ema_beta full_determinism_enable",
            shared.MODEL,
        ),
        "train.agent_func_path": shared.TOOLS,
        **shared.names("algo.kl", "target horizon", "set offpolicy.objective.kl.coef: {type: adaptive, ...}"),
        **shared.names("algo.advantage", "lambd gamma", "GAE and REINFORCE alone read it"),
        "algo.dynamic_filtering_*": "dynamic sampling has no counterpart here",
        **shared.names(
            "",
            "zero_stage zpg adam_offload attn_implementation flash_attn packing_samples use_liger_kernel "
            "grad_accum_dtype overlap_comm ring_attn_size ring_head_stride ds_tensor_parallel_size "
            "deepspeed_enable_sleep bf16 load_in_4bit deepcompile colocate_actor_ref "
            "colocate_critic_reward enable_ema ema_beta local_rank full_determinism aux_loss_coef "
            "freezing_actor_steps value_head_prefix value_clip perf",
            shared.MODEL,
        ),
        **shared.names(
            "",
            "normalize_reward overlong_penalty_factor overlong_buffer_len stop_properly_penalty_coef reward_clip_range",
            shared.REWARD,
        ),
    },
    renamed=_OLD,
)
