"""The batch that both trainers hand to a correction, and what comes back.

Names of the three policies (log-probabilities of the sampled tokens, in nats):
``sampling_per_token_logps`` is mu, the engine that sampled; ``old_per_token_logps`` is pi_old, the trainer at
the weights that sampled; ``per_token_logps`` is pi, the trainer now, the only one that carries gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from trl_offpolicy.checks import check_not_negative, check_whole
from trl_offpolicy.functional._fast import count_true
from trl_offpolicy.functional._shapes import check_zero_or_one
from trl_offpolicy.stats import Stats

Ratio = Literal["old/sampling", "current/old", "current/sampling"]
Scope = Literal["row", "group", "generation_batch", "micro_batch"]

SCOPES: tuple[Scope, ...] = ("row", "micro_batch", "group", "generation_batch")
"""From narrow to wide: what a part of a correction must see at once."""
WIDE_SCOPES: tuple[Scope, ...] = ("group", "generation_batch")
"""Those that must see more than a micro-batch, so that they are decided before a generation batch is split."""

RATIOS: tuple[Ratio, ...] = ("old/sampling", "current/old", "current/sampling")

_TOKEN_FIELDS = (
    "old_per_token_logps",
    "sampling_per_token_logps",
    "proximal_per_token_logps",
    "completion_mask",
    "ref_per_token_logps",
    "entropies",
    "sum_sq_probs",
    "policy_mask",
    "turn_ids",
    "decided_weights",
    "decided_keep",
)
_ROW_FIELDS = ("rewards", "group_ids")
_ROW_OR_TOKEN_FIELDS = ("advantages", "policy_versions")
_FLOAT_FIELDS = (
    "per_token_logps",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "proximal_per_token_logps",
    "ref_per_token_logps",
    "entropies",
    "sum_sq_probs",
    "advantages",
    "rewards",
    "group_rewards",
    "decided_weights",
)
_INTEGER_FIELDS = ("turn_ids", "policy_versions", "group_ids")


@dataclass(frozen=True)
class Average:
    """A moving average of a batch's log-probs. The trainer keeps it with the rows that it belongs to.

    Args:
        logps: (B, T) float32, nats, no gradient.
        count: number of policies in the average: one number for all rows, or integer (B, 1) or (B, T).
        version: weight version of the last of them; None = not known.
    """

    logps: Tensor
    count: int | Tensor
    version: int | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """A batch of B responses padded to T >= 1 tokens. Fields are (B, T) unless another shape is given; None = absent.

    Args:
        per_token_logps: log pi, float; carries gradient.
        old_per_token_logps: log pi_old, float, no gradient. None means old = ``per_token_logps.detach()``,
            which is exact only for the first optimizer step on samples of the current weights.
        sampling_per_token_logps: log mu as the engine returned it, float, no gradient.
        proximal_per_token_logps: centre of the trust region; None means old.
        completion_mask: bool or 0/1; True = trainable token (False on tool tokens and padding).
        advantages: (B,) or (B, T), float, no gradient.
        rewards: (B,), float, no gradient.
        ref_per_token_logps: log-probs of the reference policy of the KL term.
        entropies: entropy of pi at each position, nats; carries gradient if the entropy bonus is on.
        sum_sq_probs: sum over the vocabulary of pi squared at each position.
        policy_mask: bool; tokens that take part in the policy term (None = all trainable tokens). The KL term
            and all denominators keep the whole ``completion_mask``.
        turn_ids: integer id of the turn of each token.
        policy_versions: (B,) or (B, T), integer weight version that sampled.
        group_ids: (B,), integer id of the prompt group.
        group_rewards: (B, G), float, the rewards of all responses of the row's group, in any order; a value that is not
            finite means no reward. They travel with the row when a trainer splits groups.
        current_version: weight version of ``per_token_logps``; with ``policy_versions`` it tells how stale a row is.
        decided_weights: (B, 1) or (B, T), float32 weights that a correction of wider scope gave before the batch was
            split. They are its ``sequence_weights`` (B, 1) if it has them, because a loss with the weights inside reads
            one per response.
        decided_keep: bool, the keep mask of that correction.
        past_average: what ``AveragedProximal`` returned for these rows in the last optimizer step; None = nothing yet.

    Raises:
        ValueError: a field's shape or device does not fit ``per_token_logps``, or a mask on the CPU holds other values
            than 0 and 1 (not checked on an accelerator, so as not to wait for the device).
        TypeError: a field is not a tensor, or its dtype is wrong.
    """

    per_token_logps: Tensor
    old_per_token_logps: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    proximal_per_token_logps: Tensor | None = None
    completion_mask: Tensor
    advantages: Tensor
    rewards: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    entropies: Tensor | None = None
    sum_sq_probs: Tensor | None = None
    policy_mask: Tensor | None = None
    turn_ids: Tensor | None = None
    policy_versions: Tensor | None = None
    group_ids: Tensor | None = None
    group_rewards: Tensor | None = None
    current_version: int | None = None
    decided_weights: Tensor | None = None
    decided_keep: Tensor | None = None
    past_average: Average | None = None

    def __post_init__(self) -> None:
        self._check_tensors()
        self._check_shapes()
        self._check_dtypes()
        names = ("completion_mask", "policy_mask", "decided_keep")
        check_zero_or_one(**{name: getattr(self, name) for name in names})
        if self.current_version is not None and type(self.current_version) is not int:
            raise TypeError(f"current_version must be an int, but got {type(self.current_version).__name__}.")
        if self.past_average is not None and not isinstance(self.past_average, Average):
            raise TypeError(f"past_average must be an Average or None, but got {type(self.past_average).__name__}.")

    def _check_tensors(self) -> None:
        """Raise unless all fields (except the version and the average) are tensors on one device."""
        for item in fields(self):
            if item.name in ("current_version", "past_average"):
                continue
            value = getattr(self, item.name)
            required = item.name in ("per_token_logps", "completion_mask", "advantages")
            if not isinstance(value, Tensor) and (required or value is not None):
                raise TypeError(f"{item.name} must be a tensor, but got {type(value).__name__}.")
            if isinstance(value, Tensor) and value.device != self.per_token_logps.device:
                where = f"{self.per_token_logps.device}, as per_token_logps is"
                raise ValueError(f"{item.name} must be on {where}, but got {value.device}.")

    def _check_shapes(self) -> None:
        """Raise unless every field fits the B and T of ``per_token_logps``."""
        shape = tuple(self.per_token_logps.shape)
        if len(shape) != 2:
            raise ValueError(f"per_token_logps must have shape (B, T), but got {shape}.")
        if shape[1] == 0:
            raise ValueError(f"per_token_logps must have at least one token a row, but got {shape}.")
        for name in (*_TOKEN_FIELDS, *_ROW_FIELDS, *_ROW_OR_TOKEN_FIELDS):
            self._check_shape(name)
        groups = self.group_rewards
        if groups is not None and (groups.dim() != 2 or len(groups) != shape[0]):
            raise ValueError(f"group_rewards must have shape ({shape[0]}, G), but got {tuple(groups.shape)}.")

    def _check_shape(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        rows, length = self.per_token_logps.shape
        allowed: set[tuple[int, ...]] = {(rows, length)} if name not in _ROW_FIELDS else {(rows,)}
        if name in _ROW_OR_TOKEN_FIELDS:
            allowed.add((rows,))
        if name == "decided_weights":
            allowed.add((rows, 1))
        if tuple(value.shape) not in allowed:
            expected = " or ".join(str(shape) for shape in sorted(allowed, key=len))
            raise ValueError(f"{name} must have shape {expected}, but got {tuple(value.shape)}.")

    def _check_dtypes(self) -> None:
        for name in _FLOAT_FIELDS:
            value = getattr(self, name)
            if value is not None and not value.is_floating_point():
                raise TypeError(f"{name} must be a floating point tensor, but got {value.dtype}.")
        for name in _INTEGER_FIELDS:
            value = getattr(self, name)
            if value is not None and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
                raise TypeError(f"{name} must be an integer tensor, but got {value.dtype}.")

    @cached_property
    def mask(self) -> Tensor:
        """(B, T) bool: the trainable tokens."""
        return self.completion_mask if self.completion_mask.dtype == torch.bool else self.completion_mask != 0

    @property
    def acting_mask(self) -> Tensor:
        """(B, T) bool: the trainable tokens that take part in the policy term."""
        return self.mask if self.policy_mask is None else self.mask & (self.policy_mask != 0)

    @cached_property
    def lengths(self) -> Tensor:
        """(B,) float32: trainable tokens of each response."""
        return count_true(self.mask)

    @property
    def version_lags(self) -> Tensor | None:
        """(B, 1) or (B, T) integer: versions between sampling and now; None if one of the two is not known."""
        if self.policy_versions is None or self.current_version is None:
            return None
        lags = self.current_version - self.policy_versions.long()
        return lags.unsqueeze(1) if lags.dim() == 1 else lags

    @property
    def token_advantages(self) -> Tensor:
        """(B, 1), or (B, T) with 0 outside the mask; float32, ready to broadcast against tokens. No gradient."""
        advantages = self.advantages.detach().float()
        # A response's ratio multiplies all of its row: what padding holds would reach its gradient as 0 * NaN.
        return advantages.unsqueeze(1) if advantages.dim() == 1 else torch.where(self.mask, advantages, 0.0)

    def logps(self, policy: str) -> Tensor:
        """Log-probs (B, T) of ``"current"``, ``"old"``, ``"proximal"`` or ``"sampling"``, detached.

        Raises:
            ValueError: the sampling log-probs are requested but absent.
        """
        if policy == "proximal" and self.proximal_per_token_logps is not None:
            return self.proximal_per_token_logps.detach()
        policy = "old" if policy == "proximal" else policy
        if policy == "current" or (policy == "old" and self.old_per_token_logps is None):
            return self.per_token_logps.detach()
        if policy == "old":
            assert self.old_per_token_logps is not None
            return self.old_per_token_logps.detach()
        if self.sampling_per_token_logps is None:
            raise ValueError(
                "sampling_per_token_logps must be given when a correction or diagnostic reads the sampling policy, "
                "but got None. Ask the engine for the log-probs of the sampled tokens."
            )
        return self.sampling_per_token_logps.detach()


@dataclass(frozen=True)
class CorrectionOutput:
    """What a :class:`~trl_offpolicy.Correction` returns. Nothing here carries gradient.

    Args:
        weights: (B, T) float32, which multiply the policy loss; 0 outside ``completion_mask``.
        keep_mask: (B, T) bool, True = the token stays in the policy loss; False outside ``completion_mask``.
        stats: the diagnostics, mergeable over micro-batches and ranks.
        sequence_weights: (B, 1) float32 where all weights are constant over the sequence, else None.
    """

    weights: Tensor
    keep_mask: Tensor
    stats: Stats
    sequence_weights: Tensor | None = None


@dataclass(frozen=True)
class Reduction:
    """How one micro-batch's loss is scaled so that a whole optimizer step is that of one batch.

    Losses of micro-batches are added up, those of ranks averaged, as data-parallel training does with gradients.

    Args:
        tokens: trainable tokens of the whole optimizer step over all ranks and micro-batches (a number or a 0-d
            tensor), or only the kept ones with ``denominator="kept"``. None = this micro-batch alone, divided by
            ``accumulation``.
        sequences: the same for sequences, empty ones included; with "kept" those that keep a token.
        world_size: ranks whose gradients are averaged.
        accumulation: micro-batches per optimizer step; used if ``tokens`` or ``sequences`` is None.
        max_length: the constant L of Dr. GRPO's ``seq_mean_token_sum_norm``; None = T of the batch.

    Raises:
        ValueError: a field is out of range; the value of a tensor is not checked.
    """

    tokens: Tensor | float | None = None
    sequences: Tensor | float | None = None
    world_size: int = 1
    accumulation: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                if value.dim() > 0 or value.dtype == torch.bool or value.is_complex():
                    raise ValueError(
                        f"{name} must be a number or a 0-d tensor of one, but got shape {tuple(value.shape)}, "
                        f"{value.dtype}."
                    )
            elif value is not None:
                check_not_negative(**{name: value})
        check_whole("world_size", self.world_size, least=1)
        check_whole("accumulation", self.accumulation, least=1)
        if self.max_length is not None:
            check_whole("max_length", self.max_length, least=1)


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an :class:`~trl_offpolicy.Objective` returns; only ``loss`` and ``per_token_loss`` carry gradient.

    With ``AveragedProximal``, ``average`` is the ``past_average`` of the next step on the same rows; otherwise None.
    """

    loss: Tensor
    per_token_loss: Tensor
    weights: Tensor
    keep_mask: Tensor
    stats: Stats
    average: Average | None = None
