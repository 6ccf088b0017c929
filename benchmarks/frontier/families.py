"""The estimators that the benchmark compares, each an :class:`~trl_offpolicy.Objective` of the kit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import trl_offpolicy as op
from trl_offpolicy.objective.advantages import RLOO, AdvantageInputs
from trl_offpolicy.objective.losses import VESPO
from trl_offpolicy.presets.catalog import get

Kind = Literal["none", "token", "intermediate", "sequence", "bounded sequence", "mask"]
KINDS: dict[Kind, str] = {
    "none": "no correction",
    "token": "token level",
    "intermediate": "turn, prefix, geometric mean, variational",
    "sequence": "sequence level, unbounded",
    "bounded sequence": "sequence level with a bound",
    "mask": "masks",
}


@dataclass(frozen=True)
class Family:
    """An estimator.

    Args:
        kind: on which side of the conjecture it stands.
        objective: what gives its loss.
    """

    kind: Kind
    objective: op.Objective


def _weighted(weight: Any, normalize: Literal["none", "original"] = "none") -> op.Objective:
    """Plain policy gradient times a weight."""
    correction = op.Correction(weight=weight, normalize=normalize, measure=())
    return op.Objective(policy_loss=op.losses.GPG(), correction=correction, aggregation="seq_mean_token_sum")


def _masked(preset: str, **options: Any) -> op.Objective:
    """Plain policy gradient under the correction of a preset, with its published bounds."""
    correction = get(preset, **options).objective.correction
    return op.Objective(policy_loss=op.losses.GPG(), correction=correction, aggregation="seq_mean_token_sum")


def _whole_ratio(loss: Any) -> op.Objective:
    """A loss that holds pi / mu itself."""
    return op.Objective(policy_loss=loss, mode="bypass", aggregation="seq_mean_token_sum")


FAMILIES: dict[str, Family] = {
    "none": Family("none", _weighted(None)),
    "token IS": Family("token", _weighted(op.RawWeight(level="token"))),
    "token TIS 2": Family("token", _weighted(op.TruncateWeight(level="token", max_weight=2.0))),
    "IcePop 0.5-5": Family("token", _weighted(op.BandWeight(level="token", low=0.5, high=5.0))),
    "token IS, self-normalised": Family("token", _weighted(op.RawWeight(level="token"), "original")),
    "token, ESS cap": Family("token", _weighted(op.ESSWeight(level="token", target=0.5))),
    "turn IS": Family("intermediate", _weighted(op.RawWeight(level="turn"))),
    "turn TIS 2": Family("intermediate", _weighted(op.TruncateWeight(level="turn", max_weight=2.0))),
    "turn mean IS": Family("intermediate", _weighted(op.RawWeight(level="turn_mean"))),
    "prefix IS": Family("intermediate", _weighted(op.RawWeight(level="prefix"))),
    "prefix TIS 2": Family("intermediate", _weighted(op.TruncateWeight(level="prefix", max_weight=2.0))),
    "CTPO": Family("intermediate", _weighted(op.PrefixWeight())),
    "MinPRO": Family("intermediate", _weighted(op.PrefixMinWeight())),
    "geometric mean IS": Family("intermediate", _weighted(op.RawWeight(level="sequence_mean"))),
    "GSPO": Family("intermediate", _whole_ratio(op.losses.GSPO())),
    "GMPO": Family("intermediate", _whole_ratio(op.losses.GMPO())),
    "VESPO": Family("intermediate", _whole_ratio(VESPO())),
    "sequence IS": Family("sequence", _weighted(op.RawWeight(level="sequence"))),
    "sequence IS, self-normalised": Family("bounded sequence", _weighted(op.RawWeight(level="sequence"), "original")),
    "sequence TIS 5": Family("bounded sequence", _weighted(op.TruncateWeight(level="sequence", max_weight=5.0))),
    "sequence MIS 2": Family("bounded sequence", _weighted(op.BandWeight(level="sequence", low=None, high=2.0))),
    "sequence, ESS cap": Family("bounded sequence", _weighted(op.ESSWeight(level="sequence", target=0.5))),
    "geometric mask": Family("mask", _masked("paper/geometric-mask")),
    "product mask": Family("mask", _masked("paper/product-mask")),
    "OPSM": Family("mask", _masked("paper/opsm")),
    "TRM": Family("mask", _masked("paper/trm")),
    "M2PO": Family("mask", _masked("paper/m2po")),
}
"""{name: family}. Bounds are the published ones. All sum the tokens of a response, as the policy gradient does."""

ON_POLICY = _weighted(None)
"""The estimator of the oracle, for samples of the policy itself."""


def advantages(rewards: Tensor, group_size: int) -> Tensor:
    """(B,): the reward minus the mean of the others of the group, so that the on-policy estimate is unbiased."""
    groups = torch.arange(len(rewards)) // group_size
    return RLOO()(AdvantageInputs(rewards=rewards, group_ids=groups))


def coefficients(
    objective: op.Objective, logps: Tensor, sampling: Tensor, rewards: Tensor, *, group_size: int, turn: int
) -> Tensor:
    """(B, T) factor of each token's grad log pi in the ascent direction: minus d loss / d log pi. No gradient.

    Args:
        objective: the estimator.
        logps: (B, T) log-probs of the policy whose gradient is wanted, nats; also those at its last sync (pi_old).
        sampling: (B, T) log-probs of the policy that sampled, nats.
        rewards: (B,).
        group_size: neighbouring rows that answer one prompt.
        turn: tokens of a turn.
    """
    leaf = logps.detach().clone().requires_grad_()
    batch = op.PolicyBatch(
        per_token_logps=leaf,
        old_per_token_logps=logps.detach(),
        sampling_per_token_logps=sampling,
        completion_mask=torch.ones_like(logps, dtype=torch.bool),
        advantages=advantages(rewards, group_size),
        rewards=rewards,
        group_ids=torch.arange(len(rewards)) // group_size,
        turn_ids=(torch.arange(logps.shape[1]) // turn).expand(logps.shape).contiguous(),
    )
    (gradient,) = torch.autograd.grad(objective(batch).loss, leaf)
    return -gradient
