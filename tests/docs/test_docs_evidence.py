"""docs/evidence.md: its tables are those of the committed results."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import trl_offpolicy as op
from trl_offpolicy.config import OffPolicyGRPOConfig

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


def test_every_row_of_the_benchmark_has_its_setting(tmp_path: Path) -> None:
    """Those of the section are the rows' own corrections and losses, the YAML below it is the recommended one."""
    sys.path.insert(0, str(ROOT))
    rows = importlib.import_module("benchmarks.corrections.rows").ROWS
    section = (ROOT / "docs" / "evidence.md").read_text().split("## Which row is which setting")[1].split("\n## ")[0]
    (block,) = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    cells = dict(re.findall(r"^\| ([^|]+) \| (?:`(.*)`|the YAML below) \|$", section, flags=re.MULTILINE))
    assert cells.pop("row") == "offpolicy"  # the titles of the table
    assert set(cells) == {row.title for row in rows.values()}
    for name, row in rows.items():
        said = yaml.safe_load(cells[row.title]) if cells[row.title] else yaml.safe_load(block)["offpolicy"]
        config = OffPolicyGRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", use_vllm=True, offpolicy=said
        )
        found, meant = config.preset, row.preset((0.95, 1.05))
        if name == "auto":
            assert found.auto == meant.auto is not None
            continue
        assert (found.correction or op.Correction()) == (meant.correction or op.Correction()), name
        assert found.objective.mode == meant.objective.mode, name
        if "objective" in str(said):
            assert type(found.objective.policy_loss) is type(meant.objective.policy_loss), name
