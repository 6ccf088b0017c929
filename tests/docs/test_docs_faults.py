"""docs/faults.md: every row of its tables names tests that exist, and says what survives and what to do."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
_CELLS = re.compile(r"(?<!\\)\|")
ROWS = [[cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
TABLE = [row for row in ROWS if row[0] != "fault"]


@cache
def known_tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0][:40])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 5 and all(row), "fault, what happens, what survives, what to do, test"
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[4])
    assert named, "a row must name a test"
    assert re.sub(r"`[^`]*`|[, ]", "", row[4]) == "", "nothing but tests"
    for file, name in named:
        assert name in known_tests(file), f"{file} has no {name}"


def test_there_is_a_list_of_what_is_not_promised() -> None:
    _, title, rest = PAGE.partition("## What is not promised")
    assert title and rest.count("\n- ") >= 5
