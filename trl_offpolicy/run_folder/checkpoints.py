"""Whole checkpoints: written aside and renamed, told from half written ones, and what a full disk means for them."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import struct
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from trl_offpolicy.run_folder.layout import STATE_FILE, UNFINISHED
from trl_offpolicy.run_folder.lock import RunFolderError

logger = logging.getLogger(__name__)

_OLD = f"{UNFINISHED}old-"
"""Begins the name of a checkpoint that a new one of the same name replaces."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")
_TORCH_WORDS = ("PytorchStreamWriter", "unexpected pos", "inline_container")
"""torch says that a write failed, not why."""


class Found(NamedTuple):
    """The newest whole checkpoint, or None; and the newer ones that are not whole, each with what is wrong."""

    whole: Path | None
    broken: list[tuple[Path, str]]


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, a file or a folder; None = it is whole, as far as its files tell.

    Ends of files are looked at, not their contents: a file that was cut is found, a changed one is not.
    """
    if not path.exists():
        return "it does not exist"
    if path.is_file():
        return _fault_of_file(path)
    state = path / STATE_FILE
    if not state.is_file():
        return f"it has no {STATE_FILE}, which is written last"
    files = sorted(one for one in path.rglob("*") if one.is_file())
    faults = ((one, _fault_of_file(one)) for one in files)
    for file, fault in faults:
        if fault is not None:
            return f"{file.relative_to(path)} {fault}"
    return next((f"{one.name} names {name}, which is missing" for one in path.glob("*.index.json")
                 for name in _shards(one) if not (path / name).is_file()), None)  # fmt: skip


def _shards(index: Path) -> list[str]:
    return sorted(set(json.loads(index.read_text()).get("weight_map", {}).values()))


def _fault_of_file(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        return _fault_of_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and not zipfile.is_zipfile(path):
        return "was cut short"
    if path.suffix == ".json":
        try:
            json.loads(path.read_text())
        except ValueError:
            return "is no JSON"
    return None


def _fault_of_safetensors(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or 8 + length > size:
            return "was cut short"
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return "has no header"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return None if 8 + length + max(ends, default=0) == size else "was cut short"


def newest_whole(checkpoints: Sequence[Path]) -> Found:
    """The first whole one of some checkpoints, newest first."""
    broken: list[tuple[Path, str]] = []
    for path in checkpoints:
        fault = fault_of(path)
        if fault is None:
            return Found(path, broken)
        broken.append((path, fault))
    return Found(None, broken)


def by_step(folder: Path, prefix: str = "checkpoint-") -> list[Path]:
    """The checkpoints ``checkpoint-N`` of a run folder, the largest N first."""
    found = [one for one in folder.glob(f"{prefix}*") if one.is_dir() and one.name.removeprefix(prefix).isdigit()]
    return sorted(found, key=lambda one: -int(one.name.removeprefix(prefix)))


def choose(checkpoints: Sequence[Path]) -> Path | None:
    """The checkpoint to go on from, with a warning that names those that were passed over; None = there is none.

    Raises:
        RunFolderError: there are some, but none is whole.
    """
    whole, broken = newest_whole(checkpoints)
    said = "; ".join(f"{path.name}: {fault}" for path, fault in broken)
    if whole is None and broken:
        raise RunFolderError(
            f"resume_from_checkpoint must find a whole checkpoint, but none in {broken[0][0].parent} is ({said}). "
            "Start the run anew, or from a checkpoint elsewhere."
        )
    if broken:
        logger.warning("Going on from %s, because what is newer is not whole (%s).", whole, said)
    return whole


# ------------------------------------------------------------------------------------------------------------- writing


def aside(path: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return path.with_name(f"{UNFINISHED}{path.name}")


def put_in_place(path: Path) -> None:
    """Rename what :func:`aside` names; an older one of the same name is replaced. Does nothing if there is none.

    A kill leaves the old or the new one: :func:`remove_unfinished` puts an old one back that lies aside. Several
    machines that share the disk may call it: the one that renames what is written first does the rest.
    """
    claimed = path.with_name(f"{UNFINISHED}{uuid.uuid4().hex}-{path.name}")
    try:
        aside(path).rename(claimed)
    except FileNotFoundError:  # there is none, or another machine was first
        return
    old = path.with_name(f"{_OLD}{path.name}")
    if path.is_dir():
        _remove(old)
        path.rename(old)
    claimed.replace(path)
    _remove(old)


def remove_unfinished(folder: Path) -> None:
    """Delete what runs that were killed have left in the midst of a checkpoint; what they had moved away comes back."""
    for path in folder.glob(f"{_OLD}*"):
        whole = path.with_name(path.name.removeprefix(_OLD))
        if not whole.exists():
            path.rename(whole)
    for path in folder.glob(f"{UNFINISHED}*"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------- full disk


def is_full(error: BaseException, folder: Path, *, needed: int = 0) -> bool:
    """True if an error of a write says that the disk of a folder is full, or a quota used up.

    Args:
        error: the error, with its causes.
        folder: on the disk.
        needed: bytes; an error of torch, which does not say why, means a full disk if fewer are free.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        text = str(seen)
        if any(words in text for words in _FULL_WORDS):
            return True
        if any(words in text for words in _TORCH_WORDS) and shutil.disk_usage(folder).free < needed:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def no_room(folder: Path, *, what: str, needed: int | None = None, safe: Sequence[Path] = ()) -> RunFolderError:
    """The error of a full disk: what was to be written, the space that it needs, and what is safe.

    Args:
        folder: on the disk.
        what: what could not be written.
        needed: bytes; None = few.
        safe: checkpoints, newest first; the first whole one is named.
    """
    whole = newest_whole(safe).whole
    kept = "no checkpoint is whole yet" if whole is None else f"{whole.name} is whole"
    size = "" if needed is None else f", which needs about {_size(needed)}"
    return RunFolderError(
        f"The disk of {folder.resolve()} is full: {_size(shutil.disk_usage(folder).free)} are free, and {what} could "
        f"not be written{size}; {kept}, and the records of finished steps are safe. Make room, then go on with "
        "train(resume_from_checkpoint=True) (recipes/grpo.py: --resume true; Lightning: ckpt_path)."
    )


@contextmanager
def said_if_full(folder: Path, *, what: str) -> Iterator[None]:
    """A context whose writes into a run folder end with :func:`no_room` if the disk is full.

    Raises:
        RunFolderError: it is.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error, folder):
            raise
        raise no_room(folder, what=what, safe=by_step(folder)) from error


def bytes_of(path: Path) -> int:
    """Size of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def _size(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= unit / 10:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e3:.0f} kB"
