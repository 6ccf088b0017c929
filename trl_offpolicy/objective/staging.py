"""The decisions that need the whole generation batch, made once before a trainer shuffles and splits it.

``stage(objective, advantages)`` splits a correction in two. :meth:`Stages.decide` makes the advantages, runs the early
part and returns tensors that travel with the rows. The loss step puts them into its PolicyBatch as ``advantages``,
``decided_weights`` and ``decided_keep``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.functional.collective import sum_ranks
from trl_offpolicy.objective.advantages import GDPO, GRPO, AdvantageEstimator, AdvantageInputs
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import WIDE_SCOPES, CorrectionOutput, PolicyBatch


@dataclass(frozen=True)
class Decided:
    """What the early part decided about a generation batch.

    Args:
        rows: the (B,) or (B, T) ``advantages`` if an estimator makes them. With an early correction also
            ``decided_weights`` (B, T), or (B, 1) if constant over the response, and ``decided_keep`` (B, T).
        kept_tokens: 0-d, kept trainable tokens of all ranks; None without an early correction.
        kept_sequences: 0-d, responses of all ranks with a kept token; None without an early correction.
        stats: diagnostics of the early part, once per generation batch.
    """

    rows: dict[str, Tensor]
    kept_tokens: Tensor | None = None
    kept_sequences: Tensor | None = None
    stats: Stats = field(default_factory=lambda: Stats({}))


@dataclass(frozen=True)
class Stages:
    """The early and the late part of an objective, and the estimator of the advantages.

    Args:
        early: decided on the generation batch; None if the whole correction belongs to the loss step.
        late: the objective of the loss step.
        advantages: None = the trainer's own.
    """

    early: Correction | None
    late: Objective
    advantages: AdvantageEstimator | None = None

    @property
    def needs_old(self) -> bool:
        """True if the old policy must be scored on the generation batch, which costs one forward."""
        if self.early is not None or (self.kl_in_reward is not None and not self._old_is_sampler):
            return True
        return self.advantages is not None and "per_token_logps" in self.advantages.requires

    @property
    def kl_in_reward(self) -> KLPenalty | None:
        """The KL penalty that is taken from the rewards before the advantages are made; None = there is none."""
        kl = self.late.kl
        return kl if kl is not None and kl.in_reward else None

    @property
    def _old_is_sampler(self) -> bool:
        """True if the loss has no pi_old of its own: mu takes its place, as in verl."""
        return self.late.mode == "bypass"

    @property
    def reads_correction(self) -> bool:
        """True if the estimator reads what the early part decided, so that both need the same rows."""
        if self.advantages is None:
            return False
        return "weights" in self.advantages.requires or (self.early is not None and self.early.baseline == "kept")

    @property
    def needs_sum_sq_probs(self) -> bool:
        """True if that forward must also return the sums of squared probabilities."""
        return self.advantages is not None and "sum_sq_probs" in self.advantages.requires

    def with_correction(self, correction: Correction) -> Stages:
        """The stages with another correction in the loss step.

        Raises:
            ValueError: part of the correction is decided on the generation batch.
        """
        if self.early is not None:
            raise ValueError(f"correction must be of row scope to be replaced in training, but got {self.early!r}.")
        return replace(self, late=replace(self.late, correction=correction))

    def estimate(self, inputs: AdvantageInputs) -> Decided:
        """The advantages alone, for an estimator that reads no old log-probs. Called by all ranks."""
        assert self.advantages is not None
        return Decided({"advantages": self.advantages(inputs)})

    def decide(self, batch: PolicyBatch, inputs: AdvantageInputs | None = None) -> Decided:
        """Make the advantages and run the early part. Called by all ranks, each with its rows.

        Args:
            batch: the generation batch at the weights that sampled it, with ``ref_per_token_logps`` if the KL is in the
                reward.
            inputs: rewards (several functions, their weights) and groups; None = those of ``batch``.

        Raises:
            ValueError: advantages are needed, but the batch lacks rewards, group_ids, ref_per_token_logps or, in mode
                bypass, sampling_per_token_logps.
        """
        estimator = self.advantages
        inputs = None if estimator is None else self._less_kl(_inputs_of(batch, inputs), batch)
        if estimator is None or inputs is None:
            return self._early(batch, {}) if self.early is not None else Decided({})
        if self.early is None:
            return self.estimate(inputs)
        if not self.reads_correction:
            advantages = estimator(inputs)
            return self._early(replace(batch, advantages=advantages), {"advantages": advantages})
        # The estimator reads the weights of the correction, so the correction comes first. None of its terms reads the
        # advantages: ``stage`` has checked that.
        out = self.early(batch)
        counted = out.keep_mask.any(-1) if self.early.baseline == "kept" else None
        inputs = replace(inputs, weights=_weights(out), counted=counted)
        return self._early(batch, {"advantages": estimator(inputs)}, out)

    def _less_kl(self, inputs: AdvantageInputs, batch: PolicyBatch) -> AdvantageInputs:
        """The inputs with the KL of each token taken from its reward, if it belongs there."""
        if self.kl_in_reward is None:
            return inputs
        if batch.ref_per_token_logps is None:
            raise ValueError("ref_per_token_logps must be given for a KL penalty in the reward, but got None.")
        logps, mask = batch.logps("old"), batch.mask
        if self._old_is_sampler:  # a token without log mu costs nothing
            logps = batch.logps("sampling")
            mask = mask & (logps.abs() < torch.inf)
        rewards = self.kl_in_reward.token_rewards(logps, batch.ref_per_token_logps, mask)
        if inputs.token_rewards is not None:
            rewards = rewards + inputs.token_rewards.float()
        return replace(inputs, token_rewards=rewards)

    def _early(self, batch: PolicyBatch, rows: dict[str, Tensor], out: CorrectionOutput | None = None) -> Decided:
        assert self.early is not None
        out = self.early(batch) if out is None else out
        kept = sum_ranks(torch.stack([out.keep_mask.sum(), out.keep_mask.any(-1).sum()]))
        groups = dict(out.stats.groups)
        if self._drops_later:  # then only the loss steps can count everything that is dropped
            groups.pop("keep", None)
        decided = {"decided_weights": _weights(out), "decided_keep": out.keep_mask}
        return Decided({**rows, **decided}, kept[0], kept[1], Stats(groups))

    @property
    def _drops_later(self) -> bool:
        late = self.late.correction
        return late is not None and bool(late.keep)


def stage(
    objective: Objective, advantages: AdvantageEstimator | None = None, *, token_rewards: bool = False
) -> Stages | None:
    """What must be done on the whole generation batch; None if micro-batches are enough.

    Args:
        objective: the loss.
        advantages: the estimator; None = the trainer's own, or GRPO's with ``baseline="kept"``, the KL in the reward or
            ``token_rewards``.
        token_rewards: whether the advantages get rewards by token besides those of the reward functions.

    Raises:
        ValueError: the parts cannot be separated without changing what they do, or the advantages read weights that
            do not exist before the loss step.
        NotImplementedError: the KL is in the reward of GDPO; or there are rewards by token, and GDPO or a part
            that reads the rewards themselves would leave them out.
    """
    correction = objective.correction or Correction()
    wide = objective.scope in WIDE_SCOPES
    reads_weights = advantages is not None and "weights" in advantages.requires
    in_reward = objective.kl is not None and objective.kl.in_reward
    if in_reward and isinstance(advantages, GDPO):
        raise NotImplementedError(
            "kl.place must be 'loss' with the advantages of GDPO, which scale each reward function by itself, but got "
            "'reward': the KL of a token belongs to none of them."
        )
    if token_rewards:
        _check_token_rewards(objective, advantages)
    if (in_reward or token_rewards) and advantages is None:
        advantages = GRPO()
    if not (wide or reads_weights):
        return None if advantages is None else Stages(None, objective, advantages)
    early, late = correction.split()
    if objective.denominator == "kept" and late.keep:
        raise ValueError(
            f"denominator must be 'all' with {late.keep[0].name}, which reads the current policy: what a whole "
            "optimizer step keeps is not known at its first micro-batch."
        )
    if reads_weights:
        _check_weights(early, type(advantages).__name__)
    if correction.baseline == "kept" and advantages is None:
        advantages = GRPO()
    return Stages(early, replace(objective, correction=late), advantages)


def _check_token_rewards(objective: Objective, advantages: AdvantageEstimator | None) -> None:
    if isinstance(advantages, GDPO):
        raise NotImplementedError(
            "token_rewards must be false with the advantages of GDPO, which scale each reward function by itself, but "
            "got true: the reward of a token belongs to none of them."
        )
    reads: list[tuple[Any, Sequence[str]]] = [(objective.policy_loss, objective.policy_loss.reads)]
    reads += [(part, part.reads) for part in objective.shaping]
    if objective.correction is not None:
        reads += [(term, term.requires) for term in objective.correction.keep]
    for part, fields in reads:
        if read := [name for name in fields if name in ("rewards", "group_rewards")]:
            raise NotImplementedError(
                f"token_rewards must be false with {type(part).__name__}, but got true: it reads {' and '.join(read)}, "
                "which hold no rewards by token; these are in the advantages alone."
            )


def _check_weights(early: Correction, estimator: str) -> None:
    if not early.weights:
        raise ValueError(
            f"correction.weight must be a weight on 'old/sampling' with the advantages of {estimator}, which read it "
            "before the loss step, but there is none."
        )
    if by_sign := [term.name for term in early.keep if term.reads_advantages]:
        raise ValueError(
            f"correction.keep must not name {by_sign[0]}, which decides by the sign of the advantage, with the "
            f"advantages of {estimator}, which read the correction's weights: each would have to come first."
        )


def _weights(out: CorrectionOutput) -> Tensor:
    return out.weights if out.sequence_weights is None else out.sequence_weights


def _inputs_of(batch: PolicyBatch, inputs: AdvantageInputs | None) -> AdvantageInputs:
    """The inputs of the estimator: the rewards at hand, and the tokens of the batch."""
    if inputs is None and (batch.rewards is None or batch.group_ids is None):
        raise ValueError("rewards and group_ids must be given for advantages and baseline='kept', but got None.")
    if inputs is None:
        assert batch.rewards is not None and batch.group_ids is not None
        inputs = AdvantageInputs(rewards=batch.rewards, group_ids=batch.group_ids)
    return replace(inputs, mask=batch.mask, per_token_logps=batch.logps("old"), sum_sq_probs=batch.sum_sq_probs)
