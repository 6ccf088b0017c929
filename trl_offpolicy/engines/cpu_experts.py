"""Works around a bug of vLLM's CPU engine, which leaves a mixture of experts with scrambled weights after a sync."""

from __future__ import annotations

from typing import Any

from trl_offpolicy.engines.environment import machine_has_gpu


def forget_expert_kernels(model: Any) -> None:
    """Make vLLM's CPU engine build the kernels of its experts again when it loads weights. Does nothing on a GPU.

    vLLM 0.31 packs the experts for its CPU kernel only when it builds that kernel. Weights that are loaded later stay
    unpacked (``UnquantizedFusedMoEMethod._setup_kernel``), and the kernel reads them in the wrong order, without an
    error.

    Args:
        model: the model of vLLM's model runner.
    """
    if machine_has_gpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class ReloadsExperts:
    """A reload for vLLM's CPU engine, as a part of :class:`~trl_offpolicy.engines.worker.WorkerExtension`."""

    model_runner: Any
    reload_weights: Any

    def reload_experts(self, weights_path: str) -> None:
        """``reload_weights`` with :func:`forget_expert_kernels` before it."""
        forget_expert_kernels(self.model_runner.model)
        self.reload_weights(weights_path=weights_path)
