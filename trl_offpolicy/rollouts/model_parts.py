"""What is inside a model: the one that a strategy wraps, and its decoder layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def innermost(model: Any) -> Any:
    """The model inside the wrapper of a strategy (DDP); an adapter stays."""
    while hasattr(model, "module"):
        model = model.module
    return model


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks that a transformers model names in ``_no_split_modules``; empty if it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 gives a layer a class of its own, below the model's
    return [layer for layer in model.modules() if names & {cls.__name__ for cls in type(layer).__mro__}]
