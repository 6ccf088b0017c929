"""Coefficients that follow what an optimizer step measured: an adaptive KL penalty and TRL's entropy bonus.

Sums over the micro-batches stay on the device; they reach the host once, at the end of the step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trl_offpolicy.functional.kl import MAX_KL_ERROR
from trl_offpolicy.objective.kl import AdaptiveKL, KLPenalty
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import PolicyBatch

logger = logging.getLogger(__name__)

STATE_FILE = "offpolicy_state.json"
"""File in a checkpoint folder with the state of the controllers."""


class StepSums(NamedTuple):
    """What an optimizer step measured.

    ``nonfinite`` counts the tokens without a finite log-prob. ``kl`` is summed over the trainable ``tokens`` and
    ``entropy`` over the tokens of the policy term (``acting``), both in nats. ``sampled`` counts the trainable tokens
    with a finite log-prob of the engine; without such log-probs all do. ``responses`` are those of this rank.
    """

    nonfinite: float
    kl: float
    tokens: float
    entropy: float
    acting: float
    sampled: float
    responses: int

    @property
    def mean_entropy(self) -> float:
        """Mean entropy of the policy term's tokens, nats."""
        return self.entropy / max(self.acting, 1.0)


class StepWindow:
    """Adds up the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._responses = 0

    def add(self, batch: PolicyBatch, stats: Stats) -> None:
        """Add a micro-batch by the stats of its loss; nothing waits for the device."""
        sums = _sums(batch, stats)
        self._sums = sums if self._sums is None else self._sums + sums
        self._responses += len(batch.mask)

    def close(self, reduce: Callable[[Tensor], Tensor] | None = None) -> StepSums:
        """The sums as numbers, over all ranks with ``reduce``; begins the next step. The only wait for the device."""
        assert self._sums is not None
        sums = self._sums if reduce is None else reduce(self._sums)
        nonfinite, kl, tokens, entropy, acting, sampled = sums.tolist()
        done = StepSums(nonfinite, kl, tokens, entropy, acting, sampled, self._responses)
        self._sums, self._responses = None, 0
        return done


@torch.no_grad()
def _sums(batch: PolicyBatch, stats: Stats) -> Tensor:
    """(6,) float64: the fields of :class:`StepSums` without the last."""
    loss = stats.groups["loss"].moments
    zero = torch.zeros((), dtype=torch.float64, device=batch.mask.device)
    acting = batch.acting_mask
    entropy = zero if batch.entropies is None else torch.where(acting, batch.entropies, 0.0).sum().double()
    acting_tokens = acting.sum().double()
    return torch.stack([loss["nonfinite"], loss["kl"], loss["tokens"], entropy, acting_tokens, sampled_tokens(batch)])


def sampled_tokens(batch: PolicyBatch) -> Tensor:
    """0-d float64: trainable tokens with a finite log-prob of the engine; all if the batch has no such log-probs."""
    logps = batch.sampling_per_token_logps
    usable = batch.mask if logps is None else batch.mask & logps.isfinite()
    return usable.sum().double()


def adapts(kl: KLPenalty | None) -> bool:
    """True if the coefficient moves in training."""
    return kl is not None and kl.adapts


def next_kl(kl: KLPenalty, step: StepSums, *, world_size: int) -> KLPenalty:
    """The penalty of the next step, the same on every rank; unchanged if the step had no tokens."""
    return kl.updated(step.kl / step.tokens, step.responses * world_size) if step.tokens > 0 else kl


def check_horizon(kl: KLPenalty | None, responses: int) -> None:
    """Raise if one optimizer step with this many responses could take the coefficient to zero.

    Raises:
        ValueError: the horizon is too short.
    """
    if kl is not None and isinstance(kl.coef, AdaptiveKL) and MAX_KL_ERROR * responses >= kl.coef.horizon:
        raise ValueError(
            f"kl.coef.horizon must be above {MAX_KL_ERROR * responses:g} with {responses} responses in an optimizer "
            f"step (they may change the coefficient by 20 % in a horizon), but got {kl.coef.horizon:g}."
        )


class Stateful(Protocol):
    """Something with a state for the checkpoints; an empty state is not written."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values for JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the values of :meth:`state_dict`."""


def save_state(folder: Path, kl: KLPenalty | None, **parts: Stateful | None) -> None:
    """Write the coefficient (if it moves) and the states of other ``parts`` (if they have one) into a checkpoint."""
    state: dict[str, Any] = {} if kl is None or not adapts(kl) else {"kl": kl.state_dict()}
    for name, part in parts.items():
        if part is not None and (known := part.state_dict()):
            state[name] = known
    if state:
        (folder / STATE_FILE).write_text(json.dumps(state))


def load_state(folder: Path, kl: KLPenalty | None, **parts: Stateful | None) -> KLPenalty | None:
    """The penalty with the coefficient of a checkpoint, or as configured, with a warning, if the checkpoint has none.

    Each of ``parts`` continues from its state in the checkpoint, if :func:`save_state` wrote one under its name.
    """
    file = folder / STATE_FILE
    saved: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for name, part in parts.items():
        if part is not None and name in saved:
            part.load_state_dict(saved[name])
    if kl is None or not adapts(kl):
        return kl
    if "kl" not in saved:
        logger.warning("%s has no %s: the KL coefficient starts again at %g.", folder, STATE_FILE, kl.beta)
        return kl
    return kl.restored(saved["kl"])
