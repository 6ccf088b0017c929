"""Proof of learning: held-out reward last minus first, over seeds, with and without the correction.

    python recipes/quickstart/learn.py [--seeds 0 1 2] [--steps 16] [--arms corrected control] [--output runs/learn]

Each seed runs ``recipes/grpo.py`` with the quickstart's configuration once for each arm: ``corrected`` as it is,
``uncorrected`` with ``offpolicy: measure``, and ``control`` with learning rate 0 (its weights cannot move, so few
steps lie between its two evaluations, which differ by sampling noise alone). All evaluate the same held-out prompts
before the first and after the last step, sampling from the engine. Finished runs of the same settings are kept and not
run again. Prints
a table and writes ``learn.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trl_offpolicy.functional.intervals import t_quantile_975

CONFIG = "recipes/quickstart/config.yaml"
CONTROL_STEPS = 2
ARMS = {"corrected": [], "uncorrected": ["--offpolicy", "measure"], "control": ["--learning_rate", "0.0"]}
"""Arm -> what it adds to the quickstart's command."""
EVALUATION = ["--eval_strategy", "steps", "--eval_on_start", "true", "--eval_size", "48", "--num_generations_eval", "4"]


def main() -> int:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of the training runs (default: 16)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path, default=Path("runs/learn"))
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        done = {arm: run(args.output / f"{arm}{seed}", arm, seed, args.steps) for arm in args.arms}
        rows.append({"seed": seed, **done})
        print(f"seed {seed}: " + "; ".join(f"{arm} {describe(outcome)}" for arm, outcome in done.items()), flush=True)
    gains = {arm: [row[arm]["gain"] for row in rows] for arm in args.arms}
    result = {"seeds": rows, **{arm: interval(values) for arm, values in gains.items()}}
    if {"corrected", "uncorrected"} <= set(args.arms):
        pairs = zip(gains["corrected"], gains["uncorrected"], strict=True)
        result["corrected - uncorrected"] = interval([left - right for left, right in pairs])
    (args.output / "learn.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, found in result.items():
        if name != "seeds":
            mean, half = found["mean"], found["half_width"]
            print(f"{name:>23}: {mean:+.3f} +- {half:.3f} in held-out reward (95 % t interval, {len(rows)} seeds)")
    return 0


def run(folder: Path, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """First, last and gain of the held-out reward of one run, in its own process; one of the same settings is read."""
    done = folder / "learn_result.json"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "recipes/grpo.py", "--config", CONFIG, *ARMS[arm]]
    steps = CONTROL_STEPS if arm == "control" else steps
    options = ["--seed", str(seed), "--max_steps", str(steps), "--eval_steps", str(steps), "--output_dir", str(folder)]
    asked = {"steps": steps, "arm": ARMS[arm], "config": Path(CONFIG).read_text()}
    if done.exists() and (known := json.loads(done.read_text())).get("asked") == asked:
        return known
    started = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [*launch, *options, *EVALUATION, "--per_device_eval_batch_size", "48"], check=True, stdout=log, stderr=log
        )
    rewards = [row["eval_reward"] for row in map(json.loads, (folder / "metrics.jsonl").open()) if "eval_reward" in row]
    first, last = rewards[0], rewards[-1]
    outcome = {"first": first, "last": last, "gain": last - first, "minutes": (time.time() - started) / 60}
    outcome["asked"] = asked
    done.write_text(json.dumps(outcome) + "\n")
    return outcome


def describe(outcome: dict[str, Any]) -> str:
    """One line."""
    return "{first:.3f} -> {last:.3f} ({gain:+.3f}, {minutes:.1f} min)".format(**outcome)


def interval(values: list[float]) -> dict[str, float]:
    """Mean and half width of the 95 % t interval over seeds (0 for a single seed)."""
    half = 0.0
    if len(values) > 1:
        half = t_quantile_975(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": statistics.mean(values), "half_width": half}


if __name__ == "__main__":
    sys.exit(main())
