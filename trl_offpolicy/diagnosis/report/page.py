"""HTML pieces of the report: one self-contained page, every piece of text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from trl_offpolicy.diagnosis.report.plots import Panel
from trl_offpolicy.diagnosis.report.summary import (
    RunSummary,
    SummaryRow,
    column_titles,
    format_number,
    format_with_interval,
    table_caption,
)

STYLE = """
:root { --ground: #fff; --ink: #1b1f24; --soft: #5b6470; --rule: #d8dde3; --panel: #f6f7f9; --mark: #ffe2a8;
  --blue: #0072b2; --orange: #d55e00; --green: #009e73; --grey: #7a828c; --red: #b3261e; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ground: #15181c; --ink: #e4e7eb; --soft: #a2abb6;
  --rule: #363d46; --panel: #1e2228; --mark: #6b4a00; --blue: #56b4e9; --orange: #ff9147; --green: #35c79b;
  --grey: #98a1ac; --red: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 46rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--rule); padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
p, figcaption, caption { overflow-wrap: anywhere; }
figure { margin: 1.4rem 0 2rem; }
svg { display: block; width: 100%; max-width: 38rem; height: auto; }
figcaption, .note { color: var(--soft); font-size: .88rem; }
.lead { font-size: 1.05rem; background: var(--panel); border-left: 4px solid var(--blue);
  padding: .7rem .9rem; margin: 1rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; vertical-align: top; }
thead th { border-bottom: 2px solid var(--rule); color: var(--soft); font-weight: 600;
  vertical-align: bottom; }
tbody tr.rule > * { border-top: 1px solid var(--rule); }
th[scope=row] { font-weight: 600; }
.num { text-align: right; white-space: nowrap; }
.soft { color: var(--soft); font-weight: 400; }
caption { caption-side: bottom; text-align: left; color: var(--soft); padding-top: .5rem; }
.header th { width: 7rem; } .header td { overflow-wrap: anywhere; }
code, pre { font: .85rem/1.45 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); padding: .6rem .7rem;
  margin: .2rem 0 .6rem; }
.context td { padding-top: 0; padding-bottom: .6rem; overflow-wrap: anywhere; }
.ok, .notice, .warning, .critical { font-weight: 700; }
.ok { color: var(--green); } .notice { color: var(--blue); }
.warning { color: var(--orange); } .critical { color: var(--red); }
mark { background: var(--mark); color: inherit; padding: 0 .1em; }
article { padding: .7rem 0 .2rem; }
article + article { border-top: 1px solid var(--rule); }
@media (max-width: 34rem) { table { font-size: .78rem; } th, td { padding-right: .35rem; }
  thead .num { white-space: normal; } .header th { width: 5.5rem; } th .soft { display: block; } }
"""


def render_page(title: str, sections: Iterable[str]) -> str:
    """The whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def render_section(title: str, *parts: str) -> str:
    """A heading and what belongs under it."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def render_note(text: str, kind: str = "note") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>'


def render_panel(panel: Panel) -> str:
    """A figure with its title and caption; where nothing could be drawn, the caption says why."""
    return (
        f"<figure>\n<h3>{escape(panel.title)}</h3>\n{panel.svg or '<p>Not drawn.</p>'}\n"
        f"<figcaption>{escape(panel.caption)}</figcaption>\n</figure>"
    )


def render_run_info(info: Mapping[str, Any]) -> str:
    """Header table of ``run.json``: one line a field, nested fields on one line."""
    rows = "".join(
        f"<tr><th scope=row>{escape(str(key))}</th><td>{escape(_flat_text(value))}</td></tr>"
        for key, value in info.items()
    )
    return f'<table class="header"><tbody>{rows}</tbody></table>' if rows else ""


def _flat_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat_text(entry)}" for key, entry in value.items())
    return "–" if value is None else str(value)


def render_summary(summary: RunSummary) -> str:
    """The summary table with the same numbers and caption as on the terminal."""
    titles = ("quantity", "correction", *column_titles(summary))
    head = "".join(
        f"<th{' class=num' if index > 1 else ''}>{_heading(title)}</th>" for index, title in enumerate(titles)
    )
    body = "".join(map(_summary_row, summary.rows))
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="note">{escape(table_caption(summary))}</p>'
    )


def _heading(title: str) -> str:
    """Keeps line breaks; a span of steps stays on one line."""
    return escape(title).replace("\n", "<br>").replace("-", "\u2011")


def _summary_row(row: SummaryRow) -> str:
    """A line of the table; the label of a before/after pair spans both lines."""
    numbers = (format_number(row.first), format_number(row.last), format_with_interval(row))
    cells = f"<td>{row.side}</td>" + "".join(f'<td class="num">{number}</td>' for number in numbers)
    if row.side == "after":
        return f"<tr>{cells}</tr>"
    span = ' rowspan="2"' if row.side else ""
    unit = f' <span class="soft">{escape(row.unit)}</span>' if row.unit else ""
    return f'<tr class="rule"><th scope=row{span}>{escape(row.label)}{unit}</th>{cells}</tr>'


def render_rows(titles: Sequence[str], rows: Iterable[tuple[Sequence[str], str]]) -> str:
    """A table of plain-text cells; under each row one line of HTML (already escaped) over the whole width."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        f'<tr class="rule">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        f'<tr class="context"><td colspan="{len(titles)}">{below}</td></tr>'
        for cells, below in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
