"""Finds the cause from the evidence: what was seen on both sides, tests with the model, declarations, traces.

"unknown" is an answer: a cause is named only if it was seen, if a test removes most of the mismatch, or if the
log-probs carry a trace that hardly any other cause leaves. Otherwise the closest causes and the next test to run are
given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trl_offpolicy.diagnosis.attribution.alternatives import against, alternatives
from trl_offpolicy.diagnosis.attribution.contexts.parts import ADAPTER_PART, PART, WAY
from trl_offpolicy.diagnosis.attribution.evidence import Declared, Level, Seen, TokenEvidence, differences, excluded
from trl_offpolicy.diagnosis.attribution.hypotheses import FLEXIBLE
from trl_offpolicy.diagnosis.attribution.traces.features import Features, disagreeing_rows, extract
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_rms
from trl_offpolicy.diagnosis.attribution.traces.signatures import (
    DIFFUSE,
    MEMBERS,
    OTHER_WEIGHTS,
    Limits,
    Signature,
    read_signatures,
)
from trl_offpolicy.diagnosis.attribution.trials.search import FAR, LEAST_TOKENS
from trl_offpolicy.diagnosis.attribution.trials.shares import REFERENCE, at_fault, left_in_part, left_share
from trl_offpolicy.diagnosis.causes import CAUSES

Basis = Literal["seen", "tested", "declared", "log-probs"]
REMOVED = 0.25
"""A tested cause is named if it leaves at most this share of the mismatch."""
CLOSE = 0.1
"""The same between two sides that both declare float32."""
REDUCED = 0.7
"""The same for precision, whose simulation reproduces an engine's rounding errors only in part."""
BEYOND_NOISE = 0.95
"""Confidence of a test or a sight that explains also what looks like noise in the trainer."""
NAMED = 0.5
"""Confidence below which the answer is "unknown"."""


@dataclass(frozen=True)
class Attribution:
    """Why engine and trainer differ.

    Args:
        cause: name in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`; "none" = no mismatch above the noise floor,
            "unknown" = nothing that was seen or tested explains it.
        coarse: the same, but stale weights, wrong adapter and policy staleness are all "other_weights".
        confidence: 0 to 1, set by hand for each kind of answer; ``benchmarks/faults`` shows how many of the answers of
            each confidence were right. 0 for "unknown".
        runner_up: the next best cause, or None.
        reasons: sentences with the numbers.
        features: features of the log-probs.
        level: what was observed.
        detail: the exact setting, e.g. "temperature 0.9" or "int8 weights"; may be empty.
        basis: what the answer rests on.
        explained: share of the mismatch that the cause explains, 0 to 1; NaN if it was not tested.
        parts: (cause, share of the mismatch) of each part where two causes were found together.
        next_test: what to run or look at next; empty if the cause was seen.
        alternatives: causes that leave the same evidence and that nothing rules out; ``next_test`` tells them apart.
    """

    cause: str
    coarse: str
    confidence: float
    runner_up: str | None
    reasons: tuple[str, ...]
    features: Features
    level: Level
    detail: str = ""
    basis: Basis = "log-probs"
    explained: float = math.nan
    parts: tuple[tuple[str, float], ...] = ()
    next_test: str = ""
    alternatives: tuple[str, ...] = ()


def coarse_of(cause: str) -> str:
    """Coarse class of a cause.

    Example:
        >>> coarse_of("stale_weights"), coarse_of("dropout")
        ('other_weights', 'dropout')
    """
    return OTHER_WEIGHTS if cause in MEMBERS else cause


@dataclass(frozen=True)
class _Answer:
    """A cause with what speaks for it; ``clear`` = hardly another one leaves that."""

    cause: str
    confidence: float
    reason: str
    basis: Basis
    detail: str = ""
    explained: float = math.nan
    parts: tuple[tuple[str, float], ...] = ()
    clear: bool = False


