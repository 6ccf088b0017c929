"""The weight syncs of a run: written one line each, read back, and searched for syncs that brought nothing new."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path

from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.run_folder import layout
from trl_offpolicy.run_folder.strict import dump_json


def append_sync(folder: str | Path, report: SyncReport) -> None:
    """Append a row to ``syncs.jsonl``. Its step is the version, which counts the optimizer steps so far."""
    row = {layout.STEP: report.version, layout.TIME: time.time(), **asdict(report)}
    with (Path(folder) / layout.SYNCS_FILE).open("a") as file:
        file.write(dump_json(row) + "\n")


def read_syncs(folder: str | Path) -> tuple[SyncReport, ...]:
    """The syncs of a run in their order; empty if none were recorded. A line cut short by a kill is skipped."""
    path = Path(folder) / layout.SYNCS_FILE
    if not path.is_file():
        return ()
    known = {item.name for item in fields(SyncReport)}  # a later version may write more
    found = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
            found.append(SyncReport(**{name: value for name, value in row.items() if name in known}))
        except (json.JSONDecodeError, TypeError, AttributeError):
            continue
    return tuple(found)


def repeated_syncs(syncs: Sequence[SyncReport]) -> tuple[tuple[SyncReport, SyncReport], ...]:
    """Neighbours with the same checksum at different versions: the later one brought the engine nothing new.

    Look at ``changed`` of the later one. Where it is 0 the trainer did not move (no gradient). Where it is above 0 the
    engine's precision hid the whole update.
    """
    return tuple(
        (before, after)
        for before, after in pairwise(syncs)
        if after.checksum is not None and before.checksum == after.checksum and before.version != after.version
    )
