"""AReaL: YAML with OmegaConf's interpolations, and overrides ``a.b=c``.

Read at AReaL 4aef98d8d, ``areal/api/cli_args.py`` and ``examples/math``; older names at bc9f00988^.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
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
    optional,
    switch,
    text,
    whole,
)

REJECTION = "actor.rejection_sampling"
_REJECTION = ("level", "action", "metric", "agg", "upper", "lower")
OPTIMIZER = "actor.optimizer"
_OLD_MODES = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled")
DEFAULTS: dict[str, Any] = {
    "gconfig.n_samples": 1,
    "actor.ppo_n_minibatches": 4,
    "actor.use_decoupled_loss": False,
    "actor.eps_clip": 0.2,
    "actor.kl_ctl": 0.1,
    "actor.kl_estimator": "k1",
    "actor.lora_rank": 32,
    "actor.lora_alpha": 16,
    f"{OPTIMIZER}.lr_scheduler_type": "constant",
    f"{OPTIMIZER}.warmup_steps_proportion": 0.001,
}


def _correction(source: Source) -> Iterable[Found]:
    """AReaL's decoupled loss is off unless it is switched on; null is no rejection."""
    key = "actor.use_decoupled_loss"
    if source.settings.values.get(REJECTION, "") is None:
        yield Carried((REJECTION,), {}, "null: no weight, no rejection")
    if key not in source.settings.values and "actor" in source.settings.sections():
        yield Carried((), {"option.use_decoupled_loss": False})
    budget = "actor.m2_threshold"
    if source.has(budget) and source.settings.values[budget] is not None:
        term = {"type": "second_moment_budget", "budget": number(budget, source.settings.values[budget])}
        if source.settings.values.get(key) is True:
            why = "M2PO's mask: the log-ratio of pi_old to mu; AReaL averages over what is left, in each micro-batch"
            yield Carried((budget,), {"offpolicy.correction.keep": [term]}, why)
        else:  # both log-probs are then the same there
            yield Left((budget,), f"without {key} it drops nothing")
    yield from shared.left(source, {budget: "null: no M2PO"} if source.get(budget) is None else {})
    yield from _older(source)


def _older(source: Source) -> Iterable[Found]:
    """``behave_imp_weight_mode`` and ``_cap`` (to bc9f00988): the cap is 5 and the mode token_mask if left out."""
    cap_key, mode_key = "actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode"
    keys = source.given(cap_key, mode_key)
    if not keys:
        return
    mode, cap = source.get(mode_key, "token_mask"), source.settings.values.get(cap_key, 5.0)
    check_choice(mode_key, mode, _OLD_MODES)
    if mode == "disabled" or cap is None:
        yield Carried(keys, {}, "off: rejection_sampling: null now", older=True)
        return
    level, _, action = mode.partition("_")
    fields = {
        "option.level": level,
        "option.action": "clamp" if action == "truncate" else "mask",
        "option.metric": "ratio",
        "option.upper": number(cap_key, cap),
    }
    yield Carried(keys, fields, "now actor.rejection_sampling", older=True)


def _loss(source: Source) -> Iterable[Found]:
    sapo, tau = "actor.use_sapo_loss", ("actor.sapo_tau_pos", "actor.sapo_tau_neg")
    clip = ("actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip")
    if source.has(sapo) and switch(sapo, source.settings.values[sapo]):
        loss = {
            "type": "sapo",
            "temperature_pos": number(tau[0], source.get(tau[0], 1.0)),
            "temperature_neg": number(tau[1], source.get(tau[1], 1.05)),
        }
        yield Carried(source.given(sapo, *tau), {"offpolicy.objective.policy_loss": loss})
        yield from shared.left(source, dict.fromkeys(clip, "SAPO does not read it"))
        return
    yield from shared.left(source, dict.fromkeys((sapo, *tau), "off"))
    yield from shared.clip(source, *clip)


_IN_REWARD = (
    "in the reward, as there; AReaL takes it after reward_norm and from the engine's log-probs, this kit before the "
    "group's normalisation and from pi_old's"
)


def _kl(source: Source) -> Iterable[Found]:
    """AReaL's KL is in the reward. Its default coefficient acts on a KL only where the file names a reference model."""
    names = ("actor.kl_ctl", "actor.kl_estimator")
    keys, coef = source.given(*names), source.get(names[0])
    if coef is None or not (keys or "ref" in source.settings.sections()):
        return
    if number(names[0], coef) == 0:
        yield Carried(keys, {"beta": 0.0}, "no KL term")
        return
    kind = one_of("k1", "k2", "k3")(names[1], source.get(names[1], "k1"))
    why = _IN_REWARD if keys else f"the default of {names[0]}; {_IN_REWARD}"
    yield shared.reward_kl(keys, coef, kind, why)