def attribute(evidence: TokenEvidence, limits: Limits | None = None) -> Attribution:
    """The cause of a mismatch, or "unknown", at the level that ``evidence`` allows.

    Args:
        evidence: the batch; :meth:`.evidence.TokenEvidence.at_level` leaves a part of it out.
        limits: limits of the tests; None = the defaults.
    """
    features = extract(evidence)
    signatures = [s for s in read_signatures(features, limits) if not _impossible(evidence, s.cause)]
    answers = [
        *_seen(evidence, features),
        *_tested(evidence, features),
        *_by_trace(evidence, features, signatures),
        *_in_some_rows(evidence, limits),
    ]
    answers.sort(key=lambda one: (-one.confidence, -one.explained if math.isfinite(one.explained) else 0.0))
    # A trainer that differs from itself hides every other trace, unless a test with the model explains it.
    certain = answers and answers[0].basis in ("seen", "tested") and answers[0].confidence >= BEYOND_NOISE
    first = {s.cause: s for s in reversed(signatures)}
    agrees = first["none"].score >= 0.5  # then a fault that is no mismatch is what there is to tell
    unseen = ("repeated_draws", "nonfinite") if agrees else ()
    for cause in ("dropout", "unreported_sampling", *unseen, "none"):
        if first[cause].score >= 0.5 and not (cause == "dropout" and certain):
            sure = CONFIDENCE[cause]
            if cause == "none" and features.k3 > BEYOND_FLOOR * features.floor:
                sure *= HIDDEN
            if cause == "unreported_sampling" and _other_entropies(evidence, features):
                sure *= DOUBTFUL
            if cause == "dropout" and evidence.trainer is not None and evidence.trainer.dropout == 0.0:
                sure *= DECLARED_EQUAL
            chosen = _Answer(cause, sure, first[cause].reason, "log-probs")
            return _report(evidence, features, chosen, [])
    named = [one for one in answers if one.confidence >= NAMED]
    chosen = named[0] if named else _unknown(answers)
    return _report(evidence, features, chosen, [one for one in answers if one is not chosen])


def _other_entropies(evidence: TokenEvidence, features: Features) -> bool:
    """Whether a selection of tokens, or entropies of another kind, are as likely as draws from another distribution."""
    sides = (evidence.engine, evidence.trainer)
    tempered = any(side is not None and side.temperature not in (None, 1.0) for side in sides)
    return features.surprise > 0 or features.entropies_in_bits or tempered


def _report(evidence: TokenEvidence, features: Features, chosen: _Answer, others: Sequence[_Answer]) -> Attribution:
    runner = next((one for one in others if one.cause not in (chosen.cause, "none")), None)
    reasons = [chosen.reason]
    if runner is not None and runner.reason not in reasons:
        reasons.append(runner.reason)
    if REFERENCE in evidence.tested and chosen.cause not in NO_MISMATCH:
        side = at_fault(evidence, evidence.tested[REFERENCE])
        reasons.append(f"scored plainly, the same tokens disagree with the {side}: its side is at fault")
    reasons += [one.text for one in evidence.seen if one.text not in chosen.reason]
    diffuse = chosen.basis in ("log-probs", "declared") and not chosen.clear
    alike = alternatives(evidence, chosen.cause, features) if diffuse else None
    return Attribution(
        cause=chosen.cause,
        coarse=coarse_of(chosen.cause),
        confidence=min(max(chosen.confidence, 0.0), 1.0),
        runner_up=None if runner is None else runner.cause,
        reasons=tuple(reasons),
        features=features,
        level=evidence.level,
        detail=chosen.detail,
        basis=chosen.basis,
        explained=chosen.explained,
        parts=chosen.parts,
        next_test=" ".join(filter(None, (_next_test(evidence, chosen, runner), "" if alike is None else alike.text))),
        alternatives=() if alike is None else alike.causes,
    )


def _unknown(answers: Sequence[_Answer]) -> _Answer:
    """No answer is good enough. The best one is the reason's subject."""
    if not answers:
        return _Answer("unknown", 0.0, "nothing that was looked at explains the mismatch", "log-probs")
    best = answers[0]
    share = "" if math.isnan(best.explained) else f", which explains {best.explained:.0%} of the mismatch"
    text = f"nothing explains most of the mismatch; closest: {best.cause.replace('_', ' ')} {best.detail}".rstrip()
    return _Answer("unknown", 0.0, text + share, best.basis, explained=best.explained)


