"""The test whether one side scored one and the same other token in place of those that the batch holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.diagnosis.attribution.trials.heads import Logits
from trl_offpolicy.diagnosis.attribution.trials.search import FAR

BY_CHANCE = 1e-3
"""Tokens of the vocabulary that would fit all places by chance, at most: any two places have one that does."""
MATCHING = 0.9
"""Share of them whose log-prob must be that of the one other token."""
NEAR = 4.0
"""Times the noise up to which a token has the other token's log-prob."""
LEAST_NOISE = 1e-4
"""Nats that are taken as noise at least."""


def other_token_tests(logits: Logits, target: Floats, noise: float) -> dict[str, Tensor]:
    """Log-probs (N,) with one other token in the places that differ, by ``cause:detail``; empty if none fits.

    An end of sequence, a padding id or an unknown token that was written over the response has that effect.

    Args:
        logits: of the tokens under plain scoring.
        target: (N,) the log-probs to be explained, nats; finite.
        noise: root mean square of the noise in log-probs, nats.
    """
    noise = max(noise, LEAST_NOISE)
    differs = torch.from_numpy(np.abs(logits.plain.numpy() - target) > FAR * noise)
    if not differs.any():
        return {}
    everything = logits.head.logps(logits.values[differs])  # (D, V)
    explained = torch.from_numpy(target)[differs].float()
    near = (everything - explained[:, None]).abs() <= NEAR * noise
    token = int(near.sum(0).argmax())
    by_chance = near.shape[1] * float(near.double().mean(1).clamp(min=1 / near.shape[1]).prod())
    if near[:, token].float().mean() < MATCHING or by_chance > BY_CHANCE:
        return {}
    logps = logits.plain.clone()
    logps[differs] = everything[:, token]
    return {f"misalignment:log-prob of token {token} in place of the batch's": logps}
