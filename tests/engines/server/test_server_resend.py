"""A server's weights when something goes wrong, with a double of it; the real one is in test_server_faults.py."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_offpolicy.engines.engine import EngineError, SyncError
from trl_offpolicy.engines.server.adapters import ServerAdapters
from trl_offpolicy.engines.server.checks import before_others
from trl_offpolicy.engines.server.client import Patience
from trl_offpolicy.engines.server.contact import Refused
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.weights.files import write_weights


class RestartedServer:
    """Answers as a vLLM server that has forgotten its weights, and declines a reset beside requests."""

    base_url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.label = "default"
        self.loads = 0
        self.asked_before_loading = 0

    def get(self, path: str) -> Any:
        label = self.label
        time.sleep(0.01)  # long enough for every other request to read the same label
        return {"weight_version": label}

    def post(self, path: str, body: dict[str, Any], **_: Any) -> Any:
        if path == "/collective_rpc":
            self.loads += 1
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/v1/completions":
            self.asked_before_loading += self.label != "mine:4"
            return {"choices": [{}]}
        return {"success": self.loads == 1}  # of the reset: once there are weights, there are requests


def engine_of(server: RestartedServer, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ServerEngine:
    monkeypatch.setattr("trl_offpolicy.engines.server.checks.RESET_PATIENCE", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr("trl_offpolicy.engines.server.engine.ServerClient", lambda *_, **__: _Started())
        patched.setattr("trl_offpolicy.engines.server.engine.server_config", lambda *_: {})
        patched.setattr("trl_offpolicy.engines.server.engine.require_ready", lambda *_, **__: ())
        engine = ServerEngine(server.base_url, folder=folder, run="mine")
    engine.client = server  # type: ignore[assignment]
    engine.version, engine._sent = 4, folder
    return engine


class Weights:
    """One tensor to send."""

    def __init__(self, is_main: bool) -> None:
        self.is_main = is_main

    def merged(self):
        yield "a", torch.zeros(1)


class _Started:
    base_url, patience = RestartedServer.base_url, Patience()

    def wait_until_up(self) -> None: ...

    def get(self, path: str) -> Any:
        return {"data": [{"id": "model"}], "paths": {}}


def test_only_one_request_sends_the_weights_and_none_goes_before_it(monkeypatch, tmp_path):
    server = RestartedServer()
    engine = engine_of(server, monkeypatch, tmp_path)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: engine._post_completion({}), range(16)))
    assert (server.loads, server.label, server.asked_before_loading) == (1, "mine:4", 0)


class KilledBeforeTheLabel(RestartedServer):
    """Is killed and started anew after its first load, so that the request for the label is repeated."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def post(self, path: str, body: dict[str, Any], *, recover: Any = None, **_: Any) -> Any:
        if path == "/update_weight_version" and body["new_version"] == "mine:4" and self.left:
            self.left -= 1
            self.label = "default"
            recover()  # before the next try
        super().post(path, body)
        return {"success": True}


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_started_anew_before_its_label_is_loaded_again(monkeypatch, tmp_path, times):
    server = KilledBeforeTheLabel(times)
    engine = engine_of(server, monkeypatch, tmp_path)
    engine._load(tmp_path)
    assert (server.label, server.loads) == ("mine:4", times + 1)


def test_a_server_that_is_always_started_anew_is_an_error(monkeypatch, tmp_path):
    engine = engine_of(KilledBeforeTheLabel(99), monkeypatch, tmp_path)
    with pytest.raises(SyncError, match="started anew at each of 3 loads"):
        engine._load(tmp_path)


