"""The figure: what the log shows and what the learner can do, along training and for every correction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lab.intervals import interval
from docs.drawing import label, to_svg
from recipes.quantised_rollouts.experiment import VARIANTS
from recipes.quantised_rollouts.tables import Outcome, by_seed, collapsed, summarise
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE

LINES = {"none": (ORANGE, "--"), "tis": (BLUE, "-"), "ppo_is": (GREY, "-.")}
SHAPES = {8: (GREEN, "^"), 4: (BLUE, "o"), 3: (ORANGE, "s"), 2: (GREY, "D")}


def draw(runs: Sequence[Outcome]) -> str:
    """The SVG text; colours follow the reader's light or dark mode. Curves and rewards are those of the fewest bits."""
    bits = min({run["bits"] for run in runs} - {None})

    def panels(figure: Figure) -> None:
        axes = figure.subplot_mosaic([["sampler", "learner"], ["all", "paradox"]], height_ratios=[1, 1.15])
        axes["learner"].sharey(axes["sampler"])
        curves(axes["sampler"], runs, bits, "sampler_reward", "reward, as logged (sampler)")
        curves(axes["learner"], runs, bits, "learner_reward", "reward of the learner itself")
        axes["learner"].legend(loc="center right")
        every_variant(axes["all"], runs)
        paradox(axes["paradox"], runs, bits)

    return to_svg("Quantised rollouts: what is logged and what is learned", 6.2, panels)


def curves(axes: Axes, runs: Sequence[Outcome], bits: int, key: str, title: str) -> None:
    """Mean over seeds with its 95 % interval, along training."""
    shown = [("float rollouts", by_seed(runs, "none", None), (INK, ":"))]
    shown += [(f"{VARIANTS[name]}, INT{bits}", by_seed(runs, name, bits), style) for name, style in LINES.items()]
    for name, mine, (colour, line) in shown:
        if not mine:
            continue
        steps = [row["generation"] for row in next(iter(mine.values()))["curve"]]
        points = [interval([run["curve"][place][key] for run in mine.values()]) for place in range(len(steps))]
        axes.plot(steps, [point.mean for point in points], color=colour, linestyle=line, label=name)
        low, high = zip(*((p.mean - _finite(p.half), p.mean + _finite(p.half)) for p in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    label(axes, "generation", "", title)


def every_variant(axes: Axes, runs: Sequence[Outcome]) -> None:
    """What rounding costs the learner at the end, all corrections and precisions, paired by seed."""
    rows = [row for row in summarise(runs) if row["bits"] is not None and row["to_float"] is not None]
    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    present = [bits for bits in SHAPES if any(row["bits"] == bits for row in rows)]
    for place, bits in enumerate(present):
        mine = [row for row in rows if row["bits"] == bits]
        heights = [names.index(row["variant"]) + 0.22 * (place - (len(present) - 1) / 2) for row in mine]
        colour, shape = SHAPES[bits]
        axes.errorbar(
            [row["to_float"].mean for row in mine],
            heights,
            xerr=[_finite(row["to_float"].half) for row in mine],
            color=colour,
            marker=shape,
            linestyle="none",
            markersize=4,
            label=f"INT{bits}",
        )
    axes.axvline(0.0, color=INK, linestyle=":", linewidth=1.0)
    axes.set_yticks(range(len(names)), [VARIANTS[name] for name in names])
    axes.invert_yaxis()
    axes.legend(loc="center left")
    label(axes, "accuracy minus that with float rollouts", "", "what rounding costs the learner")


def paradox(axes: Axes, runs: Sequence[Outcome], bits: int) -> None:
    """One point a correction that did not collapse: logged reward against the learner's; on the line both agree."""
    rows = [row for row in summarise(runs) if row["bits"] in (bits, None)]
    rows = [row for row in rows if not collapsed(row["accuracy"].mean, row["start_accuracy"].mean)]
    for row in rows:
        colour = INK if row["bits"] is None else SHAPES[bits][0]
        x, y = row["sampler_reward"].mean, row["reward"].mean
        axes.plot(x, y, color=colour, marker="o", markersize=4, linestyle="none")
        name = "float" if row["bits"] is None else VARIANTS[row["variant"]].partition(",")[0]
        axes.annotate(name, (x, y), xytext=(5, -3), textcoords="offset points", fontsize=8)
    ends = [edge for row in rows for edge in (row["sampler_reward"].mean, row["reward"].mean)]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=GREY, linestyle=":", linewidth=1.0)
    axes.margins(x=0.2)
    label(axes, "reward, as logged (sampler)", "reward of the learner", f"INT{bits}: the log against the truth")


def _finite(half: float) -> float:
    return 0.0 if math.isnan(half) else half
