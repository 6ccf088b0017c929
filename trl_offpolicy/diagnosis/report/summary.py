"""Makes the summary table of a run: each quantity in the first and last quarter of the steps and overall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.rollouts.clock import TIME_METRICS
from trl_offpolicy.run_folder.run_data import MetricsLog, read_metrics

if TYPE_CHECKING:
    from rich.console import Console

Side = Literal["", "before", "after"]


class Quantity(NamedTuple):
    """A line of the table, which shows the first of ``keys`` that was logged. ``{group}`` is mismatch or total."""

    label: str
    unit: str
    side: Side
    keys: tuple[str, ...]
    optional: bool = False


def _both_sides(label: str, unit: str, name: str) -> tuple[Quantity, Quantity]:
    before = Quantity(label, unit, "before", ("offpolicy/{group}/" + name,))
    return before, Quantity(label, unit, "after", (f"offpolicy/kept/{name}",))


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("reward", "", "", ("reward",)),
    Quantity(
        "completion length",
        "tokens",
        "",
        ("completions/mean_length", "offpolicy/rollout/response_length_mean"),
    ),
    *_both_sides("KL k1", "nats/token", "kl_k1"),
    *_both_sides("KL k3", "nats/token", "kl_k3"),
    *_both_sides("chi2 (token)", "", "chi2_token"),
    *_both_sides("chi2 (sequence)", "", "chi2_sequence"),
    *_both_sides("ESS (sequence)", "", "ess_sequence"),
    Quantity("ESS (token)", "", "before", ("offpolicy/weight/ess_token",)),
    Quantity("ESS (token)", "", "after", ("offpolicy/weight_applied/ess_token",)),
    *_both_sides("PPL ratio", "", "ppl_ratio"),
    *_both_sides("Pearson", "", "prob_pearson"),
    Quantity("dropped tokens", "", "", ("offpolicy/keep/dropped_token_fraction",)),
    Quantity("dropped sequences", "", "", ("offpolicy/keep/dropped_sequence_fraction",)),
    Quantity("truncated weights", "", "", ("offpolicy/weight/truncated_fraction",)),
    Quantity("noise floor", "KL k3", "", ("offpolicy/noise_floor/kl_k3",), optional=True),
    Quantity("staleness KL k3", "nats/token", "", ("offpolicy/staleness/kl_k3",), optional=True),
    Quantity("version lag", "versions", "", ("offpolicy/rollout/version_lag_mean",), optional=True),
    *(Quantity(f"{part} time", "s/step", "", (f"offpolicy/time/{part}",), optional=True) for part in TIME_METRICS),
)


_WIDTH = 100
"""Width of the printed table in characters, if the output is not a terminal."""


@dataclass(frozen=True)
class SummaryRow:
    """Means of one metric over the logged steps; None = no finite value was logged.

    ``half_width`` is that of the 95 % interval of ``whole``, from the steps' intervals, taken as independent.
    """

    label: str
    unit: str
    side: Side
    key: str
    first: float | None
    last: float | None
    whole: float | None
    nonfinite: int
    half_width: float | None = None


@dataclass(frozen=True)
class RunSummary:
    """What :func:`summarize_run` found.

    Args:
        rows: the lines of the table, in the order shown.
        n_steps: logged training steps; a quarter holds ``ceil(n_steps / 4)`` of them.
        first_steps: (from, to) of the first quarter.
        last_steps: (from, to) of the last quarter.
        all_steps: (from, to) of the whole run.
        ratio_group: ``mismatch``, or ``total`` if only current/sampling was logged.
        skipped_lines: as in :class:`~trl_offpolicy.run_folder.run_data.MetricsLog`.
        repeated_rows: as in :class:`~trl_offpolicy.run_folder.run_data.MetricsLog`.
    """

    run_dir: Path
    rows: tuple[SummaryRow, ...]
    n_steps: int
    first_steps: tuple[int, int]
    last_steps: tuple[int, int]
    all_steps: tuple[int, int]
    ratio_group: str
    skipped_lines: int
    repeated_rows: int

    @property
    def nonfinite(self) -> int:
        """Number of logged values that were null, NaN or infinite, in the table's metrics; the means omit them."""
        return sum(row.nonfinite for row in self.rows)

    def find(self, label: str, side: Side = "") -> SummaryRow | None:
        """The line with this label and side, or None."""
        return next((row for row in self.rows if (row.label, row.side) == (label, side)), None)

    def whole(self, label: str, side: Side = "") -> float | None:
        """Mean over the whole run of a line, or None if it was not logged."""
        row = self.find(label, side)
        return row.whole if row else None


def summarize_run(run_dir: str | Path) -> RunSummary:
    """Summarise ``run_dir/metrics.jsonl``; see :func:`summarize_log` for what the numbers are.

    Raises:
        FileNotFoundError: the folder or its ``metrics.jsonl`` is missing.
        ValueError: the file holds no training row.
    """
    return summarize_log(read_metrics(run_dir), run_dir)


