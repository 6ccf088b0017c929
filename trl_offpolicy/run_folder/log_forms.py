"""The forms in which frameworks leave their metrics, each as a sequence of rows.

JSON lines, ``trainer_state.json``, a JSON list of rows, a CSV table of W&B, and text from the console: verl's lines
``step:3 - actor/loss:0.1 - ...``, and dictionaries that TRL and slime print. Colours, Ray's prefixes and progress bars
between the lines are passed over.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FORMS = "JSON lines, trainer_state.json, a JSON list of rows, W&B's CSV, or the console's text of TRL, verl or slime"
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_VERL = re.compile(r"\bstep:(\d+) - (.*)")
_PAIR = re.compile(r"([^\s:]\S*?):(\S+)")
_PRINTED = re.compile(r"\{'[^{}]*\}")
_NUMPY = re.compile(r"\bnp\.\w+\(([^()]*)\)")
"""Numbers as numpy 2 prints them: ``np.float64(0.5)``."""
_BAR = re.compile(r"^\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[")
"""A progress bar without a title, as that of a training is; as are those of some data sets and evaluations."""
Bar = tuple[int, int]
"""Step and total."""
_NOT_FINITE = re.compile(r"(?<![\w'\"/])(nan|-?inf)(?![\w'\"/])")
_PANEL = re.compile(r".+ - (.+)")
_TRAIN_STEP, _ROLLOUT_STEP = "train/step", "rollout/step"
"""slime's counts of optimizer steps and of rollouts."""
_WHOLE_RUN = ("eval_", "train_")
"""Prefixes of printed dictionaries that are no training step."""
_OF_A_STEP = ("loss", "reward", "grad_norm", "rewards/", "train/", "rollout/", "policy/", "actor/")
"""What the names of a printed training step begin with, some of them at least."""
_OF_TRL = ("train/reward", "train/completions/mean_length", "train/frac_reward_zero_std", "train/num_tokens")
Record = tuple[int, dict[str, Any] | None]


def records(path: Path) -> Iterator[Record]:
    """(number of the line or entry, its row) of a log; None for a line that holds no row.

    Raises:
        ValueError: the file cannot be read in any of these forms.
    """
    if path.suffix == ".json":
        found: Iterable[Record] = enumerate(map(_flat, _entries(path)), 1)
    elif path.suffix == ".csv":
        found = enumerate(_table(path), 1)
    else:
        found = _lines(path)
    yield from _without_trainer_prefix(_rollouts_at_train_steps(list(found)))


def _flat(entry: Any) -> dict[str, Any] | None:
    """The entry as one flat object; verl nests the metrics under ``data``."""
    if not isinstance(entry, dict):
        return None
    nested = entry.get("data")
    return {**entry, **nested} if isinstance(nested, dict) else entry


def _entries(path: Path) -> list[Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, but cannot be read: {error}.") from None
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list):
        raise ValueError(f"{path} must hold a log_history or a list of rows, but got none.")
    return history


