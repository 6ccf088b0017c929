"""A row of the catalog of presets, and the papers that several rows cite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.presets.text import formula_of

ICEPOP = "Ling team 2025, Ring-1T, 'Every step evolves' (arXiv:2510.18855), section 2.3.2, IcePop"
DEEPSEEK = "DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), Eq. 8-9"
DPPO = "Qi et al. 2026, DPPO, 'Rethinking the trust region in LLM RL' (arXiv:2602.04879)"


@dataclass(frozen=True)
class Row:
    """A named preset.

    Args:
        method: from the preset's options (keyword arguments, each with its default) to the correction, or to the preset
            that a framework's own options give.
        notes: when to use it, and what it does differently from its source.
        citation: paper or repository; None = the framework's, as its translation has it.
        formula: one line; None = written from the terms.
        source_clamp: see :class:`~trl_offpolicy.presets.Preset`; a framework's translation sets it itself.
        objective: fields of :class:`~trl_offpolicy.Objective` that the method sets beside the correction.
    """

    method: Callable[..., Correction | Preset]
    notes: str
    citation: str | None = None
    formula: str | None = None
    source_clamp: float | None = LOG_RATIO_CLAMP
    objective: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """{name: default} of the options, from the signature of the method."""
        return {name: option.default for name, option in inspect.signature(self.method).parameters.items()}

    def build(self, name: str, **options: Any) -> Preset:
        """The preset of this row with the given options, called ``name``."""
        made = self.method(**options)
        if isinstance(made, Correction):
            made = make_preset(name, made, citation="", notes="", source_clamp=self.source_clamp, **self.objective)
        # A formula in words holds for the default ratio. For another ratio it is written from the terms.
        same_ratio = "ratio" not in options or options["ratio"] == self.defaults["ratio"]
        return replace(
            made,
            name=name,
            notes=self.notes,
            citation=self.citation or made.citation,
            formula=self.formula if self.formula and same_ratio else formula_of(made.objective),
        )
