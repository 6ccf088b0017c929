"""Images of prompts: as pictures, which vLLM takes, and as a processor's inputs, which a transformers model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOKEN_INPUTS = ("token_type_ids", "mm_token_type_ids")
"""Inputs with one entry per token. All others are indexed by image, tile or patch along their first dimension."""


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """The images of one prompt.

    Args:
        pictures: the images in the prompt's order; empty for a prompt of text alone.
        short_ids: ids of the prompt with one token per image, which vLLM itself replaces by as many as it needs.
        inputs: what the model's forward takes beside ids and mask: (1, P) for :data:`TOKEN_INPUTS`, any for others.
    """

    pictures: list[Any]
    short_ids: list[int] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)


def model_inputs(
    rows: Sequence[Mapping[str, Tensor]], *, width: int, length: int = 0, device: Any = None
) -> dict[str, Tensor]:
    """The image inputs of a batch, row after row.

    Args:
        rows: ``inputs`` of the prompts.
        width: length of the prompts, which are padded on the left.
        length: length of the completions after them, which hold no images.
        device: where the tensors are put.

    Returns:
        (B, width + length) for :data:`TOKEN_INPUTS`, 0 on padding and completion; the others joined along their first
        dimension, without the rows that lack them.

    Raises:
        ValueError: images of different shapes, which this processor does not give one shape.

    Example:
        >>> rows = [{"mm_token_type_ids": torch.tensor([[0, 1]]), "pixel_values": torch.ones(4, 3)}, {}]
        >>> joined = model_inputs(rows, width=3, length=1)
        >>> joined["mm_token_type_ids"].tolist(), tuple(joined["pixel_values"].shape)
        ([[0, 0, 1, 0], [0, 0, 0, 0]], (4, 3))
    """
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        parts = [row.get(name) for row in rows]
        if name in TOKEN_INPUTS:
            found[name] = _by_token(parts, width, length)
            continue
        given = [part for part in parts if part is not None]
        shapes = {tuple(part.shape[1:]) for part in given}
        if len(shapes) > 1:
            raise ValueError(
                f"{name} must have one shape for all images of a batch, but got {sorted(shapes)}. Resize the images, "
                "or use micro-batches of one row."
            )
        found[name] = torch.cat(given)
    return {name: value.to(device) for name, value in found.items()}


def _by_token(parts: Sequence[Tensor | None], width: int, length: int) -> Tensor:
    given = next(part for part in parts if part is not None)
    whole = given.new_zeros(len(parts), width + length)
    for row, part in zip(whole, parts, strict=True):
        if part is not None:
            row[width - part.shape[1] : width] = part[0]
    return whole


def image_token(config: Any) -> int | None:
    """Id of the token that stands for a part of an image, by the model's configuration; None if it names none.

    It must not be sampled: a model cannot score a completion with a place for an image that is not there.
    """
    for name in ("image_token_id", "image_token_index"):
        if (found := getattr(config, name, None)) is not None:
            return int(found)
    return None
