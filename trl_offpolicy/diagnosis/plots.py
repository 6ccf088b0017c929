"""Figures over training steps as inline SVG, and the style that all figures of the report share."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trl_offpolicy.diagnosis.run_data import MetricsLog, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct for colour-blind readers. The page redefines the colours for dark screens.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#7a828c"
INK = "#1b1f24"
_PAGE_COLOURS = {BLUE: "var(--blue)", ORANGE: "var(--orange)", GREEN: "var(--green)", GREY: "var(--grey)"}

RUNNING_STEPS = 10
"""Window of the running mean, in logged steps."""
WIDE_SPAN = 30.0
"""A log axis shows positive values whose largest is this many times the smallest, and a symmetric log axis
(linear around 0) values whose largest is this many times the median in size."""
FEW_STEPS = 40
"""Up to this many steps each one gets a dot."""


@dataclass(frozen=True)
class Panel:
    """A figure of the report: title, SVG text (empty where there is nothing to draw) and caption."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Line:
    """One metric in a step figure. ``{group}`` in ``key`` is mismatch or total."""

    key: str
    label: str
    colour: str
    style: str = "-"
    optional: bool = False
    running_mean: bool = False


@dataclass(frozen=True)
class StepFigure:
    """A figure over training steps; ``reference`` is the value at which nothing is off-policy."""

    title: str
    ylabel: str
    lines: tuple[Line, ...]
    caption: str
    reference: float | None = None


_BEFORE, _AFTER = "offpolicy/{group}/", "offpolicy/kept/"

STEP_FIGURES: tuple[StepFigure, ...] = (
    StepFigure(
        "Reward",
        "reward",
        (
            Line("reward", "reward", BLUE, running_mean=True),
            Line(
                "offpolicy/rollout/reward_reweighted",
                "reweighted to the trainer",
                ORANGE,
                "--",
                optional=True,
            ),
        ),
        "Mean reward of the sampled completions. The thick line is the mean of the last "
        f"{RUNNING_STEPS} logged steps. The reward is the sampler's, not the trainer's.",
    ),
    StepFigure(
        "KL between sampler and trainer",
        "nats a token",
        (
            Line(_BEFORE + "kl_k3", "k3 before", BLUE),
            Line(_BEFORE + "kl_k1", "k1 before", GREEN),
            Line(_AFTER + "kl_k3", "k3 kept tokens", ORANGE, "--"),
            Line(_AFTER + "kl_k1", "k1 kept tokens", GREY, ":"),
        ),
        "KL(sampler||trainer) in nats a token. k1 and k3 estimate the same number; k1 scatters more and may "
        "be negative, k3 may not. Dashed and dotted: on the tokens that the correction kept.",
    ),
    StepFigure(
        "Chi-square divergence",
        "chi2",
        (
            Line(_BEFORE + "chi2_sequence", "sequence before", BLUE),
            Line(_BEFORE + "chi2_token", "token before", GREEN),
            Line(_AFTER + "chi2_sequence", "sequence, kept", ORANGE, "--"),
            Line(_AFTER + "chi2_token", "token, kept", GREY, ":"),
        ),
        "Mean squared ratio minus 1, no unit; 0 = same policy. It estimates the variance of the raw "
        "importance weights of single tokens, and of whole sequences (product of the ratios), which grows "
        "with the length; with few samples it scatters around 0 and may be negative.",
    ),
    StepFigure(
        "Effective sample size",
        "fraction",
        (
            Line("offpolicy/weight/ess_token", "raw weights", BLUE),
            Line("offpolicy/weight_applied/ess_token", "as applied", ORANGE, "--"),
        ),
        "(sum w)^2 / (n sum w^2) over tokens, a fraction: 1 = all weights equal, 0.5 = as uncertain as half "
        "as many equally weighted tokens. Dashed: after cap and normalisation.",
        reference=1.0,
    ),
    StepFigure(
        "Perplexity ratio",
        "trainer / sampler",
        (
            Line(_BEFORE + "ppl_ratio", "before", BLUE),
            Line(_AFTER + "ppl_ratio", "kept tokens", ORANGE, "--"),
        ),
        "Mean over responses of trainer perplexity / sampler perplexity, no unit. 1 = both find the text "
        "equally likely; above 1, the trainer finds the sampled text less likely than the sampler did.",
        reference=1.0,
    ),
    StepFigure(
        "Dropped and truncated",
        "fraction",
        (
            Line("offpolicy/keep/dropped_token_fraction", "tokens dropped", BLUE),
            Line("offpolicy/keep/dropped_sequence_fraction", "sequences dropped", ORANGE, "--"),
            Line("offpolicy/weight/truncated_fraction", "weights truncated", GREEN, ":"),
        ),
        "Share of the trainable tokens and of the sequences that the correction left out, and share of the "
        "weights that it cut back to its cap.",
    ),
)


