"""What a preset is."""

from __future__ import annotations

from dataclasses import dataclass

from trl_offpolicy.corrections import Correction
from trl_offpolicy.objectives import Objective


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published method with its defaults.

    Args:
        name: e.g. ``paper/tis``.
        objective: the loss; its ``correction`` is the method.
        requires: fields of the batch that must be there.
        citation: paper or repository.
        formula: one line.
        notes: when to use it, and what it does differently from its source.
    """

    name: str
    objective: Objective
    requires: tuple[str, ...]
    citation: str
    formula: str
    notes: str

    @property
    def correction(self) -> Correction | None:
        """The objective's correction (or None)."""
        return self.objective.correction
