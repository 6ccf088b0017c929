"""How far the TRL trainer is from itself: the same micro-batch scored again in another batch size."""

from __future__ import annotations

from typing import Any

import torch

from trl_offpolicy.correction.measure import noise_floor
from trl_offpolicy.rollouts import batches
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import PolicyBatch


def measured_noise_floor(trainer: Any, model: Any, inputs: dict[str, Any], batch: PolicyBatch) -> Stats | None:
    """Score the micro-batch again in halves (a single row: doubled); once in ``noise_floor_steps`` steps of training.

    Args:
        trainer: an ``OffPolicyGRPOTrainer``.
        model: that gave ``batch`` its log-probs.
        inputs: the micro-batch as TRL has it.
        batch: the same.

    Returns:
        None where it is not measured: another step, evaluation, images, or measured already.
    """
    every = trainer.args.noise_floor_steps
    if not trainer.model.training or not every or trainer.state.global_step % every:
        return None
    if "noise_floor" in trainer._stats["train"].groups or (again := batches.in_other_batches(inputs)) is None:
        return None
    with torch.no_grad():
        logps = trainer._score(model, again[0], batch_size=again[1])[0][: len(batch.mask)]
    return noise_floor(batch.per_token_logps.detach(), logps, batch.mask)
