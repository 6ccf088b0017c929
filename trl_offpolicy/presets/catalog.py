"""The named presets. Each builder's keyword arguments are the options that ``presets.get`` accepts."""

from __future__ import annotations

from collections.abc import Callable

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.presets import papers_masks, papers_weights
from trl_offpolicy.presets.frameworks import named as frameworks
from trl_offpolicy.presets.frameworks.verl import named as verl_presets
from trl_offpolicy.presets.preset import Preset, make_preset


def measure() -> Preset:
    """Diagnostics only."""
    return make_preset(
        "measure",
        Correction(),
        citation="-",
        formula="w = 1, nothing dropped",
        notes="No correction; every diagnostic that the batch allows is computed.",
    )


BUILDERS: dict[str, Callable[..., Preset]] = {
    "measure": measure,
    **papers_weights.BUILDERS,
    **papers_masks.BUILDERS,
    **frameworks.BUILDERS,
    **verl_presets.BUILDERS,
}


def groups() -> dict[str, list[str]]:
    """Preset names by what stands before the slash, those without one first."""
    found: dict[str, list[str]] = {}
    for name in sorted(BUILDERS, key=lambda name: ("/" in name, name)):
        found.setdefault(name.rpartition("/")[0] or "general", []).append(name)
    return found
