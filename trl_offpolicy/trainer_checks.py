"""What the trainer checks before it loads anything."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.engines.checks import require_comparable, sampling_faults
from trl_offpolicy.objectives import Objective
from trl_offpolicy.staging import Stages, stage

logger = logging.getLogger(__name__)

_SAMPLING_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs")


def check_engine(args: OffPolicyGRPOConfig, objective: Objective, *, has_rollout_func: bool) -> None:
    """The correction has an engine whose log-probs can be compared with the trainer's."""
    if objective.needs_sampling and not (args.use_vllm or has_rollout_func):
        raise ValueError(
            "offpolicy must not read the sampling policy when use_vllm is False: transformers' generate samples from "
            "the trainer itself, so old/sampling is 1. Use offpolicy: measure, or use_vllm: true."
        )
    options = {name: getattr(args, name) for name in _SAMPLING_OPTIONS}
    device_type = args.device.type
    if objective.needs_sampling and args.use_vllm:
        require_comparable(options, device_type=device_type)
    elif args.use_vllm and (faults := sampling_faults(options, device_type=device_type)):
        warnings.warn("Diagnostics will be biased: " + "; ".join(faults), stacklevel=3)


def warn_about_dropout(peft_config: Any) -> None:
    """LoRA dropout looks like mismatch."""
    if (dropout := getattr(peft_config, "lora_dropout", 0.0)) > 0:
        warnings.warn(
            f"lora_dropout is {dropout}: the trainer's log-probs become random and look like engine mismatch; use 0.",
            stacklevel=3,
        )


def stages_of(args: OffPolicyGRPOConfig, objective: Objective) -> Stages | None:
    """The two parts of a wide correction; says what it costs."""
    stages = stage(objective)
    if stages is None:
        return None
    if stages.early.baseline == "kept" and args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "multi_objective_aggregation must be 'sum_then_normalize' with baseline='kept' (advantages are made again "
            f"from the total reward), but got {args.multi_objective_aggregation!r}."
        )
    logger.warning(
        "offpolicy needs the whole generation batch (scope %s): the old policy is scored once per generation, "
        "one more forward.",
        objective.scope,
    )
    return stages
