"""What the four experiments share: rollouts of another policy, an evaluation without sampling noise, fits, verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.lab.intervals import Interval
from benchmarks.lab.jobs import Experiment, outcome_of, write_outcome
from benchmarks.lab.loop import Rollouts, group_advantages
from benchmarks.lab.sorting import Sorter, Task, prompts, reward, sample, solutions, token_logps

Outcome = Mapping[str, Any]
Verdict = Literal["holds", "does not hold", "cannot be told here"]
Floats = NDArray[np.float64]
GROUP = 8
"""Answers a prompt."""
_QUESTIONS = prompts(2048, torch.Generator().manual_seed(10**6))


@dataclass(frozen=True)
class CommonSettings:
    """What the warm start of every experiment needs (``benchmarks/lab/measure.py``).

    Args:
        start_accuracy: sampled accuracy at which the supervised warm start ends.
        warm_up_steps: its steps at most.
        questions: held-out prompts of a measurement.
    """

    start_accuracy: float = 0.25
    warm_up_steps: int = 400
    questions: int = 128


class Named:
    """A job whose name is that of its fields, the seed last."""

    @property
    def name(self) -> str:
        """Its file's name."""
        values = asdict(self).values()  # type: ignore[call-overload]
        return "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def recorded(job: Any, settings: Any, folder: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The outcome of a finished run, or what ``make`` returns now, written with job, settings and CPU time."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    began = time.process_time()
    outcome = {**asdict(job), "settings": asdict(settings), **make()}
    outcome["cpu_seconds"] = time.process_time() - began
    write_outcome(job, outcome, folder)
    return outcome


class Finding(NamedTuple):
    """What an experiment says: the verdict, why in one sentence, its table in Markdown, and its numbers."""

    verdict: Verdict
    why: str
    table: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Conjecture:
    """An experiment that ``run.py`` can make.

    Args:
        title: of its figure.
        settings: of the full runs.
        short: of ``--short``.
        seeds: of the full runs.
        plan: jobs of (seeds, short).
        experiment: how a run is made.
        find: the finding of finished runs.
        draw: the SVG text of finished runs.
    """

    title: str
    settings: Any
    short: Any
    seeds: Sequence[int]
    plan: Callable[[Sequence[int], bool], list[Any]]
    experiment: Experiment
    find: Callable[[Sequence[Outcome]], Finding]
    draw: Callable[[Sequence[Outcome]], str]


def unwarmed(settings: Any, seed: int, folder: Path) -> None:
    """Nothing: a run makes the one warm start that it needs, of several tasks and models."""


def rollouts_of(
    sampler: Sorter, old: Sorter | None, groups: int, task: Task, asking: torch.Generator, chance: torch.Generator
) -> Rollouts:
    """Answers of a model to new prompts, ``GROUP`` each, with the log-probs of another (None = its own) as ``old``."""
    answers = sample(sampler, prompts(groups, asking).repeat_interleave(GROUP, 0), chance)
    with torch.no_grad():
        logps = answers.logps if old is None else token_logps(old, answers.ids)
    rewards = reward(answers, task)
    return Rollouts(answers, logps, rewards, group_advantages(rewards, GROUP), GROUP)


@torch.no_grad()
def exact_accuracy(model: nn.Module, task: Task) -> float:
    """Probability of a right answer, mean over 2,048 held-out prompts.

    It is what sampled accuracy estimates: a task has one right answer, whose probability a single forward gives. So no
    sampling noise hides a difference of 0.003 between two models.
    """
    ids = torch.cat([_QUESTIONS, solutions(_QUESTIONS, task)], dim=1)
    return float(token_logps(model, ids).sum(1).exp().mean())


def judged(gain: Interval, limit: float) -> Literal["below", "above", "open"]:
    """Where a mean lies against a limit, by its 95 % interval; NaN widths (one seed) tell nothing."""
    if gain.mean + gain.half < limit:
        return "below"
    return "above" if gain.mean - gain.half >= limit else "open"


