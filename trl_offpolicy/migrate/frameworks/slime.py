"""slime: the flags of its launch scripts, and ``mis.yaml``.

Read at slime 624b824a8, ``slime/utils/arguments.py`` and ``examples/train_infer_mismatch_helper``. Flags that Megatron
itself has (``--lr``, ``--weight-decay``, ``--micro-batch-size``) are Megatron's.
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
    switch,
    text,
    top_k,
    whole,
)

_MIS = (
    "use_rs",
    "tis_level",
    "rs_level",
    "tis_mode",
    "tis_upper_bound",
    "tis_lower_bound",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "tis_batch_normalize",
)
"""Options of ``mis.yaml``; ``use_tis`` is a flag too."""
_OWN_FUNCTION = ("compute_mis_weights_with_cp", "compute_mis_weights")
DEFAULTS: dict[str, Any] = {
    "n_samples_per_prompt": 1,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "eps_clip": 0.2,
    "lr_decay_style": "linear",
}


_BY_GROUP = ("grpo", "gspo", "cispo")
_BASELINE = "reinforce_plus_plus_baseline"


def _is_script(source: Source) -> bool:
    return bool(source.settings.spelled)


def _correction(source: Source) -> Iterable[Found]:
    """``--use-tis``: slime's own clamp, or the function that ``--custom-tis-function-path`` names."""
    function = source.get("custom_tis_function_path")
    if source.has(*_MIS):  # mis.yaml holds the bounds; --tis-clip is not read by it
        yield from shared.left(
            source, dict.fromkeys(("tis_clip", "tis_clip_low"), "mis.yaml's bounds are read instead")
        )
        if function is not None:
            yield Carried(source.given("custom_tis_function_path"), {}, "its options are those of the correction")
        return
    keys = source.given("use_tis", "tis_clip", "tis_clip_low")
    on = switch("--use-tis", source.get("use_tis", False))
    if not on:
        yield Carried(keys, {"option.use_tis": False})
        yield from shared.left(source, {"custom_tis_function_path": "--use-tis alone reads it"})
        return
    high, low = (
        number("--tis-clip", source.get("tis_clip", 2.0)),
        number("--tis-clip-low", source.get("tis_clip_low", 0)),
    )
    if function is None:
        fields: dict[str, Any] = {"option.use_tis": True, "option.tis_upper_bound": high}
        fields |= {"option.tis_mode": "clip", "option.tis_lower_bound": low} if low > 0 else {}
        yield Carried(keys, fields)
    elif function.endswith(".icepop_function"):
        band = {"type": "band", "low": low if low > 0 else None, "high": high}
        keys = (*keys, "custom_tis_function_path")
        yield Carried(keys, {"option.use_tis": False, "offpolicy.correction.weight": band}, "IcePop: weight 0 outside")
    else:
        own = f"{function} is a function of your own; write its terms in offpolicy.correction"
        missing = "its options are in the file of --custom-config-path, which was not read: nothing is corrected here"
        yield Carried(keys, {"option.use_tis": False}, "see --custom-tis-function-path")
        yield Left(("custom_tis_function_path",), missing if function.endswith(_OWN_FUNCTION) else own)


def _asynchronous(source: Source) -> Iterable[Found]:
    """``train_async.py`` samples one generation ahead; a rollout function of the user's may sample further."""
    if source.settings.entry.endswith("train_async.py"):
        yield Left((), shared.ASYNC, pattern="train_async.py", default=False)
    function = "rollout_function_path"
    if "fully_async" in str(source.settings.values.get(function, "")):
        yield Left((function,), shared.ASYNC)


def _opsm(source: Source) -> Iterable[Found]:
    if source.has("use_opsm", "opsm_delta"):
        yield Left(
            source.given("use_opsm", "opsm_delta"),
            "slime compares with pi_old, off_policy_mask_threshold with the engine; set offpolicy.correction.keep: "
            "[{type: off_policy_sequence_mask, ratio: current/old, max_divergence: ...}]",
        )


def _reduction(source: Source) -> Iterable[Found]:
    key = "calculate_per_token_loss"
    if source.has(key) and switch("--calculate-per-token-loss", source.settings.values[key]):
        yield Carried((key,), {"offpolicy.objective.aggregation": "token_mean"})