def summarize_log(log: MetricsLog, run_dir: str | Path) -> RunSummary:
    """Means over logged steps, each step with weight 1, non-finite values left out and counted."""
    steps = log.steps
    quarter = math.ceil(len(steps) / 4)
    rows = (_summarize_quantity(log, quantity, quarter) for quantity in QUANTITIES)
    return RunSummary(
        run_dir=Path(run_dir),
        rows=tuple(row for row in rows if row is not None),
        n_steps=len(steps),
        first_steps=(steps[0], steps[quarter - 1]),
        last_steps=(steps[-quarter], steps[-1]),
        all_steps=(steps[0], steps[-1]),
        ratio_group=log.ratio_group,
        skipped_lines=log.skipped_lines,
        repeated_rows=log.repeated_rows,
    )


def _summarize_quantity(log: MetricsLog, quantity: Quantity, quarter: int) -> SummaryRow | None:
    keys = [key.format(group=log.ratio_group) for key in quantity.keys]
    key = log.first_logged(keys)
    if key is None and quantity.optional:
        return None
    key = key or keys[0]
    values = [row.get(key) for row in log.rows]
    return SummaryRow(
        label=quantity.label,
        unit=quantity.unit,
        side=quantity.side,
        key=key,
        first=_finite_mean(values[:quarter]),
        last=_finite_mean(values[-quarter:]),
        whole=_finite_mean(values),
        nonfinite=log.series(key).nonfinite,
        half_width=_half_width_of_mean([row.get(f"{key}_ci95") for row in log.rows], len(values)),
    )


def _half_width_of_mean(half_widths: Sequence[float | None], steps: int) -> float | None:
    """sqrt(sum of squares) / n; None where a step has no interval."""
    known = [width for width in half_widths if width is not None and math.isfinite(width)]
    return math.sqrt(math.fsum(width**2 for width in known)) / steps if known and len(known) == steps else None


def _finite_mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def format_with_interval(row: SummaryRow) -> str:
    """The mean over the run, with its interval if there is one."""
    if row.half_width is None:
        return format_number(row.whole)
    one_digit = float(f"{row.half_width:.1g}")  # and not 1e+01
    return f"{format_number(row.whole)} ± {one_digit:g}"


def column_titles(summary: RunSummary) -> tuple[str, str, str]:
    """Titles of the three number columns with the steps they cover."""
    names = ("first quarter", "last quarter", "whole run")
    spans = (summary.first_steps, summary.last_steps, summary.all_steps)
    first, last, whole = (
        f"mean of\n{name}\n{f'step {a}' if a == b else f'steps {a}-{b}'}"
        for name, (a, b) in zip(names, spans, strict=True)
    )
    return first, last, whole


def table_caption(summary: RunSummary) -> str:
    """What the table measures: direction of the KL, units, the two sides, and what was left out."""
    pair = {"mismatch": "old/sampling", "total": "current/sampling"}[summary.ratio_group]
    text = (
        f"Means over the logged steps. KL is KL(sampler||trainer) in nats per token, from the ratio {pair} "
        f"({summary.ratio_group}/*). Before: all trainable tokens. After: only the tokens that the correction kept "
        "(kept/*). ESS is the effective sample size as a fraction, 1 for equal weights. ESS (token): of the raw "
        "weights before, of the applied weights after. ESS (sequence): of the products of each response's ratios. "
        "Dropped and truncated are fractions too. PPL ratio is the trainer's perplexity over the sampler's. Pearson "
        "correlates the two probabilities. ±: half the width of the 95 % interval, clustered by prompt. –: not logged."
    )
    return " ".join([text, *data_notes(summary)])


def data_notes(summary: RunSummary) -> list[str]:
    """One sentence for each kind of data that was left out."""
    notes = []
    if summary.nonfinite:
        notes.append(f"{summary.nonfinite} non-finite value(s) (null, NaN or infinite) left out of the means.")
    if summary.skipped_lines:
        notes.append(f"{summary.skipped_lines} unreadable line(s) of metrics.jsonl skipped.")
    if summary.repeated_rows:
        notes.append(f"{summary.repeated_rows} row(s) replaced by a later row of the same step (resumed run).")
    return notes


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    """Print the summary as a table that fits 100 columns.

    Args:
        summary: from :func:`summarize_run`.
        console: rich console to print on; None makes one on standard output.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(f"Run summary: {summary.run_dir}"),
        caption=escape(table_caption(summary)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    for title in ("quantity", "correction"):
        table.add_column(title, no_wrap=True)
    for title in column_titles(summary):
        table.add_column(title, justify="right", no_wrap=True)
    for row in summary.rows:
        numbers = [format_number(row.first), format_number(row.last), format_with_interval(row)]
        label = f"{row.label}, {row.unit}" if row.unit else row.label
        table.add_row("" if row.side == "after" else label, row.side, *numbers)
    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)  # a log file wraps nothing
    console.print(table)
