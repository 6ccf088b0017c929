"""Checks what sampling ahead cannot be combined with, before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trl_offpolicy.correction.terms import KeepTerm, Weight
from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.proximal import InterpolatedProximal, RecomputedProximal
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings

logger = logging.getLogger(__name__)


def check_config(args: Any, settings: AsyncSettings, objective: Objective) -> None:
    """Raise unless an ``OffPolicyGRPOConfig`` can sample ahead.

    Raises:
        ValueError: a field does not allow it; the message names the field.
    """
    if not args.use_vllm or args.vllm_mode != "server":
        got = f"vllm_mode {args.vllm_mode!r}" if args.use_vllm else "use_vllm False"
        raise ValueError(
            f"async_rollouts must be left out with {got}: an engine in the trainer's process cannot sample while the "
            "trainer learns. Start a server (trl-offpolicy serve) and set use_vllm: true, vllm_mode: server."
        )
    engine = EngineSettings.parse(args.engine)
    if not engine.on_server(args.device.type, ahead=True):
        raise ValueError(
            "engine.transfer must be auto, folder, adapter or broadcast with async_rollouts, but got 'nccl': TRL's own "
            "client asks for all completions in one call that a sync cannot wait for."
        )
    check_keeps(settings, engine.transfer, engine.weight_rounding)
    extra: dict[str, Any] = dict(args.generation_kwargs or {})
    if args.vllm_structured_outputs_regex is not None:
        extra["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
    settings.check_sampling(extra)
    check_objective(settings, objective)


def check_keeps(settings: AsyncSettings, transfer: str, weight_rounding: Any) -> None:
    """Raise if several versions are to be live at once, but whole weights are sent.

    Args:
        settings: the parsed field.
        transfer: the engine's option.
        weight_rounding: the engine's option.

    Raises:
        ValueError: the adapter is not sent alone.
    """
    if settings.keeps and weight_rounding is not None:
        raise ValueError(
            "engine.weight_rounding must be left out with async_rollouts.partial 'keep', but got "
            f"{weight_rounding!r}: weights are rounded with the adapter merged into them, and a server can hold one "
            "version of whole weights."
        )
    if settings.keeps and transfer not in ("auto", "adapter"):
        raise ValueError(
            f"engine.transfer must be adapter (or auto) with async_rollouts.partial 'keep', but got {transfer!r}: a "
            "server can hold the adapters of several versions, but only one version of whole weights."
        )


def check_agents(settings: AsyncSettings, *, ranks: int) -> None:
    """Raise if several versions are to be live at once, but several ranks sample episodes of their own.

    Args:
        settings: the parsed field.
        ranks: how many of them do.

    Raises:
        ValueError: it is more than one.
    """
    if settings.keeps and ranks > 1:
        raise ValueError(
            f"async_rollouts.partial must be 'finish' or 'continue' with tools or environment_factory on {ranks} "
            "ranks, but got 'keep': each rank samples its own episodes, and the main one, which unloads adapters, does "
            "not know with which of them another one still samples."
        )


def check_objective(settings: AsyncSettings, objective: Objective) -> None:
    """Raise if the objective and ``old_logps`` do not go together.

    Raises:
        ValueError: the objective reads an old policy that is refused, or the proximal policy is set twice.
    """
    own_centre = not isinstance(objective.proximal, RecomputedProximal)
    if settings.old_logps == "ewma" and own_centre:
        raise ValueError(
            "async_rollouts.old_logps must not be 'ewma' with objective.proximal "
            f"{type(objective.proximal).__name__}: both make the proximal policy."
        )
    if settings.old_logps == "refuse" and settings.lag > 0 and (reader := _reads_old(objective)):
        raise ValueError(
            f"async_rollouts.old_logps must not be 'refuse' with {reader}, which reads the old policy: the trainer has "
            "no log-probs at the weights that sampled. Use recompute_proximal, snapshot, model or ewma, or "
            "objective.mode bypass with terms on current/sampling."
        )


def _reads_old(objective: Objective) -> str | None:
    """The part of the objective that reads pi_old, in words; None if there is none."""
    correction = objective.correction
    terms: list[Weight | KeepTerm] = []
    if correction is not None:
        terms = [*correction.weights, *(term for term in correction.keep if term.reads_ratio)]
    for term in terms:
        if "old" in term.ratio.split("/"):
            return f"{type(term).__name__} on {term.ratio}"
    by_loss = objective.mode == "decoupled" and objective.policy_loss.uses_ratio
    if by_loss and not isinstance(objective.proximal, InterpolatedProximal):
        return f"{type(objective.policy_loss).__name__} in decoupled mode"
    return None


OWN_LOOPS = ("rollout_func", "rollout")
"""Arguments of the trainers that ask the engine by a loop of the user's."""


