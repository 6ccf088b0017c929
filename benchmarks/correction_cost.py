"""Cost of correction and diagnostics, as multiples of the floor ``((old - sampling) * mask).sum()``.

    python benchmarks/correction_cost.py [--rows 64] [--length 4096] [--rounds 30] [--warm-heap] [--cpu-time]
    python benchmarks/correction_cost.py --device cuda

One thread, wall clock or with ``--cpu-time`` that of the process; 50 warm-up calls of each; the candidates run
interleaved in every round; the printed number is the ratio of medians. Freed memory goes back to the kernel and every
new tensor pays for its pages, the floor's as well; with ``--warm-heap`` none does. "old/sampling" measures mismatch and
kept (all diagnostics of docs/metrics.md for that pair), weights, keep terms; "three ratios" adds staleness
(current/old) and total (current/sampling), each with the same diagnostics.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from allocator import fix_allocator

import trl_offpolicy as op

WARM_UP = 50


def clock_of(device: str) -> Callable[[], float]:
    """Wall clock once the device has done what it was given."""

    def now() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


def make_batch(rows: int, length: int, device: str = "cpu") -> op.PolicyBatch:
    """Log-probs around -1 with a mismatch of 0.02 nats and rows of a quarter to the whole length."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, length, generator=generator) * 2
    lengths = torch.randint(length // 4, length, (rows, 1), generator=generator)
    tensors = {
        "per_token_logps": old + 0.01 * torch.randn(rows, length, generator=generator),
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + 0.02 * torch.randn(rows, length, generator=generator),
        "completion_mask": torch.arange(length) < lengths,
        "advantages": torch.randn(rows, generator=generator),
        "rewards": torch.rand(rows, generator=generator),
    }
    return op.PolicyBatch(**{name: value.to(device) for name, value in tensors.items()})


def candidates(batch: op.PolicyBatch) -> dict[str, Callable[[], object]]:
    """The floor first, then the corrections."""
    old, sampling, mask = batch.old_per_token_logps, batch.sampling_per_token_logps, batch.completion_mask
    tis = op.TruncateWeight(max_weight=2.0)
    geometric = op.RatioBand(level="sequence_mean", low=0.99, high=1.01)
    veto = op.OutlierVeto(low=1e-4, high=100.0)
    token_band = op.RatioBand(level="token", low=0.5, high=2.0)
    one, three = ("mismatch", "kept"), ("mismatch", "kept", "staleness", "total")
    corrections = {
        "token TIS, old/sampling": op.Correction(weight=tis, measure=one),
        "token TIS + geometric mask + veto, old/sampling": op.Correction(
            weight=tis, keep=(geometric, veto), measure=one
        ),
        "the same, compiled": op.Correction(weight=tis, keep=(geometric, veto), measure=one, compiled=True),
        "token TIS + token band (second pass for kept), old/sampling": op.Correction(
            weight=tis, keep=(token_band,), measure=one
        ),
        "token TIS + geometric mask + veto, three ratios": op.Correction(
            weight=tis, keep=(geometric, veto), measure=three
        ),
        "the same three ratios, compiled": op.Correction(
            weight=tis, keep=(geometric, veto), measure=three, compiled=True
        ),
        "token TIS + geometric mask + veto, measure: core": op.Correction(
            weight=tis, keep=(geometric, veto), measure="core"
        ),
        "token TIS + geometric mask + veto, measure: off": op.Correction(
            weight=tis, keep=(geometric, veto), measure="off"
        ),
    }
    runs: dict[str, Callable[[], object]] = {"floor": lambda: ((old - sampling) * mask).sum()}
    runs |= {name: (lambda correction=correction: correction(batch)) for name, correction in corrections.items()}
    return runs


def measure(
    runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each candidate by the clock, interleaved."""
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = clock()
            run()
            seconds[name].append(clock() - started)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm-heap", action="store_true", help="freed memory stays with the process")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, for a machine that does other things too")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    args = parser.parse_args()
    if args.cpu_time and args.device != "cpu":
        parser.error(f"--cpu-time must go with --device cpu, but got --device {args.device}.")
    fix_allocator(warm=args.warm_heap)
    torch.set_num_threads(1)
    batch = make_batch(args.rows, args.length, args.device)
    stats = op.Correction(weight=op.TruncateWeight(max_weight=2.0), measure=("mismatch", "kept"))(batch).stats
    print(f"B={args.rows} T={args.length} torch {torch.__version__}, {args.device}, 1 thread, {args.rounds} rounds")
    names = [key.rpartition("/")[2] for key in stats if "/mismatch/" in key]
    print(f"diagnostics of the old/sampling group ({len(names)}): {', '.join(names)}")
    clock = time.process_time if args.cpu_time else clock_of(args.device)
    seconds = measure(candidates(batch), args.rounds, clock)
    floor = statistics.median(seconds["floor"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{median / floor:7.1f} x  {median * 1e3:8.2f} ms  {name}")


if __name__ == "__main__":
    main()
