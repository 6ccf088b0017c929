"""The diagnostics of a loss step: ``loss/*``, ``rollout/*`` and ``gradient/*``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import Finalizer, fraction
from trl_offpolicy.functional.estimator import ESTIMATOR_DIAGNOSTICS, ESTIMATOR_LAYOUT, estimator_rows
from trl_offpolicy.functional.lags import LAG_NAMES, sums_by_lag
from trl_offpolicy.functional.log_ratios import log_ratio
from trl_offpolicy.functional.moments import Layout, Moments, moments
from trl_offpolicy.functional.policy_losses import LossTerms
from trl_offpolicy.stats import PREFIX, Group, Stats
from trl_offpolicy.types import PolicyBatch


def _row_low(m: Moments) -> Tensor:
    """Smallest share of low-clipped tokens in a response."""
    top = m["row_clip_low_min_negated"]
    return torch.where(top > -torch.inf, -top, 0.0)


def _row_high(m: Moments) -> Tensor:
    """Largest share of high-clipped tokens in a response."""
    return m["row_clip_high_max"].clamp(0.0, 1.0)


def _lag_max(m: Moments) -> Tensor:
    """Largest version lag of a token."""
    return m["lag_max"].clamp(min=0.0)


GROUPS: Mapping[str, tuple[Layout, Mapping[str, Finalizer]]] = {
    "loss": (
        Layout(
            sums=(
                "tokens", "units", "policy", "kl", "entropy", "clip_low", "clip_high", "clip_region", "nonfinite",
                "nonfinite_reference", "gate", "calls", "kl_coef",
            ),
            maxima=("row_clip_low_min_negated", "row_clip_high_max"),
        ),
        {
            "policy": fraction("policy", "tokens"),
            "kl": fraction("kl", "tokens"),
            "kl_coef": fraction("kl_coef", "calls"),
            "entropy": fraction("entropy", "tokens"),
            "clip_low_fraction": fraction("clip_low", "units"),
            "clip_high_fraction": fraction("clip_high", "units"),
            "clip_region_fraction": fraction("clip_region", "units"),
            "response_clip_low_min": _row_low,
            "response_clip_high_max": _row_high,
            "nonfinite_current": fraction("nonfinite", "tokens"),
            "nonfinite_reference": fraction("nonfinite_reference", "tokens"),
            "gate_mean": fraction("gate", "units"),
        },
    ),
    "loss#discrepancy": (
        Layout(sums=("tokens", "discrepancy", "calls", "coef")),
        {"discrepancy": fraction("discrepancy", "tokens"), "discrepancy_coef": fraction("coef", "calls")},
    ),
    "lag/<lag>#clip": (Layout(sums=("units", "clipped")), {"clip_fraction": fraction("clipped", "units")}),
    "rollout": (Layout(sums=("responses", "tokens")), {"response_length_mean": fraction("tokens", "responses")}),
    "rollout#lag": (
        Layout(sums=("tokens", "lag"), maxima=("lag_max",)),
        {"version_lag_mean": fraction("lag", "tokens"), "version_lag_max": _lag_max},
    ),
    "rollout#versions": (
        Layout(sums=("responses", "crossing")),
        {"cross_version_fraction": fraction("crossing", "responses")},
    ),
    "rollout#reward": (
        Layout(sums=("weight", "weighted_reward")),
        {"reward_reweighted": fraction("weighted_reward", "weight")},
    ),
    "rollout#support": (Layout(sums=("tokens", "outside")), {"outside_fraction": fraction("outside", "tokens")}),
    "rollout#kept": (
        Layout(sums=("tokens", "known", "unknown", "ids")),
        {"kept_ids_mean": fraction("ids", "known"), "recomputed_cut_fraction": fraction("unknown", "tokens")},
    ),
    "gradient": (Layout(sums=("responses", "power")), {"power": fraction("power", "responses")}),
    "estimator": (ESTIMATOR_LAYOUT, ESTIMATOR_DIAGNOSTICS),
}  # fmt: skip
"""Names of the moments and finalisers, by group; :func:`support_stats` and :func:`kept_ids_stats` make theirs."""


def _group(name: str, sums: list[Tensor], maxima: list[Tensor] | None = None) -> Group:
    layout, finalizers = GROUPS[name]
    return Group(moments(layout, sums, maxima), finalizers)


def _largest(values: Tensor) -> Tensor:
    """The maximum, 0-d; minus infinity for a batch without rows."""
    return torch.cat([values.flatten(), values.new_full((1,), -torch.inf)]).amax()


# ------------------------------------------------------------------------------------------------------------- loss


class LossParts(NamedTuple):
    """Terms of the policy loss, policy and KL per token (B, T), the KL's coefficient, and what was kept."""

    terms: LossTerms
    policy: Tensor
    kl: Tensor | None
    kl_coef: float
    keep_mask: Tensor


