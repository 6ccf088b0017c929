"""Reads the metrics and ``run.json`` of a run, also if the run crashed half-way or is of another framework."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from trl_offpolicy.run_folder.layout import EVAL_PREFIX, METRICS_FILE, RUN_FILE, STATE_FILE, STEP, TIME
from trl_offpolicy.run_folder.log_forms import FORMS, not_finite, records
from trl_offpolicy.run_folder.names import frameworks, remarks, translate

STEP_KEYS = (STEP, "global_step", "training/global_step", "trainer/global_step", "train/step", "_step")
_STEP_OF_ALL = "global_step/max_steps"
END_OF_RUN_PREFIX = "train_"
"""Prefix of the keys in TRL's last row (``train_runtime``, ``train_loss``, ...): one number for the whole run."""

_OWN = "offpolicy/"
_KEPT, _DROPPED = "offpolicy/kept/", "offpolicy/keep/dropped_token_fraction"
_BOOKKEEPING = frozenset(
    {*STEP_KEYS, TIME, "epoch", "num_tokens", "train/epoch", "_timestamp", "_runtime", "rollout/step"}
)
_EVALUATION = (EVAL_PREFIX, "eval/", "val/", "val-", "test/")


class Series(NamedTuple):
    """One metric over the run: its finite values in order of step, and how many were not finite."""

    steps: list[int]
    values: list[float]
    nonfinite: int


@dataclass(frozen=True)
class MetricsLog:
    """The training rows of ``metrics.jsonl``.

    Args:
        rows: one dict of numbers per training step, ascending in ``step``. NaN, infinity and null (which is
            how the recorder writes them) are kept here as non-finite numbers.
        skipped_lines: lines that held no JSON object with an integer ``step``.
        repeated_rows: rows whose step was logged again later (by a resumed run); the later row counts.
        frameworks: the frameworks whose metric names were logged.
        remarks: sentences on the rows, and on other frameworks' names that differ slightly from ours
            (:func:`~.names.remarks`).
        broken: the gradient norm or loss that is NaN or infinite up to the last row, and since which step; None =
            neither is.
    """

    rows: tuple[dict[str, float], ...]
    skipped_lines: int = 0
    repeated_rows: int = 0
    frameworks: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    broken: tuple[str, int] | None = None

    @property
    def steps(self) -> list[int]:
        """The logged training steps, ascending."""
        return [int(row[STEP]) for row in self.rows]

    def has(self, key: str) -> bool:
        """True if any step logged ``key``, finite or not."""
        return any(key in row for row in self.rows)

    def first_logged(self, keys: Iterable[str]) -> str | None:
        """The first of ``keys`` that the run logged, or None."""
        return next((key for key in keys if self.has(key)), None)

    def series(self, key: str) -> Series:
        """The finite values of ``key``. Steps that did not log it are left out."""
        logged = [(int(row[STEP]), row[key]) for row in self.rows if key in row]
        finite = [(step, value) for step, value in logged if math.isfinite(value)]
        return Series([s for s, _ in finite], [v for _, v in finite], len(logged) - len(finite))

    @property
    def ratio_group(self) -> str:
        """``mismatch`` (old/sampling), or ``total`` (current/sampling) if only that one was logged."""
        groups = {key.split("/")[1] for row in self.rows for key in row if key.startswith("offpolicy/")}
        return "total" if "total" in groups and "mismatch" not in groups else "mismatch"


