"""Bias and variance of off-policy gradient estimators by the length of the answers.

    python benchmarks/frontier/run.py            # T 16 to 1024, 3 seeds: about an hour on one core
    python benchmarks/frontier/run.py --short    # T 16 to 256, 2 seeds: under 3 minutes
    python benchmarks/frontier/run.py --report   # the tables and the figure from the results file alone

Pieces (batches of 64 answers) are written as they are done, and a call runs only those that are missing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each piece has one thread
from benchmarks.frontier.experiment import Settings, plan, prepare, run
from benchmarks.frontier.figure import draw
from benchmarks.frontier.results import lines, read, write
from benchmarks.frontier.tables import report
from benchmarks.lab.jobs import Experiment, outcome_of, run_all
from benchmarks.lab.provenance import made_here

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write the results, report."""
    args = parse(arguments)
    if not args.report:
        jobs = plan(args.settings, args.seeds, args.long, args.cheap_batches)
        if args.partial:
            found = [outcome_of(job, args.settings, args.out) for job in jobs]
            outcomes = [outcome for outcome in found if outcome is not None]
        else:
            outcomes = run_all(jobs, args.settings, args.out, args.jobs, Experiment(prepare, run))
        command = "python benchmarks/frontier/run.py " + shlex.join(sys.argv[1:] if arguments is None else arguments)
        spent = sum(outcome["cpu_seconds"] for outcome in outcomes)
        first = {"line": "run", "command": command.strip(), **made_here(), "seeds": args.seeds, "cpu_seconds": spent}
        first |= {"pieces": len(outcomes), "of": len(jobs), "settings": asdict(args.settings)}
        write(args.results, first, lines(outcomes, args.out, args.settings))
    found_lines = read(args.results)
    args.figure.write_text(draw(found_lines))
    print(report(found_lines))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; every field of :class:`Settings` is an option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="T up to 256, 2 seeds, 6 batches each")
    parser.add_argument("--report", action="store_true", help="run nothing, read the results file")
    parser.add_argument("--partial", action="store_true", help="run nothing, make the results of the finished pieces")
    parser.add_argument("--results", type=Path, help="default: results.jsonl beside this file (--short: in --out)")
    parser.add_argument("--figure", type=Path, help="default: frontier.svg beside the results")
    parser.add_argument("--out", type=Path, help="pieces and warm starts; default: runs/frontier (--short: ..._short)")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each (default: 1)")
    parser.add_argument("--long", type=int, help="batches of the longest answers a seed (default: 12; --short: 6)")
    parser.add_argument("--cheap_batches", type=int, default=24, help="batches of shorter answers (default: 24)")
    for item in fields(Settings):
        parser.add_argument(f"--{item.name}", type=type(item.default), help=f"default: {item.default}")
    args = parser.parse_args(arguments)
    small = replace(Settings(), longest=256, cheap=256, warm_steps=300, settle_steps=20)
    base = small if args.short else Settings()
    given = {item.name: getattr(args, item.name) for item in fields(Settings)}
    args.settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    args.long = args.long or (6 if args.short else 12)
    args.seeds = args.seeds or ([0, 1] if args.short else [0, 1, 2])
    args.out = args.out or Path("runs/frontier_short" if args.short else "runs/frontier")
    args.results = args.results or (args.out / "results.jsonl" if args.short else HERE / "results.jsonl")
    args.figure = args.figure or args.results.with_name("frontier.svg")
    return args


if __name__ == "__main__":
    sys.exit(main())