def _next_test(evidence: TokenEvidence, chosen: _Answer, runner: _Answer | None) -> str:
    if chosen.cause == "none" or (chosen.basis == "seen" and chosen.cause not in ("unknown", "on_purpose")):
        return ""
    if chosen.cause in CAUSES:
        return CAUSES[chosen.cause].confirm
    if not evidence.tested:
        return (
            "Run trl-offpolicy probe with the run's model, engine and settings: it asks both sides for their weights "
            "and settings and scores the same tokens under every cause."
        )
    closest = CAUSES[runner.cause].confirm + " " if runner is not None and runner.cause in CAUSES else ""
    return closest + (
        "Compare what both sides really use: the ids of the rendered prompt, every weight tensor, the model "
        "configuration and the sampling parameters; then score with the engine itself (prompt_logprobs)."
    )


# --------------------------------------------------------------------------------------------------------- confidence

CONFIDENCE = {
    "none": 0.95,
    "repeated_draws": 0.9,
    "nonfinite": 0.9,
    "unreported_sampling": 0.8,
    # Traces in log-probs that hardly any other cause leaves.
    "tool_tokens": 0.85,
    "misalignment": 0.9,
    "temperature": 0.85,
    "truncated_sampling": 0.85,
    "logit_processors": 0.7,
    "dropout": 0.85,
    # Traces that several causes share.
    "routing": 0.4,
    "precision": 0.4,
    "prompt_difference": 0.3,
    OTHER_WEIGHTS: 0.45,
}
"""Confidence in answers from log-probs alone, by cause; set by hand on the tune side of ``benchmarks/faults``."""
SEEN = {"precision": 0.8, "parallelism": 0.4, "on_purpose": 0.8}
"""The same for a difference that was seen: these are there in many healthy runs, any other is the cause."""
BEYOND_FLOOR, HIDDEN = 20.0, 0.8
"""Times the measured floor from which 16 bits on both sides are why there is none, and the factor: as much may hide."""
DOUBTFUL = 0.7
"""Factor for tokens that may have been selected, or whose entropies may be of another kind."""
DECLARED_EQUAL = 0.7
"""Factor for a cause of which both sides declare that it is equal: a declaration may be wrong."""
CONTRADICTED = 0.5
"""Factor for a cause that something in the log-probs speaks against: it is then below what is named."""
CLEAR = 0.8
"""Confidence in a cause of several with like traces that left one of its own."""
UNSEEN, UNSUPPORTED = (OTHER_WEIGHTS, "prompt_difference"), 0.75
"""Causes that mostly leave a trace, and the factor where the tokens show none: a lag or a name of an adapter that
differs is there in many healthy runs."""
SOME_ROWS, OF_A_REQUEST = 0.2, ("temperature", "truncated_sampling", "logit_processors")
"""Share of rows that agree at every token, from which on the others are looked at alone; and the causes that are
settings of a request, which some requests may have and others not."""
DECLARED = 0.75
"""The same where both sides declare a difference and the log-probs do not contradict it."""


NO_MISMATCH = ("none", "repeated_draws", "nonfinite", "unreported_sampling")
"""Answers that no difference of log-probs leaves."""
FITTED = ("temperature",)
"""Causes whose tests find what is not known about them, so that a test which fails speaks against them. Truncated
sampling has other forms than those that are tested."""
PARTLY = 0.7
"""The same for a precision whose simulation explains less than most of the mismatch."""
COARSE = ("int4", "nf4", "fp4")
"""Formats that change a model so much that any damage of it is like them: they must explain most of the mismatch."""
IN_PART = 0.8
"""The same for weights that are like a part of those at hand."""
EXACT_WAY = 0.01
"""Share that weights on the way to others may leave between two sides in float32, to be named after the others."""
RIVAL, EXACTLY, AMBIGUOUS = 1.5, 1e-4, 0.6
"""Times the share left that a rival may leave, the share at which both fit exactly, and the factor that this costs."""
UNDECIDED = 0.5
"""The factor where a rival fits as well: neither is named."""


def _of_left(cause: str, left: float, *, exact: bool = False) -> float:
    """The same for a test that leaves this share of the mismatch.

    A simulated precision reproduces an engine's rounding only in part. Any other cause, if it is the right one, leaves
    next to nothing between two sides in float32 (``exact``), so there a rest of a tenth is something else.
    """
    if left <= 0.05:
        return 0.97
    if cause == "precision" and left <= REDUCED:
        return 0.9 if left <= REMOVED else PARTLY
    if left <= CLOSE:
        return 0.75
    if left <= REMOVED and not exact:
        return 0.6
    return 0.45 * (1 - left)  # not named: it explains a part, or fits by chance


