"""How long ``trl-offpolicy doctor`` and ``report`` take on 10 million recorded tokens, and how much memory.

    python benchmarks/doctor_speed.py [--tokens 10000000]

Writes a run folder of made-up rollouts (20 steps of 1000-token responses) and runs both commands in processes of their
own. Asked for: under 20 s and 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STEPS, LENGTH = 20, 1000


def write_part(path: Path, step: int, rows: int, generator: np.random.Generator) -> None:
    """One step's rollouts, in the recorder's columns."""
    sampling = -generator.exponential(0.7, rows * LENGTH).astype(np.float32)
    old = np.minimum(sampling + generator.normal(0, 0.1, rows * LENGTH), 0).astype(np.float32)
    offsets = np.arange(rows + 1, dtype=np.int32) * LENGTH

    def lists(values: Any) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    columns = {
        "step": np.full(rows, step),
        "prompt": ["prompt"] * rows,
        "completion": ["text " * LENGTH] * rows,
        "reward": generator.random(rows).astype(np.float32),
        "completion_ids": lists(generator.integers(0, 50_000, rows * LENGTH)),
        "completion_mask": lists(np.ones(rows * LENGTH, bool)),
        "sampling_per_token_logps": lists(sampling),
        "old_per_token_logps": lists(old),
        "weights": lists(np.exp(old - sampling)),
        "keep_mask": lists(np.repeat(generator.random(rows) > 0.1, LENGTH)),
    }
    pq.write_table(pa.table(columns), path)


def write_run(folder: Path, tokens: int) -> None:
    """A run folder with that many tokens."""
    parts = folder / "rollouts.parquet"
    parts.mkdir()
    generator = np.random.default_rng(0)
    rows = [
        {"step": s, "offpolicy/mismatch/kl_k3": 0.01, "offpolicy/mismatch/prob_pearson": 0.99} for s in range(STEPS)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for step in range(STEPS):
        write_part(parts / f"part-{step:07d}-0000.parquet", step, max(1, tokens // STEPS // LENGTH), generator)


def measure(command: str, folder: Path) -> None:
    """Run a subcommand and print wall clock, processor time and peak memory."""
    start = time.perf_counter()
    arguments = [sys.executable, "-m", "trl_offpolicy", command, str(folder)]
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    _, status, usage = os.wait4(os.posix_spawn(sys.executable, arguments, os.environ, file_actions=quiet), 0)
    if status:
        raise SystemExit(f"{command} failed.")
    seconds = time.perf_counter() - start
    cpu, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20
    print(f"{command:<7} {seconds:5.1f} s ({cpu:.1f} s of processor time), peak {memory:.2f} GiB")


def main() -> None:
    """Write the run, measure both commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    tokens = parser.parse_args().tokens
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name), tokens)
        for command in ("doctor", "report"):
            measure(command, Path(name))


if __name__ == "__main__":
    main()
