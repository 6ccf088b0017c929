"""Corrections on SmolLM2-135M with a real vLLM whose weights are rounded: does the learner end better?

    make model                                                     # once: SmolLM2-135M-Instruct
    python benchmarks/corrections_llm/run.py                       # 5 corrections and the reference, 5 seeds: hours
    python benchmarks/corrections_llm/run.py --short               # 2 steps, one seed, two corrections: some minutes
    python benchmarks/corrections_llm/run.py --report

Each run is ``accelerate launch recipes/grpo.py --config benchmarks/corrections_llm/config.yaml`` in its own process.
After it the learner itself is evaluated, unrounded, on held-out prompts. A run's line is written when it is done, and
not made again by the next call. Ends with a table of differences that are paired by seed, and says how many seeds would
show the difference that matters.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.corrections_llm.learner import evaluate
from benchmarks.corrections_llm.tables import report
from benchmarks.lab.provenance import made_here
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, read_rollouts

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "config.yaml"
ENGINE = {"dtype": "float32", "enforce_eager": True, "seed": 0}
ROUNDINGS: dict[str, Any] = {
    "float": None,
    "int8": "int8",
    "fp8": "fp8",
    "fp8_tensor": {"type": "fp8", "scale": "tensor"},
    "int4_g32": {"type": "int4", "group_size": 32},
    "int4_g64": {"type": "int4", "group_size": 64},
}
ROWS = ("none", "token_tis", "geometric_tis", "icepop", "sequence_tis")
KEY = ("seed", "rounding", "row", "steps")
DROPS = 0.05
"""Share of the answers that the geometric mask would have dropped early in the run without a correction."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then report."""
    args = parse(arguments)
    done = read(args.results)
    for seed, rounding, row in [] if args.report else plan(args):
        if (seed, rounding, row, args.steps) in {tuple(one[key] for key in KEY) for one in done}:
            continue
        folder = args.out / f"{rounding}-{row}-{seed}"
        done.append(one_run(folder, seed, rounding, row, args.steps, args.out, questions=8 if args.short else 64))
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with args.results.open("a") as lines:
            lines.write(json.dumps(done[-1]) + "\n")
        print(done[-1], flush=True)
    print(report(done))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short", action="store_true", help="2 steps, 8 questions, one seed, two corrections; into --out"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--roundings", nargs="+", choices=list(ROUNDINGS), default=["float", "int4_g32"])
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, help="default: runs/corrections_llm (--short: ..._short)")
    parser.add_argument("--results", type=Path, help="default: results.jsonl beside this file (--short: in --out)")
    args = parser.parse_args(arguments)
    args.rows = args.rows or (["none", "token_tis"] if args.short else list(ROWS))
    args.seeds = args.seeds or ([0] if args.short else [0, 1, 2, 3, 4])
    args.steps = args.steps or (2 if args.short else 36)
    args.out = args.out or Path("runs/corrections_llm_short" if args.short else "runs/corrections_llm")
    args.results = args.results or (args.out / "results.jsonl" if args.short else HERE / "results.jsonl")
    return args


def plan(args: argparse.Namespace) -> list[tuple[int, str, str]]:
    """(seed, rounding, row): whole seeds, and 'none' before what is calibrated by it; 'float' needs no correction."""
    rows = sorted(args.rows, key=ROWS.index)
    cells = [(one, row) for one in args.roundings for row in (["none"] if one == "float" else rows)]
    return [(seed, *cell) for seed in args.seeds for cell in cells]


def one_run(
    folder: Path, seed: int, rounding: str, row: str, steps: int, out: Path, *, questions: int = 64
) -> dict[str, Any]:
    """Train in a process of its own and evaluate; the line of the results file."""
    band = band_of(rollouts_in(out / f"{rounding}-none-{seed}")) if row == "geometric_tis" else None
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
    began = time.monotonic()
    launch(folder, ["--engine", json.dumps({**ENGINE, "weight_rounding": ROUNDINGS[rounding]}), "--seed", str(seed),
                    "--max_steps", str(steps), "--offpolicy", correction(row, band)])  # fmt: skip
    minutes = (time.monotonic() - began) / 60
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    rewards = [line["reward"] for line in logged if "reward" in line]
    quarter = max(len(rewards) // 4, 1)
    return {
        "seed": seed, "rounding": rounding, "row": row, "steps": steps, "band": band,
        **evaluate(folder, CONFIG, questions=questions),
        "logged_first": statistics.mean(rewards[:quarter]), "logged_last": statistics.mean(rewards[-quarter:]),
        **measured(rollouts_in(folder)), "minutes": round(minutes, 1), **made_here(),
    }  # fmt: skip


def correction(row: str, band: tuple[float, float] | None) -> str:
    """The value of ``--offpolicy``."""
    if row == "geometric_tis":
        assert band is not None
        options = {"low": band[0], "high": band[1], "max_weight": 2.0}
        return json.dumps({"preset": "paper/geometric-mask", "options": options})
    names = {
        "none": "measure",
        "token_tis": "paper/tis",
        "icepop": "paper/icepop",
        "sequence_tis": "paper/sequence-tis",
    }
    return names[row]


def launch(folder: Path, options: Sequence[str]) -> None:
    """The training run; its output goes to ``log.txt``, whose end is shown if it fails.

    Raises:
        RuntimeError: the run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/grpo.py", "--config", str(CONFIG)]
    log = folder / "log.txt"
    with log.open("w") as output:
        done = subprocess.run(
            [*command, "--output_dir", str(folder), *options], stdout=output, stderr=output, check=False
        )
    if done.returncode:
        raise RuntimeError(f"the run in {folder} ended with status {done.returncode}:\n{log.read_text()[-3000:]}")


def rollouts_in(folder: Path) -> RecordedRollouts:
    """The recorded rollouts of a run.

    Raises:
        FileNotFoundError: there are none; the mask's band comes from the run without a correction, which is first.
    """
    found = read_rollouts(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} must hold rollouts.parquet of a finished run, but there is none.")
    return found


def band_of(rollouts: RecordedRollouts, drops: float = DROPS) -> tuple[float, float]:
    """Quantiles of the geometric mean ratio in the first quarter of the steps, half of ``drops`` on each side."""
    sums = np.bincount(rollouts.row, rollouts.log_ratio, minlength=len(rollouts.steps))
    counts = np.bincount(rollouts.row, minlength=len(rollouts.steps))
    early = (rollouts.steps <= np.quantile(np.unique(rollouts.steps), 0.25)) & (counts > 0)
    low, high = np.exp(np.quantile(sums[early] / counts[early], [drops / 2, 1 - drops / 2]))
    return round(float(low), 4), round(float(high), 4)


def measured(rollouts: RecordedRollouts) -> dict[str, float]:
    """KL(mu || pi_old) by k3 (nats a token), ESS of the tokens' uncorrected ratios, share of sequences dropped."""
    rho = np.exp(rollouts.log_ratio.astype(np.float64).clip(-20, 20))
    return {
        "kl_k3": float(np.mean(rho - 1 - np.log(rho))),
        "ess": float(rho.sum() ** 2 / (len(rho) * (rho**2).sum())),
        "dropped": float(np.mean(rollouts.kept[rollouts.trainable > 0] == 0)),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
