"""Writes the tables of docs/papers.md from docs/papers.yaml and the presets.

python scripts/papers.py    # tests/docs/test_docs_papers.py: the page is current, and every configuration loads
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl_offpolicy import presets

ROOT = Path(__file__).resolve().parents[1]
PAGE, ROWS = ROOT / "docs" / "papers.md", ROOT / "docs" / "papers.yaml"
BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->\n", re.DOTALL)
STATES = {
    "here": "",
    "part": "**in part**",
    "advised": "**advised**",
    "not here": "**not here**",
    "out of scope": "**not here**, out of scope",
}
"""What a row says of the kit -> how its cell begins."""
MEANINGS = {
    "here": "the kit has it: the cell holds a configuration, or says where it is",
    "part": "the kit has a part of it, or another form: the next column says what is missing",
    "advised": "no code of its own: the documentation or the doctor tells you to do it, and a metric shows it",
    "not here": "the kit does not have it",
    "out of scope": "the kit does not have it and will not: it is the work of an engine, a trainer or a launcher",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One paper, method or system; docs/papers.yaml says what each field holds."""

    name: str
    does: str
    by: str = ""
    arxiv: tuple[str, ...] = ()
    url: str = ""
    state: str = "here"
    preset: str = ""
    config: tuple[str, ...] = ()
    see: str = ""
    differs: str = ""
    others: str = ""

    @property
    def configurations(self) -> tuple[str, ...]:
        """Each is a configuration of the trainer (YAML) that is this row; the preset's own comes first."""
        own = f"offpolicy: {self.preset}"
        said = any(own in text for text in self.config)
        return self.config if said or not self.preset else (own, *self.config)


def read(text: str) -> dict[str, tuple[Row, ...]]:
    """{table: rows}.

    Raises:
        ValueError: a row has an unknown state, or one that its other fields contradict.
        TypeError: an unknown field.
    """
    return {table: tuple(map(_row, rows)) for table, rows in yaml.safe_load(text).items()}


def _row(fields: Mapping[str, Any]) -> Row:
    given = dict(fields)
    config = given.pop("config", ())
    config = (config,) if isinstance(config, str) else tuple(config)
    state = given.pop("is", "here")
    row = Row(**given | {"state": state, "config": config, "arxiv": tuple(given.get("arxiv", ()))})
    if state not in STATES:
        raise ValueError(f"'is' of {row.name!r} must be one of {list(STATES)}, but got {state!r}.")
    has_code = state in ("here", "part")
    if has_code and not (row.configurations or row.see):
        raise ValueError(
            f"config, preset or see must be given for {row.name!r}, which is {state!r}, but all are absent."
        )
    if not has_code and row.configurations:
        raise ValueError(f"config and preset must be absent for {row.name!r}, which is {state!r}.")
    return row


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| paper or system | what it does | here | where we differ | who else has it |", "|" + "---|" * 5]
    for row in rows:
        cells = (_named(row), _does(row), _here(row), row.differs or "-", row.others or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _named(row: Row) -> str:
    link = f"https://arxiv.org/abs/{row.arxiv[0]}" if row.arxiv else row.url
    name = f"[{row.name}]({link})" if link else row.name
    beside = [row.by, *row.arxiv]
    return "<br>".join([name, ", ".join(filter(None, beside))]) if any(beside) else name


def _does(row: Row) -> str:
    if not row.preset:
        return row.does
    formula = presets.get(row.preset).formula.replace("|", "\\|")
    return f"{row.does}<br>`{formula}`"


def _here(row: Row) -> str:
    shown = ["<br>".join(f"`{line}`" for line in text.splitlines()) for text in row.configurations]
    return "<br>".join(filter(None, [STATES[row.state], "<br>or ".join(shown), row.see]))


def states(tables: Mapping[str, Sequence[Row]]) -> str:
    """How many rows say what, as a Markdown table."""
    count = Counter(row.state for rows in tables.values() for row in rows)
    lines = ["| the cell begins with | it means | rows |", "|---|---|---|"]
    lines += [f"| {STATES[name] or 'nothing'} | {meaning} | {count[name]} |" for name, meaning in MEANINGS.items()]
    return "\n".join(lines) + "\n"


def with_tables(page: str, tables: Mapping[str, Sequence[Row]]) -> str:
    """The page with the present tables between its marks.

    Raises:
        KeyError: a mark names no table.
    """

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        text = states(tables) if name == "states" else table(tables[name])
        return f"<!-- table: {name} -->\n{text}<!-- end -->\n"

    return BLOCK.sub(block, page)


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_tables(PAGE.read_text(), read(ROWS.read_text())))


if __name__ == "__main__":
    main()
