"""Weights in a folder that another process reads: only safetensors, complete or absent, never half a file.

A version is written under a temporary name, fsynced, read back, compared with the weights, and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trl_offpolicy.engines.engine import EngineError, SyncError

MANIFEST = "manifest.json"
BASE = "base.json"
"""Of a folder with only a part of the weights: the name of the one, beside it, that has the others."""
SHARD_BYTES = 2 * 1024**3
MEMORY = "memory"
"""The value of ``engine.folder`` for shared memory: nothing is written to a disk, and no disk is waited for."""
SHARED_MEMORY = Path("/dev/shm")


def fsync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def weights_folder(folder: str | Path) -> Path:
    """The folder that ``engine.folder`` means: ``memory`` is one in this machine's shared memory, of this user alone.

    Raises:
        ValueError: ``memory``, but this machine has none, or another user took the name there.
    """
    if str(folder) != MEMORY:
        return Path(folder).resolve()
    if not SHARED_MEMORY.is_dir():
        raise ValueError(f"engine.folder must be a path, but got {MEMORY!r}, and this machine has no {SHARED_MEMORY}.")
    own = SHARED_MEMORY / f"trl-offpolicy-{os.getuid()}"
    # everyone may make files there, so the name may be somebody else's, or a link to another place
    if own.is_symlink() or (own.exists() and own.stat().st_uid != os.getuid()):
        raise ValueError(f"engine.folder must be a path, but got {MEMORY!r}, and {own} is not a folder of this user.")
    return own


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], *, base: Path | None = None) -> int:
    """Write a model's tensors in shards of at most 2 GiB (or one tensor); returns the bytes.

    Args:
        folder: is replaced.
        weights: names and tensors.
        base: a folder beside it that has the weights which are left out; None = none is left out.

    Raises:
        SyncError: the disk took less than was written (full, quota), or something else was read back.
    """
    return _publish(folder, {} if base is None else {BASE: json.dumps(base.name)}, _shards(weights))


def chain_of(folder: Path) -> list[Path]:
    """The folders that together have all weights of a version, in the order in which they are loaded."""
    base = folder / BASE
    return [safe_child(folder.parent, json.loads(base.read_text())), folder] if base.is_file() else [folder]


def shares_base(folder: Path, other: Path) -> bool:
    """Whether a folder has only a part of the weights, and the others are those on which another one builds too."""
    chain = chain_of(folder)
    return len(chain) > 1 and chain_of(other)[0] == chain[0]


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Write a LoRA adapter in PEFT's layout; returns the bytes. Raises as :func:`write_weights`."""
    text = {"adapter_config.json": json.dumps(dict(config), indent=2, default=str)}
    return _publish(folder, text, iter([("adapter_model.safetensors", dict(tensors))]))


