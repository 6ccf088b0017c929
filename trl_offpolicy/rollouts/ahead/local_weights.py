"""Weights as this rank holds them: whole, or its shard under FSDP2 and DeepSpeed's ZeRO-3.

A copy of a shard is small, and exchanging the shards of all ranks exchanges the weights: the next forward gathers them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trl_offpolicy.functional.collective import sum_ranks

Weights = dict[str, Tensor]
Release = Callable[[], None] | None
"""Frees what DeepSpeed has gathered (:func:`free_gathered` of its engine); None = nothing does that."""


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name: LoRA's, or all."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def copied(model: Any) -> Weights:
    """A copy on the CPU of this rank's part of each trainable weight, by name.

    Raises:
        NotImplementedError: ZeRO-3 keeps a second copy of the shards (hpZ) or has them on a disk.
    """
    _reshard(model)
    return {name: _part(name, value).to("cpu", copy=True) for name, value in trainable(model).items()}


@torch.no_grad()
def all_finite(model: Any, device: torch.device | str) -> bool:
    """Whether each trainable weight is finite on every rank, as far as these are at hand (:func:`copied`).

    All ranks call it; it waits for the device.

    Args:
        model: the model.
        device: of the collective; shards may be elsewhere.
    """
    try:
        parts = [_part(name, value) for name, value in trainable(model).items()]
    except NotImplementedError:  # on a disk, or held twice
        return True
    broken = sum(int(not part.isfinite().all()) for part in parts)
    return not sum_ranks(torch.tensor(float(broken), device=device))


def frozen_copy(model: Any) -> Any:
    """A model that computes as ``model`` does, with trainable weights of its own, which need no gradient.

    What is not trained (the base model under an adapter) is shared and takes no memory. Methods that a trainer has set
    on a module act on its copy, so a mixed precision or a fused head goes with it.

    Args:
        model: whole on this rank.
    """
    shared = {id(value): value for value in model.parameters() if not value.requires_grad}
    twin = copy.deepcopy(model, shared)
    for value in twin.parameters():
        value.requires_grad_(False)
    if getattr(twin, "is_gradient_checkpointing", False):
        twin.gradient_checkpointing_disable()
    return twin


@contextmanager
@torch.no_grad()
def loaded(model: Any, weights: Mapping[str, Tensor], *, release: Release = None) -> Iterator[None]:
    """A context in which the weights that ``weights`` names have its values. Afterwards they have their own again.

    Args:
        model: no graph of it may wait for its backward.
        weights: as :func:`copied` returns them. With sharded weights all ranks enter together.
        release: what frees weights that DeepSpeed has gathered.

    Raises:
        NotImplementedError: as :func:`copied`.
    """
    _free(model, release)
    parts = {name: _part(name, value) for name, value in model.named_parameters() if name in weights}
    own = {name: part.clone() for name, part in parts.items()}
    try:
        _write(parts, weights)
        yield
    finally:
        _free(model, release)
        _write(parts, own)


def free_gathered(engine: Any) -> None:
    """Free the weights that a DeepSpeed engine of stage 3 has gathered or is gathering; nothing for others, or None."""
    release = getattr(getattr(engine, "optimizer", None), "empty_partition_cache", None)
    if release is not None:
        release()


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


def _reshard(model: Any) -> None:
    """After a forward without a backward, FSDP2 keeps the weights of the outermost module gathered."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _free(model: Any, release: Release) -> None:
    """Let the next forward gather the shards as they are then."""
    _reshard(model)
    if release is not None:
        release()  # small weights stay gathered, and the first of the next forward are on their way already


def _write(parts: Weights, values: Mapping[str, Tensor]) -> None:
    for name, part in parts.items():
        part.copy_(values[name])
    torch.clear_autocast_cache()  # within autocast it holds the weights of before, rounded
