"""The figure: what the log shows and what the learner can do, along training and for every correction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.drawing import label, to_svg
from recipes.quantised_rollouts.experiment import VARIANTS
from recipes.quantised_rollouts.tables import Interval, Outcome, by_seed, interval, summarise
from trl_offpolicy.diagnosis.plots import BLUE, GREEN, GREY, INK, ORANGE

LINES = {"none": (ORANGE, "--"), "tis": (BLUE, "-"), "ppo_is": (GREY, "-.")}
SHAPES = {8: (GREEN, "^"), 4: (BLUE, "o"), 3: (ORANGE, "s"), 2: (GREY, "D")}


def draw(runs: Sequence[Outcome]) -> str:
    """The SVG text; colours follow the reader's light or dark mode."""
    bits = max({run["bits"] for run in runs} - {None}, key=lambda one: (one == 4, one))

    def panels(figure: Figure) -> None:
        axes = figure.subplot_mosaic([["sampler", "learner"], ["all", "paradox"]], height_ratios=[1, 1.15])
        curves(axes["sampler"], runs, bits, "sampler_reward", "reward, as logged (sampler)")
        curves(axes["learner"], runs, bits, "learner_reward", "reward of the learner itself")
        axes["learner"].legend(loc="best")
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
    """The learner's accuracy at the end, all corrections and precisions."""
    rows, names = summarise(runs), [name for name in VARIANTS if any(run["variant"] == name for run in runs)]
    present = [bits for bits in SHAPES if any(row["bits"] == bits for row in rows)]
    for place, bits in enumerate(present):
        mine = [row for row in rows if row["bits"] == bits]
        heights = [names.index(row["variant"]) + 0.2 * (place - (len(present) - 1) / 2) for row in mine]
        colour, shape = SHAPES[bits]
        _dots(axes, [row["accuracy"] for row in mine], heights, colour, shape, f"INT{bits}")
    reference = next((row["accuracy"].mean for row in rows if row["bits"] is None), None)
    if reference is not None:
        axes.axvline(reference, color=INK, linestyle=":", linewidth=1.0, label="float rollouts")
    axes.set_yticks(range(len(names)), [VARIANTS[name] for name in names])
    axes.invert_yaxis()
    axes.legend(loc="best")
    label(axes, "sampled exact answers", "", "accuracy of the learner, all corrections")


def _dots(axes: Axes, values: Sequence[Interval], heights: Sequence[float], colour: str, shape: str, name: str) -> None:
    halves = [_finite(value.half) for value in values]
    means = [value.mean for value in values]
    axes.errorbar(means, heights, xerr=halves, color=colour, marker=shape, linestyle="none", markersize=4, label=name)


def paradox(axes: Axes, runs: Sequence[Outcome], bits: int) -> None:
    """One point a correction: logged reward against the learner's; on the line both agree."""
    rows = [row for row in summarise(runs) if row["bits"] in (bits, None)]
    for row in rows:
        colour = INK if row["bits"] is None else SHAPES[bits][0]
        x, y = row["sampler_reward"], row["reward"]
        axes.errorbar(x.mean, y.mean, _finite(y.half), _finite(x.half), color=colour, marker="o", markersize=4)
        name = "float" if row["bits"] is None else VARIANTS[row["variant"]].partition(",")[0]
        axes.annotate(name, (x.mean, y.mean), xytext=(5, -9), textcoords="offset points", fontsize=7.5)
    ends = [edge for row in rows for edge in (row["sampler_reward"].mean, row["reward"].mean)]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=GREY, linestyle=":", linewidth=1.0)
    label(
        axes, "reward, as logged (sampler)", "reward of the learner", f"INT{bits}: below the line the log is too kind"
    )


def _finite(half: float) -> float:
    return 0.0 if math.isnan(half) else half
