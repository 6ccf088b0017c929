"""How many tokens an engine's KV cache holds, read from where the mismatch begins, and which of them it may hold.

A cache that evicts is whole until it is full. So tokens with a short context agree, and from one length on they differ:
that length is what the cache holds. Which tokens it keeps is then tested with the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.engines.kv_cache import KVCache

LEAST_BEFORE = 8
"""Tokens that must agree before the cache is full: fewer could by chance."""
MOSTLY = 0.6
"""Share of the later tokens that must differ."""
BEYOND_NOISE, LEAST_GAP = 6.0, 1e-4
"""A token differs if its gap is more than so many times the noise, and more than so many nats."""
SINKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 128)
"""Numbers of first tokens that are tested. None at all is a window, which is tested as one."""


def capacity(gap: Floats, prompt_lengths: Sequence[int], noise: float) -> int | None:
    """The number of tokens in the longest context that a cache of the engine still held whole.

    Args:
        gap: (B, T) difference of log-probs, nats; NaN where nothing is observed.
        prompt_lengths: tokens of the prompt of each row.
        noise: root mean square of the noise in a difference, nats.

    Returns:
        The number; None = no length divides the tokens into those that agree and those that differ.

    Example:
        >>> capacity(np.array([[0.0] * 8 + [0.3, 0.2]]), [4], noise=1e-6)
        11
    """
    observed = np.isfinite(gap)
    differs = np.zeros(gap.shape, bool)
    differs[observed] = np.abs(gap[observed]) > max(BEYOND_NOISE * noise, LEAST_GAP)
    # token t of a completion is predicted from the prompt and the t tokens before it
    context = np.asarray(prompt_lengths)[:, None] + np.arange(gap.shape[1])[None]
    if not differs.any():
        return None
    held = int(context[differs].min()) - 1
    before, after = observed & (context <= held), observed & (context > held)
    if before.sum() < LEAST_BEFORE or differs[after].mean() < MOSTLY:
        return None
    return held


def evicting(held: int) -> dict[int, KVCache]:
    """The rules of a cache of so many tokens, by the number of first tokens that are never evicted."""
    return {first: KVCache(keep_first=first, keep_last=held - first) for first in SINKS if first < held}
