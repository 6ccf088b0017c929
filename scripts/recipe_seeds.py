"""A recipe's numbers over seeds: held-out reward before and after, and the mean of each column over the steps.

    python scripts/recipe_seeds.py "top-p 0.9=runs/a-42,runs/a-1" "whole=runs/b-42,runs/b-1" \\
        --columns offpolicy/mismatch/kl_k3 step_time --out recipes/NAME/results/seeds.json

Prints a table with 95 % t intervals, and writes the numbers of every run, its seed and its command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.lab.intervals import interval
from trl_offpolicy.run_folder.layout import EVALUATION_FILE
from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info

BEFORE, AFTER = "held out before", "held out after"


def numbers_of(folder: Path, columns: Sequence[str]) -> dict[str, Any]:
    """A run's seed, command, held-out rewards and means of ``columns`` over its logged steps.

    Raises:
        ValueError: a column was not logged, or there is no evaluation before and after.
    """
    info, log = read_run_info(folder), read_metrics(folder)
    evaluation = json.loads((folder / EVALUATION_FILE).read_text())
    if not {"before", "after"} <= evaluation.keys():
        raise ValueError(f"{folder} must have an evaluation before and after, but has {', '.join(evaluation)}.")
    found = {BEFORE: evaluation["before"]["eval_reward"], AFTER: evaluation["after"]["eval_reward"]}
    for column in columns:
        values = log.series(column).values
        if not values:
            raise ValueError(f"--columns must be logged by every run, but {folder} has no {column}.")
        found[column] = statistics.mean(values)
    command = str(info.get("command")).replace(f"{Path.cwd()}/", "")  # no path of this machine
    seed = info.get("seed")  # Lightning's is a text
    return {"seed": None if seed is None else int(seed), "command": command, **found}


def table(groups: dict[str, list[dict[str, Any]]], columns: Sequence[str]) -> str:
    """Markdown: a row a group, mean and 95 % interval over its seeds; the gain is that of the pairs."""
    titles = ["", "seeds", BEFORE, AFTER, "gain", *columns]
    lines = [titles, ["---"] * len(titles)]
    for name, runs in groups.items():
        gains = [run[AFTER] - run[BEFORE] for run in runs]
        means = [interval([run[column] for run in runs]) for column in (BEFORE, AFTER)]
        cells = [one.text() for one in means] + [interval(gains).text(sign=True)]
        for column in columns:
            one = interval([run[column] for run in runs])
            cells.append(f"{one.mean:.3g} ± {one.half:.2g}")
        lines.append([name, str(len(runs)), *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> int:
    """Read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="NAME=FOLDER,FOLDER", help="runs that differ in the seed alone")
    parser.add_argument("--columns", nargs="*", default=["offpolicy/mismatch/kl_k3"], help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="JSON with the numbers of every run")
    args = parser.parse_args()
    groups = {}
    for text in args.groups:
        name, _, folders = text.partition("=")
        if not folders:
            parser.error(f"a group must be NAME=FOLDER,FOLDER, but got {text!r}.")
        groups[name] = [numbers_of(Path(folder), args.columns) for folder in folders.split(",")]
    print(table(groups, args.columns), end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(groups, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
