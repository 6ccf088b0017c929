"""prime-rl: TOML of the whole run (rl.toml) or of the trainer alone.

Read at prime-rl 559b44772, ``packages/prime-rl-configs`` and ``examples``; the older loss at 02bdca2e4^ (March 2026).
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
    optional,
    switch,
    text,
    whole,
)

LOSS = "trainer.loss"
OPTIM = "trainer.optim"
VLLM = "inference.vllm"
SCHEDULER = "trainer.scheduler"
LORA = "trainer.model.lora"
DEFAULTS: dict[str, Any] = {
    "orchestrator.group_size": 1,
    "deployment.num_train_gpus": 1,
    f"{SCHEDULER}.type": "constant",
    f"{LORA}.rank": 16,
    f"{LORA}.alpha": 32,
    f"{LORA}.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
_OLD_KEEP = "offpolicy.correction.keep: [{type: %s, ratio: current/sampling, low: ..., high: ...}]"
_GONE = "an option of the loss before March 2026, without a successor there; here "


def _batch(source: Source) -> Iterable[Found]:
    """One optimizer step a batch: ``batch_size`` counts responses."""
    names = ("orchestrator.batch_size", "orchestrator.group_size", "deployment.num_train_gpus")
    step, generations = shared.given_or(source, names[0]), shared.given_or(source, names[1])
    if step is None:
        yield from shared.responses_of_a_prompt(source, names[1])
        return
    nodes = source.get("deployment.num_train_nodes")
    devices = shared.given_or(source, names[2])
    keys = source.given(*names)
    where = "deployment.num_train_gpus"
    if nodes is not None:
        devices, where = nodes * source.get("deployment.gpus_per_node", 8), "deployment.num_train_nodes x gpus_per_node"
        keys += source.given("deployment.num_train_nodes", "deployment.gpus_per_node")
    if generations is None or step % generations:
        why = f"{step} responses are no whole groups of {generations}; set num_generations"
        yield Left(keys, why, to_set=shared.SIZE_FIELDS)
        return
    yield from shared.batch(shared.Batch(keys, step // generations, generations, step, None, devices or 1, where))


def _counted(source: Source) -> Iterable[Found]:
    yield from shared.saving(source, "ckpt.interval", shared.Steps(1))
    yield from shared.last_step(source, "max_steps", shared.Steps(1))


def _optimizer(source: Source) -> Iterable[Found]:
    """``constant``; ``linear``, which decays over the last ``decay_steps`` alone; ``cosine``."""
    kind, warmup, decay, least = (f"{SCHEDULER}.{name}" for name in ("type", "warmup_steps", "decay_steps", "min_lr"))
    style = source.get(kind)
    if style not in ("linear", "cosine"):
        yield from shared.scheduler(source, kind, warmup)
        return
    keys, shown = source.given(kind, warmup, decay, least), source.settings.shown
    steps = whole(shown(warmup), source.get(warmup, 10))
    low = number(shown(least), source.get(least, 0.0))
    unset = [f"{key} is 10" for key in ([warmup, decay] if style == "linear" else [warmup]) if not source.has(key)]
    why = [f"{' and '.join(unset)} by default"] if unset else []
    if style == "cosine":
        fields: dict[str, Any] = {"lr_scheduler_type": "cosine_with_min_lr" if low else "cosine"}
        fields |= {"lr_scheduler_kwargs": {"min_lr": low}} if low else {}
    elif last := whole(shown(decay), source.get(decay, 10)):
        peak = number(shown(f"{OPTIM}.lr"), source.get(f"{OPTIM}.lr", 1e-6))
        kwargs = {
            "num_decay_steps": last,
            "decay_type": "linear",
            "min_lr_ratio": round(low / peak, 12) if peak else 0.0,
        }
        fields = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
        why.append(
            "constant between the two; prime-rl reaches the least rate one step before the end, transformers at it"
        )
    else:
        fields = {"lr_scheduler_type": "constant_with_warmup"}
    yield Carried(keys, {**fields, **({"warmup_steps": steps} if steps else {})}, "; ".join(why))


def _adapter(source: Source) -> Iterable[Found]:
    """The section alone, even if it is empty, switches LoRA on."""
    names = [f"{LORA}.{name}" for name in ("rank", "alpha", "target_modules", "dropout")]
    if source.settings.values.get(LORA) == {} or source.has(*names):
        for one in shared.lora(source, *names):
            modules = "; prime-rl's modules of mixtures of experts (experts, fc1_ and fc2_latent_proj) are left out"
            why = f"{one.why}{modules * (not source.has(names[2]))}"
            yield replace(one, keys=(*source.given(LORA), *one.keys), why=why)


def _loss(source: Source) -> Iterable[Found]:
    for key in [key for key in source.settings.values if key.startswith("trainer.loss.kwargs")]:
        yield Left((key,), "arguments of your own loss")
    if source.get(f"{LOSS}.type") == "custom":
        yield Left(
            source.given(f"{LOSS}.type", f"{LOSS}.import_path"),
            "your own loss: write it as a policy loss, offpolicy.objective.policy_loss: {type: 'module:Class'}",
            to_set=shared.LOSS_TO_SET,
        )


def _older(source: Source) -> Iterable[Found]:
    """``ipo_mask_low`` and ``_high`` (March 2026) did not read the advantage: now type ipo, if both are equal."""
    names = (f"{LOSS}.ipo_mask_low", f"{LOSS}.ipo_mask_high")
    if not source.has(*names):
        return
    low, high = (number(name, source.get(name, 0.2)) for name in names)
    if low == high:
        fields = {"option.type": "ipo", "option.ipo_threshold": high}
        yield Carried(source.given(*names), fields, "now type: ipo with ipo_threshold", older=True)
    else:
        term = {
            "type": "divergence_band",
            "statistic": "prob_diff",
            "level": "token",
            "low": -low,
            "high": high,
            "ratio": "current/sampling",
        }
        yield Left(
            source.given(*names), f"prime-rl has no successor with two bounds; set offpolicy.correction.keep: [{term}]"
        )


def _advantages(source: Source) -> Iterable[Found]:
    key = "orchestrator.algo.type"
    if "orchestrator" not in source.settings.sections():
        return
    kind = source.get(key, "grpo")
    if kind == "grpo":
        yield Carried(source.given(key), {"offpolicy.advantages": "dr_grpo"}, "prime-rl's grpo is r - mean")
    else:
        yield shared.no_estimator(source.given(key), f"of the algorithm {kind!r}")


def _engine(source: Source) -> Iterable[Found]:
    if {"inference", "orchestrator"} & source.settings.sections():
        yield Carried((), {"use_vllm": True, "vllm_mode": "server"}, "on devices of its own: set vllm_server_base_url")
        yield from shared.no_length(source, "orchestrator.train.sampling.max_completion_tokens")
    key = f"{VLLM}.enforce_eager"
    if source.has(key):
        yield Carried((key,), {"engine.enforce_eager": switch(key, source.settings.values[key])})


FRAMEWORK = Framework(
    name="prime-rl",
    entries=("prime_rl",),
    marks=(
        "orchestrator.*",
        "trainer.loss.*",
        "loss.dppo_mask_*",
        "loss.ipo_threshold",
        "monitors.wandb.*",
        "trainer.optim.*",
    ),
    options={
        f"{LOSS}.{name}": name
        for name in (
            "type",
            "dppo_mask_low",
            "dppo_mask_high",
            "ipo_threshold",
            "adv_tau",
            "kl_tau",
        )
    },
    rows={
        "model.name": Row("model_name_or_path", text, default="Qwen/Qwen3-0.6B"),
        f"{OPTIM}.lr": Row("learning_rate", number, default=1e-6),
        f"{OPTIM}.weight_decay": Row("weight_decay", number, default=0.01),
        f"{OPTIM}.max_norm": Row("max_grad_norm", optional(number), null="null: no clip; set max_grad_norm: 0"),
        f"{OPTIM}.betas1": Row("adam_beta1", number),
        f"{OPTIM}.betas2": Row("adam_beta2", number),
        "orchestrator.train.sampling.max_completion_tokens": Row("max_completion_length", whole),
        "orchestrator.train.sampling.temperature": Row("temperature", drawn),
        f"{VLLM}.gpu_memory_utilization": Row("vllm_gpu_memory_utilization", number),
        f"{VLLM}.tensor_parallel_size": Row("vllm_tensor_parallel_size", whole),
        f"{VLLM}.max_model_len": Row("vllm_max_model_length", whole),
        "output_dir": Row("output_dir", text),
        "ckpt.keep_last": Row("save_total_limit", whole),
    },
    steps=(_loss, _older, _batch, _counted, _optimizer, _adapter, _advantages, _engine),
    defaults=DEFAULTS,
    empty=(LORA,),
    left={
        **{f"{LOSS}.token_mask_{side}": _GONE + _OLD_KEEP % "ratio_band, level: token" for side in ("low", "high")},
        **{
            f"{LOSS}.geo_mask_{side}": _GONE + _OLD_KEEP % "ratio_band, level: sequence_mean"
            for side in ("low", "high")
        },
        **{f"{LOSS}.sequence_mask_{side}": _GONE + _OLD_KEEP % "outlier_veto" for side in ("low", "high")},
        f"{LOSS}.ratio_type": _GONE + "the level of offpolicy.correction.weight",
        f"{LOSS}.sequence_clip_high": _GONE + "offpolicy.correction.weight: {type: truncate, level: sequence, ...}",
        "orchestrator.max_off_policy_steps": f"{shared.ASYNC}; the keep term staleness_bound drops what is older",
        **shared.names(
            "orchestrator",
            "concurrency max_async_level strict_async_level tasks_per_minute num_train_workers",
            shared.ASYNC,
        ),
        "orchestrator.train.source*": shared.DATA,
        "orchestrator.train.filter_zero_advantages": "groups of equal rewards have advantage 0 here, and stay in "
        "the count of tokens; the keep term equal_rewards with denominator: kept and kl_on: kept takes them out",
        "orchestrator.train.sampling": "set generation_kwargs",
        "orchestrator.eval": shared.EVALUATION,
        "orchestrator.renderer": shared.DATA,
        "orchestrator.algo": "the algorithm's own options have no counterpart here",
        "*seq_len": "set vllm_max_model_length",
        **shared.names(
            "orchestrator",
            "model tokenizer log monitors client ckpt weight_broadcast rollout_transport output_dir "
            "env_vars heartbeat pad_to_multiple_of collect_inference_metrics inference_metrics_roles "
            "resume env_server_base_port max_steps token_batch_size",
            shared.MODEL,
        ),
        **shared.names(
            "trainer",
            "model tokenizer data gc ckpt resume weight_broadcast rollout_transport log monitors "
            "matmul_precision memory_profiler_path trace_path dist_timeout_seconds heartbeat "
            "metrics_server max_steps enable_token_export env_vars output_dir",
            shared.MODEL,
        ),
        "trainer.enable_router_replay": "set routing_replay: r3",
        OPTIM: "set the optimizer here: optim",
        "trainer.scheduler": "set lr_scheduler_type and warmup_steps",
        "inference": shared.ENGINE,
        "monitors": shared.LOGGING,
        "log": shared.LOGGING,
        "ckpt": shared.CHECKPOINTS,
        "resume": shared.CHECKPOINTS,
        "model": shared.MODEL,
        **shared.names(
            "", "tokenizer deployment slurm weight_broadcast rollout_transport env_vars run clean dry_run", shared.MODEL
        ),
    },
    renamed={
        "orchestrator.rollouts_per_example": "orchestrator.group_size",
        "orchestrator.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
        "orchestrator.sampling.temperature": "orchestrator.train.sampling.temperature",
    },
    prefixes={"loss": LOSS, "optim": OPTIM, "scheduler": "trainer.scheduler"},
)
