"""Recommends a preset for a measured mismatch, with thresholds from the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from trl_offpolicy.diagnosis.attribution.attribute import Attribution
from trl_offpolicy.diagnosis.attribution.evidence import Array, TokenEvidence
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.engines.routing.options import R2_FROM, R3_FROM, recommend_replay

NOT_FAULTS = ("precision", "routing", "policy_staleness", "unknown")
"""Causes that a correction may answer; every other one is repaired first."""
CAP_QUANTILE = 0.999
BAND_QUANTILES = (0.01, 0.99)
CAPS = (1.2, 5.0)
"""A cap is taken from the data, but not outside of this."""
SMALLEST_BAND = 1e-3
"""Half width of a geometric band in nats: a narrower one would drop by rounding."""


@dataclass(frozen=True)
class Recommendation:
    """What to do about a mismatch.

    Args:
        preset: name of a preset; None = no correction before the cause is repaired.
        thresholds: options of the preset, from the data.
        yaml: the setting, for a recipe's ``config.yaml``.
        why: the reasons, in sentences.
    """

    preset: str | None
    thresholds: Mapping[str, float]
    yaml: str
    why: tuple[str, ...]


def recommend(
    evidence: TokenEvidence,
    attribution: Attribution,
    metrics: Mapping[str, float],
    limits: Thresholds | None = None,
    *,
    steps: float | None = None,
) -> Recommendation:
    """The smallest change that answers a measured mismatch.

    At the noise floor there is no correction. A fault is repaired first. Otherwise the decision tree chooses a preset.
    Its cap is the 99.9 % quantile of the token ratios. Its geometric band is the 1 % and 99 % quantiles of the
    responses' mean ratios, without outlying tokens.

    Args:
        evidence: the batch.
        attribution: the attribution of the batch.
        metrics: ``mismatch/*`` and ``weight_applied/ess_token`` of the batch, without the prefix.
        limits: limits of the decision tree; None = the defaults.
        steps: optimizer steps that one generation serves, or None; the routing to replay depends on it.

    Reference: Liu 2026, "Off-policy drift in LLM RL", decision tree and escalation. The quantiles are this kit's.
    """
    limits = limits or Thresholds()
    if attribution.cause == "none":
        why = "The mismatch is no larger than the noise floor: there is nothing to correct, only to watch."
        return Recommendation("measure", {}, "offpolicy: measure\n", (why,))
    if attribution.cause not in NOT_FAULTS:
        about = CAUSES[attribution.cause]
        why = f"This is a fault ({about.title}): a correction would hide it. {about.fix} Then probe again."
        return Recommendation(None, {}, about.snippet, (why,))
    pearson, kl = metrics["mismatch/prob_pearson"], metrics["mismatch/kl_k3"]
    at_equal_weights = attribution.cause != "policy_staleness"
    if pearson < limits.pearson_broken or (at_equal_weights and kl > limits.kl_high):
        return _repair(attribution, pearson, kl, limits)
    found = _correct(evidence, attribution, metrics, limits)
    return replace(found, why=(*found.why, routing_advice(steps))) if _looks_routed(attribution) else found


def _looks_routed(attribution: Attribution) -> bool:
    """True if flipped experts are the cause, or the closest guess."""
    guess = attribution.runner_up if attribution.cause == "unknown" else attribution.cause
    return guess == "routing"


def routing_advice(steps: float | None) -> str:
    """Which routing of a mixture of experts to replay, in a sentence.

    Args:
        steps: optimizer steps that one generation serves; None = unknown.
    """
    if steps is None:
        cases = ", ".join(f"{recommend_replay(n).mode} at {n}" for n in (1, R2_FROM, R3_FROM))
        return f"Or replay the routing (routing_replay), by the optimizer steps that one generation serves: {cases}."
    mode, why = recommend_replay(steps)
    return f"routing_replay: {mode} ({why})."


def _repair(attribution: Attribution, pearson: float, kl: float, limits: Thresholds) -> Recommendation:
    about = CAUSES.get(attribution.cause, CAUSES["engine_mismatch"])
    why = (
        f"Pearson {pearson:.3f} (healthy from {limits.pearson_healthy}) and KL {kl:.3g} nats per token (at fault above "
        f"{limits.kl_high}) at equal weights: no correction makes up for this. {about.fix}"
    )
    return Recommendation(None, {}, about.snippet, (why,))


def _correct(
    evidence: TokenEvidence, attribution: Attribution, metrics: Mapping[str, float], limits: Thresholds
) -> Recommendation:
    log_ratio = evidence.log_ratio
    cap, band = token_cap(log_ratio), geometric_band(log_ratio)
    chi2, ess = metrics["mismatch/chi2_token"], metrics["weight_applied/ess_token"]
    if chi2 > limits.chi2_high or ess < limits.ess_healthy:
        why = f"Token chi-square {chi2:.3g} and ESS {ess:.2g}: filter outlying tokens before weighing them."
        return _preset("paper/icepop", {"low": 0.5, "high": 5.0}, why)
    if _looks_routed(attribution):
        low, high = token_band(log_ratio)
        why = "A few tokens jump and the rest agrees: a token band drops the jumps and keeps the rest."
        return _preset("paper/icepop", {"low": low, "high": high}, why)
    if chi2 > limits.chi2_moderate or metrics["mismatch/kl_k3"] > limits.kl_healthy:
        why = (
            f"KL {metrics['mismatch/kl_k3']:.3g} nats per token, token chi-square {chi2:.3g}: drop outlying responses "
            f"by their mean ratio and cap the weights; cap and band are quantiles of these responses."
        )
        return _preset("paper/geometric-mask", {"low": band[0], "high": band[1], "max_weight": cap}, why)
    why = (
        f"KL {metrics['mismatch/kl_k3']:.3g} nats per token is small (healthy below {limits.kl_healthy}): token "
        f"weights cost nothing. The cap is the {100 * CAP_QUANTILE:g} % quantile of the ratios, at least {CAPS[0]}."
    )
    return _preset("paper/tis", {"max_weight": cap}, why)


def _preset(name: str, options: Mapping[str, float], why: str) -> Recommendation:
    listed = ", ".join(f"{key}: {value:g}" for key, value in options.items())
    return Recommendation(name, dict(options), f"offpolicy: {{preset: {name}, options: {{{listed}}}}}\n", (why,))


def token_cap(log_ratio: Array) -> float:
    """Cap of token weights: the 99.9 % quantile of the ratios, within :data:`CAPS`.

    Args:
        log_ratio: (B, T) old - sampling, nats; NaN = no token.
    """
    value = math.exp(min(float(np.nanquantile(log_ratio, CAP_QUANTILE)), 10.0))
    return _digits(min(max(value, CAPS[0]), CAPS[1]))


def geometric_band(log_ratio: Array) -> tuple[float, float]:
    """Band of the responses' geometric mean ratio: 1 % and 99 % quantiles, made symmetric in log space.

    Tokens beyond four standard deviations (estimated robustly, from the median of |d|) are left out. So the band
    describes the clean part, and it drops responses that outliers move.
    """
    scale = 1.4826 * float(np.nanmedian(np.abs(log_ratio)))  # that of a normal distribution with this median of |d|
    clean = np.where(np.abs(log_ratio) <= 4 * max(scale, 1e-12), log_ratio, np.nan)
    means = np.nanmean(clean[np.isfinite(clean).any(1)], axis=1)
    low, high = np.quantile(means, BAND_QUANTILES)
    half = max(abs(float(low)), abs(float(high)), SMALLEST_BAND)
    return _digits(math.exp(-half)), _digits(math.exp(half))


def token_band(log_ratio: Array) -> tuple[float, float]:
    """Band of token ratios that holds 99 % of the tokens, and at least [0.8, 1.25]."""
    half = max(float(np.nanquantile(np.abs(log_ratio), 0.99)), math.log(1.25))
    return _digits(math.exp(-half)), _digits(math.exp(half))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
