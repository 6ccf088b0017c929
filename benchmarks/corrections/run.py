"""The benchmark of corrections: every mismatch with every correction, and what the learner can do in the end.

    python benchmarks/corrections/run.py                     # the whole grid, 3 seeds: about 3.5 CPU hours
    python benchmarks/corrections/run.py --short             # INT3, four corrections, one seed: under 3 minutes
    python benchmarks/corrections/run.py --mismatches int3 lag4 --rows none token_tis --seeds 0 1 2 3 4 5 6 7 8 9
    python benchmarks/corrections/run.py --report            # the tables and the figure from the results alone

A small transformer is taught to sort symbols and then trained by GRPO. What samples differs from what learns: rounded
weights, another temperature, older weights, routers that choose other experts. Finished runs are in the results file
and not repeated; each run is written when it is done.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each run has one thread
from benchmarks.corrections.experiment import Job, Settings, run, start_of
from benchmarks.corrections.figure import draw
from benchmarks.corrections.mismatches import MISMATCHES
from benchmarks.corrections.results import collect, missing
from benchmarks.corrections.rows import AVAILABLE
from benchmarks.corrections.tables import report, single_runs
from benchmarks.lab.jobs import Experiment, run_all
from benchmarks.lab.sorting import Task

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, collect, report."""
    args = parse(arguments)
    jobs = plan(args)
    left = [] if args.report else missing(jobs, collect(args.results, args.out / "runs"), args.settings)
    for part in _by_warm_start(left):
        warm = partial(start_of, task=args.task, experts=part[0].experts)
        run_all(part, args.settings, args.out, args.jobs, Experiment(warm, run))
        collect(args.results, args.out / "runs")
    results = collect(args.results, args.out / "runs")
    print(single_runs(results) if args.short else report(results))
    if args.figure is not None:
        args.figure.write_text(draw(results))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="INT3, four corrections, one seed, a quarter of the steps")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, help="default: results.jsonl beside this file (--short: in --out)")
    parser.add_argument("--out", type=Path, help="runs and warm starts; default: runs/corrections (--short: ..._short)")
    parser.add_argument("--figure", type=Path, help="write the figure (SVG) there")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--mismatches", nargs="+", choices=list(MISMATCHES), metavar="NAME", help=", ".join(MISMATCHES))
    parser.add_argument("--rows", nargs="+", choices=AVAILABLE, metavar="NAME", help=", ".join(AVAILABLE))
    parser.add_argument("--task", choices=get_args(Task), default="sorting")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each (default: 2)")
    args = parser.parse_args(arguments)
    short = args.short
    args.settings = replace(Settings(), generations=20, answers=2) if short else Settings()
    args.seeds = args.seeds or ([0] if short else [0, 1, 2])
    args.mismatches = args.mismatches or (["none", "int3"] if short else list(MISMATCHES))
    args.rows = args.rows or (["none", "token_tis", "geometric", "auto"] if short else AVAILABLE)
    args.out = args.out or Path("runs/corrections_short" if short else "runs/corrections")
    args.results = args.results or (args.out / "results.jsonl" if short else HERE / "results.jsonl")
    return args


def plan(args: argparse.Namespace) -> list[Job]:
    """All runs, a seed at a time, so that an interrupted grid has whole seeds.

    Without a mismatch every weight is 1: the references are run without a correction only, and without mismatch with
    all of them too, which shows what a correction costs where there is nothing to correct.
    """
    return [
        Job(mismatch, row, seed, args.task)
        for seed in args.seeds
        for mismatch in args.mismatches
        for row in args.rows
        if mismatch != "experts" or row == "none"
    ]


def _by_warm_start(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs with one seed and one kind of model together, in the order of their first ones."""
    parts: dict[tuple[int, bool], list[Job]] = {}
    for job in jobs:
        parts.setdefault((job.seed, job.experts), []).append(job)
    return list(parts.values())


if __name__ == "__main__":
    sys.exit(main())
