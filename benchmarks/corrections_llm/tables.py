"""The table of the real-model runs, and how many seeds a difference would need."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lab.intervals import interval
from trl_offpolicy.functional.intervals import t_quantile_975

Result = Mapping[str, Any]
TITLES = {
    "none": "no correction", "token_tis": "token TIS, cap 2", "geometric_tis": "geometric mask + token TIS",
    "icepop": "IcePop, [0.5, 5]", "sequence_tis": "sequence TIS, cap 5",
}  # fmt: skip
HEADER = (
    "rollouts", "correction", "seeds", "reward of the learner", "against none", "against float", "greedy",
    "logged, last quarter", "KL k3", "ESS token", "dropped",
)  # fmt: skip
MATTERS = 0.02
"""The difference in held-out reward that would change the advice."""


def report(results: Sequence[Result]) -> str:
    """The table as Markdown, and below it the power of each comparison."""
    cells = sorted({(one["rounding"], one["row"]) for one in results}, key=_order)
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    lines += [f"| {' | '.join(_line(results, *cell))} |" for cell in cells]
    powers = [power(results, *cell) for cell in cells if cell[1] != "none"]
    return "\n".join([*lines, "", *(text for text in powers if text), ""])


def _order(cell: tuple[str, str]) -> tuple[bool, str, int]:
    return cell[0] != "float", cell[0], list(TITLES).index(cell[1])


def by_seed(results: Sequence[Result], rounding: str, row: str) -> dict[int, Result]:
    """The runs of a cell."""
    return {one["seed"]: one for one in results if (one["rounding"], one["row"]) == (rounding, row)}


def differences(mine: Mapping[int, Result], others: Mapping[int, Result]) -> list[float]:
    """Held-out reward minus that of the other cell, at the seeds that both have."""
    return [mine[seed]["reward"] - others[seed]["reward"] for seed in sorted(set(mine) & set(others))]


def _line(results: Sequence[Result], rounding: str, row: str) -> list[str]:
    mine = by_seed(results, rounding, row)

    def mean(key: str, digits: int = 3) -> str:
        return interval([one[key] for one in mine.values()]).text(digits)

    def against(other: tuple[str, str]) -> str:
        found = differences(mine, by_seed(results, *other))
        return "-" if other == (rounding, row) or not found else interval(found).text(3, sign=True)

    dropped = statistics.mean(one["dropped"] for one in mine.values())
    return [
        rounding, TITLES[row], str(len(mine)), mean("reward"), against((rounding, "none")), against(("float", "none")),
        mean("greedy"), mean("logged_last"), mean("kl_k3", 4), mean("ess"), f"{dropped:.1%}",
    ]  # fmt: skip


def power(results: Sequence[Result], rounding: str, row: str) -> str:
    """What the seeds at hand could have shown, and how many would show :data:`MATTERS`; empty with fewer than two."""
    found = differences(by_seed(results, rounding, row), by_seed(results, rounding, "none"))
    if len(found) < 2:
        return ""
    spread = statistics.stdev(found)
    half = t_quantile_975(len(found) - 1) * spread / math.sqrt(len(found))
    return (
        f"{rounding}, {TITLES[row]} against none: {len(found)} seeds show a difference beyond {half:.3f}; "
        f"{MATTERS:g} would need {seeds_for(spread)} seeds, to be seen four times in five."
    )


def seeds_for(spread: float, difference: float = MATTERS) -> int:
    """Seeds with which a true ``difference`` is seen four times in five: its 95 % t interval leaves out 0.

    Example:
        >>> seeds_for(0.02), seeds_for(0.04)
        (10, 34)
    """
    power = statistics.NormalDist().inv_cdf(0.8)
    count = 2
    while (t_quantile_975(count - 1) + power) * spread / math.sqrt(count) > difference:
        count += 1
    return count
