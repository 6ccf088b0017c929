"""From the pieces to the results file: a JSON line for each format, part and length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab.intervals import interval

Line = dict[str, Any]
METRICS = (
    "kl_k3",
    "chi2_token",
    "chi2_sequence",
    "ess_token",
    "ess_sequence",
    "flips",
    "logp_diff_mean",
    "logp_diff_max",
)


def lines(outcomes: Sequence[Mapping[str, Any]], model: str) -> list[Line]:
    """Means over seeds with half their 95 % t interval (``_half``; None with one seed), and the KL of each seed."""
    found: dict[tuple[str, str, int], list[Mapping[str, float]]] = {}
    for outcome in outcomes:
        for row in outcome["rows"]:
            found.setdefault((outcome["form"], outcome["where"], row["length"]), []).append(row)
    result = []
    for (form, where, length), rows in found.items():
        line: Line = {"line": "mismatch", "model": model, "format": form, "where": where, "length": length}
        for key in METRICS:
            mean, half = interval([row[key] for row in rows])
            line |= {key: mean, f"{key}_half": half if len(rows) > 1 else None}
        result.append({**line, "kl_by_seed": [row["kl_k3"] for row in rows]})
    return result


def ratios(rows: Sequence[Line]) -> list[Line]:
    """KL under bfloat16 over that under float16, by model, part and length: the mean over seeds of the ratio."""
    kl = {(r["model"], r["where"], r["length"], r["format"]): r["kl_by_seed"] for r in rows}
    result = []
    for (model, where, length, form), rough in kl.items():
        fine = kl.get((model, where, length, "fp16"))
        if form != "bf16" or fine is None:
            continue
        mean, half = interval([one / other for one, other in zip(rough, fine, strict=True)])
        place = {"line": "bf16 over fp16", "model": model, "where": where, "length": length}
        result.append({**place, "kl_ratio": mean, "kl_ratio_half": half if len(rough) > 1 else None})
    return result


def write(path: Path, first: Line, rest: Sequence[Line]) -> None:
    """One JSON object a line, which pandas reads with ``read_json(path, lines=True)``; five significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{key: _short(value) for key, value in line.items()} for line in (first, *rest)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def read(path: Path) -> list[Line]:
    """The lines of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
