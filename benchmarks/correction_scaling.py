"""How time and memory of a correction grow: a typical preset with all diagnostics, from 64 x 1024 to 64 x 32768.

    python benchmarks/correction_scaling.py [--rows 64] [--lengths 1024 4096 32768] [--rounds 7] [--device cuda]

Time: median, one thread, as a multiple of the floor ``((old - sampling) * mask).sum()`` of the same size and per token.
Memory: peak memory of the call above what the inputs hold, in (B, T) float32 buffers: on a CPU of the process (Linux;
the kernel's high-water mark, reset before the call), on a GPU what torch has allocated.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from allocator import fix_allocator
from correction_cost import clock_of, make_batch

import trl_offpolicy as op

THREE_RATIOS = op.Correction(
    weight=op.TruncateWeight(max_weight=2.0),
    keep=(op.RatioBand(low=0.99, high=1.01), op.OutlierVeto(low=1e-4, high=100.0)),
)
ONE_RATIO = replace(THREE_RATIOS, measure=("mismatch", "kept"))
CORRECTIONS = {
    "token TIS + geometric mask + veto, old/sampling": ONE_RATIO,
    "the same, compiled": replace(ONE_RATIO, compiled=True),
    "the same, three ratios": THREE_RATIOS,
    "three ratios, compiled": replace(THREE_RATIOS, compiled=True),
}


def seconds(run: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    """Median of ``rounds`` calls after three warm-up calls."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        started = clock()
        run()
        times.append(clock() - started)
    return statistics.median(times)


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Highest memory during the call, above what was held before it."""
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - held
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = run()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} is not in /proc/self/status.")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    args = parser.parse_args()
    fix_allocator(warm=False)
    torch.set_num_threads(1)
    print(f"B={args.rows} torch {torch.__version__}, {args.device}, 1 thread, median of {args.rounds}")
    print(f"{'T':>6} {'x floor':>8} {'ns/token':>9} {'peak buffers':>13}  correction")
    for length in args.lengths:
        measure(make_batch(args.rows, length, args.device), args.rounds, args.device)


def measure(batch: op.PolicyBatch, rounds: int, device: str) -> None:
    """Print the lines of one size."""
    old, sampling, mask = batch.old_per_token_logps, batch.sampling_per_token_logps, batch.completion_mask
    floor = seconds(lambda: ((old - sampling) * mask).sum(), rounds, clock_of(device))
    for name, correction in CORRECTIONS.items():
        took = seconds(partial(correction, batch), rounds, clock_of(device))
        buffers = peak_bytes(partial(correction, batch), device) / (4 * mask.numel())
        per_token = took / mask.numel() * 1e9
        print(f"{mask.shape[1]:6d} {took / floor:8.1f} {per_token:9.1f} {buffers:13.1f}  {name}", flush=True)


if __name__ == "__main__":
    main()
