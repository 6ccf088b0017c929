"""Where the proximal log-probs of a batch come from: ``Objective(proximal=...)``.

The centre of the trust region need not be the policy that sampled. The loss is then the decoupled one, (proximal/old) x
L(current/proximal): the clip acts around the centre, and the product of all ratios is still current/old.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_offpolicy.checks import check_whole, check_within
from trl_offpolicy.functional.proximal import averaged_logps, interpolated_logps
from trl_offpolicy.parts import Part
from trl_offpolicy.types import Average, PolicyBatch


class Proximal(Part):
    """A centre of the trust region. Subclass it as a frozen, keyword-only dataclass with a :meth:`__call__`."""

    reads_old: ClassVar[bool] = True
    """Whether it needs old log-probs. The trainers then run a forward for them where they do not have them yet."""

    @abstractmethod
    def __call__(self, batch: PolicyBatch) -> Tensor | None:
        """Log-probs of the centre, (B, T) float32 without gradient; None = the centre is ``old_per_token_logps``."""


@dataclass(frozen=True, kw_only=True)
class RecomputedProximal(Proximal):
    """The policy at the start of the optimizer steps on the batch: old log-probs, by one forward (none if aligned)."""

    type_name: ClassVar[str] = "recomputed"

    def __call__(self, batch: PolicyBatch) -> Tensor | None:
        """None: the centre is ``old_per_token_logps``."""
        return None


@dataclass(frozen=True, kw_only=True)
class InterpolatedProximal(Proximal):
    """A-3PO: a centre between the sampling and the current policy, by version; it costs no forward.

    Args:
        lag: versions by which the centre lags the current policy (AReaL: 1).
    """

    type_name: ClassVar[str] = "interpolated"
    lag: int = 1
    reads_old: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("lag", self.lag, least=0)

    def __call__(self, batch: PolicyBatch) -> Tensor:
        """Log-probs of the centre, (B, T) float32 without gradient. It starts from old, or from sampling without old.

        On rows of the current version the current policy is the old one, so there the centre is exact even without old
        log-probs.

        Raises:
            ValueError: the batch lacks versions, or both old and sampling log-probs.
        """
        versions, current = batch.policy_versions, batch.current_version
        if versions is None or current is None:
            raise ValueError("policy_versions and current_version must be given to interpolate by age, but got None.")
        return interpolated_logps(
            _sampled_by(batch),
            batch.logps("current"),
            versions,
            proximal_version=current - self.lag,
            current_version=current,
        )


def _sampled_by(batch: PolicyBatch) -> Tensor:
    """(B, T) log-probs of the policy that sampled: old, or without it current if that is the same policy, else mu."""
    lags = batch.version_lags
    if batch.old_per_token_logps is not None or lags is None:
        return batch.logps("old")
    return torch.where(lags > 0, batch.logps("sampling").float(), batch.logps("current").float())


@dataclass(frozen=True, kw_only=True)
class AveragedProximal(Proximal):
    """PPO-EWMA in log-probs: a moving average over the policies that saw the rows; it costs no extra forward.

    Each version counts once: a second pass at the same weights changes nothing, and on rows of the current version the
    current policy is the old one.

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

    type_name: ClassVar[str] = "averaged"
    example: ClassVar[Mapping[str, Any]] = {"decay": 0.5}
    decay: float

    def __post_init__(self) -> None:
        check_within("decay", self.decay, 0, 1)

    def __call__(self, batch: PolicyBatch, past: Average | None = None) -> Tensor:
        """Average of ``past`` (None = old alone) and the current policy, (B, T) float32 without gradient."""
        return self.step(batch, past).logps

    def step(self, batch: PolicyBatch, past: Average | None = None) -> Average:
        """The average that includes the current policy, for the next step on the same rows."""
        past = Average(batch.logps("old").float(), 1) if past is None else past
        current, lags = batch.logps("current"), batch.version_lags
        if past.logps.shape != current.shape:
            raise ValueError(f"past.logps must have shape {tuple(current.shape)}, but got {tuple(past.logps.shape)}.")
        if past.version is not None and past.version == batch.current_version:
            return past
        logps = averaged_logps(past.logps, current, decay=self.decay, count=past.count)
        if lags is None:
            return Average(logps, past.count + 1, batch.current_version)
        moved = lags > 0
        return Average(torch.where(moved, logps, past.logps), past.count + moved.long(), batch.current_version)


__all__ = ["Average", "AveragedProximal", "InterpolatedProximal", "Proximal", "RecomputedProximal"]
