"""The figure: what a lag costs, along training, and how far the stale rollouts are off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.drawing import label, to_svg
from recipes.async_lag.lag import VARIANTS
from recipes.async_lag.tables import Outcome, lag_name, of_cell, summarise
from recipes.quantised_rollouts.tables import interval
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE

STYLES = {
    "naive": (ORANGE, "--", "s"),
    "decoupled": (BLUE, "-", "o"),
    "recomputed": (GREY, ":", "D"),
    "a3po": (GREEN, "-.", "^"),
}


def draw(runs: Sequence[Outcome]) -> str:
    """The SVG text; the curves are those of the largest bounded lag (of the unbounded one where there is no other)."""
    lag = max((run["lag"] for run in runs if run["lag"] is not None), default=None)

    def panels(figure: Figure) -> None:
        axes = figure.subplot_mosaic([["accuracy", "accuracy"], ["curve", "ess"]], height_ratios=[1.1, 1])
        by_lag(axes["accuracy"], runs, "accuracy", "accuracy of the learner at the end, by lag")
        axes["accuracy"].legend(loc="lower left")
        curves(axes["curve"], runs, lag)
        by_lag(axes["ess"], runs, "ess_sequence", "sequence ESS of proximal/mu, by lag")

    return to_svg("Naive against decoupled PPO by lag", 5.6, panels)


def by_lag(axes: Axes, runs: Sequence[Outcome], name: str, title: str) -> None:
    """Mean over seeds with its 95 % interval, a category a lag; the dotted line is the synchronous run's mean."""
    rows = summarise(runs)
    lags = list(dict.fromkeys(row["lag_bound"] for row in rows))
    shown = [variant for variant in VARIANTS if any(row["variant"] == variant for row in rows)]
    for place, variant in enumerate(shown):
        mine = [row for row in rows if row["variant"] == variant]
        colour, line, marker = STYLES[variant]
        shift = 0.06 * (place - (len(shown) - 1) / 2)
        axes.errorbar(
            [lags.index(row["lag_bound"]) + shift for row in mine],
            [row[name].mean for row in mine],
            yerr=[_finite(row[name].half) for row in mine],
            color=colour, linestyle=line, marker=marker, markersize=4, label=VARIANTS[variant],
        )  # fmt: skip
    sync = [row[name].mean for row in rows if (row["variant"], row["lag_bound"]) == ("naive", 0)]
    for level in sync:
        axes.axhline(level, color=INK, linestyle=":", linewidth=1.0)
    axes.set_xticks(range(len(lags)), [lag_name(lag) for lag in lags])
    label(axes, "lag, weight versions", "", title)


def curves(axes: Axes, runs: Sequence[Outcome], lag: int | None) -> None:
    """The learner's sampled accuracy along training."""
    cells: list[tuple[str, dict[int, Outcome], Any]] = [("synchronous", of_cell(runs, "naive", 0), (INK, ":"))]
    cells += [(VARIANTS[name], of_cell(runs, name, lag), STYLES[name][:2]) for name in VARIANTS]
    for name, mine, (colour, line) in cells:
        if not mine:
            continue
        steps = [row["generation"] for row in next(iter(mine.values()))["curve"]]
        points = [
            interval([run["curve"][place]["learner_accuracy"] for run in mine.values()]) for place in range(len(steps))
        ]
        axes.plot(steps, [point.mean for point in points], color=colour, linestyle=line, label=name)
        low, high = zip(*((p.mean - _finite(p.half), p.mean + _finite(p.half)) for p in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    label(axes, "training step", "", f"accuracy along training, lag {lag_name(lag)}")


def _finite(half: float) -> float:
    return 0.0 if math.isnan(half) else half