def require_same(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read a file of tensors back and compare names, dtypes, shapes and bytes with what was to be written.

    Args:
        path: a safetensors file.
        tensors: contiguous, on the CPU.

    Raises:
        SyncError: the file is absent, short or holds something else; the message names it.
    """
    try:
        with safe_open(path, "pt") as stored:
            same = set(stored.keys()) == set(tensors) and all(
                _is_same(stored.get_tensor(name), tensor) for name, tensor in tensors.items()
            )
    except (OSError, SafetensorError) as error:
        raise SyncError(f"{path} cannot be read back: a partial file (disk full?): {error}.") from error
    if not same:
        raise SyncError(f"{path} does not hold what was written: the file was changed or damaged.")


def _is_same(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class WeightVersions:
    """The weight versions of one run in a folder that other runs may share.

    A run holds a lock there while it lives. What a run left that was killed is deleted by the next one.

    Args:
        folder: where the versions are, as ``RUN-VERSION``.
        run: name of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.lock = folder / f"{run}.lock"
        """For whoever sends weights again: one rank of the run at a time."""
        self.removed = False
        """True after :meth:`close`, until the next :meth:`claim`."""
        self._claim: FileLock | None = None
        self._at_exit: weakref.finalize[[Path, str, FileLock], WeightVersions] | None = None

    def claim(self) -> None:
        """Say that the run lives; on the rank that writes. What it writes is deleted when this process ends.

        Raises:
            EngineError: another process has a run of the same name here.
        """
        self.removed = False
        if self._claim is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        claim = FileLock(self.folder / f"{self.run}{_ALIVE}")
        try:
            claim.acquire(timeout=0)
        except Timeout:
            raise EngineError(
                f"run must be the name of one run alone, but another process writes {self.run} into {self.folder}."
            ) from None
        self._claim = claim
        self._at_exit = weakref.finalize(self, _remove_run, self.folder, self.run, self._claim)

    def keep(self, names: Iterable[str]) -> None:
        """Delete the other versions of this run, and everything of runs that have ended."""
        kept, alive = set(names), {self.run: True}
        for path in sorted(self.folder.iterdir()):
            run = _run_of(path)
            if run is None or path.name in kept:
                continue
            if run not in alive:
                alive[run] = _is_alive(self.folder, run)
            if run == self.run or not alive[run]:
                shutil.rmtree(path, ignore_errors=True)
        for run in (run for run, lives in alive.items() if not lives):
            _remove_locks(self.folder, run)

    def close(self) -> None:
        """Delete what this run wrote here, if this process has claimed it."""
        if self._at_exit is not None:
            self._at_exit()
            self._claim = self._at_exit = None
            self.removed = True


_ALIVE = ".alive"


def _run_of(path: Path) -> str | None:
    """The run that a folder is a version of, also one that is being written; None = it is something else."""
    if not path.is_dir() or not (path.name.startswith(".") or (path / MANIFEST).exists()):
        return None
    name = path.name
    if name.startswith("."):  # .RUN-VERSION-PID
        name = name[1:].rpartition("-")[0]
    run, dash, version = name.rpartition("-")
    return run if dash and version.isdigit() else None


def _is_alive(folder: Path, run: str) -> bool:
    lock = FileLock(folder / f"{run}{_ALIVE}")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _remove_run(folder: Path, run: str, claim: FileLock) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if _run_of(path) == run:
            shutil.rmtree(path, ignore_errors=True)
    claim.release()
    _remove_locks(folder, run)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _remove_locks(folder: Path, run: str) -> None:
    for ending in (_ALIVE, ".lock"):
        (folder / f"{run}{ending}").unlink(missing_ok=True)


def require_writable(folder: Path, *, where: str) -> None:
    """Raise unless a folder can be made and written to, before anything is loaded.

    Args:
        folder: need not exist; what had to be made for the trial is removed again.
        where: name of the option in the message.

    Raises:
        ValueError: it cannot.
    """
    exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=exists):
            pass
    except OSError as error:
        raise ValueError(f"{where} must be a folder that can be written to, but got {folder} ({error}).") from error


def safe_child(parent: Path, name: str) -> Path:
    """``parent/name``, which must be directly in ``parent``.

    Raises:
        ValueError: the name contains a path, or is a symbolic link to another place.
    """
    path = parent / name
    if Path(name).name != name or name in ("", ".", "..") or path.is_symlink():
        raise ValueError(f"weight folder must be a plain name inside {parent}, but got {name!r}.")
    return path


def _publish(folder: Path, texts: Mapping[str, str], shards: Iterator[tuple[str, dict[str, Tensor]]]) -> int:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = folder.parent / f".{folder.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(mode=0o700)
        for name, text in texts.items():
            (temporary / name).write_text(text)
            fsync(temporary / name)
        for name, tensors in shards:
            whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_file(whole, temporary / name)
            fsync(temporary / name)
            require_same(temporary / name, whole)
        total = _seal(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        fsync(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise SyncError(f"weights could not be written to {folder.parent}: {error}. Is the disk full?") from error
    return total


def _seal(folder: Path) -> int:
    """Write the manifest, by which a version is known, and wait until it and all names are on the disk.

    Returns the bytes of the files, which were waited for when they were written.
    """
    manifest = {path.name: {"bytes": path.stat().st_size} for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
    fsync(folder / MANIFEST)
    fsync(folder)
    return sum(file["bytes"] for file in manifest.values())


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    part: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > SHARD_BYTES:
            yield f"model-{number:05d}.safetensors", part
            part, size, number = {}, 0, number + 1
        part[name] = tensor.detach().cpu()  # here already, so that a shard never lies on the device as a whole
        size += tensor.nbytes
    yield f"model-{number:05d}.safetensors", part
