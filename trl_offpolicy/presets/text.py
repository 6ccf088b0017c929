"""An objective's correction as one line of text."""

from __future__ import annotations

from collections.abc import Iterable

from trl_offpolicy.correction.terms import KeepTerm, Weight
from trl_offpolicy.correction.terms.base import number
from trl_offpolicy.objective.objective import Objective

RATIO_TEXT = {"old/sampling": "pi_old / mu", "current/old": "pi / pi_old", "current/sampling": "pi / mu"}


def formula_of(objective: Objective) -> str:
    """The weights, the keep terms and, unless it is ``pi_old / mu``, their ratio in one line."""
    correction = objective.correction
    parts = [] if correction is None else [weight.formula for weight in correction.weights]
    if correction is None or not correction.weights:
        parts = ["w = 1"]
    keep = () if correction is None else correction.keep
    parts += [term.formula for term in keep] or ["nothing dropped"]
    if objective.mode == "bypass":
        parts.append(f"{type(objective.policy_loss).__name__} on pi / mu")
    if objective.drift_coef:
        parts.append(f"+ {number(objective.drift_coef)} log^2(pi / mu) on every token")
    held = _ratios(correction.weights, keep) if correction is not None else set()
    if others := sorted(held - {"old/sampling"}):
        parts.append("rho = " + " and ".join(RATIO_TEXT[ratio] for ratio in others))
    return "; ".join(parts)


def _ratios(weights: Iterable[Weight], keep: Iterable[KeepTerm]) -> set[str]:
    return {weight.ratio for weight in weights} | {term.ratio for term in keep if term.reads_ratio}
