"""The weights of the suite's policies: a base, real updates of it by version, and another adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor

VERSIONS = 5
"""Updates; version 0 is the base, and the trainer holds the last one."""
Change = Tensor | tuple[Tensor, Tensor]
"""Change of a weight: a tensor of its shape, or two factors, up (out, r) and down (r, in)."""
Version = float | str
"""0 to VERSIONS (fractions are in between), or "other"."""
Choice = Callable[[str], tuple[Version, float]]
"""Name of a parameter -> its version, and the factor of its change from the base."""


@dataclass(frozen=True)
class Updates:
    """Changes from the base by name of the parameter: after each version, and of the other adapter."""

    versions: list[Mapping[str, Change]]
    other: Mapping[str, Change]


class Weights:
    """Sets a model's weights to any version, whole or in part. The model holds the last version otherwise.

    Args:
        model: with the base weights.
        updates: what was trained on them.
    """

    def __init__(self, model: Any, updates: Updates) -> None:
        self.model, self.updates = model, updates
        parameters = dict(model.named_parameters())
        names = sorted(set(updates.other).union(*updates.versions))
        self.parameters = {name: parameters[name] for name in names}
        self.base = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._write({name: (VERSIONS, 1.0) for name in names})

    def value(self, name: str, version: Version, scale: float = 1.0) -> Tensor:
        """A parameter at a version; fractions of a version are on the line between its neighbours."""
        value = self.base[name].clone()
        if isinstance(version, str):
            return _added(value, self.updates.other.get(name), scale)
        low = floor(version)
        share = version - low
        for number, part in ((low, 1 - share), (low + 1, share)):
            if number > 0 and part:
                value = _added(value, self.updates.versions[number - 1].get(name), scale * part)
        return value

    @contextmanager
    def holding(self, choice: Choice) -> Iterator[None]:
        """A context in which each parameter has the chosen version."""
        chosen = {name: choice(name) for name in self.parameters}
        changed = {name: what for name, what in chosen.items() if what != (VERSIONS, 1.0)}
        self._write(changed)
        try:
            yield
        finally:
            self._write({name: (VERSIONS, 1.0) for name in changed})

    def at(self, version: Version, scale: float = 1.0) -> Any:
        """A context in which all have the same version."""
        return self.holding(lambda _name: (version, scale))

    @torch.no_grad()
    def _write(self, chosen: Mapping[str, tuple[Version, float]]) -> None:
        for name, (version, scale) in chosen.items():
            self.parameters[name].copy_(self.value(name, version, scale))


def _added(value: Tensor, change: Change | None, scale: float) -> Tensor:
    if change is None:
        return value
    whole = change[0] @ change[1] if isinstance(change, tuple) else change
    return value + scale * whole.to(value.dtype)
