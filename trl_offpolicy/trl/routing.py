"""Routing replay of the TRL trainer: :mod:`trl_offpolicy.rollouts.routing` with TRL's options, engine and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trl_offpolicy.engines.routing.options import RoutingReplay
from trl_offpolicy.engines.routing.reported import RouteStore
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings
from trl_offpolicy.rollouts.routing import KEY, Routing, attended_ids, check_in_turn, check_r2, check_r3, predicting
from trl_offpolicy.trl.rebinding import is_aligned

__all__ = [
    "KEY",
    "TrainerRouting",
    "check_replay",
    "engine_options",
    "optimizer_steps",
    "predicting",
    "scores_old",
]


def optimizer_steps(args: Any) -> float:
    """Optimizer steps that one generation serves, N."""
    return float(args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps)


def check_replay(args: Any) -> RoutingReplay:
    """Parse ``routing_replay`` and raise if it cannot work.

    Raises:
        ValueError: R2 although a generation serves one step or with sampling ahead, or R3 without vLLM.
    """
    options = RoutingReplay.parse(args.routing_replay)
    if AsyncSettings.parse(args.async_rollouts) is not None:
        check_in_turn(options)
    check_r2(options, optimizer_steps(args), accumulation="gradient_accumulation_steps")
    check_r3(options, reports=args.use_vllm, setting="use_vllm true")
    return options


def engine_options(args: Any) -> dict[str, Any] | None:
    """The ``engine`` field, which also requests the engine's routing if it is replayed."""
    if RoutingReplay.parse(args.routing_replay).mode != "r3":
        engine: dict[str, Any] | None = args.engine
        return engine
    return {**(args.engine or {}), "return_routing": True}


class TrainerRouting:
    """The :class:`~trl_offpolicy.rollouts.routing.Routing` of one trainer, and the store of its engine.

    Args:
        trainer: the built trainer. Its routers are frozen here if its configuration asks for that.

    Raises:
        ValueError: the model is dense, or its routers have nothing to freeze.
        NotImplementedError: the kind of its routers is not known.
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self._model = trainer.model
        self._store: RouteStore | None = getattr(getattr(trainer, "vllm_generation", None), "routes", None)
        self._routing = Routing(RoutingReplay.parse(args.routing_replay))
        self._routing.prepare(
            trainer.model,
            reported=self._store is not None,
            without_router=args.freeze_router,
            without_bias=args.freeze_router_bias,
        )
        self.records = self._routing.options.mode == "r2"
        """True if a pass for old log-probs may record the routing of its rows."""
        self.replayed, self.stats = self._routing.replayed, self._routing.stats

    def engine_fields(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """The engine's routing of a generation batch's rows, placed on the positions of the model's input."""
        if self._store is None:
            return {}
        found = [self._store.find(row) for row in attended_ids(output)]
        fields = self._routing.placed(self._model, output, found)
        self._store.clear()
        return fields

    @contextmanager
    def recorded(self, model: Any, output: dict[str, Any]) -> Iterator[None]:
        """A context in which, with R2, the pass for old log-probs adds its routing to the batch; not in evaluation."""
        if not model.training:
            yield
            return
        with self._routing.recorded(model, output):
            yield


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
