"""What the pictures of the docs share: style, colours in light and dark mode, and SVG files that can be compared."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE, figure_style

FOLDER = Path(__file__).resolve().parent / "pictures"
GROUND = "#ffffff"
COLOURS = {  # name: (light, dark); those of the run report
    "ground": (GROUND, "#15181c"),
    "ink": (INK, "#e4e7eb"),
    "blue": (BLUE, "#56b4e9"),
    "orange": (ORANGE, "#ff9147"),
    "green": (GREEN, "#35c79b"),
    "grey": (GREY, "#98a1ac"),
}
SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.fontsize": 8,
    "legend.handlelength": 1.8,
    "legend.borderaxespad": 0.2,
    "legend.labelspacing": 0.3,
    "lines.linewidth": 1.5,
    "figure.constrained_layout.w_pad": 0.1,
    "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, GREY], linestyle=["-", "--", "-.", ":"]),
}
REFERENCE: dict[str, Any] = {"color": GREY, "linewidth": 1.0, "linestyle": ":"}
Draw = Callable[[Figure], None]
Pictures = dict[str, tuple[str, float, Draw]]
"""{file name: (title, height in inches, drawing)}."""


def picture(pictures: Pictures, title: str, height: float = 2.7) -> Callable[[Draw], Draw]:
    """Register a drawing under its function's name."""

    def register(draw: Draw) -> Draw:
        pictures[draw.__name__] = (title, height, draw)
        return draw

    return register


def ticks(axes: Axes, values: Sequence[float], axis: str = "x") -> None:
    """A log axis with these ticks as plain numbers."""
    getattr(axes, f"set_{axis}scale")("log")
    one = getattr(axes, f"{axis}axis")
    one.set_major_locator(FixedLocator(list(values)))
    one.set_minor_locator(NullLocator())
    one.set_major_formatter(FormatStrFormatter("%g"))


def label(axes: Axes, x: str, y: str, title: str) -> None:
    """Axis labels and title."""
    axes.set(xlabel=x, ylabel=y, title=title)


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def to_svg(title: str, height: float, draw: Draw) -> str:
    """The picture as SVG text: no date, text as text, colours that follow the reader's light or dark mode."""
    with figure_style(), matplotlib.rc_context({**SETTINGS, "svg.hashsalt": title}):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata={"Title": title, **nothing}, facecolor=GROUND)
    return _with_classes(_rounded(buffer.getvalue()))


def _rounded(svg: str) -> str:
    """Coordinates (numbers in attributes; the text is left alone) to a hundredth of a point."""

    def shorten(attribute: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2):g}", attribute[0])

    return re.sub(r'="[^"]*"', shorten, svg)


def _with_classes(svg: str) -> str:
    """Each style once, as a class; colours as variables with two values."""
    classes: dict[str, str] = {}
    svg = re.sub(r'style="([^"]*)"', lambda style: f'class="{classes.setdefault(style[1], f"c{len(classes)}")}"', svg)
    rules = " ".join(f".{name} {{ {style} }}" for style, name in classes.items())
    for name, (light, _) in COLOURS.items():
        rules = re.sub(rf"(fill|stroke): {light}\b", rf"\1: {light}; \1: var(--{name})", rules)
    modes = [" ".join(f"--{name}: {pair[mode]};" for name, pair in COLOURS.items()) for mode in (0, 1)]
    start = f":root {{ {modes[0]} }} @media (prefers-color-scheme: dark) {{ :root {{ {modes[1]} }} }} {rules} "
    return svg.replace('<style type="text/css">', f'<style type="text/css">{start}', 1)


def write(pictures: Pictures) -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, (title, height, draw) in pictures.items():
        path = FOLDER / f"{name}.svg"
        path.write_text(to_svg(title, height, draw))
        print(f"{path.relative_to(FOLDER.parent)}  {path.stat().st_size / 1000:.0f} kB")
