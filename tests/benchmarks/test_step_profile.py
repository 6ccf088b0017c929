"""The profile of a step runs from end to end, its parts add up, and a shape that is known is not measured again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from processes import run_command

ROOT = Path(__file__).resolve().parents[2]
STOCK, ALL = "stock TRL", "kit, both and sync"


def run(*flags: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "benchmarks/step_profile.py", "--quick", *flags]
    done = run_command(command, seconds=1500, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def tables(printed: str) -> str:
    """What was measured, without the lines before it (of DeepSpeed where it is installed: when, and on what)."""
    return printed[printed.index("24/12/4, ") :]


def test_quick_sizes_are_those_of_every_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of the commands that ``--all`` starts for its shapes."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_profile

    commands: list[list[str]] = []
    monkeypatch.setattr(step_profile.subprocess, "run", lambda command, check: commands.append(command))

    def sizes(*flags: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", ["step_profile.py", *flags])
        found = vars(step_profile.parsed())
        return {name: found[name] for name in step_profile.QUICK}

    assert sizes("--quick") == sizes("--quick", "--only", "2") == step_profile.QUICK
    assert (sizes("--only", "2")["prompt"], sizes("--only", "2")["group"]) == (1024, 8)
    monkeypatch.setattr(sys, "argv", ["step_profile.py", "--quick", "--all", "--out", str(tmp_path / "out")])
    step_profile.main()
    assert [sizes(*command[2:]) for command in commands] == [step_profile.QUICK]


@pytest.mark.slow
def test_the_parts_add_up_without_an_engine(tmp_path: Path) -> None:
    out = tmp_path / "profile.jsonl"
    printed = run("--no-engine", "--out", str(out))
    (row,) = map(json.loads, out.read_text().splitlines())
    assert len(row["seconds"]) == 5
    for name, parts in row["seconds"].items():
        assert parts["all"] == pytest.approx(sum(value for part, value in parts.items() if part != "all"), rel=1e-6)
        assert min(parts[part] for part in ("scoring", "backward", "correct", "reward")) > 0, name
        assert parts["generate"] == parts["sync"] == 0 and row["peak_gib"][name] > 0
    assert all(gradient < 1e-4 for _, gradient in row["apart"].values())
    known = run("--no-engine", "--out", str(out))
    assert tables(known) == tables(printed) and "1 rounds: 42 completion tokens" in tables(known)
    assert len(out.read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.vllm
def test_generation_and_syncs_are_those_of_a_real_engine(tmp_path: Path) -> None:
    out = tmp_path / "profile.jsonl"
    run("--lora", "4", "--out", str(out))
    (row,) = map(json.loads, out.read_text().splitlines())
    for parts in row["seconds"].values():
        assert parts["generate"] > 0 and parts["sync"] > 0
    sent = row["sync_bytes"]
    assert sent[STOCK] == 4 * row["parameters"] and 0 < sent[ALL] < sent[STOCK] / 2