class Loads(RestartedServer):
    """Notes the folders that it loads; is started anew once, between being asked for its label and being given one."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: list[str] = []
        self.restarts = False

    def post(self, path: str, body: dict[str, Any], *, recover: Any = None, **_: Any) -> Any:
        if path == "/update_weight_version" and body["new_version"].startswith("loading") and self.restarts:
            self.restarts, self.label = False, "default"
            if recover is not None:
                recover()  # before the next try
        if path == "/collective_rpc":
            self.folders.append(Path(body["kwargs"]["weights_path"]).name)
        super().post(path, body)
        return {"success": True}


def test_a_part_is_loaded_on_the_base_that_the_server_has_and_else_after_it(monkeypatch, tmp_path):
    server = Loads()
    engine = engine_of(server, monkeypatch, tmp_path)
    base, one, two = (tmp_path / f"mine-{version}" for version in (1, 2, 3))
    write_weights(base, [("a", torch.zeros(1)), ("b", torch.zeros(1))])
    for folder in (one, two):
        write_weights(folder, [("a", torch.ones(1))], base=base)
    for version, folder in enumerate((base, one, two), start=1):
        engine.version = version
        engine._load(folder)
    assert server.folders == ["mine-1", "mine-2", "mine-3"]
    server.folders, server.label = [], "default"  # started anew between two syncs
    engine._load(two)
    assert server.folders == ["mine-1", "mine-3"]
    server.folders, server.restarts = [], True  # and in the middle of one
    engine._load(two)
    assert server.folders == ["mine-1", "mine-3"] and server.label == "mine:3"


def test_of_two_ranks_that_meet_a_fresh_server_one_sends(monkeypatch, tmp_path):
    """A rank that sends nothing at a sync checks as well: else it would sample from the old weights, unseen."""
    server = RestartedServer()
    engines = [engine_of(server, monkeypatch, tmp_path) for _ in range(2)]
    for engine, is_main in zip(engines, (True, False), strict=True):
        engine._sent = None
        engine.bind(Weights(is_main))
        engine.sync_weights(4)
    server.label, server.loads = "default", 0
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: engines[i % 2]._post_completion({}), range(16)))
    assert (server.loads, server.label, server.asked_before_loading) == (1, "mine:4", 0)


def test_a_rank_that_cannot_send_waits_for_the_main_one(monkeypatch, tmp_path):
    server = RestartedServer()
    engine = engine_of(server, monkeypatch, tmp_path)
    engine._sent = tmp_path / "on another machine"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine._post_completion, {})
        time.sleep(0.3)
        assert not waiting.done() and server.loads == 0
        server.label = "mine:4"
        waiting.result(timeout=5)
    server.label = "default"
    monkeypatch.setattr("trl_offpolicy.engines.server.engine.MAIN_PATIENCE", 0.0)
    with pytest.raises(EngineError, match=r"lacks version 4, which this rank cannot send: .* is on another machine"):
        engine._post_completion({})


def test_every_request_meets_the_weights_of_another_run(monkeypatch, tmp_path):
    server = RestartedServer()
    engine = engine_of(server, monkeypatch, tmp_path)
    server.label = "theirs:9"
    with pytest.raises(EngineError, match=r"holds weights of another run \(theirs:9; this run's are mine:4\)"):
        engine._post_completion({})
    assert server.loads == 0


def test_the_double_declines_a_second_sending(monkeypatch, tmp_path):
    server = RestartedServer()
    engine = engine_of(server, monkeypatch, tmp_path)
    engine._load(tmp_path)
    with pytest.raises(SyncError, match="did not reset its prefix cache"):
        engine._load(tmp_path)
    with pytest.raises(EngineError, match=r"cannot be used: .* did not reset its prefix cache"):
        engine._post_completion({})


def test_the_other_ranks_are_not_left_in_the_gather_when_the_disk_is_full(monkeypatch, tmp_path):
    engine = engine_of(RestartedServer(), monkeypatch, tmp_path)
    seen = []

    class Source:
        is_main = True

        def merged(self):
            for name in "abc":
                seen.append(name)
                yield name, torch.zeros(1)

    def full(target, weights, base=None):
        next(weights)
        raise SyncError("no space left")

    monkeypatch.setattr("trl_offpolicy.engines.server.engine.write_weights", full)
    engine.bind(Source())
    with pytest.raises(SyncError, match="no space left"):
        engine.sync_weights(5)
    assert seen == ["a", "b", "c"]


class FreshOfAdapters(RestartedServer):
    """Has lost its adapters, and refuses requests for those that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[str] = []
        self.answered: list[str] = []

    def post(self, path: str, body: dict[str, Any], **_: Any) -> Any:
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.held:
                raise Refused(400, "has already been loaded")
            assert body["lora_path"].endswith(body["lora_name"].removeprefix("policy-").partition(".")[0])
            self.held.append(body["lora_name"])
        elif path == "/v1/completions":
            if body["model"] not in self.held:
                raise Refused(404, "no such model")
            self.answered.append(body["model"])
        return super().post(path, body) or {"success": True}

    def once(self, method: str, path: str, *, json: dict[str, Any], **_: Any) -> None:
        self.held.remove(json["lora_name"])


def test_requests_of_several_versions_find_a_server_started_anew(monkeypatch, tmp_path):
    """Each gets the adapter that it began with, and the newest is the one with the label."""
    server = FreshOfAdapters()
    engine = engine_of(server, monkeypatch, tmp_path)
    adapters = engine._adapters = ServerAdapters(server, tmp_path, "mine")  # type: ignore[arg-type]
    engine.serve_several(lambda: {3})
    old, engine._adapter = adapters.new_name(3), adapters.new_name(4)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: engine._post_completion({"model": old} if i % 2 else {}), range(16)))

    assert server.label == "mine:4:adapter"
    assert sorted(server.held) == sorted([old, engine._adapter])
    assert sorted(server.answered) == sorted([old, engine._adapter] * 8)
    assert set(adapters.unload_all_but(4)) == {"mine-3", "mine-4"}  # in use
    engine.serve_several(set)
    assert adapters.unload_all_but(4) == ["mine-4"] and server.held == [engine._adapter]


class Scorer(RestartedServer):
    """Keeps the bodies of requests for completions; knows no log-probs."""

    def post(self, path: str, body: dict[str, Any], **_: Any) -> Any:
        self.body = body
        return {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -0.5}}]}]}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"scheduler_config": {"policy": "priority"}}, {"priority": -1}),
        ({"scheduler_config": {"policy": "fcfs"}}, {}),
        ({}, {}),
    ],
)
def test_the_proof_of_a_sync_goes_before_rollouts_where_the_server_can(monkeypatch, tmp_path, config, field):
    """A server that takes requests in their order refuses the field."""
    server = Scorer()
    server.label = "mine:4"
    engine = engine_of(server, monkeypatch, tmp_path)
    engine._first = before_others(config)
    assert engine.score([[7, 5]]) == [[-0.5]]
    assert {name: value for name, value in server.body.items() if name == "priority"} == field


def test_names_of_adapters(tmp_path):
    """A version that is sent again has another name; one that could not be sent leaves the name before it."""
    server = FreshOfAdapters()
    adapters = ServerAdapters(server, tmp_path, "mine")  # type: ignore[arg-type]
    adapters.begin_sync()
    adapters.load(first := adapters.new_name(0))
    adapters.begin_sync()
    adapters.load(second := adapters.new_name(0))
    assert first != second == adapters.name_of(0)
    assert adapters.unload_all_but(0) == ["mine-0"] and server.held == [second]
    adapters.begin_sync()
    adapters.forget(adapters.new_name(0))
    assert adapters.name_of(0) == second
    adapters.forget(adapters.new_name(1))
    assert adapters.unload_all_but(0) == ["mine-0"] and server.held == [second]
