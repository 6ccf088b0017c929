"""Where a number comes from: commit, day, torch and processor."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path

import torch


def made_here() -> dict[str, str]:
    """Commit, day, torch and processor of a run."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": commit, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cpu": _processor()}


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    names = [line for line in cpus.read_text().splitlines() if "model name" in line] if cpus.exists() else []
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
