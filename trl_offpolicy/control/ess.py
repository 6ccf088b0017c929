"""Sequence ESS as the controllers read it: in the log domain, of pieces of one length, from the last logged rows.

The ESS of products over whole responses, ``ess_sequence``, cannot steer a run. It falls exponentially with the length
and stops at 1 / N, so long responses read the same in a healthy run and in a drifting one; and one estimate scatters
widely. Here it comes from the variance D of the log products per token (``product_variance``): exp(-n D) is the ESS of
the products over pieces of n tokens, for products whose log is normal. It means the same at every length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from trl_offpolicy.diagnosis.verdict.judge import LENGTHS, WINDOW
from trl_offpolicy.run_folder.run_data import MetricsLog
from trl_offpolicy.stats import PREFIX

PIECE = 16
"""Tokens of a piece. With 16, the two limits of the decision tree agree: a KL of 0.02 nats per token, up to which drift
means nothing, is a variance of 0.04 per token and an ESS of 0.53, where the tree's limit is 0.5."""
RECENT = 5
"""Logged rows whose median is "now"; fewer than three say nothing, because one odd batch would then decide."""


def piece_ess(variance: float) -> float:
    """exp(-n D): ESS of products over n = 16 tokens, given D, the variance of a log product per token in nats^2.

    Example:
        >>> [round(piece_ess(variance), 2) for variance in (0.0, 0.04, 0.1)]
        [1.0, 0.53, 0.2]
    """
    return math.exp(-PIECE * max(variance, 0.0))


def variances(log: MetricsLog, group: str, *, rows: int = RECENT) -> dict[int, float]:
    """``{step: D}`` of a ratio, for the last ``rows`` rows of a log.

    A log without ``product_variance``, of an earlier version, gives D = -log(ESS) / length from ``ess_sequence``. That
    estimate cannot exceed log(N) / length.
    """
    recent = MetricsLog(log.rows[-rows:])
    steps, values, _ = recent.series(f"{PREFIX}{group}/product_variance")
    if steps:
        return dict(zip(steps, values, strict=True))
    length = recent.first_logged(LENGTHS)
    shares = recent.series(f"{PREFIX}{group}/ess_sequence")
    if length is None or not shares.steps:
        return {}
    lengths = dict(zip(*recent.series(length)[:2], strict=True))
    return {
        step: -math.log(min(max(share, 1e-12), 1.0)) / lengths[step]
        for step, share in zip(shares.steps, shares.values, strict=True)
        if lengths.get(step, 0.0) > 0
    }


def training_drift(log: MetricsLog) -> dict[int, float]:
    """``{step: D}`` of the drift that the optimizer's own steps made, which a smaller learning rate makes smaller.

    That is current/old (``staleness``). Where old is unknown, it is what ``total`` has beyond ``mismatch``: the
    mismatch of responses that the current weights sampled is there at any learning rate. A step without such a response
    has the usual ``mismatch``, the median of those known. With neither of the two it is all of ``total``.
    """
    if stale := variances(log, "staleness"):
        return stale
    fresh = variances(log, "mismatch", rows=WINDOW)
    usual = median(fresh.values()) if fresh else 0.0
    return {step: max(value - fresh.get(step, usual), 0.0) for step, value in variances(log, "total").items()}


def recent_ess(found: dict[int, float], step: int) -> float | None:
    """The ESS of the median D of the last rows; None if there are fewer than three, or none at ``step``."""
    if len(found) < 3 or step not in found:
        return None
    return piece_ess(median(found.values()))


def latest(log: MetricsLog, groups: Sequence[str]) -> float | None:
    """The ESS of the newest row alone, of the first of ``groups`` that it holds; None = not logged."""
    last = MetricsLog(log.rows[-1:])
    return next((piece_ess(value) for group in groups for value in variances(last, group).values()), None)
