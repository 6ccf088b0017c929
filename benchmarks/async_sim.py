"""Throughput and staleness of asynchronous RL by simulation, 8 to 1024 GPUs: to choose eta and the size of the queue.

    python benchmarks/async_sim.py                                           # lengths: a declared lognormal
    python benchmarks/async_sim.py --rollouts runs/quickstart                # lengths measured in a run, resampled
    python benchmarks/async_sim.py --rollouts runs/quickstart --median 2000  # a lognormal with the run's spread

Samplers are slots of replicas that decode one response each; a request of batch k is admitted while
floor((N - 1) / B) <= i + eta (AReaL); the learner takes B finished responses, trains, and sends the weights. What a
token costs follows from the options, which are assumptions about a machine, not measurements. What the model leaves out
is listed in docs/async.md. Prints a table; ``--svg FILE`` draws it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.async_queue import Costs, Floats, Outcome, Schedule, colocated, simulate

# ------------------------------------------------------------------------------------------------------------- lengths


def lognormal_lengths(count: int, *, median: float, sigma: float, longest: int, rng: np.random.Generator) -> Floats:
    """(count,) tokens: exp(N(log median, sigma^2)), from 1 to ``longest`` (where generation is cut)."""
    drawn: Floats = np.exp(rng.normal(math.log(median), sigma, count))
    return np.clip(np.round(drawn), 1, longest)


def fitted_sigma(lengths: Floats) -> float:
    """Standard deviation of the log-lengths (a lognormal by maximum likelihood; too small where generation was cut)."""
    return float(np.std(np.log(lengths)))


def measured_lengths(run: Path) -> Floats:
    """Trainable tokens of every response in ``run/rollouts.parquet``.

    Raises:
        FileNotFoundError: there is no such file.
    """
    from trl_offpolicy.run_folder.rollouts import read_rollouts

    rollouts = read_rollouts(run)
    if rollouts is None:
        raise FileNotFoundError(f"run must hold rollouts.parquet, but {run} does not.")
    lengths = rollouts.trainable[rollouts.trainable > 0].astype(np.float64)
    return lengths


def drawn_lengths(args: argparse.Namespace, count: int) -> Floats:
    """What the options ask for; ``--long_tail`` of them ten times as long, up to ``--longest``."""
    rng = np.random.default_rng(args.seed)
    if args.rollouts is None:
        lengths = lognormal_lengths(
            count, median=args.median or 2000.0, sigma=args.sigma, longest=args.longest, rng=rng
        )
    else:
        seen = measured_lengths(args.rollouts)
        if args.median is None:
            lengths = rng.choice(seen, count)
        else:
            sigma = fitted_sigma(seen)
            lengths = lognormal_lengths(count, median=args.median, sigma=sigma, longest=args.longest, rng=rng)
    longer = rng.random(count) < args.long_tail
    return np.where(longer, np.minimum(10 * lengths, args.longest), lengths)


# -------------------------------------------------------------------------------------------------------------- machine


@dataclass(frozen=True)
class Split:
    """GPUs of the two sides, and what follows for the simulation."""

    learners: int
    samplers: int
    slots: int
    costs: Costs


def costs_of(args: argparse.Namespace, learners: int, mean_length: float) -> Costs:
    """Decoding is bound by memory traffic, training by arithmetic.

    A decode step reads the weights and half of the final KV cache of every slot (on average); training needs 6 P flops
    a token, and 2 P more for the proximal log-probs.
    """
    weights = 2.0 * args.parameters  # bfloat16
    cache = args.slots * args.kv_bytes * mean_length / 2
    decode = (weights + cache) / (args.bandwidth * args.bandwidth_share * args.replica)
    train = 8.0 * args.parameters / (args.flops * args.flops_share * learners)
    return Costs(token=decode, train_token=train, step=args.step, sync=weights / args.sync_bandwidth, pause=args.pause)


def split_gpus(args: argparse.Namespace, gpus: int, lengths: Floats) -> Split:
    """GPUs of the learner so that both sides need the same time a token, at least one replica each."""
    mean = float(lengths.mean())
    one = costs_of(args, 1, mean)
    sampler_gpu_seconds = one.token * args.replica / args.slots
    share = one.train_token / (one.train_token + sampler_gpu_seconds) if args.learners is None else args.learners
    learners = min(max(1, round(share * gpus)), gpus - args.replica)
    replicas = max(1, (gpus - learners) // args.replica)
    return Split(learners, replicas * args.replica, replicas * args.slots, costs_of(args, learners, mean))


class Row(NamedTuple):
    """A line of the table."""

    gpus: int
    split: Split
    schedule: str
    relative: float
    outcome: Outcome | None


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Every machine with every schedule; throughput relative to the synchronous run on the same split."""
    for gpus in args.gpus:
        lengths = drawn_lengths(args, args.batch * args.steps)
        split = split_gpus(args, gpus, lengths)
        options = {"batch": args.batch, "slots": split.slots, "costs": split.costs}
        base = simulate(lengths, schedule=Schedule(eta=0), **options)
        yield Row(gpus, split, "synchronous", 1.0, base)
        whole = replace(costs_of(args, gpus, float(lengths.mean())), sync=split.costs.sync)
        everyone = gpus // args.replica * args.slots
        together = colocated(lengths, batch=args.batch, slots=everyone, costs=whole)
        yield Row(gpus, split, "colocated", together / base.throughput, None)
        schedules = {"one step": Schedule(eta=1, barrier=True)}
        schedules |= {f"eta {eta:g}": Schedule(eta=eta, order=args.order, queue=args.queue) for eta in args.eta}
        for name, schedule in schedules.items():
            outcome = simulate(lengths, schedule=schedule, **options)
            yield Row(gpus, split, name, outcome.throughput / base.throughput, outcome)


