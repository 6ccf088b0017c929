"""What the benchmarks start in processes of their own can be started."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_command

ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r'"-m",\s+"(trl_offpolicy[\w.]*|lightning_module[\w.]*)"')


def run(script: str, *flags: str, seconds: float) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_command([sys.executable, f"benchmarks/{script}", *flags], seconds=seconds, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def can_be_started(module: str) -> bool:
    found = find_spec(module)
    return found is not None and (
        found.submodule_search_locations is None or find_spec(f"{module}.__main__") is not None
    )


def test_modules_that_are_started_have_a_main() -> None:
    folders = ("benchmarks", "scripts", "recipes", "trl_offpolicy", "lightning_module")
    texts = {path: path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    started = {(str(path), module) for path, text in texts.items() for module in STARTED.findall(text)}
    assert started and not [each for each in started if not can_be_started(each[1])]


def test_a_package_without_a_main_is_found() -> None:
    assert not can_be_started("trl_offpolicy.cli")


@pytest.mark.integration
def test_the_doctor_and_the_report_are_timed() -> None:
    printed = run("doctor_speed.py", "--tokens", "40000", seconds=300)
    assert [line.split()[0] for line in printed.splitlines()] == ["doctor", "report"]


@pytest.mark.slow
def test_a_sync_to_an_engine_here_and_to_a_server_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "syncs.jsonl"
    run("sync_cost.py", "--tiny", "--syncs", "1", "--out", str(out), seconds=1500)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ways = {row["row"].split(", ")[-2] for row in rows}
    assert ways == {"memory", "folder on disk", "folder in memory", "broadcast"}
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows)
