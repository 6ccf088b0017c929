"""Conjecture 3: does a flip of the router bias the gradient of token-level IS in proportion to K delta?

The sampler is the trainer itself, except that some tokens go to another expert (``flips``: anywhere, ``ties``: where
the router was nearest to a tie) and that its logits drift (``fixed_kl``: by as much as keeps the token KL at one
value). Token IS is compared with two oracles: the same answers with the sampler's routing replayed, and answers of the
trainer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import trl_offpolicy as op
from benchmarks.conjectures import common
from benchmarks.conjectures.common import Conjecture, Finding, Outcome
from benchmarks.conjectures.experts import (
    Choice,
    Record,
    choosing,
    expert_layers,
    flipping,
    mixture,
    moments_of,
    replayed,
)
from benchmarks.lab.jobs import Experiment
from benchmarks.lab.loop import Rollouts, policy_batch
from benchmarks.lab.measure import warm_model
from benchmarks.lab.sorting import Sorter, Task
from docs.drawing import label, legend_below, ticks, to_svg
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE

TASK: Task = "sorting"
EXPERTS = (4, 8, 16, 32)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
ARMS = {"flips": RATES, "ties": RATES[:-1], "fixed_kl": (0.0, *RATES[:3])}
"""Arm -> share of tokens and layers whose second expert gives way to the third."""
LINEAR = 0.1
"""Largest rate of the fits; above it the bias saturates."""
TOKEN_IS = op.Objective(
    policy_loss=op.losses.GPG(), correction=op.Correction(weight=op.RawWeight(level="token"), measure=("mismatch",))
)
TOLERANCE = 0.2
"""An exponent counts as 1 if its interval lies within 1 +- this."""


@dataclass(frozen=True)
class Settings(common.CommonSettings):
    """What all runs share.

    Args:
        batches: independent batches, from which the square of a mean gradient is estimated without bias.
        groups: prompts a batch, 8 answers each.
        token_kl: of ``fixed_kl``, nats a token.
    """

    batches: int = 24
    groups: int = 8
    token_kl: float = 0.03


@dataclass(frozen=True)
class Job(common.Named):
    """One cell; those of one seed and K share the warm start and the prompts."""

    arm: str
    experts: int
    rate: float
    seed: int


def plan(seeds: Sequence[int], short: bool) -> list[Job]:
    """All cells, a seed at a time; short: two numbers of experts, three rates, flips alone."""
    if short:
        return [Job("flips", *cell, seed) for seed, cell in product(seeds, list(product((4, 8), (0.01, 0.03, 0.1))))]
    cells = [(arm, experts, rate) for arm, rates in ARMS.items() for experts, rate in product(EXPERTS, rates)]
    return [Job(*cell, seed) for seed in seeds for cell in cells]


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Measure; a finished cell is read, not repeated."""
    return common.recorded(job, settings, folder, lambda: biases(job, settings, folder))


