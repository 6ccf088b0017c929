"""Writes numbers and lists, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable


def format_number(value: float | None) -> str:
    """Four decimals around 1, three significant digits below 0.1; a dash for None.

    Example:
        >>> format_number(1.00021), format_number(0.00041), format_number(-2e-6), format_number(None)
        ('1.0002', '0.00041', '-2.00e-6', '–')
    """
    if value is None:
        return "–"
    size = abs(value)
    if value != 0 and not 1e-4 <= size < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size < 0.1:
        return f"{value:.3g}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}"


def listed(texts: Iterable[str]) -> str:
    """Texts as a person lists them, each once; empty for none.

    Example:
        >>> listed(["drift", "noise", "drift", "lag"])
        'drift, noise and lag'
    """
    *others, last = dict.fromkeys(texts) or ("",)
    return f"{', '.join(others)} and {last}" if others else last
