"""Draw the picture of docs/speed.md: ``python docs/draw_speed.py``. Which rank gets which row is the kit's own plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from drawing import GROUND, Pictures, label, write
from drawing import picture as register
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trl_offpolicy.diagnosis.report.plots import BLUE, GREY
from trl_offpolicy.rollouts.micro_batches import Lengths
from trl_offpolicy.rollouts.rank_balance import Place, dealt

PICTURES: Pictures = {}
picture = partial(register, PICTURES)
RANKS, WINDOW, SIZE, PROMPT, GROUP = 4, 4, 4, 64, 8
"""Ranks, micro-batches of a step, rows of a micro-batch, tokens of a prompt, completions of a prompt."""


def long_tailed() -> list[Lengths]:
    """The rows of each rank, two prompts with their completions: a hard prompt has long ones, some much longer."""
    rows = SIZE * WINDOW
    random = torch.Generator().manual_seed(3)
    hard = 0.6 * torch.randn(RANKS, rows // GROUP, generator=random).repeat_interleave(GROUP, dim=1)
    drawn = (5.5 + hard + 0.6 * torch.randn(RANKS, rows, generator=random)).exp().clamp(16, 2048).long()
    return [Lengths(torch.full((rows,), PROMPT), own, torch.arange(rows)) for own in drawn]


def widths(lengths: Sequence[Lengths], plan: Sequence[Sequence[Place]]) -> list[list[int]]:
    """Tokens that each rank computes in each micro-batch: its rows times the widest of them."""
    tokens = [[int(lengths[rank].completion[row]) + PROMPT for rank, row in own] for own in plan]
    return [[SIZE * max(own[at : at + SIZE]) for at in range(0, len(own), SIZE)] for own in tokens]


def sorted_by_rank(lengths: Sequence[Lengths]) -> list[list[Place]]:
    """Each rank keeps its rows, the longest first (``trim_padding: true``)."""
    orders = (own.completion.argsort(descending=True, stable=True).tolist() for own in lengths)
    return [[(rank, row) for row in order] for rank, order in enumerate(orders)]


@picture("Rows of like length are computed at the same time on all ranks", height=2.6)
def rank_balance(figure: Figure) -> None:
    """Micro-batches of four ranks beside each other, and the time in which a rank waits for the others."""
    lengths = long_tailed()
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    plans = {
        "each rank's own rows": sorted_by_rank(lengths),
        "dealt: trim_padding: ranks": dealt(lengths, "total", size=SIZE, window=WINDOW),
    }
    for axes, (title, plan) in zip((left, right), plans.items(), strict=True):
        _draw(axes, widths(lengths, plan), title)
    waits = Patch(facecolor="none", edgecolor=GREY, hatch="////", label="waits")
    figure.legend(handles=[Patch(facecolor=BLUE, label="computes"), waits], loc="outside lower center", ncols=2)


def _draw(axes: Axes, tokens: Sequence[Sequence[int]], title: str) -> None:
    """The model is sharded here: at every micro-batch all ranks wait for the one that computes most."""
    start = 0.0
    for together in zip(*tokens, strict=True):
        longest = max(together)
        for rank, own in enumerate(together):
            axes.barh(rank, own / 1000, left=start, height=0.7, color=BLUE, edgecolor=GROUND)
            waits = {"height": 0.7, "color": "none", "edgecolor": GREY, "hatch": "////", "linewidth": 0.0}
            axes.barh(rank, (longest - own) / 1000, left=start + own / 1000, **waits)
        start += longest / 1000
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    axes.set_ylim(RANKS - 0.5, -0.5)
    label(axes, "thousand tokens, padding included", "", f"{title}: {start:.1f}")


if __name__ == "__main__":
    write(PICTURES)
