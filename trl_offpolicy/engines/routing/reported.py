"""The routing of a vLLM engine in this process, token by token, for each sequence that it sampled.

vLLM's Model Runner V2, which needs Triton, reports it (``enable_return_routed_experts``, output field
``routed_experts``). On a CPU without Triton this module sets vLLM's own callbacks on its routers. It reads from the
model runner to which request each row of a step belongs, its position and its token id. This works for prefill, decode,
chunks of a prompt, several requests in one step, and requests that were preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.engines.environment import engine_has_triton
from trl_offpolicy.engines.routing.storage import UNKNOWN


@dataclass(frozen=True)
class EngineRoutes:
    """One sequence's routing.

    Args:
        ids: tokens that the engine was fed, so without the last one that it sampled.
        routes: (tokens, layers with experts, k) expert ids.
    """

    ids: tuple[int, ...]
    routes: Tensor


def turn_unreported(turn: int, completion: int, found: str) -> ValueError:
    """The error for a turn whose routing the engine did not report. Its tokens would silently be routed anew.

    Args:
        turn: number of the turn, from 1.
        completion: number of the completion in its batch, from 0.
        found: what was reported in its place, in words.
    """
    return ValueError(
        f"routed_experts must hold the routing of every turn, but got {found} for turn {turn} of completion "
        f"{completion}. Let the engine report at every request: engine.return_routing: true (leave "
        "enable_prefix_caching out), or Rollouts.routed_experts from each generate of an engine of your own. Or set "
        "routing_replay: none and leave out engine.return_routing."
    )


class RouteStore:
    """Routing by the tokens of a sequence, so that the engine's names of its requests do not matter."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], EngineRoutes] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, routes: EngineRoutes) -> None:
        """Keep one sequence; a later one with the same tokens replaces it."""
        self._known[routes.ids] = routes

    def add_unsampled(self, ids: Sequence[int]) -> None:
        """Keep a prompt whose reply cannot be used: its routes as far as a longer record tells them, else none.

        Nothing is kept if nothing else is known. A filler in the reply's place is then found, and routes freely.
        """
        row, known = tuple(ids), next(iter(self._known.values()), None)
        if known is None or row in self._known:
            return
        begun = next((item.routes for item in self._known.values() if item.ids[: len(row)] == row), None)
        nothing = torch.full((len(row), *known.routes.shape[1:]), UNKNOWN, dtype=torch.int16)
        self.add(EngineRoutes(row, nothing if begun is None else begun[: len(row)]))

    def find(self, ids: Sequence[int]) -> EngineRoutes | None:
        """The record of a sequence: its own, part of a longer one's, or the longest one of its beginning.

        TRL may train on less than was sampled (a response that it masks or cuts), or on more (a tool's text after it).
        """
        row = tuple(ids)
        known = self._known.get(row[:-1]) or self._known.get(row)
        if known is not None:
            return known
        for item in self._known.values():
            if item.ids[: len(row)] == row:
                return EngineRoutes(row, item.routes[: len(row)])
        parts = (item for item in self._known.values() if row[: len(item.ids)] == item.ids)
        return max(parts, key=lambda item: len(item.ids), default=None)

    def clear(self) -> None:
        """Forget the records of all sequences."""
        self._known.clear()


class RoutedLLM:
    """vLLM's ``LLM``, whose :attr:`store` holds the routing of what it generated.

    Args:
        llm: built with :func:`routing_arguments`.

    Raises:
        ValueError: the model is dense, or prompts would be taken from a cache and not be routed.
        NotImplementedError: vLLM cannot report the routing of its kernel.
    """

    store: RouteStore
    """The routing of everything that was generated since it was cleared."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.store = RouteStore()
        self._capture: StepCapture | None = None
        if not engine_has_triton():
            if llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
                raise ValueError("engine.enable_prefix_caching must be False to read the engine's routing, but is on.")
            self._capture = StepCapture(llm.llm_engine.model_executor.driver_worker.model_runner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with vLLM, and add the routing to :attr:`store`."""
        if self._capture is None:
            outputs = self._llm.generate(*args, **kwargs)
            routes = reported_routes(outputs)
        else:
            self._capture.begin()
            outputs = self._llm.generate(*args, **kwargs)
            routes = self._capture.end()
        for item in routes:
            self.store.add(item)
        return outputs


