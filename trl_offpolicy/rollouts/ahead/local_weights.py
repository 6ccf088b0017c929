"""Weights as this rank holds them: whole, or its shard under FSDP2 and DeepSpeed's ZeRO-3.

A copy of a shard is small, and exchanging the shards of all ranks exchanges the weights: the next forward gathers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Weights = dict[str, Tensor]


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name: LoRA's, or all."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def copied(model: Any) -> Weights:
    """A copy on the CPU of this rank's part of each trainable weight, by name.

    Raises:
        NotImplementedError: ZeRO-3 keeps a second copy of the shards (hpZ) or has them on a disk.
    """
    _free_gathered(model)
    return {name: _part(name, value).to("cpu", copy=True) for name, value in trainable(model).items()}


@contextmanager
@torch.no_grad()
def loaded(model: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the weights that ``weights`` names have its values. Afterwards they have their own again.

    Args:
        model: no graph of it may wait for its backward.
        weights: as :func:`copied` returns them. With sharded weights all ranks enter together.

    Raises:
        NotImplementedError: as :func:`copied`.
    """
    _free_gathered(model)
    parts = {name: _part(name, value) for name, value in model.named_parameters() if name in weights}
    own = {name: part.clone() for name, part in parts.items()}
    try:
        _write(parts, weights)
        yield
    finally:
        _free_gathered(model)
        _write(parts, own)


def is_sharded(model: Any) -> bool:
    """Whether a forward gathers weights, so that all ranks must run the same number of forwards."""
    return any(isinstance(part, FSDPModule) for part in model.modules()) or any(
        isinstance(value, DTensor) or hasattr(value, "ds_tensor") for value in model.parameters()
    )


def _part(name: str, value: Any) -> Tensor:
    """The storage of this rank's part of a parameter; no gradient."""
    if isinstance(value, DTensor):
        return value.detach().to_local()  # type: ignore[no-any-return, attr-defined]
    shard = getattr(value, "ds_tensor", None)
    if shard is None:
        return value.data  # type: ignore[no-any-return]
    if getattr(value, "ds_secondary_tensor", None) is not None:
        raise NotImplementedError(f"zero_hpz_partition_size must be left out: {name} has a second copy of its shards.")
    if shard.numel() < value.partition_numel():
        raise NotImplementedError(f"offload_param.device must be 'cpu' or 'none': the shard of {name} is on a disk.")
    return shard.data  # type: ignore[no-any-return]


def _free_gathered(model: Any) -> None:
    """Let the next forward gather the shards as they are then.

    After a forward without a backward FSDP2 keeps the weights of the outermost module gathered, and ZeRO-3 small ones.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    # 1 is DeepSpeed's ZeroParamStatus.AVAILABLE
    gathered = [value for value in model.parameters() if hasattr(value, "ds_tensor") and value.ds_status.value == 1]
    if gathered:
        gathered[0].partition(param_list=gathered, has_been_updated=False)


def _write(parts: Weights, values: Mapping[str, Tensor]) -> None:
    for name, part in parts.items():
        part.copy_(values[name])
    torch.clear_autocast_cache()  # within autocast it holds the weights of before, rounded
