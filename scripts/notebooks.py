"""Runs the notebooks of docs/notebooks from the folder of the checkout, and keeps what they print and draw.

python scripts/notebooks.py [NAME ...]    # tests/docs/test_notebooks.py runs them too
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
SECONDS = 1500
"""Longest time of a cell."""


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run. A cell that fails raises its error."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day, which differ each time
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if output.get("name") != "stderr"
            ]  # remarks of the machine
    return notebook


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            nbformat.write(executed(path), path)
            print(path.relative_to(ROOT))
