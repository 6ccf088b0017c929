"""AReaL's ablation at laptop scale: what does a lag of the sampler cost, and what does decoupled PPO get back?

    python recipes/async_lag/run.py            # the whole table
    python recipes/async_lag/run.py --short    # lag 0 and 8, naive and decoupled, one seed, half the steps

A small model is first taught to sort symbols, then trained by GRPO on answers of its own older weights: always 0, 1, 4
or 8 versions behind, or ever further ("unbounded": a sampler twice as fast as the learner and no bound). Every run is
written when it is done and not repeated by the next call. Writes ``results.json``, ``table.md`` and ``figure.svg`` to
``--out``.
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
from benchmarks.lab.measure import warm_model
from recipes.async_lag.experiment import Job, Settings, run
from recipes.async_lag.figure import draw
from recipes.async_lag.lag import LAGS, ONLY_AT, VARIANTS
from recipes.async_lag.tables import lag_name, summarise, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then report."""
    args = parse(arguments)
    jobs = plan(args.variants, args.lags, args.seeds)
    runs, cost = run_and_time(jobs, args.settings, args.out, args.jobs, Experiment(warm_model, run))
    report(runs, args, cost)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; every field of :class:`Settings` is an option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="lags 0 8, naive and decoupled, seed 0, 30 steps")
    parser.add_argument("--out", type=Path, default=None, help="default: runs/async_lag (--short: ..._short)")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--lags", type=lag_of, nargs="+", help=f"of {[lag_name(lag) for lag in LAGS]}, or any number")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each (default: 1)")
    for item in fields(Settings):
        parser.add_argument(f"--{item.name}", type=type(item.default), help=f"default: {item.default}")
    args = parser.parse_args(arguments)
    base = replace(Settings(), generations=30, answers=2) if args.short else Settings()
    given = {item.name: getattr(args, item.name) for item in fields(Settings)}
    args.settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    args.seeds = args.seeds or ([0] if args.short else [0, 1, 2])
    args.lags = args.lags or ([0, 8] if args.short else list(LAGS))
    args.variants = args.variants or (["naive", "decoupled"] if args.short else None)
    args.out = args.out or Path("runs/async_lag_short" if args.short else "runs/async_lag")
    return args


def lag_of(text: str) -> int | None:
    """``unbounded`` or a number of weight versions.

    Raises:
        ValueError: neither.
    """
    if text == "unbounded":
        return None
    if (lag := int(text)) < 0:
        raise ValueError(f"lag must be at least 0, but got {lag}.")
    return lag


def plan(variants: Sequence[str] | None, lags: Sequence[int | None], seeds: Sequence[int]) -> list[Job]:
    """All runs, a seed at a time; None = every variant, those of ``ONLY_AT`` at these lags."""
    cells = [(variant, lag) for lag in lags for variant in variants or VARIANTS]
    cells = [cell for cell in cells if variants or cell[1] in ONLY_AT.get(cell[0], lags)]
    return [Job(variant, lag, seed) for seed in seeds for variant, lag in cells]


def report(runs: Sequence[dict[str, Any]], args: argparse.Namespace, cost: dict[str, Any]) -> None:
    """Print the table and write the three files."""
    rows = summarise(runs)
    text = table(rows)
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
