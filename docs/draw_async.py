"""Draw the pictures of docs/async.md that are about order and versions: ``python docs/draw_async.py``.

What may be requested when is the package's bound on the lag, and the mixture is its own. Lengths and times are made up.
The other pictures of the page are drawn by benchmarks/async_sim.py and recipes/async_lag.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from drawing import GROUND, Pictures, label, ticks, write
from drawing import picture as register
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import trl_offpolicy as op
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE
from trl_offpolicy.functional.mixture import mixture_logps
from trl_offpolicy.rollouts.ahead.lookahead import generations_admitted

PICTURES: Pictures = {}
picture = partial(register, PICTURES)
VERSIONS = (BLUE, ORANGE, GREEN, GREY)
"""Colour of the weights of a version, again from the start after four."""


# ------------------------------------------------------------------------------------------------- sampling ahead


@dataclass(frozen=True)
class Work:
    """A part of a batch that is sampled, or a batch that is learned from.

    Args:
        start: when it begins.
        end: when it ends.
        batch: number of the generation batch.
        version: optimizer steps behind the weights that do it.
    """

    start: float
    end: float
    batch: int
    version: int


def schedule(lag: float, batches: int, *, sample: float, learn: float, in_a_step: int) -> tuple[list[Work], list[Work]]:
    """What a server samples and a trainer learns, by the bound on the lag; the server works in the order of requests.

    Args:
        lag: ``async_rollouts``.
        batches: generation batches of the run.
        sample: time to sample a batch.
        learn: time to learn from one.
        in_a_step: generation batches in an optimizer step.
    """
    sampled, learned = list[Work](), list[Work]()
    asked, free, now = 0.0, 0.0, 0.0  # batches that were requested; when the server and the trainer are free
    ready = [0.0] * batches
    for due in range(batches):
        version, left = due // in_a_step, in_a_step - due % in_a_step
        allowed = generations_admitted(lag=lag, every=1, in_step=left, accumulation=in_a_step)
        wanted = min(due + allowed, float(batches))
        while asked < wanted:
            batch = int(asked)
            part = min(wanted, batch + 1.0) - asked
            start = max(now, free)
            free = start + part * sample
            sampled.append(Work(start, free, batch, version))
            ready[batch], asked = free, asked + part
        start = max(now, ready[due])
        now = start + learn
        learned.append(Work(start, now, due, version))
    return sampled, learned


def bars(axes: Axes, work: list[Work], row: float) -> None:
    """Bars of one lane, with the number of the batch, in the colour of the version of the weights."""
    for one in work:
        colour = VERSIONS[one.version % len(VERSIONS)]
        axes.barh(row, one.end - one.start, left=one.start, height=0.72, facecolor=colour, edgecolor=INK, linewidth=0.5)
        if one.end - one.start > 0.4:
            axes.text(
                (one.start + one.end) / 2, row, str(one.batch + 1), ha="center", va="center", fontsize=7.5, color=GROUND
            )


RUNS = (
    ("0: in turn", 0.0, 1),
    ("0.5: half of the next batch is requested early", 0.5, 1),
    ("1: the next batch is sampled meanwhile", 1.0, 1),
    ("0 with four batches in a step: overlap, and nothing is stale", 0.0, 4),
)


@picture("Sampling ahead: who works when, and with which weights", height=5.0)
def ahead(figure: Figure) -> None:
    """One panel a lag: server above, trainer below."""
    panels = figure.subplots(len(RUNS), 1, sharex=True)
    for axes, (text, lag, in_a_step) in zip(panels, RUNS, strict=True):
        sampled, learned = schedule(lag, 8, sample=1.0, learn=0.8, in_a_step=in_a_step)
        bars(axes, sampled, 1.0)
        bars(axes, learned, 0.0)
        axes.set(yticks=(0, 1), ylim=(-0.55, 1.55), xlim=(0, 14.6))
        axes.set_yticklabels(("trainer", "server"))
        axes.grid(visible=False)
        axes.set_title(f"async_rollouts: {text}")
    panels[-1].set_xlabel("time; numbers are generation batches")
    figure.legend(
        handles=[Patch(facecolor=one, edgecolor=INK, label=f"weights {k + 1}") for k, one in enumerate(VERSIONS)],
        loc="outside lower center", ncols=4,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- requests at a sync


def cut(lengths: list[float], sync: float, partial_: str) -> list[list[tuple[float, float, int]]]:
    """(start, end, version) of the parts of each response, if new weights are wanted at ``sync``."""
    if partial_ == "continue":
        return [[(0.0, min(n, sync), 0), *([(sync + 0.25, n + 0.25, 1)] if n > sync else [])] for n in lengths]
    return [[(0.0, n, 0)] for n in lengths]


@picture("A sync that finds requests in flight: three ways", height=2.9)
def partial_rollouts(figure: Figure) -> None:
    """Six responses and the next request of each slot, for finish, continue and keep."""
    lengths, sync = [2.0, 2.8, 3.6, 4.6, 6.0, 8.4], 4.0
    panels = figure.subplots(1, 3, sharey=True)
    for axes, way in zip(panels, ("finish", "continue", "keep"), strict=True):
        begins = max(lengths) if way == "finish" else sync
        for row, parts in enumerate(cut(lengths, sync, way)):
            after = max(begins, parts[-1][1]) + 0.15
            for start, end, version in [*parts, (after, 11.0, 1)]:
                colour = VERSIONS[version]
                is_next = start == after
                axes.barh(
                    row, end - start, left=start, height=0.66, facecolor="none" if is_next else colour,
                    edgecolor=colour if is_next else INK, linewidth=0.9 if is_next else 0.5,
                )  # fmt: skip
        axes.axvline(sync, color=INK, linewidth=0.9, linestyle=":")
        if way == "finish":
            axes.axvline(begins, color=ORANGE, linewidth=1.2, linestyle="-")
        axes.set(xlim=(0, 11), ylim=(5.6, -0.6), xticks=(0, 4, 8), yticks=[])
        axes.grid(visible=False)
        label(axes, "time", "requests in flight" if way == "finish" else "", f"partial: {way}")
    figure.legend(
        handles=[
            Patch(facecolor=BLUE, edgecolor=INK, label="sampled by the old weights"),
            Patch(facecolor=ORANGE, edgecolor=INK, label="by the new ones"),
            Patch(facecolor="none", edgecolor=ORANGE, label="the next request"),
        ],
        loc="outside lower center", ncols=3,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the mixture


@picture("Two versions in a batch: the weight by a token's own version, and by the mixture", height=3.3)
def balance(figure: Figure) -> None:
    """Probabilities of 60 tokens under two versions and the trainer; the weights of what each version sampled."""
    left, right = figure.subplots(1, 2)
    place = torch.linspace(-3.0, 3.0, 61)
    policies = [(-0.5 * ((place - at) / 0.8) ** 2).log_softmax(-1) for at in (-1.0, 0.6, 0.9)]
    for logps, text in zip(policies, ("version 1", "version 2", "trainer's weights now"), strict=True):
        left.plot(place, logps.exp(), label=text)
    label(left, "token, in some order", "probability", "three policies")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24))
    shares = torch.tensor([0.3, 0.7])
    mask = torch.ones(1, len(place)).bool()
    mixture = mixture_logps(torch.stack(policies[:2]).unsqueeze(1), shares, mask)
    now = policies[2].unsqueeze(0)
    for old, text in (
        (policies[0].unsqueeze(0), "now / version 1, of what version 1 sampled"),
        (policies[1].unsqueeze(0), "now / version 2, of what version 2 sampled"),
        (mixture, "now / mixture, of either"),
    ):
        batch = op.PolicyBatch(
            per_token_logps=now, sampling_per_token_logps=old, completion_mask=mask, advantages=torch.ones(1)
        )
        out = op.Correction(weight=op.RawWeight(ratio="current/sampling"), measure=())(batch)
        right.plot(place, out.weights[0], label=text)
    ticks(right, [0.01, 0.1, 1, 10, 100], "y")
    right.set_ylim(0.003, 300)
    label(right, "token, in some order", "ratio", "30 % are of version 1, 70 % of version 2")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24))


if __name__ == "__main__":
    write(PICTURES)