def _kl(source: Source) -> Iterable[Found]:
    names = ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "use_unbiased_kl")
    keys = source.given(*names)
    if not keys:
        return
    if not switch("--use-kl-loss", source.get(names[0], False)):
        yield Carried(keys, {"beta": 0.0}, "no KL term without --use-kl-loss")
        return
    kind = one_of("k1", "k2", "k3", "low_var_kl")("--kl-loss-type", source.get(names[2], "k1"))
    weighted = switch("--use-unbiased-kl", source.get(names[3], False))
    coef = number("--kl-loss-coef", source.get(names[1], 0.0))
    cap = 10.0 if kind == "low_var_kl" else None
    yield shared.kl_term(
        keys, coef, "k3" if kind == "low_var_kl" else kind, max_value=cap, ratio_weighted=weighted and coef > 0
    )


def _clip(source: Source) -> Iterable[Found]:
    if source.get("advantage_estimator") == "cispo":
        keys = ("eps_clip", "eps_clip_high")
        yield Carried(source.given(*keys), {}, "the bounds of CISPO, in offpolicy.objective.policy_loss")
        yield from shared.left(source, {"eps_clip_c": "CISPO does not read it"})
        return
    yield from shared.clip(source, "eps_clip", "eps_clip_high", "eps_clip_c")


def _own_loss(source: Source) -> Iterable[Found]:
    """``--loss-type custom_loss``, and the engine's log-probs in place of pi_old."""
    key, bypass = "loss_type", "use_rollout_logprobs"
    if source.has(key) and (kind := text("--loss-type", source.settings.values[key])) != "policy_loss":
        yield shared.no_loss(source.given(key, "custom_loss_function_path"), kind)
    if source.has(bypass) and switch("--use-rollout-logprobs", source.settings.values[bypass]):
        yield Carried((bypass,), {"offpolicy.objective.mode": "bypass"}, "the loss's ratio is pi / mu")


def _cispo(source: Source) -> dict[str, Any]:
    """The estimator's name is that of the loss too; its bounds are distances from 1, and below 0 there is none."""
    below = number("--eps-clip", source.get("eps_clip", 0.2))
    high = source.get("eps_clip_high")
    above = below if high is None else number("--eps-clip-high", high)
    low = {"low": 1 - below} if below < 1 else {}
    return {"offpolicy.objective.policy_loss": {"type": "cispo", "high": 1 + above, **low}}


def _advantages(source: Source) -> Iterable[Found]:
    key = "advantage_estimator"
    own = ("custom_advantage_function_path", "custom_reward_post_process_path")
    switches = ("disable_grpo_std_normalization", "disable_rewards_normalization", "normalize_advantages")
    if source.has(*own):
        yield shared.no_estimator(source.given(key, *switches, *own), "of a function of your own")
        return
    if source.unknown(key) or not source.has(key, *switches):
        return
    kind = text("--advantage-estimator", source.get(key, "grpo"))
    # the first two are on unless they are disabled, the third is off unless it is asked for
    by_std, by_group, whitened = (
        switch(f"--{name.replace('_', '-')}", source.get(name, False)) is not name.startswith("disable")
        for name in switches
    )
    keys = source.given(key, *switches)
    if kind == "cispo" and (bounds := source.unknown("eps_clip", "eps_clip_high")):
        why = f"--{bounds[0].replace('_', '-')} is not known: set offpolicy.objective.policy_loss"
        yield Left(source.given(key), why, to_set=shared.LOSS_TO_SET)
        return
    losses: dict[str, dict[str, Any]] = {"gspo": {"importance_sampling_level": "sequence"}}
    losses |= {"cispo": _cispo(source)} if kind == "cispo" else {}
    if kind not in (*_BY_GROUP, _BASELINE):
        yield shared.no_estimator(keys, repr(kind))
        return
    if not by_group:
        yield Carried(source.given(key), losses.get(kind, {}), "the loss alone, see --disable-rewards-normalization")
        yield shared.no_estimator(source.given(*switches), "of the raw reward, without a baseline,")
        return
    by_std = by_std and kind in _BY_GROUP
    fields = {"offpolicy.advantages": _estimator(by_std, whitened), **losses.get(kind, {})}
    yield Carried(keys, fields, "slime adds 1e-6 to the deviation" if by_std else "r - mean of the group")
    if kind == _BASELINE and source.has("kl_coef") and number("--kl-coef", source.get("kl_coef")) != 0:
        why = "its KL is taken from the advantages; set offpolicy.objective.kl with place: reward"
        yield Left(source.given("kl_coef"), why)


