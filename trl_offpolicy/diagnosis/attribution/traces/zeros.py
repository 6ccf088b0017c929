"""Tokens that the engine was certain of (its log-prob is exactly 0) and the trainer was not: whose are they?

Lost log-probs that were filled with 0 are those of draws: on average as rare as the entropy says. A tool's output and
what a grammar forces was drawn by nobody, and is rarer. Greedy requests, and tokens alone in a nucleus, are likelier.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trl_offpolicy.diagnosis.attribution.distances import token_k3
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence
from trl_offpolicy.diagnosis.attribution.traces.surprise import surprise_of

Array = NDArray[Any]

FORCED = -1e-3
"""log(old / mu) below which a token that the engine was certain of is not one that the trainer was certain of, too."""
CHANCE = 1e-4
"""Probability that all rows drew the same tokens, above which they may have."""
LEAST_JUDGED, LEAST_OTHERS = 8, 50
"""Zeros, and other tokens, from which on a mean over them is judged."""


def zeros(evidence: TokenEvidence, b: Array, d: Array, noise: float) -> dict[str, Any]:
    """The features of these tokens, by their names in :class:`.features.Features`.

    Args:
        evidence: the batch.
        b: (B, T) log-probs of the trainer, NaN where nothing is observed.
        d: (B, T) log(old / mu), likewise.
        noise: root mean square of the noise, nats.
    """
    seen = evidence.observed
    forced = seen & (evidence.sampling_per_token_logps == 0.0) & (d < FORCED)
    others, size = seen & ~forced, token_k3(d[seen])
    return {
        "forced": float(size[forced[seen]].sum() / max(size.sum(), 1e-60)),
        "forced_alone": _alone(forced),
        "forced_last": _last(forced, seen),
        "forced_fixed": _fixed(forced, evidence),
        "forced_tokens": int(forced.sum()),
        "forced_depth": float(np.max(-d[forced], initial=0.0)),
        "forced_z": surprise_of(evidence, np.where(forced, b, np.nan), least=LEAST_JUDGED)[1],
        "forced_beside_z": _beside_z(-b[forced], -b[others]),
        "others_below": float(np.mean(d[others] < -4 * noise)) if others.any() else 0.0,
    }


def _beside_z(here: Array, others: Array) -> float:
    """Standard errors by which the mean of -b is larger here than at the other tokens, which were drawn."""
    if here.size < LEAST_JUDGED or others.size < LEAST_OTHERS:
        return math.nan
    error = float(np.sqrt(here.var() / here.size + others.var() / others.size))
    return float(here.mean() - others.mean()) / error if error else math.nan


def _last(marked: Array, seen: Array) -> float:
    """Share of the marked tokens (B, T) after which no token of their row is unmarked."""
    other = seen & ~marked
    later = np.flip(np.cumsum(np.flip(other, 1), 1), 1) > 0
    return float((marked & ~later).sum()) / max(1, int(marked.sum()))


def _fixed(marked: Array, evidence: TokenEvidence) -> float:
    """Share of the marked tokens at places where all rows hold a zero and the same token, whatever their prompt.

    0 if nothing but zeros is there, as under greedy decoding, or if these tokens are so likely that all rows may have
    drawn them.
    """
    seen, zero = evidence.observed, evidence.sampling_per_token_logps == 0.0
    if evidence.token_ids is None or evidence.group_ids is None or not (seen & ~zero).any():
        return 0.0
    groups = np.asarray(evidence.group_ids)
    fixed = np.zeros_like(marked)
    for place in np.flatnonzero(marked.any(0)).tolist():
        rows = seen[:, place]
        several = len(np.unique(groups[rows])) > 1
        alike = len(np.unique(evidence.token_ids[rows, place])) == 1
        fixed[:, place] = several and alike and zero[rows, place].all()
    if evidence.old_per_token_logps[fixed & seen].sum() > math.log(CHANCE):
        return 0.0
    return float((marked & fixed).sum()) / max(1, int(marked.sum()))


def _alone(marked: Array) -> float:
    """Share of the marked tokens (B, T) whose neighbours in the row are not marked."""
    around = np.pad(marked, ((0, 0), (1, 1)))
    beside = around[:, :-2] | around[:, 2:]
    return float((marked & ~beside).sum()) / max(1, int(marked.sum()))
