"""Gradient variance by proxy: ``gradient/*``. The power comes from the loss step, the rest from the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import PREFIX, Group, Stats
from trl_offpolicy.types import PolicyBatch

GRADIENT_METRICS = ("signal", "noise")
"""What :func:`gradient_variance` adds to the power."""

_POWER = f"{PREFIX}gradient/power"
_LAYOUT = Layout(sums=("responses", "power"))
_FINALIZERS = {"power": fraction("power", "responses")}
GROUPS = {"gradient": (_LAYOUT, _FINALIZERS)}
"""Names of the moments and finalisers, by group."""


@torch.no_grad()
def gradient_stats(batch: PolicyBatch, weights: Tensor, keep_mask: Tensor) -> Stats:
    """``gradient/power``: mean over responses of (mean weight x mean advantage)^2 x sum of the score's squared norms.

    The score of a token, the gradient of log pi(y) by the logits, has the squared norm 1 - 2 pi(y) + sum_v pi(v)^2.
    Where the batch lacks ``sum_sq_probs``, 1 - pi(y) stands in for it: for y sampled from pi both have the same mean,
    because E pi(y) = sum_v pi(v)^2. Nothing is computed a second time for it.

    Args:
        batch: the micro-batch.
        weights: (B, T) applied importance weights.
        keep_mask: (B, T) bool; dropped tokens give no gradient.

    Reference: verl 0.9.1, ``compute_variance_proxy_metrics`` (proxy 2), with its weights in the place of W.
    """
    kept = keep_mask.expand_as(batch.mask) & batch.mask
    counts = kept.sum(-1)
    probs = torch.where(kept, batch.per_token_logps, 0.0).float().exp()
    sums = None if batch.sum_sq_probs is None else torch.where(kept, batch.sum_sq_probs, 0.0).float()
    norms = (1 - probs if sums is None else 1 - 2 * probs + sums).clamp(min=0.0)
    score = torch.where(kept, norms, 0.0).sum(-1)
    weight = _row_mean(weights.expand_as(kept), kept, counts)
    advantage = _row_mean(batch.token_advantages.expand_as(kept), kept, counts)
    power = torch.where(counts > 0, (weight * advantage).square() * score, 0.0)
    values = moments(_LAYOUT, [(batch.mask.sum(-1) > 0).sum(), power.double().sum()])
    return Stats({"gradient": Group(values, _FINALIZERS)})


def _row_mean(values: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    return torch.where(mask, values.float(), 0.0).sum(-1) / counts.clamp(min=1)


def gradient_variance(logs: Mapping[str, object], *, responses: int) -> dict[str, float]:
    """``gradient/signal`` and ``gradient/noise`` of a logging step; empty where its power or gradient norm is missing.

    signal = ||g||^2 before clipping; noise = max(0, (power - signal) / (N - 1)).

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