def auroc(scores: Sequence[float] | Floats, positive: Sequence[bool] | NDArray[np.bool_]) -> float:
    """Share of (positive, negative) pairs in the right order, ties half; NaN without one of the two.

    Example:
        >>> auroc([0.1, 0.4, 0.4, 0.9], [False, False, True, True])
        0.875
    """
    values, is_positive = np.asarray(scores, float), np.asarray(positive, bool)
    ordered = np.sort(values[~is_positive])
    if not len(ordered) or not is_positive.any():
        return float("nan")
    below = np.searchsorted(ordered, values[is_positive], "left")
    upto = np.searchsorted(ordered, values[is_positive], "right")
    return float((below + upto).mean() / 2 / len(ordered))


def logistic(features: Floats, labels: Floats, *, ridge: float = 1.0, weights: Floats | None = None) -> Floats:
    """Coefficients of a logistic regression, the constant last, by Newton steps.

    Args:
        features: (N, F), of about unit scale.
        labels: (N,) 0 or 1.
        ridge: penalty ridge / 2 * |coefficients|^2 (the constant is free); it keeps separable data finite.
        weights: (N,), None = 1 each.
    """
    design = np.column_stack([features, np.ones(len(features))])
    weight = np.ones(len(features)) if weights is None else weights
    penalty = ridge * np.append(np.ones(features.shape[1]), 1e-9)

    def loss(at: Floats) -> float:
        scores = design @ at
        return float(weight @ (np.logaddexp(0, scores) - labels * scores) + penalty @ at**2 / 2)

    found = np.zeros(design.shape[1])
    for _ in range(100):
        chance = 1 / (1 + np.exp(-np.clip(design @ found, -500, 500)))
        slope = design.T @ (weight * (chance - labels)) + penalty * found
        curvature = (design.T * (weight * chance * (1 - chance))) @ design + np.diag(penalty + 1e-9)
        step = np.linalg.solve(curvature, slope)
        # a whole step may leap to where every chance is 0 or 1
        while loss(found - step) > loss(found) and np.abs(step).max() > 1e-10:
            step = step / 2
        found = found - step
        if np.abs(step).max() < 1e-8:
            break
    return found


def line(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> tuple[float, float]:
    """Slope and constant of least squares.

    Example:
        >>> line([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
        (2.0, 1.0)
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    spread = x - x.mean()
    slope = float(spread @ y / (spread @ spread))
    return slope, float(y.mean() - slope * x.mean())


def squared_mean(samples: Tensor) -> float:
    """Unbiased estimate of |E x|^2 from independent rows (M, N): the mean product of two different rows. May be < 0."""
    count, total = len(samples), samples.double().sum(0)
    return float((total @ total - samples.double().square().sum()) / (count * (count - 1)))


class Range(NamedTuple):
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """For a table."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def bootstrap(
    clusters: Sequence[Any], estimate: Callable[[Sequence[Any]], float], *, times: int = 200, seed: int = 0
) -> Range:
    """The estimate, and the 2.5 and 97.5 % quantiles of it over resampled clusters (NaNs are left out).

    Args:
        clusters: what is independent: runs, or seeds with all their runs.
        estimate: of a sample of clusters.
        times: resamplings.
        seed: of them.
    """
    chance, found = np.random.default_rng(seed), []
    for _ in range(times):
        value = estimate([clusters[place] for place in chance.integers(len(clusters), size=len(clusters))])
        if np.isfinite(value):
            found.append(value)
    low, high = np.quantile(found, [0.025, 0.975]) if found else (float("nan"),) * 2
    return Range(float(estimate(clusters)), float(low), float(high))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def changed(model: Sorter, change: Callable[[Tensor], Tensor]) -> Sorter:
    """A copy without gradient, every linear weight put through ``change``."""
    copy = deepcopy(model).requires_grad_(False)
    for module in copy.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = change(module.weight.data)
    return copy
