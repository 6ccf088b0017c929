"""What a real server does to a run: killed, restarted, slow, short, silent about log-probs. Each with a real vLLM."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.server import faulty_proxy
from engines.server.faulty_proxy import FaultyProxy
from engines.server.servers import Server

from trl_offpolicy.engines.engine import EngineError, EngineUnreachable, Sampling
from trl_offpolicy.engines.server.client import Patience
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.server.serve import require_free_port
from trl_offpolicy.engines.sync import SyncCheck
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts.scoring import sequence_logps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
PROBE = [[5, 6, 7, 20, 33, 4], [8, 9, 10, 11]]
SHORT = Sampling(max_tokens=6)
LONG = Sampling(max_tokens=50, extra={"ignore_eos": True})
WAITS = Patience(timeout=60.0, retries=3, start_timeout=400.0)  # a server starts in 30 s, on a busy machine in 190
HASTY = Patience(timeout=1.0, retries=1, start_timeout=5.0)


@pytest.fixture(scope="module")
def server(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model_folder(), tmp_path_factory.mktemp("server") / "log", lora_rank=8).start()
    yield running
    running.kill()


@pytest.fixture
def model(fresh_model: Callable[..., Any]) -> Any:
    trained = fresh_model()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return trained


def synced(server: Server, model: Any, folder: Path, *, url: str | None = None, patience: Patience = WAITS) -> Any:
    if server.process.poll() is not None:
        server.start()
    engine = ServerEngine(url or server.url, folder=folder, transfer="folder", patience=patience)
    engine.bind(ModelWeights(model))
    engine.sync_weights(4)
    return engine


def holds_the_trainers_weights(engine: ServerEngine, model: Any) -> bool:
    agreement = SyncCheck().observe(4, engine=engine.score(PROBE), trainer=sequence_logps(model, PROBE, pad=0))
    return agreement > 0.999


def test_killed_between_steps_and_started_again_gets_the_weights_back(
    server: Server, model: Any, tmp_path: Path
) -> None:
    engine = synced(server, model, tmp_path / "w")
    server.kill()
    server.start()
    rollouts = engine.generate(PROMPTS, SHORT, n=2)  # without a new sync
    assert len(rollouts) == 6
    assert holds_the_trainers_weights(engine, model)


def test_killed_while_generating_and_started_again_finishes_the_batch(
    server: Server, model: Any, tmp_path: Path
) -> None:
    engine = synced(server, model, tmp_path / "w")
    done: list[Any] = []
    batch = threading.Thread(target=lambda: done.append(engine.generate(PROMPTS * 16, LONG, n=4)))
    batch.start()
    time.sleep(0.3)
    server.kill()
    assert not done  # it was in the middle of it
    server.start()
    batch.join(timeout=180)
    assert len(done[0]) == len(PROMPTS) * 16 * 4
    assert holds_the_trainers_weights(engine, model)


def test_killed_for_good_is_one_clear_error(server: Server, model: Any, tmp_path: Path) -> None:
    engine = synced(server, model, tmp_path / "w")
    engine.client.patience = HASTY
    server.kill()
    start = time.monotonic()
    with pytest.raises(EngineUnreachable, match=r"No vLLM server answers at http://127.0.0.1:\d+ after 5 s"):
        engine.generate(PROMPTS, SHORT)
    assert time.monotonic() - start < 20


def test_too_slow_is_bounded_and_says_so(server: Server, model: Any, tmp_path: Path) -> None:
    engine = synced(server, model, tmp_path / "w")
    proxy = FaultyProxy(server.url)
    proxy.fault = faulty_proxy.slow
    slow = ServerEngine(proxy.url, folder=tmp_path / "w", patience=HASTY, run=engine.run)
    with pytest.raises(EngineUnreachable, match="no answer within the time limit"):
        slow.generate(PROMPTS[:1], SHORT)
    proxy.close()


def test_missing_completions_are_asked_for_again_and_only_those(server: Server, model: Any, tmp_path: Path) -> None:
    synced(server, model, tmp_path / "w")
    proxy = FaultyProxy(server.url)
    engine = ServerEngine(proxy.url, folder=tmp_path / "w", patience=WAITS)
    proxy.fault = faulty_proxy.fewer_once
    assert len(engine.generate(PROMPTS[:1], SHORT, n=3)) == 3
    assert [asked["n"] for asked in proxy.asked] == [3, 1]
    proxy.fault = faulty_proxy.fewer_always
    with pytest.raises(EngineError, match="0 completions, but 3 were asked for"):
        engine.generate(PROMPTS[:1], SHORT, n=3)
    proxy.close()


def test_a_token_without_log_prob_is_nan_and_a_rollout_without_any_is_an_error(
    server: Server, model: Any, tmp_path: Path
) -> None:
    synced(server, model, tmp_path / "w")
    proxy = FaultyProxy(server.url)
    engine = ServerEngine(proxy.url, folder=tmp_path / "w", patience=WAITS)
    proxy.fault = faulty_proxy.no_logprob_on_the_first_token
    logps = engine.generate(PROMPTS[:1], SHORT).sampling_per_token_logps[0]
    assert math.isnan(logps[0]) and all(math.isfinite(value) for value in logps[1:])
    proxy.fault = faulty_proxy.no_logprobs
    with pytest.raises(EngineError, match="one log-prob for each token, but got None"):
        engine.generate(PROMPTS[:1], SHORT)
    proxy.close()


def test_a_taken_port_is_said_before_a_model_is_loaded(server: Server, model: Any, tmp_path: Path) -> None:
    synced(server, model, tmp_path / "w")
    with pytest.raises(ValueError, match=f"port must be free, but 127.0.0.1:{server.port} is taken"):
        require_free_port("127.0.0.1", server.port)
