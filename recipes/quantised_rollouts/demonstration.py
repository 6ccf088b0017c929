"""The same on a real model through OffPolicyGRPOTrainer: INT8 and INT4 rollouts, three corrections, one seed.

    make model                                          # once: SmolLM2-135M-Instruct
    python recipes/quantised_rollouts/demonstration.py  # six short runs, one after the other

Each run is ``accelerate launch recipes/grpo.py --config recipes/quantised_rollouts/trainer.yaml`` with other bits and
another correction. The runs without a fix come first: their first steps give the geometric mask its band. Finished runs
are kept. Writes ``demonstration.md``. One seed shows that it runs and what is logged; it ranks nothing.
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

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, read_rollouts

CONFIG = "recipes/quantised_rollouts/trainer.yaml"
ENGINE = {"dtype": "float32", "enforce_eager": True, "seed": 0}
ROUNDINGS: dict[str, Any] = {"INT8": "int8", "INT4": {"type": "int4", "group_size": 64}}
VARIANTS = {"none": "no fix", "tis": "token TIS, cap 2", "geometric": "geometric mask"}
DROPS = 0.05
"""Share of the sequences that the mask would have dropped in the first quarter of the run without a fix."""


def main() -> int:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quantised_rollouts_trainer"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--rollouts", nargs="+", choices=list(ROUNDINGS), default=list(ROUNDINGS))
    args = parser.parse_args()
    rows = []
    for bits in args.rollouts:
        band = None
        for variant in VARIANTS:
            folder = args.out / f"{bits.lower()}-{variant}"
            options = ["--seed", str(args.seed), "--max_steps", str(args.steps), "--output_dir", str(folder)]
            engine = json.dumps({**ENGINE, "weight_rounding": ROUNDINGS[bits]})
            minutes = launch(folder, [*options, "--engine", engine, "--offpolicy", correction(variant, band)])
            if variant == "none":
                band = band_of(rollouts_in(folder))
            rows.append(line(bits, variant, folder, minutes, band if variant == "geometric" else None))
            print(rows[-1], flush=True)
    text = "\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *rows]) + "\n"
    (args.out / "demonstration.md").write_text(text)
    print(text)
    return 0


def correction(variant: str, band: tuple[float, float] | None) -> str:
    """The value of ``--offpolicy``."""
    if variant == "geometric":
        assert band is not None
        mask = {"type": "ratio_band", "level": "sequence_mean", "low": band[0], "high": band[1]}
        return json.dumps({"preset": "measure", "correction": {"keep": [mask]}})
    return {"none": "measure", "tis": "paper/tis"}[variant]


def launch(folder: Path, options: list[str]) -> float:
    """One run in its own process; the minutes it took."""
    done = folder / "demonstration_minutes.json"
    if done.exists():
        return float(json.loads(done.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/grpo.py", "--config", CONFIG, *options]
    started = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)
    minutes = (time.monotonic() - started) / 60
    done.write_text(f"{minutes}\n")
    return minutes


def rollouts_in(folder: Path) -> RecordedRollouts:
    """The recorded rollouts of a run.

    Raises:
        FileNotFoundError: the run recorded none.
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


COLUMNS = (
    "rollouts", "correction", "logged reward, first / last quarter", "mismatch k3", "ESS token", "dropped", "band",
    "minutes",
)  # fmt: skip


def line(bits: str, variant: str, folder: Path, minutes: float, band: tuple[float, float] | None) -> str:
    """A row of the table."""
    rewards = [row["reward"] for row in map(json.loads, (folder / "metrics.jsonl").open()) if "reward" in row]
    quarter = max(len(rewards) // 4, 1)
    first, last = statistics.mean(rewards[:quarter]), statistics.mean(rewards[-quarter:])
    found = measured(rollouts_in(folder))
    bounds = "-" if band is None else f"[{band[0]}, {band[1]}]"
    return (
        f"| {bits} | {VARIANTS[variant]} | {first:.3f} / {last:.3f} | {found['kl_k3']:.4f} | {found['ess']:.3f} "
        f"| {found['dropped']:.1%} | {bounds} | {minutes:.1f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
