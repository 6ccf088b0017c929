"""What two presets do differently, one semantic after the other."""

from __future__ import annotations

from typing import NamedTuple

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.measure import term_names
from trl_offpolicy.correction.terms import GroupRejection, KeepTerm, Weight
from trl_offpolicy.correction.terms.base import number, settings_text
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets.catalog import get
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.presets.text import RATIO_TEXT

ABSENT = "-"
_MODES = {"bypass": "bypass (two policies, pi / mu)", "decoupled": "decoupled (three policies, pi / pi_old)"}
_DENOMINATORS = {"all": "dropped tokens stay", "kept": "dropped tokens leave"}
_KL_ON = {"all": "stays", "kept": "goes with them"}


class Difference(NamedTuple):
    """One semantic in which two presets differ, and what each does."""

    semantics: str
    a: str
    b: str


def diff(a: str | Preset, b: str | Preset) -> list[Difference]:
    """The semantics in which two presets differ; an empty list means that they compute the same numbers.

    Args:
        a: a preset or its name.
        b: likewise.

    Example:
        >>> for row in diff("paper/tis", "paper/icepop"):
        ...     print(*row, sep=" | ")
        weight: type | TruncateWeight | BandWeight
        weight: bounds | max_weight=2, min_weight=None | low=0.5, high=5
    """
    left, right = (semantics(get(one) if isinstance(one, str) else one) for one in (a, b))
    names = list(dict.fromkeys([*left, *right]))
    pairs = [Difference(name, left.get(name, ABSENT), right.get(name, ABSENT)) for name in names]
    return [pair for pair in pairs if pair.a != pair.b]


def semantics(preset: Preset) -> dict[str, str]:
    """Everything about a preset that changes a number, as text."""
    correction = preset.correction or Correction()
    keep = correction.keep
    return {
        **_weight_rows(correction.weights),
        **{f"keep: {name}": _keep_row(term) for name, term in zip(term_names(keep), keep, strict=True)},
        **_correction_rows(correction),
        **_objective_rows(preset.objective),
        "advantages": _named(preset.advantages) if preset.advantages is not None else "the trainer's",
        "log clamp": _clamp_row(preset.source_clamp),
        **{f"trainer: {name}": str(value) for name, value in preset.trainer.items()},
    }


def _weight_rows(weights: tuple[Weight, ...]) -> dict[str, str]:
    rows = {}
    for index, weight in enumerate(weights):
        name = "weight" if len(weights) == 1 else f"weight {index + 1}"
        rows[f"{name}: type"] = type(weight).__name__
        rows[f"{name}: level"] = weight.level
        rows[f"{name}: bounds"] = settings_text(weight, leave_out=("level", "ratio", "scope"))
        rows[f"{name}: ratio"] = RATIO_TEXT[weight.ratio]
    return rows or {"weight: type": "none (1)"}


def _keep_row(term: KeepTerm) -> str:
    bounds = settings_text(term, leave_out=("level", "statistic", "ratio", "scope"))
    return f"{bounds}, on {RATIO_TEXT[term.ratio]}"


def _correction_rows(correction: Correction) -> dict[str, str]:
    measured, order, normalisation = "all trainable tokens", "any", "none"
    # Without a keep term and a second weight nothing is dropped before something is measured.
    if correction.measure_on == "remaining" and (correction.keep or len(correction.weights) > 1):
        measured = "what earlier terms kept"
        names = [term.name for term in correction.keep]
        order = " -> ".join([*names, "weights"]) if names else "any"
    elif any(
        isinstance(term, GroupRejection) for term in correction.keep
    ):  # it counts what the terms before it dropped
        order = " -> ".join(term.name for term in correction.keep)
    if correction.normalize != "none":
        span = correction.normalize_over.replace("_", " ")
        normalisation = f"mean over {correction.normalize} units, over each {span}"
    return {
        "measured on": measured,
        "order": order,
        "normalisation": normalisation,
        "non-finite log-probs": correction.nonfinite,
        "group baseline": f"{correction.baseline} responses",
    }


def _objective_rows(objective: Objective) -> dict[str, str]:
    length = "" if objective.max_length is None else f", L = {objective.max_length}"
    reduced = ", reduced as the loss" if objective.entropy_aggregation == "loss" else ""
    kl = "none"
    if objective.kl is not None:
        kl = f"{settings_text(objective.kl)}, weighted={objective.kl_weighted}"
    return {
        "mode": _MODES[objective.mode],
        "policy loss": _named(objective.policy_loss),
        "centre of the clip": _named(objective.proximal),
        "aggregation": f"{objective.aggregation}{length}",
        "denominator": _DENOMINATORS[objective.denominator],
        "KL of dropped tokens": _KL_ON[objective.kl_on],
        "KL term": kl,
        "drift term": f"{number(objective.drift_coef)} log^2(pi / mu)" if objective.drift_coef else "none",
        "advantages shaped by": ", ".join(_named(one) for one in objective.shaping) or "nothing",
        "entropy bonus": f"{number(objective.entropy_coef)}{reduced}",
        "scope": objective.scope,
    }


def _named(item: object) -> str:
    return f"{type(item).__name__}: {settings_text(item)}"


def _clamp_row(source: float | None) -> str:
    here = f"+-{number(LOG_RATIO_CLAMP)} nats"
    if source == LOG_RATIO_CLAMP:
        return here
    there = "none" if source is None else f"+-{number(source)} nats"
    return f"{here} (source: {there})"
