"""Conjecture 2: do four numbers of the log predict a collapse, also on a task that the predictor never saw?

A run is a mixture drawn by its seed: rounding and lag of the sampler, loss, learning rate, when the fault begins. What
``benchmarks/collapse/train.py`` logs becomes features; whether the run collapsed is judged afterwards, from the
learner's own reward. A logistic regression is fitted on the runs of one task and judged on those of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.collapse.collapse_step import collapse_step
from benchmarks.collapse.train import NO_CLIP, PLAIN, PPO_IS, TIS, Setting, train
from benchmarks.conjectures import common
from benchmarks.conjectures.common import Conjecture, Finding, Outcome
from benchmarks.lab.jobs import Experiment
from benchmarks.lab.measure import warm_model
from benchmarks.lab.sorting import Task
from docs.drawing import label, legend_below, to_svg
from trl_offpolicy.control import collapse_risk
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, INK, ORANGE
from trl_offpolicy.run_folder.run_data import MetricsLog

TASKS: tuple[Task, Task] = ("sorting", "ranking")
ENOUGH, STACK_GAIN, HORIZON, ROLLING = 0.90, 0.03, 200, 5
"""The conjecture's AUROC, its margin for signals of the stack, its horizon in optimizer steps; rows of a median."""
STEPS_OF_A_GENERATION = 2
SINCE = "collapse_risk, rows since the fault began"
ALARM, PATIENCE = 0.5, 3
"""The risk at which ``control`` acts, and the rows in a row after which ``stop`` ends a run."""
FEWEST = 8
"""Collapsed runs, and others, that each task needs for a verdict."""
LOSSES = {"ppo": PLAIN, "tis": TIS, "ppo_is": PPO_IS, "no_clip": NO_CLIP}
COLUMNS = {
    "reward": "reward",
    "grad_norm": "grad_norm",
    "clip": "offpolicy/loss/clip_region_fraction",
    "k1": "offpolicy/staleness/kl_k1",
    "perplexity": "offpolicy/mismatch/ppl_sampling",
    "length": "offpolicy/rollout/response_length_mean",
    "chi2_p95": "offpolicy/total/chi2_token_p95",
    "variance": "offpolicy/total/product_variance",
    "raw_ess": "offpolicy/total/ess_sequence",
    "stack_k3": "offpolicy/mismatch/kl_k3",
    "stack_chi2": "offpolicy/mismatch/chi2_token",
    "stack_variance": "offpolicy/mismatch/product_variance",
    "stack_tv": "offpolicy/mismatch/tv_p95",
}
"""Column of a run -> what the trainers log. ``variance`` is D per token: the repaired ESS is exp(-16 D)."""
FOUR = ("chi2_p95", "variance", "clip", "length")
PLAIN_LOG = ("reward", "perplexity", "grad_norm", "clip", "k1")
STACK = ("stack_k3", "stack_chi2", "stack_variance", "stack_tv")
SETS: dict[str, tuple[str, ...]] = {
    "the four": FOUR,
    "the four, ESS as it was": ("chi2_p95", "raw_ess", "clip", "length"),
    "the four + stack": FOUR + STACK,
    "plain log": PLAIN_LOG,
    "plain log + stack": PLAIN_LOG + STACK,
}


@dataclass(frozen=True)
class Settings(common.CommonSettings):
    """What all runs share.

    Args:
        generations: rollout batches of 16 prompts x 8 answers, two optimizer steps each.
        starts: different warm starts; run i begins with number i modulo this.
    """

    generations: int = 80
    starts: int = 4


@dataclass(frozen=True)
class Job(common.Named):
    """One run: a task, and the seed that draws its mixture."""

    task: Task
    seed: int


def plan(seeds: Sequence[int], short: bool) -> list[Job]:
    """Both tasks for each seed; short: more seeds than the one asked for, because one run predicts nothing."""
    return [Job(task, seed) for seed, task in product(range(4) if short else seeds, TASKS)]