def _clip_unit(terms: LossTerms, mask: Tensor) -> Tensor:
    """The units on which clips and gates decide: tokens (B, T), or sequences with a trainable token (B, 1)."""
    decisions = [part for part in (terms.clipped_low, terms.clipped_high, terms.gate) if part is not None]
    return mask.any(-1, keepdim=True) if decisions and decisions[0].shape[-1] == 1 else mask


def without_advantage(batch: PolicyBatch) -> Tensor:
    """(B, T) bool: trainable tokens whose advantage is not finite; nothing waits for the device."""
    advantages = batch.advantages.detach()
    finite = advantages.abs() < torch.inf
    return batch.mask & ~(finite.unsqueeze(1) if finite.dim() == 1 else finite)


@torch.no_grad()
def loss_stats(batch: PolicyBatch, parts: LossParts) -> Stats:
    """The ``loss`` group of one call."""
    mask, terms = batch.mask, parts.terms
    tokens = mask.sum(-1)
    zero = torch.zeros((), device=mask.device)

    def over_tokens(values: Tensor | None) -> Tensor:
        return zero if values is None else torch.where(mask, values.float(), 0.0).sum()

    def count_nonfinite(logps: Tensor | None) -> Tensor:
        return zero if logps is None else (mask & ~(logps.abs() < torch.inf)).sum()

    unit = _clip_unit(terms, mask)
    never = torch.zeros_like(unit)
    low = never if terms.clipped_low is None else terms.clipped_low & unit
    high = never if terms.clipped_high is None else terms.clipped_high & unit
    gate = zero if terms.gate is None else torch.where(unit, terms.gate, 0.0).sum()
    sums = [
        tokens.sum(),
        unit.sum(),
        parts.policy.sum(),
        over_tokens(parts.kl),
        over_tokens(batch.entropies),
        low.sum(),
        high.sum(),
        (low | high).sum(),
        count_nonfinite(batch.per_token_logps),
        count_nonfinite(batch.ref_per_token_logps),
        gate,
        zero + 1,
        zero.double() + parts.kl_coef,
    ]
    # The share of each response, for the extremes over responses; one without tokens does not count.
    count = unit.sum(-1).clamp(min=1)
    low_rows = torch.where(tokens > 0, low.sum(-1) / count, torch.inf)
    high_rows = torch.where(tokens > 0, high.sum(-1) / count, -torch.inf)
    groups = {"loss": _group("loss", sums, [_largest(-low_rows), _largest(high_rows)])}
    return Stats(groups | _clip_by_lag(batch, unit, low | high))


@torch.no_grad()
def discrepancy_stats(discrepancy: Tensor, mask: Tensor, *, coef: float) -> Stats:
    """What a shaping measured in one call, and its coefficient.

    Args:
        discrepancy: (B, T) what it holds down.
        mask: (B, T) bool, trainable tokens.
        coef: its coefficient.
    """
    total = torch.where(mask, discrepancy.float(), 0.0).sum()
    calls = torch.ones((), device=mask.device, dtype=torch.float64)
    return Stats({"loss#discrepancy": _group("loss#discrepancy", [mask.sum(), total, calls, calls * coef])})


