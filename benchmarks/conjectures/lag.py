"""Conjecture 5: how far may a sampler lag behind, and does the sequence ESS say so? And staleness by learning rate.

The sampler gets the learner's weights every L optimizer steps, and all runs take the same number of steps on batches of
the same size. Just before a sync the lag is L; there the ESS is measured, on prompts that nobody trains on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from benchmarks.lab.jobs import Experiment
from benchmarks.lab.loop import Rollouts, policy_batch
from benchmarks.lab.measure import raw_ess, warm_model
from benchmarks.lab.sorting import Sorter, Task, prompts, reward, sample
from docs.drawing import label, legend_below, to_svg
from trl_offpolicy.diagnosis.report.plots import BLUE, ORANGE

LAGS = (1, 10, 50, 100, 200, 400, 800)
STEPS = 800
NOTHING = op.Correction(measure=())
OBJECTIVES = {
    "oapl": op.Objective(
        policy_loss=op.losses.OAPL(beta=1.0, scope="micro_batch"), correction=NOTHING, aggregation="seq_mean_token_mean"
    ),
    "ppo": op.Objective(policy_loss=op.losses.PPOClip(low=0.2, high=0.2), correction=NOTHING),
}
RATES: dict[Task, tuple[float, ...]] = {"sorting": (1e-4, 3e-4, 1e-3), "reversing": (3e-4, 1e-3, 3e-3)}
"""Learning rates of Adam: what stays stable at L = 1 differs by task."""
DROP, HALF, APART, SEPARATED = 0.3, 0.5, 0.5, 0.9
"""Fall of the reward that is a collapse; share of the gain at L = 1 that counts as learning; difference of two
exponents that refutes; AUROC that counts as separated."""


@dataclass(frozen=True)
class Settings(common.CommonSettings):
    """What all runs share.

    Args:
        steps: optimizer steps, each on a batch of its own.
        groups: prompts a step, 8 answers each.
        probes: measurements along a run, of the ESS (at syncs) and of the learner's reward.
        probe_groups: prompts of the ESS's probe, 8 answers each.
        bias_batches: of 2 prompts, in the measurement of the bias at the first two probes.
    """

    steps: int = STEPS
    groups: int = 4
    probes: int = 8
    probe_groups: int = 16
    bias_batches: int = 12


@dataclass(frozen=True)
class Job(common.Named):
    """One run; runs of one task and seed share the warm start and the training prompts."""

    task: Task
    objective: str
    lag: int
    learning_rate: float
    seed: int


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and evaluate; a finished run is read, not repeated."""

    def make() -> dict[str, Any]:
        model = warm_model(settings, job.seed, folder / "warm_starts", task=job.task)
        return {"start": common.exact_accuracy(model, job.task), **train(model, job, settings)}

    return common.recorded(job, settings, folder, make)


