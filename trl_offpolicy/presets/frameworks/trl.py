"""TRL's own options as a preset: the same numbers as TRL 1.16's ``_compute_loss``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import KeepTerm, OffPolicySequenceMask, Weight
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.objective.losses import CISPO, SAPO, VESPO, PolicyLoss, PPOClip, RatioLevel
from trl_offpolicy.presets.frameworks import bounds
from trl_offpolicy.presets.frameworks.options import read_options, tell
from trl_offpolicy.presets.preset import Preset, make_preset
from trl_offpolicy.types import Ratio

AGGREGATION: dict[str, Aggregation] = {
    "grpo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "luspo": "seq_mean_token_sum",
}
"""dapo, cispo and vespo divide by all tokens of the optimizer step (``Reduction.tokens``), bnpo by the batch's."""

GLOBAL_TOKEN_LOSSES = ("dapo", "cispo", "vespo")


@dataclass(frozen=True, kw_only=True)
class TRLOptions:
    """The fields of ``GRPOConfig`` that shape the loss, with TRL 1.16's names and defaults."""

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_level: str = "token"
    off_policy_mask_threshold: float | None = None
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    use_vllm: bool = True
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None


def from_trl(**grpo_options: object) -> Preset:
    """A preset from ``GRPOConfig`` fields; a field that is left out has TRL's default, but ``use_vllm`` is True.

    Without an engine that is apart there is nothing to correct: with ``use_vllm=False`` TRL applies no weight.

    As in TRL, the IS weight multiplies the policy term before the KL term is added, masked tokens stay in every
    denominator, non-finite sampling log-probs are neutral, and VESPO takes the weight inside its kernel.

    ``vllm_importance_sampling_cap``, the name of ``vllm_importance_sampling_clip_max`` before TRL 1.6, is read with a
    warning, as TRL does, and wins over it.

    TRL does not clamp log-ratios. Here they are clamped to +-20 nats, and a bound that no ratio can then reach (1e9) is
    left open with a warning.

    Raises:
        UnknownOptionError: an option TRL does not have (a TypeError and a ValueError).
        ValueError: an unknown loss type, level or mode.
    """
    options = read_options(TRLOptions, _renamed(grpo_options), framework="GRPOConfig's loss")
    if options.loss_type not in AGGREGATION:
        raise ValueError(f"loss_type must be one of {sorted(AGGREGATION)}, but got {options.loss_type!r}.")
    weight = _weight(options) if options.use_vllm and options.vllm_importance_sampling_correction else None
    return make_preset(
        "trl",
        Correction(weight=weight, keep=_opsm(options)),
        citation="TRL 1.16 GRPOTrainer",
        formula=f"loss_type={options.loss_type}, {options.vllm_importance_sampling_mode if weight else 'no IS'}",
        notes="What stock TRL computes with these options.",
        source_clamp=None,
        policy_loss=_policy_loss(options),
        kl=_kl(options),
        entropy_coef=options.entropy_coef,
        aggregation=AGGREGATION[options.loss_type],
    )


def _renamed(given: dict[str, object]) -> dict[str, object]:
    """``given`` with the present name of what TRL renamed."""
    options = dict(given)
    cap = options.pop("vllm_importance_sampling_cap", None)
    if cap is not None:
        tell("vllm_importance_sampling_cap is read as vllm_importance_sampling_clip_max, its name since TRL 1.6.")
        options["vllm_importance_sampling_clip_max"] = cap
    return options


def _kl(options: TRLOptions) -> KLPenalty | None:
    if options.beta == 0.0:
        return None
    return KLPenalty(coef=options.beta, ratio_weighted=options.use_bias_correction_kl)


def _opsm(options: TRLOptions) -> tuple[KeepTerm, ...]:
    if options.off_policy_mask_threshold is None:
        return ()
    ratio: Ratio = "current/sampling" if options.use_vllm else "current/old"
    return (OffPolicySequenceMask(max_divergence=options.off_policy_mask_threshold, ratio=ratio),)


def _weight(options: TRLOptions) -> Weight:
    high, low = options.vllm_importance_sampling_clip_max, options.vllm_importance_sampling_clip_min
    level, _, kind = options.vllm_importance_sampling_mode.partition("_")
    if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
        raise ValueError(
            "vllm_importance_sampling_mode must be token_truncate, token_mask, sequence_truncate or sequence_mask, "
            f"but got {options.vllm_importance_sampling_mode!r}."
        )
    floor = bounds.lower("vllm_importance_sampling_clip_min", low)
    cap = bounds.upper("vllm_importance_sampling_clip_max", high)
    if kind == "mask":
        return bounds.band(level, floor, cap)  # type: ignore[arg-type]
    if high is None and low is None:
        raise ValueError(
            "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min must be given, but both are None."
        )
    return bounds.truncate(level, floor, math.inf if cap is None else cap)  # type: ignore[arg-type]


def _policy_loss(options: TRLOptions) -> PolicyLoss:
    levels: dict[str, RatioLevel] = {"token": "token", "sequence": "sequence_mean"}
    if options.importance_sampling_level not in levels:
        raise ValueError(
            f"importance_sampling_level must be 'token' or 'sequence', but got {options.importance_sampling_level!r}."
        )
    level = levels[options.importance_sampling_level]
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    if options.loss_type == "cispo":
        return CISPO(high=high, level=level)
    if options.loss_type == "sapo":
        pos, neg = options.sapo_temperature_pos, options.sapo_temperature_neg
        return SAPO(temperature_pos=pos, temperature_neg=neg, level=level)
    if options.loss_type == "vespo":
        return VESPO(
            k_pos=options.vespo_k_pos,
            lambda_pos=options.vespo_lambda_pos,
            k_neg=options.vespo_k_neg,
            lambda_neg=options.vespo_lambda_neg,
            level=level,
        )
    return PPOClip(low=options.epsilon, high=high, delta=options.delta, level=level)