def _advantages(source: Source) -> Iterable[Found]:
    """Group means of ``reward_norm`` and batch deviations of ``adv_norm``, where there is an estimator of that form."""
    older = "actor.group_reward_norm"
    keys = tuple(
        key for key in source.settings.values if key.startswith(("actor.reward_norm", "actor.adv_norm", older))
    )
    if not keys:
        return

    def levels(section: str) -> tuple[Any, Any]:
        if section == "reward_norm" and source.get(older) is True:
            return ("group", "group")
        switched = source.get(f"actor.{section}", True if source.has(older) and section == "adv_norm" else None)
        if isinstance(switched, bool):  # older files switch it on or off
            return ("batch", "batch") if switched else (None, None)
        given = any(key.startswith(f"actor.{section}.") for key in keys)
        names = (f"actor.{section}.mean_level", f"actor.{section}.std_level")
        return (source.get(names[0], "batch"), source.get(names[1], "batch")) if given else (None, None)

    reward, advantage = levels("reward_norm"), levels("adv_norm")
    leave_one_out = bool(source.get("actor.reward_norm.mean_leave1out", False))
    epsilon = source.get("actor.reward_norm.eps", 1e-9 if source.has(older) else 1e-5)
    discounts = ("actor.discount", "actor.gae_lambda")
    factors = [1.0 if source.get(key) is None else number(key, source.get(key)) for key in discounts]
    discount = factors[0] * factors[1]  # without values, GAE is the return discounted by both
    estimators: dict[tuple[Any, Any, bool], Any] = {
        (("group", "group"), (None, None), False): {"type": "grpo", "epsilon": epsilon},
        (("group", None), (None, None), False): "dr_grpo",
        (("group", None), (None, None), True): "rloo",
        (("group", "group"), ("batch", "batch"), False): {
            "type": "reinforce_plus_plus_baseline",
            "scale": "group",
            "epsilon": epsilon,
        },
        ((None, None), ("batch", "batch"), False): {"type": "reinforce_plus_plus", "discount": discount},
        (("group", None), ("batch", "batch"), False): "reinforce_plus_plus_baseline",
        (("group", "batch"), ("batch", "batch"), False): "reinforce_plus_plus_baseline",  # whitened either way
    }
    by_return = reward == (None, None)
    found = estimators.get((reward, advantage, leave_one_out))
    if unknown := source.unknown(*discounts):
        yield shared.no_estimator((), f"with an unknown {unknown[0]}", pattern="actor.adv_norm", default=False)
        return
    if _of_all(source, reward):
        how = "with actor.reward_norm.std_unbiased=false (the deviation of n, here of n - 1)"
        yield shared.no_estimator(keys, how)
        return
    if source.get("actor.adv_norm.mean_leave1out", False):
        yield shared.no_estimator(keys, "with actor.adv_norm.mean_leave1out")
        return
    if discount != 1 and not by_return:
        yield shared.no_estimator((*keys, *source.given(*discounts)), f"of returns discounted by {discount:g}")
        return
    if found is None:
        yield shared.no_estimator(keys, f"reward_norm {reward} then adv_norm {advantage} (mean, deviation)")
    else:
        keys += source.given(*discounts) if by_return else ()
        yield Carried(keys, {"offpolicy.advantages": found})


def _of_all(source: Source, reward: tuple[Any, Any]) -> bool:
    """True if rewards are divided by a group's deviation that is over n."""
    return reward[1] == "group" and source.get("actor.reward_norm.std_unbiased", True) is False


def _devices(source: Source) -> tuple[str, int | None]:
    """(the setting, devices that train) of ``actor.backend: fsdp:d4p1t1``, or the part behind + of allocation_mode."""
    for key in ("actor.backend", "allocation_mode"):
        given = source.get(key)
        if isinstance(given, str):
            sizes = re.findall(r"[dptc](\d+)", given.rpartition("+")[2].rpartition(":")[2])
            return key, prod(map(int, sizes)) if sizes else None
    return "actor.backend", None


