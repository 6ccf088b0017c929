"""From the outcomes of runs to the table: means over seeds, 95 % intervals, paired differences, rank correlation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.lab.intervals import Interval, interval, kendall_tau
from recipes.quantised_rollouts.experiment import VARIANTS

Outcome = Mapping[str, Any]


def _of_curve(key: str) -> Callable[[Outcome], float]:
    return lambda run: statistics.mean(row[key] for row in run["curve"])


QUANTITIES: dict[str, Callable[[Outcome], float]] = {
    "sampler_reward": lambda run: run["curve"][-1]["sampler_reward"],
    "reward": lambda run: run["end"]["reward"],
    "accuracy": lambda run: run["end"]["accuracy"],
    "greedy_accuracy": lambda run: run["end"]["greedy_accuracy"],
    "start_accuracy": lambda run: run["start"]["accuracy"],
    "entropy": lambda run: run["end"]["entropy"],
    "staleness_k1": _of_curve("staleness_k1"),
    "negative_k1": lambda run: statistics.mean(row["staleness_k1"] < 0 for row in run["curve"]),
    "mismatch_k3": _of_curve("mismatch_k3"),
    "ess_token": _of_curve("ess_token"),
    "ess_sequence": _of_curve("ess_sequence"),
}
"""One number a run. ``sampler_reward`` is that of the last logging window, those of the curve are means of windows."""


def summarise(runs: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row a variant and bits, in the order of the table.

    ``gain`` is the accuracy minus that of ``none`` at the same bits, ``to_float`` minus that of float rollouts, both
    paired by seed (None where there is nothing to compare with).
    """
    rows = []
    for bits in (None, 8, 4, 3, 2):
        for variant in VARIANTS:
            mine = by_seed(runs, variant, bits)
            if not mine:
                continue
            row: dict[str, Any] = {"variant": variant, "bits": bits, "seeds": sorted(mine)}
            row |= {name: interval([read(run) for run in mine.values()]) for name, read in QUANTITIES.items()}
            row["gain"] = paired(mine, by_seed(runs, "none", bits))
            row["to_float"] = paired(mine, by_seed(runs, "none", None))
            rows.append(row)
    return rows


def by_seed(runs: Sequence[Outcome], variant: str, bits: int | None) -> dict[int, Outcome]:
    """The runs of a variant."""
    return {run["seed"]: run for run in runs if (run["variant"], run["bits"]) == (variant, bits)}


def paired(mine: Mapping[int, Outcome], others: Mapping[int, Outcome], name: str = "accuracy") -> Interval | None:
    """Difference over the seeds that both have: same warm start, same training prompts. None without any."""
    read = QUANTITIES[name]
    shared = sorted(set(mine) & set(others))
    if not shared or mine == others:
        return None
    return interval([read(mine[seed]) - read(others[seed]) for seed in shared])


def reward_paradox(runs: Sequence[Outcome], bits: int, *, with_collapsed: bool) -> Interval | None:
    """Kendall's tau, over the corrections, of the sampler's logged reward and the learner's own; mean over seeds.

    Args:
        runs: the outcomes.
        bits: the precision.
        with_collapsed: count the corrections that collapsed (mean over seeds) too.

    Returns:
        None with fewer than two corrections.
    """
    names = [name for name in VARIANTS if (mine := by_seed(runs, name, bits)) and (with_collapsed or not _failed(mine))]
    seeds = set.intersection(*(set(by_seed(runs, name, bits)) for name in names)) if len(names) > 1 else set()
    taus = []
    for seed in sorted(seeds):
        mine = [by_seed(runs, name, bits)[seed] for name in names]
        taus.append(kendall_tau(*([QUANTITIES[key](run) for run in mine] for key in ("sampler_reward", "reward"))))
    return interval(taus) if taus else None


def collapsed(accuracy: float, start: float) -> bool:
    """Below half of what the warm start had."""
    return accuracy < start / 2


def _failed(mine: Mapping[int, Outcome]) -> bool:
    ends, starts = ([QUANTITIES[key](run) for run in mine.values()] for key in ("accuracy", "start_accuracy"))
    return collapsed(statistics.mean(ends), statistics.mean(starts))


HEADER = (
    "rollouts", "correction", "seeds", "sampler reward", "learner reward", "accuracy, sampled",
    "against no fix", "against float", "accuracy, greedy", "entropy", "k1 x 1e4 (windows < 0)", "mismatch k3",
    "ESS token / sequence",
)  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    for row in rows:
        cells = [
            "float" if row["bits"] is None else f"INT{row['bits']}",
            VARIANTS[row["variant"]],
            str(len(row["seeds"])),
            *(row[key].text() for key in ("sampler_reward", "reward", "accuracy")),
            *("-" if row[key] is None else row[key].text(sign=True) for key in ("gain", "to_float")),
            *(row[key].text() for key in ("greedy_accuracy", "entropy")),
            f"{row['staleness_k1'].text(1, sign=True, scale=1e4)} ({row['negative_k1'].mean:.0%})",
            f"{row['mismatch_k3'].mean:.5f}",
            f"{row['ess_token'].mean:.2f} / {row['ess_sequence'].mean:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def paradox_text(runs: Sequence[Outcome], bits: Sequence[int]) -> str:
    """A line a precision."""
    lines = []
    for one in bits:
        every, left = (reward_paradox(runs, one, with_collapsed=flag) for flag in (True, False))
        if every is not None:
            rest = "-" if left is None else left.text(2, sign=True)
            lines.append(
                f"INT{one}: tau {every.text(2, sign=True)} over all corrections, {rest} without collapsed ones"
            )
    head = "Rank correlation (Kendall) of the sampler's and the learner's reward:\n"
    return head + "".join(f"- {line}\n" for line in lines) if lines else ""
