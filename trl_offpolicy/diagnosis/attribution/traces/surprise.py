"""How much rarer tokens are than draws: -log p of a drawn token is the entropy on average, whatever came before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence

Array = NDArray[Any]
LEAST_TOKENS = 50
"""Tokens from which a mean over the batch is judged."""
IN_BITS = 0.015
"""Distance of a ratio of means from log(2), or from its inverse, up to which it is that."""
LOG_VOCABULARY = 12.5
"""log of the number of tokens that may share the rest of the probability: more than the largest vocabularies have."""


def surprise_of(evidence: TokenEvidence, b: Array, *, least: int = LEAST_TOKENS) -> tuple[float, float]:
    """Mean of -b - H and its z value; NaN without entropies, and for fewer than ``least`` tokens.

    The expected value of -log p of a drawn token is the entropy, whatever came before. So the sum is a martingale, and
    tokens of one row count as independent. Copies of a row count once. Entropies that no distribution with these
    log-probs has say nothing.
    """
    if evidence.entropies is None or _impossible_entropies(evidence.entropies, b):
        return math.nan, math.nan
    rows = np.unique(np.nan_to_num(b, nan=1.0).round(3), axis=0, return_index=True)[1]
    excess = (-b - evidence.entropies)[rows]
    values = excess[np.isfinite(excess)]
    if values.size < least or not values.std():
        return math.nan, math.nan
    mean = float(values.mean())
    return mean, mean * float(np.sqrt(values.size)) / float(values.std())


def _impossible_entropies(entropies: Array, b: Array) -> bool:
    """Whether no distribution that gives the tokens the probabilities e^b has these entropies.

    The least entropy is that of two tokens, p and 1 - p. The largest spreads 1 - p over a whole vocabulary: a token of
    0.99 leaves at most 0.18 nats. Entropies at a temperature far from that of the log-probs may break one, and so may
    those of other rows.
    """
    log_p = np.minimum(b, 0.0)
    rest = np.clip(-np.expm1(log_p), 1e-12, 1.0)
    least = -np.exp(log_p) * log_p - rest * np.log(rest)
    most = least + rest * LOG_VOCABULARY
    known = np.isfinite(least) & np.isfinite(entropies)
    found, low, high = entropies[known], least[known], most[known]
    outside = (found < 0.98 * low - 1e-3) | (found > 1.02 * high + 1e-3)
    return bool(known.any()) and float(np.mean(outside)) > 0.01


def in_bits(b: Array, entropies: Array) -> bool:
    """Whether entropies and log-probs are in other units: both means differ by log(2), to one per cent."""
    use = np.isfinite(entropies) & np.isfinite(b)
    mean = float(np.mean(entropies[use])) if use.any() else 0.0
    ratio = float(-np.mean(b[use])) / mean if mean > 0 else 0.0
    return min(abs(ratio / math.log(2) - 1), abs(ratio * math.log(2) - 1)) < IN_BITS