def biases(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Squares of the biases and of the oracles, and the means of what was seen of the mismatch."""
    model = warm_model(settings, job.seed, folder / "warm_starts", task=TASK, build=mixture(job.experts))
    chance = torch.Generator().manual_seed(job.seed)
    limits = gap_quantiles(model, job.rate) if job.arm == "ties" else None
    choices = flipping(model, job.rate, chance, limits=limits)
    sampler = drifted(model, choices, settings, job) if job.arm == "fixed_kl" else model
    asking, drawing = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    found = [compared(sampler, model, choices, settings.groups, asking, drawing) for _ in range(settings.batches)]
    token_is, replay, on_policy = (torch.stack([getattr(one, name) for one in found]) for name in Gradients._fields[:3])
    return {
        "bias_to_replay": common.squared_mean(token_is - replay),
        "bias_to_policy": common.squared_mean(token_is - on_policy),
        "oracle_replay": common.squared_mean(replay),
        "oracle_policy": common.squared_mean(on_policy),
        **{name: float(np.mean([one.seen[name] for one in found])) for name in found[0].seen},
    }


class Gradients(NamedTuple):
    """Of one batch, each (parameters,), and what was seen of the mismatch."""

    token_is: Tensor
    replay: Tensor
    on_policy: Tensor
    seen: dict[str, float]


def compared(
    sampler: Sorter,
    model: Sorter,
    choices: list[Choice],
    groups: int,
    asking: torch.Generator,
    drawing: torch.Generator,
) -> Gradients:
    """Token IS on answers under forced flips, the same with their routing replayed, and answers of the trainer."""
    there, here = Record(sampler, choices), Record(model)
    with choosing(sampler, there.choices):
        rollouts = common.rollouts_of(sampler, None, groups, TASK, asking, drawing)
    with choosing(model, here.choices):
        token_is, seen = gradient(model, rollouts)
    with choosing(model, replayed(there.routes)):
        replay, _ = gradient(model, rollouts)
    on_policy, _ = gradient(model, common.rollouts_of(model, None, groups, TASK, asking, drawing))
    seen |= moments_of(there.routes, here.routes, rollouts.answers.mask, len(expert_layers(model)[0].up))
    return Gradients(token_is, replay, on_policy, seen)


def gradient(model: Sorter, rollouts: Rollouts) -> tuple[Tensor, dict[str, float]]:
    """Of the kit's token-IS objective, (parameters,); and token KL, chi-square and sequence ESS of the mismatch."""
    # without old log-probs old is the trainer now, so that the weight is the whole of pi / mu
    result = TOKEN_IS(policy_batch(model, rollouts, torch.arange(len(rollouts.rewards)), old_per_token_logps=None))
    parts = torch.autograd.grad(result.loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    names = ("kl_k3", "chi2_token", "ess_sequence")
    return torch.cat([part.flatten() for part in parts]), {
        name: float(result.stats[f"mismatch/{name}"]) for name in names
    }


def gap_quantiles(model: Sorter, rate: float) -> list[float]:
    """For each layer the gap between the second and the third router logit that ``rate`` of the tokens lie below."""
    gaps: list[list[Tensor]] = [[] for _ in expert_layers(model)]

    def noting(place: int) -> Choice:
        layer = expert_layers(model)[place]

        def choose(logits: Tensor) -> Tensor:
            ranked = logits.topk(layer.top + 1).values
            gaps[place].append((ranked[..., -2] - ranked[..., -1]).flatten())
            return layer.best(logits)

        return choose

    asking, chance = torch.Generator().manual_seed(8), torch.Generator().manual_seed(9)
    with choosing(model, [noting(place) for place in range(len(gaps))]):
        common.rollouts_of(model, None, 32, TASK, asking, chance)
    return [float(torch.quantile(torch.cat(seen), rate)) for seen in gaps]


def drifted(model: Sorter, choices: list[Choice], settings: Settings, job: Job) -> Sorter:
    """A copy whose head is so noisy that drift and flips together have the wanted token KL; its routing is untouched.

    KL grows with the square of the noise, so two secant steps find the scale.

    Raises:
        ValueError: the flips alone have more.
    """
    noise = torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(job.seed))

    def noisy(square: float) -> Sorter:
        copy = deepcopy(model).requires_grad_(False)
        copy.head.weight.data = copy.head.weight.data + square**0.5 * noise * copy.head.weight.data.std()
        return copy

    def token_kl(square: float) -> float:
        asking, drawing = (torch.Generator().manual_seed(part) for part in (6, 7))
        sampler = noisy(square)
        with choosing(sampler, choices):
            rollouts = common.rollouts_of(sampler, None, 32, TASK, asking, drawing)
        return gradient(model, rollouts)[1]["kl_k3"]

    flips = token_kl(0.0) if job.rate else 0.0
    if flips >= settings.token_kl:
        raise ValueError(f"token_kl must exceed what flips alone give, {flips:.4f} nats, but got {settings.token_kl}.")
    square = 0.01
    for _ in range(2):
        square *= (settings.token_kl - flips) / max(token_kl(square) - flips, 1e-6)
    return noisy(square)


ORACLES = {"replay": "routing replayed", "policy": "on-policy"}


def relative(runs: Sequence[Outcome], oracle: str) -> float:
    """|bias| / |oracle|, squares averaged over seeds; NaN where noise makes the estimate of the square negative."""
    square = sum(run[f"bias_to_{oracle}"] for run in runs) / sum(run[f"oracle_{oracle}"] for run in runs)
    return float(np.sqrt(square)) if square > 0 else float("nan")


def cells_of(runs: Sequence[Outcome], arm: str) -> dict[tuple[int, float], list[Outcome]]:
    """{(K, rate): one run a seed}."""
    found: dict[tuple[int, float], list[Outcome]] = {}
    for run in runs:
        if run["arm"] == arm:
            found.setdefault((run["experts"], run["rate"]), []).append(run)
    return found


def k_delta(runs: Sequence[Outcome]) -> float:
    """K delta, the mean number of experts of a layer that only one side chose for a token."""
    return float(np.mean([run["experts"] * run["delta"] for run in runs]))


def pooled(runs: Sequence[Outcome], arm: str) -> list[tuple[float, float, common.Range]]:
    """(rate, K delta, |bias to replay| / |oracle| over all K and seeds), intervals by resampling runs; 0 where the
    estimate of the square is not positive."""
    found = []
    for rate in sorted({run["rate"] for run in runs if run["arm"] == arm} - {0.0}):
        mine = [run for run in runs if (run["arm"], run["rate"]) == (arm, rate)]
        found.append(
            (rate, k_delta(mine), common.bootstrap(mine, lambda some: np.nan_to_num(relative(some, "replay"))))
        )
    return found


def unresolved(runs: Sequence[Outcome], arm: str) -> tuple[int, int]:
    """(cells of the fits whose estimate of |bias|^2 is not positive, all cells of the fits)."""
    values = [relative(mine, "replay") for (_, rate), mine in cells_of(runs, arm).items() if 0 < rate <= LINEAR]
    return sum(not np.isfinite(value) for value in values), len(values)


def exponents(runs: Sequence[Outcome], arm: str, oracle: str) -> tuple[float, float]:
    """log |bias| = a log(K delta) + b log K + c over the cells up to ``LINEAR``; (a, b). The conjecture: (1, 0).

    Cells without a logarithm are left out, which flatters small biases: with any of them the fit decides nothing.
    """
    rows = []
    for (experts, rate), mine in cells_of(runs, arm).items():
        value = relative(mine, oracle)
        if 0 < rate <= LINEAR and np.isfinite(value):
            rows.append((np.log(k_delta(mine)), np.log(experts), 1.0, np.log(value)))
    design = np.array(rows)
    if len(rows) < 4 or np.linalg.matrix_rank(design[:, :3]) < 3:
        return float("nan"), float("nan")
    fit = np.linalg.lstsq(design[:, :3], design[:, 3], rcond=None)[0]
    return float(fit[0]), float(fit[1])


def ranges(runs: Sequence[Outcome]) -> dict[str, tuple[common.Range, common.Range]]:
    """{arm and oracle: exponents a and b}, the intervals by resampling seeds."""
    seeds = sorted({run["seed"] for run in runs})
    by_seed = [[run for run in runs if run["seed"] == seed] for seed in seeds]

    def exponent(arm: str, oracle: str, part: int) -> common.Range:
        return common.bootstrap(
            by_seed, lambda some: exponents([run for one in some for run in one], arm, oracle)[part]
        )

    fits = [("flips", "replay"), ("ties", "replay"), ("fixed_kl", "replay"), ("fixed_kl", "policy")]
    return {
        f"{arm}, {ORACLES[oracle]}": (exponent(arm, oracle, 0), exponent(arm, oracle, 1))
        for arm, oracle in fits
        if cells_of(runs, arm)
    }


def find(runs: Sequence[Outcome]) -> Finding:
    """Fails if the bias is sublinear in K delta; holds if it is linear, and grows with it at one token KL too.

    Nothing can be told where the bias of some cells lies within the noise.
    """
    found = ranges(runs)
    fits = [found[name][0] for name in ("flips, routing replayed", "ties, routing replayed") if name in found]
    lost = {arm: unresolved(runs, arm) for arm in ("flips", "ties")}
    several = len({run["seed"] for run in runs}) > 1 and not any(few for few, _ in lost.values())
    verdict: common.Verdict = "cannot be told here"
    if several and any(one.high < 1 - TOLERANCE for one in fits):
        verdict = "does not hold"
    elif several and len(fits) == 2 and all(abs(edge - 1) <= TOLERANCE for one in fits for edge in (one.low, one.high)):
        at_one_kl = found.get("fixed_kl, routing replayed")
        verdict = "holds" if at_one_kl and at_one_kl[0].low > 0 else verdict
    why = "; ".join(f"{name}: (K delta)^{a.text()} K^{b.text()}" for name, (a, b) in found.items())
    why += "".join(
        f"; {arm}: within the noise in {few} of {cells} cells of the fit" for arm, (few, cells) in lost.items() if few
    )
    over_k = {arm: pooled(runs, arm) for arm in ARMS if cells_of(runs, arm)}
    rows = [
        [
            arm, str(experts), f"{rate:g}", f"{k_delta(mine):.4f}",
            *(f"{np.mean([run[name] for run in mine]):.2g}" for name in ("kl_k3", "chi2_token", "ess_sequence")),
            *(f"{relative(mine, oracle):.3f}" for oracle in ORACLES), str(len(mine)),
        ]
        for arm in ARMS
        for (experts, rate), mine in sorted(cells_of(runs, arm).items())
    ]  # fmt: skip
    header = [
        "arm",
        "K",
        "rate",
        "K delta",
        "token KL",
        "token chi2",
        "ESS of responses",
        "bias to replay",
        "bias to on-policy",
    ]
    numbers = {
        "exponents of K delta and K": {name: [one._asdict() for one in pair] for name, pair in found.items()},
        "bias to replay over all K, by rate": {
            arm: {f"{rate:g}": one._asdict() for rate, _, one in rates} for arm, rates in over_k.items()
        },
    }
    summary = [
        [arm, f"{rate:g}", f"{delta:.3f}", one.text(3)] for arm, rates in over_k.items() for rate, delta, one in rates
    ]
    tables = (
        common.markdown(["arm", "rate", "K delta", "bias to replay, all K"], summary),
        common.markdown([*header, "seeds"], rows),
    )
    return Finding(verdict, why, "\n".join(tables), numbers)


def draw(runs: Sequence[Outcome]) -> str:
    """Relative bias over K delta, an arm a panel."""
    titles = {"flips": "flips anywhere", "ties": "flips at near-ties", "fixed_kl": "at one token KL"}

    def panels(figure: Figure) -> None:
        arms = [arm for arm in ARMS if cells_of(runs, arm)]
        axes = figure.subplots(1, len(arms), sharey=True, squeeze=False)[0]
        for axis, arm in zip(axes, arms, strict=True):
            panel(axis, runs, arm)
            label(axis, "K delta", "", titles[arm])
        axes[0].set_ylabel("|bias| / |oracle|")
        legend_below(figure, axes[-1])

    return to_svg("What router flips do to token IS", 3.4, panels)


def panel(axes: Axes, runs: Sequence[Outcome], arm: str) -> None:
    """A mark a cell; black: all K together, with intervals; dotted: proportional to K delta."""
    cells = cells_of(runs, arm)
    for experts, colour, marker in zip(EXPERTS, (BLUE, ORANGE, GREEN, GREY), "os^D", strict=True):
        mine = [cells[key] for key in sorted(cells) if key[0] == experts and key[1] > 0]
        x, y = [k_delta(one) for one in mine], [relative(one, "replay") for one in mine]
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linestyle="none", alpha=0.7, label=f"K = {experts}")
    points = pooled(runs, arm)
    x = np.array([delta for _, delta, _ in points])
    y, low, high = (np.array([getattr(one, name) for _, _, one in points]) for name in ("value", "low", "high"))
    axes.errorbar(
        x, y, yerr=np.clip([y - low, high - y], 0, None), color=INK, marker="_", linestyle="none", label="all K"
    )
    if y[-1] > 0:
        axes.plot(x, y[-1] / x[-1] * x, color=INK, linestyle=":", linewidth=1.0, label="proportional to K delta")
    ticks(axes, [0.01, 0.1, 1.0])
    axes.set_yscale("symlog", linthresh=0.02)


CONJECTURE = Conjecture(
    title="Mixture of experts: the price of a flip",
    settings=Settings(),
    short=Settings(batches=4, groups=4),
    seeds=(0, 1, 2),
    plan=plan,
    experiment=Experiment(common.unwarmed, run),
    find=find,
    draw=draw,
)
