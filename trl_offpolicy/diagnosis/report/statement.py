"""Describes in one paragraph how off-policy a run is. It states the numbers and gives no verdict."""

from __future__ import annotations

import math

from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.report.summary import RunSummary
from trl_offpolicy.diagnosis.thresholds import SAME_POLICY_KL

SMALL_KL = 0.02
"""Up to this k3, k3 = (log ratio)^2 / 2 holds within about 10 %, so that the typical ratio can be named."""
TREND_FACTOR = 1.5
"""First and last quarter within this factor of each other count as level: estimates from a few hundred tokens
scatter by about that much."""


def describe_run(summary: RunSummary) -> str:
    """Sentences on KL, its trend, ESS, dropped and truncated shares, and version lag.

    Every sentence follows from the means in ``summary``. Quantities that were not logged are named as missing.
    """
    sentences = (
        _kl_sentence(summary),
        _noise_sentence(summary),
        _trend_sentence(summary),
        _ess_sentence(summary),
        _dropped_sentence(summary),
        _lag_sentence(summary),
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _kl_sentence(summary: RunSummary) -> str:
    k1, k3 = summary.whole("KL k1", "before"), summary.whole("KL k3", "before")
    steps = f"Over {summary.n_steps} logged step{'s' if summary.n_steps > 1 else ''}"
    if k1 is None and k3 is None:
        return f"{steps}, no KL between sampler and trainer was logged: their distance is not known here."
    sides = "the engine and the trainer"
    if summary.ratio_group == "total":
        sides = "the engine that sampled and the current trainer (engine mismatch and staleness together)"
    if k3 is not None and abs(k3) < SAME_POLICY_KL:
        size = f"KL k3 {format_number(k3)} nats per token"
        return f"{steps}, {sides} give the sampled tokens the same probabilities ({size})."
    estimates = [(value, name) for value, name in ((k3, "k3"), (k1, "k1")) if value is not None]
    (first, name), others = estimates[0], estimates[1:]
    other = "".join(f"; the noisier estimate {name} gives {format_number(value)}" for value, name in others)
    return (
        f"{steps}, {sides} disagree by KL(sampler||trainer) {format_number(first)} nats per token "
        f"({name}{other}).{_typical_ratio(k3)}"
    )


def _noise_sentence(summary: RunSummary) -> str:
    """A sentence on whether the distance is larger than the noise floor."""
    floor, distance = summary.whole("noise floor"), summary.whole("KL k3", "before")
    if floor is None or distance is None:
        return ""
    size = f"KL k3 {format_number(floor)} when it scores the same text in another batch size"
    if distance <= TREND_FACTOR * floor:
        return f"That is no more than the trainer differs from itself ({size}): it says nothing about the engine."
    if floor < SAME_POLICY_KL:
        return f"The trainer agrees with itself ({size})."
    return f"That is {format_number(distance / floor)} times what the trainer differs from itself ({size})."


def _typical_ratio(k3: float | None) -> str:
    if k3 is None or not 0 < k3 <= SMALL_KL:
        return ""
    percent = 100 * math.sqrt(2 * k3)
    return f" Such a k3 is a typical (root mean square) difference of {percent:.2g}% in a token's probability."


def _trend_sentence(summary: RunSummary) -> str:
    row = summary.find("KL k3", "before")
    if summary.n_steps < 2 or row is None or row.first is None or row.last is None:
        return ""
    first, last = row.first, row.last
    if max(abs(first), abs(last)) < SAME_POLICY_KL:
        return ""
    verb = "stayed level"
    if last > TREND_FACTOR * first:
        verb = "rose"
    elif first > TREND_FACTOR * last:
        verb = "fell"
    ends = f"{format_number(first)} to {format_number(last)}"
    return f"From the first to the last quarter of the steps k3 {verb}: {ends}."


def _ess_sentence(summary: RunSummary) -> str:
    raw, applied = summary.whole("ESS (token)", "before"), summary.whole("ESS (token)", "after")
    sides = (("with the raw weights", raw), ("with the weights as applied", applied))
    parts = [f"{_percent(value)} {name}" for name, value in sides if value is not None]
    product = _product_sentence(summary)
    if not parts:
        return product.strip() or "No effective sample size was logged."
    return f"The effective sample size is {' and '.join(parts)}, of 100% for equal weights.{product}"


def _product_sentence(summary: RunSummary) -> str:
    share = summary.whole("ESS (sequence)", "before")
    return "" if share is None else f" Weights of whole responses, uncapped, would leave {_percent(share)}."


def _dropped_sentence(summary: RunSummary) -> str:
    tokens, sequences = summary.whole("dropped tokens"), summary.whole("dropped sequences")
    truncated = summary.whole("truncated weights")
    if tokens is None and sequences is None and truncated is None:
        return "What the correction dropped or truncated was not logged."
    parts = [
        f"dropped {_share(value, noun)}"
        for value, noun in ((tokens, "token"), (sequences, "sequence"))
        if value is not None
    ]
    parts += [f"truncated {_share(truncated, 'weight')}"] if truncated is not None else []
    listed = ", ".join(parts[:-1]) + (" and " if parts[:-1] else "") + parts[-1]
    return f"The correction {listed}."


def _lag_sentence(summary: RunSummary) -> str:
    lag = summary.whole("version lag")
    if lag is None:
        return ""
    if lag == 0:
        return "By their declared versions all samples came from the current weights (version lag 0)."
    return f"Samples were on average {lag:.3g} weight version(s) old."


def _share(value: float, noun: str) -> str:
    return f"no {noun}" if value == 0 else f"{_percent(value)} of the {noun}s"


def _percent(fraction: float) -> str:
    """Three digits, four near 100; "over 99.99%" rather than a false 100%."""
    percent = 100 * fraction
    text = f"{percent:.3g}" if percent < 99 else f"{percent:.4g}"
    return "over 99.99%" if text == "100" and fraction < 1 else f"{text}%"