# --------------------------------------------------------------------------------------------------- what was seen


def _impossible(evidence: TokenEvidence, cause: str) -> bool:
    """True if what the cause needs was compared on both sides and is equal, or if a dense model has no routing."""
    if cause == "routing" and any(
        side is not None and side.experts == 0 for side in (evidence.engine, evidence.trainer)
    ):
        return True
    different = {one.cause for one in evidence.seen}
    weights = (*MEMBERS, OTHER_WEIGHTS)
    equal = {
        "weights": weights,
        "prompts": ("prompt_difference",),
        "precision": ("precision",),
    }
    return any(
        what in evidence.compared and cause in causes and not different & set(causes) for what, causes in equal.items()
    )


def _seen(evidence: TokenEvidence, features: Features) -> list[_Answer]:
    """One answer per cause that was seen, with all its differences.

    Formats differ in many healthy runs: if the tokens contradict them, something else is wrong as well.
    """
    grouped: dict[str, list[Seen]] = {}
    for one in evidence.seen:
        grouped.setdefault(one.cause, []).append(one)
    return [
        _held_against(
            evidence, features,
            _Answer(cause, SEEN.get(cause, 0.95), "; ".join(one.text for one in found), "seen", detail=found[0].what),
        )
        for cause, found in grouped.items()
    ]  # fmt: skip


def _held_against(evidence: TokenEvidence, features: Features, answer: _Answer) -> _Answer:
    """The answer, less sure if something speaks against it."""
    but = "" if answer.cause not in SEEN and answer.basis == "seen" else against(evidence, features, answer.cause)
    if not but:
        return answer
    return replace(answer, confidence=CONTRADICTED * answer.confidence, reason=f"{answer.reason}; but {but}")


# --------------------------------------------------------------------------------------------------- what was tested


def _tested(evidence: TokenEvidence, features: Features) -> list[_Answer]:
    """The tests with the model, the best one of each cause."""
    if REFERENCE not in evidence.tested:
        return []
    side = at_fault(evidence, evidence.tested[REFERENCE])
    best: dict[str, tuple[float, str]] = {}
    in_part: dict[str, tuple[float, str]] = {}
    for name in evidence.tested:
        if name == REFERENCE:
            continue
        _, cause, detail = name.split(":", 2)
        if WAY in detail and evidence.both_exact and left_share(evidence, name) > EXACT_WAY:
            cause = OTHER_WEIGHTS  # near, but not these weights
        key = cause if " + " not in detail else f"{cause} + {detail.rpartition(' + ')[2].split(':')[0]}"
        _keep(best, key, left_share(evidence, name), detail)
        # One of the many parts of the weights is like any mismatch up to a factor: only whole ones are judged in part.
        whole = PART not in detail and ADAPTER_PART not in detail
        if cause in MEMBERS and " + " not in detail and whole:
            _keep(in_part, OTHER_WEIGHTS, left_in_part(evidence, name), detail)
    alone = {key: left for key, (left, _) in best.items()}
    found = [_answer(evidence, side, key, left, detail, alone) for key, (left, detail) in best.items() if left < 0.95]
    found = [_less_like_it(evidence, features, one) for one in found]
    exact = evidence.both_exact
    found += [_in_part(side, left, detail, exact=exact) for left, detail in in_part.values() if left < 0.95]
    return _less_sure(found)


def _less_like_it(evidence: TokenEvidence, features: Features, answer: _Answer) -> _Answer:
    """A precision that explains only a part is less sure where the mismatch is not like rounding.

    A temperature near 0 gives zeros as well, also to tokens that a template wrote.
    """
    if answer.cause == "temperature" and features.forced_fixed > Limits.forced_fixed:
        return _held_against(evidence, features, answer)
    if answer.cause != "precision" or 1 - answer.explained <= REMOVED:
        return answer
    if answer.parts or any(name in answer.detail for name in COARSE):
        return replace(answer, confidence=CONTRADICTED * answer.confidence)
    return _held_against(evidence, features, answer)


def _keep(best: dict[str, tuple[float, str]], key: str, left: float, detail: str) -> None:
    if key not in best or left < best[key][0]:
        best[key] = (left, detail)


