"""Splits a mismatch by version lag: at lag 0 engine and trainer alone differ; what is beyond that is staleness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trl_offpolicy.diagnosis.attribution.distances import distance
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence

LEAST_TOKENS = 50
"""Tokens at lag 0, and beyond it, from which the two are compared."""


@dataclass(frozen=True)
class LagShares:
    """Two parts of the squared log-ratios, which KL is made of.

    Args:
        mismatch: share that tokens of every lag would have if they differed as those of lag 0 do.
        staleness: what older weights add to it; the two sum to 1.
    """

    mismatch: float
    staleness: float

    @property
    def text(self) -> str:
        """Both shares in a sentence."""
        return (
            f"by version lag, {self.mismatch:.0%} of the squared log-ratio is there at lag 0 (engine mismatch) and "
            f"{self.staleness:.0%} is added by older weights (staleness)"
        )


def lag_shares(sizes: Iterable[tuple[int, float, float]]) -> LagShares | None:
    """The two shares; None without enough tokens at lag 0 and beyond, or without any mismatch.

    Args:
        sizes: (version lag, tokens, mean squared log-ratio of a token) of each lag.

    Example:
        >>> lag_shares([(0, 100, 1.0), (1, 100, 3.0)])
        LagShares(mismatch=0.5, staleness=0.5)
    """
    known = [one for one in sizes if one[1] > 0]
    fresh = [one for one in known if one[0] == 0]
    tokens, at_zero = sum(one[1] for one in known), sum(one[1] for one in fresh)
    whole = sum(one[1] * one[2] for one in known)
    if min(at_zero, tokens - at_zero) < LEAST_TOKENS or whole <= 0:
        return None
    size = sum(one[1] * one[2] for one in fresh) / at_zero
    mismatch = min(1.0, tokens * size / whole)
    return LagShares(mismatch, 1.0 - mismatch)


def recorded_shares(evidence: TokenEvidence) -> LagShares | None:
    """The shares of recorded tokens; the size of a log-ratio is :func:`.distances.distance`."""
    if evidence.version_lags is None:
        return None
    d, lags = evidence.log_ratio[evidence.observed], evidence.version_lags[evidence.observed]
    found = []
    for lag in np.unique(lags[lags >= 0]).tolist():
        here = d[lags == lag]
        found.append((int(lag), float(len(here)), distance(here) / len(here)))
    return lag_shares(found)
