"""The table of features in docs/lightning.md: every test that it names exists, and the page is current."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("feature_matrix", ROOT / "scripts" / "feature_matrix.py")
assert _spec is not None and _spec.loader is not None
matrix = importlib.util.module_from_spec(_spec)
sys.modules["feature_matrix"] = matrix  # dataclasses look their module up
_spec.loader.exec_module(matrix)

NAMED = sorted({one for row in matrix.FEATURES for one in (row.trl, row.lightning) if one.startswith("tests/")})


@pytest.mark.parametrize("named", NAMED)
def test_the_test_exists(named: str) -> None:
    file, _, name = named.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert found if not name else name in found


def test_the_page_is_current() -> None:
    page = matrix.PAGE.read_text()
    assert matrix.with_table(page) == page, "run python scripts/feature_matrix.py"


def test_a_cell_without_a_test_says_why() -> None:
    sentences = [one for row in matrix.FEATURES for one in (row.trl, row.lightning) if not one.startswith("tests/")]
    assert sentences and all(len(one.split()) > 3 for one in sentences)
