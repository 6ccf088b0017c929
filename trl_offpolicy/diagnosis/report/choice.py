"""The report's table on ``offpolicy: auto``: what each candidate was estimated to miss, and which were in use when."""

from __future__ import annotations

from typing import NamedTuple

from trl_offpolicy.run_folder.layout import STEP
from trl_offpolicy.run_folder.run_data import MetricsLog
from trl_offpolicy.stats import PREFIX

_AUTO, _CHOSEN = f"{PREFIX}auto/", "/chosen"
_NUMBERS = ("missed", "missed_ci95", "cut_mass", "second_moment", "ess", "ess_ci95")


class Candidate(NamedTuple):
    """A correction to choose from: the steps in which it was in use, and its numbers in the last logged row."""

    name: str
    steps: str
    missed: float | None
    missed_ci95: float | None
    cut_mass: float | None
    second_moment: float | None
    ess: float | None
    ess_ci95: float | None


def choice_table(log: MetricsLog) -> tuple[Candidate, ...]:
    """The candidates in the order of the log; empty if the run did not choose."""
    rows = [row for row in log.rows if any(key.startswith(_AUTO) for key in row)]
    if not rows:
        return ()
    last = rows[-1]
    names = [key.removeprefix(_AUTO).removesuffix(_CHOSEN) for key in last if _is_choice(key)]
    return tuple(
        Candidate(name, _spans(name, rows), *(last.get(f"{_AUTO}{name}/{number}") for number in _NUMBERS))
        for name in names
    )


def _is_choice(key: str) -> bool:
    return key.startswith(_AUTO) and key.endswith(_CHOSEN)


def _spans(name: str, rows: list[dict[str, float]]) -> str:
    """The steps in which a candidate was in use, as ``1-4, 9``; a dash if it never was."""
    spans: list[list[int]] = []
    before = False
    for row in rows:
        step, used = int(row[STEP]), row.get(f"{_AUTO}{name}{_CHOSEN}") == 1.0
        if used and before:
            spans[-1][1] = step
        elif used:
            spans.append([step, step])
        before = used
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans) or "–"
