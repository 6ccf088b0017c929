"""The doctor's findings as HTML pieces of the report."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from trl_offpolicy.diagnosis.doctor import Examination, describe_attribution
from trl_offpolicy.diagnosis.report.page import render_note, render_section
from trl_offpolicy.diagnosis.verdict.judge import Finding


def render_findings(seen: Examination) -> str:
    """The section with verdict, findings and anti-patterns."""
    found = seen.diagnosis
    span = "" if found.steps is None else f" over steps {found.steps[0]} to {found.steps[1]}"
    verdict = f'<p>Verdict{span}: <strong class="{found.verdict}">{found.verdict}</strong>.</p>'
    parts = [verdict, *map(_finding, found.findings)]
    if seen.attribution is not None:
        title = "<h3>Why engine and trainer differ, from the recorded tokens</h3>"
        parts.append(f"<article>{title}{_fields(describe_attribution(seen.attribution))}</article>")
    for one in seen.antipatterns:
        title = f'<h3><span class="warning">anti-pattern</span> {escape(one.name)}</h3>'
        parts.append(f"<article>{title}{_fields({'seen': one.seen, 'instead': one.instead})}</article>")
    if found.unknown:
        parts.append(render_note(f"Not judged, because nothing was logged for it: {', '.join(found.unknown)}."))
    return render_section("Findings", *parts)


def _finding(finding: Finding) -> str:
    about = finding.about
    since = "" if finding.since is None else f", since step {finding.since}"
    title = (
        f'<h3><span class="{finding.severity}">{finding.severity}</span> {escape(about.title)} '
        f'<span class="soft">(branch {about.branch}{since})</span></h3>'
    )
    fields = {"seen": finding.symptom, "means": about.meaning, "check": about.confirm, "fix": about.fix}
    snippet = f"<pre>{escape(about.snippet.rstrip())}</pre>" if about.snippet else ""
    return f"<article>{title}{_fields(fields)}{snippet}</article>"


def _fields(fields: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><th scope=row>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in fields.items() if v)
    return f'<table class="header"><tbody>{rows}</tbody></table>'
