"""The weights that a vLLM engine in this process holds, under the names of the trainer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def keep_plain_weights() -> None:
    """Have vLLM's CPU backend keep each linear weight beside the packed copy that it computes with."""
    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)


def engine_weights(llm: Any) -> dict[str, torch.Tensor]:
    """Name and tensor; what vLLM has fused is taken apart (parts of one size, as in the tiny Llama)."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        fused = next((part for part in _FUSED if f".{part}." in name), None)
        if fused is None:
            found[name] = tensor.detach().clone()
            continue
        parts = _FUSED[fused]
        for part, value in zip(parts, tensor.detach().chunk(len(parts)), strict=True):
            found[name.replace(fused, part)] = value.clone()
    return found
