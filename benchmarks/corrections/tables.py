"""From results to tables: means over seeds with 95 % t intervals, paired by seed with what they are compared to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from benchmarks.corrections.mismatches import MISMATCHES
from benchmarks.corrections.results import Result
from benchmarks.corrections.rows import ROWS
from benchmarks.lab.intervals import Interval, interval
from benchmarks.lab.sorting import Task

BySeed = dict[int, Result]
SEEDS = 3
"""What has fewer seeds is in the results file, but in no table."""


def cell(results: Sequence[Result], task: str, mismatch: str, row: str) -> BySeed:
    """The runs of a cell."""
    return {
        line["seed"]: line for line in results if (line["task"], line["mismatch"], line["row"]) == (task, mismatch, row)
    }


def reference_of(mismatch: str) -> str:
    """The mismatch of the runs without any."""
    return "experts" if MISMATCHES[mismatch].experts else "none"


def difference(mine: BySeed, others: BySeed, name: str = "accuracy") -> Interval | None:
    """Mean difference over the seeds that both have; None if there are fewer than :data:`SEEDS`."""
    shared = sorted(set(mine) & set(others))
    return interval([mine[seed][name] - others[seed][name] for seed in shared]) if len(shared) >= SEEDS else None


def cost_of(results: Sequence[Result], task: str, mismatch: str, row: str = "none") -> Interval | None:
    """Accuracy with the mismatch minus that without, at the same seeds."""
    return difference(cell(results, task, mismatch, row), cell(results, task, reference_of(mismatch), "none"))


def gain_of(results: Sequence[Result], task: str, mismatch: str, row: str) -> Interval | None:
    """Accuracy with the correction minus that without, at the same mismatch and seeds."""
    return difference(cell(results, task, mismatch, row), cell(results, task, mismatch, "none"))


def share_back(cost: Interval | None, gain: Interval | None) -> float | None:
    """The share of a cost that a correction gets back; None where the cost is not beyond its interval."""
    if cost is None or gain is None or cost.mean + cost.half >= 0:
        return None
    return -gain.mean / cost.mean


def answer(results: Sequence[Result], task: str) -> str:
    """What each mismatch costs and what gets it back: corrections whose gain leaves out 0, the best three first.

    Beside a gain stands the share of the cost that it is. What is said to hurt loses at least its interval too. The
    mismatches whose cost is within its interval stand together in the last line: there is nothing to get back, and of
    so many gains and losses around 0 some leave it out by chance.
    """
    head = ("mismatch", "cost without a correction", "what gets it back (share of the cost)", "what makes it worse")
    lines, free = [], []
    for name, mismatch in MISMATCHES.items():
        cost = cost_of(results, task, name)
        if cost is None or name == reference_of(name):
            continue
        if cost.mean + cost.half >= 0:
            free.append(mismatch.title)
            continue
        gained = {row: gain for row in ROWS if row != "none" and (gain := _sure(results, task, name, row)) is not None}
        best = sorted((row for row in gained if gained[row].mean > 0), key=lambda row: -gained[row].mean)[:3]
        worse = sorted((row for row in gained if gained[row].mean < 0), key=lambda row: gained[row].mean)[:3]
        back = _named(gained, best, cost) or "nothing beyond its interval"
        lines.append([mismatch.title, _points(cost, bold=True), back, _named(gained, worse, None) or "-"])
    if free:
        lines.append(["; ".join(free), "none beyond its interval", "nothing to get back", "-"])
    return _markdown(head, lines)


def _sure(results: Sequence[Result], task: str, mismatch: str, row: str) -> Interval | None:
    """The gain of a correction if its interval leaves out 0."""
    gain = gain_of(results, task, mismatch, row)
    return None if gain is None or abs(gain.mean) <= gain.half else gain


def _named(gained: Mapping[str, Interval], rows: Sequence[str], cost: Interval | None) -> str:
    parts = []
    for row in rows:
        share = share_back(cost, gained[row])
        parts.append(f"{ROWS[row].title} {_points(gained[row])}" + ("" if share is None else f" ({share:.0%})"))
    return "; ".join(parts)


def collapsed(line: Result) -> bool:
    """Below half of the warm start's accuracy."""
    return bool(line["accuracy"] < line["start_accuracy"] / 2)