# --------------------------------------------------------------------------------------------------------------- output


def line(row: Row) -> str:
    """For the table."""
    head = f"| {row.gpus} | {row.split.learners} + {row.split.samplers} | {row.schedule} | {row.relative:.2f} |"
    if row.outcome is None:
        return f"{head} 0 / 0 | | | | |"
    one = row.outcome
    return (
        f"{head} {one.lag_mean:.2f} / {one.lag_max} | {one.sampler_idle:.0%} | {one.learner_idle:.0%} | "
        f"{one.crossing:.0%} | {one.waiting_max} |"
    )


HEADER = (
    "| GPUs | learner + samplers | schedule | tokens/s against synchronous | lag mean / max | samplers idle | "
    "learner idle | responses across versions | waiting at most |\n|" + "---|" * 9
)


def draw(rows: Sequence[Row]) -> str:
    """Throughput and mean lag by GPUs, a line a schedule."""
    from docs.drawing import label, ticks, to_svg

    names = list(dict.fromkeys(row.schedule for row in rows))
    gpus = sorted({row.gpus for row in rows})

    def panels(figure: object) -> None:
        left, right = figure.subplots(1, 2)  # type: ignore[attr-defined]
        for name in names:
            mine = [row for row in rows if row.schedule == name]
            left.plot([row.gpus for row in mine], [row.relative for row in mine], marker="o", markersize=3, label=name)
            lags = [(row.gpus, row.outcome.lag_mean) for row in mine if row.outcome is not None]
            right.plot([at for at, _ in lags], [lag for _, lag in lags], marker="o", markersize=3)
        for axes in (left, right):
            ticks(axes, gpus)
        label(left, "GPUs", "", "tokens/s against synchronous")
        label(right, "GPUs", "weight versions", "mean lag")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)  # type: ignore[attr-defined]

    return to_svg("Throughput and staleness by simulation", 3.2, panels)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    add("--eta", type=float, nargs="+", default=[1, 2, 4, 8])
    add("--order", choices=("submitted", "finished"), default="submitted", help="what the learner takes")
    add("--queue", type=int, help="finished responses that may wait (default: no bound)")
    add("--batch", type=int, default=2048, help="responses a training step")
    add("--steps", type=int, default=24, help="training steps")
    add("--rollouts", type=Path, help="run folder whose response lengths are resampled")
    add("--median", type=float, help="tokens; with --rollouts a lognormal of its spread (default without: 2000)")
    add("--sigma", type=float, default=0.8, help="of the log-length without --rollouts (default: 0.8, an assumption)")
    add("--longest", type=int, default=16384, help="tokens at which generation is cut")
    add("--long_tail", type=float, default=0.0, help="share of responses ten times as long")
    add("--parameters", type=float, default=7e9)
    add(
        "--kv_bytes",
        type=float,
        default=57344,
        help="of KV cache a token (Qwen2.5-7B: 28 layers x 4 heads x 128 x 2 x 2)",
    )
    add("--replica", type=int, default=1, help="GPUs of a sampler replica")
    add("--slots", type=int, default=64, help="responses that a replica decodes at once")
    add("--learners", type=float, help="share of the GPUs that learn (default: both sides take the same time a token)")
    add("--bandwidth", type=float, default=3.35e12, help="bytes/s of GPU memory (H100 SXM data sheet)")
    add("--bandwidth_share", type=float, default=0.6, help="of it that decoding reaches (assumption)")
    add("--flops", type=float, default=989e12, help="bfloat16, dense (H100 SXM data sheet)")
    add("--flops_share", type=float, default=0.35, help="of it that training reaches (assumption)")
    add("--sync_bandwidth", type=float, default=25e9, help="bytes/s of a weight sync (assumption)")
    add("--pause", type=float, default=0.5, help="seconds that samplers stand still at a sync (assumption)")
    add("--step", type=float, default=1.0, help="seconds of a training step beside its tokens (assumption)")
    add("--seed", type=int, default=0)
    add("--svg", type=Path, help="also draw")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    args = parse(arguments)
    lengths = drawn_lengths(args, args.batch * args.steps)
    at = ", ".join(f"{share:g}%: {np.percentile(lengths, share):.0f}" for share in (5, 50, 95, 99, 100))
    print(
        f"lengths (tokens): mean {lengths.mean():.0f}; {at}; B = {args.batch}, {args.steps} steps, seed {args.seed}\n"
    )
    print(HEADER)
    rows = []
    for row in rows_of(args):
        rows.append(row)
        print(line(row), flush=True)
    if args.svg is not None:
        args.svg.write_text(draw(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