def train(model: Sorter, job: Job, settings: Settings) -> dict[str, Any]:
    """A curve of the learner's held-out reward, the ESS before syncs, and the exact accuracy at the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate, betas=(0.9, 0.95))
    asking, chance = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    every = max(settings.steps // settings.probes, 1)
    sampler, ahead = model, []
    rewards, shares = [held_out(model, job, settings)], []
    squares = {"bias": 0.0, "gradient": 0.0}
    for step in range(settings.steps):
        if step % job.lag == 0:
            sampler, ahead = deepcopy(model).requires_grad_(False), []
        if not ahead:  # answers of one sampler can be drawn for several steps at once
            until_sync = min(job.lag - step % job.lag, settings.steps - step, 8)
            ahead = list(
                split(
                    common.rollouts_of(sampler, None, settings.groups * until_sync, job.task, asking, chance),
                    until_sync,
                )
            )
        update(model, optimizer, OBJECTIVES[job.objective], ahead.pop())
        if (step + 1) % every == 0:
            rewards.append(held_out(model, job, settings))
        if (step + 1) % job.lag == 0 and len(shares) < (step + 1) / every:
            shares.append(probe(sampler, model, job, settings))
            if len(shares) <= 2:
                found = stale_bias(sampler, model, job, settings)
                squares = {name: squares[name] + found[name] for name in squares}
    rewards = [value if math.isfinite(value) else 0.0 for value in rewards]
    return {"rewards": rewards, "ess": shares, **squares, "accuracy": common.exact_accuracy(model, job.task)}


def split(rollouts: Rollouts, parts: int) -> list[Rollouts]:
    """Whole groups, as many batches as wanted."""
    rows = torch.arange(len(rollouts.rewards)).chunk(parts)
    return [
        Rollouts(
            type(rollouts.answers)(rollouts.answers.ids[i], rollouts.answers.mask[i], rollouts.answers.logps[i]),
            rollouts.old[i], rollouts.rewards[i], rollouts.advantages[i], rollouts.group_size,
        )
        for i in rows
    ]  # fmt: skip


def update(model: Sorter, optimizer: torch.optim.Optimizer, objective: op.Objective, rollouts: Rollouts) -> None:
    """One optimizer step, gradient norm at most 1."""
    loss = objective(policy_batch(model, rollouts, torch.arange(len(rollouts.rewards)))).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def held_out(model: Sorter, job: Job, settings: Settings) -> float:
    """The learner's own mean reward."""
    questions = prompts(settings.questions, torch.Generator().manual_seed(1))
    return float(reward(sample(model, questions, torch.Generator().manual_seed(2)), job.task).mean())


def probe(sampler: Sorter, model: Sorter, job: Job, settings: Settings) -> float:
    """Sequence ESS of learner / sampler as a fraction, on held-out prompts."""
    asking, chance = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    return raw_ess(common.rollouts_of(sampler, model, settings.probe_groups, job.task, asking, chance))[1]


def stale_bias(sampler: Sorter, model: Sorter, job: Job, settings: Settings) -> dict[str, float]:
    """Squares of the gradient's bias on stale answers and of the gradient on the learner's own, on the same prompts.

    Both are unbiased estimates from independent batches, and may be negative.
    """
    stale, fresh = [], []
    asking, chance = (torch.Generator().manual_seed(part) for part in (5, 6))
    for _ in range(settings.bias_batches):
        for kept, source in ((stale, sampler), (fresh, model)):
            asked = torch.Generator()
            asked.set_state(asking.get_state())
            rollouts = common.rollouts_of(source, None, 2, job.task, asked, chance)
            kept.append(gradient(model, OBJECTIVES[job.objective], rollouts))
        asking.set_state(asked.get_state())
    different = torch.stack(stale) - torch.stack(fresh)
    return {"bias": common.squared_mean(different), "gradient": common.squared_mean(torch.stack(fresh))}


def gradient(model: Sorter, objective: op.Objective, rollouts: Rollouts) -> Tensor:
    """(parameters,)."""
    loss = objective(policy_batch(model, rollouts, torch.arange(len(rollouts.rewards)))).loss
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def plan(seeds: Sequence[int], short: bool) -> list[Job]:
    """All runs, a seed at a time; short: three lags, one task and learning rate."""
    if short:
        return [Job("reversing", *cell, 1e-3, seed) for seed in seeds for cell in product(OBJECTIVES, (1, 10, 50))]
    # the middle rate first, so that a part of the runs already covers all lags of both tasks
    cells = [
        (task, *cell, RATES[task][place]) for place in (1, 2, 0) for cell in product(OBJECTIVES, LAGS) for task in RATES
    ]
    return [Job(*cell, seed) for seed in seeds for cell in cells]


Judge = Callable[[Outcome], bool]


def is_stable(run: Outcome) -> bool:
    """The reward at the end (two measurements) is not 30 % below the best: no collapse."""
    return float(np.mean(run["rewards"][-2:])) > (1 - DROP) * max(run["rewards"])


