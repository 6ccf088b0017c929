"""Reads ``rollouts.parquet`` into flat arrays over tokens. List columns are flattened, not looped over."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_offpolicy.run_folder.layout import (
    COMPLETION_MASK,
    KEEP_MASK,
    OLD_LOGPS,
    ROLLOUTS_FILE,
    SAMPLING_LOGPS,
    STEP,
    WEIGHTS,
)

_REQUIRED = (STEP, COMPLETION_MASK, SAMPLING_LOGPS, OLD_LOGPS)
_FLATTENED = (COMPLETION_MASK, SAMPLING_LOGPS, OLD_LOGPS, WEIGHTS, KEEP_MASK)

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Array = NDArray[Any]


class Chunk(NamedTuple):
    """The origin of some rows: row group ``group`` of ``path`` holds ``rows`` rows from ``first_row`` on."""

    path: Path
    group: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class RecordedRollouts:
    """The completions of a run, N in all, and their M observed tokens.

    A token is observed if it is trainable and both log-probs are finite. Other tokens are only counted.

    Args:
        steps: (N,) optimizer steps before the completion was used.
        trainable: (N,) number of trainable tokens, the length of the response.
        kept: (N,) number of trainable tokens that the correction kept.
        row: (M,) completion of each observed token, ascending.
        position: (M,) index of the token within its completion.
        sampling_logp: (M,) log-prob under the sampler, nats.
        log_ratio: (M,) old - sampling, nats.
        weight: (M,) weight as applied; NaN = none was recorded.
        keep: (M,) True = the correction kept the token.
        chunks: the origin of the rows.
        skipped_files: parts that could not be read.
        turn: (M,) turn of each observed token, from 0; None = not known.
    """

    steps: Integers
    trainable: Integers
    kept: Integers
    row: NDArray[np.int32]
    position: NDArray[np.int32]
    sampling_logp: Floats
    log_ratio: Floats
    weight: Floats
    keep: Bools
    chunks: tuple[Chunk, ...]
    skipped_files: tuple[Path, ...] = ()
    turn: NDArray[np.int32] | None = None

    @property
    def used_in(self) -> Integers:
        """(N,) the optimizer step that used the completion first, counted from 1 as the metrics count."""
        return self.steps + 1

    @property
    def nonfinite(self) -> int:
        """Number of trainable tokens without finite log-probs on both sides. Every figure leaves them out."""
        return int(self.trainable.sum()) - len(self.row)


def read_rollouts(run_dir: str | Path) -> RecordedRollouts | None:
    """Read ``run_dir/rollouts.parquet``, a file or a folder of parts; None if it is missing or empty.

    A part that is not a parquet file (because the run was killed while writing) is skipped with a warning.

    Raises:
        ValueError: a part lacks a column, or a row's lists differ in length.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts: list[dict[str, Array]] = []
    chunks: list[Chunk] = []
    skipped: list[Path] = []
    rows = 0
    for path in _part_files(Path(run_dir) / ROLLOUTS_FILE):
        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            warnings.warn(f"{path} is left out: {str(error).splitlines()[0]}", stacklevel=2)
            skipped.append(path)
            continue
        with file:
            for group, table in _tables(file, path):
                parts.append(_flatten(table, rows, path))
                chunks.append(Chunk(path, group, rows, table.num_rows))
                rows += table.num_rows
    if not rows:
        return None
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return RecordedRollouts(**columns, chunks=tuple(chunks), skipped_files=tuple(skipped))


