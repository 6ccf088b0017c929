"""What advantage estimators read: rewards, groups and, for some, the tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trl_offpolicy.functional.advantages import score_energy

_HINTS = {
    "sum_sq_probs": " Ask the fused head of the trainer's forward for it.",
    "weights": " Take them from a Correction's output.",
}


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator sees of a generation batch; (B, T) unless said, None where absent. Nothing carries gradient.

    Args:
        rewards: (B,), or (B, K) with a column for each reward function; NaN = no reward.
        group_ids: (B,) integer id of the prompt.
        reward_weights: (K,), weight of each function in the sum; None = ones.
        counted: (B,) bool, responses that belong to the baseline; None = all.
        mask: bool, True = trainable token.
        token_rewards: rewards by token besides the outcome, e.g. :func:`~trl_offpolicy.functional.kl.subtract_kl` of
            zeros.
        per_token_logps: log-probs of the policy at rollout weights (old), nats.
        sum_sq_probs: sum over the vocabulary of its probabilities squared.
        weights: (B, 1) or (B, T) importance weights.
        squared_grad_norms: (B,) squared norm of each response's gradient, where a trainer has it.

    Raises:
        ValueError: a field's shape does not fit.
        TypeError: a field is not a tensor.
    """

    rewards: Tensor
    group_ids: Tensor
    reward_weights: Tensor | None = None
    counted: Tensor | None = None
    mask: Tensor | None = None
    token_rewards: Tensor | None = None
    per_token_logps: Tensor | None = None
    sum_sq_probs: Tensor | None = None
    weights: Tensor | None = None
    squared_grad_norms: Tensor | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            required = item.name in ("rewards", "group_ids")
            if not isinstance(value, Tensor) and (required or value is not None):
                raise TypeError(f"{item.name} must be a tensor, but got {type(value).__name__}.")
        if self.rewards.dim() not in (1, 2):
            raise ValueError(f"rewards must have shape (B,) or (B, K), but got {tuple(self.rewards.shape)}.")
        rows, functions = self.by_function.shape
        shapes: dict[str, list[tuple[int, ...]]] = {"reward_weights": [(functions,)]}
        shapes |= {name: [(rows,)] for name in ("group_ids", "counted", "squared_grad_norms")}
        if self.mask is not None:
            length = self.mask.shape[-1]
            by_token = ("mask", "token_rewards", "per_token_logps", "sum_sq_probs")
            shapes |= {name: [(rows, length)] for name in by_token}
            shapes["weights"] = [(rows, 1), (rows, length)]
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and item.name in shapes and tuple(value.shape) not in shapes[item.name]:
                expected = " or ".join(str(shape) for shape in shapes[item.name])
                raise ValueError(f"{item.name} must have shape {expected}, but got {tuple(value.shape)}.")

    @property
    def by_function(self) -> Tensor:
        """(B, K) rewards."""
        return self.rewards.unsqueeze(1) if self.rewards.dim() == 1 else self.rewards

    @property
    def outcome(self) -> Tensor:
        """(B,) float32, weighted sum of the functions that apply; NaN where none does."""
        rewards = self.by_function.float()
        weighted = rewards if self.reward_weights is None else rewards * self.reward_weights.to(rewards)
        return torch.where(rewards.isnan().all(-1), torch.nan, weighted.nansum(-1))

    @property
    def total(self) -> Tensor:
        """(B,) float32, outcome plus rewards by token."""
        if self.token_rewards is None:
            return self.outcome
        return self.outcome + torch.where(self.need("mask", "token_rewards"), self.token_rewards.float(), 0.0).sum(-1)

    @property
    def present(self) -> Tensor:
        """(B,) bool: counted, and with a reward."""
        rewarded = ~self.outcome.isnan()
        return rewarded if self.counted is None else rewarded & (self.counted != 0)

    def need(self, name: str, reader: str) -> Tensor:
        """The field ``name``; a mask as bool.

        Raises:
            ValueError: it is absent.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} must be given for {reader}, but got None.{_HINTS.get(name, '')}")
        return value != 0 if name == "mask" else value

    def energy(self, reader: str, weights: Tensor | None) -> Tensor:
        """(B, T) :func:`~trl_offpolicy.functional.advantages.score_energy`."""
        mask, logps = self.need("mask", reader), self.need("per_token_logps", reader)
        return score_energy(logps, self.need("sum_sq_probs", reader), mask, weights)
