"""The signature of each cause in log-probs: an ordered list of tests over features, with all limits in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trl_offpolicy.diagnosis.attribution.traces.features import LEAST_MARKED, Features
from trl_offpolicy.diagnosis.attribution.traces.zeros import LEAST_JUDGED

OTHER_WEIGHTS = "other_weights"
"""Coarse cause, because log-probs alone do not tell stale weights, another adapter and a moved policy apart."""
MEMBERS = ("stale_weights", "wrong_adapter", "policy_staleness")


@dataclass(frozen=True)
class Limits:
    """Limits of the tests. They were chosen on the tuning seeds of ``benchmarks/faults``.

    Args:
        floor_factor: multiple of the noise floor up to which there is no mismatch.
        self_ratio: below it the trainer differs more from itself than from the engine.
        self_equal: times the distance to itself up to which the engine agrees, so that the second scoring is at fault:
            with dropout the engine differs half as much.
        largest_dropout: difference of two scorings of a typical token, nats, above which they are of other tokens.
        exact_rows: share of rows that agree at every token up to which noise in the trainer is in every token.
        forced: share of the mismatch at tokens that the engine was certain of.
        forced_alone: share of these tokens that stand alone, above which they are no tool's output.
        forced_last: share of these tokens in runs to the end of their row, above which they are none either.
        forced_fixed: share of these tokens that all rows have, above which a template wrote them.
        others_below: share of the other tokens below the engine, above which the support is cut everywhere.
        top_z: standard errors by which the tokens that agree may miss the number that are the most likely ones.
        unit_fit: R^2 above which log-probs differ by a factor.
        unit_rest: times what one number for all tokens leaves that the factor may leave.
        constant: spread of d / its mean up to which all tokens differ by the same number.
        grain: times the least scatter of a kept mass from which on d may be one.
        clipped: share of tokens at the smallest log-prob.
        positive: share of positive d up to which the support is truncated.
        drift: mean / root mean square of d below which it is.
        above_entropy: share of tokens above the entropy up to which they are the most likely ones.
        deep: share of tokens that are deep in the trainer, above which the support is not just truncated.
        elsewhere: share of the disagreeing numbers that are another token's, above which they are moved.
        shift: residual after a shift by one below which tokens are shifted.
        onset: share of rows that break off at a token.
        temperature_fit: R^2 above which the sharpness explains all.
        temperature_rest: times what one number for all tokens leaves that the sharpness may leave.
        temperature_own: R^2 of a flatter engine's own log-probs under it, below which it is no temperature.
        surprise_fit: the same as temperature_fit where entropies are absent.
        bulk: median / root mean square of d below which most tokens agree.
        top_tokens: share of the top tokens above which they make the mismatch.
        early: first tokens / all tokens, above which the prompt differs.
        by_token: correlation of equal tokens above which the weights differ.
        penalised: lean of tokens that were drawn before against new ones, above which they are penalised.
        spikes: kurtosis of z up to which it is rounding.
        lean: |mean| / root mean square of d up to which it is: rounding has no direction.
        exact: share of the distance left below which another place, row or unit fits exactly.
        above_zero: share of the engine's numbers above 0 from which on they are no log-probs.
        agreed: times the size of d that the surprise must have: below it, both sides differ enough to explain it.
        copied: share of the improbable responses that another one of the group equals.
        surprise: |mean of -log p - entropy| (nats) above which tokens may have been drawn from another one.
        surprise_z: the same in standard errors.
    """

    floor_factor: float = 2.0
    self_ratio: float = 0.8
    self_equal: float = 0.1
    largest_dropout: float = 1.5
    exact_rows: float = 0.05
    forced: float = 0.5
    forced_alone: float = 0.5
    forced_last: float = 0.5
    forced_fixed: float = 0.5
    others_below: float = 0.5
    top_z: float = 4.0
    unit_fit: float = 0.98
    unit_rest: float = 0.1
    constant: float = 0.01
    grain: float = 0.1
    clipped: float = 0.05
    positive: float = 0.02
    drift: float = -0.3
    above_entropy: float = 0.02
    deep: float = 0.02
    elsewhere: float = 0.6
    shift: float = 0.3
    onset: float = 0.5
    temperature_fit: float = 0.85
    temperature_rest: float = 0.5
    temperature_own: float = 0.9
    surprise_fit: float = 0.5
    bulk: float = 0.13
    top_tokens: float = 0.68
    early: float = 4.0
    by_token: float = 0.18
    penalised: float = 0.8
    spikes: float = 10.0
    lean: float = 0.15
    exact: float = 0.05
    above_zero: float = 0.3
    agreed: float = 10.0
    copied: float = 0.05
    surprise: float = 0.03
    surprise_z: float = 4.0


@dataclass(frozen=True)
class Signature:
    """The result of a test for a cause.

    Args:
        cause: the cause that it supports.
        score: 0 to 1; 0.5 is at the limit.
        reason: what was seen, with the numbers.
        clear: hardly another cause leaves this, whatever else ``cause`` looks like.
    """

    cause: str
    score: float
    reason: str
    clear: bool = False


def above(value: float, limit: float) -> float:
    """A score: 0.5 at the limit, towards 1 above it (0.88 at twice the limit), 0 for NaN."""
    return 0.0 if math.isnan(value) else 0.5 + 0.5 * math.tanh((value - limit) / max(abs(limit), 1e-30))


def below(value: float, limit: float) -> float:
    """A score: 0.5 at the limit, towards 1 below it, 0 for NaN."""
    return 0.0 if math.isnan(value) else 0.5 + 0.5 * math.tanh((limit - value) / max(abs(limit), 1e-30))


Test = Callable[[Features, Limits], Signature]


def _none(f: Features, limits: Limits) -> Signature:
    """No more than noise. A floor beyond arithmetic is no noise, and 16 bits on both sides are no fault."""
    score = below(f.k3, limits.floor_factor * min(f.floor, f.trusted_floor))
    text = f"KL {f.k3:.2g} nats per token, noise floor {f.floor:.2g}"
    if (
        f.both_low
        and not any(
            above(value, limit) >= 0.5
            for value, limit in (
                (abs(f.drift), 2 * limits.lean),
                (f.by_token, 2 * limits.by_token),
                (f.temperature_fit, limits.surprise_fit),
            )
        )
        and not (f.in_few and not f.has_experts)
    ):
        score = max(score, below(f.k3, f.trusted_floor))
        text += f", 16-bit arithmetic on both sides explains up to {f.trusted_floor:.2g}"
    return Signature("none", score, text)


def _unreported(f: Features, limits: Limits) -> Signature:
    """The tokens were not drawn from the distribution whose log-probs both sides give."""
    # A small mismatch k3 ~ d^2 / 2 moves the mean of -log p as well, by about the size of d.
    agreed = abs(f.surprise) > max(limits.surprise, limits.agreed * float(np.sqrt(2 * f.k3)))
    score = above(abs(f.surprise_z), limits.surprise_z) if agreed else 0.0
    sign = "likelier" if f.surprise < 0 else "less likely"
    text = (
        f"tokens are {sign} than draws from the reported distribution (by {abs(f.surprise):.2g} nats, "
        f"z = {f.surprise_z:.1f})"
    )
    return Signature("unreported_sampling", score, text)


def _repeated(f: Features, limits: Limits) -> Signature:
    """Both sides agree, but responses are copies of each other."""
    text = f"{f.copied:.0%} of the improbable responses equal another one of their group"
    return Signature("repeated_draws", above(f.copied, limits.copied) if f.copied else 0.0, text)


def _lost(f: Features, _limits: Limits) -> Signature:
    """Tokens without a finite log-prob, which are left out of everything else."""
    share = max(f.missing_engine, f.missing_trainer)
    side = "engine" if share == f.missing_engine else "trainer"
    text = f"{share:.1%} of the tokens have no finite log-prob of the {side}, and are left out"
    return Signature("nonfinite", 1.0 if share else 0.0, text)


def _dropout(f: Features, limits: Limits) -> Signature:
    """The trainer differs from itself by more than arithmetic, and more than from the engine.

    If each scoring draws its own dropout, the distance to itself is twice that to the engine.
    """
    # Each token has its own noise, so no row agrees. Padding spares the rows of the longest prompt.
    everywhere = f.exact_rows <= limits.exact_rows
    engine_agrees = f.k3 < min(limits.self_equal * f.floor, f.trusted_floor)
    itself = f.floor > f.trusted_floor and f.self_median < limits.largest_dropout and not engine_agrees
    score = below(f.self_ratio, limits.self_ratio) if itself and everywhere else 0.0
    text = (
        f"the trainer differs from itself (KL {f.floor:.2g} nats per token) {1 / max(f.self_ratio, 1e-9):.2g} times as "
        "much as from the engine"
    )
    return Signature("dropout", score, text)


def _top_token(f: Features, limits: Limits) -> Signature:
    """The engine's log-probs are never those of a rare token, although the trainer finds rare ones.

    A low temperature and a narrow truncation do that, too. But there the most likely tokens do not agree.
    """
    score = min(
        below(f.above_entropy, limits.above_entropy), above(f.deep, limits.deep), below(abs(f.top_z), limits.top_z)
    )
    text = (
        f"{f.above_entropy:.1%} of the engine's log-probs are below minus the entropy: they are those of the most "
        "likely token"
    )
    return Signature("misalignment", score, text)


def _elsewhere(f: Features, limits: Limits) -> Signature:
    text = f"{f.elsewhere:.0%} of the numbers that disagree are the log-prob of another token"
    return Signature("misalignment", above(f.elsewhere, limits.elsewhere), text)


def _swapped(f: Features, limits: Limits) -> Signature:
    text = f"the log-probs of rows fit another row ({f.swapped:.2g} of the difference in place)"
    return Signature("misalignment", below(f.swapped, limits.exact), text)


def _zeros(f: Features, limits: Limits) -> Signature:
    """Log-probs of exactly 0. A tool's output is a run of them, and an answer follows; others were filled in.

    Those are as rare as draws. Greedy requests give zeros of likelier tokens than draws are, and so does a narrow
    nucleus; a grammar forces rarer ones. Of zeros alone nothing is known.
    """
    text = f"{f.forced:.0%} of the mismatch at tokens whose sampling log-prob is exactly 0"
    if f.forced_tokens < LEAST_MARKED:
        return Signature("tool_tokens", 0.0, f"{text}, too few of them to tell what they are")
    in_runs = f.forced_alone <= limits.forced_alone and f.forced_last <= limits.forced_last
    if f.forced_fixed > limits.forced_fixed and in_runs and f.others_below <= limits.others_below:
        text += ", the same tokens at the same places in every row, whatever its prompt: nobody drew them"
        return Signature("tool_tokens", above(f.forced, limits.forced), text)
    if f.forced_depth < math.log(2):
        return Signature("tool_tokens", 0.0, text + ", all of them likely: alone in a nucleus, or rounded to 1")
    z = f.forced_beside_z if math.isnan(f.forced_z) else f.forced_z
    cut = f.others_below > limits.others_below and f.positive <= limits.positive
    if cut and not z >= -limits.surprise_z:  # also where they are too few to tell
        return Signature("tool_tokens", 0.0, text + ", likely ones, and all others are below it: alone in a nucleus")
    if f.forced_last > limits.forced_last and f.forced_z < -limits.surprise_z:
        text += f", likelier ones than draws (z = {f.forced_z:.1f}): greedy requests (temperature 0)"
        return Signature("temperature", above(f.forced, limits.forced), text)
    if z < -limits.surprise_z:
        text += f", likelier ones than draws (z = {z:.1f}): no choice was left there"
        return Signature("tool_tokens", 0.0, text)
    within = f.forced_last <= limits.forced_last  # not an end that was appended to each row
    if f.forced_alone > limits.forced_alone and z > limits.surprise_z and within:
        text += (
            f", one here and one there, rarer ones than draws (z = {z:.1f}): nobody drew them, a grammar forces them"
        )
        known = not math.isnan(f.forced_z)  # without entropies such tokens may only stand where all are rare
        return Signature("logit_processors", above(f.forced, limits.forced) if known else 0.0, text)
    if f.forced_tokens < LEAST_JUDGED:
        return Signature("tool_tokens", 0.0, f"{text}, too few of them to tell what they are")
    if f.forced_alone > limits.forced_alone:
        return Signature("misalignment", above(f.forced, limits.forced), text + ", one here and one there: filled in")
    if f.forced_last > limits.forced_last and not f.all_zero:
        text += f", {f.forced_last:.0%} of them in runs to the end of their row: filled up"
        return Signature("misalignment", above(f.forced, limits.forced), text)
    if f.all_zero and f.forced_z >= -limits.surprise_z:
        return Signature("misalignment", 1.0, "all sampling log-probs are 0, at tokens as rare as draws: lost")
    return Signature("tool_tokens", above(f.forced, limits.forced), text)


def _written(f: Features, _limits: Limits) -> Signature:
    """The engine's numbers are rounded, and that explains every difference."""
    text = f"the engine's numbers are all rounded to {f.written_as}, which explains every difference"
    cause = "precision" if "float" in f.written_as else "misalignment"
    return Signature(cause, 1.0 if f.written_as else 0.0, text, clear=True)


