"""The engine's routing on the trainer's positions, without an engine: parts, preemption, prefixes, padding."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trl_offpolicy.engines.engine import EngineError, Sampling
from trl_offpolicy.engines.routing import reported as routing_engine
from trl_offpolicy.engines.routing.reported import (
    EngineRoutes,
    RouteStore,
    StepCapture,
    joined,
    placed_routes,
    reported_routes,
    routes_of,
)
from trl_offpolicy.engines.server import engine as server
from trl_offpolicy.engines.server.client import Patience
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.trl import engine as trl
from trl_offpolicy.trl.engine import TRLEngine, WithAdapter


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
    cut = store.find([1, 2, 3, 4][:1])
    assert cut is not None and cut.ids == (1,) and cut.routes.tolist() == [[[1, 2], [3, 4]]], "masked: the prompt alone"
    cut = store.find([1, 2, 3, 4, 5][:4])
    assert cut is not None and cut.ids == (1, 2, 3), "of what was fed"
    assert store.find([8, 7]) is None
    store.clear()
    assert len(store) == 0


def aligned_routes(store: RouteStore, rows: Any, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """The records that a store has of these rows, placed as the TRL trainer does it."""
    return placed_routes([store.find(row) for row in rows], mask, **options)


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
    assert found.ids == (1, 2, 3) and found.routes.tolist() == routes.tolist() and found.routes.dtype == torch.uint8
    with pytest.raises(ValueError, match=r"routed_experts must have 3 rows, one for each token fed, not 2"):
        routes_of([1, 2], [3, 4], routes[:2])


def packed(routes: np.ndarray) -> str:
    """As vLLM's server sends an array."""
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


class Client:
    """A vLLM server's answers; ``with_routes`` False = the report is missing from a completion."""

    base_url, patience = "http://127.0.0.1:1", Patience(retries=0)

    def __init__(self, *, reports: bool = True, with_routes: bool = True) -> None:
        self.reports, self.with_routes = reports, with_routes

    def wait_until_up(self) -> None:
        """It is."""

    def get(self, path: str, **_: Any) -> Any:
        config = {"aux_output_config": {"enable_return_routed_experts": self.reports}}
        return {
            "/v1/models": {"data": [{"id": "policy"}]},
            "/openapi.json": {"paths": {"/weight_info": {}}},
            "/server_info": {"vllm_config": config},
        }[path]

    def post(self, path: str, body: dict[str, Any], **_: Any) -> Any:
        rows = len(body["prompt"]) + 1
        routes = np.full((rows, 2, 2), body["prompt"][0], dtype=np.uint8) if self.with_routes else None
        choice = {
            "token_ids": [8, 9],
            "logprobs": {"token_logprobs": [-1.0, -2.0]},
            "finish_reason": "length",
            "routed_experts": None if routes is None else packed(routes),
        }
        return {"choices": [choice] * body["n"]}


