"""Draw the pictures of docs/three_policies.md and docs/which_correction.md: ``python docs/draw_start.py``."""

from __future__ import annotations

from functools import partial

from drawing import Pictures, write
from drawing import picture as register
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE

PICTURES: Pictures = {}
picture = partial(register, PICTURES)

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("Does another engine sample (vLLM)?", "weight on pi_old / mu (token TIS)"),
    ("Do several optimizer steps use one generation?", "clip on pi / pi_old, with old log-probs"),
    ("Does sampling overlap with training?", "bound on the lag, and a clip around a fresher policy"),
    ("Is the model a mixture of experts?", "routing replay, or a band on each token's ratio"),
    ("Do tools or an environment write into the context?", "mask of their tokens; weights by turn"),
    ("Is what you measured larger than a weight can carry?", "rejection; above that, repair the system"),
)
"""Question (a heading of docs/which_correction.md), what a yes adds. Every question is asked; a no adds nothing."""


def box(axes: Axes, x: float, y: float, lines: tuple[str, ...], colour: str) -> None:
    """Text in a frame; the first line is the name."""
    frame = {"boxstyle": "round,pad=0.6", "facecolor": "none", "edgecolor": colour, "linewidth": 1.2}
    axes.text(x, y, "\n".join(lines), ha="center", va="center", fontsize=8.5, color=INK, bbox=frame, linespacing=1.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A two-headed arrow: something is measured between the two ends."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "<->", "color": colour, "linewidth": 1.2})


@picture("The three policies and what is measured between them", height=3.3)
def three_policies(figure: Figure) -> None:
    """Engine above, trainer below; time to the right."""
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(0, 6.4))
    for x, text in ((2.6, "weights that sampled"), (7.9, "weights now, some optimizer steps later")):
        axes.text(x, 6.1, text, ha="center", va="center", fontsize=8.5, color=GREY)
    for y, text in ((4.7, "engine"), (1.2, "trainer")):
        axes.text(0.1, y, text, ha="left", va="center", fontsize=8.5, color=GREY)
    box(axes, 2.6, 4.7, ("mu", "sampling_per_token_logps"), ORANGE)
    box(axes, 2.6, 1.2, ("pi_old", "old_per_token_logps"), BLUE)
    box(axes, 7.9, 1.2, ("pi", "per_token_logps, with gradient"), GREEN)
    arrow(axes, (2.6, 3.9), (2.6, 2.0), ORANGE)
    axes.text(2.75, 2.95, "mismatch: pi_old / mu\nkernels, precision, sync", va="center", fontsize=8, color=INK)
    arrow(axes, (3.55, 1.2), (5.85, 1.2), BLUE)
    axes.text(4.7, 0.45, "staleness: pi / pi_old\noptimizer steps", ha="center", va="center", fontsize=8, color=INK)
    arrow(axes, (3.85, 4.5), (7.6, 1.95), GREY)
    axes.text(6.3, 3.75, "total: pi / mu, both at once", va="center", fontsize=8, color=INK)


@picture("Which correction does a set-up need?", height=3.5)
def which_correction(figure: Figure) -> None:
    """Every question is asked; a yes adds what stands to the right."""
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(len(QUESTIONS) + 1.2, 0))
    axes.text(0.1, 0.3, "ask all of them, from the top", va="center", fontsize=8.5, color=GREY)
    axes.text(6.0, 0.3, "a yes adds", va="center", fontsize=8.5, color=GREY)
    for row, (question, adds) in enumerate(QUESTIONS):
        y = row + 1.0
        axes.text(0.1, y, f"{row + 1}", va="center", fontsize=9, weight="bold", color=BLUE)
        axes.text(0.45, y, question, va="center", fontsize=8.5)
        axes.annotate("", (5.85, y), (5.35, y), arrowprops={"arrowstyle": "->", "color": ORANGE})
        axes.text(6.0, y, adds, va="center", fontsize=8, color=INK)
        if row + 1 < len(QUESTIONS):
            axes.annotate("", (0.18, y + 0.72), (0.18, y + 0.28), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.text(0.45, len(QUESTIONS) + 0.85, "no to all: train; log mismatch/* all the same", fontsize=8.5, color=GREY)


if __name__ == "__main__":
    write(PICTURES)
