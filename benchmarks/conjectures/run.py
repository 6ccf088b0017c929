"""Four conjectures about mismatch, tested on small tasks: one command each.

    python benchmarks/conjectures/run.py budget            # or lag, collapse, moe
    python benchmarks/conjectures/run.py budget --short    # under three minutes, into runs/
    python benchmarks/conjectures/run.py budget --report   # table and figure of the runs that are finished

A finished run is not repeated: more seeds are more runs. Writes ``NAME.jsonl`` (a run a line; pandas.read_json with
lines=True reads it), ``NAME.json`` (verdict, numbers, and what made them), ``NAME.md`` (the table) and ``NAME.svg`` to
``--results``; the working files are in ``--out``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each run has one thread
import torch

from benchmarks.conjectures.common import Conjecture, Outcome
from benchmarks.lab.jobs import cost_text, outcome_of, run_and_time, write_atomically
from trl_offpolicy.run_folder.strict import strict_json

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("collapse", "moe", "budget", "lag")
RESULTS = ROOT / "benchmarks" / "conjectures" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then report; or only report."""
    args = parse(arguments)
    conjecture: Conjecture = importlib.import_module(f"benchmarks.conjectures.{args.conjecture}").CONJECTURE
    settings = conjecture.short if args.short else conjecture.settings
    seeds = args.seeds or (conjecture.seeds[:1] if args.short else conjecture.seeds)
    jobs = conjecture.plan(seeds, args.short)
    restore(args.results / f"{args.conjecture}.jsonl", args.out)
    cost: dict[str, Any] = {}
    if not args.report:
        _, cost = run_and_time(jobs, settings, args.out, args.jobs, conjecture.experiment)
        print(cost_text(cost))
    runs = [outcome for job in jobs if (outcome := outcome_of(job, settings, args.out)) is not None]
    if not runs:
        raise SystemExit(f"--report needs a finished run in {args.out} or {args.results}, but found none.")
    report(conjecture, runs, args, cost)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conjecture", choices=NAMES)
    parser.add_argument("--short", action="store_true", help="few cells, one seed; results go to runs/ too")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each (default: 1)")
    parser.add_argument("--out", type=Path, help="working files (default: runs/conjectures/NAME, --short: NAME_short)")
    parser.add_argument(
        "--results", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}; --short: the working folder"
    )
    args = parser.parse_args(arguments)
    args.out = args.out or ROOT / "runs" / "conjectures" / (args.conjecture + "_short" * args.short)
    args.results = args.results or (args.out if args.short else RESULTS)
    return args


def restore(lines: Path, out: Path) -> None:
    """Finished runs that only the results hold, as after a fresh checkout, become working files."""
    if not lines.exists():
        return
    for line in lines.read_text().splitlines():
        path = out / "runs" / f"{json.loads(line)['job']}.json"
        if not path.exists():
            write_atomically(path, f"{line}\n".encode())


def report(conjecture: Conjecture, runs: Sequence[Outcome], args: argparse.Namespace, cost: dict[str, Any]) -> None:
    """Print table and verdict, and write the four files."""
    found = conjecture.find(runs)
    made = {**made_by(args, runs), "cost": cost}
    old = args.results / f"{args.conjecture}.json"
    if args.report and old.exists():  # the runs are as old as they were
        earlier = json.loads(old.read_text())
        made = {key: earlier.get(key, value) for key, value in made.items()} | {"reported": made["date"]}
    result = {
        "verdict": found.verdict,
        "why": found.why,
        **made,
        "settings": runs[0]["settings"],
        "numbers": found.numbers,
    }
    lines = "".join(json.dumps({"job": name_of(conjecture, run), **run}) + "\n" for run in runs)
    summary = json.dumps(strict_json(result), indent=1, allow_nan=False) + "\n"
    files = {"jsonl": lines, "json": summary, "md": found.table}
    files["svg"] = conjecture.draw(runs)
    for suffix, text in files.items():
        write_atomically(args.results / f"{args.conjecture}.{suffix}", text.encode())
    print(found.table)
    print(f"{args.conjecture}: {found.verdict}: {found.why}.")


def name_of(conjecture: Conjecture, run: Outcome) -> str:
    """The job's name, from what it wrote."""
    job = type(conjecture.plan([0], True)[0])
    return str(job(**{name: run[name] for name in job.__dataclass_fields__}).name)


def made_by(args: argparse.Namespace, runs: Sequence[Outcome]) -> dict[str, Any]:
    """Command, commit, day, seeds, versions and CPU."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    return {
        "command": f"python benchmarks/conjectures/run.py {args.conjecture}" + " --short" * args.short,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "seeds": sorted({run["seed"] for run in runs}),
        "runs": len(runs),
        "cpu_seconds_of_all_runs": round(sum(run["cpu_seconds"] for run in runs)),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


if __name__ == "__main__":
    sys.exit(main())
