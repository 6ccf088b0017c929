"""The table of all kinds of fault, and of the clean variants."""

from __future__ import annotations

import engine_kinds as engine
import other_kinds as other
from kind import Kind

FAMILIES = (
    engine.prompts,
    engine.sampling,
    engine.architecture,
    engine.precision,
    other.bookkeeping,
    engine.weights,
    other.trainer,
    engine.routing,
    engine.mixtures,
    other.over_time,
)
KINDS: dict[str, Kind] = {kind.name: kind for family in FAMILIES for kind in family()}
CLEANS: dict[str, Kind] = {kind.name: kind for kind in other.clean()}


def kind_of(name: str) -> Kind:
    """The kind of a case."""
    return CLEANS[name] if name in CLEANS else KINDS[name]