def mixture_of(seed: int) -> tuple[Setting, dict[str, Any]]:
    """The drawn setting, and its words for the results; the same for both tasks.

    Chosen so that runs of both kinds are expected: losses without a clip on stale weights and one clip on pi / mu with
    2 bits are known to collapse, and a learning rate of 1e-3 or more spoils the warm start before there is a log.
    """
    chance = np.random.default_rng([seed, 7])
    drawn = {
        "loss": str(chance.choice(list(LOSSES), p=[0.2, 0.2, 0.3, 0.3])),
        "bits": int(chance.choice([16, 3, 2])),
        "lag": int(chance.choice([0, 4, 8])),
        "learning_rate": float(chance.choice([2e-4, 3e-4, 5e-4])),
        "onset": int(chance.choice([10, 20, 30])),
        "noticed": bool(chance.random() < 0.5),
    }
    return Setting(LOSSES[drawn["loss"]], **{key: value for key, value in drawn.items() if key != "loss"}), drawn


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train; a finished run is read, not repeated."""
    return common.recorded(job, settings, folder, lambda: logged(job, settings, folder))


def logged(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """The setting, the step of the collapse (or None), and the columns of the log."""
    setting, drawn = mixture_of(job.seed)
    start = warm_model(settings, job.seed % settings.starts, folder / "warm_starts", task=job.task)
    logs = folder / "logs" / job.name
    rows = train(setting, job.seed, steps=settings.generations, start=start, folder=logs, task=job.task)
    log = MetricsLog(tuple(rows))
    # a run whose weights are no longer finite has collapsed where it ends, if nothing was seen before
    ended = rows[-1]["step"] if len(rows) < settings.generations else None
    columns = {"step": "step", "learner_reward": "learner_reward", **COLUMNS}
    kept = {name: [float(f"{row.get(key, 0.0):.5g}") for row in rows] for name, key in columns.items()}
    kept["risk"] = [collapse_risk(MetricsLog(log.rows[: end + 1])).score for end in range(len(rows))]
    return {"drawn": drawn, "collapse": collapse_step(log, "learner_reward") or ended, "rows": kept}


class Table(NamedTuple):
    """Rows of a run before its collapse: features (N, F), whether one follows within the horizon, and at all."""

    features: common.Floats
    labels: common.Floats
    collapsed: bool


def table_of(run: Outcome, names: Sequence[str]) -> Table | None:
    """Two features a column: the median of the last 5 rows in logarithmic scale, and its change since the run began.

    None if the run collapsed in its first rows.
    """
    steps, collapse = np.asarray(run["rows"]["step"]), run["collapse"]
    end = len(steps) if collapse is None else int((steps < collapse).sum())
    if end < 3:  # the median of fewer rows is no trend
        return None
    levels = [np.arcsinh(1e6 * rolling(run["rows"][name])) for name in names]  # a logarithm that takes negative k1
    columns = [column for level in levels for column in (level, level - level[min(ROLLING, end) - 1])]
    labels = np.zeros(end) if collapse is None else (collapse - steps[:end] <= HORIZON).astype(float)
    return Table(np.stack(columns, axis=1)[2:end], labels[2:], collapse is not None)


def rolling(values: Sequence[float]) -> common.Floats:
    """The median of each value and the four before it."""
    finite = np.nan_to_num(np.asarray(values, float), posinf=1e6, neginf=-1e6)
    return np.array([np.median(finite[max(0, place - ROLLING + 1) : place + 1]) for place in range(len(finite))])


def fitted(tables: Sequence[Table]) -> Callable[[common.Floats], common.Floats]:
    """A logistic regression in which runs count alike; features in standard deviations of these, at most 4."""
    features = np.concatenate([table.features for table in tables])
    middle, scale = features.mean(0), features.std(0) + 1e-9

    def scaled(values: common.Floats) -> common.Floats:
        return np.clip((values - middle) / scale, -4.0, 4.0)

    weights = np.concatenate([np.full(len(table.labels), 1 / len(table.labels)) for table in tables])
    labels = np.concatenate([table.labels for table in tables])
    found = common.logistic(scaled(features), labels, weights=weights * len(weights) / weights.sum(), ridge=10.0)
    return lambda values: np.asarray(scaled(values) @ found[:-1] + found[-1])


class Scored(NamedTuple):
    """A run that was predicted: a score and a label a row, and whether it collapsed."""

    scores: common.Floats
    labels: common.Floats
    collapsed: bool


def predictions(runs: Sequence[Outcome], names: Sequence[str], test: Task, *, same: bool = False) -> list[Scored]:
    """Runs of ``test``, scored by a regression on the other task; ``same``: on the same one, in five parts by run."""
    mine = [found for run in runs if run["task"] == test if (found := table_of(run, names)) is not None]
    if same:
        parts = [[one for place, one in enumerate(mine) if place % 5 == part] for part in range(5)]
        learned = [[one for place, one in enumerate(mine) if place % 5 != part] for part in range(5)]
    else:
        others = [found for run in runs if run["task"] != test if (found := table_of(run, names)) is not None]
        parts, learned = [mine], [others]
    scored = []
    for part, others in zip(parts, learned, strict=True):
        if part and {one.collapsed for one in others} == {True, False}:
            score = fitted(others)
            scored += [Scored(score(one.features), one.labels, one.collapsed) for one in part]
    return scored


def by_risk(runs: Sequence[Outcome], test: Task, *, faulty: bool = False) -> list[Scored]:
    """The kit's own collapse risk, which nobody fitted to these runs.

    Args:
        runs: all runs.
        test: the task to judge.
        faulty: only rows since the fault began: before it, a later collapse cannot be seen by anything.
    """
    found = []
    for run in runs:
        table = table_of(run, FOUR) if run["task"] == test else None
        if table is None:
            continue
        rows = slice(2, 2 + len(table.labels))
        kept = np.asarray(run["rows"]["step"])[rows] > (STEPS_OF_A_GENERATION * run["drawn"]["onset"] if faulty else 0)
        if kept.any():
            scores = np.asarray(run["rows"]["risk"])[rows]
            found.append(Scored(scores[kept], table.labels[kept], table.collapsed))
    return found


class Alarms(NamedTuple):
    """How often the risk reaches 0.5: in so many runs at all, and so many rows in a row as end a run.

    Args:
        once: runs with a row of 0.5 or more; of collapsed ones, before the collapse.
        held: runs with ``patience`` such rows, one after the other.
        runs: of how many.
    """

    once: int
    held: int
    runs: int


def alarms(runs: Sequence[Outcome], *, collapsed: bool) -> Alarms:
    """Of the runs that collapsed, or of those that did not."""
    once = held = count = 0
    for run in runs:
        if (run["collapse"] is not None) != collapsed:
            continue
        steps, risk = np.asarray(run["rows"]["step"]), np.asarray(run["rows"]["risk"])
        above = risk[steps < run["collapse"]] >= ALARM if collapsed else risk >= ALARM
        count += 1
        once += bool(above.any())
        held += any(above[row : row + PATIENCE].all() for row in range(len(above) - PATIENCE + 1))
    return Alarms(once, held, count)


def by_row(scored: Sequence[Scored]) -> float:
    """AUROC over rows."""
    return common.auroc(
        np.concatenate([one.scores for one in scored]), np.concatenate([one.labels for one in scored]) > 0
    )


def by_run(scored: Sequence[Scored]) -> float:
    """AUROC over runs, by the largest score before the collapse."""
    return common.auroc([one.scores.max() for one in scored], [one.collapsed for one in scored])


def differ(pairs: Sequence[tuple[Scored, Scored]]) -> float:
    """AUROC by row of the first minus that of the second."""
    return by_row([first for first, _ in pairs]) - by_row([second for _, second in pairs])


def measured(runs: Sequence[Outcome]) -> dict[str, dict[str, dict[str, common.Range]]]:
    """{test task: {predictor: {"row", "run", "same task": AUROC}}} and the gain of the stack's signals by row."""
    found: dict[str, dict[str, dict[str, common.Range]]] = {}
    for test in TASKS:
        scores = {name: predictions(runs, names, test) for name, names in SETS.items()}
        same = {name: predictions(runs, names, test, same=True) for name, names in SETS.items()}
        scores["collapse_risk, unfitted"] = by_risk(runs, test)
        scores[SINCE] = by_risk(runs, test, faulty=True)
        found[test] = {
            name: {"row": common.bootstrap(scored, by_row), "run": common.bootstrap(scored, by_run)}
            for name, scored in scores.items()
            if scored
        }
        for name, scored in same.items():
            if name in found[test] and scored:
                found[test][name]["same task"] = common.bootstrap(scored, by_row)
        for name in ("the four", "plain log"):
            if name in found[test]:
                pairs = list(zip(scores[f"{name} + stack"], scores[name], strict=True))
                found[test][name]["stack"] = common.bootstrap(pairs, differ)
    return found


