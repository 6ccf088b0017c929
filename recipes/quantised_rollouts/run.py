"""Quantised rollouts at laptop scale: does the correction help the learner, and what does the log say?

    python recipes/quantised_rollouts/run.py            # the whole table, about 20 minutes on two idle cores
    python recipes/quantised_rollouts/run.py --short    # INT3, two seeds, fewer generations: two minutes

A small model is first taught to sort symbols, then trained by GRPO on answers of a copy whose weights were rounded to
8, 4 or 3 bits, with no fix and under five corrections, several seeds each. Every run is written when it is done and not
repeated by the next call. Writes ``results.json``, ``table.md`` and ``figure.svg`` to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each run has one thread
from benchmarks.lab.jobs import Experiment, cost_text, run_and_time
from recipes.quantised_rollouts.experiment import VARIANTS, Job, Settings, run, warm_model
from recipes.quantised_rollouts.figure import draw
from recipes.quantised_rollouts.tables import paradox_text, summarise, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then report."""
    args = parse(arguments)
    jobs = plan(args.variants, args.bits, args.seeds)
    runs, cost = run_and_time(jobs, args.settings, args.out, args.jobs, Experiment(warm_model, run))
    report(runs, args, cost)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; every field of :class:`Settings` is an option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="INT3 only, seeds 0 1, 60 generations, 2 answers")
    parser.add_argument("--out", type=Path, default=None, help="default: runs/quantised_rollouts (--short: ..._short)")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--bits", type=int, nargs="+", choices=(8, 4, 3, 2))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each (default: 2)")
    for item in fields(Settings):
        parser.add_argument(f"--{item.name}", type=type(item.default), help=f"default: {item.default}")
    args = parser.parse_args(arguments)
    base = replace(Settings(), generations=60, answers=2) if args.short else Settings()
    given = {item.name: getattr(args, item.name) for item in fields(Settings)}
    args.settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    args.seeds = args.seeds or ([0, 1] if args.short else [0, 1, 2, 3, 4])
    args.bits = args.bits or ([3] if args.short else [8, 4, 3])
    args.out = args.out or Path("runs/quantised_rollouts_short" if args.short else "runs/quantised_rollouts")
    return args


def plan(variants: Sequence[str], bits: Sequence[int], seeds: Sequence[int]) -> list[Job]:
    """All runs, a seed at a time: float rollouts as the reference, then every correction at every precision."""
    reference = [("none", None)] if "none" in variants else []
    cells = [*reference, *((variant, one) for one in bits for variant in variants)]
    return [Job(variant, one, seed) for seed in seeds for variant, one in cells]


def report(runs: Sequence[dict[str, Any]], args: argparse.Namespace, cost: dict[str, Any]) -> None:
    """Print the table and write the three files."""
    rows = summarise(runs)
    text = f"{table(rows)}\n{paradox_text(runs, args.bits)}"
    named = [
        {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in row.items()} for row in rows
    ]
    result = {"settings": asdict(args.settings), "cost": cost, "rows": named}
    (args.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "table.md").write_text(text)
    (args.out / "figure.svg").write_text(draw(runs))
    print(text)
    print(f"{cost_text(cost)} Files: {args.out}")


if __name__ == "__main__":
    sys.exit(main())
