"""Loads that fail on real servers, what they leave, and what a killed server leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from engines.server.servers import QUICK, Server, free_port
from engines.server.test_bare_server import bare_server
from engines.test_interrupted import hears_ctrl_c, interrupted
from engines.test_launch import alive
from peft import LoraConfig, get_peft_model
from processes import run_command
from tiny_models import tiny_model

from trl_offpolicy.engines import launch
from trl_offpolicy.engines.engine import EngineError, Sampling, SyncError
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.server.contact import meet
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.sync import SyncCheck
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts.scoring import sequence_logps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
PROBE = [[5, 6, 7, 20, 33, 4], [8, 9, 10, 11]]
SCRIPT = Path(__file__).with_name("server_run.py")
SHORT = Sampling(max_tokens=6)
KEY = "secret"
SENT = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(model_folder(), log, lora_rank=8, api_key=KEY).start()
    yield running
    running.kill()


@pytest.fixture
def engine(server: Server, fresh_model: Callable[..., Any], tmp_path: Path) -> ServerEngine:
    """With trained weights of version 4 on the server."""
    return synced(server.url, fresh_model(), tmp_path / "w")


def synced(url: str, model: Any, folder: Path) -> ServerEngine:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    engine = ServerEngine(url, folder=folder, transfer="folder", api_key=KEY, patience=QUICK)
    engine.trained = model  # type: ignore[attr-defined]
    engine.bind(ModelWeights(model))
    engine.sync_weights(4)
    assert agrees(engine)
    return engine


def agrees(engine: Any, model: Any = None) -> bool:
    trainer = sequence_logps(engine.trained if model is None else model, PROBE, pad=0)
    return SyncCheck().observe(4, engine=engine.score(PROBE), trainer=trainer) > 0.999


def send(engine: ServerEngine, model: Any, *, unseen: bool = False) -> str:
    """Sync ``model``, which must fail; returns what is said. ``unseen``: as if the shapes could not be compared."""
    engine.bind(ModelWeights(model))
    if unseen:
        engine._require_fit = lambda: None  # type: ignore[method-assign]
    with pytest.raises(SyncError) as caught:
        engine.sync_weights(5)
    return str(caught.value)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2 would have no place"),
        ({"num_hidden_layers": 1}, "model.layers.1 of the engine would keep its old weights"),
        ({"intermediate_size": 128}, "mlp.gate_proj.weight has shape (128, 64) in the trainer, but (64, 64)"),
        ({"hidden_size": 128}, "embed_tokens.weight has shape (128, 128) in the trainer, but (128, 64)"),
        ({"num_attention_heads": 2}, "q_proj.weight has shape (128, 64) in the trainer, but (64, 64)"),
    ],
)
def test_another_model_is_refused_before_anything_is_sent(
    engine: ServerEngine, server: Server, shape: dict[str, int], said: str
) -> None:
    label = engine._server_label()
    text = send(engine, tiny_model(**shape))
    assert said in text and "Nothing was sent" in text and server.url in text
    assert engine._server_label() == label and engine.version == 4
    assert agrees(engine) and len(engine.generate(PROMPTS, SHORT, n=2)) == 4


def test_an_adapter_of_another_model_is_refused_before_it_is_sent(server: Server, tmp_path: Path) -> None:
    relabel(server, "default")
    config = LoraConfig(r=4, target_modules=["down_proj"], task_type="CAUSAL_LM")
    engine = ServerEngine(server.url, folder=tmp_path / "a", transfer="adapter", api_key=KEY, patience=QUICK)
    text = send(engine, get_peft_model(tiny_model(intermediate_size=128), config))
    assert "down_proj has 128 inputs, but the engine's module has 64" in text


@pytest.mark.parametrize("shape", [{"num_hidden_layers": 3}, {"hidden_size": 128}])
def test_a_load_that_fails_in_the_middle_leaves_the_old_weights_and_their_label(
    engine: ServerEngine, shape: dict[str, int]
) -> None:
    label = engine._server_label()
    text = send(engine, tiny_model(**shape), unseen=True)
    assert "did not load" in text and f"It has the weights of {label} again." in text
    assert "Error" in text  # the worker's own error, by name
    assert engine._server_label() == label and agrees(engine)
    engine.bind(ModelWeights(engine.trained))  # type: ignore[attr-defined]
    engine.sync_weights(6)  # the right model is taken at the first try
    assert agrees(engine)


def test_without_weights_to_go_back_to_the_server_refuses_by_itself(
    engine: ServerEngine, server: Server, tmp_path: Path
) -> None:
    relabel(server, "theirs:3")
    other = ServerEngine(server.url, folder=tmp_path / "b", transfer="folder", api_key=KEY, patience=QUICK)
    text = send(other, tiny_model(hidden_size=128), unseen=True)
    assert "marked unusable" in text
    for label in (engine._server_label(), "loading:theirs:9"):
        relabel(server, label)
        body = {"model": "policy", "prompt": [5, 6], "max_tokens": 2}
        answer = requests.post(f"{server.url}/v1/completions", json=body, headers=SENT, timeout=60)
        assert answer.status_code == 409 and "weights cannot be used" in answer.text
        with pytest.raises(EngineError, match=f"{server.url} cannot be used: "):
            engine.generate(PROMPTS, SHORT)
    engine.sync_weights(7)  # whole weights make it usable again
    assert agrees(engine) and len(engine.generate(PROMPTS, SHORT)) == 2


def relabel(server: Server, label: str) -> None:
    route = f"{server.url}/update_weight_version"
    requests.post(route, json={"new_version": label}, headers=SENT, timeout=60).raise_for_status()


def test_a_context_that_is_too_short_says_that_the_probe_needs_it(engine: ServerEngine) -> None:
    with pytest.raises(
        EngineError, match="max_model_len must be at least 101, because the probe that proves every sync"
    ):
        engine.score([[5] * 100])  # of 64


def test_no_route_of_a_live_server_answers_without_its_key(server: Server) -> None:
    paths = requests.get(f"{server.url}/openapi.json", headers=SENT, timeout=60).json()["paths"]
    assert len(paths) > 20
    for path, methods in paths.items():
        for method in methods:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                found = requests.request(method, server.url + path, headers=headers, json={}, timeout=60).status_code
                assert found == (200 if path in ("/health", "/ping") else 401), (method, path)
    for key in ("wrong", None):
        with pytest.raises(EngineError, match=f"{server.url} wants another API key .401.. Set VLLM_API_KEY"):
            meet(ServerClient(server.url, api_key=key, patience=QUICK))


def test_ctrl_c_in_a_step_leaves_no_process_and_no_weights(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), server.url, "--model", str(server.model), "--steps", "5000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_API_KEY": KEY}
    with (tmp_path / "log").open("w") as log:
        trainer = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=hears_ctrl_c
        )
    interrupted(trainer, tmp_path, signal.SIGINT)
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()
    assert not (tmp_path / "run" / "_engine_weights").exists()


def test_kill_9_of_the_server_leaves_no_process(server: Server) -> None:
    """Last of the tests with this server."""
    text = server.log.read_text()
    assert f"The server is process {server.process.pid}" in text
    named = [int(line.split()[3]) for line in text.splitlines() if f"is one of server {server.process.pid}" in line]
    assert len(named) >= 2 and all(alive(pid) for pid in named)  # the engine and its worker
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    end = time.monotonic() + 30
    while any(alive(pid) for pid in named):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_stock_server_gets_its_weights_back_and_its_leftovers_are_named(
    model_folder: Callable[..., Path], fresh_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own server cannot be asked for its shapes, and its processes outlive it."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with bare_server(model_folder(), tmp_path / "log", "--logprobs-mode", "processed_logprobs") as url:
        started = ServerEngine(url, folder=tmp_path / "s", transfer="folder", patience=QUICK)
        assert "weights that it was started with again" in send(started, tiny_model(num_hidden_layers=3))
        assert agrees(started, fresh_model())
        engine = synced(url, fresh_model(), tmp_path / "w")
        label = engine._server_label()
        assert f"It has the weights of {label} again." in send(engine, tiny_model(hidden_size=128))
        assert engine._server_label() == label and agrees(engine)
        before = {one.pid for one in launch.leftovers()}
        (root,) = [pid for pid in children(os.getpid()) if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(root, signal.SIGKILL)
        end = time.monotonic() + 30
        while not (left := [one for one in launch.leftovers() if one.pid not in before]):
            assert time.monotonic() < end
            time.sleep(0.2)
        command = [sys.executable, "-m", "trl_offpolicy", "serve", "--model", str(model_folder())]
        command += ["--port", str(free_port())]
        refused = run_command(command, seconds=300)
        assert refused.returncode == 2 and all(f"{one.pid} (VLLM::" in refused.stderr for one in left)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
