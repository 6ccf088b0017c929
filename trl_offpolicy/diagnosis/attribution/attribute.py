"""Finds the cause from the evidence: tests in order, declared settings, and the results of tests with the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trl_offpolicy.diagnosis.attribution.evidence import Level, Statement, TokenEvidence, differences, excluded
from trl_offpolicy.diagnosis.attribution.features import Features, extract
from trl_offpolicy.diagnosis.attribution.hypotheses import REFERENCE, at_fault, left_share
from trl_offpolicy.diagnosis.attribution.signatures import (
    CLEAR,
    DIFFUSE,
    MEMBERS,
    OTHER_WEIGHTS,
    Limits,
    Signature,
    read_signatures,
)

REMOVED = 0.2
"""A tested hypothesis is the cause if it leaves at most this share of the mismatch."""
REDUCED = 0.7
"""The same for precision, whose simulation reproduces an engine's rounding errors only in part."""


@dataclass(frozen=True)
class Attribution:
    """Why engine and trainer differ.

    Args:
        cause: name in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`; "none" = no mismatch above the noise floor,
            "unknown" = no test explains it, "other_weights" = one of three causes that log-probs do not tell apart.
        coarse: the same, but stale weights, wrong adapter and policy staleness are all "other_weights".
        confidence: 0 to 1: margin of the deciding test over its limit. It is not a probability.
        runner_up: the next best cause, or None.
        reasons: sentences with the numbers.
        features: features of the log-probs.
        level: what was observed.
        detail: the exact setting, e.g. "temperature 0.9" or "int8 weights"; may be empty.
    """

    cause: str
    coarse: str
    confidence: float
    runner_up: str | None
    reasons: tuple[str, ...]
    features: Features
    level: Level
    detail: str = ""


def coarse_of(cause: str) -> str:
    """Coarse class of a cause.

    Example:
        >>> coarse_of("stale_weights"), coarse_of("dropout")
        ('other_weights', 'dropout')
    """
    return OTHER_WEIGHTS if cause in MEMBERS else cause


def attribute(evidence: TokenEvidence, limits: Limits | None = None) -> Attribution:
    """The most likely cause of a mismatch at the level that ``evidence`` allows.

    With log-probs alone the cause is that of the first test in :data:`.signatures.TESTS` that passes, or "unknown".
    With declarations, a declared difference decides between causes that look alike, and causes that the declarations
    exclude are dropped. With the model, the hypothesis that removes the mismatch is the cause.

    Args:
        evidence: the batch; :meth:`.evidence.TokenEvidence.at_level` leaves a part of it out.
        limits: limits of the tests; None = the defaults.
    """
    features = extract(evidence)
    signatures = read_signatures(features, limits)
    passed = [s for s in signatures if s.score >= 0.5]
    ranked = sorted(signatures, key=lambda s: -s.score)
    first = passed[0] if passed else Signature("unknown", 1 - ranked[0].score, "no test explains the mismatch")
    if first.cause == "none":
        return _answer(evidence, features, first, ranked)
    # A hypothesis tested with the model outranks the log-probs' signatures, except clear traces of bookkeeping.
    if evidence.tested and not (passed and first.cause in CLEAR):
        found = _tested(evidence, features, first, ranked)
        if found is not None:
            return found
    if evidence.engine is None or evidence.trainer is None:
        return _answer(evidence, features, first, ranked)
    return _declared(evidence, features, signatures, first, ranked)


def _answer(
    evidence: TokenEvidence, features: Features, chosen: Signature, ranked: Sequence[Signature], *,
    reasons: tuple[str, ...] = (), detail: str = "",
) -> Attribution:  # fmt: skip
    runner = next((s.cause for s in ranked if s.cause not in (chosen.cause, "none") and s.score > 0.01), None)
    return Attribution(
        cause=chosen.cause,
        coarse=coarse_of(chosen.cause),
        confidence=min(max(chosen.score, 0.0), 1.0),
        runner_up=runner,
        reasons=(chosen.reason, *reasons),
        features=features,
        level=evidence.level,
        detail=detail or _detail(chosen.cause, features),
    )


def _detail(cause: str, features: Features) -> str:
    slope = features.temperature_slope
    if cause == "temperature" and math.isfinite(slope) and slope < 0.9:
        return f"about {1 / (1 - slope):.3g} times the trainer's temperature"
    return ""


# ------------------------------------------------------------------------------------------------ what was declared