def engine_of(client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ServerEngine:
    monkeypatch.setattr(server, "ServerClient", lambda *_, **__: client)
    return ServerEngine(client.base_url, folder=folder, **options)


def test_the_report_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked for each completion of each prompt where it is asked for; a server without it is refused."""
    engine = engine_of(Client(), tmp_path, monkeypatch, return_routing=True)
    rollouts = engine.generate([[3, 4], [5, 6, 7]], Sampling(max_tokens=2), n=2)
    assert rollouts.routed_experts is not None
    assert [len(item) for item in rollouts.routed_experts] == [3, 3, 4, 4]
    assert [item.unique().tolist() for item in rollouts.routed_experts] == [[3], [3], [5], [5]]
    assert engine_of(Client(), tmp_path, monkeypatch).generate([[3]], Sampling(max_tokens=2)).routed_experts is None
    with pytest.raises(EngineError, match="-- --enable-return-routed-experts"):
        engine_of(Client(reports=False), tmp_path, monkeypatch, return_routing=True)
    silent = engine_of(Client(with_routes=False), tmp_path, monkeypatch, return_routing=True)
    with pytest.raises(EngineError, match="routing of every completion, but one came without"):
        silent.generate([[3, 4]], Sampling(max_tokens=2))
    garbled = Client()
    choice = {"token_ids": [8], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop", "routed_experts": "AA"}
    monkeypatch.setattr(garbled, "post", lambda *_, **__: {"choices": [choice]})
    with pytest.raises(EngineError, match="report of its routing cannot be read"):
        engine_of(garbled, tmp_path, monkeypatch, return_routing=True).generate([[3, 4]], Sampling(max_tokens=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_the_rows_of_its_own_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Ranks may ask for different numbers of rows: some of their rows called a tool, others are done."""
    prompts = [[[3, 4]], [[5, 6, 7], [9]]]
    engine = TRLEngine.__new__(TRLEngine)
    engine._server = engine_of(Client(), tmp_path, monkeypatch, return_routing=True)
    engine.routes = RouteStore()
    monkeypatch.setattr(TRLEngine, "_sampling", lambda self: Sampling(max_tokens=2))
    monkeypatch.setattr(trl, "gather_object", lambda mine: prompts)
    monkeypatch.setattr(trl, "scattered", lambda parts: parts[rank])
    _, completions, logps, _ = engine._generate_on_server(prompts[rank], None, 1, None)
    assert completions == [[8, 9]] * len(prompts[rank]) and logps == [[[-1.0], [-2.0]]] * len(prompts[rank])
    assert len(engine.routes) == len(prompts[rank])
    for prompt in prompts[rank]:
        found = engine.routes.find([*prompt, 8, 9])
        assert found is not None and found.ids == (*prompt, 8) and found.routes.unique().tolist() == [prompt[0]]


@pytest.mark.parametrize("transfer", ["auto", "adapter"])
def test_the_engine_in_this_process_keeps_its_routes(monkeypatch: pytest.MonkeyPatch, transfer: str) -> None:
    """Also behind the wrapper that names the adapter in every request."""
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    vllm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    monkeypatch.setattr(routing_engine, "engine_has_triton", lambda: True)
    monkeypatch.setattr(TRLEngine, "_default_arguments", lambda self: {})
    monkeypatch.setattr(trl.vllm_generation.VLLMGeneration, "_init_vllm", lambda self: setattr(self, "llm", vllm))
    engine = TRLEngine.__new__(TRLEngine)
    engine.settings = EngineSettings.parse({"return_routing": True, "transfer": transfer})
    engine._run_seed, engine.tensor_parallel_size = 42, 1
    engine.accelerator = SimpleNamespace(process_index=0, num_processes=1)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    engine._start_in_process()
    assert engine.routes is not None and engine.routes is engine.llm.store
    assert isinstance(engine.llm, WithAdapter) is (transfer == "adapter")


def test_a_path_without_a_report_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"engine\.transfer must be folder, adapter, broadcast or auto with routing_replay r3"
    ):
        EngineSettings.parse({"return_routing": True, "transfer": "nccl"})
    assert EngineSettings.parse({"return_routing": True}).on_server("cuda")
    assert EngineSettings.parse({}).on_server("cuda", ahead=True)
    assert EngineSettings.parse({}).on_server("cuda", truncated=True)
    assert not EngineSettings.parse({"transfer": "nccl"}).on_server("cuda", truncated=True)
    assert not EngineSettings.parse({"transfer": "nccl"}).on_server("cuda", ahead=True)
    assert not EngineSettings.parse({}).on_server("cuda") and EngineSettings.parse({}).on_server("cpu")


@pytest.mark.parametrize(
    ("settings", "device", "no_mask", "warns"),
    [({}, "cuda", "it was started without", True), ({}, "cuda", None, False), ({}, "cpu", "it was started", False),
     ({"transfer": "folder"}, "cuda", "it was started without", False)],
)  # fmt: skip
def test_nccl_given_up_for_nothing_is_said(
    settings: dict[str, Any], device: str, no_mask: str | None, warns: bool
) -> None:
    accelerator = SimpleNamespace(device=torch.device(device), is_main_process=True)
    engine: Any = SimpleNamespace(settings=EngineSettings.parse(settings), accelerator=accelerator, no_mask=no_mask)
    engine._asks_for_masks, engine._asks_ahead = True, False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TRLEngine._warn_of_slower_weights(engine)
    said = [str(one.message) for one in caught]
    assert bool(said) is warns and all("set engine.transfer: nccl" in text for text in said)
