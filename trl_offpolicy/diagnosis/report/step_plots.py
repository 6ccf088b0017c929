"""Draws figures over training steps, with 95 % intervals if they were logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_offpolicy.diagnosis.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Panel,
    add_legend,
    figure_style,
    new_figure,
    spread_axis,
    to_svg,
)
from trl_offpolicy.run_folder.run_data import MetricsLog, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNNING_STEPS = 10
"""Window of the running mean, in logged steps."""
FEW_STEPS = 40
"""Up to this many steps, each step gets a dot."""


@dataclass(frozen=True)
class Line:
    """One metric in a step figure. ``{group}`` in ``key`` is mismatch or total."""

    key: str
    label: str
    colour: str
    style: str = "-"
    optional: bool = False
    running_mean: bool = False
    bounds: tuple[float | None, float | None] = (None, None)
    """Smallest and largest value that the quantity can have; its interval is drawn between them."""
    width: float = 1.6


@dataclass(frozen=True)
class StepFigure:
    """A figure over training steps; ``reference`` is the value at which nothing is off-policy."""

    title: str
    ylabel: str
    lines: tuple[Line, ...]
    caption: str
    reference: float | None = None


_BEFORE, _AFTER = "offpolicy/{group}/", "offpolicy/kept/"
_POSITIVE, _FRACTION = (0.0, None), (0.0, 1.0)
_LEAST_CHI2 = (-1.0, None)
"""Of an estimate: it is a mean square minus 1."""

STEP_FIGURES: tuple[StepFigure, ...] = (
    StepFigure(
        "Reward",
        "reward",
        (
            Line(
                "offpolicy/rollout/reward_reweighted",
                "reweighted to the trainer",
                ORANGE,
                "--",
                optional=True,
                width=3.0,
            ),
            Line("reward", "reward", BLUE, running_mean=True),
        ),
        "Mean reward of the sampled completions, for each step (thin) and as the mean of the last "
        f"{RUNNING_STEPS} logged steps (thick). The reward is the sampler's, not the trainer's.",
    ),
    StepFigure(
        "KL between sampler and trainer, estimate k3",
        "nats per token",
        (
            Line(_BEFORE + "kl_k3", "k3, all tokens", BLUE, bounds=_POSITIVE),
            Line(_AFTER + "kl_k3", "k3, kept tokens", ORANGE, "--", bounds=_POSITIVE),
        ),
        "KL(sampler||trainer) in nats per token, mean over the tokens of a step. Dashed: on the tokens that the "
        "correction kept. k3 is never negative.",
    ),
    StepFigure(
        "KL between sampler and trainer, estimate k1",
        "nats per token",
        (
            Line(_BEFORE + "kl_k1", "k1, all tokens", BLUE),
            Line(_AFTER + "kl_k1", "k1, kept tokens", ORANGE, "--"),
        ),
        "Another estimate of the same number, which scatters more and may be negative.",
        reference=0.0,
    ),
    StepFigure(
        "Chi-square divergence of tokens",
        "chi2",
        (
            Line(_BEFORE + "chi2_token", "all tokens", BLUE, bounds=_LEAST_CHI2),
            Line(_AFTER + "chi2_token", "kept tokens", ORANGE, "--", bounds=_LEAST_CHI2),
        ),
        "Mean squared ratio minus 1, no unit. 0 means that both policies are the same. It estimates the variance of "
        "the raw importance weights of tokens. With few samples it scatters around 0 and may be negative.",
        reference=0.0,
    ),
    StepFigure(
        "Chi-square divergence of sequences",
        "chi2",
        (
            Line(_BEFORE + "chi2_sequence", "all sequences", BLUE, bounds=_LEAST_CHI2),
            Line(_AFTER + "chi2_sequence", "kept sequences", ORANGE, "--", bounds=_LEAST_CHI2),
        ),
        "The same for whole sequences, whose ratios are products: it grows with the length.",
        reference=0.0,
    ),
    StepFigure(
        "Effective sample size",
        "fraction",
        (
            Line("offpolicy/weight/ess_token", "raw weights", BLUE, bounds=_FRACTION),
            Line("offpolicy/weight_applied/ess_token", "as applied", ORANGE, "--", bounds=_FRACTION),
            Line(_BEFORE + "ess_sequence", "products over responses", GREEN, ":", bounds=_FRACTION),
        ),
        "(sum w)^2 / (n sum w^2) over tokens, a fraction. At 1 all weights are equal. At 0.5 the weighted mean is as "
        "uncertain as one over half as many tokens with equal weights. Dashed: after cap and normalisation. Dotted: "
        "over responses, of the uncapped products of their ratios, which falls with the length.",
        reference=1.0,
    ),
    StepFigure(
        "Perplexity ratio",
        "trainer / sampler",
        (
            Line(_BEFORE + "ppl_ratio", "before", BLUE, bounds=_POSITIVE),
            Line(_AFTER + "ppl_ratio", "kept tokens", ORANGE, "--", bounds=_POSITIVE),
        ),
        "Mean over responses of trainer perplexity / sampler perplexity, no unit. At 1 both find the text equally "
        "likely. Above 1 the trainer finds the sampled text less likely than the sampler did.",
        reference=1.0,
    ),
    StepFigure(
        "Dropped and truncated",
        "fraction",
        (
            Line("offpolicy/keep/dropped_token_fraction", "tokens dropped", BLUE, bounds=_FRACTION),
            Line("offpolicy/keep/dropped_sequence_fraction", "sequences dropped", ORANGE, "--", bounds=_FRACTION),
            Line("offpolicy/weight/truncated_fraction", "weights truncated", GREEN, ":", bounds=_FRACTION),
        ),
        "Share of the trainable tokens and of the sequences that the correction left out, and share of the "
        "weights that it cut back to its cap.",
    ),
)


def draw_step_figures(log: MetricsLog) -> list[Panel]:
    """Draw every step figure of the run. The caption names metrics that were not logged."""
    return [_draw_step_figure(log, figure) for figure in STEP_FIGURES]


def _draw_step_figure(log: MetricsLog, figure: StepFigure) -> Panel:
    lines = [replace(line, key=line.key.format(group=log.ratio_group)) for line in figure.lines]
    series = {line: log.series(line.key) for line in lines}
    drawn = {line: data for line, data in series.items() if data.values}
    bands = {line: interval_band(log, line.key, line.bounds) for line in drawn}
    filled = next((line for line, band in bands.items() if band is not None), None)
    shaded = " Shaded: 95 % interval, clustered by prompt." if filled is not None else ""
    if sum(band is not None for band in bands.values()) > 1:
        shaded += " Thin lines: those of the other curves."
    caption = f"{figure.caption}{shaded}{_left_out(series)}"
    if not drawn:
        return Panel(figure.title, "", caption)
    from matplotlib.ticker import MaxNLocator

    with figure_style():
        canvas, axes = new_figure()
        if figure.reference is not None:
            axes.axhline(figure.reference, color=GREY, linewidth=0.8)
        for line, data in drawn.items():
            draw_line(axes, line, data, bands[line], fill=line is filled)
        axes.set_xlabel("step")
        axes.set_ylabel(figure.ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        caption += spread_axis(axes, [value for data in drawn.values() for value in data.values])
        add_legend(canvas)
        return Panel(figure.title, to_svg(canvas, figure.title), caption)


class Band(NamedTuple):
    """The 95 % interval of a metric at the steps that logged one."""

    steps: list[int]
    low: list[float]
    high: list[float]


def interval_band(log: MetricsLog, key: str, bounds: tuple[float | None, float | None] = (None, None)) -> Band | None:
    """``key`` minus and plus ``<key>_ci95``, cut at the smallest and largest value it can have (None = there is none).

    Returns None if no step has both.
    """
    both = [(int(row["step"]), row[key], row[f"{key}_ci95"]) for row in log.rows if f"{key}_ci95" in row and key in row]
    found = [(step, value, half) for step, value, half in both if math.isfinite(value) and math.isfinite(half)]
    if not found:
        return None
    least, most = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
    low, high = [max(v - h, least) for _, v, h in found], [min(v + h, most) for _, v, h in found]
    return Band([s for s, _, _ in found], low, high)


def draw_line(axes: Axes, line: Line, data: Series, band: Band | None, *, fill: bool = True) -> None:
    """Draw a metric, with a dot for each step if there are few, and its band, filled or only its edges."""
    dots = "." if len(data.steps) <= FEW_STEPS else ""
    if line.running_mean:
        mean, label = running_mean(data.values, RUNNING_STEPS), f"{line.label}, mean of {RUNNING_STEPS} steps"
        axes.plot(
            data.steps, data.values, color=line.colour, linewidth=1.0, marker=dots, label=f"{line.label}, each step"
        )
        axes.plot(data.steps, mean, color=GREY, linewidth=2.8, zorder=1.9, label=label)
    else:
        style: dict[str, Any] = {"color": line.colour, "linewidth": line.width, "marker": dots, "label": line.label}
        axes.plot(data.steps, data.values, line.style, **style)
    if band is not None and fill:
        axes.fill_between(band.steps, band.low, band.high, color=line.colour, alpha=0.18, linewidth=0)
    elif band is not None:
        for edge in (band.low, band.high):
            axes.plot(band.steps, edge, color=line.colour, linewidth=0.7, alpha=0.8)


def _left_out(series: dict[Line, Series]) -> str:
    missing = [line.key for line, data in series.items() if not (data.values or data.nonfinite or line.optional)]
    nonfinite = sum(data.nonfinite for data in series.values())
    text = f" Not logged: {', '.join(missing)}." if missing else ""
    return text + (f" {nonfinite} non-finite value(s) left out." if nonfinite else "")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the ones before it, ``window`` in all; fewer at the start.

    Example:
        >>> running_mean([1.0, 3.0, 8.0], window=2)
        [1.0, 2.0, 5.5]
    """
    ends = range(1, len(values) + 1)
    return [sum(part) / len(part) for part in (values[max(0, end - window) : end] for end in ends)]
