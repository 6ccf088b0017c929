"""What vLLM needs from its surroundings: on a machine without a GPU, and in the process of the policy."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from trl_offpolicy.engines.screen import quiet_vllm

CPU_SERVER_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine's core stays in the process that starts it, so that weights can be passed in memory. Otherwise vLLM moves
it to a process of its own, on a GPU too, unless its executor is the external launcher (TRL's is)."""
EXTERNAL_LAUNCHER = "external_launcher"
"""vLLM's executor for a process that somebody else has started, one of several or alone."""
SHARED_MEMORY = 0.3
"""Share of a GPU's memory for an engine beside a policy, as in TRL; vLLM by itself takes nearly all."""


@cache
def machine_has_gpu() -> bool:
    """True if torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def engine_has_triton() -> bool:
    """True if vLLM runs its Triton kernels on this machine, and with them its Model Runner V2."""
    if machine_has_gpu():
        return True
    try:
        from vllm.triton_utils import HAS_TRITON
    except ImportError:
        return False
    return bool(HAS_TRITON)


def prepare_environment() -> None:
    """Set what vLLM needs in this process, and on a machine without a GPU, unless the user has set it.

    Anywhere, vLLM's log begins at warnings (TRL sets errors), and what concerns nobody is left out.
    """
    quiet_vllm()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for name, value in {**IN_PROCESS, **({} if machine_has_gpu() else CPU_SERVER_ENVIRONMENT)}.items():
        os.environ.setdefault(name, value)


def cpu_arguments() -> dict[str, Any]:
    """Arguments of ``LLM`` for a machine without a GPU."""
    return {} if machine_has_gpu() else {"enforce_eager": True}


def beside_policy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``LLM`` for an engine in the process of a policy, with which it shares a GPU.

    vLLM's external launcher, which TRL uses as well, takes the device from its environment (:func:`launched`). Its
    executor for one device takes the first one, on every rank.

    Args:
        arguments: what the user chose.
    """
    if not machine_has_gpu():
        return cpu_arguments()
    several = any(arguments.get(size, 1) > 1 for size in ("tensor_parallel_size", "pipeline_parallel_size"))
    launcher = {} if several else {"distributed_executor_backend": EXTERNAL_LAUNCHER}
    return {**launcher, "gpu_memory_utilization": SHARED_MEMORY}


@contextmanager
def launched() -> Iterator[None]:
    """Within it, the environment says what vLLM's external launcher asks for: rank, device and a place to meet.

    The device is the one that PyTorch computes on in this process; it need not have the number of the rank.
    """
    import torch
    from torch import distributed

    started = distributed.is_available() and distributed.is_initialized()
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if started else (0, 1)
    device = torch.cuda.current_device() if machine_has_gpu() else rank
    said = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(device)}
    if not started:  # vLLM starts a process group of one
        said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def choose_port(processes: int) -> None:
    """Say at which port the only process of a run starts its process group, unless the user has said it.

    TRL would take the first free port of a short list, and vLLM listens there only seconds later. So two runs that are
    started together would take the same one, and the second would fail.

    Args:
        processes: those of the run; several have been told their port by their launcher.
    """
    if processes == 1:
        os.environ.setdefault("MASTER_PORT", str(free_port()))


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
