"""From the outcomes of runs to the table: means over seeds, 95 % intervals, differences paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.lab.intervals import Interval, interval
from recipes.async_lag.lag import LAGS, VARIANTS

Outcome = Mapping[str, Any]


def _of_curve(key: str) -> Callable[[Outcome], float]:
    return lambda run: statistics.mean(row.get(key, 0.0) for row in run["curve"])


QUANTITIES: dict[str, Callable[[Outcome], float]] = {
    "accuracy": lambda run: run["end"]["accuracy"],
    "reward": lambda run: run["end"]["reward"],
    "greedy_accuracy": lambda run: run["end"]["greedy_accuracy"],
    "start_accuracy": lambda run: run["start"]["accuracy"],
    "entropy": lambda run: run["end"]["entropy"],
    "lag": _of_curve("lag"),
    "ess_token": _of_curve("ess_token"),
    "ess_sequence": _of_curve("ess_sequence"),
    "clip_fraction": _of_curve("clip_fraction"),
    "truncated_fraction": _of_curve("truncated_fraction"),
}
"""One number a run; those of the curve are means of its windows."""


def of_cell(runs: Sequence[Outcome], variant: str, lag: int | None) -> dict[int, Outcome]:
    """{seed: run}."""
    return {run["seed"]: run for run in runs if (run["variant"], run["lag"]) == (variant, lag)}


def summarise(runs: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row a lag and variant.

    ``to_sync`` is the accuracy minus that of naive PPO at lag 0, ``to_naive`` minus that of naive PPO at the same lag,
    both paired by seed (None where there is nothing to compare with).
    """
    rows = []
    known = {run["lag"] for run in runs}
    for lag in [lag for lag in (*sorted(known - {None}), None) if lag in known]:
        for variant in VARIANTS:
            if not (mine := of_cell(runs, variant, lag)):
                continue
            row: dict[str, Any] = {"variant": variant, "lag_bound": lag, "seeds": sorted(mine)}
            row |= {name: interval([read(run) for run in mine.values()]) for name, read in QUANTITIES.items()}
            row["to_sync"] = paired(mine, of_cell(runs, "naive", 0))
            row["to_naive"] = paired(mine, of_cell(runs, "naive", lag))
            rows.append(row)
    return rows


def paired(mine: Mapping[int, Outcome], others: Mapping[int, Outcome]) -> Interval | None:
    """Difference in accuracy over the seeds that both have; None without any, or against itself."""
    read, shared = QUANTITIES["accuracy"], sorted(set(mine) & set(others))
    if not shared or mine == others:
        return None
    return interval([read(mine[seed]) - read(others[seed]) for seed in shared])


HEADER = (
    "lag", "objective", "seeds", "accuracy, sampled", "against synchronous", "against naive", "accuracy, greedy",
    "reward", "entropy", "mean lag", "ESS token / sequence", "clipped", "weights cut",
)  # fmt: skip


def lag_name(lag: int | None) -> str:
    """For tables and axes."""
    return "unbounded" if lag is None else str(lag)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    for row in rows:
        cells = [
            lag_name(row["lag_bound"]),
            VARIANTS[row["variant"]],
            str(len(row["seeds"])),
            row["accuracy"].text(),
            *("-" if row[key] is None else row[key].text(sign=True) for key in ("to_sync", "to_naive")),
            *(row[key].text() for key in ("greedy_accuracy", "reward", "entropy")),
            f"{row['lag'].mean:.1f}",
            f"{row['ess_token'].mean:.2f} / {row['ess_sequence'].mean:.2f}",
            *(f"{row[key].mean:.1%}" for key in ("clip_fraction", "truncated_fraction")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


__all__ = ["LAGS", "QUANTITIES", "Outcome", "lag_name", "of_cell", "paired", "summarise", "table"]
