"""``probe.json`` and ``probe.html``: what a probe found, for scripts and for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from trl_offpolicy.diagnosis.attribution.breakdown import Breakdown, as_rollouts
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.probe.probe import ProbeResult
from trl_offpolicy.diagnosis.report import page
from trl_offpolicy.diagnosis.report.summary import format_number
from trl_offpolicy.run_folder.layout import PROBE_FILE, PROBE_PAGE

ROWS = (
    ("KL k3", "nats a token", "kl_k3"),
    ("KL k1", "nats a token", "kl_k1"),
    ("total variation", "", "tv"),
    ("chi2 (token)", "", "chi2_token"),
    ("chi2 (sequence)", "", "chi2_sequence"),
    ("PPL ratio", "", "ppl_ratio"),
    ("Pearson", "", "prob_pearson"),
    ("mean |log-ratio|", "nats", "logp_diff_mean"),
    ("largest |log-ratio|", "nats", "logp_diff_max"),
    ("largest probability difference", "", "prob_diff_max"),
)
"""Label, unit and name of the quantities shown."""
EXAMPLES = 3


def headline(result: ProbeResult) -> str:
    """The verdict in one sentence."""
    found = result.attribution
    kl, floor = result.metrics["mismatch/kl_k3"], result.metrics["noise_level"]
    size = f"KL {format_number(kl)} nats a token, {format_number(kl / floor)} times the noise floor"
    if found.cause == "none":
        return f"No mismatch above the noise floor ({size})."
    title = title_of(found.cause)
    detail = f", {found.detail}" if found.detail else ""
    return f"Mismatch: {title}{detail} ({size}; confidence {found.confidence:.2f})."


def title_of(cause: str) -> str:
    """A cause's name for people."""
    if cause == "other_weights":
        return "other weights (stale, another adapter, or a policy that moved on)"
    return CAUSES[cause].title if cause in CAUSES else cause


def confirmation(cause: str) -> str:
    """How to make sure of a cause; empty where the table has none."""
    return CAUSES[cause].confirm if cause in CAUSES else ""


def metric_rows(result: ProbeResult) -> list[tuple[str, str, str]]:
    """(label with unit, value with interval, noise floor) of :data:`ROWS`."""
    rows = []
    for label, unit, name in ROWS:
        value = format_number(result.metrics[f"mismatch/{name}"])
        width = result.metrics.get(f"mismatch/{name}_ci95")
        value += "" if width is None else f" ± {format_number(width)}"
        rows.append((f"{label}, {unit}" if unit else label, value, _floor(result, name)))
    ess = result.metrics["weight_applied/ess_token"]
    return [*rows, ("ESS (token), raw weights", format_number(ess), "")]


def _floor(result: ProbeResult, name: str) -> str:
    value = result.metrics.get(f"noise_floor/{name}")
    return "" if value is None else format_number(value)


def breakdown_rows(breakdown: Breakdown) -> list[tuple[str, str, str, str, str]]:
    """(bin, tokens, KL k3, mean |log-ratio|, share of the KL) as text."""
    return [
        (one.label, str(one.tokens), format_number(one.k3), format_number(one.logp_diff), f"{one.share:.0%}")
        for one in breakdown.bins
    ]


BREAKDOWN_TITLES = ("tokens", "KL k3", "mean |log-ratio|", "share of KL")


def write_probe(result: ProbeResult, folder: Path) -> tuple[Path, Path]:
    """Write ``probe.json`` and ``probe.html`` into ``folder``; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / PROBE_FILE, folder / PROBE_PAGE
    json_path.write_text(json.dumps(_plain(as_dict(result)), indent=2) + "\n", encoding="utf-8")
    html_path.write_text(render_probe(result), encoding="utf-8")
    return json_path, html_path


def as_dict(result: ProbeResult) -> dict[str, Any]:
    """Everything but the tokens."""
    found = result.attribution
    about = CAUSES.get(found.cause)
    return {
        "options": asdict(result.options),
        "verdict": headline(result),
        "metrics": dict(result.metrics),
        "attribution": {
            **asdict(found),
            "meaning": about.meaning if about else "",
            "confirm": confirmation(found.cause),
            "fix": about.fix if about else "",
        },
        "recommendation": asdict(result.recommendation),
        "breakdowns": [asdict(one) for one in result.breakdowns],
        "completions": len(result.completions),
        "tokens": int(result.evidence.observed.sum()),
        "seconds": dict(result.seconds),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """JSON has no NaN: null takes its place."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render_probe(result: ProbeResult) -> str:
    """The HTML page."""
    from trl_offpolicy.diagnosis.report.rollout_plots import draw_rollout_figures

    figures = draw_rollout_figures(as_rollouts(result.evidence))
    sections = [
        page.render_note(headline(result), "lead"),
        page.render_section("Cause", *_cause_parts(result)),
        page.render_section("What to do", *_advice_parts(result)),
        page.render_section("Mismatch", _table(("quantity", "engine against trainer", "trainer against itself"),
                                               metric_rows(result), _METRIC_NOTE)),
        *(page.render_section(f"By {one.title}", _table(("", *BREAKDOWN_TITLES), breakdown_rows(one)))
          for one in result.breakdowns),
        page.render_section("Figures", *map(page.render_panel, figures)),
        page.render_section("Examples", *(f"<pre>{escape(text)}</pre>" for text in result.completions[:EXAMPLES])),
        page.render_section("Settings", page.render_run_info(_settings(result))),
    ]  # fmt: skip
    return page.render_page(f"Zero-update probe: {Path(result.options.model).name}", sections)


_METRIC_NOTE = (
    "± is half the width of the 95 % interval, clustered by prompt. Right column: the trainer scored the same text "
    "again in another batch layout; differences of that size mean nothing."
)


def _cause_parts(result: ProbeResult) -> list[str]:
    found = result.attribution
    about = CAUSES.get(found.cause)
    parts = [page.render_note(about.meaning, "plain")] if about else []
    parts.append("<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in found.reasons) + "</ul>")
    if confirmation(found.cause):
        parts.append(page.render_note(f"To make sure: {confirmation(found.cause)}", "plain"))
    if found.runner_up is not None and found.cause != "none":
        parts.append(page.render_note(f"Runner-up: {title_of(found.runner_up)}. Observed: {found.level}."))
    return parts


def _advice_parts(result: ProbeResult) -> list[str]:
    advice = result.recommendation
    parts = [page.render_note(text, "plain") for text in advice.why]
    return [*parts, f"<pre>{escape(advice.yaml)}</pre>"] if advice.yaml else parts


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Plain cells; all but the first column are numbers."""
    head = "".join(f"<th{' class=num' if place else ''}>{escape(title)}</th>" for place, title in enumerate(titles))
    body = "".join(
        f'<tr class="rule"><th scope=row>{escape(row[0])}</th>'
        + "".join(f'<td class="num">{escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    note = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{note}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _settings(result: ProbeResult) -> dict[str, Any]:
    options = asdict(result.options)
    options["prompts"] = f"{len(result.completions) // result.options.samples} prompts"
    seconds = {name: f"{value:.1f} s" for name, value in result.seconds.items()}
    return {**options, "tokens": int(result.evidence.observed.sum()), "seconds": seconds}
