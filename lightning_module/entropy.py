"""TRL's entropy options in Lightning: which tokens have a policy term, and the coefficient of the bonus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_module.measuring import Measuring
from trl_offpolicy.functional.masks import high_entropy_mask
from trl_offpolicy.objective.coefficients import EntropyControl, EntropyOptions, StepSums
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets.preset import Preset


class Entropy:
    """The entropy options of a module.

    Args:
        spec: the setting ``entropy``: a mapping of :class:`~trl_offpolicy.objective.coefficients.EntropyOptions`.

    Raises:
        ValueError: it is not valid; the message names the field.
    """

    def __init__(self, spec: Any) -> None:
        self.options = EntropyOptions.parse(spec)
        self._control = EntropyControl(self.options, self.options.entropy_coef)

    def in_preset(self, preset: Preset) -> Preset:
        """The preset with the coefficient of the options.

        Raises:
            ValueError: the preset's objective has a coefficient, too.
        """
        coefficient = self.options.entropy_coef
        if coefficient == 0.0 and not self.adapts:
            return preset
        if preset.objective.entropy_coef != 0.0:
            raise ValueError("objective.entropy_coef and entropy set the same quantity; set one.")
        return replace(preset, objective=replace(preset.objective, entropy_coef=coefficient))

    @property
    def adapts(self) -> bool:
        """True if the coefficient moves in training."""
        return self._control.adapts

    def policy_mask(self, entropies: Tensor, mask: Tensor) -> Tensor | None:
        """(B, T) bool: the tokens with a policy term; None = all. All ranks call it.

        Args:
            entropies: (B, T), nats.
            mask: (B, T) bool, trainable tokens.
        """
        if self.options.top_entropy_quantile >= 1.0:
            return None
        return high_entropy_mask(entropies, mask, top=self.options.top_entropy_quantile)

    def in_force(self, objective: Objective) -> Objective:
        """The objective of this optimizer step, with its present coefficient."""
        return replace(objective, entropy_coef=self._control.in_force) if self.adapts else objective

    def has_bonus(self, objective: Objective) -> bool:
        """True if the loss has an entropy bonus, or may get one: then TRL's ``policy_loss`` is logged."""
        return self.adapts or objective.entropy_coef != 0.0

    def end_step(self, step: StepSums, objective: Objective, measuring: Measuring) -> None:
        """Move the coefficient by what the step measured on all ranks, and log it."""
        if self.adapts:
            self._control = self._control.after(step.mean_entropy)
        if self.has_bonus(objective):
            measuring.add_mean("entropy_coef", self._control.coef if self.adapts else objective.entropy_coef)

    def state_dict(self) -> dict[str, float]:
        """The coefficient, for a checkpoint; empty if it does not move."""
        return self._control.state_dict()

    def start(self, state: Mapping[str, float]) -> None:
        """Begin a run, or continue one from :meth:`state_dict`."""
        self._control = EntropyControl(self.options, self.options.entropy_coef).restored(state)
