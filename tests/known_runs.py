"""Run folders with known numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Write a run folder: metric rows, parts of rollout rows (one file each), run.json."""

    def write(
        metrics: Sequence[dict[str, Any] | str],
        parts: Sequence[Sequence[dict[str, Any]]] = (),
        info: dict[str, Any] | None = None,
    ) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        lines = [row if isinstance(row, str) else json.dumps(row) for row in metrics]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        for number, rows in enumerate(parts):
            folder = tmp_path / "rollouts.parquet"
            folder.mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(list(rows)), folder / f"part-{number:03d}.parquet")
        if info is not None:
            (tmp_path / "run.json").write_text(json.dumps(info))
        return tmp_path

    return write


@pytest.fixture
def rollout_parts() -> list[list[dict[str, Any]]]:
    """Three completions in two parts: 3 observed tokens of log-ratio -ln 2, 0 and ln 1.5, and 2 unobserved.

    The second one has no sampler log-probs at all, the third one is dropped and its second token has none.
    """
    half, quarter = math.log(0.5), math.log(0.25)
    first = {
        "step": 0,
        "prompt": "1 + 1 = <",
        "completion": "five & six",
        "reward": 0.5,
        "advantage": 1.0,
        "completion_ids": [5, 6, 7],
        "completion_mask": [True, True, False],
        "sampling_per_token_logps": [half, quarter, half],
        "old_per_token_logps": [quarter, quarter, quarter],
        "weights": [0.5, 1.0, 1.0],
        "keep_mask": [True, True, True],
    }
    second = {
        **first,
        "completion_ids": [4],
        "completion_mask": [True],
        "sampling_per_token_logps": None,
        "old_per_token_logps": [half],
        "weights": [1.0],
        "keep_mask": [True],
    }
    third = {
        **first,
        "step": 1,
        "completion": "eight nine",
        "reward": None,
        "completion_ids": [8, 9],
        "completion_mask": [True, True],
        "sampling_per_token_logps": [half, math.nan],
        "old_per_token_logps": [math.log(0.75), half],
        "weights": [1.25, 0.0],
        "keep_mask": [False, False],
    }
    return [[first, second], [third]]
