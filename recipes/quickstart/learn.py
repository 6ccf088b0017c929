"""Proof of learning: held-out reward last minus first, over seeds, against a zero-learning-rate control.

    python recipes/quickstart/learn.py [--seeds 0 1 2] [--steps 36] [--output runs/learn]

Each seed runs ``recipes/grpo.py`` with the quickstart's configuration twice: training, and the control (learning rate
0; its weights cannot move, so few steps lie between its two evaluations, which differ by sampling noise alone). Both
evaluate the same held-out prompts before the first and after the last step, sampling from the engine. Finished runs
are kept and not run again. Prints a table and writes ``learn.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = "recipes/quickstart/config.yaml"
CONTROL_STEPS = 2
EVALUATION = ["--eval_strategy", "steps", "--eval_on_start", "true", "--eval_size", "48", "--num_generations_eval", "4"]
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> int:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=36, help="optimizer steps of the training runs (default: 36)")
    parser.add_argument("--output", type=Path, default=Path("runs/learn"))
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        trained = run(args.output / f"seed{seed}", seed, args.steps, learning_rate=None)
        control = run(args.output / f"control{seed}", seed, CONTROL_STEPS, learning_rate=0.0)
        rows.append({"seed": seed, "train": trained, "control": control})
        print(f"seed {seed}: {describe(trained)}; control {describe(control)}", flush=True)
    result = {"seeds": rows, **{kind: interval([row[kind]["gain"] for row in rows]) for kind in ("train", "control")}}
    (args.output / "learn.json").write_text(json.dumps(result, indent=2) + "\n")
    for kind in ("train", "control"):
        mean, half = result[kind]["mean"], result[kind]["half_width"]
        print(
            f"{kind:>8}: held-out reward, last - first = {mean:+.3f} +- {half:.3f} (95 % t interval, {len(rows)} seeds)"
        )
    return 0


def run(folder: Path, seed: int, steps: int, *, learning_rate: float | None) -> dict[str, float]:
    """One run in its own process; returns first, last and gain of the held-out reward, and minutes."""
    done = folder / "learn_result.json"
    if done.exists():
        return json.loads(done.read_text())
    launch = [sys.executable, "-m", "accelerate.commands.launch", "recipes/grpo.py", "--config", CONFIG]
    options = ["--seed", str(seed), "--max_steps", str(steps), "--eval_steps", str(steps), "--output_dir", str(folder)]
    if learning_rate is not None:
        options += ["--learning_rate", str(learning_rate)]
    started = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [*launch, *options, *EVALUATION, "--per_device_eval_batch_size", "48"], check=True, stdout=log, stderr=log
        )
    rewards = [row["eval_reward"] for row in map(json.loads, (folder / "metrics.jsonl").open()) if "eval_reward" in row]
    first, last = rewards[0], rewards[-1]
    outcome = {"first": first, "last": last, "gain": last - first, "minutes": (time.time() - started) / 60}
    done.write_text(json.dumps(outcome) + "\n")
    return outcome


def describe(outcome: dict[str, float]) -> str:
    """One line."""
    return "{first:.3f} -> {last:.3f} ({gain:+.3f}, {minutes:.1f} min)".format(**outcome)


def interval(values: list[float]) -> dict[str, float]:
    """Mean and half width of the 95 % t interval over seeds (0 for a single seed)."""
    half = 0.0
    if len(values) > 1:
        half = T_975[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": statistics.mean(values), "half_width": half}


if __name__ == "__main__":
    sys.exit(main())
