"""The figure: KL and flips by format and part of the engine, effective sample size and KL by length."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.dtype_ladder.formats import FORMATS
from benchmarks.dtype_ladder.results import Line
from docs.drawing import label, ticks, to_svg
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE

HEIGHT = 5.6
PARTS = {"weights": (BLUE, "o"), "activations": (GREEN, "^"), "kv": (GREY, "v"), "all": (ORANGE, "s")}
LINES = {
    "tf32": (GREY, ":", "v"), "fp16": (GREY, "--", "^"), "bf16": (GREEN, "-", "o"), "int8": (BLUE, "--", "s"),
    "fp8 e4m3": (BLUE, "-", "D"), "fp8 e5m2": (ORANGE, "--", "o"), "int4": (ORANGE, "-", "s"),
}  # fmt: skip


def draw(lines: Sequence[Line]) -> str:
    """The SVG text; colours follow the reader's light or dark mode."""
    return to_svg("Mismatch by number format", HEIGHT, lambda figure: panels(figure, lines))


def panels(figure: Figure, lines: Sequence[Line]) -> None:
    """Formats above, lengths below."""
    rows = [line for line in lines if line["line"] == "mismatch"]
    small = [row for row in rows if row["model"] == "walk"]
    longest = max(row["length"] for row in small)
    upper, lower = figure.subfigures(2, 1)
    left, right = upper.subplots(1, 2)
    by_format(left, small, rows, "kl_k3", longest)
    label(left, "", "", f"KL(engine || trainer), nats a token, T = {longest}")
    by_format(right, small, rows, "flips", longest)
    label(right, "", "", "share of positions with another likeliest token")
    upper.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    left, right = lower.subplots(1, 2)
    by_length(left, small, "ess_sequence")
    label(left, "T, tokens of an answer", "", "ESS of whole answers, all parts rounded")
    by_length(right, small, "kl_k3")
    right.set_yscale("log")
    label(right, "T, tokens of an answer", "", "KL, nats a token, all parts rounded")
    lower.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7)


def by_format(axes: Axes, small: Sequence[Line], rows: Sequence[Line], key: str, length: int) -> None:
    """A point for each part of the engine; crosses are the language model with rounded weights."""
    names = [name for name in FORMATS if name != "fp32"]
    for place, (part, (colour, marker)) in enumerate(PARTS.items()):
        mine = {r["format"]: r[key] for r in small if r["where"] == part and r["length"] == length}
        shown = [(k + 0.12 * (place - 1.5), mine[n]) for k, n in enumerate(names) if mine.get(n, 0) > 0]
        axes.plot(*zip(*shown, strict=True), color=colour, marker=marker, linestyle="none", markersize=4, label=part)
    real = [row for row in rows if row["model"] != "walk" and row["where"] == "weights"]
    end = max((row["length"] for row in real), default=0)
    crosses = [(names.index(r["format"]) + 0.3, r[key]) for r in real if r["length"] == end and r["format"] in names]
    crosses = [(x, y) for x, y in crosses if y > 0]
    if crosses:
        title = f"{real[0]['model']}, weights"
        axes.plot(*zip(*crosses, strict=True), color=INK, marker="x", linestyle="none", markersize=5, label=title)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), [name.replace("fp8 ", "") for name in names], fontsize=8)


def by_length(axes: Axes, small: Sequence[Line], key: str) -> None:
    """A line for each format with everything rounded."""
    for name, (colour, line, marker) in LINES.items():
        mine = sorted((r["length"], r[key]) for r in small if (r["format"], r["where"]) == (name, "all"))
        if mine:
            axes.plot(*zip(*mine, strict=True), color=colour, linestyle=line, marker=marker, markersize=3, label=name)
    ticks(axes, sorted({row["length"] for row in small}))