def read_metrics(run_dir: str | Path, loss: str | None = None) -> MetricsLog:
    """Read the training rows of a run.

    Evaluation keys (``eval_*``) and the end-of-run keys (``train_*``) are left out. A line that is not a JSON object
    with an integer step, such as the last line of a crashed run, is skipped with a warning and counted. Our names are
    added to other frameworks' metric names (:func:`~.names.translate`).

    Args:
        run_dir: a folder with ``metrics.jsonl`` (else the newest ``trainer_state.json`` below it, else its only
            ``*.jsonl``), or such a file.
        loss: the policy loss of another framework's run, as that framework names it (:data:`~.names.LOSSES`). The
            meaning of some names depends on it. None = unknown.

    Raises:
        FileNotFoundError: the folder or its ``metrics.jsonl`` is missing.
        ValueError: the file holds no training row, or no framework has a loss of that name.
    """
    path = metrics_file(run_dir)
    rows: dict[int, dict[str, float]] = {}
    skipped: list[int] = []
    stepless: Mapping[str, Any] = {}
    repeated = dropped = read = 0
    for number, record in records(path):
        step = None if record is None else _step(record)
        if record is None or step is None:
            skipped.append(number)
            stepless = stepless or record or {}
            continue
        read += 1
        if row := _training_numbers(record):
            again = _add_row(rows, step, {**_without_empty(row), STEP: step})
            repeated += again
            dropped += _drop_later(rows, step) if again else 0
    if skipped:
        shown = ", ".join(map(str, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
        warnings.warn(
            f"{path}: skipped {len(skipped)} line(s) that are no JSON object with an integer step (line {shown}).",
            stacklevel=2,
        )
    if not rows:
        raise ValueError(f"{path} must hold at least one training row, but got 0. {_why_none(stepless, read)}")
    keys = {key for row in rows.values() for key in row}
    return MetricsLog(
        rows=tuple(translate(rows[step], loss) for step in sorted(rows)),
        skipped_lines=len(skipped),
        repeated_rows=repeated,
        frameworks=frameworks(keys),
        remarks=(*_of_earlier_run(dropped), *_left_out(rows), *remarks(keys, loss)),
        broken=_broken(rows),
    )


_NORMS = ("grad_norm", "actor/grad_norm", "policy/grad_norm", "train/grad_norm")
_MUST_BE_FINITE = (*_NORMS, "loss", "actor/pg_loss", "policy/final_loss", "train/loss")
_OF_WEIGHTS = ("entropy", "entropy_loss", "policy_entropy", "kl_k3", "k3_kl", "kl_k1", "ppo_kl")
"""Last parts of names of numbers that are NaN where the weights are. Not the loss: transformers logs 0 for NaN."""
_TOLD = ("kl_k3", "k3_kl", "/kl", "kl_k1", "logp_diff_mean", "logp_difference/mean", "reward", "score/mean")
"""Ends of names of numbers that are told to be no number in some steps."""
LASTING = 3
"""Steps for which one of these must stay NaN or infinite: mixed precision skips single steps by design."""


def _broken(rows: Mapping[int, dict[str, float]]) -> tuple[str, int] | None:
    """The gradient norm or loss that is NaN or infinite up to the last row, and since which step; None = neither."""
    ordered = [rows[step] for step in sorted(rows)]
    since = not_finite(ordered, _MUST_BE_FINITE)
    lasting = {name: step for name, step in since.items() if sum(row[STEP] >= step for row in ordered) >= LASTING}
    # Where only the gradient norm is no number, the updates are skipped, and what the other numbers say counts.
    lasting = {name: step for name, step in lasting.items() if name not in _NORMS or not _goes_on(ordered, step)}
    return min(lasting.items(), key=lambda one: one[1], default=None)


def _goes_on(ordered: Sequence[Mapping[str, float]], since: int) -> bool:
    """Whether the numbers that the weights would spoil are finite in some rows from that step on."""
    rows = [row for row in ordered if row[STEP] >= since]
    known = [[row[key] for key in row if key.rpartition("/")[2] in _OF_WEIGHTS] for row in rows]
    return sum(bool(values) and all(map(math.isfinite, values)) for values in known) >= LASTING


def _why_none(stepless: Mapping[str, Any], read: int) -> str:
    """What a log without any row lacks: rows of training, a step in its rows, or a form that is read."""
    if read:
        return f"Its {read} row(s) are all of evaluations, or without a number."
    if not stepless:
        return f"These forms are read: {FORMS}."
    keys = ", ".join(list(stepless)[:5]) + (", ..." if len(stepless) > 5 else "")
    return (
        f"A row needs a whole number under one of {', '.join(STEP_KEYS)}, and its rows have {keys}: rename the key "
        "that counts the steps."
    )


def _left_out(rows: Mapping[int, dict[str, float]]) -> tuple[str, ...]:
    """A sentence on distances and rewards that are no number in some steps."""
    counts = Counter(
        key for row in rows.values() for key, value in row.items() if key.endswith(_TOLD) and not math.isfinite(value)
    )
    found = ", ".join(f"{key} in {count}" for key, count in sorted(counts.items()))
    return (f"NaN, infinite or no number, and left out: {found} of {len(rows)} steps.",) if found else ()


def _of_earlier_run(dropped: int) -> tuple[str, ...]:
    if not dropped:
        return ()
    return (
        f"A step was logged again, after a resume or by another run in the same file: {dropped} rows of the earlier "
        "run, from that step on, are left out.",
    )


def metrics_file(run_dir: str | Path) -> Path:
    """The file that holds the metrics of a run; see :func:`read_metrics`.

    Raises:
        FileNotFoundError: there is no such file, or several files may be meant.
    """
    path = Path(run_dir)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"run_dir must be an existing folder or log file, but got {path}.")
    if (path / METRICS_FILE).is_file():
        return path / METRICS_FILE
    # A stock transformers run has its log only in the checkpoints. The last one holds all of it; times of files do not
    # tell which it is, since copies change them.
    if states := list(path.glob(f"**/{STATE_FILE}")):
        runs = sorted({str(_run_of(found)) for found in states})
        if len(runs) > 1:
            raise FileNotFoundError(f"run_dir must hold one run, but got checkpoints of several: {', '.join(runs)}.")
        return max(states, key=lambda found: (_steps_of(found), found.stat().st_mtime))
    others = sorted(path.glob("*.jsonl"))
    if len(others) == 1:
        return others[0]
    got = f"{path} with {', '.join(one.name for one in others)}" if others else str(path)
    raise FileNotFoundError(f"run_dir must contain {METRICS_FILE} or {STATE_FILE}, but got {got}.")


def _run_of(state: Path) -> Path:
    """The folder of the run whose trainer wrote a state, in a checkpoint or beside them."""
    return state.parent.parent if state.parent.name.startswith("checkpoint-") else state.parent


def _steps_of(state: Path) -> int:
    """``global_step`` of a trainer's state; -1 = it cannot be read."""
    try:
        step = json.loads(state.read_text(encoding="utf-8", errors="replace")).get("global_step")
    except (OSError, ValueError, AttributeError):
        return -1
    return step if isinstance(step, int) else -1


def read_run_info(run_dir: str | Path) -> dict[str, Any]:
    """Read ``run_dir/run.json``. Returns an empty dict if it is missing, and also warns if it is unreadable."""
    path = Path(run_dir) / RUN_FILE
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        warnings.warn(f"{path} is left out: {error}.", stacklevel=2)
        return {}
    if isinstance(info, dict):
        return info
    warnings.warn(f"{path} is left out: it must hold a JSON object, but got {type(info).__name__}.", stacklevel=2)
    return {}


def _step(record: Mapping[str, Any]) -> int | None:
    value = next((record[key] for key in STEP_KEYS if key in record), None)
    if value is None and isinstance(of_all := record.get(_STEP_OF_ALL), str):  # ms-swift: "3/547"
        value = float(first) if (first := of_all.partition("/")[0]).isdecimal() else None
    return int(value) if _is_number(value) and float(value).is_integer() else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _training_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The training entries of a row, with null as NaN; empty if it has none besides step, time and epoch."""
    skip = (*_EVALUATION, END_OF_RUN_PREFIX)
    training = {key: _number(value) for key, value in record.items() if not key.startswith(skip)}
    # our own names hold numbers: what is none must not be as if it were not there
    training = {key: math.nan if value is None and key.startswith(_OWN) else value for key, value in training.items()}
    row = {key: value for key, value in training.items() if value is not None}
    return row if row.keys() - _BOOKKEEPING else {}


def _number(value: object) -> float | None:
    """The number, also in quotes (W&B writes "NaN" and "Infinity" so); null is NaN; None = no number."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if _is_number(value) else None


def _without_empty(row: dict[str, float]) -> dict[str, float]:
    """A row without the numbers of the kept tokens where none was kept: they are sums of nothing, logged as 0."""
    if row.get(_DROPPED) != 1.0:
        return row
    return {key: value for key, value in row.items() if not key.startswith(_KEPT)}


def _drop_later(rows: dict[int, dict[str, float]], step: int) -> int:
    """Leave out the rows after a step that was run again; how many there were."""
    later = [other for other in rows if other > step]
    for other in later:
        del rows[other]
    return len(later)


def _add_row(rows: dict[int, dict[str, float]], step: int, row: dict[str, float]) -> bool:
    """Merge ``row`` into its step; True if it replaces values that were logged before."""
    # a step may have several rows with different keys; the same key again means that the step was run again
    earlier = rows.setdefault(step, {})
    replaces = bool((earlier.keys() & row.keys()) - _BOOKKEEPING)
    if replaces:
        earlier.clear()
    earlier.update(row)
    return replaces