def fetch_rows(rollouts: RecordedRollouts, rows: Iterable[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Read ``columns`` of some completions; absent columns are None. Only their row groups are opened."""
    import pyarrow.parquet as pq

    found: dict[int, dict[str, Any]] = {}
    wanted = np.unique(np.fromiter(rows, dtype=np.int64))
    for chunk in rollouts.chunks:
        inside = wanted[(wanted >= chunk.first_row) & (wanted < chunk.first_row + chunk.rows)]
        if not inside.size:
            continue
        with pq.ParquetFile(chunk.path) as file:
            present = [name for name in columns if name in file.schema_arrow.names]
            table = file.read_row_group(chunk.group, columns=present).take(inside - chunk.first_row)
        records = table.to_pylist() if present else [{} for _ in inside]  # a table without columns has no rows
        for row, record in zip(inside.tolist(), records, strict=True):
            found[row] = {name: record.get(name) for name in columns}
    return found


def _part_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    return [path] if path.is_file() else []


def _tables(file: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """The row groups of one part, with the columns that :func:`_flatten` needs."""
    names = file.schema_arrow.names
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise ValueError(f"{path} must have the columns {', '.join(_REQUIRED)}, but got no {', '.join(missing)}.")
    needed = [name for name in (STEP, *_FLATTENED) if name in names]
    for group in range(file.num_row_groups):
        yield group, file.read_row_group(group, columns=needed)


def _flatten(table: Any, first_row: int, path: Path) -> dict[str, Array]:
    """The array fields of :class:`RecordedRollouts` for one table."""
    own_lengths = {name: _lengths(table, name) for name in _FLATTENED if name in table.column_names}
    lengths = np.max(list(own_lengths.values()), axis=0)
    for name, own in own_lengths.items():
        wrong = np.flatnonzero((own != 0) & (own != lengths))
        if wrong.size:
            at = wrong[0]
            raise ValueError(f"{path}: {name} of row {at} must have {lengths[at]} entries, but got {own[at]}.")

    def flat(name: str, fill: Any) -> Array:
        return _values(table, name, lengths, own_lengths.get(name), fill)

    mask, keep = flat(COMPLETION_MASK, True), flat(KEEP_MASK, True)
    sampling = flat(SAMPLING_LOGPS, np.nan)
    with np.errstate(invalid="ignore"):  # -inf on both sides gives NaN, which is not observed
        log_ratio = flat(OLD_LOGPS, np.nan) - sampling
    observed = mask & np.isfinite(log_ratio)
    row = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return {
        "steps": table.column(STEP).to_numpy().astype(np.int64),
        "trainable": np.bincount(row[mask], minlength=len(lengths)),
        "kept": np.bincount(row[mask & keep], minlength=len(lengths)),
        "row": (row[observed] + first_row).astype(np.int32),
        "position": position[observed].astype(np.int32),
        "sampling_logp": sampling[observed].astype(np.float32),
        "log_ratio": log_ratio[observed].astype(np.float32),
        "weight": flat(WEIGHTS, np.nan)[observed].astype(np.float32),
        "keep": keep[observed],
        "turn": _turns(mask, row, position)[observed],
    }


def _turns(mask: Bools, row: Integers, position: Integers) -> NDArray[np.int32]:
    """(M,) turn of each token, from 0: it rises where trainable tokens begin again after others."""
    begins = mask & ((position == 0) | ~np.roll(mask, 1))
    count = np.cumsum(begins)
    first = np.flatnonzero(position == 0)  # one for each row that has tokens, in order
    before = (count - begins)[first]
    turns: NDArray[np.int32] = (count - np.repeat(before, np.bincount(row)[row[first]]) - 1).astype(np.int32)
    return turns


def _lengths(table: Any, name: str) -> Integers:
    """Number of entries in each row's list; 0 if the list is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name)
    if pa.types.is_null(column.type):
        return np.zeros(table.num_rows, np.int64)
    lengths: Array = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    return lengths.astype(np.int64)


def _values(table: Any, name: str, lengths: Integers, own_lengths: Integers | None, fill: Any) -> Array:
    """All rows' lists end to end, as bool or float64 like ``fill``. Nulls, also whole rows, become ``fill``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    dtype, arrow_type = (np.bool_, pa.bool_()) if isinstance(fill, bool) else (np.float64, pa.float64())
    out: Array = np.full(int(lengths.sum()), fill, dtype)
    if own_lengths is None or not own_lengths.any():
        return out
    values = pc.fill_null(pc.list_flatten(table.column(name)).cast(arrow_type), fill).to_numpy()
    out[np.repeat(own_lengths == lengths, lengths)] = values
    return out
