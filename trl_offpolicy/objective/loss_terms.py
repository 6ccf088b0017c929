"""The parts of an objective's loss, as functions of a batch: ratios, the policy term, the KL term."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.functional.kl import reference_log_ratio
from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.log_ratios import log_ratio, ratio_of
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import LossInputs, PolicyLoss
from trl_offpolicy.types import CorrectionOutput, PolicyBatch

NONFINITE_CURRENT = (
    "per_token_logps must be finite on trainable tokens, but got NaN or infinity: the model itself returned it. "
    "Masking cannot help (0 * NaN stays NaN in the model's backward). Look for a diverged learning rate, an fp16 "
    "overflow or broken weights."
)


def no_correction(batch: PolicyBatch) -> CorrectionOutput:
    """Weight 1, nothing dropped; the mismatch is still measured where the batch has sampling log-probs."""
    return Correction()(batch)


def check_current(batch: PolicyBatch) -> None:
    """On the CPU, raise unless the current policy is finite on trainable tokens.

    Raises:
        ValueError: it is not.
    """
    if batch.per_token_logps.device.type == "cpu":
        finite = batch.per_token_logps.detach().abs() < torch.inf
        if not bool((finite | ~batch.mask).all()):
            raise ValueError(NONFINITE_CURRENT)


def policy_log_ratio(logps: Tensor, centre: Tensor | None, mask: Tensor) -> Tensor:
    """log(pi / centre) with gradient; exactly 0 in value on padding and where the centre is not finite."""
    here = logps.detach()
    reference = here if centre is None else centre.detach().float()
    usable = mask & (reference.abs() < torch.inf)
    return torch.where(mask, logps, 0.0) - torch.where(mask, torch.where(usable, reference, here), 0.0)


def centre_shift(batch: PolicyBatch, level: str) -> Tensor | None:
    """log(proximal / old) at the level of the loss's ratio, (B, T) or (B, 1); None where the batch lacks one of them.

    What a loss on current/proximal leaves out of current/old. Without old log-probs the weights hold it already:
    their numerator is the proximal policy.
    """
    if batch.proximal_per_token_logps is None or batch.old_per_token_logps is None:
        return None
    shift = log_ratio(batch.logps("proximal"), batch.logps("old"), batch.mask).values
    return shift if level == "token" else aggregate(shift, batch.mask, level)  # type: ignore[arg-type]


def shifted(corrected: CorrectionOutput, shift: Tensor) -> CorrectionOutput:
    """The weights times proximal/old, which belongs to the loss; the diagnostics stay those of the correction."""
    return replace(corrected, weights=corrected.weights * ratio_of(shift), sequence_weights=None)


def policy_mask(batch: PolicyBatch) -> Tensor:
    """(B, T) bool: tokens that take part in the policy term."""
    return batch.mask if batch.policy_mask is None else batch.mask & (batch.policy_mask != 0)


def policy_term(loss: PolicyLoss, per_token: Tensor, batch: PolicyBatch, corrected: CorrectionOutput) -> Tensor:
    """(B, T): weighted, zero on padding, on dropped tokens and outside ``policy_mask``."""
    weighted = per_token * corrected.weights if loss.weight_use == "multiply" else per_token
    return torch.where(corrected.keep_mask & policy_mask(batch), weighted, 0.0)


def kl_term(kl: KLPenalty, loss: PolicyLoss, batch: PolicyBatch, inputs: LossInputs, shift: Tensor | None) -> Tensor:
    """(B, T) estimate of KL(pi || ref), nats, with gradient; 0 where the reference is not finite."""
    if batch.ref_per_token_logps is None:
        raise ValueError("ref_per_token_logps must be given when kl is set, but got None.")
    log_ratios = reference_log_ratio(inputs.logps, batch.ref_per_token_logps, batch.mask)
    ratio = inputs.log_ratios if loss.level == "token" else aggregate(inputs.log_ratios, inputs.mask, loss.level)
    return kl(log_ratios, ratio if shift is None else ratio + shift)