def _clip_by_lag(batch: PolicyBatch, unit: Tensor, clipped: Tensor) -> dict[str, Group]:
    """The groups ``lag/<lag>#clip``, if the versions are known. A response counts at its largest lag."""
    lags = batch.version_lags
    if lags is None:
        return {}
    if lags.shape[-1] == 1:  # one version a row
        unit, clipped = unit.sum(-1), clipped.sum(-1)
        lags = lags.squeeze(-1)
    elif unit.shape[-1] == 1 and batch.mask.shape[-1] > 1:
        lags = torch.where(batch.mask, lags, 0).amax(-1, keepdim=True)
    layout, finalizers = GROUPS["lag/<lag>#clip"]
    table = sums_by_lag([unit, clipped], lags)
    return {
        f"lag/{name}#clip": Group(Moments(layout, sums, sums.new_empty(0)), finalizers, sparse=True)
        for name, sums in zip(LAG_NAMES, table.unbind(0), strict=True)
    }


# ---------------------------------------------------------------------------------------------------------- rollouts


def support_stats(outside: Tensor, mask: Tensor) -> Stats:
    """``rollout/outside_fraction``: share of the sampled tokens that the trainer's own truncation would have cut.

    Args:
        outside: (B, T) bool, those tokens.
        mask: (B, T) bool, trainable tokens.
    """
    return Stats({"rollout#support": _group("rollout#support", [mask.sum(), (outside & mask).sum()])})


def kept_ids_stats(counts: Tensor, mask: Tensor) -> Stats:
    """How many tokens the engine kept, where it reports that, and where the trainer had to cut by its own rule.

    Args:
        counts: (B, T) integer, kept ids of each token; 0 = not known.
        mask: (B, T) bool, trainable tokens.
    """
    known = mask & (counts > 0)
    sums = [mask.sum(), known.sum(), (mask & ~known).sum(), torch.where(known, counts, 0).sum()]
    return Stats({"rollout#kept": _group("rollout#kept", sums)})


@torch.no_grad()
def rollout_stats(batch: PolicyBatch, weights: Tensor) -> Stats:
    """The ``rollout`` group of a batch: lengths, version lags, rows of several versions, and the reweighted reward.

    Lags need the versions of the rows, and the reweighted reward needs rewards; without them they are left out.

    Args:
        batch: the rollouts.
        weights: (B, T) applied importance weights.
    """
    counts = batch.mask.sum(-1)
    groups = {"rollout": _group("rollout", [(counts > 0).sum(), counts.sum()])}
    if (lags := batch.version_lags) is not None:
        groups["rollout#lag"] = _lag(lags, batch.mask)
    if batch.policy_versions is not None and batch.policy_versions.dim() == 2:
        groups["rollout#versions"] = _cross(batch.policy_versions, batch.mask)
    if batch.rewards is not None:
        groups["rollout#reward"] = _reward(batch.rewards, batch.mask, weights, counts)
    return Stats(groups)


def _lag(lag: Tensor, mask: Tensor) -> Group:
    by_token = lag.expand_as(mask)
    top = _largest(torch.where(mask, by_token.double(), -torch.inf))
    return _group("rollout#lag", [mask.sum(), torch.where(mask, by_token, 0).sum()], [top])


def _cross(versions: Tensor, mask: Tensor) -> Group:
    """Counts the responses with a token, and those whose trainable tokens come from more than one version."""
    limits = torch.iinfo(versions.dtype)
    newest = torch.where(mask, versions, limits.min).amax(-1)
    oldest = torch.where(mask, versions, limits.max).amin(-1)
    some = mask.any(-1)
    return _group("rollout#versions", [some.sum(), (some & (newest > oldest)).sum()])


def _reward(rewards: Tensor, mask: Tensor, weights: Tensor, counts: Tensor) -> Group:
    """Sums for the reweighted reward: each response counts with its mean weight, unless it lacks a reward or tokens."""
    mean = _row_mean(weights.expand_as(mask), mask, counts)
    usable = (counts > 0) & (rewards.abs() < torch.inf)
    weight = torch.where(usable, mean, 0.0)
    total = (weight * torch.where(usable, rewards.float(), 0.0)).sum()
    return _group("rollout#reward", [weight.sum(), total])