def _arithmetic(f: Features, limits: Limits) -> Signature:
    """Log-probs in another unit, moved by a constant, or clipped."""
    if f.rewritten < limits.exact:
        text = f"the engine's numbers are {f.rewritten_as}, not log-probs of the tokens in nats"
        return Signature("misalignment", 1.0, text)
    if f.above_zero > limits.above_zero:
        text = f"{f.above_zero:.0%} of the engine's numbers are above 0: logits, or scores that are not normalised"
        return Signature("misalignment", 1.0, text)
    if f.scatter < limits.constant and not _may_be_kept_mass(f, limits):
        return Signature("misalignment", 1.0, "all log-probs differ by the same number (another normaliser?)")
    if f.unit_fit > limits.unit_fit and f.unit_rest < limits.unit_rest:
        return Signature("misalignment", 1.0, "the log-probs differ by a constant factor (another unit?)")
    return Signature(
        "misalignment", above(f.clipped, limits.clipped), f"{f.clipped:.0%} of the log-probs at one lower bound"
    )


def _penalised(f: Features, limits: Limits) -> Signature:
    """Tokens that a row holds already are less likely in the engine, all others likelier. Moved numbers may do that."""
    text = (
        "tokens that their row holds already are less likely in the engine, and new ones likelier "
        f"({f.penalised:.0%} of the way to all of them): a penalty on what was drawn"
    )
    return Signature("logit_processors", above(f.penalised, limits.penalised), text)


