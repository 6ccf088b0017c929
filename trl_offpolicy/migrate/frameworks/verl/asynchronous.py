"""verl's trainers that sample beside the learning: which one a run has, and what follows from it.

Read at verl 1dda039b9, ``verl/experimental/one_step_off_policy``, ``verl/experimental/fully_async_policy`` and
``trainer.v1`` of ``verl/trainer/config/ppo_trainer.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterable

from trl_offpolicy.migrate import shared
from trl_offpolicy.migrate.frameworks.verl.paths import ACTOR, CORRECTION
from trl_offpolicy.migrate.rules import Carried, Found, Left, Source, switch, whole

SEPARATE = ("one_step_off", "fully_async", "separate_async")
"""Trainers whose engine has devices of its own."""
TOTAL_PROMPTS = "rollout.total_rollout_steps"


def trainer_of(source: Source) -> str:
    """``one_step_off``, ``fully_async``, ``separate_async``, ``colocate_async``; empty = one after the other."""
    for name in ("one_step_off", "fully_async"):
        if name in source.settings.entry:
            return name
    if "async_training" in source.settings.sections():
        return "fully_async"
    mode = source.get("trainer.v1.trainer_mode", "sync") if source.get("trainer.use_v1", True) else "sync"
    return mode if mode in ("separate_async", "colocate_async") else ""


def has_own_devices(source: Source) -> bool:
    """True if the engine does not share the trainer's devices."""
    return trainer_of(source) in SEPARATE or source.get("actor_rollout_ref.hybrid_engine", True) is False


def asynchronous(source: Source) -> Iterable[Found]:
    """The correction that these trainers have by default, and what says how far they sample ahead."""
    trainer, bypass, hybrid = trainer_of(source), f"{CORRECTION}.bypass_mode", "actor_rollout_ref.hybrid_engine"
    if source.has(hybrid):
        mode = "server" if has_own_devices(source) else "colocate"
        yield Left((hybrid,), f"vllm_mode: {mode} is that")
    if not trainer:
        return
    known = bypass in source.settings.values or bypass in source.settings.unknown
    if trainer in ("one_step_off", "fully_async") and not known and "recipe." not in source.settings.entry:
        yield Carried((), {"option.bypass_mode": True}, f"the default of verl's trainer {trainer}")
    own = ("async_training.", "trainer.v1.", "rollout.nnodes", "rollout.n_gpus_per_node")
    taken = ("async_training.require_batches",)
    keys = tuple(key for key in source.settings.values if key.startswith(own) and key not in taken)
    said = shared.ASYNC if trainer in SEPARATE else "it samples ahead; here that takes a server: async_rollouts"
    yield Left(keys, said, pattern="" if keys else f"the trainer {trainer}", default=False)


def prompts_of(source: Source) -> int | None:
    """Prompts of a generation; the fully asynchronous trainer learns from so many mini-batches at a time."""
    key = "data.train_batch_size"
    if trainer_of(source) == "fully_async" and source.get(key) == 0:
        mini = shared.given_or(source, f"{ACTOR}.ppo_mini_batch_size")
        parts = shared.given_or(source, "async_training.require_batches", 1)
        return None if mini is None or parts is None else mini * parts
    found: int | None = shared.given_or(source, key)
    return found


def generations_of_a_version(source: Source) -> int:
    """Generations between two syncs: the fully asynchronous trainer counts its steps in these."""
    if trainer_of(source) != "fully_async":
        return 1
    return shared.given_or(source, "async_training.trigger_parameter_sync_step", 4) or 1


def all_prompts(source: Source, per_step: shared.Steps) -> Iterable[Found]:
    """``max_steps`` from the number of prompts that are sampled in all."""
    if not source.has(TOTAL_PROMPTS):
        return
    given, prompts = source.settings.values[TOTAL_PROMPTS], prompts_of(source)
    if given is None or prompts is None:
        why = "null: the number of epochs decides" if given is None else "prompts in all there; set max_steps"
        yield Left((TOTAL_PROMPTS,), why)
        return
    steps = max(whole(TOTAL_PROMPTS, given) // prompts, 1) * per_step.number
    why = f"prompts in all there, {prompts} a generation; verl ends sooner where its epochs do"
    yield Carried((TOTAL_PROMPTS,), {"max_steps": steps}, why)


def routing_replay(source: Source) -> Iterable[Found]:
    """Router replay, wherever the file names it."""
    for key, value in source.settings.values.items():
        if key.endswith(".router_replay.mode"):
            off = str(value).lower() in ("none", "disabled", "false")
            yield Left((key,), "off" if off else f"set routing_replay: {str(value).lower()} (docs/moe.md)")
        elif key.endswith(".enable_rollout_routing_replay"):
            on = value is not None and switch(source.settings.shown(key), value)
            yield Left((key,), "set routing_replay: r3 (docs/moe.md)" if on else "off")
