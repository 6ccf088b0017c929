"""Writes the tables of docs/evidence.md and README.md and their figure from the committed results of the benchmarks.

python scripts/evidence.py    # tests/docs/test_docs_evidence.py: the page is current
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.corrections import figure, results, tables

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "evidence.md", ROOT / "README.md")
PICTURE = ROOT / "docs" / "pictures" / "evidence.svg"
RESULTS = ROOT / "benchmarks" / "corrections" / "results.jsonl"
Lines = Sequence[results.Result]
BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->\n", re.DOTALL)

TABLES: Mapping[str, Callable[[Lines], str]] = {
    "answer": lambda lines: tables.answer(lines, "sorting"),
    "costs": lambda lines: tables.costs(lines, "sorting"),
    "gains": lambda lines: tables.gains(lines, "sorting"),
    "ends": lambda lines: tables.ends(lines, "sorting"),
    "second_costs": lambda lines: tables.costs(lines, "ranking"),
    "second_gains": lambda lines: tables.gains(lines, "ranking"),
}


def with_tables(page: str, lines: Lines) -> str:
    """The page with the present tables between its marks.

    Raises:
        KeyError: a mark names no table.
    """

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- table: {name} -->\n{TABLES[name](lines)}<!-- end -->\n"

    return BLOCK.sub(block, page)


def main() -> None:
    """Write pages and picture."""
    lines = results.read(RESULTS)
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), lines))
    PICTURE.write_text(figure.draw(lines))


if __name__ == "__main__":
    main()