def _may_be_kept_mass(f: Features, limits: Limits) -> bool:
    """Whether d may be the log of a kept mass, which is nearly constant where no token is likely.

    It may not if it is more constant than such a mass can be, or if the tokens are as rare as draws of all.
    """
    error = abs(f.surprise / f.surprise_z) if f.surprise_z else float("nan")
    nothing_missing = f.surprise + f.missing_tail > limits.surprise_z * error
    return f.drift < 0 and f.scatter > limits.grain * f.grain and not nothing_missing


def _truncated(f: Features, limits: Limits) -> Signature:
    # Where rare tokens are known to be reported, a small kept mass is no sign of another token's log-prob.
    deep = 0.0 if f.above_entropy > limits.above_entropy else f.deep
    score = min(below(f.positive, limits.positive), below(f.drift, limits.drift), below(deep, limits.deep))
    return Signature("truncated_sampling", score, f"old / sampling hardly ever exceeds 1 ({f.positive:.1%} of tokens)")


def _shifted(f: Features, limits: Limits) -> Signature:
    """Moved rows fit exactly; rows that were tokenised again fit in part, from some token on."""
    text = f"moved by up to three tokens the log-probs differ {f.shift:.2g} times as much as in place"
    in_part = min(below(f.shift, limits.shift), above(f.onset, limits.onset))
    return Signature("misalignment", max(in_part, below(f.shift, limits.exact)), text)