def find(runs: Sequence[Outcome]) -> Finding:
    """Holds if the four reach 0.90 by row on both tasks, and the stack adds at most 0.03, intervals included."""
    found = measured(runs)
    counts = {
        task: [
            sum(run["collapse"] is not None for run in runs if run["task"] == task),
            sum(run["task"] == task for run in runs),
        ]
        for task in TASKS
    }
    verdict: common.Verdict = "cannot be told here"
    why = f"a task has fewer than {FEWEST} runs that collapsed, or that did not"
    if all(min(collapsed, total - collapsed) >= FEWEST for collapsed, total in counts.values()):
        reached = [found[test]["the four"]["row"] for test in TASKS]
        added = [found[test]["the four"]["stack"] for test in TASKS]
        if any(one.high < ENOUGH for one in reached) or any(one.low > STACK_GAIN for one in added):
            verdict = "does not hold"
        elif all(one.low >= ENOUGH for one in reached) and all(one.high <= STACK_GAIN for one in added):
            verdict = "holds"
        why = (
            f"AUROC by row of the four on the other task {reached[0].text()} and {reached[1].text()} "
            f"(wanted: {ENOUGH}); signals of the stack add {added[0].text()} and {added[1].text()} "
            f"(allowed: {STACK_GAIN})"
        )
    rows = [
        [
            f"{other(test)} to {test}",
            name,
            *(one[key].text() if key in one else "-" for key in ("row", "run", "same task", "stack")),
        ]
        for test in TASKS
        for name, one in found[test].items()
    ]
    header = ["from, to", "predictor", "AUROC by row", "by run", "by row, same task", "what the stack adds by row"]
    warned, false = alarms(runs, collapsed=True), alarms(runs, collapsed=False)
    numbers = {
        "collapsed_of_runs": counts,
        "alarms": {"before a collapse": warned._asdict(), "no collapse": false._asdict()},
        "auroc": {t: {n: {k: v._asdict() for k, v in one.items()} for n, one in found[t].items()} for t in TASKS},
    }
    said = "; ".join(f"{task}: {one[0]} of {one[1]} runs collapsed" for task, one in counts.items())
    said += (
        f". The risk reached {ALARM} before {warned.once} of {warned.runs} collapses, and in {false.once} of "
        f"{false.runs} runs without one; in {PATIENCE} rows in a row, at which `control: stop` ends a run, "
        f"{warned.held} and {false.held}"
    )
    return Finding(verdict, why, common.markdown(header, rows) + f"\n{said}.\n", numbers)