def learns(runs: Sequence[Outcome]) -> Judge:
    """Whether a run gains at least half of what the run at L = 1 with the same rest gains (False where that lost)."""

    def rest(run: Outcome) -> tuple[Any, ...]:
        return tuple(run[name] for name in ("task", "objective", "learning_rate", "seed"))

    gains = {rest(run): run["accuracy"] - run["start"] for run in runs if run["lag"] == 1}
    return lambda run: run["accuracy"] - run["start"] >= HALF * gains[rest(run)] > 0


def criteria(runs: Sequence[Outcome]) -> dict[str, Judge]:
    """What a tolerated lag may mean; the conjecture's is the first."""
    return {"no collapse": is_stable, "half of the gain": learns(runs)}


def early_ess(run: Outcome) -> float:
    """ESS before the first two syncs, a fraction. With a long lag these are late, maybe later than a collapse."""
    return float(np.mean(run["ess"][:2]))


def fallen_before_the_ess(runs: Sequence[Outcome]) -> tuple[int, int]:
    """Collapsed runs whose reward had fallen by 30 % when the second ESS was measured, of how many collapsed ones."""
    late = collapsed = 0
    for run in runs:
        if is_stable(run):
            continue
        collapsed += 1
        every = STEPS / (len(run["rewards"]) - 1)
        lowest = (1 - DROP) * max(run["rewards"])
        best = int(np.argmax(run["rewards"]))
        fallen = next(place for place, value in enumerate(run["rewards"]) if place > best and value <= lowest)
        late += measured_at(run["lag"], every)[:2][-1] >= fallen * every
    return late, collapsed


def measured_at(lag: int, every: float) -> list[int]:
    """The steps at which :func:`train` measures the ESS."""
    at: list[int] = []
    for step in range(lag, STEPS + 1, lag):
        if len(at) < step / every:
            at.append(step)
    return at


class Boundary(NamedTuple):
    """Where a logistic regression of instability on log x and log y is undecided: log y = slope log x + constant.

    Args:
        slope: NaN where y decides nothing, or all runs are alike.
        constant: natural logarithm of y at x = 1.
        separated: AUROC of the regression on the runs that it was fitted on.
    """

    slope: float
    constant: float
    separated: float


def boundary(runs: Sequence[Outcome], x: str, y: str, good: Judge = is_stable) -> Boundary:
    """Of the good region in the plane of two quantities (``QUANTITIES``)."""
    unstable = np.array([not good(run) for run in runs])
    if not unstable.any() or unstable.all():
        return Boundary(*(float("nan"),) * 3)
    features = np.array([[math.log(QUANTITIES[name](run)) for name in (x, y)] for run in runs])
    of_x, of_y, constant = common.logistic(features, unstable.astype(float), ridge=0.1)
    separated = common.auroc(features @ np.array([of_x, of_y]), unstable)
    if abs(of_y) < 1e-3:
        return Boundary(float("nan"), float("nan"), separated)
    return Boundary(float(-of_x / of_y), float(-constant / of_y), separated)


QUANTITIES: dict[str, Callable[[Outcome], float]] = {
    "lag": lambda run: float(run["lag"]),
    "rate": lambda run: float(run["learning_rate"]),
    "ess": lambda run: max(early_ess(run), 1e-3),
}


def of(runs: Sequence[Outcome], task: str, objective: str) -> list[Outcome]:
    """The runs of a task and an objective."""
    return [run for run in runs if (run["task"], run["objective"]) == (task, objective)]


class Law(NamedTuple):
    """What one task and objective say.

    Args:
        unstable: runs that are not good, of how many.
        alpha: exponent of the ESS in the largest lag.
        c: the largest lag at ESS = 1.
        separated: AUROC of that law, of the ESS alone (low = unstable), of the lag alone, and of the learning rate
            alone.
        rate_slope: d log(largest learning rate) / d log(lag); the law of 2607.01083 has -1 (staleness binds) or 0
            (the horizon binds).
        bias: exponent of the gradient's relative bias in lag x learning rate; the law has 1.
    """

    unstable: tuple[int, int]
    alpha: common.Range
    c: float
    separated: tuple[float, float, float, float]
    rate_slope: common.Range
    bias: common.Range


