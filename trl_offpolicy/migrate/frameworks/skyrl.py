"""SkyRL: overrides ``a.b=c`` of its launch scripts, or the same as YAML.

Read at SkyRL a9564572e, ``skyrl/train/config/config.py``; older paths of the engine at a90cd1d1f^.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trl_offpolicy.checks import check_choice
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
    switch,
    text,
    top_k,
    whole,
)

ALGORITHM = "trainer.algorithm"
CORRECTION = f"{ALGORITHM}.off_policy_correction"
OPTIMIZER = "trainer.policy.optimizer_config"
ENGINE = "generator.inference_engine"
SAMPLING = "generator.sampling_params"
_CORRECTION = (
    "tis_ratio_type",
    "token_tis_ratio_clip_high",
    "sequence_tis_ratio_clip_high",
    "sequence_mask_metric",
    "geo_mask_high",
    "geo_mask_low",
    "product_mask_high",
    "product_mask_low",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
DEFAULTS: dict[str, Any] = {
    "trainer.train_batch_size": 1024,
    "trainer.policy_mini_batch_size": 256,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.placement.policy_num_nodes": 1,
    "trainer.placement.policy_num_gpus_per_node": 1,
    "generator.n_samples_per_prompt": 5,
    f"{OPTIMIZER}.scheduler": "constant_with_warmup",
    f"{OPTIMIZER}.num_warmup_steps": 0,
    "trainer.policy.model.lora.alpha": 16,
    "trainer.policy.model.lora.target_modules": "all-linear",
    f"{ALGORITHM}.use_kl_loss": True,
    f"{ALGORITHM}.kl_loss_coef": 0.001,
    f"{ALGORITHM}.kl_estimator_type": "k3",
    f"{ALGORITHM}.policy_loss_type": "regular",
    f"{ALGORITHM}.eps_clip_low": 0.2,
    f"{ALGORITHM}.eps_clip_high": 0.2,
    f"{ALGORITHM}.clip_ratio_c": 3.0,
    f"{ALGORITHM}.advantage_estimator": "grpo",
    f"{ALGORITHM}.grpo_norm_by_std": True,
    f"{ALGORITHM}.sapo.tau_pos": 1.0,
    f"{ALGORITHM}.sapo.tau_neg": 1.05,
    f"{ALGORITHM}.cispo.cispo_eps_clip_low": 1.0,
    f"{ALGORITHM}.cispo.cispo_eps_clip_high": 4.0,
    f"{ALGORITHM}.clip_cov.clip_ratio": 0.0002,
    f"{ALGORITHM}.clip_cov.clip_cov_lb": 1.0,
    f"{ALGORITHM}.clip_cov.clip_cov_ub": 5.0,
    f"{ALGORITHM}.kl_cov.kl_cov_frac": 0.2,
    f"{ALGORITHM}.kl_cov.ppo_kl_coef": 1.0,
}


def _get(source: Source, name: str) -> float:
    return number(source.settings.shown(f"{ALGORITHM}.{name}"), source.get(f"{ALGORITHM}.{name}"))


def _cispo(source: Source) -> dict[str, Any]:
    low = 1 - _get(source, "cispo.cispo_eps_clip_low")
    return {"type": "cispo", "high": 1 + _get(source, "cispo.cispo_eps_clip_high"), **({"low": low} if low > 0 else {})}


def _bounds(source: Source) -> dict[str, float]:
    return {"low": _get(source, "eps_clip_low"), "high": _get(source, "eps_clip_high")}


_LOSSES: Mapping[str, Callable[[Source], dict[str, Any]]] = {
    "gspo": lambda source: {"type": "gspo_token", **_bounds(source)},
    "sapo": lambda source: {
        "type": "sapo",
        "temperature_pos": _get(source, "sapo.tau_pos"),
        "temperature_neg": _get(source, "sapo.tau_neg"),
    },
    "cispo": _cispo,
    "kl_cov": lambda source: {
        "type": "kl_cov",
        "fraction": _get(source, "kl_cov.kl_cov_frac"),
        "coef": _get(source, "kl_cov.ppo_kl_coef"),
    },
    "clip_cov": lambda source: {
        "type": "clip_cov",
        **_bounds(source),
        "fraction": _get(source, "clip_cov.clip_ratio"),
        "cov_low": _get(source, "clip_cov.clip_cov_lb"),
        "cov_high": _get(source, "clip_cov.clip_cov_ub"),
    },
}
_UNCORRECTED = "off_policy_correction does not act on it"
_OTHERWISE = {
    "clip_cov": f"SkyRL's advantages are over the tokens already where the bounds meet them; {_UNCORRECTED} there",
    "kl_cov": f"SkyRL adds the penalty up, here it is reduced as the loss is; {_UNCORRECTED} there",
}
"""What SkyRL computes otherwise."""
_LOSS_KEYS = (
    "policy_loss_type",
    "eps_clip_low",
    "eps_clip_high",
    "clip_ratio_c",
    "sapo.tau_pos",
    "sapo.tau_neg",
    "cispo.cispo_eps_clip_low",
    "cispo.cispo_eps_clip_high",
    "clip_cov.clip_ratio",
    "clip_cov.clip_cov_lb",
    "clip_cov.clip_cov_ub",
    "kl_cov.kl_cov_frac",
    "kl_cov.ppo_kl_coef",
)
_READS = {
    "gspo": ("eps_clip",),
    "sapo": ("sapo",),
    "cispo": ("cispo",),
    "clip_cov": ("eps_clip", "clip_cov"),
    "kl_cov": ("kl_cov",),
    "regular": ("eps_clip",),
    "dual_clip": ("eps_clip", "clip_ratio_c"),
}


def _loss(source: Source) -> Iterable[Found]:
    keys = source.given(*(f"{ALGORITHM}.{name}" for name in _LOSS_KEYS))
    name = source.get(f"{ALGORITHM}.policy_loss_type")
    if name is None:
        return
    kind = text(f"{ALGORITHM}.policy_loss_type", name)
    reads = _READS.get(kind, ("eps_clip",))
    names = tuple(f"{ALGORITHM}.{name}" for name in _LOSS_KEYS if name.startswith(reads))
    if unset := [name for name in names if source.get(name) is None]:
        why = f"{', '.join(unset)} is null or not known, and the loss {kind!r} reads it"
        yield Left(keys, f"{why}; set offpolicy.objective.policy_loss", to_set=shared.LOSS_TO_SET)
        return
    if kind == "rollout_is" and source.get(f"{CORRECTION}.tis_ratio_type") is None:
        yield from _rollout_is(source, keys)
        return
    if kind not in _READS:
        yield shared.no_loss(keys, kind)
        return
    read = tuple(f"{ALGORITHM}.{start}" for start in (*_READS[kind], "policy_loss_type"))
    used = tuple(key for key in keys if key.startswith(read))
    yield from ([Left(unused, f"the loss {kind!r} does not read it")] if (unused := _without(keys, used)) else [])
    if kind in _LOSSES:
        yield Carried(used, {"offpolicy.objective.policy_loss": _LOSSES[kind](source)}, _OTHERWISE.get(kind, ""))
    elif used:
        fields: dict[str, Any] = {"epsilon": _get(source, "eps_clip_low")}
        if (high := _get(source, "eps_clip_high")) != fields["epsilon"]:
            fields["epsilon_high"] = high
        if kind == "dual_clip":
            fields["delta"] = _get(source, "clip_ratio_c")
        yield Carried(used, fields, "TRL's delta is the dual clip" if kind == "dual_clip" else "")


def _rollout_is(source: Source, keys: tuple[str, ...]) -> Iterable[Found]:
    """A detached weight pi / mu of log pi, 0 outside the clip's bounds (GLM-5's loss)."""
    bounds = _bounds(source)
    low, high = 1 - bounds["low"], 1 + bounds["high"]
    weight = {"type": "band", "low": low if low > 0 else None, "high": high, "ratio": "current/sampling"}
    fields = {
        "offpolicy.objective.policy_loss": {"type": "gpg"},
        "offpolicy.objective.mode": "bypass",
        "offpolicy.correction.weight": weight,
    }
    used = tuple(key for key in keys if key.startswith((f"{ALGORITHM}.eps_clip", f"{ALGORITHM}.policy_loss_type")))
    yield from ([Left(unused, "the loss 'rollout_is' does not read it")] if (unused := _without(keys, used)) else [])
    yield Carried(used, fields, "pi / mu in these bounds weighs log pi, and 0 outside")


def _without(keys: tuple[str, ...], used: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in used)


def _reduction(source: Source) -> Iterable[Found]:
    key, length = f"{ALGORITHM}.loss_reduction", f"{ALGORITHM}.max_seq_len"
    given = source.get(key)
    if given is None:
        yield from shared.left(source, {length: "loss_reduction=seq_mean_token_sum_norm alone reads it"})
        return
    names = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "token_mean_legacy")
    check_choice(key, given, names)
    if given == "seq_mean_token_sum_norm":
        fields = {"offpolicy.objective.aggregation": given}
        if source.get(length) is not None:
            fields["offpolicy.objective.max_length"] = whole(length, source.get(length))
        yield Carried(source.given(key, length), fields)
        return
    yield from shared.left(source, {length: "loss_reduction=seq_mean_token_sum_norm alone reads it"})
    if given == "prompt_mean":
        why = "a mean over the tokens of a prompt's responses has no counterpart here"
        yield Left((key,), why, to_set=shared.to_set("offpolicy.objective.aggregation"))
    elif given == "sequence_mean":
        yield Carried((key,), {"offpolicy.objective.aggregation": "seq_mean_token_mean"})
    else:
        why = "token_mean is the default" if given == "token_mean" else "here over the whole step, not a micro-batch"
        yield Carried((key,), {}, why)


def _kl(source: Source) -> Iterable[Found]:
    names = [f"{ALGORITHM}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_estimator_type")]
    on, coef, kind = (source.get(name) for name in names)
    keys = source.given(*names)
    older = (f"{ALGORITHM}.use_kl_estimator_k3", f"{ALGORITHM}.use_abs_kl")
    if source.has(*older):  # k3 unless it is switched off; then the distance, or k1
        k3, distance = switch(older[0], source.get(older[0], True)), switch(older[1], source.get(older[1], False))
        kind, keys = ("k3" if k3 else "abs" if distance else "k1"), (*keys, *source.given(*older))
    in_reward = f"{ALGORITHM}.use_kl_in_reward"
    if switch(in_reward, source.get(in_reward, False) or False):
        yield from _kl_in_reward(source, (in_reward, *keys), number(names[1], coef), kind)
        return
    yield from shared.left(source, {in_reward: "off"})
    if on is None:
        return
    if not switch(names[0], on):
        yield Carried(keys, {"beta": 0.0}, "no KL term") if keys else Left((), "no KL term")
        return
    one_of("k1", "k2", "k3", "abs")(names[2], kind)
    cap = 10.0 if kind == "k3" else None
    found = shared.kl_term(keys, number(names[1], coef), kind, max_value=cap)
    if not keys and isinstance(found, Carried):
        found = Carried((), found.fields, f"the default of {names[0]}")
    yield found


def _kl_in_reward(source: Source, keys: tuple[str, ...], coef: float, kind: str) -> Iterable[Found]:
    control = f"{ALGORITHM}.kl_ctrl.type"
    if source.get(control, "fixed") == "fixed":
        one_of("k1", "k2", "k3", "abs")(f"{ALGORITHM}.kl_estimator_type", kind)
        cap = 10.0 if kind == "k3" else None
        yield shared.reward_kl((*keys, *source.given(control)), coef, kind, "in the reward, as there", max_value=cap)
    else:
        yield Left((*keys, control), "a coefficient moves only in the loss here: offpolicy.objective.kl")


def _entropy(source: Source) -> Iterable[Found]:
    on, coef = f"{ALGORITHM}.use_entropy_loss", f"{ALGORITHM}.entropy_loss_coef"
    if not source.has(on, coef):
        return
    if switch(on, source.get(on, False)):
        yield Carried(source.given(on, coef), {"entropy_coef": number(coef, source.get(coef, 0.01))})
    else:
        yield Carried(source.given(on, coef), {}, "off")


def _advantages(source: Source) -> Iterable[Found]:
    names = [f"{ALGORITHM}.{name}" for name in ("advantage_estimator", "grpo_norm_by_std")]
    kind, by_std = (source.get(name) for name in names)
    whitened = f"{ALGORITHM}.advantage_batch_normalize"
    if source.has(whitened) and switch(whitened, source.settings.values[whitened]):
        how = "with advantage_batch_normalize (its mean is over padding as well)"
        yield shared.no_estimator(source.given(*names, whitened), how)
        return
    yield from shared.left(source, {whitened: "off"})
    if kind is None:
        return
    if kind == "grpo":
        estimator: Any = {"type": "grpo", "epsilon": 1e-6}
        estimator |= {} if switch(names[1], by_std) else {"scale": "none"}
        yield Carried(source.given(*names), {"offpolicy.advantages": estimator}, "SkyRL adds 1e-6 to the deviation")
        return
    yield from shared.left(source, {names[1]: "grpo alone reads it"})
    if kind == "rloo":
        yield Carried(source.given(names[0]), {"offpolicy.advantages": "rloo"})
    elif kind == "reinforce++":
        discount = f"{ALGORITHM}.gamma"
        if source.unknown(discount):
            yield shared.no_estimator(source.given(names[0]), f"{kind!r} with an unknown {discount}")
            return
        returns = {"type": "reinforce_plus_plus", "discount": number(discount, source.get(discount, 1.0))}
        why = "before a gap (tool output) SkyRL's return is 0, this kit's goes on"
        yield Carried(source.given(names[0], discount), {"offpolicy.advantages": returns}, why)
    else:
        yield shared.no_estimator(source.given(names[0]), repr(kind))


def _batch(source: Source) -> Iterable[Found]:
    names = (
        "trainer.train_batch_size",
        "generator.n_samples_per_prompt",
        "trainer.policy_mini_batch_size",
        "trainer.placement.policy_num_nodes",
        "trainer.placement.policy_num_gpus_per_node",
        "trainer.micro_train_batch_size_per_gpu",
    )
    prompts, generations, mini, nodes, devices, micro = (shared.given_or(source, name) for name in names)
    if not source.has(*names[:3]):
        yield from shared.responses_of_a_prompt(source, names[1])
        return
    if None in (prompts, generations, mini, nodes, devices):
        yield from shared.sizes_unknown(source, names, names[1], shared.SIZES)
        return
    yield from shared.batch(
        shared.Batch(
            source.given(*names),
            prompts,
            generations,
            min(mini, prompts) * generations,
            micro,
            nodes * devices,
            "trainer.placement.policy_num_nodes x policy_num_gpus_per_node",
        )
    )


def _counted(source: Source) -> Iterable[Found]:
    per_step = shared.steps_per_generation(_batch(source), source.get("trainer.update_epochs_per_batch", 1))
    yield from shared.saving(source, "trainer.ckpt_interval", per_step)
    yield from shared.last_step(source, "trainer.max_training_steps", per_step)


def _optimizer(source: Source) -> Iterable[Found]:
    yield from shared.scheduler(source, f"{OPTIMIZER}.scheduler", f"{OPTIMIZER}.num_warmup_steps")
    yield from shared.betas(source, f"{OPTIMIZER}.adam_betas")


def _adapter(source: Source) -> Iterable[Found]:
    lora = "trainer.policy.model.lora"
    yield from shared.lora(source, f"{lora}.rank", f"{lora}.alpha", f"{lora}.target_modules", f"{lora}.dropout")


def _engine(source: Source) -> Iterable[Found]:
    backend, together = f"{ENGINE}.backend", "trainer.placement.colocate_all"
    if "generator" in source.settings.sections():
        name = text(backend, source.get(backend) or "vllm")
        yield Carried(source.given(backend), {"use_vllm": True}, "" if name == "vllm" else f"{name} there, vLLM here")
    if source.has(together):
        mode = "colocate" if switch(together, source.settings.values[together]) else "server"
        yield Carried((together,), {"vllm_mode": mode}, "set vllm_server_base_url" if mode == "server" else "")
    for key, (argument, convert) in {
        f"{ENGINE}.enforce_eager": ("enforce_eager", switch),
        f"{ENGINE}.model_dtype": ("dtype", one_of("bfloat16", "float16", "float32")),
        f"{ENGINE}.max_num_seqs": ("max_num_seqs", whole),
    }.items():
        if source.has(key):
            yield Carried((key,), {f"engine.{argument}": convert(key, source.settings.values[key])})


def _older(source: Source) -> Iterable[Found]:
    """``use_tis`` and ``tis_imp_ratio_cap``, which SkyRL itself reads as token TIS."""
    on, cap = f"{ALGORITHM}.use_tis", f"{ALGORITHM}.tis_imp_ratio_cap"
    keys = source.given(on, cap)
    if not keys:
        return
    if not switch(on, source.get(on, False)):
        yield Carried(keys, {}, "off", older=True)
        return
    value = number(cap, source.get(cap, -1.0))
    if value <= 0:
        raise ValueError(f"{cap} must be positive with use_tis=true, but got {value!r}.")
    why = "now off_policy_correction.tis_ratio_type: token with token_tis_ratio_clip_high"
    yield Carried(keys, {"option.tis_ratio_type": "token", "option.token_tis_ratio_clip_high": value}, why, older=True)


FRAMEWORK = Framework(
    name="skyrl",
    entries=("skyrl",),
    marks=(
        f"{ALGORITHM}.*",
        f"{ENGINE}.*",
        "trainer.policy.*",
        "off_policy_correction.*",
        "tis_ratio_type",
        "sequence_mask_metric",
        "generator.n_samples_per_prompt",
        "trainer.placement.*",
    ),
    options={f"{CORRECTION}.{name}": name for name in _CORRECTION},
    rows={
        "trainer.policy.model.path": Row("model_name_or_path", text, default="Qwen/Qwen2.5-1.5B-Instruct"),
        "trainer.gradient_checkpointing": Row("gradient_checkpointing", switch),
        "trainer.seed": Row("seed", whole),
        f"{OPTIMIZER}.lr": Row("learning_rate", number, default=1e-6),
        f"{OPTIMIZER}.weight_decay": Row("weight_decay", number, default=0.01),
        f"{OPTIMIZER}.max_grad_norm": Row("max_grad_norm", number),
        "trainer.update_epochs_per_batch": Row("num_iterations", whole),
        "trainer.epochs": Row("num_train_epochs", number, default=1),
        "trainer.ckpt_path": Row("output_dir", text),
        "trainer.run_name": Row("run_name", text),
        f"{SAMPLING}.max_generate_length": Row("max_completion_length", whole, default=1024),
        f"{SAMPLING}.temperature": Row("temperature", drawn),
        f"{SAMPLING}.top_p": Row("top_p", number),
        f"{SAMPLING}.top_k": Row("top_k", top_k, why="-1 there is 0 here: no top-k"),
        f"{SAMPLING}.min_p": Row("min_p", number),
        f"{SAMPLING}.repetition_penalty": Row("repetition_penalty", number),
        f"{ENGINE}.gpu_memory_utilization": Row("vllm_gpu_memory_utilization", number),
        f"{ENGINE}.tensor_parallel_size": Row("vllm_tensor_parallel_size", whole),
        "generator.apply_overlong_filtering": Row("mask_truncated_completions", switch),
    },
    steps=(_batch, _counted, _optimizer, _adapter, _engine, _loss, _reduction, _kl, _entropy, _advantages, _older),
    defaults=DEFAULTS,
    left={
        "data": shared.DATA,
        "environment": shared.REWARD,
        "trainer.strategy": shared.MODEL,
        "trainer.placement": shared.MODEL,
        "trainer.policy.fsdp_config": shared.MODEL,
        "trainer.policy.megatron_config": shared.MODEL,
        f"{OPTIMIZER}.offload_after_step": shared.MODEL,
        **shared.names(
            "trainer.policy",
            "sequence_parallel_size use_torch_compile record_memory torch_profiler_config "
            "model_config_kwargs language_model_only inference_only_init model.fake_int4_qat model.lora",
            shared.MODEL,
        ),
        "trainer.ref": shared.REFERENCE,
        "trainer.critic*": shared.CRITIC,
        "trainer.fully_async": shared.ASYNC,
        "trainer.mtp": shared.MODEL,
        f"{ALGORITHM}.kl_ctrl": "the KL in the reward alone reads it",
        f"{ALGORITHM}.dynamic_sampling": "dynamic sampling has no counterpart here",
        f"{ALGORITHM}.zero_variance_filter*": "prompts with equal rewards have advantage 0 here, and stay in the count "
        "of tokens; the keep term equal_rewards with denominator: kept and kl_on: kept takes them out",
        f"{ALGORITHM}.overlong_buffer_*": shared.REWARD,
        **shared.names(ALGORITHM, "lambd gamma value_clip value_head_prefix", "GAE and the critic alone read it"),
        **shared.names(ALGORITHM, "kl_cov dppo", "the chosen loss does not read it"),
        f"{ALGORITHM}.temperature": "the temperature of the engine is that of the loss here",
        "trainer.max_prompt_length": "TRL does not cut prompts; set vllm_max_model_length",
        "generator.max_input_length": "TRL does not cut prompts; set vllm_max_model_length",
        "trainer.micro_forward_batch_size_per_gpu": "old log-probs are scored with the micro-batches of the loss here",
        "trainer.max_tokens_per_microbatch": "batches are counted in responses here, not in tokens",
        "trainer.eval_*": shared.EVALUATION,
        "generator.eval_*": shared.EVALUATION,
        **shared.names(
            "trainer",
            "logger project_name tags log_path dump_data_batch dump_eval_results enable_ray_gpu_monitor "
            "print_example_interval num_logger_eval_samples num_logger_train_samples log_example_interval",
            shared.LOGGING,
        ),
        **shared.names(
            "trainer", "resume_mode resume_path max_ckpts_to_keep hf_save_interval export_path", shared.CHECKPOINTS
        ),
        **shared.names(
            "trainer",
            "flash_attn use_sample_packing remove_microbatch_padding disable_fast_tokenizer "
            "sequence_parallel_backend use_expandable_segments gradient_checkpointing_use_reentrant "
            "target_modules recompute_old_logprobs_per_minibatch update_ref_every_epoch "
            "logprobs_chunk_size vocab_entropy_chunk_size vocab_entropy_chunk_memory_mb "
            "fused_lm_head_logprob fused_lm_head_logprob_backend",
            shared.MODEL,
        ),
        **shared.names(
            ENGINE,
            "run_engines_locally num_engines weight_sync_backend delta_weight_sync pipeline_parallel_size "
            "expert_parallel_size data_parallel_size enable_prefix_caching served_model_name "
            "enable_chunked_prefill enable_return_routed_experts max_num_batched_tokens "
            "fully_sharded_loras enable_ray_prometheus_stats offload_kv_for_weight_sync "
            "use_expandable_segments engine_init_kwargs distributed_executor_backend language_model_only "
            "speculative_config external_proxy_url async_engine external_server_urls enable_pd "
            "num_prefill router_init_kwargs",
            shared.ENGINE,
        ),
        **shared.names(
            "generator",
            "batched async_engine enable_http_endpoint http_endpoint_host http_endpoint_port",
            shared.ENGINE,
        ),
        **shared.names(
            "generator",
            "max_turns use_conversation_multi_turn merge_stepwise_output step_wise_trajectories "
            "append_eos_token_after_stop_str_in_multi_turn vision_language_generator",
            shared.TOOLS,
        ),
        **shared.names("generator", "chat_template chat_template_kwargs", "set chat_template, chat_template_kwargs"),
        **shared.names("generator", "zero_reward_on_non_stop use_cache_salt", shared.REWARD),
        **shared.names(SAMPLING, "logprobs stop additional_kwargs", "set generation_kwargs"),
    },
    renamed={
        f"{ALGORITHM}.ppo_loss_type": f"{ALGORITHM}.policy_loss_type",
        **{name: f"{CORRECTION}.{name}" for name in _CORRECTION},
        **{
            f"generator.{old}": f"{ENGINE}.{new}"
            for old, new in {
                "backend": "backend",
                "gpu_memory_utilization": "gpu_memory_utilization",
                "enforce_eager": "enforce_eager",
                "inference_engine_tensor_parallel_size": "tensor_parallel_size",
                "model_dtype": "model_dtype",
                "num_inference_engines": "num_engines",
                "run_engines_locally": "run_engines_locally",
                "weight_sync_backend": "weight_sync_backend",
                "max_num_seqs": "max_num_seqs",
                "max_num_batched_tokens": "max_num_batched_tokens",
                "enable_prefix_caching": "enable_prefix_caching",
            }.items()
        },
    },
    prefixes={"off_policy_correction": CORRECTION},
)
