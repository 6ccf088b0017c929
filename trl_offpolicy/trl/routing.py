"""Routing replay of the TRL trainer: records the routing (R2) or takes the engine's (R3), and replays it in every pass.

The record travels in TRL's batch as ``routed_experts``, (B, P + T, layers, k): prompt, completion and padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.engines.routing.freeze import freeze_router, freeze_router_bias
from trl_offpolicy.engines.routing.options import RoutingReplay
from trl_offpolicy.engines.routing.replay import Replayed, record, replay
from trl_offpolicy.engines.routing.reported import RouteStore, aligned_routes
from trl_offpolicy.engines.routing.routers import find_routers
from trl_offpolicy.engines.routing.storage import bytes_per_token, check_routes, check_storage, route_dtype
from trl_offpolicy.functional.routing import EXPERT_DIAGNOSTICS, ROUTING_DIAGNOSTICS
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings
from trl_offpolicy.rollouts.batches import trainable
from trl_offpolicy.stats import Group, Stats
from trl_offpolicy.trl.rebinding import is_aligned

KEY = "routed_experts"


def optimizer_steps(args: Any) -> float:
    """Optimizer steps that one generation serves, N."""
    return float(args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps)


def check_replay(args: Any) -> RoutingReplay:
    """Parse ``routing_replay`` and raise if it cannot work.

    Raises:
        ValueError: R2 although a generation serves one step, R3 without vLLM, or either with sampling ahead.
    """
    options = RoutingReplay.parse(args.routing_replay)
    compares = (args.engine or {}).get("return_routing", False)
    if AsyncSettings.parse(args.async_rollouts) is not None and (compares or options.mode != "none"):
        raise ValueError(
            "routing_replay must be none and engine.return_routing False with async_rollouts: routing is recorded at "
            f"other weights than those that sampled; but got {options.mode!r} and {compares}."
        )
    if options.mode == "none":
        return options
    if options.mode == "r2" and optimizer_steps(args) <= 1:
        raise ValueError(
            "routing_replay must be none or r3 where a generation serves one optimizer step: no row is seen again "
            "after its routing is recorded. r2 needs steps_per_generation * num_iterations above "
            "gradient_accumulation_steps."
        )
    if options.mode == "r3" and not args.use_vllm:
        raise ValueError(
            "routing_replay r3 must have an engine that reports its routing: use_vllm true. transformers' generate "
            "routes as the trainer does; there use r2."
        )
    return options


def engine_options(args: Any) -> dict[str, Any] | None:
    """The ``engine`` field, which also requests the engine's routing if it is replayed."""
    if RoutingReplay.parse(args.routing_replay).mode != "r3":
        engine: dict[str, Any] | None = args.engine
        return engine
    return {**(args.engine or {}), "return_routing": True}


class TrainerRouting:
    """Records and replays routing for one trainer. Without the option it does nothing and costs nothing.

    Args:
        trainer: the built trainer. Its routers are frozen here if its configuration asks for that.

    Raises:
        ValueError: the model is dense, or its routers have nothing to freeze.
        NotImplementedError: the kind of its routers is not known.
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self._options = RoutingReplay.parse(args.routing_replay)
        self._store: RouteStore | None = getattr(getattr(trainer, "vllm_generation", None), "routes", None)
        self._last: Replayed | None = None
        if self._options.mode != "none" or self._store is not None:
            self._routers = find_routers(trainer.model)
        if args.freeze_router:
            freeze_router(trainer.model)
        if args.freeze_router_bias:
            freeze_router_bias(trainer.model)

    def engine_fields(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """The engine's routing of a generation batch's rows, placed on the positions of the model's input."""
        if self._store is None:
            return {}
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        experts, layers, top_k = self._routers.experts, len(self._routers), self._routers.top_k
        each = bytes_per_token(experts=experts, layers=layers, top_k=top_k)
        check_storage(mask.numel(), each=each, limit_gib=self._options.limit_gib)
        rows = [row[here.bool()].tolist() for row, here in zip(ids, mask, strict=True)]
        numbers, dtype = self._routers.numbers, route_dtype(experts)
        routes = aligned_routes(self._store, rows, mask, numbers=numbers, dtype=dtype)
        self._store.clear()
        check_routes(routes, experts=experts, layers=layers, top_k=top_k)
        return {KEY: routes if self._options.device == "cpu" else routes.to(ids.device)}

    @contextmanager
    def recorded(self, model: Any, output: dict[str, Any]) -> Iterator[None]:
        """A context in which, with R2, the pass for old log-probs adds its routing to the batch; not in evaluation."""
        if self._options.mode != "r2" or not model.training:
            yield
            return
        device = "cpu" if self._options.device == "cpu" else None
        with record(model, device=device, limit_gib=self._options.limit_gib) as recorded:
            yield
        output[KEY] = recorded.routed_experts

    @contextmanager
    def replayed(self, model: Any, inputs: dict[str, Any]) -> Iterator[None]:
        """A context in which the model routes these rows as recorded, if the batch has a record."""
        self._last = None
        routes = inputs.get(KEY)
        if routes is None:
            yield
            return
        enforce = self._options.mode != "none"
        with replay(model, routes, mask=predicting(inputs), enforce=enforce) as self._last:
            yield

    def stats(self) -> Stats:
        """``routing/*`` of the last scored rows: how the router's free choice differs from the record."""
        if self._last is None:
            return Stats({})
        return Stats({"routing": Group(self._last.moments, {**ROUTING_DIAGNOSTICS, **EXPERT_DIAGNOSTICS})})


def scores_old(args: Any, stages: Stages | None, *, reads_old: bool) -> bool:
    """True if the kit makes the pass for old log-probs instead of TRL: with R3 to replay, with R2 to record.

    Args:
        args: the configuration.
        stages: what is decided on the whole generation batch. If that needs old log-probs, it makes the pass itself.
        reads_old: True if the objective reads old log-probs.
    """
    if stages is not None and stages.needs_old:
        return False
    mode = RoutingReplay.parse(args.routing_replay).mode
    return not is_aligned(args) and (mode == "r2" or (mode == "r3" and reads_old))


def predicting(inputs: dict[str, Any]) -> Tensor:
    """(B, P + T) bool: the positions whose output gives the log-prob of a trainable token."""
    mask = trainable(inputs)
    width = inputs["prompt_ids"].shape[1]
    return torch.nn.functional.pad(mask, (width - 1, 1))
