"""The figure: bias against variance at four lengths, and what the best of each kind gains along the lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.frontier.families import FAMILIES, Kind
from benchmarks.frontier.results import Line
from docs.drawing import label, ticks, to_svg
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE

STYLES: dict[Kind, tuple[str, str]] = {
    "none": (INK, "*"),
    "token": (BLUE, "o"),
    "intermediate": (GREEN, "^"),
    "sequence": (ORANGE, "D"),
    "bounded sequence": (ORANGE, "s"),
    "mask": (GREY, "x"),
}
TITLES = {"int4": "4-bit sampler", "lag": "sampler 4 steps behind"}
HEIGHT = 7.2


def draw(lines: Sequence[Line]) -> str:
    """The SVG text; colours follow the reader's light or dark mode."""
    return to_svg("Bias, variance and progress of off-policy estimators by length", HEIGHT, lambda f: panels(f, lines))


def panels(figure: Figure, lines: Sequence[Line]) -> None:
    """A row of scatter plots for each sampler, and below them the progress along the lengths."""
    samplers = list(dict.fromkeys(line["sampler"] for line in lines if line["line"] == "mismatch"))
    lengths = sorted({line["length"] for line in lines if line["line"] == "family"})
    shown = lengths if len(lengths) < 5 else [lengths[k] for k in (0, 2, -3, -1)]
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.75, 1])
    grid = upper.subplots(len(samplers), len(shown), squeeze=False, sharey=True, sharex=True)
    for row, sampler in enumerate(samplers):
        for column, length in enumerate(shown):
            scatter(grid[row][column], lines, sampler, length)
            label(grid[row][column], "", "", f"T = {length}")
        grid[row][0].set_ylabel(f"{TITLES[sampler]}\ntr Var / |J|²")
    for axes in grid[-1]:
        axes.set_xlabel("|bias| / |J|")
    below = lower.subplots(1, len(samplers), squeeze=False, sharey=True)[0]
    for axes, sampler in zip(below, samplers, strict=True):
        along(axes, lines, sampler, lengths)
    handles, names = grid[0][0].get_legend_handles_labels()
    lower.legend(handles, names, loc="outside lower center", ncols=6, handlelength=1.0)


def scatter(axes: Axes, lines: Sequence[Line], sampler: str, length: int) -> None:
    """One point a family."""
    rows = [
        line for line in lines if line["line"] == "family" and (line["sampler"], line["length"]) == (sampler, length)
    ]
    for kind, (colour, marker) in STYLES.items():
        mine = [row for row in rows if row["kind"] == kind]
        x = [math.sqrt(max(row["bias_sq"], 0.0)) for row in mine]
        y = [row["variance"] for row in mine]
        axes.plot(x, y, color=colour, marker=marker, linestyle="none", markersize=4, label=kind)
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())


def along(axes: Axes, lines: Sequence[Line], sampler: str, lengths: Sequence[int]) -> None:
    """Progress of the best of each kind over that of no correction, along the lengths."""
    rows = [line for line in lines if line["line"] == "family" and line["sampler"] == sampler]
    size = middle_size(rows[0])
    for kind, (colour, marker) in STYLES.items():
        points = []
        for length in lengths:
            here = {row["family"]: row[f"P_{size}"] for row in rows if row["length"] == length}
            best = max(value for name, value in here.items() if FAMILIES[name].kind == kind)
            points.append(best / here["none"] if here["none"] > 0 else math.nan)
        axes.plot(lengths, points, color=colour, marker=marker, markersize=3)
    ticks(axes, lengths)
    label(axes, "T, tokens of an answer", "P of the best / P of none", f"{TITLES[sampler]}, {size} answers a step")


def middle_size(row: Line) -> int:
    """Answers of the middle one of the step sizes at which P is known."""
    sizes = sorted(int(key[2:]) for key in row if key.startswith("P_") and key[2:].isdigit())
    return sizes[len(sizes) // 2]