def _declared(
    evidence: TokenEvidence, features: Features, signatures: Sequence[Signature], first: Signature,
    ranked: Sequence[Signature],
) -> Attribution:  # fmt: skip
    """Keep a cause that leaves a clear trace. Among causes that look alike, the declarations decide."""
    assert evidence.engine is not None and evidence.trainer is not None
    stated = differences(evidence.engine, evidence.trainer)
    ruled_out = excluded(evidence.engine, evidence.trainer)
    if first.cause not in (*DIFFUSE, "unknown"):
        reasons = (stated[first.cause].text,) if first.cause in stated else ()
        return _answer(evidence, features, first, ranked, reasons=reasons)
    # The log-probs alone do not decide: of the declared differences, take the one that they support most.
    certain = [s for s in stated.values() if s.certain]
    best = max(certain, key=lambda s: _support(s.cause, signatures), default=None)
    if best is not None:
        score = max(0.5, _support(best.cause, signatures))
        return _answer(evidence, features, Signature(best.cause, score, best.text), ranked, reasons=(first.reason,))
    return _undeclared(evidence, features, signatures, stated, ruled_out, ranked)


def _support(cause: str, signatures: Sequence[Signature]) -> float:
    """Largest score of the cause's tests."""
    return max((s.score for s in signatures if s.cause == coarse_of(cause)), default=0.0)


def _undeclared(
    evidence: TokenEvidence, features: Features, signatures: Sequence[Signature], stated: dict[str, Statement],
    ruled_out: frozenset[str], ranked: Sequence[Signature],
) -> Attribution:  # fmt: skip
    """Both sides declare the same, so the fault left no trace there, such as a sync that failed unnoticed."""
    for signature in signatures:
        if signature.score < 0.5 or signature.cause == "none":
            continue
        if signature.cause == OTHER_WEIGHTS or signature.cause in ruled_out & {"precision", "prompt_difference"}:
            text = "both sides declare the same weights, so a sync has failed or not taken effect"
            chosen = Signature("stale_weights", signature.score, text)
            return _answer(evidence, features, chosen, ranked, reasons=(signature.reason,))
        if signature.cause not in ruled_out:
            reasons = (stated[signature.cause].text,) if signature.cause in stated else ()
            return _answer(evidence, features, signature, ranked, reasons=reasons)
    unknown = Signature("unknown", 1 - ranked[0].score, "no test that the declarations allow explains the mismatch")
    return _answer(evidence, features, unknown, ranked)


# --------------------------------------------------------------------------------------------------- what was tested


def _tested(
    evidence: TokenEvidence, features: Features, first: Signature, ranked: Sequence[Signature]
) -> Attribution | None:
    """The hypothesis that removes the mismatch; None if none does.

    A less precise router is preferred to a less precise whole model, which flips the same experts.
    """
    if REFERENCE in evidence.tested and at_fault(evidence, evidence.tested[REFERENCE]) == "trainer":
        return _trainer_fault(evidence, features, first, ranked)
    left = {name: left_share(evidence, name) for name in evidence.tested if name != REFERENCE}
    if not left:
        return None
    best = min(left, key=lambda name: (not (":routing:" in name and left[name] <= REMOVED), left[name]))
    _, cause, detail = best.split(":", 2)
    if left[best] > (REDUCED if cause == "precision" else REMOVED):
        return None
    cause = _member(evidence, cause)
    sentence = (
        f"scoring the same tokens with {cause.replace('_', ' ')} {detail} leaves {left[best]:.1%} of the mismatch"
    )
    chosen = Signature(cause, 1 - left[best] / 2, sentence)
    return _answer(evidence, features, chosen, ranked, reasons=(first.reason,), detail=detail)


def _member(evidence: TokenEvidence, cause: str) -> str:
    """Which of the causes with other weights it is; older weights, for example, are staleness if a lag is declared."""
    if cause not in MEMBERS or evidence.engine is None or evidence.trainer is None:
        return cause
    stated = differences(evidence.engine, evidence.trainer)
    return next((name for name in MEMBERS if name in stated), cause)


def _trainer_fault(
    evidence: TokenEvidence, features: Features, first: Signature, ranked: Sequence[Signature]
) -> Attribution | None:
    """The cause if plain scoring agrees with the engine: then the trainer scored something else. None otherwise."""
    reason = "plain scoring of the same tokens agrees with the engine, not with the trainer"
    prompts = {
        name: left_share(evidence, name) for name in evidence.tested if name.startswith("trainer:prompt_difference")
    }
    best = min(prompts, key=lambda name: prompts[name], default=None)
    if best is not None and prompts[best] <= REMOVED:
        text = f"the trainer's log-probs are those of the prompts with {best.split(':', 2)[2]}"
        chosen = Signature("prompt_difference", 1 - prompts[best] / 2, text)
        return _answer(evidence, features, chosen, ranked, reasons=(reason,), detail=best.split(":", 2)[2])
    if first.cause in ("dropout", "misalignment"):
        return _answer(evidence, features, first, ranked, reasons=(reason,))
    return _answer(evidence, features, Signature("prompt_difference", 0.5, reason), ranked, reasons=(first.reason,))
