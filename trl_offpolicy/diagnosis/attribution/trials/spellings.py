"""Rows that one side holds in other tokens: the text was decoded and tokenised again on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance
from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.engines.hf import score_completions

MOST_CUTS = 16
"""Places at which a token's text is cut in two."""
FAR = 0.02
"""Nats from which a token differs, not by rounding."""
FITS = 0.2
"""Share of a row's mismatch that other tokens may leave."""

Spellings = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""Ids -> other sequences of ids with the same text."""


def spellings_of(tokenizer: Any) -> Spellings:
    """The spellings that a tokenizer of transformers has for a few ids.

    Args:
        tokenizer: with ``decode`` and ``encode``.
    """

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False)) if text else []

    def found(ids: Sequence[int]) -> list[list[int]]:
        text = str(tokenizer.decode(list(ids)))
        cuts = range(min(len(text), MOST_CUTS))
        tried = [tuple(encoded(text[:cut]) + encoded(text[cut:])) for cut in cuts]
        same = [one for one in dict.fromkeys(tried) if one and one != tuple(ids)]
        return [list(one) for one in same if tokenizer.decode(list(one)) == text]

    return found


def respelled(bench: Bench, rows: Sequence[int], plain: Floats, target: Floats, noise: float) -> Floats | None:
    """Log-probs (B, T) of rows in which one or two tokens are spelled in another way; None if no row fits.

    The first token that disagrees is where the other tokens begin. From there on the numbers belong to other places.

    Args:
        bench: with the tokenizer's spellings.
        rows: completions that are scored.
        plain: log-probs (B, T) of the tokens as they are.
        target: log-probs (B, T) to be explained.
        noise: size of rounding errors, nats.
    """
    if bench.spellings is None:
        return None
    out, fitting = np.full_like(plain, np.nan), 0
    for row in rows:
        out[row] = plain[row]
        gap = np.nan_to_num(np.abs(plain[row] - target[row]))
        far = np.flatnonzero(gap > max(FAR, 20 * noise))
        if not far.size:
            continue
        best, logps = _best(bench, row, int(far[0]), plain, target)
        if best < FITS:
            out[row], fitting = logps, fitting + 1
    return out if fitting else None


def _best(bench: Bench, row: int, start: int, plain: Floats, target: Floats) -> tuple[float, Floats]:
    """The share that the best spelling from ``start`` leaves of a row's mismatch, and its log-probs (T,)."""
    assert bench.spellings is not None
    ids, width = list(bench.completion_ids[row]), plain.shape[1]
    others = [
        [*ids[:start], *other, *ids[start + count :]]
        for count in (1, 2) for other in bench.spellings(ids[start : start + count])
    ]  # fmt: skip
    if not others:
        return float("inf"), plain[row]
    (scores,) = score_completions(bench.model, [bench.prompt_ids[row]] * len(others), others, heads=[bench.head])
    found = np.full((len(others), width), np.nan)
    found[:, : scores.logps.shape[1]] = scores.logps[:, :width]
    use = np.isfinite(target[row]) & np.isfinite(plain[row])
    whole = distance(_near(plain[row, use] - target[row, use]))
    left = [distance(_near(one[use] - target[row, use])) / whole for one in found]
    place = int(np.argmin(left))
    return left[place], found[place]


def _near(d: Floats) -> Floats:
    return np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
