"""Coefficients that follow what an optimizer step measured: an adaptive KL penalty and TRL's entropy bonus.

Sums over the micro-batches stay on the device; they reach the host once, at the end of the step.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from trl_offpolicy.checks import check_bool, check_not_negative, check_number, check_within, near
from trl_offpolicy.functional.kl import MAX_KL_ERROR
from trl_offpolicy.objective.kl import AdaptiveKL, KLPenalty
from trl_offpolicy.objective.measure import without_advantage
from trl_offpolicy.objective.shaping import AdvantageShaping
from trl_offpolicy.parts import as_mapping
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import PolicyBatch

logger = logging.getLogger(__name__)

STATE_FILE = "offpolicy_state.json"
"""File in a checkpoint folder with the state of the controllers."""


class StepSums(NamedTuple):
    """What an optimizer step measured.

    ``nonfinite`` counts the trainable tokens without a finite log-prob, ``no_advantage`` those without a finite
    advantage. ``kl`` is summed over the trainable ``tokens`` and
    ``entropy`` over the tokens of the policy term (``acting``), both in nats. ``sampled`` counts the trainable tokens
    with a finite log-prob of the engine; without such log-probs all do. ``discrepancy`` is summed over the trainable
    tokens, in the unit of the shaping that measures it. ``responses`` are those of this rank.
    """

    nonfinite: float
    no_advantage: float
    kl: float
    tokens: float
    entropy: float
    acting: float
    sampled: float
    discrepancy: float
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
        """The sums as numbers, over all ranks with ``reduce``; begins the next step. Waits for the device."""
        assert self._sums is not None
        sums = self._sums if reduce is None else reduce(self._sums)
        done = StepSums._make([*sums.tolist(), self._responses])
        self._sums, self._responses = None, 0
        return done


@torch.no_grad()
def _sums(batch: PolicyBatch, stats: Stats) -> Tensor:
    """(8,) float64: the fields of :class:`StepSums` without the last."""
    loss = stats.groups["loss"].moments
    zero = torch.zeros((), dtype=torch.float64, device=batch.mask.device)
    acting = batch.acting_mask
    entropy = zero if batch.entropies is None else torch.where(acting, batch.entropies, 0.0).sum().double()
    shaped = stats.groups.get("loss#discrepancy")
    discrepancy = zero if shaped is None else shaped.moments["discrepancy"]
    counts = acting.sum().double(), sampled_tokens(batch)
    wrong = loss["nonfinite"], without_advantage(batch).sum().double()
    return torch.stack([*wrong, loss["kl"], loss["tokens"], entropy, *counts, discrepancy])


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


@dataclass(frozen=True, kw_only=True)
class EntropyOptions:
    """TRL's options of the entropy, under TRL's names and with its defaults.

    Args:
        top_entropy_quantile: share of the tokens, those with the highest entropies, that have a policy term and a
            bonus; 1 = all, 0 = the highest alone (:func:`~trl_offpolicy.functional.masks.high_entropy_mask`).
        entropy_coef: coefficient of the entropy bonus; a negative one makes it a penalty.
        use_adaptive_entropy: whether the coefficient moves (:class:`EntropyControl`), from ``entropy_coef`` on.
        entropy_coef_min: the lowest coefficient that it moves to.
        entropy_coef_max: the highest one.
        entropy_coef_delta: how far it moves in an optimizer step.
        entropy_target: mean entropy in nats up to which the bonus is applied.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2

    def __post_init__(self) -> None:
        check_within("top_entropy_quantile", self.top_entropy_quantile, 0.0, 1.0)
        check_bool(use_adaptive_entropy=self.use_adaptive_entropy)
        for name in ("entropy_coef", "entropy_coef_min", "entropy_coef_max"):
            check_number(name, getattr(self, name))
        check_not_negative(entropy_coef_delta=self.entropy_coef_delta, entropy_target=self.entropy_target)
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min must be at most entropy_coef_max, but got {self.entropy_coef_min} and "
                f"{self.entropy_coef_max}."
            )

    @classmethod
    def parse(cls, spec: Any, *, where: str = "entropy") -> EntropyOptions:
        """The options from a mapping of them; None = TRL's defaults.

        Raises:
            ValueError: an unknown name or a wrong value; the message names ``where``.
        """
        if isinstance(spec, cls):
            return spec
        given: Mapping[str, Any] = {} if spec is None else as_mapping(spec, where)
        known = [item.name for item in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{where}.{unknown[0]} must be one of {known}.{near(unknown[0], known)}")
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from None


@dataclass(frozen=True)
class EntropyControl:
    """The coefficient of the entropy bonus, as an optimizer step leaves it to the next one.

        coef' = clip(coef + delta, min, max) where H <= target, else clip(coef - delta, min, max)

    where H is the mean entropy of the step's tokens. The next step's bonus is left out where H is above the target.

    Args:
        options: target, bounds and step.
        coef: the coefficient.
        measured: H of the last optimizer step, nats; infinite before the first, which has no bonus if it adapts.

    Reference: He et al. 2025, "Skywork Open Reasoner 1" (arXiv:2505.22312), as in TRL 1.16.
    """

    options: EntropyOptions
    coef: float
    measured: float = math.inf

    @property
    def adapts(self) -> bool:
        """True if the coefficient moves in training."""
        return self.options.use_adaptive_entropy

    @property
    def in_force(self) -> float:
        """The coefficient of this step's loss."""
        return 0.0 if self.adapts and self.measured > self.options.entropy_target else self.coef

    def after(self, entropy: float) -> EntropyControl:
        """The control of the next step, given the mean entropy of this one; unchanged if it does not adapt."""
        if not self.adapts:
            return self
        options = self.options
        delta = options.entropy_coef_delta if entropy <= options.entropy_target else -options.entropy_coef_delta
        moved = min(max(self.coef + delta, options.entropy_coef_min), options.entropy_coef_max)
        return replace(self, coef=moved, measured=entropy)

    def state_dict(self) -> dict[str, float]:
        """Coefficient and entropy, for a checkpoint; empty if the coefficient does not move."""
        return {"coef": self.coef, "measured": self.measured} if self.adapts else {}

    def restored(self, state: Mapping[str, float]) -> EntropyControl:
        """The control whose :meth:`state_dict` is ``state``; unchanged if that is empty or nothing moves."""
        return replace(self, coef=state["coef"], measured=state["measured"]) if self.adapts and state else self


class ShapingControl:
    """The shapings of a run, with the coefficient of the present step.

    Args:
        shaping: of the objective.
    """

    def __init__(self, shaping: tuple[AdvantageShaping, ...]) -> None:
        self.shaping = shaping

    @property
    def moves(self) -> bool:
        """True if a coefficient moves in training."""
        return any(one.moves for one in self.shaping)

    def end_step(self, step: StepSums) -> None:
        """Move the coefficient by what an optimizer step measured; a step without tokens moves nothing."""
        if step.tokens > 0:
            measured = step.discrepancy / step.tokens
            self.shaping = tuple(one.updated(measured) if one.moves else one for one in self.shaping)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient that moves, for a checkpoint; empty if none does."""
        moving = next((one for one in self.shaping if one.moves), None)
        return {} if moving is None else {"coef": cast("Any", moving).coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the coefficient of a checkpoint; unchanged if it has none."""
        if "coef" in state:
            moved = (replace(cast("Any", one), coef=state["coef"]) if one.moves else one for one in self.shaping)
            self.shaping = tuple(moved)


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
