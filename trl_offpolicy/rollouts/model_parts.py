"""What is inside a model: the one that a strategy wraps, and its decoder layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def innermost(model: Any) -> Any:
    """The model inside the wrapper of a strategy (DDP); an adapter stays."""
    while hasattr(model, "module"):
        model = model.module
    return model


def is_flattened(model: nn.Module) -> bool:
    """True if FSDP1 wraps a part of the model: it flattens parameters, and each rank holds a part of them."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def blocks(model: Any) -> list[nn.Module]:
    """The modules that a transformers model names in ``_no_split_modules``; empty if it names none.

    Besides decoder layers these may be layers of an image encoder, embeddings, and parts of a layer.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 gives a layer a class of its own, below the model's
    return [layer for layer in model.modules() if names & {cls.__name__ for cls in type(layer).__mro__}]


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks of a language model's decoder, in their order; empty if it names none.

    They are what its decoder has in one list, each of them a block or a wrapper of one.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    named = set(map(id, blocks(model)))
    lists = [part for part in decoder.modules() if isinstance(part, nn.ModuleList)]
    return next(
        (list(part) for part in lists if len(part) and all(named & set(map(id, one.modules())) for one in part)), []
    )
