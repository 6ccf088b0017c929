"""Second opinions of packages that judge what this kit does not (entropy, reward hacking, dead groups, length).

``rldoctor`` reads ``metrics.jsonl`` as it is. ``rlprobe`` has another file format, so its detectors get the same rows
in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_offpolicy.run_folder.run_data import MetricsLog, metrics_file, read_metrics

_RLPROBE_FIELDS = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_variance_group_frac",
    "kl": "kl_mean",
    "entropy": "entropy_mean",
    "offpolicy/loss/entropy": "entropy_mean",
    "clip_ratio/region_mean": "clip_fraction",
    "offpolicy/loss/clip_region_fraction": "clip_fraction",
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "completions/mean_length": "completion_len_mean",
    "completions/max_length": "completion_len_max",
    "completions/clipped_ratio": "truncation_rate",
    "step_time": "step_time_s",
}


@dataclass(frozen=True)
class Opinion:
    """The opinion of another package: a headline, and its findings as (severity, title, what to do)."""

    package: str
    headline: str
    findings: tuple[tuple[str, str, str], ...]


def rldoctor(run_dir: str | Path) -> Opinion:
    """The verdict of ``rldoctor`` on the run's metrics.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    from rl_doctor import diagnose, load_run

    found = diagnose(load_run(str(metrics_file(run_dir))))
    findings = [
        (one.severity.name.lower(), f"{one.title}: {one.summary}", "; ".join(one.prescription[:1]))
        for one in found.problems
    ]
    return Opinion("rldoctor", found.headline, tuple(findings))


def rlprobe(run_dir: str | Path) -> Opinion:
    """The verdict of ``rlprobe`` on the run's metrics.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    from rlprobe.doctor.engine import diagnose_view
    from rlprobe.doctor.runview import RunView
    from rlprobe.schemas import RunManifest, StepRecord

    manifest = RunManifest(run_id=Path(run_dir).name, created_at="", algorithm="grpo")
    records = [StepRecord(**fields) for fields in _rlprobe_rows(read_metrics(run_dir))]
    found = diagnose_view(RunView(manifest, records))
    findings = [
        (one.severity, f"{one.signature_id}: {one.explanation}", "; ".join(one.suggested_actions[:1])) for one in found
    ]
    headline = f"{len(findings)} finding(s)" if findings else "No findings."
    return Opinion("rlprobe", headline, tuple(findings))


OTHER_DOCTORS: Mapping[str, Callable[[str | Path], Opinion]] = {"rldoctor": rldoctor, "rlprobe": rlprobe}


def _rlprobe_rows(log: MetricsLog) -> list[dict[str, Any]]:
    rows = []
    for row in log.rows:
        fields: dict[str, Any] = {"step": int(row["step"])}
        for key, name in _RLPROBE_FIELDS.items():
            if math.isfinite(row.get(key, math.nan)):
                fields.setdefault(name, row[key])
        rows.append(fields)
    return rows
