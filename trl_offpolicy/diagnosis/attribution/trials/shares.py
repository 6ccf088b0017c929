"""How much of a mismatch a tested hypothesis leaves, and whose log-probs are to be explained."""

from __future__ import annotations

from typing import Literal

import numpy as np

from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance, rank_correlation, spread
from trl_offpolicy.diagnosis.attribution.evidence import Array, Floats, TokenEvidence
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_rms

Side = Literal["engine", "trainer"]
REFERENCE = "reference"
"""Name of the plain scoring."""
OUTLIERS = 0.1
"""Share of the tokens, those of the largest differences, without which a hypothesis must hold too."""
LEAST_REST = 1e-3
"""Share of the mismatch that the other tokens must have to be asked."""
PRECISION_SCALE = (0.5, 2.0)
"""Times the simulated rounding errors that an engine's may be."""
WEIGHTS_SCALE = (0.003, 5.0)
"""Times a known change of the weights that the engine's may be: a part of an update, or several."""


def at_fault(evidence: TokenEvidence, reference: Floats) -> Side:
    """The side whose log-probs are further from the plain scoring."""
    use = evidence.observed & np.isfinite(reference)
    engine = distance(reference[use] - evidence.sampling_per_token_logps[use])
    trainer = distance(reference[use] - evidence.old_per_token_logps[use])
    return "trainer" if trainer > engine else "engine"


def left_share(evidence: TokenEvidence, name: str) -> float:
    """Share of the mismatch that is left under a tested hypothesis, over the tokens that it was tested on.

    The mismatch is :func:`distance`: d^2 for small differences, 2 |d| for large ones. A hypothesis on the
    engine is compared with the engine's log-probs, one on the trainer with the trainer's. The share must hold without
    the tokens of the largest differences as well, so that what fits one token does not explain the batch.

    Rounding errors are reproduced in part: see :func:`left_in_part`.
    """
    compared = _compared(evidence, name)
    if compared is None:
        return float("inf")
    scored, target, other = compared
    left = _left(scored - target, other - target, noise_rms(evidence))
    # Beside a large mismatch anything that is near all of the numbers, as a constant is, would leave little.
    if (whole := spread(target)) > 0:
        left = max(left, distance(scored - target) / whole)
    if name.split(":")[1] == "precision":
        return min(left, 1 - _fit_in_part(other - scored, other - target, PRECISION_SCALE))
    return left


def left_in_part(evidence: TokenEvidence, name: str) -> float:
    """Share of the mismatch that is left by a part of what a hypothesis changes, or by several times that.

    Let g be the change of the log-probs under the hypothesis and d the mismatch. This is 1 - R^2 of the fit d = s g if
    s is plausible. R^2 is the smaller one of values and of ranks.
    """
    compared = _compared(evidence, name)
    if compared is None:
        return float("inf")
    scored, target, other = compared
    return 1 - _fit_in_part(other - scored, other - target, WEIGHTS_SCALE)


def _compared(evidence: TokenEvidence, name: str) -> tuple[Array, Array, Array] | None:
    """(N,) log-probs under a hypothesis, those to be explained, and the plain ones; None if nothing differs."""
    values = evidence.tested[name]
    use = evidence.observed & (np.isfinite(values) | np.isneginf(values))
    mu, old = evidence.sampling_per_token_logps[use], evidence.old_per_token_logps[use]
    target, other = (old, mu) if name.startswith("trainer:") else (mu, old)
    reference = evidence.tested.get(REFERENCE)
    if reference is not None:
        other = np.where(np.isfinite(reference[use]), reference[use], other)
    if not use.any() or not distance(other - target):
        return None
    return np.where(np.isneginf(values[use]), target - MAX_LOG_RATIO, values[use]), target, other


def _left(left: Array, whole: Array, noise: float) -> float:
    """The larger share of all tokens and of all but those with the largest differences, if these are above noise."""
    share = distance(left) / distance(whole)
    rest = np.abs(whole) <= np.quantile(np.abs(whole), 1 - OUTLIERS)
    whole_of_rest = distance(whole[rest])
    if not rest.any() or whole_of_rest < max(LEAST_REST * distance(whole), 100 * noise**2):
        return share
    return max(share, distance(left[rest]) / whole_of_rest)


def _fit_in_part(change: Array, d: Array, scale: tuple[float, float]) -> float:
    """The smaller R^2 of values (through 0) and of ranks; 0 if the fitted factor is not within ``scale``."""
    along, square = float(change @ d), float(change @ change)
    ranks = rank_correlation(change, d)
    if along <= 0 or not ranks > 0 or not scale[0] <= np.sqrt(float(d @ d) / square) <= scale[1]:
        return 0.0
    return min(along**2 / max(square * float(d @ d), 1e-60), ranks**2)
