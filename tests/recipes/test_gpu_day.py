"""The script for a day with a GPU: its options, its page, and its rehearsal on a CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from scripts.gpu_results import STEPS, page

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "gpu_day.sh"


def start(*words: str | Path, seconds: int = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in (SCRIPT, *words)], capture_output=True, text=True, timeout=seconds)


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
    said = start("--out", tmp_path, "nccl")
    assert said.returncode == 1 and "torch sees no GPU; --rehearse" in said.stderr


def test_the_page_tells_what_passed_what_failed_and_what_was_not_run(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text("gloo 1 1048576.0\n")
    (tmp_path / "nccl.ok").write_text("7\n")
    (tmp_path / "cost.log").write_text(f"100%|##| 3/3 [00:01, 2.0it/s]\n\n{ROOT}/benchmarks/x.py\nRuntimeError: no\n")
    text = page(tmp_path)
    assert "| nccl | The collective of the weight sync, one process | ok | 7 |" in text
    assert "| cost | Correction and diagnostics, time and memory | **failed** | |" in text
    assert "| gsm8k | The shape of grpo_tis_gsm8k | not run | |" in text
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
