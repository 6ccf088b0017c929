"""docs/evidence.md: its tables are those of the committed results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "scripts" / "evidence.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evidence"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["evidence.md", "README.md"])
def test_the_tables_are_those_of_the_results(script: Any, name: str) -> None:
    (page,) = [path.read_text() for path in script.PAGES if path.name == name]
    lines = script.results.read(script.RESULTS)
    assert len(script.BLOCK.findall(page)) == page.count("<!-- table: ") > 0
    assert script.with_tables(page, lines) == page, "run python scripts/evidence.py"


def test_another_result_changes_the_page(script: Any) -> None:
    page, lines = script.PAGES[0].read_text(), script.results.read(script.RESULTS)
    changed = [{**line, "accuracy": line["accuracy"] / 2} if line["mismatch"] == "int3" else line for line in lines]
    assert script.with_tables(page, changed) != page
