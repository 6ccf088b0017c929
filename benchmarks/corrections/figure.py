"""The figure: what each mismatch costs without a correction, and what is left of the cost with three of them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.corrections.mismatches import MISMATCHES
from benchmarks.corrections.results import Result
from benchmarks.corrections.rows import ROWS
from benchmarks.corrections.tables import cost_of, gain_of, reference_of
from docs.drawing import label, to_svg
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE

SHOWN = {"none": (ORANGE, "o"), "token_tis": (BLUE, "s"), "geometric_tis": (GREEN, "^"), "opsm": (GREY, "D")}
MAPPED = "int3"


def draw(results: Sequence[Result], task: str = "sorting") -> str:
    """The SVG text."""

    def panels(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        by_mismatch(left, results, task)
        by_correction(right, results, task)

    return to_svg("What a mismatch costs, and what a correction gets back", 4.8, panels)


def by_mismatch(axes: Axes, results: Sequence[Result], task: str) -> None:
    """Accuracy against runs without a mismatch, in points."""
    names = [n for n in MISMATCHES if n != reference_of(n) and cost_of(results, task, n) is not None]
    for place, (row, (colour, marker)) in enumerate(SHOWN.items()):
        found = [(height, cost_of(results, task, name, row)) for height, name in enumerate(names)]
        points = [(height + 0.18 * (place - 1.5), one) for height, one in found if one is not None]
        axes.errorbar(
            [one.mean * 100 for _, one in points],
            [height for height, _ in points],
            xerr=[one.half * 100 for _, one in points],
            color=colour, marker=marker, markersize=4, linestyle="none", label=ROWS[row].title,
        )  # fmt: skip
    axes.axvline(0.0, color=INK, linestyle=":", linewidth=1.0)
    axes.set_yticks(range(len(names)), [MISMATCHES[name].title for name in names])
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    label(axes, "points, against no mismatch", "", "What it costs")


def by_correction(axes: Axes, results: Sequence[Result], task: str) -> None:
    """Accuracy against no correction, at the mismatch that costs much and at the stalest one."""
    for place, (mismatch, colour, marker) in enumerate(((MAPPED, ORANGE, "o"), ("lag4", BLUE, "s"))):
        rows = [row for row in ROWS if row != "none"]
        found = [(height, gain_of(results, task, mismatch, row)) for height, row in enumerate(rows)]
        points = [(height + 0.25 * (place - 0.5), one) for height, one in found if one is not None]
        axes.errorbar(
            [one.mean * 100 for _, one in points],
            [height for height, _ in points],
            xerr=[one.half * 100 for _, one in points],
            color=colour, marker=marker, markersize=4, linestyle="none", label=MISMATCHES[mismatch].title,
        )  # fmt: skip
    axes.axvline(0.0, color=INK, linestyle=":", linewidth=1.0)
    axes.set_yticks(range(len(rows)), [ROWS[row].title for row in rows])
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    label(axes, "points, against none", "", "What comes back")