def _in_part(side: str, left: float, detail: str, *, exact: bool) -> _Answer:
    """A change of the weights that is at hand fits up to a factor: other weights, but not these."""
    text = (
        f"the {side}'s mismatch is like a part of that under {detail}, with {left:.1%} left: other weights in between"
    )
    confidence = min(IN_PART, _of_left(OTHER_WEIGHTS, left, exact=exact))
    return _Answer(OTHER_WEIGHTS, confidence, text, "tested", detail, 1 - left)


def _less_sure(answers: list[_Answer]) -> list[_Answer]:
    """Answers that another cause fits nearly as well are less sure, first of all those of many fitted numbers."""
    found = []
    for one in answers:
        left = 1 - one.explained
        rivals = [
            other for other in answers
            if coarse_of(other.cause) != coarse_of(one.cause) and not other.parts
            and 1 - other.explained <= min(max(RIVAL * left, EXACTLY), REMOVED)
        ]  # fmt: skip
        flexible = f"{one.cause}:".startswith(FLEXIBLE)
        beaten = [other for other in rivals if flexible or not f"{other.cause}:".startswith(FLEXIBLE)]
        if not beaten or one.parts:
            found.append(one)
            continue
        best = max(beaten, key=lambda other: other.explained)
        as_well = 1 - best.explained <= RIVAL * left
        factor = UNDECIDED if as_well else AMBIGUOUS
        text = f"; {best.cause.replace('_', ' ')} {best.detail} leaves {1 - best.explained:.1%}".rstrip()
        found.append(replace(one, confidence=factor * one.confidence, reason=one.reason + text))
    return found


def _answer(evidence: TokenEvidence, side: str, key: str, left: float, detail: str, alone: dict[str, float]) -> _Answer:
    """The answer of one test; for a pair, the part of each cause is what it explains beyond the other."""
    cause, _, second = key.partition(" + ")
    if second and alone.get(second, 1.0) < alone.get(cause, 1.0):  # named after its larger part
        cause, second = second, cause
    exact = evidence.both_exact
    words = _in_words(f"{key.partition(' + ')[0]}:{detail}")
    reason = f"scoring the same tokens with {words} leaves {left:.1%} of the {side}'s mismatch"
    if not second:
        member = _member(evidence, cause)
        return _Answer(member, _of_left(cause, left, exact=exact), reason, "tested", detail, 1 - left)
    first_share = 1 - alone.get(cause, 1.0)
    gain = alone.get(cause, 1.0) - left
    # A pair has more freedom than each of its causes, so it must explain clearly more, or leave next to nothing.
    best = min(alone.get(cause, 1.0), alone.get(second, 1.0))
    clearly = best - left > 0.1 or left < 0.1 * best
    confidence = min(_of_left(one, left, exact=exact) for one in (cause, second)) if clearly else 0.0
    parts = ((cause, first_share), (second, gain))
    return _Answer(cause, confidence, reason, "tested", words, 1 - left, parts)


def _in_words(test: str) -> str:
    """The name of a test for readers.

    Example:
        >>> _in_words("temperature:0.7 + truncated_sampling:top_p 0.9")
        'temperature 0.7, and truncated sampling top_p 0.9'
    """
    parts = [one.partition(":") for one in test.split(" + ")]
    return ", and ".join(f"{cause.replace('_', ' ')} {detail}" for cause, _, detail in parts)


def _member(evidence: TokenEvidence, cause: str) -> str:
    """Which of the causes with other weights it is; older weights, for example, are staleness if a lag is declared."""
    if cause not in MEMBERS or evidence.engine is None or evidence.trainer is None:
        return cause
    stated = differences(evidence.engine, evidence.trainer)
    return next((name for name in MEMBERS if name in stated), cause)


# ------------------------------------------------------------------------------- what is declared, and traces alone


