"""The noise in a mismatch: what the trainer's second scoring of the same text shows, and what arithmetic explains."""

from __future__ import annotations

import numpy as np

from trl_offpolicy.diagnosis.attribution.distances import kl_k3
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence
from trl_offpolicy.diagnosis.thresholds import SAME_POLICY_KL

FLOORS = {"float32": 1e-6, "fp32": 1e-6, "float16": 5e-5, "fp16": 5e-5, "half": 5e-5}
LARGEST_FLOOR = 5e-3
"""Largest KL k3 between two scorings that arithmetic explains, nats per token: float32, float16, and bfloat16."""


def trusted_floor(evidence: TokenEvidence) -> float:
    """The largest KL k3 between two scorings of the trainer that is arithmetic, nats per token.

    A larger floor is a fault of its own: dropout, padding that is attended. Without a declared data type the trainer
    may compute in 16 bits.
    """
    dtype = None if evidence.trainer is None else evidence.trainer.dtype
    return FLOORS.get(dtype or "", LARGEST_FLOOR)


def floor_k3(evidence: TokenEvidence) -> float:
    """KL k3 between two scorings of the trainer, nats per token; NaN without a second one."""
    if evidence.rescored_per_token_logps is None:
        return float("nan")
    seen = evidence.observed
    return kl_k3(evidence.rescored_per_token_logps[seen] - evidence.old_per_token_logps[seen])


def noise_level(evidence: TokenEvidence) -> float:
    """The noise floor: KL k3 in nats between two scorings, but at least ``SAME_POLICY_KL``.

    Two scorings on a CPU can agree to the last bit. ``SAME_POLICY_KL`` is the KL that float32 arithmetic in another
    order gives at the same weights.
    """
    floor = floor_k3(evidence)
    return max(SAME_POLICY_KL, floor if np.isfinite(floor) else 0.0)


def noise_rms(evidence: TokenEvidence) -> float:
    """Root mean square of the noise in d, nats."""
    return float(np.sqrt(2 * noise_level(evidence)))


def self_ratio(evidence: TokenEvidence) -> float:
    """KL k3 of engine and trainer / that of the trainer's two scorings, on the tokens that were scored twice.

    Dropout is drawn anew in each scoring, so the trainer is further from itself (two draws) than from the engine (one
    draw): the ratio is about 0.5. Without dropout the engine differs at least as much as another batch layout. NaN if
    the tokens were scored once.
    """
    if evidence.rescored_per_token_logps is None:
        return float("nan")
    both = evidence.observed & np.isfinite(evidence.rescored_per_token_logps)
    mu, old, second = (
        values[both]
        for values in (
            evidence.sampling_per_token_logps,
            evidence.old_per_token_logps,
            evidence.rescored_per_token_logps,
        )
    )
    return kl_k3(old - mu) / max(kl_k3(second - old), 1e-30)


def self_median(evidence: TokenEvidence) -> float:
    """Median |d| of the trainer's two scorings, nats: that of a typical token; 0 if they were scored once."""
    if evidence.rescored_per_token_logps is None:
        return 0.0
    both = evidence.observed & np.isfinite(evidence.rescored_per_token_logps)
    gap = np.abs(evidence.rescored_per_token_logps[both] - evidence.old_per_token_logps[both])
    return float(np.median(gap)) if gap.size else 0.0
