"""Conjecture 4: below a budget of mismatch, is a correction of the loss worth nothing more?

Every engine is a rounding of the sampler's weights. Each is trained from without a correction, with token TIS and with
a geometric mask. Repair is an engine of 14 bits, which lies below the budget; "both" corrects there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import trl_offpolicy as op
from benchmarks.conjectures import common
from benchmarks.conjectures.common import Conjecture, Finding, Outcome
from benchmarks.conjectures.experts import Record, choosing, expert_layers, mixture, moments_of
from benchmarks.lab.intervals import Interval, interval
from benchmarks.lab.jobs import Experiment
from benchmarks.lab.loop import learn
from benchmarks.lab.measure import warm_model
from benchmarks.lab.sorting import Sorter, Task, prompts, sample, token_logps
from docs.drawing import label, to_svg
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE
from trl_offpolicy.engines.rounding import WeightRounding, round_integer
from trl_offpolicy.stats import Stats

LIMIT = 0.003
"""The gain that the conjecture calls nothing: 0.3 % of the benchmark, here of exact accuracy."""
BUDGET = {"tv_p95": 1e-4, "chi2_sequence": 0.1, "delta": 1e-3}
REPAIRED = "int14"
ENGINES = ("int14", "fp16", "int8", "int4", "int3")
WORLDS: dict[str, tuple[Task, Callable[[], Sorter]]] = {
    "sorting": ("sorting", Sorter),
    "reversing": ("reversing", Sorter),
    "experts": ("reversing", mixture(8)),
}
"""Task and model; ``experts`` routes each token to 2 of 8 experts in both layers."""
CORRECTIONS = {
    "none": op.Correction(measure=("mismatch",)),
    "tis": op.Correction(weight=op.TruncateWeight(level="token", max_weight=2.0), measure=("mismatch",)),
    "mask": op.Correction(keep=(op.RatioBand(level="sequence_mean", low=0.9, high=1.1),), measure=("mismatch",)),
}
NAMES = {"none": "no correction", "tis": "token TIS, cap 2", "mask": "geometric mask, [0.9, 1.1]"}


@dataclass(frozen=True)
class Settings(common.CommonSettings):
    """What all runs share.

    Args:
        generations: rollout batches, each from newly rounded weights.
        groups: prompts a generation, 8 answers each.
        minibatches: optimizer steps a generation.
        learning_rate: of Adam.
    """

    generations: int = 40
    groups: int = 16
    minibatches: int = 2
    learning_rate: float = 3e-4


@dataclass(frozen=True)
class Job(common.Named):
    """One run; runs of one world and seed share warm start, training prompts and the random numbers of the sampling."""

    world: str
    engine: str
    correction: str
    seed: int


def plan(seeds: Sequence[int], short: bool) -> list[Job]:
    """All runs, a seed at a time; short: one model and two engines."""
    cells = product(("reversing",) if short else WORLDS, (REPAIRED, "int3") if short else ENGINES, CORRECTIONS)
    return [Job(*cell, seed) for seed, cell in product(seeds, list(cells))]


def engine_of(model: Sorter, name: str) -> Sorter:
    """A copy for the sampler, linear weights rounded: ``int14`` and the like by row, or ``fp16``."""
    bits = name.removeprefix("int")
    return common.changed(model, partial(round_integer, bits=int(bits)) if bits.isdigit() else WeightRounding(name))


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and evaluate; a finished run is read, not repeated."""
    return common.recorded(job, settings, folder, lambda: train(job, settings, folder))