def _table(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a CSV: W&B's table, or a panel with columns ``run - metric``."""
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        if {"Wall time", "Value"} <= set(names):
            raise ValueError(f"{path} must name its metrics, but TensorBoard's CSV holds one without its name.")
        columns = [column for name in names if name and (column := _column(name)) not in ("", "step")]
        if twice := sorted({column for column in columns if columns.count(column) > 1}):
            raise ValueError(f"{path} must hold one run, but {', '.join(twice)} is there of several.")
        for row in reader:
            yield {_column(name): _number(cell) for name, cell in row.items() if name and cell and _column(name)}


def _column(name: str) -> str:
    """A metric's name without the run's; empty for the bounds beside it."""
    if name.endswith(("__MIN", "__MAX")):
        return ""
    panel = _PANEL.fullmatch(name)
    return panel[1] if panel else {"Step": "step"}.get(name, name)


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def _lines(path: Path) -> Iterator[Record]:
    found: list[Record] = []
    bars: dict[int, Bar | None] = {}
    bar, before = None, ""
    with path.open(encoding="utf-8", errors="replace") as lines:  # tqdm's carriage returns end lines too
        for number, line in enumerate(lines, 1):
            text = _NUMPY.sub(r"\1", _COLOUR.sub("", line)).strip()
            if not text:
                continue
            shown = _BAR.match(text)
            bar = (int(shown[1]), int(shown[2])) if shown else bar
            row = _json_object(text) or _verl_line(text) or _printed(text)
            if row is not None and _is_stepless(row) and "{'" in text:
                if text == before and all(map(_is_finite, row.values())):
                    continue  # a second process prints it too
                bars[len(found)] = bar
            before = text
            if row is not None or path.suffix == ".jsonl":
                found.append((number, row))
    steps = _printed_steps(list(bars.values()))
    numbered = dict(zip(bars, steps, strict=True))
    for place, (number, row) in enumerate(found):
        yield number, row if row is None or place not in numbered else {"step": numbered[place], **row}


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _printed_steps(bars: list[Bar | None]) -> list[int]:
    """The steps of printed rows: that of the progress bar before each, else one more than the row before.

    The training's bar is the one that moves from row to row; that of a data set or an evaluation does not.
    """
    seen: dict[int, set[int]] = {}
    for bar in bars:
        if bar is not None:
            seen.setdefault(bar[1], set()).add(bar[0])
    total = max(seen, key=lambda one: len(seen[one]), default=0)
    steps: list[int] = []
    for bar in bars:
        following = steps[-1] + 1 if steps else 1
        moves = bar is not None and bar[1] == total and len(seen[total]) > 1
        steps.append(max(following, bar[0]) if moves and bar is not None else following)
    return steps


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        return _flat(json.loads(text))
    except ValueError:
        return None


def _verl_line(text: str) -> dict[str, Any] | None:
    """``step:3 - actor/loss:0.1 - ...``, wherever it begins in the line."""
    found = _VERL.search(text)
    if found is None:
        return None
    pairs = (_PAIR.fullmatch(part.strip()) for part in found[2].split(" - "))
    numbers = {pair[1]: _number(pair[2].rstrip(",")) for pair in pairs if pair}
    return {"step": int(found[1]), **{name: value for name, value in numbers.items() if isinstance(value, float)}}


def _printed(text: str) -> dict[str, Any] | None:
    """The last dictionary that a line prints, as ``{'loss': 0.1, ...}``."""
    found = _PRINTED.findall(text)
    if not found:
        return None
    finite = _NOT_FINITE.sub(lambda match: "-1e999" if match[0].startswith("-") else "1e999", found[-1])
    try:
        row = ast.literal_eval(finite)
    except (ValueError, SyntaxError):
        return None
    return {name: _as_number(value) for name, value in row.items()} if isinstance(row, dict) else None


def _as_number(value: Any) -> Any:
    """Recent versions of transformers print numbers in quotes."""
    return _number(value) if isinstance(value, str) else value


def _is_stepless(row: Mapping[str, Any]) -> bool:
    """True for a printed training step that does not say which one it is."""
    if any(name == "step" or name.endswith(("/step", "global_step", "_step")) for name in row):
        return False
    if any(name.startswith("eval_") for name in row) or not any(name.startswith(_OF_A_STEP) for name in row):
        return False
    return not all(name.startswith(_WHOLE_RUN) or name == "epoch" for name in row)


def _rollouts_at_train_steps(found: list[Record]) -> list[Record]:
    """Rows that count rollouts, at the last optimizer step of their rollout.

    slime counts ``train/step`` on through the rollouts, each of which has the same number of optimizer steps.
    """
    times, trained, sampled = 1, -1, -1
    for _, row in found:
        if row is None:
            continue
        if isinstance(row.get(_TRAIN_STEP), int | float):
            trained = max(trained, int(row[_TRAIN_STEP]))
        elif isinstance(row.get(_ROLLOUT_STEP), int | float) and row[_ROLLOUT_STEP] > max(sampled, 0):
            # all steps so far are those of the rollouts before this one
            sampled = int(row[_ROLLOUT_STEP])
            times = max(round((trained + 1) / sampled), 1)
    return [(number, _at_train_step(row, times)) for number, row in found]


def _at_train_step(row: dict[str, Any] | None, times: int) -> dict[str, Any] | None:
    if row is None or _TRAIN_STEP in row or "step" in row or not isinstance(row.get(_ROLLOUT_STEP), int | float):
        return row
    return {**row, "step": row[_ROLLOUT_STEP] * times + times - 1}


def _without_trainer_prefix(found: list[Record]) -> Iterator[Record]:
    """Rows under TRL's names, which the callbacks of transformers for W&B and TensorBoard write behind ``train/``."""
    if not any(row is not None and name in row for _, row in found for name in _OF_TRL):
        yield from found
        return
    for number, row in found:
        yield number, None if row is None else {name.removeprefix("train/"): value for name, value in row.items()}


def not_finite(rows: Iterable[Mapping[str, float]], names: Iterable[str]) -> dict[str, int]:
    """Metrics that are NaN or infinite from some step on until the last row, with that step.

    A gradient norm of exactly 0 after that is no recovery: weights without a number have none.

    Example:
        >>> rows = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": float("nan")}]
        >>> not_finite(rows, ["loss"])
        {'loss': 2}
    """
    since: dict[str, int] = {}
    for row in rows:
        for name in names:
            if name in row and math.isfinite(row[name]):
                if not (name.endswith("grad_norm") and row[name] == 0):
                    since.pop(name, None)
            elif name in row:
                since.setdefault(name, int(row["step"]))
    return since
