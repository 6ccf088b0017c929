"""Reads the weights of a checkpoint of PyTorch Lightning (``.ckpt``), which ``from_pretrained`` cannot read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

SUFFIX = ".ckpt"
_POLICY = "policy."
"""What the names of the policy's weights begin with in an ``OffPolicyGRPOModule``."""


@dataclass(frozen=True)
class LightningCheckpoint:
    """A checkpoint of an ``OffPolicyGRPOModule``.

    Args:
        step: optimizer steps.
        adapter: fields of ``peft.LoraConfig``; None = the checkpoint holds the whole model.
        tensors: the trained weights by their names in the policy, on disk until they are used.
    """

    step: int
    adapter: dict[str, Any] | None
    tensors: dict[str, Tensor]


def read(path: str | Path) -> LightningCheckpoint:
    """Read a checkpoint.

    Raises:
        ValueError: it is no file of this kit's module, or cannot be read without running code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} must be a checkpoint of Lightning, but cannot be read: {error}") from error
    weights = content.get("state_dict", {}) if isinstance(content, dict) else {}
    tensors = {name.removeprefix(_POLICY): value for name, value in weights.items() if name.startswith(_POLICY)}
    if not tensors or "global_step" not in content:
        raise ValueError(f"{path} must hold the policy of an OffPolicyGRPOModule, but does not.")
    adapter = content.get("hyper_parameters", {}).get("adapter")
    is_adapter = any(".lora_A." in name for name in tensors)
    if is_adapter and not isinstance(adapter, dict):
        raise ValueError(f"{path} must say how its adapter was made, but its hyper-parameters do not.")
    return LightningCheckpoint(int(content["global_step"]), adapter if is_adapter else None, tensors)


def checkpoints(run_dir: Path) -> Iterator[tuple[Path, LightningCheckpoint]]:
    """The checkpoints in a run folder and in its folder ``checkpoints``, one per step."""
    seen: set[int] = set()
    for path in sorted([*run_dir.glob(f"*{SUFFIX}"), *run_dir.glob(f"checkpoints/*{SUFFIX}")]):
        try:
            found = read(path)
        except ValueError:  # of another module, or cut short by a kill
            continue
        if found.step not in seen:
            seen.add(found.step)
            yield path, found


def with_weights(model: Any, found: LightningCheckpoint) -> Any:
    """The base model with the weights of a checkpoint; a PEFT model if they are an adapter."""
    if found.adapter is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **found.adapter}))
    unknown = model.load_state_dict(found.tensors, strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"the checkpoint must fit the model, but the model has no {unknown[0]} ({len(unknown)} such).")
    return model
