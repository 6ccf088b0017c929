"""The notebooks of docs/notebooks: run from the folder of the checkout, with a kernel of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
NAMES = ("bring_a_verl_configuration", "measure_a_mismatch", "train_and_read_the_report")


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return found


def test_every_notebook_is_named_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_run_from_top_to_bottom_and_names_no_machine(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    text = json.dumps(cells(name))
    assert str(ROOT) not in text and "/tmp/" not in text


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str) -> None:
    """A cell that fails raises; what is drawn and printed is there again."""
    pytest.importorskip("nbclient", reason="constraints/slow.txt is not installed")
    from scripts.notebooks import executed

    again = executed(FOLDER / f"{name}.ipynb")
    for now, before in zip(again.cells, cells(name), strict=True):
        if now.cell_type == "code":
            assert kinds(now.outputs) >= kinds(before["outputs"]), now.source


def kinds(outputs: list[dict[str, Any]]) -> set[str]:
    """Kinds of the outputs of a cell; what goes to stderr differs by machine."""
    return {output["output_type"] for output in outputs if output.get("name") != "stderr"}
