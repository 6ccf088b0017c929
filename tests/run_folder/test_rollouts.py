from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows, read_rollouts


def _read(run: Path) -> RecordedRollouts:
    rollouts = read_rollouts(run)
    assert rollouts is not None
    return rollouts


def test_flat_arrays_hold_observed_tokens_and_count_the_others(write_run: Any, rollout_parts: Any) -> None:
    rollouts = _read(write_run([], rollout_parts))
    assert rollouts.steps.tolist() == [0, 0, 1]
    assert rollouts.trainable.tolist() == [2, 1, 2]
    assert rollouts.kept.tolist() == [2, 1, 0]
    assert rollouts.row.tolist() == [0, 0, 2]
    assert rollouts.position.tolist() == [0, 1, 0]
    np.testing.assert_allclose(rollouts.log_ratio, [-math.log(2), 0.0, math.log(1.5)], atol=1e-7)
    np.testing.assert_allclose(rollouts.sampling_logp, np.log([0.5, 0.25, 0.5]), atol=1e-7)
    assert rollouts.weight.tolist() == [0.5, 1.0, 1.25]
    assert rollouts.keep.tolist() == [True, True, False]
    assert rollouts.nonfinite == 2


def test_small_log_ratios_survive_float32(write_run: Any, rollout_parts: Any) -> None:
    row = {**rollout_parts[0][1], "sampling_per_token_logps": [-30.0], "old_per_token_logps": [-30.0 + 1e-7]}
    assert _read(write_run([], [[row]])).log_ratio[0] == pytest.approx(1e-7, rel=1e-3)


def test_one_file_reads_like_a_folder(tmp_path: Path, rollout_parts: Any) -> None:
    rows = [row for part in rollout_parts for row in part]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts.parquet", row_group_size=1)
    rollouts = _read(tmp_path)
    assert rollouts.row.tolist() == [0, 0, 2]
    assert len(rollouts.chunks) == 3
    assert fetch_rows(rollouts, [2], ["completion"]) == {2: {"completion": "eight nine"}}


@pytest.mark.parametrize("logps", [None, []])
def test_part_without_any_sampler_logps_has_no_observed_token(write_run: Any, rollout_parts: Any, logps: Any) -> None:
    row = {**rollout_parts[0][0], "sampling_per_token_logps": logps}
    rollouts = _read(write_run([], [[row, row]]))
    assert (len(rollouts.row), rollouts.nonfinite, rollouts.trainable.tolist()) == (0, 4, [2, 2])


def test_absent_weights_and_keep_mask_mean_nan_and_kept(write_run: Any, rollout_parts: Any) -> None:
    row = {key: value for key, value in rollout_parts[1][0].items() if key not in ("weights", "keep_mask")}
    rollouts = _read(write_run([], [[row]]))
    assert rollouts.keep.tolist() == [True] and np.isnan(rollouts.weight).all()
    assert rollouts.kept.tolist() == rollouts.trainable.tolist() == [2]


def test_infinite_logps_are_not_observed(write_run: Any, rollout_parts: Any) -> None:
    row = {**rollout_parts[0][0], "sampling_per_token_logps": [-math.inf, -1.0, -1.0]}
    row["old_per_token_logps"] = [-math.inf, -1.0, -1.0]
    assert _read(write_run([], [[row]])).position.tolist() == [1]


def test_an_empty_completion_keeps_its_row(write_run: Any, rollout_parts: Any) -> None:
    lists = (
        "completion_ids",
        "completion_mask",
        "sampling_per_token_logps",
        "old_per_token_logps",
        "weights",
        "keep_mask",
    )
    empty = {**rollout_parts[0][0], **{name: [] for name in lists}}
    rollouts = _read(write_run([], [[empty, rollout_parts[0][0]]]))
    assert rollouts.row.tolist() == [1, 1] and rollouts.trainable.tolist() == [0, 2]


def test_fetch_rows_reads_several_parts_and_absent_columns(write_run: Any, rollout_parts: Any) -> None:
    rollouts = _read(write_run([], rollout_parts))
    found = fetch_rows(rollouts, [2, 0, 2], ["completion", "reward", "absent"])
    assert found == {
        0: {"completion": "five & six", "reward": 0.5, "absent": None},
        2: {"completion": "eight nine", "reward": None, "absent": None},
    }
    assert fetch_rows(rollouts, [0], ["absent"]) == {0: {"absent": None}}  # none of them is there


def test_missing_or_empty_rollouts_are_none(tmp_path: Path) -> None:
    assert read_rollouts(tmp_path) is None
    (tmp_path / "rollouts.parquet").mkdir()
    assert read_rollouts(tmp_path) is None


def test_a_part_cut_short_is_skipped_with_a_warning(write_run: Any, rollout_parts: Any) -> None:
    run = write_run([], rollout_parts)
    broken = run / "rollouts.parquet" / "part-001.parquet"
    broken.write_bytes(broken.read_bytes()[:50])
    with pytest.warns(UserWarning, match=r"part-001.parquet is left out"):
        rollouts = _read(run)
    assert rollouts.steps.tolist() == [0, 0] and rollouts.skipped_files == (broken,)


def test_wrong_layouts_are_errors(write_run: Any, rollout_parts: Any) -> None:
    row = {**rollout_parts[0][0], "weights": [1.0]}
    with pytest.raises(ValueError, match="weights of row 0 must have 3 entries, but got 1"):
        read_rollouts(write_run([], [[row]]))
    del row["old_per_token_logps"]
    with pytest.raises(ValueError, match=r"must have the columns .*, but got no old_per_token_logps"):
        read_rollouts(write_run([], [[row]]))
