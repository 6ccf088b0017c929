"""Writes ``report.html``, which explains a run's numbers in one file without any outside resource."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.doctor import (
    Examination,
    describe_attribution,
    headline,
    judge,
    judge_again,
    print_verdict,
    what_to_do,
)
from trl_offpolicy.diagnosis.lags import LAG_TITLES, lag_table
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.report.choice import choice_table
from trl_offpolicy.diagnosis.report.configuration import configuration
from trl_offpolicy.diagnosis.report.examples import SHADES, Decode, example_completions, top_tokens, worst_responses
from trl_offpolicy.diagnosis.report.key_numbers import key_numbers
from trl_offpolicy.diagnosis.report.page import render_page
from trl_offpolicy.diagnosis.report.rollout_numbers import kl_k1
from trl_offpolicy.diagnosis.report.statement import describe_run
from trl_offpolicy.diagnosis.report.step_plots import draw_step_figures
from trl_offpolicy.diagnosis.report.summary import (
    RunSummary,
    column_titles,
    print_summary,
    summarize_log,
    table_caption,
)
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.turns import TURN_TITLES, turn_table
from trl_offpolicy.run_folder.layout import REPORT_FILE
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, read_rollouts
from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info
from trl_offpolicy.run_folder.strict import info_without_paths
from trl_offpolicy.run_folder.syncs import read_syncs

_LABELS = {
    "likely": "likely cause",
    "because": "why",
    "check": "how to make sure",
    "parts": "shares",
    "fix": "what to do",
    "yaml": "setting",
}
"""What the doctor's short labels are called on the page."""


class Report(NamedTuple):
    """The page with what it was made from."""

    html: str
    seen: Examination
    summary: RunSummary


def write_report(run_dir: str | Path, output: str | Path | None = None, *, decode: Decode | None = None) -> Path:
    """Write the report of a run folder.

    Args:
        run_dir: folder with ``metrics.jsonl`` and, if recorded, ``rollouts.parquet`` and ``run.json``.
        output: file to write; None as for :func:`save_report`.
        decode: turns token ids into text, such as ``tokenizer.decode``; None shows the ids.

    Returns:
        The file written.

    Raises:
        FileNotFoundError: the folder or its ``metrics.jsonl`` is missing.
        ValueError: ``metrics.jsonl`` holds no training row, or ``rollouts.parquet`` has a wrong layout.
    """
    return save_report(make_report(run_dir, decode=decode), run_dir, output)


def save_report(report: Report, run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the page to ``output``; returns the file written.

    Args:
        report: the report.
        run_dir: a run folder, or a log file.
        output: file to write; None means ``report.html`` in the folder, or a page with the log file's name beside it.
    """
    run = Path(run_dir)
    own = run.with_suffix(".html") if run.is_file() else run / REPORT_FILE
    path = own if output is None else Path(output)
    path.write_text(report.html, encoding="utf-8")
    return path


def print_report(report: Report) -> None:
    """Print the verdict with the fix, then the table of the run."""
    print_verdict(report.seen)
    print_summary(report.summary)


def make_report(run_dir: str | Path, *, decode: Decode | None = None, live: str = "") -> Report:
    """The report of a run folder as it is now; arguments and errors as of :func:`write_report`.

    ``live`` is a sentence for the top of a page that is shown while the run trains.
    """
    log = read_metrics(run_dir)
    summary = summarize_log(log, run_dir)
    rollouts = read_rollouts(run_dir)
    info = read_run_info(run_dir)
    seen = judge(log, rollouts, info, Thresholds(), path=Path(run_dir), syncs=read_syncs(run_dir))
    attribution = None
    if seen.attribution is not None:
        attribution = {_LABELS[name]: text for name, text in describe_attribution(seen.attribution, info).items()}
    html = render_page(
        "report.html",
        title=f"Off-policy report: {Path(run_dir).resolve().name}",
        live=live,
        configuration=configuration(info_without_paths(info)),
        key_numbers=key_numbers(log),
        headline=headline(seen),
        what_to_do=what_to_do(seen),
        answered=seen.attribution is not None and seen.attribution.cause in CAUSES,
        judge_again="" if seen.advice is None else judge_again(seen.advice),
        statement=describe_run(summary),
        seen=seen,
        attribution=attribution,
        summary=summary,
        column_titles=("quantity", "correction", *column_titles(summary)),
        caption=table_caption(summary),
        by_lag=lag_table(log),
        lag_titles=LAG_TITLES,
        by_turn=turn_table(rollouts),
        turn_titles=TURN_TITLES,
        choice=choice_table(log),
        step_figures=draw_step_figures(log),
        worst=worst_responses(run_dir, rollouts, decode),
        shades=SHADES,
        **_rollout_values(rollouts, decode),
    )
    return Report(html, seen, summary)


def _rollout_values(rollouts: RecordedRollouts | None, decode: Decode | None) -> dict[str, Any]:
    """The page's values on the recorded rollouts, as far as they were recorded."""
    values: dict[str, Any] = {"decoded": decode is not None, "rollout_figures": (), "top_tokens": (), "examples": ()}
    if rollouts is None:
        missing = "No rollouts to show (rollouts.parquet is missing, empty or unreadable): metrics only."
        return {**values, "about_rollouts": missing}
    values |= {"about_rollouts": _describe_rollouts(rollouts), "examples": example_completions(rollouts)}
    if len(rollouts.row):
        from trl_offpolicy.diagnosis.report.rollout_plots import draw_rollout_figures

        values |= {"rollout_figures": draw_rollout_figures(rollouts), "top_tokens": top_tokens(rollouts, decode)}
    return values


def _describe_rollouts(rollouts: RecordedRollouts) -> str:
    trainable = int(rollouts.trainable.sum())
    first, last = rollouts.used_in.min(), rollouts.used_in.max()
    text = f"{len(rollouts.steps)} completions of steps {first} to {last} with {trainable} trainable tokens."
    if rollouts.nonfinite:
        text += (
            f" {rollouts.nonfinite} of them lack a finite log-prob on the sampler's or the trainer's side "
            "and are left out."
        )
    if len(rollouts.row):
        text += " Over the other tokens" if rollouts.nonfinite else " Over them"
        text += f" KL(sampler||trainer) k1 is {format_number(kl_k1(rollouts))} nats per token."
    else:
        text += " No token has both log-probs, so no ratio can be shown."
    if rollouts.skipped_files:
        text += f" {len(rollouts.skipped_files)} unreadable part file(s) skipped."
    return text