def report(results: Sequence[Result]) -> str:
    """All tables, for each task that has results."""
    tasks = [task for task in get_args(Task) if any(line["task"] == task for line in results)]
    parts = []
    for task in tasks:
        parts += [f"## {task}\n", "What the mismatch is, and what it costs:\n", costs(results, task)]
        parts += ["What a correction changes (accuracy against none at the same mismatch; points):\n"]
        parts += [gains(results, task), "Answers right in the end (points; * = collapsed runs):\n", ends(results, task)]
    return "\n".join(parts)


def single_runs(results: Sequence[Result]) -> str:
    """One line a run, for fewer seeds than an interval needs."""
    head = ("mismatch", "correction", "seed", "KL k3", "accuracy at the start", "in the end")

    def place(line: Result) -> tuple[int, int, int]:
        return list(MISMATCHES).index(line["mismatch"]), list(ROWS).index(line["row"]), line["seed"]

    def cells(line: Result) -> list[str]:
        names = [MISMATCHES[line["mismatch"]].title, ROWS[line["row"]].title, str(line["seed"])]
        ends = [f"{line[key] * 100:.1f}" for key in ("start_accuracy", "accuracy")]
        return [*names, f"{line['mismatch_k3']:.2g}", *ends]

    return _markdown(head, [cells(line) for line in sorted(results, key=place)])


def costs(results: Sequence[Result], task: str) -> str:
    """One line a mismatch, of the runs without a correction."""
    head = ("mismatch", "seeds", "KL k3", "ESS token", "ESS sequence", "accuracy", "cost", "logged - true reward")
    measured = ("mismatch_k3", "ess_token", "ess_sequence")
    lines = []
    for name, mismatch in MISMATCHES.items():
        mine = cell(results, task, name, "none")
        if len(mine) < SEEDS:
            continue
        kl, token, sequence = (statistics.mean(line[key] for line in mine.values()) for key in measured)
        rewards = interval([line["sampler_reward"] - line["reward"] for line in mine.values()])
        lines.append(
            [
                mismatch.title,
                str(len(mine)),
                f"{kl:.2g}",
                f"{token:.3f}",
                f"{sequence:.2f}",
                interval([line["accuracy"] for line in mine.values()]).text(1, scale=100),
                "-" if name == reference_of(name) else _points(cost_of(results, task, name)),
                rewards.text(3, sign=True),
            ]
        )  # fmt: skip
    return _markdown(head, lines)


def gains(results: Sequence[Result], task: str) -> str:
    """Corrections against mismatches; bold where the interval leaves out 0."""
    return _grid(
        results, task, lambda mismatch, row: _points(gain_of(results, task, mismatch, row), bold=True), skip="none"
    )


def ends(results: Sequence[Result], task: str) -> str:
    """Accuracy in the end, and collapsed runs."""

    def text(mismatch: str, row: str) -> str:
        mine = cell(results, task, mismatch, row)
        if len(mine) < SEEDS:
            return ""
        stars = "*" * sum(map(collapsed, mine.values()))
        return f"{interval([line['accuracy'] for line in mine.values()]).mean * 100:.1f}{stars}"

    return _grid(results, task, text)


def _grid(results: Sequence[Result], task: str, text: Callable[[str, str], str], skip: str = "") -> str:
    counts = Counter((line["mismatch"], line["row"]) for line in results if line["task"] == task)
    whole = {cell for cell, count in counts.items() if count >= SEEDS and cell[1] != skip}
    present = [name for name in MISMATCHES if name != "experts" and any(name == mismatch for mismatch, _ in whole)]
    rows = [row for row in ROWS if any(row == one for _, one in whole)]
    head = ("correction", *(MISMATCHES[name].title for name in present))
    return _markdown(head, [[ROWS[row].title, *(text(name, row) for name in present)] for row in rows])


def _points(found: Interval | None, *, bold: bool = False) -> str:
    """In points of accuracy."""
    if found is None:
        return ""
    text = found.text(1, sign=True, scale=100)
    sure = abs(found.mean) > found.half
    return f"**{text}**" if bold and sure else text


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(rows) + "\n"
