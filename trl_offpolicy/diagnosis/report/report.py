"""``report.html``: what a run's numbers say, in one file without any outside resource."""

from __future__ import annotations

from pathlib import Path

from trl_offpolicy.diagnosis.doctor import judge
from trl_offpolicy.diagnosis.report import page
from trl_offpolicy.diagnosis.report.doctor_page import render_findings
from trl_offpolicy.diagnosis.report.examples import Decode, render_examples, render_top_tokens
from trl_offpolicy.diagnosis.report.rollout_numbers import kl_k1
from trl_offpolicy.diagnosis.report.statement import describe_run
from trl_offpolicy.diagnosis.report.step_plots import draw_step_figures
from trl_offpolicy.diagnosis.report.summary import format_number, summarize_log
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.run_folder.layout import REPORT_FILE
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, read_rollouts
from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info


def write_report(run_dir: str | Path, output: str | Path | None = None, *, decode: Decode | None = None) -> Path:
    """Write the report of a run folder.

    Args:
        run_dir: folder with ``metrics.jsonl`` and, if recorded, ``rollouts.parquet`` and ``run.json``.
        output: file to write; None means ``report.html`` in ``run_dir``.
        decode: turns token ids into text, such as ``tokenizer.decode``; None shows the ids.

    Returns:
        The file written.

    Raises:
        FileNotFoundError: the folder or its ``metrics.jsonl`` is missing.
        ValueError: ``metrics.jsonl`` holds no training row, or ``rollouts.parquet`` has a wrong layout.
    """
    log = read_metrics(run_dir)
    summary = summarize_log(log, run_dir)
    rollouts = read_rollouts(run_dir)
    path = Path(run_dir) / REPORT_FILE if output is None else Path(output)
    info = read_run_info(run_dir)
    seen = judge(log, rollouts, info, Thresholds(), path=Path(run_dir))
    sections = [
        page.render_run_info(info),
        page.render_note(describe_run(summary), "lead"),
        render_findings(seen),
        page.render_section("Summary", page.render_summary(summary)),
        page.render_section("Over the steps", *map(page.render_panel, draw_step_figures(log))),
        *_rollout_sections(rollouts, decode),
    ]
    path.write_text(page.render_page(f"Off-policy report: {Path(run_dir).resolve().name}", sections), encoding="utf-8")
    return path


def _rollout_sections(rollouts: RecordedRollouts | None, decode: Decode | None) -> list[str]:
    if rollouts is None:
        missing = "No rollouts to show (rollouts.parquet is missing, empty or unreadable): metrics only."
        return [page.render_section("Tokens and sequences", page.render_note(missing))]
    examples = page.render_section("Example completions", render_examples(rollouts))
    about = page.render_note(_describe_rollouts(rollouts))
    if not len(rollouts.row):
        return [page.render_section("Tokens and sequences", about), examples]
    from trl_offpolicy.diagnosis.report.rollout_plots import draw_rollout_figures

    note = (
        "Probability of the token under sampler and trainer, log old - log sampling in nats, and the token "
        "(marked) in its completion. Positions count from 0."
    )
    if decode is None:
        note += " Shown as token ids, with the completion's text below: no tokenizer was given."
    return [
        page.render_section("Tokens and sequences", about, *map(page.render_panel, draw_rollout_figures(rollouts))),
        page.render_section("Largest log-ratios", page.render_note(note), render_top_tokens(rollouts, decode)),
        examples,
    ]


def _describe_rollouts(rollouts: RecordedRollouts) -> str:
    trainable = int(rollouts.trainable.sum())
    first, last = rollouts.steps.min(), rollouts.steps.max()
    text = f"{len(rollouts.steps)} completions of steps {first} to {last} with {trainable} trainable tokens."
    if rollouts.nonfinite:
        text += (
            f" {rollouts.nonfinite} of them lack a finite log-prob on the sampler's or the trainer's side "
            "and are left out."
        )
    if len(rollouts.row):
        text += " Over the other tokens" if rollouts.nonfinite else " Over them"
        text += f" KL(sampler||trainer) k1 is {format_number(kl_k1(rollouts))} nats a token."
    else:
        text += " No token has both log-probs, so no ratio can be shown."
    if rollouts.skipped_files:
        text += f" {len(rollouts.skipped_files)} unreadable part file(s) skipped."
    return text