def bias_exponent(runs: Sequence[Outcome]) -> float:
    """Slope of log(|bias| / |gradient|) on log(lag x rate), of cells with a positive estimate below 1 (saturation)."""
    cells: dict[float, list[Outcome]] = {}
    for run in runs:
        cells.setdefault(run["lag"] * run["learning_rate"], []).append(run)
    points = []
    for product_, mine in cells.items():
        square = sum(run["bias"] for run in mine) / sum(run["gradient"] for run in mine)
        if 0 < square < 1:
            points.append((math.log(product_), math.log(square) / 2))
    return common.line(*zip(*points, strict=True))[0] if len(points) > 2 else float("nan")


def law(runs: Sequence[Outcome], good: Judge) -> Law:
    """Of the runs of one task and objective; intervals by resampling runs."""
    unstable = [not good(run) for run in runs]
    both = boundary(runs, "ess", "lag", good)
    by_ess = common.auroc([-QUANTITIES["ess"](run) for run in runs], unstable)
    by_lag = common.auroc([QUANTITIES["lag"](run) for run in runs], unstable)
    by_rate = common.auroc([QUANTITIES["rate"](run) for run in runs], unstable)
    return Law(
        unstable=(sum(unstable), len(runs)),
        alpha=common.bootstrap(runs, lambda some: boundary(some, "ess", "lag", good).slope),
        c=math.exp(min(both.constant, 50.0)) if math.isfinite(both.constant) else float("nan"),
        separated=(both.separated, by_ess, by_lag, by_rate),
        rate_slope=common.bootstrap(runs, lambda some: boundary(some, "lag", "rate", good).slope),
        bias=common.bootstrap(runs, bias_exponent),
    )


def find(runs: Sequence[Outcome]) -> Finding:
    """Conjecture 5 is about OAPL: it fails if the law does not separate, or its exponents differ by more than 0.5."""
    laws = {
        (task, name, criterion): law(mine, good)
        for task, name in product(RATES, OBJECTIVES)
        if (mine := of(runs, task, name))
        for criterion, good in criteria(mine).items()
    }
    native = [laws[task, "oapl", "no collapse"] for task in RATES if (task, "oapl", "no collapse") in laws]
    verdict: common.Verdict = "cannot be told here"
    if len(native) == 2:
        first, second = (one.alpha for one in native)
        apart = max(first.low - second.high, second.low - first.high)
        widest = max(first.high - second.low, second.high - first.low)
        if apart > APART or any(one.separated[0] < SEPARATED for one in native):
            verdict = "does not hold"
        elif widest <= APART and all(one.separated[0] >= SEPARATED for one in native):
            verdict = "holds"
    why = "; ".join(
        f"{task}, {name}: alpha {one.alpha.text()}, separation {one.separated[0]:.2f}, {one.unstable[0]} of "
        f"{one.unstable[1]} runs collapsed"
        for (task, name, criterion), one in laws.items()
        if criterion == "no collapse"
    )
    rows = [
        [
            *key, f"{one.unstable[0]} of {one.unstable[1]}", one.alpha.text(), f"{one.c:.3g}",
            " / ".join(f"{value:.2f}" for value in one.separated), one.rate_slope.text(), one.bias.text(),
        ]
        for key, one in laws.items()
    ]  # fmt: skip
    header = ["task", "objective", "tolerated means", "runs that fail", "alpha", "c"]
    header += ["separated by the law / ESS / lag / rate", "slope of the largest rate", "exponent of the bias"]
    numbers = {" ".join(key): as_numbers(one) for key, one in laws.items()}
    late = [
        f"{late} of {collapsed} in {task}"
        for task in RATES
        for late, collapsed in [fallen_before_the_ess(of(runs, task, "oapl"))]
    ]
    said = f"Runs with OAPL that had fallen by 30 % when the second ESS was measured: {', '.join(late)}."
    return Finding(verdict, why, f"{common.markdown(header, rows)}\n{said}\n\n{cells_table(runs)}", numbers)


