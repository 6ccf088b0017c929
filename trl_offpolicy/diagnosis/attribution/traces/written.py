"""How the engine's numbers are written: with a few decimals, or in a 16-bit format. The numbers alone show it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DECIMALS, FEW = (1, 2, 3, 4), 3
"""Decimals that are looked for, and how many may be told from the numbers alone."""
LEAST_NUMBERS = 30
"""Numbers other than 0 from which on a form that all of them have is no chance."""
EXPLAINED = 0.99
"""Share of the tokens that rounding to this form must explain."""
SLACK = 1.05


class Written(NamedTuple):
    """The coarsest form that all numbers have.

    Args:
        form: "2 decimals", "bfloat16" or "float16"; empty if there is none.
        explains: rounding to it explains every difference.
    """

    form: str
    explains: bool


def written(a: Array, d: Array, noise: float) -> Written:
    """The form of log-probs.

    Args:
        a: (N,) log-probs of the engine.
        d: (N,) log(old / mu).
        noise: root mean square of the noise, nats.

    Example:
        >>> exact = np.linspace(-5.0, -0.1, 40)
        >>> written(np.round(exact, 2), exact - np.round(exact, 2), 1e-6)
        Written(form='2 decimals', explains=True)
        >>> written(exact, np.zeros(40), 1e-6).form
        ''
    """
    numbers = a[a != 0.0]
    if numbers.size < LEAST_NUMBERS:
        return Written("", explains=False)
    size = np.abs(a)
    digits = decimals(numbers)
    if digits is not None and digits <= FEW:
        return _explained(f"{digits} decimal{'s' * (digits > 1)}", np.full_like(a, 0.5 * 10.0**-digits), d, noise)
    single = numbers.astype(np.float32)
    if not np.any(single.view(np.uint32) & 0xFFFF) and np.allclose(single, numbers, rtol=1e-6, atol=0):
        return _explained("bfloat16", size * 2.0**-8, d, noise)
    if np.array_equal(numbers.astype(np.float16).astype(np.float32), single):
        return _explained("float16", np.maximum(size * 2.0**-11, 2.0**-25), d, noise)
    return Written("", explains=False)


def decimals(numbers: Array) -> int | None:
    """The fewest decimals that all log-probs (N,) have; None = more than are looked for.

    Example:
        >>> decimals(np.array([-1.25, -0.5])), decimals(np.array([-1 / 3]))
        (2, None)
    """
    tolerance = 1e-6 * max(1.0, -float(numbers.min()))
    fit = (n for n in DECIMALS if np.allclose(numbers, np.round(numbers, n), atol=tolerance, rtol=0))
    return next(fit, None)


def _explained(form: str, half_step: Array, d: Array, noise: float) -> Written:
    within = np.abs(d) <= SLACK * half_step + 4 * noise
    return Written(form, explains=bool(np.mean(within) >= EXPLAINED))
