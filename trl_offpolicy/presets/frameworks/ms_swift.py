"""ms-swift's rollout importance sampling as a preset."""

from __future__ import annotations

from dataclasses import dataclass

from trl_offpolicy.checks import check_number
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, OffPolicySequenceMask, RawWeight, Weight
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import check_choice, read_options, warn_no_effect
from trl_offpolicy.presets.frameworks.trl import AGGREGATION
from trl_offpolicy.presets.preset import Preset, make_preset

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
"""Those that differ by their denominator alone, which is that of TRL's loss of the name."""


@dataclass(frozen=True, kw_only=True)
class MSSwiftOptions:
    """The arguments of ``swift rlhf --rlhf_type grpo`` that concern the correction."""

    rollout_importance_sampling_mode: str | None = None
    rollout_importance_sampling_threshold: float = 2.0
    off_policy_sequence_mask_delta: float | None = None
    beta: float | None = 0.04
    loss_type: str | None = "grpo"


def from_ms_swift(**arguments: object) -> Preset:
    """A preset from ms-swift's arguments; an argument that is left out has ms-swift's default.

    - rollout_importance_sampling_mode: "token_truncate" caps the token weight; "token_mask" has weight 0 above the
      threshold; "sequence_truncate" caps the geometric mean of the response; "sequence_mask" drops responses whose
      geometric mean is above it, with raw token weights on the others. None = no correction.
    - rollout_importance_sampling_threshold: the cap. There is no lower bound.
    - off_policy_sequence_mask_delta: off-policy sequence masking on pi / mu.
    - beta: coefficient of the KL term (k3, at most 10 nats), which the weight multiplies too; None = 0.04. With the
      estimators rloo and reinforce_plus_plus ms-swift's default has the KL in the reward: give beta 0.0 then, and
      ``objective.kl`` with ``place: reward``.
    - loss_type: the denominator: "grpo" (default) a mean by response, "bnpo" and "dapo" one over tokens, "dr_grpo" over
      a constant length. None = that of the trainer, as for any other loss.

    "Sequence" is the geometric mean in ms-swift, the product in TRL. A dropped response loses its KL term and stays in
    the denominator (not those of off_policy_sequence_mask_delta with loss_type bnpo, which leave it there). ms-swift
    holds the log-ratio of each token within +-20 nats before the geometric mean; here the mean itself is held.
    Non-finite log-ratios are neutral here; in ms-swift +inf is the cap, weight 0 or a dropped response, and NaN stays.

    Raises:
        UnknownOptionError: an argument that ms-swift does not have.
        ValueError: an unknown mode or loss, or a threshold that is no positive number.

    Example:
        >>> from_ms_swift(rollout_importance_sampling_mode="sequence_mask").formula
        'w = rho_t; keep if rho_geo <= 2'

    Reference: ms-swift 3602360a5, ``swift/rlhf_trainers/grpo_trainer.py``, ``_apply_rollout_importance_sampling``.
    """
    options = read_options(MSSwiftOptions, arguments, framework="ms-swift's rollout correction")
    mode, delta = options.rollout_importance_sampling_mode, options.off_policy_sequence_mask_delta
    if mode is None:
        why = "without rollout_importance_sampling_mode"
        warn_no_effect(options, ("rollout_importance_sampling_threshold",), why, framework="ms-swift")
    else:
        check_choice("rollout_importance_sampling_mode", mode, MODES)
        bounds.check_bound("rollout_importance_sampling_threshold", options.rollout_importance_sampling_threshold)
    keep: tuple[KeepTerm, ...] = () if delta is None else (OffPolicySequenceMask(max_divergence=delta),)
    cap = bounds.upper("rollout_importance_sampling_threshold", options.rollout_importance_sampling_threshold)
    if mode == "sequence_mask":
        keep = (*keep, *bounds.ratio_band("sequence_mean", None, cap))
    beta = 0.04 if options.beta is None else options.beta
    check_number("beta", beta)
    kl = KLPenalty(coef=beta, max_value=10.0) if beta != 0 else None
    return make_preset(
        "ms-swift",
        Correction(weight=None if mode is None else _weight(mode, cap), keep=keep),
        citation="ms-swift, rollout_importance_sampling_mode",
        notes="What ms-swift computes with these arguments.",
        kl=kl,
        kl_weighted=kl is not None and mode is not None,
        kl_on="kept" if keep else "all",
        aggregation=_aggregation(options.loss_type),
    )


def _aggregation(loss_type: str | None) -> Aggregation:
    if loss_type is None:
        return "token_mean"  # of which a trainer's own loss_type is free
    check_choice("loss_type", loss_type, LOSS_TYPES)
    return AGGREGATION[loss_type]


def _weight(mode: str, cap: float) -> Weight:
    if mode == "token_truncate":
        return bounds.truncate("token", None, cap)
    if mode == "token_mask":
        return bounds.band("token", None, cap)
    if mode == "sequence_truncate":
        return bounds.truncate("sequence_mean", None, cap)
    return RawWeight()