def check_arguments(settings: AsyncSettings | None, given: Mapping[str, Any]) -> None:
    """Raise if an argument of the trainer samples by a loop of its own, or tools must run in the trainer's thread.

    Args:
        settings: the parsed field ``async_rollouts``.
        given: arguments of the trainer by name, ``tool_timeout`` among them.

    Raises:
        ValueError: the message names the argument.
    """
    if settings is None:
        return
    for name in OWN_LOOPS:
        if given.get(name):
            raise ValueError(
                f"{name} must be left out with async_rollouts, but got {given[name]!r}: it asks the engine at the "
                "trainer's pace. Agents with tools or environment_factory are sampled ahead."
            )
    agents = given.get("tools") or given.get("environment_factory")
    if agents and settings.lag != int(settings.lag):
        raise ValueError(
            "async_rollouts.lag must be a whole number with tools or environment_factory, but got "
            f"{settings.lag}: their batches are sampled as a whole."
        )
    if agents and given["tool_timeout"] is None:
        raise ValueError(
            "tool_timeout must be a number of seconds with async_rollouts and tools or environment_factory, but got "
            "None: calls would run in the threads of the batches in flight, and not in the trainer's own."
        )


def check_trainer(args: Any, given: Mapping[str, Any]) -> None:
    """:func:`check_arguments` of a TRL trainer.

    Args:
        args: the configuration.
        given: keyword arguments of the trainer.

    Raises:
        ValueError: there is such an argument; the message names it.
    """
    check_arguments(AsyncSettings.parse(args.async_rollouts), {**given, "tool_timeout": args.tool_timeout})


def check_snapshots(settings: AsyncSettings, *, strategy: str | None, sharding: str | None = None) -> None:
    """Raise if copies of the weights are needed, but are not made under the strategy that holds them.

    Args:
        settings: the parsed field.
        strategy: in words, if it is another one than one process, DDP, FSDP2 and DeepSpeed; else None.
        sharding: in words, if it is another one than one process and DDP; else None.

    Raises:
        ValueError: it is such a strategy.
    """
    if settings.old_logps == "model" and sharding is not None:
        raise ValueError(
            f"async_rollouts.old_logps must not be 'model' with {sharding}: the second model is a whole copy on every "
            "rank, which is what sharding avoids. 'snapshot' gives the same log-probs and exchanges shards."
        )
    if settings.old_logps in ("snapshot", "balance", "ewma") and strategy is not None:
        raise ValueError(
            f"async_rollouts.old_logps must be 'recompute_proximal' or 'refuse' with {strategy}, but got "
            f"{settings.old_logps!r}. FSDP2 and DeepSpeed take it."
        )


def check_server(settings: AsyncSettings, server: Any) -> None:
    """Raise unless the server can do what a sync asks of it.

    Raises:
        EngineError: a sync is to cut requests in flight, or to leave them their adapter, but the server cannot do that.
    """
    if settings.keeps:
        _check_adapters(settings, server)
    if settings.cuts and not server.can_cut:
        raise EngineError(
            "async_rollouts.partial must be 'finish' with a vLLM server that has no /abort_requests, but got "
            f"{settings.on_sync!r}: start it with `trl-offpolicy serve`, or with VLLM_SERVER_DEV_MODE=1 (vLLM 0.27+)."
        )


def _check_adapters(settings: AsyncSettings, server: Any) -> None:
    """Raise unless the server loads adapters; warn if fewer than ``lag + 1`` of them can sample at the same time."""
    if not server.takes_adapter:
        raise EngineError(
            "async_rollouts.partial must be 'finish' or 'continue' with a vLLM server that loads no adapters, but got "
            "'keep': start it with `trl-offpolicy serve --lora-rank N`, or with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
        )
    if server.keeps_kv:
        raise EngineError(
            "async_rollouts.partial must be 'finish' or 'continue' with a vLLM server that has a KV connector, but got "
            "'keep': what it keeps is not known to tell adapters apart, and 'keep' does not reset it at a sync."
        )
    versions = settings.most_versions
    if server.most_adapters is not None and server.most_adapters < versions:
        logger.warning(
            "The server samples with %d adapters at a time, but with lag %g there can be %d versions: requests of the "
            "newest, and the proof of its sync, wait for those of the oldest. Start it with `trl-offpolicy serve ... "
            "-- --max-loras %d`.",
            server.most_adapters,
            settings.lag,
            versions,
            versions,
        )


def check_adapter(settings: AsyncSettings, *, has_adapter: bool) -> None:
    """Raise if several versions are to be live at once, but the model has no adapter that can be sent alone.

    Args:
        settings: the parsed field.
        has_adapter: whether it has one (:attr:`~trl_offpolicy.engines.weights.source.ModelWeights.has_adapter`).

    Raises:
        ValueError: there is none.
    """
    if settings.keeps and not has_adapter:
        raise ValueError(
            "async_rollouts.partial must be 'finish' or 'continue' without an adapter that can be sent alone, but got "
            "'keep', which takes a PEFT model with plain LoRA on linear layers (no lm_head, embeddings, bias, "
            "modules_to_save or DoRA), which is all that is trained."
        )