def _estimator(by_std: bool, whitened: bool) -> Any:
    """The reward less the group's mean, over its deviation or not, and then ``whitened`` over the batch's tokens."""
    if whitened:
        whole: dict[str, Any] = {"type": "reinforce_plus_plus_baseline"}
        return {**whole, "scale": "group", "epsilon": 1e-6} if by_std else whole["type"]
    return {"type": "grpo", "epsilon": 1e-6} if by_std else "dr_grpo"


def _step(source: Source) -> int | None:
    """Responses of an optimizer step."""
    step = shared.given_or(source, "global_batch_size")
    if step is not None:
        return int(step)
    prompts, samples = source.get("rollout_batch_size"), source.get("n_samples_per_prompt")
    steps = shared.given_or(source, "num_steps_per_rollout", 1)
    if None in (prompts, samples, steps):
        return None
    return int(prompts * samples // steps)


def _batch(source: Source) -> Iterable[Found]:
    names = (
        "rollout_batch_size",
        "n_samples_per_prompt",
        "global_batch_size",
        "num_steps_per_rollout",
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "micro_batch_size",
    )
    if not source.has("rollout_batch_size", "n_samples_per_prompt"):
        return
    prompts, generations, nodes, devices = (shared.given_or(source, names[place]) for place in (0, 1, 4, 5))
    step = _step(source)
    dynamic = switch("--use-dynamic-batch-size", source.get("use_dynamic_batch_size", False))
    if step is None or None in (prompts, generations, nodes, devices):
        yield from shared.sizes_unknown(source, names, names[1], shared.SIZES)
        return
    yield from shared.batch(
        shared.Batch(
            source.given(*names),
            prompts,
            generations,
            step,
            None if dynamic else shared.given_or(source, "micro_batch_size"),
            nodes * devices,
            "--actor-num-nodes x --actor-num-gpus-per-node",
        )
    )


def _counted(source: Source) -> Iterable[Found]:
    per_step = shared.steps_per_generation(_batch(source))
    yield from shared.saving(source, "save_interval", per_step)
    yield from shared.last_step(source, "num_rollout", per_step)


def _optimizer(source: Source) -> Iterable[Found]:
    if _is_script(source):
        yield from shared.no_length(source, "rollout_max_response_len")
        if not source.has("weight_decay") and "weight_decay" not in source.settings.unknown:
            yield Carried((), {"weight_decay": 0.01}, "the default of --weight-decay, Megatron's")
        yield from shared.scheduler(source, "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction")


def _engine(source: Source) -> Iterable[Found]:
    if not _is_script(source):
        return
    together = switch("--colocate", source.get("colocate", False))
    mode = {"vllm_mode": "colocate" if together else "server"}
    why = "SGLang there, vLLM here" + ("" if together else "; set vllm_server_base_url")
    yield Carried(source.given("colocate"), {"use_vllm": True, **mode}, why)


FRAMEWORK = Framework(
    name="slime",
    entries=("slime",),
    marks=(
        "rollout_num_gpus_per_engine",
        "sglang_mem_fraction_static",
        "tis_upper_bound",
        "tis_level",
        "rs_level",
        "use_rs",
        "rollout_max_response_len",
        "custom_tis_function_path",
        "num_rollout",
    ),
    options={"use_tis": "use_tis", **{name: name for name in _MIS}},
    rows={
        "hf_checkpoint": Row("model_name_or_path", text),
        "save": Row("output_dir", text),
        "seed": Row("seed", whole),
        "lr": Row("learning_rate", number),
        "weight_decay": Row("weight_decay", number),
        "adam_beta1": Row("adam_beta1", number),
        "adam_beta2": Row("adam_beta2", number),
        "adam_eps": Row("adam_epsilon", number),
        "clip_grad": Row("max_grad_norm", number),
        "num_epoch": Row("num_train_epochs", number),
        "rollout_max_response_len": Row("max_completion_length", whole),
        "rollout_max_context_len": Row("vllm_max_model_length", whole),
        "rollout_temperature": Row("temperature", drawn),
        "rollout_top_p": Row("top_p", number),
        "rollout_top_k": Row("top_k", top_k, why="-1 there is 0 here: no top-k"),
        "entropy_coef": Row("entropy_coef", number),
        "rollout_shuffle": Row("shuffle_dataset", switch),
        "sglang_mem_fraction_static": Row("vllm_gpu_memory_utilization", number, why="SGLang there, vLLM here"),
        "rollout_num_gpus_per_engine": Row("vllm_tensor_parallel_size", whole),
    },
    steps=(
        _asynchronous,
        _correction,
        _opsm,
        _reduction,
        _kl,
        _clip,
        _own_loss,
        _advantages,
        _batch,
        _counted,
        _optimizer,
        _engine,
    ),
    defaults=DEFAULTS,
    left={
        "custom_config_path": "the file was not read, see below",
        **shared.names(
            "",
            "prompt_data input_key label_key apply_chat_template apply_chat_template_kwargs metadata_key "
            "tool_key multimodal_keys start_rollout_id data_source_path rollout_global_dataset",
            shared.DATA,
        ),
        **shared.names(
            "",
            "rm_type rm_url reward_key eval_reward_key group_rm custom_rm_path",
            shared.REWARD,
        ),
        **shared.names(
            "",
            "over_sampling_batch_size dynamic_sampling_filter_path buffer_filter_path partial_rollout "
            "mask_offpolicy_in_partial_rollout rollout_sample_filter_path",
            "dynamic sampling has no counterpart here",
        ),
        "*eval*": shared.EVALUATION,
        **shared.names(
            "", "use_wandb wandb_* use_tensorboard tb_* log_* dump_details save_debug_* load_debug_*", shared.LOGGING
        ),
        **shared.names("", "load save_hf no_save_optim no_load_optim no_load_rng finetune ckpt_*", shared.CHECKPOINTS),
        **shared.names(
            "",
            "ref_load ref_ckpt_step ref_update_interval",
            shared.REFERENCE,
        ),
        **shared.names(
            "",
            "kl_coef gamma lambd value_clip",
            "GAE, REINFORCE++ and the KL in the reward alone read it",
        ),
        **shared.names("", "use_opd opd_* critic_* num_critic_only_steps", shared.OTHER_MODELS),
        **shared.names("", "use_routing_replay use_rollout_routing_replay", "set routing_replay: r2 or r3"),
        "use_rollout_logprobs": "off",
        "get_mismatch_metrics": "the mismatch is always measured here",
        "use_rollout_entropy": shared.LOGGING,
        "use_dynamic_batch_size": "batches are counted in responses here, not in tokens",
        "*max_tokens_per_gpu": "batches are counted in responses here, not in tokens",
        "balance_data": "trim_padding: ranks deals rows to the ranks by length",
        "loss_type": "policy_loss is what is trained here",
        "custom_loss_function_path": "set offpolicy.objective.policy_loss: {type: 'module:Class'}",
        "custom_pg_loss_reducer_function_path": "set offpolicy.objective.aggregation",
        **shared.names(
            "", "custom_generate_function_path rollout_function_path custom_*_path multi_turn*", shared.TOOLS
        ),
        **shared.names(
            "",
            "rollout_max_prompt_len rollout_stop rollout_stop_token_ids rollout_skip_special_tokens "
            "rollout_seed sglang_* rollout_num_gpus use_fault_tolerance rollout_health_check_* "
            "update_weight*",
            shared.ENGINE,
        ),
        **shared.names(
            "",
            "optimizer min_lr lr_decay_iters lr_decay_samples lr_warmup_* optimizer_* overlap_* "
            "use_precision_aware_optimizer use_distributed_optimizer",
            "set the optimizer here: optim, lr_scheduler_type, lr_scheduler_kwargs",
        ),
        **shared.names(
            "",
            "*_model_parallel_size *_parallel_size sequence_parallel recompute_* attention_* "
            "hidden_dropout accumulate_allreduce_grads_in_fp32 moe_* num_layers* num_attention_heads "
            "num_query_groups ffn_hidden_size hidden_size swiglu rotary_* normalization norm_epsilon "
            "vocab_size group_query_attention kv_channels qk_layernorm untie_embeddings* "
            "disable_bias_linear add_* use_rotary_position_embeddings bf16 fp16 fp8_* spec "
            "transformer_impl megatron_* train_backend offload* num_gpus_per_node train_env_vars "
            "train_memory* qkv_format deterministic_mode seq_length max_position_embeddings "
            "make_vocab_size_divisible_by data_pad_*",
            shared.MODEL,
        ),
    },
)
