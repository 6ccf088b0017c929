"""Makes figures as inline SVG, in the style that all figures of the report share."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct for colour-blind readers. The page redefines the colours for dark screens.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#7a828c"
INK = "#1b1f24"
_PAGE_COLOURS = {BLUE: "var(--blue)", ORANGE: "var(--orange)", GREEN: "var(--green)", GREY: "var(--grey)"}

WIDE_SPAN = 30.0
"""A log axis shows positive values whose largest is this many times the smallest, and a symmetric log axis
(linear around 0) values whose largest is this many times the median in size."""


@dataclass(frozen=True)
class Panel:
    """A figure of the report: title, SVG text (empty if there is nothing to draw) and caption."""

    title: str
    svg: str
    caption: str


def spread_axis(axes: Axes, values: Sequence[float]) -> str:
    """Log y axis for positive values over a wide span, symmetric log for a few far outliers of either sign.

    Returns:
        A sentence to add to the caption; empty for a linear axis.
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
    """Matplotlib settings of every figure: text stays text, no background, colours that the page can replace."""
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


def new_figure(height: float = 3.5, width: float = 6.0) -> tuple[Figure, Axes]:
    """A figure, by default of the common width, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=200)
    return figure, figure.add_subplot()


def add_legend(figure: Figure) -> None:
    """Add a legend in two columns above the axes and their labels, where it hides no data."""
    figure.legend(loc="outside upper left", ncols=2, handlelength=1.8, columnspacing=1.2)


def to_svg(figure: Figure, title: str) -> str:
    """The figure as an ``<svg>`` element that scales with the page and follows its colours."""
    import matplotlib

    buffer = io.StringIO()
    slug = re.sub(r"\W+", "-", title.lower())
    # No date, and ids that depend on the title only: the same figure gives the same text.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": slug, "svg.id": slug}):
        figure.savefig(buffer, format="svg", metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration, which HTML does not take
    # The page's style decides the size; a screen reader gets the title.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 role="img" aria-label="{title}"', svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, count=1, flags=re.DOTALL)
    # Ids are unique on a page only with the figure's name before them.
    svg = re.sub(r'(<g id=")', rf"\g<1>{slug}-", svg)
    for colour, name in {**_PAGE_COLOURS, INK: "currentColor"}.items():
        svg = svg.replace(colour, name)
    return svg
