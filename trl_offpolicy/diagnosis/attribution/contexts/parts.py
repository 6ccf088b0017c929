"""Other weights in a part of the model, or for a part of the way: which parameters a sync has missed.

The change of the log-probs is nearly the sum of what the parts of a small update change. So each part is scored once,
and the sets of parts whose sum fits the mismatch follow without a forward. They are then scored as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.contexts.precision import Inside, data_restored
from trl_offpolicy.diagnosis.attribution.distances import distance
from trl_offpolicy.diagnosis.attribution.evidence import Array

MOST_NUMBERS = 2_000_000_000
"""Parameters of a model from which no copies of them are made."""
BLOCKS = 6
"""Blocks of layers that are told apart at first."""
MOST_PARTS = 10
"""Parts of which sets are made."""
DEARER = 0.02
"""Share of the mismatch that one more part must explain."""

PART = " as in "
"""Stands in the name of a test between the parts of the weights and the weights that they are taken from."""
ADAPTER_PART = "no adapter in "
"""Stands in the name of a test in which a part of the adapter is off."""
WAY = " of the way to "
"""The same for a point between the weights and those at hand, or beyond."""
SCALES = (0.1, 1.3)
"""Times the effect of the weights at hand that the engine's may have."""

Held = Mapping[str, Tensor]
"""Other values of some parameters."""


@torch.no_grad()
def captured(model: Any, inside: Inside) -> dict[str, Tensor]:
    """The parameters that a context changes, with their values in it; empty if the model is too large to copy."""
    before = {name: p.detach() for name, p in model.named_parameters()}
    if sum(p.numel() for p in before.values()) > MOST_NUMBERS:
        return {}
    before = {name: p.clone() for name, p in before.items()}
    with inside():
        return {
            name: p.detach().clone()
            for name, p in model.named_parameters()
            if p.shape == before[name].shape and not torch.equal(p.detach(), before[name])
        }


@contextmanager
def holding(model: Any, held: Held, share: float = 1.0) -> Iterator[None]:
    """A context in which parameters have gone ``share`` of the way from their values to the ``held`` ones."""
    parameters = {name: p for name, p in model.named_parameters() if name in held}
    with data_restored(list(parameters.values())):
        for name, p in parameters.items():
            p.data = held[name] if share == 1.0 else torch.lerp(p.data, held[name], share)
        yield


def type_of(name: str) -> str:
    """The kind of a parameter, in words.

    Example:
        >>> type_of("model.layers.3.self_attn.q_proj.weight"), type_of("model.norm.weight")
        ('queries, keys and values', 'norms')
    """
    for words, parts in TYPES.items():
        if any(part in name for part in parts):
            return words
    return "other parameters"


TYPES = {
    "norms": ("norm", "ln_"),
    "embeddings": ("embed", "wte"),
    "output head": ("lm_head",),
    "routers": ("mlp.gate.", "router"),
    "experts": ("experts",),
    "queries, keys and values": ("q_proj", "k_proj", "v_proj", "qkv", "c_attn", "query_key_value"),
    "outputs of attention": ("o_proj", "attn", "attention"),
    "MLPs": ("mlp", "feed_forward", "ffn"),
}


def layer_of(name: str) -> int | None:
    """Number of the layer of a parameter; None = outside the layers.

    Example:
        >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("lm_head.weight")
        (3, None)
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@dataclass(frozen=True)
class Division:
    """Parts of the parameters that do not overlap, by name."""

    parts: Mapping[str, frozenset[str]]

    def union(self, chosen: Iterable[str]) -> frozenset[str]:
        """All parameters of some parts."""
        return frozenset().union(*(self.parts[name] for name in chosen))


def divisions(names: Sequence[str]) -> list[Division]:
    """By the kind of parameter, and by depth."""
    types: dict[str, set[str]] = {}
    for name in names:
        types.setdefault(type_of(name), set()).add(name)
    layers = sorted({layer for name in names if (layer := layer_of(name)) is not None})
    blocks = [part.tolist() for part in np.array_split(layers, min(BLOCKS, max(1, len(layers)))) if len(part)]
    found = [Division({words: frozenset(held) for words, held in types.items()})]
    return [*found, _by_layer(names, blocks)]


def _by_layer(names: Sequence[str], blocks: Sequence[Sequence[int]]) -> Division:
    parts = {}
    for block in blocks:
        words = f"layer {block[0]}" if len(block) == 1 else f"layers {block[0]} to {block[-1]}"
        parts[words] = frozenset(name for name in names if layer_of(name) in block)
    rest = frozenset(name for name in names if layer_of(name) is None)
    return Division({**parts, "embeddings, head and last norm": rest} if rest else parts)


def best_sets(effects: Mapping[str, Array], change: Array) -> list[tuple[frozenset[str], float]]:
    """Sets of parts whose effects add up to ``change``, the best first, with the share that each leaves.

    Args:
        effects: (N,) change of the log-probs by each part.
        change: (N,) the change that is to be explained.
    """
    whole = distance(change) or 1e-60
    names, found = list(effects)[:MOST_PARTS], []
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            total = np.sum([effects[name] for name in chosen], axis=0)
            left = distance(change - _scale(total, change) * total) / whole
            found.append((frozenset(chosen), left + DEARER * (count - 1)))
    return sorted(found, key=lambda one: one[1])


def _scale(effect: Array, change: Array) -> float:
    """How far along an effect the change goes: an older version than the one at hand, or one in between."""
    square = float(effect @ effect)
    return float(np.clip(effect @ change / square, *SCALES)) if square else 1.0
