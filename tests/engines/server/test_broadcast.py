"""Weights by broadcast: the two ends alone, and into a real vLLM server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.server.servers import QUICK, Server
from transformers import AutoConfig, AutoModelForCausalLM

from trl_offpolicy.engines.engine import EngineError, Sampling, SyncError
from trl_offpolicy.engines.server.checks import broadcast_ends
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.sync import SyncCheck
from trl_offpolicy.engines.weights.broadcast import ReceivesWeights, Sender, buckets, own_address
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.engines.worker import EXTENSION
from trl_offpolicy.rollouts.scoring import sequence_logps

WEIGHTS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5, dtype=torch.bfloat16),
    "whole": torch.randn(4, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "columns": torch.randn(6, 2).t(),
}


class Loader:
    """Stands for vLLM's model runner: keeps what it is given, or fails at a name."""

    model: torch.nn.Module = torch.nn.Linear(1, 1)

    def __init__(self, fails_at: str | None = None) -> None:
        self.fails_at = fails_at
        self.held: dict[str, torch.Tensor] = {}

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        def passed() -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights_iterator  # as vLLM's loaders do: closing this one would close the inner one

        for name, tensor in passed():
            if name == self.fails_at:
                raise RuntimeError(f"{name} has another shape")
            self.held[name] = tensor


class Worker(ReceivesWeights):
    def __init__(self, rank: int, loader: Loader) -> None:
        self.rank, self.device, self.model_runner = rank, "cpu", loader


class Workers:
    """Stands for a server: a call goes to workers in threads of this process."""

    def __init__(self, *loaders: Loader) -> None:
        self.workers = [Worker(rank, loader) for rank, loader in enumerate(loaders)]
        self.pool = ThreadPoolExecutor(len(loaders))

    def __call__(self, method: str, **kwargs: Any) -> None:
        calls = [self.pool.submit(getattr(one, method), **kwargs) for one in self.workers]
        for call in calls:
            call.result()


def sender(*loaders: Loader) -> Sender:
    return Sender(Workers(*loaders), address="127.0.0.1", workers=len(loaders), backend="gloo", timeout=20.0)


@pytest.mark.parametrize("limit", [1, 40, 10_000])
def test_every_worker_gets_every_tensor(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "__defaults__", (limit,))
    loaders = Loader(), Loader()
    send = sender(*loaders)
    for factor in (1, 3):
        weights = {name: tensor * factor for name, tensor in WEIGHTS.items()}
        assert send(weights.items()) == sum(tensor.nbytes for tensor in weights.values())
        for loader in loaders:
            assert list(loader.held) == list(weights)
            for name, tensor in weights.items():
                assert torch.equal(loader.held[name], tensor) and loader.held[name].dtype == tensor.dtype


def test_a_worker_that_cannot_load_is_an_error_and_the_next_transfer_works() -> None:
    loader = Loader(fails_at="whole")
    send = sender(loader)
    asked = iter(WEIGHTS.items())
    with pytest.raises(SyncError, match="whole has another shape"):
        send(asked)
    assert next(asked, None) is None  # other ranks gather to the end, too
    loader.fails_at = None
    send(WEIGHTS.items())
    assert torch.equal(loader.held["columns"], WEIGHTS["columns"])


def test_workers_that_do_not_join_are_an_error() -> None:
    def refuse(method: str, **kwargs: Any) -> None:
        raise RuntimeError("no such method")

    with pytest.raises(SyncError, match="did not join a gloo group: no such method"):
        Sender(refuse, address="127.0.0.1", workers=1, backend="gloo", timeout=20.0)


def test_a_worker_that_was_not_asked_to_join_says_so() -> None:
    with pytest.raises(RuntimeError, match="must join the trainer's group first"):
        Worker(0, Loader()).offpolicy_receive(1)


def test_buckets_hold_at_most_the_limit_or_one_tensor() -> None:
    sizes = [bucket.size for bucket in buckets(((str(i), torch.zeros(8)) for i in range(5)), limit=64)]
    assert sizes == [64, 64, 32]
    assert [len(bucket.entries) for bucket in buckets([("a", torch.zeros(99)), ("b", torch.zeros(1))], limit=8)] == [
        1,
        1,
    ]


def test_a_server_on_this_machine_is_met_on_loopback() -> None:
    assert own_address("localhost", 8000) == "127.0.0.1"


def config(**parallel: Any) -> dict[str, Any]:
    return {"parallel_config": {"worker_extension_cls": EXTENSION, "world_size": 2, **parallel}}


def test_ends_are_read_from_the_servers_configuration() -> None:
    client: Any = SimpleNamespace(base_url="http://127.0.0.1:8000")
    on_gpu = config() | {"device_config": {"device_type": "cuda"}}
    assert broadcast_ends(client, on_gpu, has_gpu=True) == (2, "nccl")
    assert broadcast_ends(client, on_gpu, has_gpu=False) == (2, "gloo")
    assert broadcast_ends(client, config(), has_gpu=True) == (2, "gloo")
    with pytest.raises(EngineError, match="trl-offpolicy serve"):
        broadcast_ends(client, config(worker_extension_cls=""), has_gpu=False)
    with pytest.raises(EngineError, match="2 engines"):
        broadcast_ends(client, config(data_parallel_size=2), has_gpu=False)


# ------------------------------------------------------------------------------------------------------ real server

PROBE = [[5, 6, 7, 20, 33, 4], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def server(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model_folder(), tmp_path_factory.mktemp("server") / "log").start()
    yield running
    running.kill()


@pytest.mark.vllm
@pytest.mark.slow  # test_server.py trains with a real server and this transfer
def test_a_real_server_gets_every_version_and_nothing_is_written(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, check = fresh_model(), SyncCheck()
    engine = ServerEngine(server.url, folder=tmp_path / "weights", transfer="broadcast", patience=QUICK)
    engine.bind(ModelWeights(model))
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        report = engine.sync_weights(version)
        agreement = check.observe(version, engine=engine.score(PROBE), trainer=sequence_logps(model, PROBE, pad=0))
        assert agreement > 0.9999
        assert report.kind == "broadcast" and report.bytes > 100_000
    rollouts = engine.generate([[5, 6, 7]], Sampling(max_tokens=6), n=2)
    assert set(rollouts.policy_versions[0]) == {2}
    assert not list(tmp_path.rglob("*.safetensors"))

    wider = AutoConfig.from_pretrained(server.model)
    wider.intermediate_size *= 2
    stranger = ServerEngine(server.url, folder=tmp_path / "other", transfer="broadcast", patience=QUICK, run=engine.run)
    stranger.bind(ModelWeights(AutoModelForCausalLM.from_config(wider)))
    with pytest.raises(SyncError, match=r"runs another model .* Nothing was sent"):
        stranger.sync_weights(3)
    kept = check.observe(2, engine=engine.score(PROBE), trainer=sequence_logps(model, PROBE, pad=0))
    assert kept > 0.9999  # the server still has version 2, and answers

    server.kill()
    server.start()
    with pytest.raises(EngineError, match="was started anew and lacks version 2, of which a broadcast leaves no copy"):
        engine.generate([[5, 6, 7]], Sampling(max_tokens=6))
