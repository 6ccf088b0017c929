"""The script for a day with a GPU: its options, its page, and its rehearsal on a CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu_results import LINES, MARK, STEPS, page, written

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "gpu_day.sh"


def start(*words: str | Path, seconds: int = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (SCRIPT, *words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment})


def test_help_names_every_step_of_the_page() -> None:
    said = start("--help")
    assert said.returncode == 0
    assert all(f" {name}" in said.stdout for name in STEPS)


def test_an_unknown_step_or_option_is_one_line(tmp_path: Path) -> None:
    for words, told in ((("--rehearse", "--out", tmp_path, "qickstart"), "no step qickstart"), (("--fast",), "--fast")):
        said = start(*words)
        assert said.returncode == 2 and told in said.stderr and said.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    said = start("--out", tmp_path, "nccl", PYTHON=sys.executable)
    assert said.returncode == 1 and "torch sees no GPU; --rehearse" in said.stderr
    assert ("built without CUDA" in said.stderr) == (torch.version.cuda is None) and "PYTHON=" in said.stderr


def checkout(folder: Path) -> Path:
    """What the script looks at, without what it runs."""
    for name in ("recipes", "benchmarks", "tests", "scripts"):
        (folder / name).mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "recipes")
    return folder


def in_checkout(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MODEL")}
    command = [str(folder / "recipes" / "gpu_day.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=known | environment)


def test_everything_that_is_missing_is_one_message(tmp_path: Path) -> None:
    """An interpreter without any package, and no model: both are named before a step, and nothing is written."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    folder = checkout(tmp_path / "here")
    said = in_checkout(folder, "tests", "quickstart", PYTHON=str(python))
    assert said.returncode == 1 and "Traceback" not in said.stderr
    assert f"PYTHON={python}" in said.stderr and '-e ".[vllm,quickstart,lightning,test]"' in said.stderr
    packages = said.stderr.split("packages ")[1].split(":")[0].split(", ")
    assert {"torch", "vllm", "trl", "lightning", "pytest", "xdist", "pytest_timeout", "reasoning_gym"} <= set(packages)
    assert "there is no .cache/SmolLM2-135M-Instruct: `make model`" in said.stderr
    assert not (folder / "runs").exists()
    only = in_checkout(folder, "nccl", PYTHON=str(python)).stderr
    assert only.splitlines()[1].startswith("packages torch, trl:") and "MODEL," not in only


def test_the_interpreter_with_the_gpus_torch_comes_first(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "here")
    for name in (".venv", ".venv-gpu"):
        python = folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
    assert "PYTHON=.venv-gpu/bin/python:" in in_checkout(folder, "nccl").stderr
    assert "PYTHON=.venv/bin/python:" in in_checkout(folder, "--rehearse", "nccl").stderr
    assert "PYTHON=mine:" in in_checkout(folder, "nccl", PYTHON="mine").stderr


def test_outside_a_checkout_it_says_what_is_absent(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "here")
    (folder / "benchmarks").rmdir()
    said = in_checkout(folder, "--rehearse", "nccl")
    assert said.returncode == 2 and said.stderr.count("\n") == 1
    assert "needs a checkout (git clone trl-offpolicy), but there is no folder benchmarks" in said.stderr


def test_every_run_of_a_step_keeps_its_end(tmp_path: Path) -> None:
    """The second run alone has more lines than a page keeps."""
    first, second = ([f"{name} {line}" for line in range(count)] for name, count in (("a", 3), ("b", LINES + 5)))
    lines = ["before", "== corrected", *first, "===== a frame of pytest =====", "== measure", *second]
    (tmp_path / "quickstart.log").write_text("\n".join(lines))
    kept = page(tmp_path).split("```text\n")[1].split("\n```")[0].split("\n")
    assert kept == [*lines[:7], "(5 lines left out)", *second[5:]]


def test_what_a_person_wrote_above_the_mark_stays(tmp_path: Path) -> None:
    target = tmp_path / "page.md"
    target.write_text(written(tmp_path, target))
    assert target.read_text().startswith("# Results on a GPU\n")
    above, below = target.read_text().split(MARK)
    target.write_text(f"{above}Read this first.\n{MARK}\n\nof yesterday")
    again = written(tmp_path, target)
    assert again == f"{above}Read this first.\n{MARK}{below}"


def test_a_second_day_adds_to_the_first_and_each_step_keeps_its_commit(tmp_path: Path) -> None:
    """On another machine, whose folder has no log of the first day."""
    target = tmp_path / "page.md"
    for day, step in (("1", "nccl"), ("2", "routing")):
        folder = tmp_path / day
        folder.mkdir()
        (folder / f"{step}.log").write_text(f"printed on day {day}\n### not a title\n")
        (folder / f"{step}.made").write_text(f"2026-01-0{day}, commit c{day}, a GPU, torch 9\n")
        (folder / f"{step}.ok").write_text("7\n")
        target.write_text(written(folder, target))
    text = target.read_text()
    assert "one process | ok | 7 | 2026-01-01, commit c1 |" in text and "| ok | 7 | 2026-01-02, commit c2 |" in text
    assert text.index("printed on day 2") < text.index("printed on day 1")  # in the order of the steps
    assert text.count("### not a title") == 2 and "2026-01-01, commit c1, a GPU, torch 9" in text
    assert written(folder, target) == text


def test_the_page_tells_what_passed_what_failed_and_what_was_not_run(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text("gloo 1 1048576.0\n")
    (tmp_path / "nccl.ok").write_text("7\n")
    (tmp_path / "cost.log").write_text(f"100%|##| 3/3 [00:01, 2.0it/s]\n\n{ROOT}/benchmarks/x.py\nRuntimeError: no\n")
    text = page(tmp_path)
    assert "| nccl | The collective of the weight sync, one process | ok | 7 | not known, not known |" in text
    assert "| cost | Correction and diagnostics, time and memory | **failed** | | not known, not known |" in text
    assert "| gsm8k | The shape of grpo_tis_gsm8k | not run | | |" in text
    assert "```text\nbenchmarks/x.py\nRuntimeError: no\n```" in text and "## The shape" not in text


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_the_rehearsal_runs_every_step(tmp_path: Path) -> None:
    """Real model, real vLLM, sizes cut; a second start repeats nothing."""
    said = start("--rehearse", "--out", tmp_path, seconds=3500)
    assert said.returncode == 0, said.stdout
    assert {path.stem for path in tmp_path.glob("*.ok")} == set(STEPS)
    assert "failed" not in (tmp_path / "results.md").read_text()
    again = start("--rehearse", "--out", tmp_path)
    assert again.stdout.count("done before") == len(STEPS)
