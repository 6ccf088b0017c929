"""Runs of a small experiment as jobs: finished ones are read, missing ones run in processes under a progress bar."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Job(Protocol):
    """One run of an experiment."""

    @property
    def name(self) -> str:
        """Its file's name."""

    @property
    def seed(self) -> int:
        """Decides the warm start."""


@dataclass(frozen=True)
class Experiment:
    """What :func:`run_all` calls, also in other processes: functions of a module.

    Args:
        warm: makes the warm start of (settings, seed, folder).
        run: makes and writes the outcome of (job, settings, folder), or reads a finished one.
    """

    warm: Callable[[Any, int, Path], Any]
    run: Callable[[Any, Any, Path], dict[str, Any]]


def outcome_of(job: Job, settings: Any, folder: Path) -> dict[str, Any] | None:
    """What a finished run with these settings wrote, or None."""
    path = folder / "runs" / f"{job.name}.json"
    if not path.exists():
        return None
    outcome: dict[str, Any] = json.loads(path.read_text())
    return outcome if outcome["settings"] == asdict(settings) else None


def write_outcome(job: Job, outcome: dict[str, Any], folder: Path) -> None:
    """Where :func:`outcome_of` looks for it."""
    write_atomically(folder / "runs" / f"{job.name}.json", (json.dumps(outcome) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """A file is there as a whole or not at all, also when two processes write it or one is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def run_all(
    jobs: Sequence[Any], settings: Any, folder: Path, processes: int, experiment: Experiment
) -> list[dict[str, Any]]:
    """Every outcome, in the order of ``jobs``; only what is missing is run, warm starts first.

    The first failure ends it; finished runs stay.
    """
    missing = [job for job in jobs if outcome_of(job, settings, folder) is None]
    seeds = sorted({job.seed for job in missing})
    steps = [("warm starts", experiment.warm, [(settings, seed, folder / "warm_starts") for seed in seeds])]
    steps += [("runs", experiment.run, [(job, settings, folder) for job in missing])]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bar:
        for title, call, rows in steps if missing else []:
            task = bar.add_task(title, total=len(rows))
            for _ in _finished(call, rows, processes):
                bar.advance(task)
    return [experiment.run(job, settings, folder) for job in jobs]


def _finished(call: Callable[..., Any], rows: Sequence[tuple[Any, ...]], processes: int) -> Iterator[Any]:
    """``call`` on every row, as they finish: in this process, or in several of one thread each."""
    if processes == 1:
        _one_thread()
        yield from (call(*row) for row in rows)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _one_thread) as pool:
        try:
            for future in as_completed([pool.submit(call, *row) for row in rows]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one_thread() -> None:
    torch.set_num_threads(1)


def run_and_time(
    jobs: Sequence[Any], settings: Any, folder: Path, processes: int, experiment: Experiment
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """:func:`run_all`, and what it cost: runs, finished before, seconds of wall clock and CPU, torch's version."""
    started, used = time.monotonic(), _cpu_seconds()
    before = sum(outcome_of(job, settings, folder) is not None for job in jobs)
    runs = run_all(jobs, settings, folder, processes, experiment)
    cost = {
        "runs": len(runs),
        "finished_before": before,
        "wall_seconds": time.monotonic() - started,
        "cpu_seconds": _cpu_seconds() - used,
        "cpu_seconds_of_all_runs": sum(run["cpu_seconds"] for run in runs),
        "torch": torch.__version__,
    }
    return runs, cost


def _cpu_seconds() -> float:
    """User and system time of this process and the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def cost_text(cost: dict[str, Any]) -> str:
    """The line below a table."""
    return (
        f"{cost['runs']} runs ({cost['finished_before']} from before): {cost['wall_seconds']:.0f} s of wall clock, "
        f"{cost['cpu_seconds']:.0f} CPU seconds; all runs {cost['cpu_seconds_of_all_runs']:.0f}."
    )
