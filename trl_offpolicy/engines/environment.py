"""The environment variables with which vLLM works on a machine without a GPU."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from trl_offpolicy.engines.screen import quiet_vllm

CPU_SERVER_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}
CPU_ENVIRONMENT = {
    **CPU_SERVER_ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in-process, so that weights can be pushed
}


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
    """Set what vLLM needs on a machine without a GPU, unless the user has set it.

    Anywhere, vLLM's log begins at warnings (TRL sets errors), and what concerns nobody is left out.
    """
    quiet_vllm()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for name, value in CPU_ENVIRONMENT.items() if not machine_has_gpu() else ():
        os.environ.setdefault(name, value)


def cpu_arguments() -> dict[str, Any]:
    """Arguments of ``LLM`` for a machine without a GPU."""
    return {} if machine_has_gpu() else {"enforce_eager": True}