def as_numbers(one: Law) -> dict[str, Any]:
    """For JSON."""
    return {key: value._asdict() if isinstance(value, common.Range) else value for key, value in one._asdict().items()}


def cells_table(runs: Sequence[Outcome]) -> str:
    """Exact accuracy / ESS of every cell (seeds' mean), with an x for each run that collapsed."""
    cells: dict[tuple[Any, ...], list[Outcome]] = {}
    for run in runs:
        cells.setdefault((run["task"], run["objective"], run["learning_rate"], run["lag"]), []).append(run)
    lags = sorted({key[3] for key in cells})

    def text(mine: list[Outcome]) -> str:
        if not mine:
            return "-"
        accuracy, share = np.mean([run["accuracy"] for run in mine]), np.mean([early_ess(run) for run in mine])
        return f"{accuracy:.2f} / {share:.2f} " + "x" * sum(not is_stable(run) for run in mine)

    rows = [
        [task, objective, f"{rate:g}", *(text(cells.get((task, objective, rate, lag), [])) for lag in lags)]
        for task, objective, rate in sorted({key[:3] for key in cells})
    ]
    return common.markdown(["task", "objective", "rate", *(f"L = {lag}" for lag in lags)], rows)


def draw(runs: Sequence[Outcome]) -> str:
    """Stable and unstable runs: lag over ESS, and learning rate over lag, a column a task."""
    styles = {"oapl": (BLUE, "o"), "ppo": (ORANGE, "s")}

    def panels(figure: Figure) -> None:
        axes = figure.subplots(2, len(RATES), sharey="row", squeeze=False)
        chance = np.random.default_rng(0)
        for column, task in enumerate(RATES):
            for (x, y), axis in zip((("ess", "lag"), ("lag", "rate")), axes[:, column], strict=True):
                for name, (colour, marker) in styles.items():
                    mine = of(runs, task, name)
                    for stable in (True, False):
                        some = [run for run in mine if is_stable(run) is stable]
                        jitter = np.exp(chance.normal(scale=0.08, size=(2, len(some))))
                        kind = f"{name}, {'stable' if stable else 'collapsed'}"
                        axis.plot(
                            [QUANTITIES[x](run) for run in some] * jitter[0],
                            [QUANTITIES[y](run) for run in some] * jitter[1],
                            color=colour, marker=marker, markersize=4, linestyle="none",
                            fillstyle="none" if stable else "full", label=kind,
                        )  # fmt: skip
                    border(axis, mine, x, y, colour)
                axis.set_xscale("log")
                axis.set_yscale("log")
            label(axes[0, column], "sequence ESS before a sync", "", task)
            label(axes[1, column], "lag L, optimizer steps", "", "")
        axes[0, 0].set_ylabel("lag L, optimizer steps")
        axes[1, 0].set_ylabel("learning rate")
        legend_below(figure, axes[0, 0])

    return to_svg("Lag, sequence ESS and learning rate: what stays stable", 5.6, panels)


def border(axes: Axes, runs: Sequence[Outcome], x: str, y: str, colour: str) -> None:
    """The fitted boundary, as far as the runs reach."""
    found = boundary(runs, x, y)
    if not math.isfinite(found.slope):
        return
    low, high = (edge([QUANTITIES[y](run) for run in runs]) for edge in (min, max))
    ends = np.geomspace(*(edge([QUANTITIES[x](run) for run in runs]) for edge in (min, max)), 50)
    heights = np.exp(found.constant) * ends**found.slope
    inside = (heights >= 0.7 * low) & (heights <= 1.4 * high)
    axes.plot(ends[inside], heights[inside], color=colour, linestyle="--", linewidth=1.0)


CONJECTURE = Conjecture(
    title="Lag: how far, and does the ESS say so?",
    settings=Settings(),
    short=Settings(steps=100, probes=4),
    seeds=(0, 1),
    plan=plan,
    experiment=Experiment(common.unwarmed, run),
    find=find,
    draw=draw,
)
