"""The engine's routing on the trainer's positions, without an engine: parts, preemption, prefixes, padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trl_offpolicy.routing.engine import (
    EngineRoutes,
    RouteStore,
    StepCapture,
    aligned_routes,
    joined,
    reported_routes,
)


def part(positions: list[int], ids: list[int], mark: int) -> tuple[Tensor, Tensor, Tensor]:
    """Routes (tokens, 2 layers, 1 expert): layer 0 tells the token, layer 1 the step."""
    routes = torch.tensor([[[token], [mark]] for token in ids], dtype=torch.int16)
    return torch.tensor(positions), torch.tensor(ids), routes


def test_chunks_and_decode_steps_are_joined_by_position() -> None:
    found = joined([part([0, 1], [5, 6], 0), part([2], [7], 1), part([3], [8], 2)])
    assert found.ids == (5, 6, 7, 8)
    assert found.routes[:, 0, 0].tolist() == [5, 6, 7, 8] and found.routes[:, 1, 0].tolist() == [0, 0, 1, 2]


def test_after_preemption_the_first_pass_counts() -> None:
    found = joined([part([0, 1], [5, 6], 0), part([2], [7], 1), part([0, 1, 2, 3], [5, 6, 7, 8], 2)])
    assert found.routes[:, 1, 0].tolist() == [0, 0, 1, 2] and found.ids == (5, 6, 7, 8)


def test_a_hole_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="some came from a cache"):
        joined([part([4, 5], [5, 6], 0)])


class Runner:
    """What :class:`StepCapture` reads of vLLM's model runner."""

    def step(self, capture: Any, rows: dict[str, tuple[list[int], list[int]]]) -> None:
        """``rows``: request -> (positions, ids), in the order of the batch; the step is padded by two rows."""
        lengths = [len(ids) for _, ids in rows.values()]
        self.input_batch = SimpleNamespace(num_reqs=len(rows), req_ids=[*rows, "stale"])
        self.query_start_loc = SimpleNamespace(np=np.concatenate([[0], np.cumsum(lengths), [99, 99]]))
        self.positions = torch.tensor([p for positions, _ in rows.values() for p in positions] + [0, 0])
        ids = torch.tensor([token for _, tokens in rows.values() for token in tokens] + [0, 0])
        self.input_ids = SimpleNamespace(cpu=ids)
        for layer in capture._layers:
            capture.capture(layer, (ids * 10 + layer).unsqueeze(-1).to(torch.int32))


def a_capture(runner: Runner) -> StepCapture:
    capture = StepCapture.__new__(StepCapture)
    capture._runner, capture._layers = runner, [1, 3]
    capture._open, capture._step, capture._parts = False, {}, {}
    return capture


def test_rows_of_a_step_go_to_their_requests() -> None:
    """Two requests, one of them in chunks, their order in the batch changed; what is outside generate is not kept."""
    runner = Runner()
    capture = a_capture(runner)
    runner.step(capture, {"sync check": ([0], [9])})
    capture.begin()
    runner.step(capture, {"a": ([0, 1], [2, 3])})
    runner.step(capture, {"b": ([0], [4]), "a": ([2], [5])})
    runner.step(capture, {"a": ([3], [6]), "b": ([1, 2], [7, 8])})
    found = capture.end()
    assert [item.ids for item in found] == [(2, 3, 5, 6), (4, 7, 8)]
    for item in found:
        assert item.routes[:, 0, 0].tolist() == [10 * token + 1 for token in item.ids]
        assert item.routes[:, 1, 0].tolist() == [10 * token + 3 for token in item.ids]
    runner.step(capture, {"later": ([0], [9])})
    assert capture.end() == []


def store_of(*sequences: tuple[int, ...]) -> RouteStore:
    store = RouteStore()
    for ids in sequences:
        store.add(EngineRoutes(ids, torch.tensor([[[t, t + 1], [t + 2, t + 3]] for t in ids])))
    return store


def test_records_are_found_by_their_tokens() -> None:
    store = store_of((1, 2, 3), (1, 2, 3, 4, 5), (1, 2), (7,))
    for row, ids in {(1, 2, 3, 4): (1, 2, 3), (1, 2, 3, 4, 5, 6): (1, 2, 3, 4, 5), (1, 2, 3, 9, 9): (1, 2, 3)}.items():
        found = store.find(row)
        assert found is not None and found.ids == ids
    assert store.find([8, 7]) is None
    store.clear()
    assert len(store) == 0


def test_records_stand_on_the_trainers_positions() -> None:
    """Left-padded prompt, right-padded completion; the last token was never fed."""
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    rows = [[1, 2, 3], [4, 5, 6, 7, 8]]
    found = aligned_routes(store_of((1, 2), (4, 5, 6, 7)), rows, mask, numbers=(0, 1), dtype=torch.int8)
    assert found.dtype == torch.int8 and found[:, :, 0, 0].tolist() == [[-1, 1, 2, -1, -1], [4, 5, 6, 7, -1]]
    assert found[1, 2].tolist() == [[6, 7], [8, 9]]
    last = aligned_routes(store_of((1, 2), (4, 5, 6, 7)), rows, mask, numbers=(1,), dtype=torch.int8)
    assert last[:, :, 0, 0].tolist() == [[-1, 3, 4, -1, -1], [6, 7, 8, 9, -1]], "of all layers those with experts"
    with pytest.raises(ValueError, match=r"not of rows \[1\]"):
        aligned_routes(store_of((1, 2)), rows, mask, numbers=(0, 1), dtype=torch.int8)
    with pytest.raises(ValueError, match=r"must report layers \[1, 3, 5\], but reported 2 layers"):
        aligned_routes(store_of((1, 2), (4, 5, 6, 7)), rows, mask, numbers=(1, 3, 5), dtype=torch.int8)


def test_the_field_of_vllm() -> None:
    """(tokens, all layers, k) uint8, as vLLM 0.31 documents it; a completion without it is passed over."""
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    outputs = [SimpleNamespace(token_ids=[3, 4], routed_experts=routes), SimpleNamespace(routed_experts=None)]
    (found,) = reported_routes([SimpleNamespace(prompt_token_ids=[1, 2], outputs=outputs)])
    assert found.ids == (1, 2, 3) and found.routes.tolist() == routes.tolist() and found.routes.dtype == torch.int16
