"""vLLM in the trainer's process, on GPU and CPU, with engine arguments and a weight sync that works on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from trl_offpolicy.engines.rounding import parse_rounding, round_weights

_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in-process, so that weights can be pushed
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
}


class ColocateEngine(vllm_generation.VLLMGeneration):  # type: ignore[misc]
    """TRL's vLLM backend with pass-through engine arguments; on CPU weights are synced by reload.

    Args:
        engine: keyword arguments for ``vllm.LLM``; ``weight_rounding`` ("int8", "int4", "fp8", ...) is this kit's own:
            :func:`~trl_offpolicy.engines.rounding.parse_rounding`.
        *args: TRL's.
        **kwargs: TRL's.
    """

    def __init__(self, *args: Any, engine: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.engine_arguments = dict(engine or {})
        rounding = self.engine_arguments.pop("weight_rounding", None)
        self.weight_rounding = None if rounding is None else parse_rounding(rounding)
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "colocate":
            if self.engine_arguments or self.weight_rounding:
                raise ValueError(f"engine must be empty when vllm_mode is {self.mode!r}: start the server with these.")
            super()._init_vllm()
            return
        on_cpu = self.accelerator.device.type == "cpu"
        for name, value in _CPU_ENVIRONMENT.items() if on_cpu else ():
            os.environ.setdefault(name, value)
        arguments = {**self._default_arguments(on_cpu), **self.engine_arguments}
        with _rebound(vllm_generation, "LLM", partial(_build_llm, vllm_generation.LLM, arguments)):
            super()._init_vllm()

    def _default_arguments(self, on_cpu: bool) -> dict[str, Any]:
        """On CPU load the engine in the trainer's dtype: vLLM's "auto" would read float32 as bfloat16, slowly."""
        if not on_cpu:
            return {}
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return {"dtype": dtype, "enforce_eager": True}

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = super()._iter_named_params()
        return round_weights(named, self.weight_rounding) if self.weight_rounding else named

    def sync_weights(self) -> None:
        """Push the trainer's weights to the engine; on CPU through vLLM's ``reload_weights``."""
        if self.mode != "colocate" or self.accelerator.device.type != "cpu":
            super().sync_weights()
            return
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        with torch.no_grad():
            runner.reload_weights(weights_iterator=self._iter_named_params())
        self.llm.reset_prefix_cache()


@contextmanager
def _rebound(module: Any, name: str, value: Any) -> Iterator[None]:
    """TRL offers no way to pass engine arguments or another engine class; it looks these module globals up late."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _build_llm(llm_class: Any, overrides: dict[str, Any], **kwargs: Any) -> Any:
    return llm_class(**{**kwargs, **overrides})


@contextmanager
def colocate_engine(engine: dict[str, Any] | None) -> Iterator[None]:
    """While active, a GRPOTrainer that is built uses :class:`ColocateEngine` with these arguments."""
    with _rebound(grpo_trainer, "VLLMGeneration", partial(ColocateEngine, engine=engine)):
        yield
