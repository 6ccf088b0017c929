"""How often the doctor is right about made-up runs: false alarms of healthy ones, and what it sees of broken ones.

python benchmarks/log_courses/run.py --output benchmarks/log_courses/results.json      # about 2 minutes
python benchmarks/log_courses/run.py --only plateau reward_gone_at_once --seeds 4
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.log_courses.curves import SCENARIOS, Curve, Scenario, measured
from trl_offpolicy.diagnosis.verdict.judge import diagnose
from trl_offpolicy.run_folder.names import translate
from trl_offpolicy.run_folder.run_data import MetricsLog

NAMES = {
    "reward": "critic/score/mean",
    "length": "response_length/mean",
    "entropy": "actor/entropy",
    "gradient": "actor/grad_norm",
    "cut": "response_length/clip_ratio",
    "kl": "rollout_corr/k3_kl",
}
LENGTHS = ((60, 1), (150, 1), (300, 1), (1000, 10))
"""Steps of a run, and every which of them is logged."""
ALARM = ("warning", "critical")


def log_of(scenario: Scenario, steps: int, every: int, seed: int) -> MetricsLog:
    """The log of one run under verl's names; of every tenth step, if so, as many trainers write it."""
    draw = np.random.default_rng(seed)
    curves = measured(scenario.course(np.arange(steps, dtype=float), draw), steps, draw)
    rows, broken = [], None
    for step in range(every - 1, steps, every):
        row = {theirs: _mean(curves[name], step, every) for name, theirs in NAMES.items()}
        if broken is None and math.isnan(row[NAMES["gradient"]]):
            broken = (NAMES["gradient"], step)
        rows.append(translate({"step": float(step), **row}))
    return MetricsLog(tuple(rows), broken=broken)


def _mean(curve: Curve, step: int, every: int) -> float:
    return float(curve[step - every + 1 : step + 1].mean())


def verdicts(scenario: Scenario, steps: int, every: int, seeds: int) -> Counter[str]:
    """How many runs got which verdict."""
    return Counter(diagnose(log_of(scenario, steps, every, seed)).verdict for seed in range(seeds))


def alarms(counts: Counter[str] | dict[str, int]) -> float:
    """Share of the runs with a warning or a critical finding."""
    return sum(counts.get(one, 0) for one in ALARM) / sum(counts.values())


def show(found: dict[str, dict[str, dict[str, int]]]) -> None:
    """Print the share of alarms: low is right of a healthy run, high of a broken one."""
    table = Table(
        "run", "", *(f"{steps} steps" + (f", every {every}th" if every > 1 else "") for steps, every in LENGTHS)
    )
    for name, by_length in found.items():
        one = SCENARIOS[name]
        kind = ("healthy" if one.healthy else "broken") + (", held back" if one.held_back else "")
        table.add_row(name.replace("_", " "), kind, *(f"{alarms(counts):.0%}" for counts in by_length.values()))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios, print the table, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(SCENARIOS), metavar="NAME", help="these scenarios alone")
    parser.add_argument("--seeds", type=int, default=40, help="runs of each scenario and length (default: 40)")
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    given = parser.parse_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds must be at least 1, but got {given.seeds}.")
    found = {
        name: {
            f"{steps}/{every}": dict(verdicts(SCENARIOS[name], steps, every, given.seeds)) for steps, every in LENGTHS
        }
        for name in track(given.only or list(SCENARIOS), description="runs", disable=not sys.stderr.isatty())
    }
    show(found)
    if given.output:
        given.output.write_text(json.dumps({"seeds": given.seeds, "verdicts": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