def train(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Exact accuracy before and after, and the mismatch that the objective saw."""
    task, build = WORLDS[job.world]
    model = warm_model(settings, job.seed, folder / "warm_starts", task=task, build=build)
    start, flips = common.exact_accuracy(model, task), [routing(model, job, settings)]
    objective = op.Objective(policy_loss=op.losses.PPOClip(), correction=CORRECTIONS[job.correction])
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    asking, chance = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    stats = Stats({})
    for _ in range(settings.generations):
        rollouts = common.rollouts_of(engine_of(model, job.engine), model, settings.groups, task, asking, chance)
        more, _ = learn(model, optimizer, objective, rollouts, settings.minibatches, chance)
        stats = stats.merge(more)
    flips.append(routing(model, job, settings))
    seen = stats.compute()
    names = ("tv_p95", "chi2_sequence", "kl_k3", "ess_sequence")
    return {
        "start": start,
        "accuracy": common.exact_accuracy(model, task),
        **{name: seen[f"offpolicy/mismatch/{name}"] for name in names},
        **{name: float(np.mean([one[name] for one in flips])) for name in flips[0]},
    }


@torch.no_grad()
def routing(model: Sorter, job: Job, settings: Settings) -> dict[str, float]:
    """How often engine and learner choose other experts for the tokens that the engine samples; 0 for a dense model."""
    layers = expert_layers(model)
    if not layers:
        return {"delta": 0.0, "flips": 0.0}
    engine = engine_of(model, job.engine)
    there, here = Record(engine), Record(model)
    with choosing(engine, there.choices):
        answers = sample(
            engine, prompts(settings.questions, torch.Generator().manual_seed(5)), torch.Generator().manual_seed(6)
        )
    with choosing(model, here.choices):
        token_logps(model, answers.ids)
    return moments_of(there.routes, here.routes, answers.mask, len(layers[0].up))


def of_cell(runs: Sequence[Outcome], world: str, engine: str, correction: str) -> dict[int, Outcome]:
    """{seed: run}."""
    wanted = (world, engine, correction)
    return {run["seed"]: run for run in runs if (run["world"], run["engine"], run["correction"]) == wanted}


def gain(mine: dict[int, Outcome], other: dict[int, Outcome]) -> Interval | None:
    """Exact accuracy of one cell minus another's, paired by seed."""
    shared = sorted(set(mine) & set(other))
    return interval([mine[seed]["accuracy"] - other[seed]["accuracy"] for seed in shared]) if shared else None


@dataclass(frozen=True)
class Cell:
    """A world and an engine.

    Args:
        world: of ``WORLDS``.
        engine: of ``ENGINES``.
        accuracy: without a correction.
        mismatch: the three numbers of the budget, the mean over runs without a correction.
        gains: by correction, against none.
        repair: accuracy of the repaired engine minus this one's, both without a correction.
    """

    world: str
    engine: str
    accuracy: Interval
    mismatch: dict[str, float]
    gains: dict[str, Interval]
    repair: Interval | None

    @property
    def below(self) -> bool:
        """Within the budget."""
        return all(self.mismatch[name] < limit for name, limit in BUDGET.items())


def cells_of(runs: Sequence[Outcome]) -> list[Cell]:
    """Every world and engine with a finished pair of runs."""
    found = []
    for world, engine in product(WORLDS, ENGINES):
        plain = of_cell(runs, world, engine, "none")
        gains = {name: gain(of_cell(runs, world, engine, name), plain) for name in CORRECTIONS if name != "none"}
        known = {name: value for name, value in gains.items() if value is not None}
        if known:
            mismatch = {name: float(np.mean([run[name] for run in plain.values()])) for name in BUDGET}
            repair = gain(of_cell(runs, world, REPAIRED, "none"), plain)
            accuracy = interval([run["accuracy"] for run in plain.values()])
            found.append(Cell(world, engine, accuracy, mismatch, known, repair))
    return found


def find(runs: Sequence[Outcome]) -> Finding:
    """The conjecture fails if some gain below the budget is at least ``LIMIT``, and holds if all are less."""
    cells = cells_of(runs)
    counts = counts_of(cells)
    by_model = {name: counts_of([cell for cell in cells if cell.world == name]) for name in WORLDS}
    why = (
        f"of {sum(counts.values())} gains within the budget {counts['below']} are below {LIMIT:.1%} with their whole "
        f"95 % interval, {counts['above']} are at or above it, {counts['open']} are open. By model: "
        + ", ".join(f"{name} {verdict_of(mine)}" for name, mine in by_model.items() if mine != counts_of([]))
    )
    rows = [
        [
            cell.world, cell.engine, f"{cell.mismatch['tv_p95']:.1e}", f"{cell.mismatch['chi2_sequence']:.1e}",
            f"{cell.mismatch['delta']:.1e}", "within" if cell.below else "above", cell.accuracy.text(4),
            *(cell.gains[name].text(4, sign=True) if name in cell.gains else "-" for name in ("tis", "mask")),
            cell.repair.text(4, sign=True) if cell.repair and cell.engine != REPAIRED else "-",
        ]
        for cell in cells
    ]  # fmt: skip
    header = ["model", "engine", "TV95", "chi2 of responses", "delta", "budget", "accuracy, neither", "gain of TIS"]
    table = common.markdown([*header, "gain of the mask", "gain of repair"], rows)
    numbers = {"limit": LIMIT, "within": counts, "by_model": by_model, "cells": [as_numbers(cell) for cell in cells]}
    return Finding(verdict_of(counts), why, table, numbers)


def counts_of(cells: Sequence[Cell]) -> dict[str, int]:
    """How many gains within the budget are below the limit, at or above it, or neither by their intervals."""
    inside = [common.judged(value, LIMIT) for cell in cells if cell.below for value in cell.gains.values()]
    return {side: inside.count(side) for side in ("below", "above", "open")}


def verdict_of(counts: Mapping[str, int]) -> common.Verdict:
    """One gain above the limit refutes; one that is open leaves the question open."""
    if counts["above"]:
        return "does not hold"
    return "holds" if counts["below"] and not counts["open"] else "cannot be told here"


def as_numbers(cell: Cell) -> dict[str, Any]:
    """For JSON."""
    gains = {name: value._asdict() for name, value in cell.gains.items()}
    return {"world": cell.world, "engine": cell.engine, **cell.mismatch, "within": cell.below, "gains": gains}


def draw(runs: Sequence[Outcome]) -> str:
    """Gains over TV95, with the two limits."""
    cells = cells_of(runs)

    def panels(figure: Figure) -> None:
        worlds = [world for world in WORLDS if any(cell.world == world for cell in cells)]
        axes = figure.subplots(1, len(worlds), sharey=True, squeeze=False)[0]
        kinds = [
            ("tis", BLUE, "o", "token TIS"),
            ("mask", ORANGE, "s", "geometric mask"),
            ("repair", GREY, "^", "repair"),
        ]
        for axis, world in zip(axes, worlds, strict=True):
            mine = [cell for cell in cells if cell.world == world]
            for shift, (name, colour, marker, text) in zip((0.92, 1.0, 1.09), kinds, strict=True):
                points = [(cell, cell.repair if name == "repair" else cell.gains.get(name)) for cell in mine]
                points = [(cell, value) for cell, value in points if value is not None]
                axis.errorbar(
                    [shift * cell.mismatch["tv_p95"] for cell, _ in points],
                    [value.mean for _, value in points],
                    yerr=[np.nan_to_num(value.half) for _, value in points],
                    color=colour, marker=marker, markersize=4, linewidth=1.0, linestyle="-", label=text,
                )  # fmt: skip
            axis.axvline(BUDGET["tv_p95"], color=GREEN, linewidth=1.0, linestyle="--")
            axis.axhline(LIMIT, color=INK, linewidth=1.0, linestyle=":")
            axis.set_xscale("log")
            axis.set_yscale("symlog", linthresh=0.003, linscale=0.6)
            label(axis, "TV95 of a token", "", world)
        axes[0].set_ylabel("gain in accuracy")
        axes[0].legend(loc="upper left")

    return to_svg("What a correction gains below and above the mismatch budget", 3.2, panels)


CONJECTURE = Conjecture(
    title="Mismatch budget: repair or correct?",
    settings=Settings(),
    short=Settings(generations=15),
    seeds=(0, 1, 2, 3, 4, 5),
    plan=plan,
    experiment=Experiment(common.unwarmed, run),
    find=find,
    draw=draw,
)
