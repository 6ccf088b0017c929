"""The engine that talks to a stock vLLM server: sampling, both transfers, labels, the key, bad starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from engines.server.servers import QUICK, Server
from peft import LoraConfig, get_peft_model

from trl_offpolicy.engines.engine import EngineError, Sampling, SyncError
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.sync import SyncCheck
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts.scoring import sequence_logps

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
PROBE = [[5, 6, 7, 20, 33, 4], [8, 9, 10, 11]]
SHORT = Sampling(max_tokens=6, temperature=0.7)
KEY = "secret"


@pytest.fixture(scope="module")
def server(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(model_folder(), log, lora_rank=8, api_key=KEY).start()
    yield running
    running.kill()


def engine_of(server: Server, folder: Path, **options: Any) -> ServerEngine:
    return ServerEngine(server.url, folder=folder, api_key=KEY, patience=QUICK, **options)


def nudge(model: Any, size: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=size)


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


def logps_of(model: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_both_transfers_arrive_and_the_rollouts_are_of_the_new_weights(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    for transfer, model in (("adapter", adapted(fresh_model())), ("folder", fresh_model())):
        engine, check = engine_of(server, tmp_path / transfer, transfer=transfer), SyncCheck()
        engine.bind(ModelWeights(model))
        server_reset(server)
        for version in range(3):
            nudge(model, 0.05)
            report = engine.sync_weights(version)
            agreement = check.observe(version, engine=engine.score(PROBE), trainer=sequence_logps(model, PROBE, pad=0))
            assert agreement > 0.9999
            assert report.kind == transfer
        rollouts = engine.generate(PROMPTS, SHORT, n=2)
        assert [len(rollouts), rollouts.prompt_ids[0], rollouts.prompt_ids[3]] == [6, PROMPTS[0], PROMPTS[1]]
        assert rollouts.sampling_per_token_logps is not None
        for prompt, completion, logps in zip(
            rollouts.prompt_ids, rollouts.completion_ids, rollouts.sampling_per_token_logps, strict=True
        ):
            torch.testing.assert_close(torch.tensor(logps), logps_of(model, prompt, completion, 0.7), atol=1e-4, rtol=0)
        assert set(rollouts.policy_versions[0]) == {2}
        folders = [path.name for path in (tmp_path / transfer).iterdir() if path.is_dir()]
        assert sorted(folders) == [f"{engine.run}-1", f"{engine.run}-2"]


def test_weights_in_shared_memory_arrive_and_go(server: Server, fresh_model: Callable[..., Any]) -> None:
    server_reset(server)
    model = fresh_model()
    engine, check = ServerEngine(server.url, folder="memory", api_key=KEY, patience=QUICK), SyncCheck()
    assert engine.folder.parent == Path("/dev/shm")
    engine.bind(ModelWeights(model))
    for version in range(3):
        nudge(model, 0.05)
        assert engine.sync_weights(version).kind == "folder"
        check.observe(version, engine=engine.score(PROBE), trainer=sequence_logps(model, PROBE, pad=0))
    versions = [engine.folder / f"{engine.run}-{version}" for version in range(3)]
    assert [path.is_dir() for path in versions] == [False, True, True]
    engine.close()
    assert not any(path.exists() for path in versions)


def server_reset(server: Server) -> None:
    """As if freshly started, for a test that shares the server."""
    requests.post(
        f"{server.url}/update_weight_version",
        json={"new_version": "default"},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=10,
    ).raise_for_status()


def test_an_adapter_on_replaced_base_weights_is_refused(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    server_reset(server)
    first = engine_of(server, tmp_path / "a", transfer="folder")
    first.bind(ModelWeights(fresh_model()))
    first.sync_weights(0)
    second = engine_of(server, tmp_path / "b", transfer="adapter")
    second.bind(ModelWeights(adapted(fresh_model())))
    with pytest.raises(EngineError, match="base weights"):
        second.sync_weights(0)


def test_an_adapter_of_another_base_model_is_found_at_the_first_sync(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    server_reset(server)
    other = fresh_model()
    nudge(other, 0.3)
    model = adapted(other)
    engine = engine_of(server, tmp_path / "w", transfer="adapter")
    engine.bind(ModelWeights(model))
    engine.sync_weights(0)
    with pytest.raises(SyncError, match="Another model"):
        SyncCheck().observe(0, engine=engine.score(PROBE), trainer=sequence_logps(model, PROBE, pad=0))


def test_an_adapter_sends_a_fraction_of_the_bytes(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = adapted(fresh_model())
    sizes = {}
    for transfer in ("adapter", "folder"):
        server_reset(server)
        engine = engine_of(server, tmp_path / transfer, transfer=transfer)
        engine.bind(ModelWeights(model))
        sizes[transfer] = engine.sync_weights(0).bytes
    assert sizes["adapter"] < sizes["folder"] / 10


def test_a_version_that_is_sent_again_with_other_weights_is_another_adapter(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    """A rejected update is sent again as the same version, with the weights before it."""
    server_reset(server)
    model = adapted(fresh_model())
    engine = engine_of(server, tmp_path / "w", transfer="adapter")
    engine.bind(ModelWeights(model))
    for _ in range(2):
        nudge(model, 0.1)
        engine.sync_weights(0)
        (found, _), (wanted, _) = engine.score(PROBE), sequence_logps(model, PROBE, pad=0)
        assert found == pytest.approx(wanted, abs=1e-4)


def test_requests_in_flight_end_under_the_adapter_that_they_began_with(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Most of 96 responses are sampled after the sync: the server takes 16 at a time."""
    server_reset(server)
    model, begun, in_use = adapted(fresh_model()), threading.Event(), [0]
    engine = engine_of(server, tmp_path / "w", transfer="adapter")
    engine.bind(ModelWeights(model))
    engine.serve_several(lambda: in_use)
    nudge(model, 0.1)
    engine.sync_weights(0)
    old = deepcopy(model)
    post = engine.client.post

    def posting(path: str, body: dict[str, Any], **kwargs: Any) -> Any:
        if path == "/v1/completions":
            begun.set()
        return post(path, body, **kwargs)

    engine.client.post = posting  # type: ignore[method-assign]
    options = {**Sampling(max_tokens=40, temperature=1.0).vllm_options(), "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(engine.parts, PROMPTS[0], options, 96, version=0)
        assert begun.wait(20)
        nudge(model, 0.1)
        engine.sync_weights(1)
        assert not answers.done()  # nothing waited for it
        young = engine.parts(PROMPTS[0], options, 2, version=1)
        everything = answers.result(timeout=60)
    for policy, answered in ((old, everything), (model, young)):
        for answer in answered:
            wanted = logps_of(policy, PROMPTS[0], answer.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(answer.logps), wanted, atol=1e-4, rtol=0)

    # a server that was started anew has lost the old adapter, and gets it again from its folder
    post("/v1/unload_lora_adapter", {"lora_name": engine._adapters.name_of(0)})
    (again,) = engine.parts(PROMPTS[1], options, 1, version=0)
    wanted = logps_of(old, PROMPTS[1], again.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(again.logps), wanted, atol=1e-4, rtol=0)
    in_use.clear()
    engine.sync_weights(2)
    folders = [path.name for path in (tmp_path / "w").iterdir() if path.is_dir()]
    assert sorted(folders) == [f"{engine.run}-1", f"{engine.run}-2"]


@pytest.mark.parametrize(
    "route", ["/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/v1/completions"]
)
def test_no_route_that_changes_anything_answers_without_the_key(server: Server, route: str) -> None:
    assert requests.post(server.url + route, json={}, timeout=10).status_code == 401


@pytest.mark.slow
def test_a_server_that_reports_raw_log_probs_is_refused(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    flags = ("--max-model-len", "64", "--", "--max-num-seqs", "16", "--logprobs-mode", "raw_logprobs")
    running = Server(model_folder(), tmp_path / "log", flags=flags).start()
    try:
        with pytest.raises(EngineError, match="reports raw_logprobs"):
            ServerEngine(running.url, folder=tmp_path / "w", patience=QUICK)
    finally:
        running.kill()


def test_two_trainers_on_one_server_are_an_error(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    server_reset(server)
    first, second = (engine_of(server, tmp_path / name, transfer="folder") for name in ("a", "b"))
    for engine in (first, second):
        engine.bind(ModelWeights(fresh_model()))
        engine.sync_weights(0)
    with pytest.raises(EngineError, match="two trainers share one server"):
        first.generate(PROMPTS, SHORT)


@pytest.mark.slow
def test_a_model_of_another_shape_is_refused(
    model_folder: Callable[..., Path], fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    running = Server(model_folder("qwen3_moe"), tmp_path / "log").start()
    try:
        engine = ServerEngine(running.url, folder=tmp_path / "weights", patience=QUICK)
        engine.bind(ModelWeights(fresh_model("llama")))
        with pytest.raises(SyncError, match="runs another model"):
            engine.sync_weights(0)
            probe = sequence_logps(fresh_model("llama"), PROBE, pad=0)
            SyncCheck().observe(0, engine=engine.score(PROBE), trainer=probe)
    finally:
        running.kill()


def test_a_disk_that_takes_no_more_is_an_error_and_leaves_no_half_file(
    server: Server, fresh_model: Callable[..., Any], tmp_path: Path
) -> None:
    import resource
    import signal

    server_reset(server)
    engine = engine_of(server, tmp_path / "weights", transfer="folder")
    engine.bind(ModelWeights(fresh_model()))
    engine.sync_weights(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # every file of this process ends there
    try:
        with pytest.raises(SyncError, match="disk"):
            engine.sync_weights(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert [path.name for path in (tmp_path / "weights").iterdir() if path.is_dir()] == [f"{engine.run}-0"]
