"""The results file: one JSON line a run, which pandas reads with ``read_json(path, lines=True)``."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.corrections.experiment import Job, Settings
from benchmarks.lab.jobs import write_atomically

Result = Mapping[str, Any]
KEY = ("task", "mismatch", "row", "seed", "settings")
_MEANS = (
    "mismatch_k3", "ess_token", "ess_sequence", "truncated", "dropped_sequences", "dropped_tokens", "clip_fraction"
)  # fmt: skip


def digest(settings: Settings) -> str:
    """Tells results of other settings apart."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:8]


def line_of(outcome: Mapping[str, Any], made: Mapping[str, str]) -> dict[str, Any]:
    """The line of a run; what the windows of its curve measured as means over them."""
    curve = outcome["curve"]
    line = {key: outcome[key] for key in ("task", "mismatch", "row", "seed")}
    line |= {"settings": digest(Settings(**outcome["settings"]))}
    line |= {"start_accuracy": outcome["start"]["accuracy"]}
    line |= {key: outcome["end"][key] for key in ("accuracy", "greedy_accuracy", "reward", "entropy")}
    line |= {"sampler_reward": curve[-1]["sampler_reward"], "learner_rewards": [w["learner_reward"] for w in curve]}
    line |= {key: statistics.mean(window[key] for window in curve) for key in _MEANS if key in curve[-1]}
    line |= {"band_low": outcome["band"][0], "band_high": outcome["band"][1], "flipped": outcome["flipped"]}
    chosen = [window["choice"] for window in curve if window["choice"]]
    numbers = {key: _short(value) for key, value in line.items()}
    return numbers | {"choices": chosen, "cpu_seconds": round(outcome["cpu_seconds"], 1), **made}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing(jobs: Sequence[Job], found: Iterable[Result], settings: Settings) -> list[Job]:
    """The jobs that the results do not hold."""
    known = {tuple(line[key] for key in KEY) for line in found}
    return [job for job in jobs if (job.task, job.mismatch, job.row, job.seed, digest(settings)) not in known]


def collect(path: Path, runs: Path) -> list[dict[str, Any]]:
    """Add the finished runs of a folder to the results file, sorted; runs that it holds already stay as they are."""
    lines = {tuple(line[key] for key in KEY): line for line in read(path)}
    for file in sorted(runs.glob("*.json")):
        outcome = json.loads(file.read_text())
        line = line_of(outcome, outcome.get("made", {}))
        lines.setdefault(tuple(line[key] for key in KEY), line)
    ordered = [lines[key] for key in sorted(lines)]
    if ordered:
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in ordered).encode())
    return ordered