def other(task: Task) -> Task:
    """The task that the predictor learned on."""
    return TASKS[1 - TASKS.index(task)]


def draw(runs: Sequence[Outcome]) -> str:
    """AUROC of every predictor, and the learner's reward of all runs."""
    found = measured(runs)

    def panels(figure: Figure) -> None:
        axes = figure.subplot_mosaic([["auroc", TASKS[0]], ["auroc", TASKS[1]]], width_ratios=[1.3, 1])
        bars(axes["auroc"], found)
        legend_below(figure, axes["auroc"])
        for task in TASKS:
            rewards(axes[task], [run for run in runs if run["task"] == task], task)

    return to_svg("What predicts a collapse on another task", 4.4, panels)


def bars(axes: Axes, found: Mapping[str, Mapping[str, Mapping[str, common.Range]]]) -> None:
    """By row, with intervals; the line is what the conjecture asks for."""
    names = [*SETS, "collapse_risk, unfitted", SINCE]
    for shift, (test, colour, marker) in zip(
        (-0.12, 0.12), zip(TASKS, (BLUE, ORANGE), ("o", "s"), strict=True), strict=True
    ):
        mine = [(place, found[test][name]["row"]) for place, name in enumerate(names) if name in found[test]]
        axes.errorbar(
            [one.value for _, one in mine],
            [place + shift for place, _ in mine],
            xerr=np.abs([[one.value - one.low for _, one in mine], [one.high - one.value for _, one in mine]]),
            color=colour, marker=marker, markersize=4, linestyle="none", label=f"tested on {test}",
        )  # fmt: skip
    axes.axvline(ENOUGH, color=GREEN, linewidth=1.0, linestyle="--")
    axes.axvline(0.5, color=INK, linewidth=1.0, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    label(axes, "AUROC by row", "", "predicted on the task not seen")


def rewards(axes: Axes, runs: Sequence[Outcome], task: Task) -> None:
    """The learner's reward; collapsed runs in colour, with the step of the collapse."""
    for run in runs:
        steps, values = run["rows"]["step"], rolling(run["rows"]["learner_reward"])
        collapsed = run["collapse"] is not None
        axes.plot(steps, values, color=ORANGE if collapsed else GREY, linewidth=0.7, linestyle="-", alpha=0.8)
        if collapsed and run["collapse"] in steps:
            axes.plot(run["collapse"], values[steps.index(run["collapse"])], "x", color=INK, markersize=4)
    label(axes, "optimizer step", "", f"reward of the learner, {task}")


CONJECTURE = Conjecture(
    title="Collapse: do four numbers predict it?",
    settings=Settings(),
    short=Settings(generations=20, starts=1),
    seeds=tuple(range(32)),
    plan=plan,
    experiment=Experiment(common.unwarmed, run),
    find=find,
    draw=draw,
)
