"""Routing replay in a trainer: the routing of the trainer (R2) or of the engine (R3), replayed in every pass.

The record travels with the rows of a batch as ``routed_experts``, (B, P + T, layers, k): prompt, completion and
padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.engines.routing.freeze import freeze_router, freeze_router_bias
from trl_offpolicy.engines.routing.options import RoutingReplay
from trl_offpolicy.engines.routing.replay import Replayed, record, replay
from trl_offpolicy.engines.routing.reported import EngineRoutes, placed_routes, turn_unreported
from trl_offpolicy.engines.routing.routers import find_routers
from trl_offpolicy.engines.routing.storage import bytes_per_token, check_routes, check_storage, route_dtype
from trl_offpolicy.functional.routing import EXPERT_DIAGNOSTICS, ROUTING_DIAGNOSTICS
from trl_offpolicy.rollouts.batches import trainable
from trl_offpolicy.stats import Group, Stats

KEY = "routed_experts"


def check_r2(options: RoutingReplay, steps: float, *, accumulation: str) -> None:
    """Raise for R2 where no row is seen again after its routing is recorded.

    Args:
        options: the parsed option.
        steps: optimizer steps that one generation serves, N.
        accumulation: name of the trainer's option for micro-batches per optimizer step.

    Raises:
        ValueError: R2 although a generation serves at most one step.
    """
    if options.mode == "r2" and steps <= 1:
        raise ValueError(
            "routing_replay must be none or r3 where a generation serves one optimizer step: no row is seen again "
            "after its routing is recorded. r2 needs steps_per_generation * num_iterations above "
            f"{accumulation}."
        )


def check_r3(options: RoutingReplay, *, reports: bool, setting: str) -> None:
    """Raise for R3 with an engine that is the trainer itself.

    Args:
        options: the parsed option.
        reports: whether the engine can report its routing.
        setting: the setting that gives one which can.

    Raises:
        ValueError: R3 without such an engine.
    """
    if options.mode == "r3" and not reports:
        raise ValueError(
            f"routing_replay r3 must have an engine that reports its routing: {setting}. transformers' generate "
            "routes as the trainer does; there use r2."
        )


def check_in_turn(options: RoutingReplay) -> None:
    """Raise for R2 with rollouts that are sampled ahead. What the engine itself reports is of the weights that sampled.

    Args:
        options: the parsed option.

    Raises:
        ValueError: the trainer's routing is replayed.
    """
    if options.mode == "r2":
        raise ValueError(
            "routing_replay must be none or r3 with async_rollouts: r2 records the routing of the trainer at other "
            "weights than those that sampled; but got 'r2'."
        )


class Routing:
    """Records and replays routing for one trainer. Without the option it does nothing and costs nothing.

    Args:
        options: the parsed ``routing_replay``.
    """

    def __init__(self, options: RoutingReplay) -> None:
        self.options = options
        self._last: Replayed | None = None

    def prepare(
        self, model: nn.Module, *, reported: bool, without_router: bool = False, without_bias: bool = False
    ) -> None:
        """Check that the model's routing can be recorded, and freeze its routers if asked for.

        Args:
            model: the policy, before its optimizer is made.
            reported: whether the engine reports its routing, also if it is only compared.
            without_router: ``freeze_router``.
            without_bias: ``freeze_router_bias``.

        Raises:
            ValueError: the model is dense, or its routers have nothing to freeze.
            NotImplementedError: the kind of its routers is not known.
        """
        if self.options.mode != "none" or reported:
            find_routers(model)
        if without_router:
            freeze_router(model)
        if without_bias:
            freeze_router_bias(model)

    def placed(
        self, model: nn.Module, rows: Mapping[str, Tensor], found: Sequence[EngineRoutes | None]
    ) -> dict[str, Tensor]:
        """The field of a generation batch with the engine's routing, on the positions of the model's input.

        Args:
            model: the policy.
            rows: prompts and completions with their masks, under TRL's names.
            found: the engine's record of each row, or None.

        Raises:
            RouteStorageError: the record would be larger than ``limit_gib``.
            ValueError: a row has no record, or one that lacks a turn, or the model cannot have made it.
        """
        check_turns(rows, found)
        mask, routers = _attended(rows), find_routers(model)
        experts, layers, top_k = routers.experts, len(routers), routers.top_k
        each = bytes_per_token(experts=experts, layers=layers, top_k=top_k)
        check_storage(mask.numel(), each=each, limit_gib=self.options.limit_gib)
        routes = placed_routes(found, mask, numbers=routers.numbers, dtype=route_dtype(experts))
        check_routes(routes, experts=experts, layers=layers, top_k=top_k)
        return {KEY: routes if self.options.device == "cpu" else routes.to(mask.device)}

    @contextmanager
    def recorded(self, model: nn.Module, rows: dict[str, Any]) -> Iterator[None]:
        """A context in which, with R2, the pass for old log-probs adds its routing to the rows."""
        if self.options.mode != "r2":
            yield
            return
        rows.pop(KEY, None)  # of an engine that reports: R2 records what the trainer chooses freely
        device = "cpu" if self.options.device == "cpu" else None
        with record(model, device=device, limit_gib=self.options.limit_gib) as recorded:
            yield
        rows[KEY] = recorded.routed_experts

    @contextmanager
    def replayed(self, model: nn.Module, rows: dict[str, Any]) -> Iterator[None]:
        """A context in which the model routes these rows as recorded, if they have a record."""
        self._last = None
        routes = rows.get(KEY)
        if routes is None:
            yield
            return
        enforce = self.options.mode != "none"
        with replay(model, routes, mask=predicting(rows), enforce=enforce) as self._last:
            yield

    def stats(self) -> Stats:
        """``routing/*`` of the last scored rows: how the router's free choice differs from the record."""
        if self._last is None:
            return Stats({})
        return Stats({"routing": Group(self._last.moments, {**ROUTING_DIAGNOSTICS, **EXPERT_DIAGNOSTICS})})


def check_turns(rows: Mapping[str, Tensor], found: Sequence[EngineRoutes | None]) -> None:
    """Raise unless each record reaches to the last token that was sampled, which itself is never fed.

    Tokens of a later turn without a record would be routed anew. What follows the last turn (text of a tool) may.

    Args:
        rows: prompts and completions with their masks.
        found: the engine's record of each row, or None.

    Raises:
        ValueError: a record ends before; the message names the turn.
    """
    attended = _attended(rows).bool().cpu()
    sampled = torch.nn.functional.pad(trainable(dict(rows)), (rows["prompt_ids"].shape[1], 0)).cpu()
    for index, item in enumerate(found):
        here = sampled[index][attended[index]]
        if item is None or not here[len(item.ids) + 1 :].any():
            continue
        first = len(item.ids) + 1 + int(here[len(item.ids) + 1 :].nonzero()[0])
        begins = here & ~torch.nn.functional.pad(here[:-1], (1, 0))  # a turn begins after what was not sampled
        last = int(here.nonzero()[-1])
        raise turn_unreported(int(begins[: first + 1].sum()), index, f"{len(item.ids)} of {last} tokens")


def attended_ids(rows: Mapping[str, Tensor]) -> list[list[int]]:
    """Token ids of prompt and completion of each row, without padding."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    return [row[here.bool()].tolist() for row, here in zip(ids, _attended(rows), strict=True)]


def predicting(rows: dict[str, Any]) -> Tensor:
    """(B, P + T) bool: the positions whose output gives the log-prob of a trainable token."""
    mask = trainable(rows)
    width = rows["prompt_ids"].shape[1]
    return torch.nn.functional.pad(mask, (width - 1, 1))


def _attended(rows: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
