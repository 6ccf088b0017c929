"""How a mismatch depends on what a row holds already: a penalty lowers tokens that were drawn and raises all others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence

Array = NDArray[Any]
LEAST_OF_EACH = 10
"""Rare tokens that were drawn before in their row, and likely ones that were not, from which on they are compared."""


def penalised(evidence: TokenEvidence, d: Array) -> float:
    """How far d leans up at tokens that their row holds already, and down at new ones: the smaller of both, -1 to 1.

    A penalty makes log mu = log pi - penalty [drawn before] - log Z with e^-penalty <= Z <= 1, so that d is positive
    at every token drawn before and negative at every other one: 1. Tokens count by |d|, up to a nat. A flatter engine
    does that, too, because it is likely tokens that are drawn again. But there rare tokens that were drawn before lean
    down, and likely ones that are new lean up. Where one of these two does, its lean counts.

    Args:
        evidence: the batch, for the ids of its tokens; NaN without them.
        d: (B, T) log-probs of the trainer less those of the engine, nats; NaN where nothing was observed.
    """
    if evidence.token_ids is None:
        return math.nan
    seen, b = evidence.observed, evidence.old_per_token_logps
    before = _drawn_before(evidence.token_ids, seen)
    # likelier than a draw is on average: what a temperature divides by
    likely = b + (evidence.entropies if evidence.entropies is not None else -b[seen].mean())
    rare_again, likely_new = d[seen & before & (likely < 0)], d[seen & ~before & (likely > 0)]
    if min(rare_again.size, likely_new.size) < LEAST_OF_EACH:
        return math.nan
    whole = min(_lean(d[seen & before]), -_lean(d[seen & ~before]))
    against_sharpness = min(_lean(rare_again), -_lean(likely_new))
    return whole if against_sharpness > 0 else min(whole, against_sharpness)


def _drawn_before(token_ids: Array, observed: Array) -> Array:
    """(B, T) bool: an earlier token of the row is the same."""
    before = np.zeros_like(observed)
    for row, ids, keep in zip(before, token_ids, observed, strict=True):
        places = np.flatnonzero(keep)
        _, first = np.unique(ids[places], return_index=True)
        row[places] = True
        row[places[first]] = False
    return before


def _lean(d: Array) -> float:
    """Sum of d over the sum of |d|: 1 = all positive. One large difference counts as a nat."""
    cut = np.clip(d, -1.0, 1.0)
    return float(cut.sum() / max(np.abs(cut).sum(), 1e-30))
