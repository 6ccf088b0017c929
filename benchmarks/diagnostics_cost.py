"""What the numbers of the estimator and of confident disagreement add to a loss step: ratios within one run.

    python benchmarks/diagnostics_cost.py [--rows 64] [--length 4096] [--rounds 40]

CPU time of this thread, one thread, the candidates in turn in every round; medians. "Objective" is correction, loss and
all statistics of a micro-batch (token TIS with a geometric mask, as in the quickstart), without the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from allocator import fix_allocator
from correction_cost import make_batch, measure

import trl_offpolicy as op
from trl_offpolicy.functional import moments
from trl_offpolicy.functional._fast import row_blocks
from trl_offpolicy.objective import objective as objectives
from trl_offpolicy.stats import Stats


def candidates(batch: op.PolicyBatch) -> dict[str, Callable[[], object]]:
    """The objective with and without ``estimator/*``, the estimator alone, the ratios' sums, and one of them alone."""
    correction = op.Correction(
        weight=op.TruncateWeight(max_weight=2.0), keep=(op.RatioBand(level="sequence_mean", low=0.95, high=1.05),)
    )
    objective = op.Objective(policy_loss=op.losses.PPOClip(), correction=correction)
    out = correction(batch)
    old, mu, mask = batch.old_per_token_logps, batch.sampling_per_token_logps, batch.mask
    assert old is not None and mu is not None
    ratio = moments.log_ratio(old, mu, mask)
    excess, logps = ratio.values.clone(), mu.clone()

    def without() -> object:
        with patch.object(objectives, "estimator_stats", lambda *_args, **_kwargs: Stats({})):
            return objective(batch)

    def confident() -> None:
        """The line of ``_block_rows`` that counts them; the comparisons take as long on any values."""
        for block in row_blocks(mask.shape, mask.device):
            moments.dot(excess[block].lt_(-0.8), logps[block].ge_(-0.7))

    return {
        "objective": lambda: objective(batch),
        "objective without estimator/*": without,
        "estimator/* alone": lambda: objectives.estimator_stats(batch, out.weights, out.keep_mask, target="old"),
        "sums of one ratio (confident disagreement is one of 17)": lambda: moments.ratio_rows(ratio, mu, mask),
        "confident disagreement alone": confident,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    fix_allocator(warm=True)
    torch.set_num_threads(1)
    runs = candidates(make_batch(args.rows, args.length))
    spent = measure(runs, args.rounds, clock=time.thread_time)
    found = {name: statistics.median(seconds) for name, seconds in spent.items()}
    whole = found["objective without estimator/*"]
    print(f"B={args.rows} T={args.length} torch {torch.__version__}, 1 thread, {args.rounds} rounds, CPU time")
    for name, seconds in found.items():
        print(f"{seconds / whole:8.3f} x  {seconds * 1e3:8.2f} ms  {name}")


if __name__ == "__main__":
    main()