def _by_trace(evidence: TokenEvidence, features: Features, signatures: Sequence[Signature]) -> list[_Answer]:
    """Traces in the log-probs, and declared differences that they do not contradict."""
    passed = [s for s in signatures if s.score >= 0.5 and s.cause not in NO_MISMATCH]
    passed = [s for s in passed if not _denied(evidence, s.cause)]
    ruled_out: frozenset[str] = frozenset()
    if evidence.engine is not None and evidence.trainer is not None:
        ruled_out = excluded(evidence.engine, evidence.trainer)
    answers = []
    for trace in passed:
        confidence = _of_trace(trace)
        if trace.cause in DIFFUSE and trace.cause in ruled_out:
            confidence *= DECLARED_EQUAL
        sharpness = trace.cause == "temperature" and features.forced < Limits.forced  # and not greedy requests
        detail = _temperature(features) if sharpness else ""
        answer = _Answer(trace.cause, confidence, trace.reason, "log-probs", detail, clear=trace.clear)
        answers.append(answer if trace.clear else _held_against(evidence, features, answer))
    # Later tests assume that the earlier ones failed: a trace counts only up to the first one that is clear.
    clear = next((n for n, s in enumerate(passed) if s.clear or s.cause not in DIFFUSE), None)
    if clear is not None:
        return answers[: clear + 1]
    if evidence.engine is None or evidence.trainer is None:
        return answers[:1]
    declared = _declared(evidence.engine, evidence.trainer, signatures, passed)
    return answers[:1] + [_held_against(evidence, features, one) for one in declared]


def _in_some_rows(evidence: TokenEvidence, limits: Limits | None) -> list[_Answer]:
    """The trace of a request's settings in the rows that disagree, where others agree at every token."""
    noise, d = noise_rms(evidence), evidence.log_ratio
    far, rows = disagreeing_rows(d, noise), max(1, int(evidence.observed.any(1).sum()))
    few = np.sum(np.abs(d) > FAR * noise) < LEAST_TOKENS  # one rare token follows from any sharpness
    if few or 1 - far.sum() / rows < SOME_ROWS:
        return []
    there = evidence.completion_mask.astype(bool) & far[:, None]
    part = replace(evidence, completion_mask=there)
    found = extract(part)
    passed = [s for s in read_signatures(found, limits) if s.score >= 0.5 and s.cause not in NO_MISMATCH]
    if not passed or passed[0].cause not in OF_A_REQUEST or _denied(evidence, passed[0].cause):
        return []
    trace, detail = passed[0], f"in {far.sum() / rows:.0%} of the rows"
    answer = _Answer(
        trace.cause, _of_trace(trace), f"{detail}, and not in the others: {trace.reason}", "log-probs", detail
    )
    return [answer if trace.clear else _held_against(part, found, answer)]


def _denied(evidence: TokenEvidence, cause: str) -> bool:
    """True if the model was tested under this cause and the test leaves too much: a trace is not better evidence."""
    if cause not in FITTED:
        return False
    lefts = [left_share(evidence, name) for name in evidence.tested if name.split(":", 2)[1:2] == [cause]]
    return any(map(math.isfinite, lefts)) and min(lefts) > REMOVED


def _temperature(features: Features) -> str:
    """The ratio of the temperatures, 1 / (1 - slope); empty without entropies."""
    slope = features.temperature_slope
    known = math.isfinite(slope) and slope < 0.9
    return f"about {1 / (1 - slope):.3g} times the trainer's temperature" if known else ""


def _of_trace(signature: Signature) -> float:
    known = CLEAR if signature.clear else CONFIDENCE.get(signature.cause, 0.4)
    return known * min(1.0, 0.8 + 0.4 * (signature.score - 0.5))


def _declared(
    engine: Declared, trainer: Declared, signatures: Sequence[Signature], passed: Sequence[Signature]
) -> list[_Answer]:
    """Declared differences. They explain a diffuse mismatch; one that has a clear trace was named before."""
    stated = [one for one in differences(engine, trainer).values() if one.certain]
    found = []
    for one in stated:
        support = max((s.score for s in signatures if s.cause == coarse_of(one.cause)), default=0.0)
        # Temperature and truncation leave clear traces: declared without a trace they are not the cause.
        confidence = DECLARED if one.cause not in ("temperature", "truncated_sampling") else DECLARED * support
        if len(stated) > 1:
            confidence *= 0.7 + 0.3 * support
        elif coarse_of(one.cause) in UNSEEN and support < 0.5:
            confidence *= UNSUPPORTED
        found.append(_Answer(one.cause, confidence, one.text, "declared"))
    first = passed[0].cause if passed else ""
    if not stated and first == "precision" and (engine.low_precision or trainer.low_precision):
        found.append(
            _Answer("precision", 0.6, "16-bit arithmetic is declared, and the differences look like it", "declared")
        )
    return found
