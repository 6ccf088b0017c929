"""Bias against noise of the weights under three kinds of mismatch, as an SVG in the style of the docs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from drawing import to_svg

from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, ORANGE

KINDS = ("lag 1", "lag 4", "large")
POINTS = {  # row: (label, colour, marker)
    "no correction": ("no correction", GREY, "o"),
    "raw token": ("raw, token", BLUE, "o"),
    "raw prefix": ("raw, prefix", BLUE, "s"),
    "raw sequence": ("raw, sequence", BLUE, "^"),
    "truncate token": ("TIS 2, token", GREEN, "o"),
    "truncate sequence": ("TIS 2, sequence", GREEN, "^"),
    "band token": ("band 0.5 to 2, token", ORANGE, "o"),
    "band sequence": ("band 0.5 to 2, sequence", ORANGE, "^"),
    "prefix_min": ("MinPRO", BLUE, "x"),
    "prefix": ("CTPO", ORANGE, "x"),
    "shaped token": ("shaped 0.5, token", GREY, "x"),
    "paper/kpop": ("KPop", GREEN, "x"),
}


def svg(results: dict[str, Any]) -> str:
    """The picture of ``results.json``: the median over its seeds, one panel a kind."""
    bias, variance = (results["columns"].index(name) for name in ("bias", "variance"))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(KINDS), sharey=True)
        for axes, kind in zip(panels, KINDS, strict=True):
            for name, (label, colour, marker) in POINTS.items():
                numbers = results["cells"][kind][name]
                axes.scatter(numbers[bias], numbers[variance] ** 0.5, color=colour, marker=marker, s=28, label=label)
            axes.set(title=kind, xlabel="bias / gradient")
            axes.set_xlim(left=-0.03)
        panels[0].set_ylabel(f"noise of {results['batch']} responses / gradient")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

    text: str = to_svg("Bias against noise of the weights", 3.4, draw)
    return text