def _temperature(f: Features, limits: Limits) -> Signature:
    if math.isnan(f.temperature_fit):
        score, fit = above(f.surprise_fit, limits.surprise_fit), f.surprise_fit
    else:
        score, fit = above(f.temperature_fit, limits.temperature_fit), f.temperature_fit
        # a flatter engine's log-probs are small beside the mismatch, and so are those of any other policy
        if f.temperature_slope > 0 and f.temperature_own < limits.temperature_own:
            score = 0.0
        if f.temperature_rest > limits.temperature_rest:
            score = 0.0
    return Signature("temperature", score, f"{fit:.0%} of the mismatch follows from how sharp the distribution is")


def _routing(f: Features, limits: Limits) -> Signature:
    score = min(below(f.bulk, limits.bulk), above(f.top_tokens, limits.top_tokens))
    return Signature("routing", score, f"most tokens agree; 2 % of them make {f.top_tokens:.0%} of the mismatch")


def _prompt_start(f: Features, limits: Limits) -> Signature:
    text = f"the first tokens differ {f.early:.2g} times as much as the average token"
    return Signature("prompt_difference", above(f.early, limits.early), text)


def _other_weights(f: Features, limits: Limits) -> Signature:
    text = f"equal tokens differ alike in different prompts (correlation {f.by_token:.2f})"
    return Signature(OTHER_WEIGHTS, above(f.by_token, limits.by_token), text)


def _precision(f: Features, limits: Limits) -> Signature:
    score = min(below(f.spikes, limits.spikes), below(abs(f.drift), limits.lean))
    return Signature("precision", score, f"differences like rounding errors: kurtosis {f.spikes:.2g}, no direction")


def _prompt_rows(f: Features, limits: Limits) -> Signature:
    """Neither rounding (uneven or one-sided) nor weights (equal tokens do not differ alike): the context decides."""
    uneven = max(above(f.spikes, limits.spikes), above(abs(f.drift), limits.lean))
    score = min(uneven, below(f.by_token, limits.by_token))
    return Signature("prompt_difference", score, "uneven differences that depend on the context, not on the token")


TESTS: Sequence[Test] = (
    _none, _repeated, _lost, _unreported, _dropout, _zeros, _written, _arithmetic, _top_token, _truncated,
    _shifted, _swapped, _elsewhere, _penalised, _temperature, _routing, _prompt_start, _other_weights, _precision,
    _prompt_rows,
)  # fmt: skip
"""The tests in order; the causes with the clearest trace come first."""
DIFFUSE = ("prompt_difference", OTHER_WEIGHTS, "precision", "routing")
"""Causes that look alike when small; the declarations decide between them."""


def read_signatures(features: Features, limits: Limits | None = None) -> list[Signature]:
    """Run every test of :data:`TESTS` on the features; the results in order."""
    return [test(features, limits or Limits()) for test in TESTS]
