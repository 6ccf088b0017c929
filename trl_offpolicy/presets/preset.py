"""The class :class:`Preset`: an objective, with its source and its formula."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.objective.advantages import AdvantageEstimator
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.parts import build
from trl_offpolicy.presets.auto import AUTO, AutoOptions
from trl_offpolicy.presets.text import formula_of

logger = logging.getLogger(__name__)

ENGINE = "engine"
"""The field whose options a preset sets one by one."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published method, or another framework's configuration.

    Args:
        name: e.g. ``paper/tis``.
        objective: the loss; its ``correction`` is the method.
        requires: fields that the batch must have.
        citation: paper or repository.
        formula: one line.
        notes: when to use it, and what it does differently from its source.
        source_clamp: nats at which the source clamps log-ratios before ``exp``; None = it does not. This kit always
            clamps at 20, which only a ratio beyond e^20 = 4.9e8 (or below its inverse) can tell apart.
        advantages: the estimator; None = the method names none, so the advantages are the trainer's own.
        auto: the options by which the trainer chooses the correction while it trains; ``correction`` then holds what
            all of the candidates share. None = the correction is that of the objective.
        trainer: what of the method is no part of the loss, as fields of the trainer's configuration (``control``,
            ``routing_replay``). Both trainers take them where the configuration leaves them at their defaults. Options
            of ``engine`` are taken one by one, because nearly every configuration has some of its own.
    """

    name: str
    objective: Objective
    requires: tuple[str, ...]
    citation: str
    formula: str
    notes: str
    source_clamp: float | None = LOG_RATIO_CLAMP
    advantages: AdvantageEstimator | None = None
    auto: AutoOptions | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correction(self) -> Correction | None:
        """The correction of the objective, or None."""
        return self.objective.correction

    @property
    def objective_changes(self) -> Mapping[str, Any]:
        """The objective's fields that the method itself sets (a bypass mode, a loss, a denominator).

        A trainer must take them over beside the correction. All other fields are free for the user's own loss.
        """
        plain = Objective()
        names = [item.name for item in fields(Objective) if item.name != "correction"]
        return {name: value for name in names if (value := getattr(self.objective, name)) != getattr(plain, name)}

    def fields_for(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``trainer`` that a configuration leaves at their defaults. A warning says which are taken, or not.

        Args:
            given: the fields of the configuration. An engine may be its name, which becomes its ``type``.
            defaults: their defaults.
        """
        taken: dict[str, Any] = {}
        for name, value in self.trainer.items():
            own = given[name]
            if name == ENGINE and isinstance(own, str | Mapping | None):
                options = {"type": own} if isinstance(own, str) else dict(own or {})
                said = {option: setting for option, setting in options.items() if setting is not None}
                found = {option: wanted for option, wanted in value.items() if self._takes(name, option, wanted, said)}
                taken |= {name: {**options, **deepcopy(found)}} if found else {}
            elif self._takes("", name, value, {} if own == defaults[name] else given):
                taken[name] = deepcopy(value)
        return taken

    def _takes(self, of: str, name: str, value: Any, given: Mapping[str, Any]) -> bool:
        """Whether ``value`` is taken, because ``given`` has no other one; says so, with ``of`` as the place."""
        field = f"{of}.{name}" if of else name
        if name not in given:
            logger.warning("%s sets %s: %s.", self.name, field, value)
        elif given[name] != value:
            logger.warning("%s is without its %s: %s, because that is %r.", self.name, field, value, given[name])
        return name not in given

    def described(self) -> dict[str, str]:
        """The method for ``run.json`` and the model card, with the formula of the present objective."""
        described = {
            "preset": self.name,
            "citation": self.citation,
            "formula": formula_of(self.objective),
            "correction": repr(self.correction),
            "objective": repr(replace(self.objective, correction=None)),
        }
        if self.auto is not None:
            described |= {"formula": self.formula, "correction": "chosen while training: see actions.jsonl"}
            described |= {"candidates": ", ".join(one["name"] for one in self.auto.candidates)}
        return described


def make_preset(
    name: str,
    correction: Correction,
    *,
    citation: str,
    notes: str,
    formula: str | None = None,
    source_clamp: float | None = LOG_RATIO_CLAMP,
    advantages: AdvantageEstimator | None = None,
    trainer: Mapping[str, Any] | None = None,
    **objective: Any,
) -> Preset:
    """A preset from its correction.

    Args:
        name: e.g. ``paper/tis``.
        correction: the method.
        citation: paper or repository.
        notes: when to use it.
        formula: one line; None = written from the terms.
        source_clamp: see :class:`Preset`.
        advantages: the estimator of the advantages, if the method names one.
        trainer: see :class:`Preset`.
        **objective: fields of :class:`~trl_offpolicy.Objective` that the method sets.
    """
    own = own_preset(Objective(correction=correction, **objective))
    return replace(
        own,
        name=name,
        citation=citation,
        formula=own.formula if formula is None else formula,
        notes=notes,
        source_clamp=source_clamp,
        advantages=advantages,
        trainer=trainer or {},
    )


def auto_preset(**options: Any) -> Preset:
    """The preset of ``offpolicy: auto``: a correction without terms, and the options of the choice.

    Raises:
        ValueError: an option is unknown or out of range.

    Example:
        >>> auto_preset(ess_floor=0.3).auto.ess_floor
        0.3
    """
    made: AutoOptions = build(AutoOptions, options, where=f"{AUTO}.options")
    return Preset(
        name=AUTO,
        objective=Objective(correction=Correction()),
        requires=("sampling_per_token_logps",),
        citation="-",
        formula="of the corrections whose variance holds, the one that misses the least of the target",
        notes="Chosen from the first generation batch, revised while training.",
        auto=made,
    )


def own_preset(objective: Objective) -> Preset:
    """The user's own objective as a preset, which has no published name."""
    return Preset(
        name="own",
        objective=objective,
        requires=_required_fields(objective),
        citation="-",
        formula=formula_of(objective),
        notes="given as an object",
    )


def _required_fields(objective: Objective) -> tuple[str, ...]:
    keep = () if objective.correction is None else objective.correction.keep
    required = ["sampling_per_token_logps"] if objective.needs_sampling else []
    if any(term.scope == "group" for term in keep):
        required.append("group_ids")
    required += [field for term in keep for field in term.requires]
    made_here = ("sampling_log_ratios", "mismatch_log_ratios")
    required += [field for field in objective.policy_loss.reads if field not in made_here]
    required += [name for one in objective.shaping for name in one.reads]
    return tuple(dict.fromkeys(required))