def _batch(source: Source) -> Iterable[Found]:
    names = ("train_dataset.batch_size", "gconfig.n_samples", "actor.ppo_n_minibatches")
    if not source.has(*names):
        yield from shared.responses_of_a_prompt(source, names[1])
        return
    prompts, generations, parts = (shared.given_or(source, name) for name in names)
    where, devices = _devices(source)
    keys = source.given(*names, where)
    if None in (prompts, generations, parts, devices):
        yield from shared.sizes_unknown(source, (*names, where), names[1], shared.SIZES)
        return
    if prompts * generations % parts:
        why = f"{prompts} x {generations} responses do not divide into {parts} parts"
        yield Left(keys, why, to_set=shared.SIZE_FIELDS)
        return
    yield from shared.batch(
        shared.Batch(keys, prompts, generations, prompts * generations // parts, None, devices or 1, where)
    )


def _saving(source: Source, per_step: shared.Steps) -> Iterable[Found]:
    """AReaL saves where one of three frequencies says so; TRL has one strategy."""
    steps, epochs = "saver.freq_steps", "saver.freq_epochs"
    if source.settings.values.get(steps) is not None:
        yield from shared.saving(source, steps, per_step)
        yield from shared.left(source, {epochs: f"{steps} decides here"})
    elif source.settings.values.get(epochs) is not None:
        every = whole(epochs, source.settings.values[epochs])
        why = "" if every == 1 else f"every {every} epochs there, every epoch here"
        yield Carried(source.given(epochs, steps), {"save_strategy": "epoch"}, why)
    else:
        yield from shared.saving(source, steps, per_step)


def _counted(source: Source) -> Iterable[Found]:
    per_step = shared.steps_per_generation(_batch(source))
    yield from _saving(source, per_step)
    yield from shared.last_step(source, "total_train_steps", per_step)


def _optimizer(source: Source) -> Iterable[Found]:
    yield from shared.scheduler(source, f"{OPTIMIZER}.lr_scheduler_type", None, f"{OPTIMIZER}.warmup_steps_proportion")


def _adapter(source: Source) -> Iterable[Found]:
    yield from shared.lora(source, "actor.lora_rank", "actor.lora_alpha", "actor.target_modules", on="actor.use_lora")


def _engine(source: Source) -> Iterable[Found]:
    """AReaL's engine has its own devices; its section is that of the backend that the rollout names."""
    key = "rollout.backend" if source.has("rollout.backend") else "allocation_mode"
    if not source.has(key) and "gconfig" not in source.settings.sections():
        return
    backend = text(key, source.get(key) or "vllm").partition(":")[0]
    why = "vLLM here too" if backend == "vllm" else f"{backend} there, vLLM here"
    keys = source.given("rollout.backend")
    yield Carried(
        keys, {"use_vllm": True, "vllm_mode": "server"}, f"{why}, on devices of its own: vllm_server_base_url"
    )
    sections = {
        "vllm": {"gpu_memory_utilization": "vllm_gpu_memory_utilization", "max_model_len": "vllm_max_model_length"},
        "sglang": {"mem_fraction_static": "vllm_gpu_memory_utilization", "context_length": "vllm_max_model_length"},
    }
    for name, field in sections.get(backend, {}).items():
        setting = f"{backend}.{name}"
        if source.has(setting) and source.settings.values[setting] is not None:
            yield Carried((setting,), {field: number(setting, source.settings.values[setting])})
    for other in ("vllm", "sglang"):
        rest = [one for one in source.settings.values if one.startswith(f"{other}.")]
        why = shared.ENGINE if other == backend else f"the rollout's engine is {backend}"
        fields = sections.get(backend, {})
        unread = tuple(one for one in rest if other != backend or one.partition(".")[2] not in fields)
        if unread:
            yield Left(unread, why, f"{other}.*")


FRAMEWORK = Framework(
    name="areal",
    entries=("areal",),
    marks=(
        "gconfig.*",
        "actor.use_decoupled_loss",
        f"{REJECTION}*",
        "actor.behave_imp_weight_*",
        "actor.ppo_n_minibatches",
        "rollout.max_head_offpolicyness",
        "actor.recompute_logprob",
    ),
    options={f"{REJECTION}.{name}": name for name in _REJECTION} | {"actor.use_decoupled_loss": "use_decoupled_loss"},
    rows={
        "actor.path": Row("model_name_or_path", text),
        "actor.gradient_checkpointing": Row("gradient_checkpointing", switch),
        "actor.disable_dropout": Row("disable_dropout", switch),
        "actor.importance_sampling_level": Row("importance_sampling_level", one_of("token", "sequence")),
        f"{OPTIMIZER}.lr": Row("learning_rate", number, default=1e-3),
        f"{OPTIMIZER}.weight_decay": Row("weight_decay", number, default=0.01),
        f"{OPTIMIZER}.beta1": Row("adam_beta1", number),
        f"{OPTIMIZER}.beta2": Row("adam_beta2", number),
        f"{OPTIMIZER}.eps": Row("adam_epsilon", number),
        f"{OPTIMIZER}.gradient_clipping": Row("max_grad_norm", number),
        "total_train_epochs": Row("num_train_epochs", number),
        "seed": Row("seed", whole),
        "gconfig.max_new_tokens": Row("max_completion_length", whole, default=16384),
        "gconfig.temperature": Row("temperature", drawn),
        "gconfig.top_p": Row("top_p", number),
        "gconfig.top_k": Row("top_k", lambda key, value: 0 if whole(key, value) >= 10**8 else whole(key, value)),
        "train_dataset.shuffle": Row("shuffle_dataset", switch),
        "cluster.fileroot": Row("output_dir", text),
        "trial_name": Row("run_name", optional(text)),
    },
    steps=(_correction, _loss, _kl, _advantages, _batch, _counted, _optimizer, _adapter, _engine),
    defaults=DEFAULTS,
    left={
        "actor.recompute_logprob": "old log-probs are recomputed here where a step needs them",
        "actor.prox_logp_method": "set offpolicy.objective.proximal (docs/objectives.md)",
        **shared.names(
            "actor",
            "reward_scaling reward_bias reward_clip overlong_reward_penalty overlong_tokens overlong_penalty_factor",
            shared.REWARD,
        ),
        "actor.mask_no_eos_with_zero": "set mask_truncated_completions",
        **shared.names("actor", "discount gae_lambda", "GAE alone reads it"),
        "actor.temperature": "the temperature of the engine is that of the loss here",
        "actor.max_new_tokens": "gconfig.max_new_tokens decides",
        "actor.dtype": "set bf16 or fp16; bf16 is the default",
        "actor.mb_spec": "batches are counted in responses here, not in tokens",
        **shared.names(
            "actor",
            "backend experiment_name trial_name init_from_scratch is_critic attn_impl use_kernels "
            "pad_to_maximum grad_reduce_dtype weight_update_mode fsdp archon megatron offload peft_type "
            "scheduling_spec scheduling_strategy enable_tree_training log_agent_stats "
            "log_agent_stats_keys admin_api_key log_level request_timeout setup_timeout",
            shared.MODEL,
        ),
        f"{OPTIMIZER}": "set the optimizer here: optim, lr_scheduler_kwargs",
        "rollout.max_head_offpolicyness": shared.ASYNC,
        **shared.names("rollout", "max_concurrent_rollouts queue_size consumer_batch_size", shared.ASYNC),
        **shared.names(
            "rollout",
            "experiment_name trial_name fileroot enable_rollout_tracing scheduling_spec dump_to_file "
            "check_trajectory_format tokenizer_path return_routed_experts scheduling_strategy use_lora "
            "agent request_timeout request_retries pause_grace_period setup_timeout openai",
            shared.ENGINE,
        ),
        "ref": shared.REFERENCE,
        "critic": shared.CRITIC,
        "teacher": shared.OTHER_MODELS,
        **shared.names(
            "gconfig",
            "greedy min_new_tokens max_tokens stop stop_token_ids ignore_eos skip_special_tokens "
            "frequency_penalty lora_name use_beam_search",
            "set generation_kwargs",
        ),
        "eval_gconfig": shared.EVALUATION,
        "valid_dataset": shared.EVALUATION,
        "evaluator": shared.EVALUATION,
        "train_dataset": shared.DATA,
        "tokenizer_path": shared.DATA,
        **shared.names("", "saver recover", shared.CHECKPOINTS),
        **shared.names("", "stats_logger perf_tracer log_dir", shared.LOGGING),
        **shared.names(
            "",
            "experiment_name cluster launcher scheduler allocation_mode enable_offload async_training "
            "weight_update_mode",
            shared.MODEL,
        ),
        **shared.names("", "workflow eval_workflow agent_run_args reward_fn max_turns", shared.TOOLS),
    },
    renamed={"actor.behav_imp_weight_cap": "actor.behave_imp_weight_cap"},
)
