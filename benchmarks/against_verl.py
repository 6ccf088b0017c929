"""The same correction and diagnostics by this kit and by verl 0.9.1's rollout correction helper, in one run.

    PYTHONPATH=. VERL_PYTHON benchmarks/against_verl.py [--rows 64] [--length 4096] [--rounds 20]

VERL_PYTHON is the Python of an environment that has verl (tests/presets/frameworks/test_verl_oracle.py says how to make
one); this kit needs torch only and comes from the checkout. Both get the same tensors and the options of verl's preset
``decoupled_geo_rs_token_tis`` (token TIS 2.0, geometric rejection). verl computes its IS, RS and off-policy metrics;
this kit all its diagnostics of old/sampling: as it does in every step (as moments), plain and with ``compiled=True``
(which needs a C++ compiler), and once also as numbers, which is done once a logging window. One thread, interleaved,
ratio of medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from correction_cost import clock_of, make_batch

import trl_offpolicy as op

BAND = "0.99_1.01"


def candidates(batch: op.PolicyBatch) -> dict[str, Callable[[], object]]:
    """This kit, and verl's helper."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.debug.metrics import calculate_debug_metrics

    options = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k1"}
    objective = op.presets.from_verl(**options, rollout_rs_threshold=BAND).objective
    correction = objective.correction
    assert correction is not None
    only = op.Correction(weight=correction.weight, keep=correction.keep, measure=("mismatch", "kept"))
    compiled = replace(only, compiled=True)
    mask = batch.completion_mask.float()

    def verl() -> object:
        return compute_rollout_correction_and_rejection_mask(
            old_log_prob=batch.old_per_token_logps,
            rollout_log_prob=batch.sampling_per_token_logps,
            response_mask=mask,
            rollout_rs_threshold=BAND,
            **options,
        )

    def verl_debug() -> object:
        fields = {"rollout_log_probs": batch.sampling_per_token_logps, "old_log_probs": batch.old_per_token_logps}
        data = DataProto.from_dict({**fields, "response_mask": mask, "responses": mask})
        return verl(), calculate_debug_metrics(data)

    return {
        "trl-offpolicy, a step, compiled": lambda: compiled(batch),
        "trl-offpolicy, a step": lambda: only(batch),
        "trl-offpolicy, a step and its numbers": lambda: only(batch).stats.compute(),
        "verl's helper": verl,
        "verl's helper and its debug metrics (Pearson, probability differences)": verl_debug,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    args = parser.parse_args()
    if importlib.util.find_spec("verl") is None:
        print("Skipped: this Python has no verl (see the docstring).")
        return
    torch.set_num_threads(1)
    clock, runs = clock_of(args.device), candidates(make_batch(args.rows, args.length, args.device))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.rounds + 5):
        for name, run in runs.items():
            started = clock()
            run()
            if turn >= 5:  # the first ones warm up
                seconds[name].append(clock() - started)
    mine = statistics.median(seconds["trl-offpolicy, a step, compiled"])
    print(f"B={args.rows} T={args.length} torch {torch.__version__}, {args.device}, 1 thread, {args.rounds} rounds")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{median / mine:7.1f} x  {median * 1e3:8.2f} ms  {name}")


if __name__ == "__main__":
    main()
