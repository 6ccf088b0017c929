"""Where the proximal log-probs of a batch come from: ``PolicyBatch.proximal_per_token_logps``, or None = old."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trl_offpolicy.functional.proximal import averaged_logps, interpolated_logps
from trl_offpolicy.types import PolicyBatch, check_number


@dataclass(frozen=True)
class Average:
    """A moving average of a batch's log-probs, kept by the trainer beside the rows that it belongs to.

    Args:
        logps: (B, T) float32, nats, no gradient.
        count: policies averaged in it.
    """

    logps: Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class RecomputedProximal:
    """The policy at the start of the optimizer steps on the batch: old log-probs, one forward (none if aligned)."""

    def __call__(self, batch: PolicyBatch) -> Tensor | None:
        """None: the centre is ``old_per_token_logps``."""
        return None


@dataclass(frozen=True, kw_only=True)
class InterpolatedProximal:
    """A-3PO: between the sampling and the current policy by version, no forward.

    Args:
        lag: versions by which the centre is behind the current policy (AReaL: 1).
    """

    lag: int = 1

    def __post_init__(self) -> None:
        if type(self.lag) is not int or self.lag < 0:
            raise ValueError(f"lag must be an integer of at least 0, but got {self.lag!r}.")

    def __call__(self, batch: PolicyBatch) -> Tensor:
        """(B, T) float32, no gradient. Starts from old where the batch has it, else from sampling.

        Raises:
            ValueError: the batch lacks versions, or both old and sampling log-probs.
        """
        versions, current = batch.policy_versions, batch.current_version
        if versions is None or current is None:
            raise ValueError("policy_versions and current_version must be given to interpolate by age, but got None.")
        return interpolated_logps(
            batch.logps("sampling" if batch.old_per_token_logps is None else "old"),
            batch.logps("current"),
            versions,
            proximal_version=current - self.lag,
            current_version=current,
        )


@dataclass(frozen=True, kw_only=True)
class AveragedProximal:
    """PPO-EWMA in log-probs: moving average over the policies that saw the batch, no forward.

    Args:
        decay: weight of the past for each optimizer step; the centre lags by about decay / (1 - decay) steps.

    Example:
        >>> import torch
        >>> import trl_offpolicy as op
        >>> batch = op.PolicyBatch(per_token_logps=torch.tensor([[-1.0]]), old_per_token_logps=torch.tensor([[-3.0]]),
        ...                        completion_mask=torch.ones(1, 1).bool(), advantages=torch.ones(1))
        >>> AveragedProximal(decay=0.5)(batch)
        tensor([[-1.6667]])
    """

    decay: float

    def __post_init__(self) -> None:
        check_number("decay", self.decay)
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay must be in [0, 1], but got {self.decay}.")

    def __call__(self, batch: PolicyBatch, past: Average | None = None) -> Tensor:
        """(B, T) float32 average of ``past`` (None = old alone) and the current policy; no gradient."""
        return self.step(batch, past).logps

    def step(self, batch: PolicyBatch, past: Average | None = None) -> Average:
        """The average with the current policy in it, to be handed to the next step on the same rows."""
        past = Average(batch.logps("old"), 1) if past is None else past
        current = batch.logps("current")
        if past.logps.shape != current.shape:
            raise ValueError(f"past.logps must have shape {tuple(current.shape)}, but got {tuple(past.logps.shape)}.")
        logps = averaged_logps(past.logps, current, decay=self.decay, count=past.count)
        return Average(logps, past.count + 1)


Proximal = RecomputedProximal | InterpolatedProximal | AveragedProximal
"""What a trainer's option may be."""

__all__ = ["Average", "AveragedProximal", "InterpolatedProximal", "Proximal", "RecomputedProximal"]
