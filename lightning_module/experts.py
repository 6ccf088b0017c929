"""Mixtures of experts in Lightning: routing replay, routers that are not trained, and the load-balancing loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_module.engines import engine_type
from trl_offpolicy.checks import check_bool, check_number
from trl_offpolicy.engines.engine import Rollouts
from trl_offpolicy.engines.routing.options import RoutingReplay
from trl_offpolicy.engines.routing.reported import EngineRoutes
from trl_offpolicy.rollouts.routing import KEY, Routing, check_in_turn, check_r2, check_r3
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import Reduction

_REPORTING = ("vllm", "server")


class Experts:
    """What a module does because its model is a mixture of experts; nothing for a dense one.

    Args:
        settings: ``engine``, ``routing_replay``, ``freeze_router``, ``freeze_router_bias``, ``router_aux_loss_coef``.

    Raises:
        ValueError: an option is not valid, or R3 has no engine that reports its routing.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        options = RoutingReplay.parse(settings["routing_replay"])
        check_bool(freeze_router=settings["freeze_router"], freeze_router_bias=settings["freeze_router_bias"])
        if settings["router_aux_loss_coef"] is not None:
            check_number("router_aux_loss_coef", settings["router_aux_loss_coef"])
        self._kind = engine_type(settings["engine"])
        check_r3(options, reports=self._kind != "transformers", setting="engine vllm or server")
        if settings["async_rollouts"] is not None:
            check_in_turn(options)
        self.routing = Routing(options)
        self.aux_loss_coef = 0.0
        """Coefficient of the load-balancing loss; 0 = the model does not compute it."""

    @property
    def _compares(self) -> bool:
        """True if the setting ``engine`` itself asks for the engine's routing."""
        engine = self._settings["engine"]
        return isinstance(engine, Mapping) and bool(engine.get("return_routing"))

    @property
    def engine(self) -> Any:
        """The module's ``engine`` setting, which also requests the engine's routing if it is replayed."""
        spec = self._settings["engine"]
        if self.routing.options.mode != "r3" or self._kind not in _REPORTING:
            return spec
        return {**({"type": spec} if isinstance(spec, str) else spec), "return_routing": True}

    def prepare(self, policy: nn.Module) -> None:
        """Read the model's coefficient, check that its routing can be recorded, and freeze its routers.

        Args:
            policy: the model, before its optimizer is made.

        Raises:
            ValueError: an option needs a mixture of experts, and the model is dense.
            NotImplementedError: the kind of its routers is not known.
        """
        settings = self._settings
        self.aux_loss_coef = aux_loss_coef(policy, settings["router_aux_loss_coef"])
        self.routing.prepare(
            policy,
            reported=self._compares or self.routing.options.mode == "r3",
            without_router=settings["freeze_router"],
            without_bias=settings["freeze_router_bias"],
        )

    def check_steps(self, steps: float) -> None:
        """Raise for R2 if a generation serves at most one optimizer step; ``steps`` is how many it serves."""
        check_r2(self.routing.options, steps, accumulation="accumulate_grad_batches")

    # -------------------------------------------------------------------------------------------------------- routing

    @property
    def records(self) -> bool:
        """True if the routing is recorded in a pass of the trainer, which is then needed for that alone (R2)."""
        return self.routing.options.mode == "r2"

    def reads_rows_in_order(self, rows: Mapping[str, Any]) -> bool:
        """True if routing is recorded or replayed row by row while these rows are scored."""
        return self.routing.options.mode != "none" or rows.get(KEY) is not None

    @property
    def on_host(self) -> tuple[str, ...]:
        """Names of the fields of a batch that stay on the host."""
        return (KEY,) if self.routing.options.device == "cpu" else ()

    def reported(self, policy: nn.Module, rows: Mapping[str, Tensor], rollouts: Rollouts) -> dict[str, Tensor]:
        """The field of the rows with the engine's routing; empty if it reports none.

        Raises:
            ValueError: it reports none, or not of every row, and R3 replays it.
        """
        routes = rollouts.routed_experts
        if routes is None:
            if self.routing.options.mode == "r3":
                raise ValueError("routing_replay r3 must have the routing of every completion, but the engine's "
                                 "Rollouts.routed_experts is None.")  # fmt: skip
            return {}
        pairs = zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True)
        ids = [(*prompt, *completion) for prompt, completion in pairs]
        return self.routing.placed(policy, rows, [_record(*pair) for pair in zip(ids, routes, strict=True)])

    def recorded(self, policy: nn.Module, rows: dict[str, Any]) -> AbstractContextManager[None]:
        """A context in which, with R2, the pass for old log-probs adds its routing to the rows."""
        return self.routing.recorded(policy, rows)

    def replayed(self, policy: nn.Module, rows: dict[str, Any]) -> AbstractContextManager[None]:
        """A context in which the model routes these rows as recorded, if they have a record."""
        return self.routing.replayed(policy, rows)

    def stats(self) -> Stats:
        """``routing/*`` of the last scored rows."""
        return self.routing.stats()

    # ------------------------------------------------------------------------------------------- load-balancing loss

    @property
    def balances(self) -> bool:
        """True if the loss has a load-balancing term."""
        return self.aux_loss_coef != 0.0

    def aux_term(self, aux_loss: Tensor | None, reduction: Reduction) -> Tensor | float:
        """The load-balancing term of a micro-batch, scaled as TRL does: the mean over the micro-batches of a step."""
        return 0.0 if aux_loss is None else self.aux_loss_coef * aux_loss / reduction.accumulation


def aux_loss_coef(model: Any, given: float | None) -> float:
    """TRL's ``router_aux_loss_coef``; 0 for a model that cannot return its router logits.

    Args:
        model: a model of transformers.
        given: the setting; None = the coefficient in the model's configuration.

    Raises:
        ValueError: a coefficient for a dense model.
    """
    config = model.config.get_text_config()
    returns_logits = hasattr(config, "output_router_logits")
    if given and not returns_logits:
        raise ValueError(
            "router_aux_loss_coef must be None or 0 for a model that does not return router logits, but got "
            f"{given} for {type(model).__name__}."
        )
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if given is None else given
    return float(coefficient) if returns_logits else 0.0


def _record(ids: Sequence[int], routes: Any) -> EngineRoutes | None:
    if routes is None:
        return None
    routes = torch.as_tensor(routes)
    return EngineRoutes(tuple(ids[: len(routes)]), routes)
