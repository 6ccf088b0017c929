"""Log-probs that were written down wrongly: moved, swapped, in another unit, of another token. None needs a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance, spread
from trl_offpolicy.diagnosis.attribution.evidence import Floats, TokenEvidence
from trl_offpolicy.diagnosis.attribution.traces.features import REWRITTEN, UNITS, disagreeing_rows, fitting_rows
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_rms
from trl_offpolicy.diagnosis.attribution.traces.written import decimals
from trl_offpolicy.diagnosis.attribution.trials.interventions import Intervention, switch
from trl_offpolicy.engines.hf import TokenScores

MOST_MOVED = 3
"""Tokens by which all rows may be moved."""
LEAST_OVERLAP = 5
"""Tokens that two rows must share to be compared."""
SWAPPED = 0.5
"""Share of the disagreeing rows that must be those of another row, so that the others are too."""
FACTOR_LEAVES = 1e-3
"""Share of the distance in place, and of the numbers' spread, that a factor may leave: rounding, if it is the fault."""
UNIT_FITS = 4.0
"""Times what the best factor leaves that a unit's may leave and still be the one."""
CAUSE = "misalignment"


@dataclass(frozen=True)
class Books:
    """What is known without another forward.

    Args:
        evidence: of the batch.
        plain: scores (B, T) as they should be.
        target: log-probs (B, T) to be explained.
        whole: log-probs (B, T) of the side that agrees with the plain scores; it covers all rows.
    """

    evidence: TokenEvidence
    plain: TokenScores
    target: Floats
    whole: Floats

    @property
    def differs(self) -> Any:
        """(B,) bool: rows that disagree."""
        gap = np.clip(self.evidence.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return disagreeing_rows(gap, min(noise_rms(self.evidence), 1e-3))


def bookkeeping(books: Books) -> Iterator[Intervention]:
    """Every error of book-keeping as an :class:`Intervention`; none where all that differs is exactly 0."""
    plain, rows = books.plain.logps, books.differs[:, None]

    def so(detail: str, logps: Floats) -> Intervention:
        return switch(CAUSE, detail, lambda _rows: logps, forwards=False)

    def where(detail: str, logps: Floats) -> Intervention:
        """The same in the rows that disagree."""
        return so(detail, np.where(rows, logps, plain))

    gap = np.abs(books.target - plain) > 20 * min(noise_rms(books.evidence), 1e-3)
    differ = books.evidence.observed & gap
    if differ.any() and not np.any(books.target[differ]):
        return  # numbers that are exactly 0: whatever is near 0 at these tokens would fit them
    factor = _other_factor(np.where(books.evidence.observed, books.target, np.nan), plain)
    for name, change in REWRITTEN.items():
        if factor is None or name not in UNITS:
            yield so(name, change(plain))
    if factor is not None:
        yield so(f"log-probs times {factor:.3g}", factor * plain)
    yield so("the entropy in place of the log-prob", -books.plain.entropies)
    yield so("log-prob of the most likely token", books.plain.top_logps)
    for step in range(1, MOST_MOVED + 1):
        count = "one token" if step == 1 else f"{step} tokens"
        yield where(f"log-probs {count} late", moved(plain, step))
        yield where(f"log-probs {count} early", moved(plain, -step))
    yield where("log-probs in reverse order", _each(plain, lambda row: row[::-1]))
    yield from _limits(books, so)
    if (swapped := _swapped(books)) is not None:
        yield so("log-probs of swapped rows", swapped)
    yield so("each row's log-probs moved by its own number of tokens", _moved_alone(books))
    yield so("log-probs a token late or early from some token on (another tokenisation)", _broken(books))


def moved(logps: Floats, step: int) -> Floats:
    """Log-probs (B, T) moved by ``step`` tokens, NaN where nothing comes.

    Example:
        >>> moved(np.array([[1.0, 2.0, 3.0]]), 1)
        array([[nan,  1.,  2.]])
    """
    out = np.full_like(logps, np.nan)
    if step == 0:
        return logps.copy()
    width = logps.shape[1]
    if abs(step) < width:
        if step > 0:
            out[:, step:] = logps[:, :-step]
        else:
            out[:, :step] = logps[:, -step:]
    return out


def _each(logps: Floats, change: Callable[[Floats], Floats]) -> Floats:
    """Every row without its padding changed."""
    out = logps.copy()
    for row in range(len(out)):
        seen = np.isfinite(out[row])
        out[row, seen] = change(out[row, seen])
    return out


def _limits(books: Books, so: Callable[[str, Floats], Intervention]) -> Iterator[Intervention]:
    """Log-probs cut at a bound, or to a number of digits; both show in the numbers themselves."""
    plain, target = books.plain.logps, books.target
    values = target[np.isfinite(plain) & np.isfinite(target) & books.evidence.observed]
    if not values.size:
        return
    lowest = float(values.min())
    if lowest < 0 and np.mean(values <= lowest + 1e-9) > 2 / values.size:  # more than one token at the bound
        yield so(f"log-probs clipped at {lowest:.4g}", np.maximum(plain, lowest))
    if (digits := decimals(values)) is not None:
        yield so(f"log-probs rounded to {digits} decimals", np.round(plain, digits))


def _other_factor(target: Floats, plain: Floats) -> float | None:
    """The number c with target = c plain, as of log-probs divided by a temperature; None = there is none, or a unit's.

    Example:
        >>> logps = np.array([[-1.0, -0.3, -2.0]])
        >>> _other_factor(logps / 0.7, logps), _other_factor(logps / np.log(2), logps), _other_factor(logps - 1, logps)
        (1.4285714285714286, None, None)
    """
    both = np.isfinite(target) & np.isfinite(plain)
    target, plain = target[both], plain[both]
    square = float(np.dot(plain, plain))
    if not square:
        return None
    factor = float(np.dot(target, plain)) / square
    left, rounding = distance(target - factor * plain), 1e-12 * spread(target)
    if left > FACTOR_LEAVES * min(distance(target - plain), spread(target)) + rounding:
        return None
    others = (plain, *(change(plain) for change in UNITS.values()))
    return None if any(distance(target - other) <= UNIT_FITS * left + rounding for other in others) else factor


def _swapped(books: Books) -> Floats | None:
    """Disagreeing rows with the log-probs of the row that fits them; if most have one, the others are left out.

    A row that got those of a much shorter one holds what was behind them, and fits none.
    """
    plain = books.plain.logps
    held = books.differs & np.isfinite(plain).any(1)
    found = fitting_rows(books.target, books.whole, held)
    good = {row: other for row, (other, share) in found.items() if share < 0.1}
    if not good:
        return None
    out = plain.copy()
    if len(good) >= max(2, SWAPPED * held.sum()):
        out[held] = np.nan
    for row, other in good.items():
        out[row] = books.whole[other]
    return out


def _moved_alone(books: Books) -> Floats:
    """Each disagreeing row moved by the number of tokens that fits it, as rows padded on the wrong side are."""
    plain, target = books.plain.logps, np.where(books.evidence.observed, books.target, np.nan)
    out, width = plain.copy(), plain.shape[1]
    for row in np.flatnonzero(books.differs & np.isfinite(plain).any(1)):
        best, least = 0, np.inf
        for step in range(LEAST_OVERLAP - width, width - LEAST_OVERLAP + 1):
            gap = np.abs(moved(plain[row : row + 1], step)[0] - target[row])
            if step and np.isfinite(gap).sum() >= LEAST_OVERLAP and (size := float(np.nanmedian(gap))) < least:
                best, least = step, size
        out[row] = moved(plain[row : row + 1], best)[0]
    return out


def _broken(books: Books) -> Floats:
    """From the first token that disagrees, a disagreeing row is a token late or early; that token is left out."""
    plain, target = books.plain.logps, np.where(books.evidence.observed, books.target, np.nan)
    out, noise = plain.copy(), 20 * min(noise_rms(books.evidence), 1e-3)
    for row in np.flatnonzero(books.differs & np.isfinite(plain).any(1)):
        gap = np.abs(plain[row] - target[row])
        far = np.flatnonzero(np.nan_to_num(gap) > max(noise, 0.02))
        if not far.size:
            continue
        start = int(far[0])
        ways = [moved(plain[row : row + 1], step)[0, start + 1 :] for step in (1, -1)]
        gaps = [np.abs(way - target[row, start + 1 :]) for way in ways]
        left = [float(np.nanmean(gap)) if _seen(gap) else np.inf for gap in gaps]
        out[row, start] = np.nan
        out[row, start + 1 :] = ways[int(np.argmin(left))]
    return out


def _seen(values: Floats) -> bool:
    return bool(np.isfinite(values).any())
