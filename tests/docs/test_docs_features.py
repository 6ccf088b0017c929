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

CELLS = [cell for row in matrix.FEATURES for cell in (row.trl, row.lightning)]
NAMED = sorted({one for cell in CELLS for one in matrix.tests_of(cell)})


@pytest.mark.parametrize("named", NAMED)
def test_the_test_exists(named: str) -> None:
    """A whole file shows no one feature: a cell names a function, and the parameters that it names are in its file."""
    file, _, name = named.partition("::")
    source = (ROOT / file).read_text()
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    function, _, parameters = name.partition("[")
    assert function.startswith("test_") and function in functions
    assert not parameters or parameters.endswith("]")
    assert all(part in source for part in parameters.rstrip("]").split("-"))


TRAINER = "tests/trl/test_trainer.py"


@pytest.mark.parametrize("shown_by", [TRAINER, f"{TRAINER}::test_nothing", f"{TRAINER}::records"])
def test_a_file_or_a_name_that_is_no_test_is_found(shown_by: str) -> None:
    with pytest.raises(AssertionError):
        test_the_test_exists(shown_by)


def test_the_page_is_current() -> None:
    page = matrix.PAGE.read_text()
    assert matrix.with_table(page) == page, "run python scripts/feature_matrix.py"


def test_a_cell_without_a_test_says_why() -> None:
    sentences = [cell for cell in CELLS if not matrix.tests_of(cell)]
    assert sentences and all(len(one.split()) > 3 for one in sentences)