def _row_mean(values: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    return torch.where(mask, values.float(), 0.0).sum(-1) / counts.clamp(min=1)


# ------------------------------------------------------------------------------------ bounds of bias and of variance


@torch.no_grad()
def estimator_stats(batch: PolicyBatch, weights: Tensor, keep_mask: Tensor, *, target: str) -> Stats:
    """``estimator/*``: bounds of the bias and the variance of the weighted gradient, from this batch.

    Args:
        batch: the micro-batch.
        weights: (B, T) applied importance weights.
        keep_mask: (B, T) bool; dropped tokens have weight 0.
        target: role of the policy whose gradient is wanted, the numerator of the correction's weights: ``old``,
            ``proximal`` or ``current``. The sampler is ``sampling``.

    Returns:
        Empty if the batch does not know what the sampling policy was.

    Reference: :mod:`trl_offpolicy.functional.estimator`.
    """
    if batch.sampling_per_token_logps is None:
        return Stats({})
    ratio = log_ratio(batch.logps(target), batch.logps("sampling"), batch.mask)
    used = torch.where(keep_mask, weights, 0.0)
    sums, tops = estimator_rows(ratio.values, used, batch.mask, batch.token_advantages)
    top = tops.amax(0) if len(tops) else tops.new_zeros(1)
    found = Moments(ESTIMATOR_LAYOUT, sums.sum(0), top)
    return Stats({"estimator": Group(found, ESTIMATOR_DIAGNOSTICS)})


# ----------------------------------------------------------------------------------------- gradient variance by proxy

GRADIENT_METRICS = ("signal", "noise")
"""The quantities that :func:`gradient_variance` derives from the power and the norm of the gradient."""
_POWER = f"{PREFIX}gradient/power"


@torch.no_grad()
def gradient_stats(batch: PolicyBatch, weights: Tensor, keep_mask: Tensor) -> Stats:
    """``gradient/power``: how large the gradient of single responses is, measured at the logits.

        power = mean over responses of (mean weight x mean advantage)^2 sum_t ||score_t||^2
        ||score_t||^2 = 1 - 2 pi(y_t) + sum_v pi(v)^2

    where score_t is the gradient of log pi(y_t) by the logits. Where the batch lacks ``sum_sq_probs``, 1 - pi(y) takes
    its place: for y sampled from pi both have the same mean, because E pi(y) = sum_v pi(v)^2. Nothing is computed a
    second time for it.

    Args:
        batch: the micro-batch.
        weights: (B, T) applied importance weights.
        keep_mask: (B, T) bool; dropped tokens give no gradient.

    Reference: verl 0.9.1, ``compute_variance_proxy_metrics`` (proxy 2), with its weights in the place of W.
    """
    kept = keep_mask.expand_as(batch.mask) & batch.mask
    counts = kept.sum(-1)
    probs = torch.where(kept, batch.per_token_logps, 0.0).float().exp()
    if batch.sum_sq_probs is None:
        norms = (1 - probs).clamp(min=0.0)
    else:
        norms = (1 - 2 * probs + torch.where(kept, batch.sum_sq_probs, 0.0).float()).clamp(min=0.0)
    score = torch.where(kept, norms, 0.0).sum(-1)
    weight = _row_mean(weights.expand_as(kept), kept, counts)
    advantage = _row_mean(batch.token_advantages.expand_as(kept), kept, counts)
    power = torch.where(counts > 0, (weight * advantage).square() * score, 0.0)
    return Stats({"gradient": _group("gradient", [(batch.mask.sum(-1) > 0).sum(), power.double().sum()])})


def gradient_variance(logs: Mapping[str, object], *, responses: int) -> dict[str, float]:
    """``gradient/signal`` and ``gradient/noise`` of a logging step; empty where its power or gradient norm is missing.

        signal = ||g||^2, noise = max(0, (power - signal) / (N - 1))

    where g is the gradient before clipping.

    Args:
        logs: with ``grad_norm`` and ``offpolicy/gradient/power``.
        responses: N of one optimizer step, all ranks.

    Reference: verl 0.9.1, ``compute_variance_proxy_metrics`` (proxies 1 and 3). As there, the signal is measured in the
    parameters and the power in the logits: read the trend of the noise, not its size.
    """
    norm, power = logs.get("grad_norm"), logs.get(_POWER)
    if not isinstance(norm, int | float) or not isinstance(power, int | float) or not math.isfinite(norm):
        return {}
    signal = float(norm) ** 2
    noise = max(0.0, (power - signal) / (responses - 1)) if responses > 1 else 0.0
    return {f"{PREFIX}gradient/signal": signal, f"{PREFIX}gradient/noise": noise}
