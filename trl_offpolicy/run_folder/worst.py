"""Keeps the responses on which engine and trainer disagree most, with the text of each token, while a run trains.

``rollouts.parquet`` holds token ids; who reads a run elsewhere may have no tokenizer. The file of a rank holds at most
:data:`MOST_RESPONSES` responses of at most :data:`MOST_TOKENS` tokens, whatever the length of the run.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_offpolicy.run_folder import layout
from trl_offpolicy.run_folder.strict import write_whole

Decode = Callable[[list[int]], str]

MOST_RESPONSES = 8
MOST_TOKENS = 512
"""Of a longer response the tokens around the one with the largest difference are kept."""
_BEFORE = 4
"""Tokens before one that are decoded with it: a tokenizer may write a space or a character over several tokens."""

DISAGREEMENT = "mean_abs_log_ratio"
PER_TOKEN = (layout.COMPLETION_MASK, layout.SAMPLING_LOGPS, layout.OLD_LOGPS, layout.WEIGHTS, layout.KEEP_MASK)
"""Columns of the rollouts that are kept for each token, besides its text."""


class WorstResponses:
    """The worst responses that one rank has recorded. It reads what is on the host already.

    Args:
        folder: folder of the run.
        decode: turns token ids into text.
        rank: process index, part of the file name.
    """

    def __init__(self, folder: str | Path, decode: Decode, rank: int) -> None:
        self._path, self._decode = Path(folder) / layout.WORST_FOLDER / layout.worst_file(rank), decode
        self._kept: list[dict[str, Any]] | None = None

    def among(self, sizes: Sequence[float]) -> list[int]:
        """The places of those that are worse than the kept ones, worst first, :data:`MOST_RESPONSES` at most.

        Args:
            sizes: the :func:`disagreement` of each response.
        """
        if self._kept is None:  # what the run had before it was resumed
            self._kept = read_worst(self._path)
        least = self._kept[-1][DISAGREEMENT] if len(self._kept) == MOST_RESPONSES else 0.0
        worse = [at for at, size in enumerate(sizes) if size > least]
        return sorted(worse, key=lambda at: -sizes[at])[:MOST_RESPONSES]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take those rows of ``rollouts.parquet`` that are worse than the kept ones, and write the file anew."""
        worse = self.among([disagreement(row) for row in rows])
        if not worse:
            return
        new = [worst_response(rows[at], self._decode) for at in worse]
        self._kept = sorted([*(self._kept or []), *new], key=lambda one: -one[DISAGREEMENT])[:MOST_RESPONSES]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_worst(self._path, self._kept)


def disagreement(row: Mapping[str, Any]) -> float:
    """Mean |old - sampling| in nats over the trainable tokens of a row that have both; 0 if none has."""
    found = [abs(gap) for gap in _gaps(row) if math.isfinite(gap)]
    return math.fsum(found) / len(found) if found else 0.0


def _gaps(row: Mapping[str, Any]) -> list[float]:
    """Old - sampling of each token, NaN where it is not trainable or one of the two is missing."""
    mask = row[layout.COMPLETION_MASK] or []
    pairs = [row[name] or [math.nan] * len(mask) for name in (layout.SAMPLING_LOGPS, layout.OLD_LOGPS)]
    return [
        old - sampling if inside and None not in (old, sampling) else math.nan
        for inside, sampling, old in zip(mask, *pairs, strict=True)
    ]


def worst_response(row: Mapping[str, Any], decode: Decode | None) -> dict[str, Any]:
    """A row of ``rollouts.parquet`` with the text of its tokens (their ids without ``decode``), as plain values.

    ``start`` is the index of the first token in ``text``; ``tokens`` is the length of the whole response.
    """
    ids, gaps = list(row.get(layout.COMPLETION_IDS) or []), _gaps(row)
    sizes = [abs(gap) if math.isfinite(gap) else 0.0 for gap in gaps]
    worst = sizes.index(max(sizes)) if sizes else 0
    start = max(0, min(worst - MOST_TOKENS // 2, len(gaps) - MOST_TOKENS))
    part = slice(start, start + MOST_TOKENS)
    per_token = {name: _clean(row[name][part]) if row.get(name) else None for name in PER_TOKEN}
    return {
        layout.STEP: row[layout.STEP],
        DISAGREEMENT: disagreement(row),
        **{name: _finite(row.get(name)) for name in (layout.REWARD, layout.ADVANTAGE)},
        layout.PROMPT: row.get(layout.PROMPT) or "",
        "tokens": len(gaps),
        "start": start,
        "text": _texts(ids, part, decode),
        **per_token,
    }


def _texts(ids: Sequence[int], part: slice, decode: Decode | None) -> list[str]:
    """What each token adds to the text; its id without ``decode``."""
    found = []
    for at in range(*part.indices(len(ids))):
        before = list(ids[max(0, at - _BEFORE) : at])
        if decode is None:
            found.append(f"{ids[at]} ")
            continue
        shorter, longer = decode(before), decode([*before, ids[at]])
        found.append(longer[len(shorter) :] if longer.startswith(shorter) else decode([ids[at]]))
    return found


def _clean(values: Iterable[Any]) -> list[Any]:
    return [value if isinstance(value, bool) else _finite(value) for value in values]


def _finite(value: Any) -> Any:
    """Strict JSON has no NaN; six digits are enough for people."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def write_worst(path: Path, responses: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file in one move, so a reader finds the old or the new one."""
    write_whole(path, json.dumps(list(responses), ensure_ascii=False, allow_nan=False))


def read_worst(path: Path) -> list[dict[str, Any]]:
    """The kept responses of one file, or of all files of a folder, worst first; empty if there are none.

    A file that cannot be read is left out, with a warning.
    """
    files = sorted(path.glob(layout.WORST_FILES)) if path.is_dir() else [path] if path.is_file() else []
    found = [one for file in files for one in _responses(file)]
    return sorted(found, key=lambda one: -float(one[DISAGREEMENT]))[:MOST_RESPONSES]


def _responses(file: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(isinstance(one, dict) and DISAGREEMENT in one for one in rows):
            raise ValueError("it holds no list of responses")
    except ValueError as error:
        warnings.warn(f"{file} cannot be read and is left out: {error}.", stacklevel=3)
        return []
    return rows


def cut_worst(folder: Path, step: int) -> None:
    """Delete the responses that were sampled after ``step`` optimizer steps or later."""
    for path in folder.glob(layout.WORST_FILES):
        write_worst(path, [one for one in read_worst(path) if one[layout.STEP] < step])
