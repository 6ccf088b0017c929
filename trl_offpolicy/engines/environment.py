"""Environment in which vLLM works on a machine without a GPU."""

from __future__ import annotations

from functools import cache

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
