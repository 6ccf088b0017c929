"""Second opinions of packages that judge what this kit does not (reward hacking, dead groups, throughput).

``rldoctor`` reads ``metrics.jsonl`` as it is. ``rlprobe`` reads only its own run folders (``manifest.json`` and
``steps.parquet``), so its detectors get the same rows in memory, and :func:`export_rlprobe` writes such a folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trl_offpolicy.run_folder.run_data import MetricsLog, metrics_file, read_metrics, read_run_info

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


_RLPROBE_SCHEMA = 1
"""Version of rlprobe's file format (0.1.0)."""


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


def export_rlprobe(run_dir: str | Path, folder: str | Path) -> Path:
    """Write the run's metrics as a folder that ``rlprobe doctor``, ``report`` and ``diff`` read. rlprobe is not needed.

    Args:
        run_dir: a run folder or a metrics file.
        folder: where to write ``manifest.json`` and ``steps.parquet``; files of these names are replaced.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: there are no metrics.
        ValueError: there is no training row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = metrics_file(run_dir)
    rows, info = _rlprobe_rows(read_metrics(path)), read_run_info(path.parent)
    manifest = {
        "schema_version": _RLPROBE_SCHEMA,
        "run_id": path.parent.resolve().name,
        "created_at": datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).isoformat(),
        "algorithm": "grpo",
        "model_name": info.get("model"),
        "environment": dict(info.get("versions") or {}),
        "notes": "exported by trl-offpolicy",
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / "manifest.json").write_text(json.dumps(manifest, indent=2, default=str) + "\n")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.Table.from_pydict({name: [row.get(name) for row in rows] for name in columns})
    pq.write_table(table, target / "steps.parquet")
    return target


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