def draw_step_figures(log: MetricsLog) -> list[Panel]:
    """Draw every step figure of the run; what was not logged is named in the caption."""
    return [_draw_step_figure(log, figure) for figure in STEP_FIGURES]


def _draw_step_figure(log: MetricsLog, figure: StepFigure) -> Panel:
    lines = [replace(line, key=line.key.format(group=log.ratio_group)) for line in figure.lines]
    series = {line: log.series(line.key) for line in lines}
    drawn = {line: data for line, data in series.items() if data.values}
    caption = f"{figure.caption}{_left_out(series)}"
    if not drawn:
        return Panel(figure.title, "", caption)
    from matplotlib.ticker import MaxNLocator

    with figure_style():
        canvas, axes = new_figure()
        if figure.reference is not None:
            axes.axhline(figure.reference, color=GREY, linewidth=0.8)
        for line, data in drawn.items():
            _draw_line(axes, line, data)
        axes.set_xlabel("step")
        axes.set_ylabel(figure.ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        caption += spread_axis(axes, [value for data in drawn.values() for value in data.values])
        add_legend(canvas)
        return Panel(figure.title, to_svg(canvas, figure.title), caption)


def _draw_line(axes: Axes, line: Line, data: Series) -> None:
    dots = "." if len(data.steps) <= FEW_STEPS else ""
    if line.running_mean:
        axes.plot(data.steps, data.values, line.style, color=line.colour, linewidth=0.8, alpha=0.5, marker=dots)
        label = f"{line.label}, mean of {RUNNING_STEPS} steps"
        axes.plot(
            data.steps,
            running_mean(data.values, RUNNING_STEPS),
            color=line.colour,
            linewidth=2.4,
            label=label,
        )
    else:
        axes.plot(data.steps, data.values, line.style, color=line.colour, marker=dots, label=line.label)


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


def spread_axis(axes: Axes, values: Sequence[float]) -> str:
    """Log y axis for positive values over a wide span, symmetric log for a few far outliers of either sign.

    Returns:
        What to add to the caption.
    """
    sizes = sorted(abs(value) for value in values if value)
    if not sizes:
        return ""
    middle = sizes[len(sizes) // 2]
    if min(values) > 0 and sizes[-1] > WIDE_SPAN * sizes[0]:
        axes.set_yscale("log")
        return " Log scale."
    if sizes[-1] > WIDE_SPAN * middle:
        axes.set_yscale("symlog", linthresh=10 ** math.ceil(math.log10(middle)))
        return " Log scale, linear around 0."
    return ""


@contextmanager
def figure_style() -> Iterator[None]:
    """Matplotlib settings of every figure: text stays text, no ground, colours that the page can replace."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GREY,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-3, 5),
        "axes.labelpad": 6,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "legend.frameon": False,
    }
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings.update(dict.fromkeys(inked, INK))
    with matplotlib.rc_context(settings):
        yield


def new_figure(height: float = 3.5) -> tuple[Figure, Axes]:
    """A figure as wide as every other one, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, height), layout="constrained", dpi=200)
    return figure, figure.add_subplot()


def add_legend(figure: Figure) -> None:
    """Legend above the axes and their labels, two columns, where it hides no data."""
    figure.legend(loc="outside upper left", ncols=2, handlelength=1.8, columnspacing=1.2)


def to_svg(figure: Figure, title: str) -> str:
    """The figure as an ``<svg>`` element that scales with the page and follows its colours."""
    import matplotlib

    buffer = io.StringIO()
    slug = re.sub(r"\W+", "-", title.lower())
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": slug, "svg.id": slug}):
        figure.savefig(buffer, format="svg", metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<g id=")', rf"\g<1>{slug}-", svg)
    for colour, name in {**_PAGE_COLOURS, INK: "currentColor"}.items():
        svg = svg.replace(colour, name)
    return svg
