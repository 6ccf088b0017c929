"""What vLLM finds in its surroundings, with a GPU and without; a GPU is only said to be there."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest
import torch

from trl_offpolicy.engines import environment
from trl_offpolicy.engines.colocate import require_in_process, require_worker
from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.environment import beside_policy, choose_port, launched, prepare_environment

SAID = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "machine_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)


def test_the_core_stays_in_this_process_on_a_gpu_too(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", *environment.CPU_SERVER_ENVIRONMENT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    prepare_environment()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not set(environment.CPU_SERVER_ENVIRONMENT) & set(os.environ)


def test_an_engine_beside_a_policy_leaves_it_memory_and_takes_its_device(gpu: None) -> None:
    alone = {"distributed_executor_backend": "external_launcher", "gpu_memory_utilization": 0.3}
    assert beside_policy({}) == beside_policy({"tensor_parallel_size": 1}) == alone
    assert beside_policy({"tensor_parallel_size": 2}) == {"gpu_memory_utilization": 0.3}  # workers of its own


def test_without_a_gpu_it_is_eager_alone() -> None:
    assert beside_policy({}) == {"enforce_eager": True}


def test_the_launcher_is_told_rank_and_device_and_nobody_after_it(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SAID:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")  # Lightning with devices=[5]
    with launched():
        said = [os.environ[name] for name in SAID]
        assert said[:4] == ["0", "1", "5", "127.0.0.1"]
        with socket.socket() as one:
            one.bind(("127.0.0.1", int(said[4])))
    assert [os.environ.get(name) for name in SAID] == [None, None, "0", None, None]


def test_of_several_ranks_each_meets_where_they_met(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 9)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 16)
    monkeypatch.setenv("MASTER_PORT", "1234")
    with launched():
        assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")] == [
            "9", "16", "5", "1234",
        ]  # fmt: skip


@pytest.mark.parametrize(("processes", "given"), [(1, None), (1, "1234"), (2, None)])
def test_a_process_alone_meets_itself_where_nobody_else_is(
    processes: int, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if given is not None:
        monkeypatch.setenv("MASTER_PORT", given)
    choose_port(processes)
    chosen = os.environ.get("MASTER_PORT")
    if processes == 1 and given is None:
        assert chosen is not None
        with socket.socket() as one:
            one.bind(("127.0.0.1", int(chosen)))  # nobody listens there
    else:
        assert chosen == given


def test_an_engine_with_workers_of_its_own_gets_no_weights() -> None:
    several = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(workers=[0, 1])))
    with pytest.raises(
        EngineError, match=r"^engine\.tensor_parallel_size and .* must be 1 for an engine in this process"
    ):
        require_worker(several)
    require_worker(SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=object()))))


def test_an_engine_whose_core_is_elsewhere_is_refused() -> None:
    with pytest.raises(EngineError, match=r"^VLLM_ENABLE_V1_MULTIPROCESSING must be 0 for an engine in this process"):
        require_in_process(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object())))
    require_in_process(SimpleNamespace(llm_engine=SimpleNamespace(model_executor=object())))
