"""Objective: policy loss x correction + KL + drift - entropy bonus, as one number. The only place of the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_bool, check_choice, check_number, check_whole
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms.base import is_late
from trl_offpolicy.functional.aggregation import AGGREGATIONS, Aggregation, aggregate_loss
from trl_offpolicy.functional.kl import reference_log_ratio
from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.log_ratios import LOG_RATIO_LIMIT, log_ratio, ratio_of
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import LossInputs, PolicyLoss, PPOClip
from trl_offpolicy.objective.measure import (
    LossParts,
    discrepancy_stats,
    estimator_stats,
    gradient_stats,
    loss_stats,
    rollout_stats,
    without_advantage,
)
from trl_offpolicy.objective.proximal import Average, AveragedProximal, Proximal, RecomputedProximal
from trl_offpolicy.objective.shaping import AdvantageShaping
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import (
    SCOPES,
    WIDE_SCOPES,
    CorrectionOutput,
    ObjectiveOutput,
    PolicyBatch,
    Reduction,
    Scope,
)

if TYPE_CHECKING:
    from trl_offpolicy.objective.coefficients import StepSums

KLOn = Literal["all", "kept"]
Denominator = Literal["all", "kept"]
EntropyAggregation = Literal["token_mean", "loss"]
Mode = Literal["decoupled", "bypass"]
_CHOICES = {
    "kl_on": get_args(KLOn),
    "denominator": get_args(Denominator),
    "entropy_aggregation": get_args(EntropyAggregation),
    "mode": get_args(Mode),
    "aggregation": AGGREGATIONS,
}

NONFINITE_CURRENT = (
    "per_token_logps must be finite on trainable tokens, but got NaN or infinity: the model itself returned it. "
    "Masking cannot help (0 * NaN stays NaN in the model's backward). Look for a diverged learning rate, an fp16 "
    "overflow or broken weights."
)
"""The error that the trainers raise once per optimizer step, and the objective itself on a CPU."""
NONFINITE_ADVANTAGES = (
    "advantages must be finite on trainable tokens, but got NaN or infinity: the loss would be NaN and the next step "
    "would end the model. Look for a reward that is not finite (the estimators of trl_offpolicy.advantages give such a "
    "response 0), or mask the response."
)
"""The same for the advantages."""
NO_SAMPLING = (
    "sampling_per_token_logps must be finite on some trainable token of an optimizer step, but all of them are NaN or "
    "infinite: the engine (or the rollout function) returned no log-probs, and every weight would be 1. Let it return "
    "those of the sampled tokens, or choose a method that does not read them (offpolicy: measure)."
)
"""The error that the trainers raise after a whole optimizer step without a correction's input."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of both trainers.

    Args:
        policy_loss: a loss of :mod:`trl_offpolicy.losses`.
        correction: importance weights and rejection, or None.
        kl: penalty against ``ref_per_token_logps``, in the loss or in the reward, or None.
        kl_on: "all": rejected tokens keep their KL term (TRL); "kept": they lose it too (verl).
        kl_weighted: multiply the KL term by the importance weights.
        entropy_coef: coefficient of the entropy bonus; a negative one makes it a penalty.
        entropy_aggregation: "token_mean": the mean over the tokens of the policy term (TRL). "loss": the entropy is
            reduced as the loss is, over the tokens that have a KL term (``kl_on``; verl).
        drift_coef: tau of tau log(pi / mu)^2, which draws pi back to the policy that sampled (prime-rl: 1e-3). On every
            trainable token with a log-prob of mu, also where the correction drops the policy term; no weight
            multiplies it. log pi carries its gradient, 2 tau log(pi / mu). nats squared, reduced as the loss.
        aggregation: see :func:`~trl_offpolicy.functional.aggregation.aggregate_loss`.
        max_length: L of ``aggregation="seq_mean_token_sum_norm"``; None = that of the ``Reduction`` (the trainers set
            the longest completion that they allow), else T of the batch.
        denominator: "all": dropped tokens stay in every denominator; "kept": they leave it, and so does a response
            that was dropped as a whole.
        mode: "decoupled": there are three policies. The loss's ratio is pi / pi_old (or pi / proximal), and weights
            hold old/sampling. "bypass": there are two policies. The loss's ratio is pi / mu and contains the whole
            shift already; terms then read current/sampling.
        proximal: centre of the trust region, see :mod:`trl_offpolicy.proximal`. "Recomputed" (default): pi_old, or
            the batch's ``proximal_per_token_logps``. Around another centre the policy term is proximal/old times
            the loss on current/proximal (decoupled PPO); without old log-probs the weights hold proximal/sampling.
        shaping: changes of the advantages by token, made one after the other before correction and loss see them; see
            :mod:`trl_offpolicy.objective.shaping`.

    Raises:
        ValueError: an unknown option, or a factor of pi / mu that would be counted twice.

    Example:
        >>> import trl_offpolicy as op
        >>> logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> batch = op.PolicyBatch(per_token_logps=logps, completion_mask=torch.ones(1, 2).bool(),
        ...                        advantages=torch.ones(1))
        >>> op.Objective(policy_loss=op.losses.PPOClip())(batch).loss
        tensor(-1., grad_fn=<DivBackward0>)
    """

    policy_loss: PolicyLoss = field(default_factory=PPOClip)
    correction: Correction | None = None
    kl: KLPenalty | None = None
    kl_on: KLOn = "all"
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    entropy_aggregation: EntropyAggregation = "token_mean"
    drift_coef: float = 0.0
    aggregation: Aggregation = "token_mean"
    max_length: int | None = None
    denominator: Denominator = "all"
    mode: Mode = "decoupled"
    proximal: Proximal = field(default_factory=RecomputedProximal)
    shaping: tuple[AdvantageShaping, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        check_bool(kl_weighted=self.kl_weighted)
        check_number("entropy_coef", self.entropy_coef)
        check_number("drift_coef", self.drift_coef)
        if self.drift_coef < 0:
            raise ValueError(f"drift_coef must be at least 0 (0 switches the term off), but got {self.drift_coef}.")
        if self.kl is not None and not isinstance(self.kl, KLPenalty):
            raise TypeError(f"kl must be a KLPenalty or None, but got {self.kl!r}.")
        if self.correction is not None and not isinstance(self.correction, Correction):
            raise TypeError(f"correction must be a Correction or None, but got {self.correction!r}.")
        if not isinstance(self.policy_loss, PolicyLoss):
            raise TypeError(
                "policy_loss must be a loss of trl_offpolicy.objective.losses or derive from its PolicyLoss, "
                f"but got {self.policy_loss!r}."
            )
        self._check_length()
        kl_in_loss = self.kl is not None and not self.kl.in_reward
        if kl_in_loss and self.kl_on == "all" and self.denominator == "kept":
            raise ValueError(
                "kl_on must be 'kept' with denominator='kept' (dropped tokens leave the sum and the denominator, their "
                "KL term with them), but got 'all'."
            )
        if self.drift_coef and self.denominator == "kept":
            raise ValueError(
                "drift_coef must be 0 with denominator='kept' (dropped tokens leave the sum and the denominator, and "
                f"the term is on them too), but got {self.drift_coef}."
            )
        if self.kl_weighted and not kl_in_loss:
            raise ValueError("kl_weighted must be False without a KL term in the loss, but got True.")
        published = self.policy_loss.aggregation
        if self.policy_loss.fixed_aggregation and published != self.aggregation:
            name = type(self.policy_loss).__name__
            raise ValueError(f"aggregation must be {published!r} with {name}, but got {self.aggregation!r}.")
        self._check_centre()
        self._check_counted_once()
        self._check_shaping()

    def _check_shaping(self) -> None:
        """Raise unless all shapings are such, one at most adapts, and no term decides by the advantages before them."""
        if not isinstance(self.shaping, tuple) or not all(isinstance(one, AdvantageShaping) for one in self.shaping):
            raise TypeError(f"shaping must be a tuple of advantage shapings, but got {self.shaping!r}.")
        adapting = [type(one).__name__ for one in self.shaping if one.adapts]
        if len(adapting) > 1:
            raise ValueError(f"shaping must hold at most one that measures and adapts, but got {adapting}.")
        is_wide = self.correction is not None and self.correction.scope in WIDE_SCOPES
        early = self.correction.keep if self.correction is not None and is_wide else ()
        by_sign = [term.name for term in early if term.reads_advantages and not is_late(term)]
        if self.shaping and by_sign:
            raise ValueError(
                f"shaping must be empty with {by_sign[0]}, which decides by the sign of the advantage before the batch "
                f"is split, when no advantage is shaped yet, but got {self.shaping!r}."
            )

    def _check_length(self) -> None:
        if self.max_length is None:
            return
        check_whole("max_length", self.max_length, least=1)
        if self.aggregation != "seq_mean_token_sum_norm":
            raise ValueError(
                f"max_length must be None unless aggregation is 'seq_mean_token_sum_norm', but got {self.max_length} "
                f"with {self.aggregation!r}."
            )

    def _check_centre(self) -> None:
        """Raise if the loss has no ratio against a centre other than pi_old, or weights cannot take up the rest."""
        if not isinstance(self.proximal, Proximal):
            raise TypeError(f"proximal must be one of trl_offpolicy.proximal, but got {self.proximal!r}.")
        if isinstance(self.proximal, RecomputedProximal):
            return
        name = type(self.policy_loss).__name__
        if self.mode == "bypass" or self._loss_reads_sampling or not self.policy_loss.uses_ratio:
            raise ValueError(
                f"proximal must be RecomputedProximal() in {self.mode} mode with {name}, which takes no ratio against "
                f"it, but got {self.proximal!r}."
            )
        if self.policy_loss.weight_use == "inside":
            raise ValueError(
                f"proximal must be RecomputedProximal() with {name}, which reads one weight for a response and not "
                f"proximal/old by token, but got {self.proximal!r}."
            )

    def _check_counted_once(self) -> None:
        """Raise if a factor of pi / mu = (pi / pi_old)(pi_old / mu) is both in the loss and in a weight."""
        if self.mode == "bypass" and "mismatch_log_ratios" in self.policy_loss.reads:
            raise ValueError(
                f"mode must be 'decoupled' with {type(self.policy_loss).__name__}, which reads pi_old / mu beside its "
                "own ratio, but got 'bypass', whose ratio contains it."
            )
        whole = self.mode == "bypass" or self._loss_reads_sampling
        held = "current/sampling" if whole else "current/old"
        name = type(self.policy_loss).__name__
        for weight in () if self.correction is None else self.correction.weights:
            if self.policy_loss.weight_use == "inside" and weight.level in ("turn", "turn_mean", "prefix"):
                raise ValueError(
                    "correction.weight must be at level 'token', 'sequence' or 'sequence_mean' with "
                    f"{name}, which takes one weight for a response from those of its tokens, but got {weight.level!r}."
                )
            if self.policy_loss.uses_ratio and (whole or weight.ratio != "old/sampling"):
                raise ValueError(
                    f"correction.weight must not hold {weight.ratio!r} in {self.mode} mode with {name}, whose own "
                    f"ratio is {held!r}: it would be counted twice. Use losses.GPG(), or leave the weight out."
                )

    def check_step(self, step: StepSums) -> None:
        """Raise unless what an optimizer step measured can be learned from; both trainers call it once per step.

        Raises:
            ValueError: log-probs or advantages of trainable tokens are not finite, or the step lacks the engine's
                log-probs that the objective reads.
        """
        if step.nonfinite > 0:
            raise ValueError(NONFINITE_CURRENT)
        if step.no_advantage > 0:
            raise ValueError(NONFINITE_ADVANTAGES)
        if self.needs_sampling and step.tokens > 0 and step.sampled == 0:
            raise ValueError(NO_SAMPLING)

    @property
    def needs_sampling(self) -> bool:
        """True if the loss, the correction, a shaping or the drift term reads the sampling policy."""
        by_correction = self.correction is not None and self.correction.needs_sampling
        by_ratio = self.mode == "bypass" and self.policy_loss.uses_ratio
        by_loss = self._loss_reads_sampling or "mismatch_log_ratios" in self.policy_loss.reads
        by_shaping = any(one.needs_sampling for one in self.shaping)
        return by_correction or by_ratio or by_shaping or by_loss or self.drift_coef > 0

    @property
    def _loss_reads_sampling(self) -> bool:
        return "sampling_log_ratios" in self.policy_loss.reads

    @property
    def _drops(self) -> bool:
        """True if the correction can drop anything."""
        return self.correction is not None and (bool(self.correction.keep) or self.correction.nonfinite == "drop")

    @property
    def scope(self) -> Scope:
        """The widest scope of its parts."""
        scopes: list[Scope] = ["row" if self.correction is None else self.correction.scope, self.policy_loss.scope]
        if self.denominator == "kept" and self._drops:
            scopes.append("generation_batch")
        return max(scopes, key=SCOPES.index)

    def __call__(self, batch: PolicyBatch, reduction: Reduction | None = None) -> ObjectiveOutput:
        """Loss of a (micro-)batch.

        Raises:
            ValueError: a field that the objective reads is absent; or, for tensors on the CPU,
                ``per_token_logps`` or ``advantages`` are not finite on a trainable token. On an accelerator they are
                only counted (the former in ``loss/nonfinite_current``), so as not to wait for the device; the trainers
                raise once per step.
        """
        if not isinstance(batch, PolicyBatch):
            raise TypeError(f"batch must be a PolicyBatch, but got {type(batch).__name__}.")
        if reduction is not None and not isinstance(reduction, Reduction):
            raise TypeError(f"reduction must be a Reduction or None, but got {type(reduction).__name__}.")
        reduction = reduction or Reduction()
        _check_current(batch)
        batch, average = self._centred(batch)
        batch, shaped = self._shaped(batch)
        shift = self._shift(batch)
        # Without a correction: weight 1, nothing dropped, and the mismatch is still measured where it can be.
        corrected = (self.correction or Correction())(batch)
        used = corrected
        if shift is not None:  # proximal/old belongs to the loss; the correction's diagnostics do not contain it
            used = replace(corrected, weights=corrected.weights * ratio_of(shift), sequence_weights=None)
        inputs = self._inputs(batch, used)
        terms = self.policy_loss(inputs)
        per_token = policy = self._policy_term(terms.loss, batch, used)
        kl, beta = None, 0.0
        if self.kl is not None:
            kl, beta = self._kl_term(self.kl, batch, inputs, shift), self.kl.beta
            if not self.kl.in_reward:  # else it is only measured here: the advantages hold it
                per_token = policy + beta * self._masked_kl(kl, corrected)
        if self.drift_coef:
            drift = _policy_log_ratio(inputs.logps, batch.logps("sampling"), batch.mask)
            per_token = per_token + self.drift_coef * drift.square()
        loss = self._reduce(per_token, batch.mask, corrected.keep_mask, reduction)
        bonus = self._entropy_bonus(batch, corrected.keep_mask, reduction)
        if bonus is not None:
            loss = loss - self.entropy_coef * bonus
        parts = LossParts(terms, policy, kl, beta, corrected.keep_mask)
        return ObjectiveOutput(
            loss=loss,
            per_token_loss=per_token,
            weights=corrected.weights,
            keep_mask=corrected.keep_mask,
            stats=self._stats(batch, corrected, parts).union(shaped),
            average=average,
        )

    def policy_loss_value(self, batch: PolicyBatch, result: ObjectiveOutput, reduction: Reduction) -> Tensor:
        """TRL's ``policy_loss``, 0-d: the loss of a micro-batch without entropy bonus and accumulation scaling.

        Args:
            batch: the micro-batch.
            result: what this objective returned for it.
            reduction: the denominators of that call.

        Returns:
            No gradient. With denominators that span the optimizer step it is this micro-batch's share of the loss.
        """
        whole = replace(reduction, accumulation=1)
        return self._reduce(result.per_token_loss.detach(), batch.mask, result.keep_mask, whole)

    def _shift(self, batch: PolicyBatch) -> Tensor | None:
        """log(proximal / old) at the level of the loss's ratio, (B, T) or (B, 1): the part that current/proximal lacks.

        None if the loss has no such ratio or the batch lacks one of the two. Without old log-probs the weights already
        contain it, because their numerator is the proximal policy.
        """
        loss = self.policy_loss
        if self.mode == "bypass" or self._loss_reads_sampling or not loss.uses_ratio:
            return None
        if batch.proximal_per_token_logps is None or batch.old_per_token_logps is None:
            return None
        if loss.weight_use == "inside":
            raise ValueError(
                f"proximal_per_token_logps must be None beside old_per_token_logps with {type(loss).__name__}, which "
                "reads one weight for a response and not proximal/old by token, but got a tensor."
            )
        shift = log_ratio(batch.logps("proximal"), batch.logps("old"), batch.mask).values
        return shift if loss.level == "token" else aggregate(shift, batch.mask, loss.level)

    def _stats(self, batch: PolicyBatch, corrected: CorrectionOutput, parts: LossParts) -> Stats:
        stats = corrected.stats.union(loss_stats(batch, parts)).union(rollout_stats(batch, corrected.weights))
        stats = stats.union(gradient_stats(batch, corrected.weights, corrected.keep_mask))
        if not self._weighs_the_loss:
            return stats
        read = set() if self.correction is None else {weight.ratio for weight in self.correction.weights}
        # the numerator of the weights, as the table of ratios resolves it
        centred = batch.old_per_token_logps is None and batch.proximal_per_token_logps is not None
        target = "proximal" if centred else "old"
        if any("current" in ratio for ratio in read):
            target = "current"
        return stats.union(estimator_stats(batch, corrected.weights, corrected.keep_mask, target=target))

    @property
    def _weighs_the_loss(self) -> bool:
        """True if the correction alone carries the shift from the sampler, as a factor of the loss."""
        return self.mode == "decoupled" and not self._loss_reads_sampling and self.policy_loss.weight_use == "multiply"

    def _centred(self, batch: PolicyBatch) -> tuple[PolicyBatch, Average | None]:
        """The batch with the proximal log-probs, and the average from which the next step on its rows continues."""
        if isinstance(self.proximal, RecomputedProximal):
            return batch, None
        if batch.proximal_per_token_logps is not None:
            raise ValueError(
                f"proximal_per_token_logps must be None with {self.proximal!r}, which makes them, but got a tensor."
            )
        if isinstance(self.proximal, AveragedProximal):
            average = self.proximal.step(batch, batch.past_average)
            return replace(batch, proximal_per_token_logps=average.logps), average
        return replace(batch, proximal_per_token_logps=self.proximal(batch)), None

    def _shaped(self, batch: PolicyBatch) -> tuple[PolicyBatch, Stats]:
        """The batch with shaped advantages, and what a shaping measured."""
        stats = Stats({})
        for one in self.shaping:
            advantages, measured = one(batch)
            batch = replace(batch, advantages=advantages)
            if measured is not None:
                stats = stats.union(discrepancy_stats(measured, batch.mask, coef=getattr(one, "coef", 0.0)))
        return batch, stats

    def _inputs(self, batch: PolicyBatch, corrected: CorrectionOutput) -> LossInputs:
        logps = torch.where(batch.mask, batch.per_token_logps.float(), 0.0)
        weights = corrected.weights if corrected.sequence_weights is None else corrected.sequence_weights
        sampling_log_ratios = mismatch_log_ratios = entropies = rewards = group_rewards = None
        if self._loss_reads_sampling:
            sampling_log_ratios = _policy_log_ratio(logps, batch.logps("sampling"), batch.mask)
        if "mismatch_log_ratios" in self.policy_loss.reads:
            mismatch_log_ratios = log_ratio(batch.logps("old"), batch.logps("sampling"), batch.mask).values
        if batch.entropies is not None and "entropies" in self.policy_loss.reads:
            entropies = torch.where(batch.mask, batch.entropies.detach().float(), 0.0)
        if batch.rewards is not None:
            rewards = batch.rewards.detach().float().unsqueeze(1)
        if batch.group_rewards is not None:
            group_rewards = batch.group_rewards.detach().float()
        return LossInputs(
            logps=logps,
            log_ratios=_policy_log_ratio(logps, self._centre(batch), batch.mask),
            advantages=batch.token_advantages,
            mask=batch.mask,
            weights=weights,
            sampling_log_ratios=sampling_log_ratios,
            rewards=rewards,
            group_ids=batch.group_ids,
            group_rewards=group_rewards,
            turn_ids=batch.turn_ids,
            entropies=entropies,
            mismatch_log_ratios=mismatch_log_ratios,
        )

    def _centre(self, batch: PolicyBatch) -> Tensor | None:
        """Log-probs of the policy that the loss's ratio is taken against; None = the current one."""
        if self.mode == "bypass" and self.policy_loss.uses_ratio:
            return batch.logps("sampling")
        centre = batch.proximal_per_token_logps
        return batch.old_per_token_logps if centre is None else centre

    def _policy_term(self, per_token: Tensor, batch: PolicyBatch, corrected: CorrectionOutput) -> Tensor:
        """(B, T): weighted, zero on padding, on dropped tokens and outside ``policy_mask``."""
        weighted = per_token * corrected.weights if self.policy_loss.weight_use == "multiply" else per_token
        return torch.where(corrected.keep_mask & batch.acting_mask, weighted, 0.0)

    def _kl_term(self, kl: KLPenalty, batch: PolicyBatch, inputs: LossInputs, shift: Tensor | None) -> Tensor:
        """(B, T) estimate of KL(pi || ref), nats, with gradient; 0 where the reference is not finite."""
        if batch.ref_per_token_logps is None:
            raise ValueError("ref_per_token_logps must be given when kl is set, but got None.")
        log_ratios = reference_log_ratio(inputs.logps, batch.ref_per_token_logps, batch.mask)
        # The importance ratio of the estimate is that of the loss, at its level, times the part that the loss lacks.
        ratio, level = inputs.log_ratios, self.policy_loss.level
        if level != "token":
            ratio = aggregate(ratio, inputs.mask, level)
        return kl(log_ratios, ratio if shift is None else ratio + shift)

    def _masked_kl(self, kl: Tensor, corrected: CorrectionOutput) -> Tensor:
        kl = kl * corrected.weights if self.kl_weighted else kl
        return torch.where(corrected.keep_mask, kl, 0.0) if self.kl_on == "kept" else kl

    def _reduce(self, per_token: Tensor, mask: Tensor, keep_mask: Tensor, reduction: Reduction) -> Tensor:
        """Scale so that gradients summed over micro-batches and averaged over ranks are those of one batch."""
        mask = mask if self.denominator == "all" else keep_mask
        if self.aggregation == "token_sum":  # it has no denominator that could undo the mean over ranks
            return aggregate_loss(per_token, mask, self.aggregation) * reduction.world_size
        by_token = self.aggregation == "token_mean"
        total = reduction.tokens if by_token else reduction.sequences
        share = None if total is None else total / reduction.world_size
        tokens, sequences = (share, None) if by_token else (None, share)
        if total is None and not by_token and self.denominator == "kept" and self._drops:
            sequences = mask.any(-1).sum()  # as the trainers count: a response that was dropped as a whole leaves too
        longest = reduction.max_length if self.max_length is None else self.max_length
        loss = aggregate_loss(per_token, mask, self.aggregation, tokens=tokens, sequences=sequences, max_length=longest)
        return loss if total is not None else loss / reduction.accumulation

    def _entropy_bonus(self, batch: PolicyBatch, keep_mask: Tensor, reduction: Reduction) -> Tensor | None:
        """The entropy of this micro-batch, reduced; carries gradient."""
        if self.entropy_coef == 0.0:
            return None
        if batch.entropies is None:
            raise ValueError(f"entropies must be given when entropy_coef is {self.entropy_coef}, but got None.")
        entropies = batch.entropies.float()
        if self.entropy_aggregation == "token_mean":
            return aggregate_loss(entropies, batch.acting_mask, "token_mean") / reduction.accumulation
        counted = keep_mask if self.kl_on == "kept" else batch.mask
        return self._reduce(torch.where(counted, entropies, 0.0), batch.mask, keep_mask, reduction)


def _check_current(batch: PolicyBatch) -> None:
    """On the CPU, raise unless the current policy and the advantages are finite on trainable tokens.

    Raises:
        ValueError: one of them is not.
    """
    if batch.per_token_logps.device.type != "cpu":
        return
    for wrong, message in (
        (batch.mask & ~(batch.per_token_logps.detach().abs() < torch.inf), NONFINITE_CURRENT),
        (without_advantage(batch), NONFINITE_ADVANTAGES),
    ):
        if bool(wrong.any()):
            raise ValueError(message)


def _policy_log_ratio(logps: Tensor, centre: Tensor | None, mask: Tensor) -> Tensor:
    """log(pi / centre) with gradient; exactly 0 in value on padding and where the centre is not finite.

    The centre is held within +-10000 nats, as :func:`~trl_offpolicy.functional.log_ratios.log_ratio` holds its ratios.
    """
    here = logps.detach()
    reference = here if centre is None else centre.detach().float()
    usable = mask & (reference.abs() < torch.inf)
    held = reference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(mask, logps, 0.0) - torch.where(mask, torch.where(usable, held, here), 0.0)