def routing_arguments() -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` with which :class:`RoutedLLM` can read its routing."""
    return {"enable_return_routed_experts": True} if engine_has_triton() else {"enable_prefix_caching": False}


def reported_routes(outputs: Sequence[Any]) -> list[EngineRoutes]:
    """The routes in vLLM's ``routed_experts``, (tokens, all layers, k); layers without experts are removed later."""
    return [
        routes_of(request.prompt_token_ids, output.token_ids, output.routed_experts)
        for request in outputs
        for output in request.outputs
        if output.routed_experts is not None
    ]


def routes_of(prompt_ids: Sequence[int], completion_ids: Sequence[int], reported: np.ndarray) -> EngineRoutes:
    """The routes of one completion: a row for each token that vLLM was fed, so not for the last one that it sampled.

    Raises:
        ValueError: rows are missing.
    """
    ids = (*prompt_ids, *completion_ids)
    if len(reported) < len(ids) - 1:
        raise ValueError(f"routed_experts must have {len(ids) - 1} rows, one for each token fed, not {len(reported)}.")
    small = reported if reported.dtype == np.uint8 else reported.astype(np.int16)
    return EngineRoutes(ids[: len(reported)], torch.from_numpy(small))


class StepCapture:
    """Collects what the routers of vLLM's model choose, step by step.

    Args:
        runner: vLLM's model runner in this process.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self._runner = runner
        self._layers = sorted(module.layer_id for module in runner.model.modules() if isinstance(module, MoERunner))
        if not self._layers:
            raise ValueError("the engine's model must be a mixture of experts to read its routing, but it is dense.")
        self._open = False
        self._step: dict[int, Tensor] = {}
        self._parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        bind_routed_experts_capturer(runner.model, self)

    def begin(self) -> None:
        """Start to collect, with nothing collected yet."""
        self._parts, self._step, self._open = {}, {}, True

    def end(self) -> list[EngineRoutes]:
        """Stop and return what was collected, one entry per request."""
        self._open = False
        parts, self._parts = self._parts, {}
        return [joined(chunks) for chunks in parts.values()]

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Take the ids of a layer, (tokens of the step, k). vLLM calls this in every layer."""
        if not self._open:
            return
        self._step[layer_id] = topk_ids.to("cpu", torch.int16, copy=True)
        if layer_id == self._layers[-1]:
            self._close_step()

    def _close_step(self) -> None:
        """Assign every row of the step to its request."""
        runner, batch = self._runner, self._runner.input_batch
        starts = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        routes = torch.stack([self._step[layer] for layer in self._layers], dim=1)
        positions = runner.positions[: starts[-1]].to("cpu", torch.long, copy=True)
        tokens = runner.input_ids.cpu[: starts[-1]].clone()
        for request, start, stop in zip(batch.req_ids, starts, starts[1:], strict=False):
            part = (positions[start:stop], tokens[start:stop], routes[start:stop])
            self._parts.setdefault(request, []).append(part)
        self._step = {}


def joined(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> EngineRoutes:
    """Join one request's (positions, token ids, routes) of all steps into one sequence.

    A position that was computed again (after preemption) keeps its first routing, because the first pass gave the
    log-prob that was reported.
    """
    positions, tokens, routes = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    length = int(positions.max()) + 1
    first = torch.full((length,), -1, dtype=torch.long)
    order = torch.arange(len(positions) - 1, -1, -1)
    first[positions[order]] = order  # the last write wins, and it is that of the earliest step
    if bool((first < 0).any()):
        raise RuntimeError("the engine must route every position of a sequence, but some came from a cache.")
    return EngineRoutes(tuple(tokens[first].tolist()), routes[first])


def placed_routes(
    found: Sequence[EngineRoutes | None], mask: Tensor, *, numbers: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The engine's routing on the positions of the trainer's input.

    Args:
        found: the record of each row, of its attended tokens from the first on; None = there is none.
        mask: (B, L) 0/1, 1 at the attended tokens.
        numbers: numbers of the decoder layers with experts.
        dtype: dtype of the result.

    Returns:
        (B, L, layers, k); -1 on padding and on tokens that the engine was never fed (the last of a completion, text of
        a tool at its end).

    Raises:
        ValueError: a row has no record, or the layers do not fit.
    """
    missing = [index for index, item in enumerate(found) if item is None]
    if missing:
        raise ValueError(f"the engine must know the routing of every completion, but not of rows {missing[:8]}.")
    known = [item for item in found if item is not None]
    top_k = known[0].routes.shape[-1]
    out = torch.full((*mask.shape, len(numbers), top_k), UNKNOWN, dtype=dtype)
    for index, item in enumerate(known):
        places = mask[index].nonzero()[: len(item.ids), 0].cpu()
        out[index, places] = _with_experts(item.routes[: len(places)], numbers).to(dtype)
    return out


def _with_experts(routes: Tensor, numbers: Sequence[int]) -> Tensor:
    """(tokens, layers with experts, k), from routes of the layers with experts or of all layers."""
    layers = routes.shape[1]
    if layers == len(numbers):
        return routes
    if layers <= numbers[-1]:
        raise ValueError(f"the engine must report layers {list(numbers)}, but reported {layers} layers.")
    return routes[:, list(numbers)]
