"""Weights in a folder that another process reads: only safetensors, complete or absent, never half a file.

A version is written under a temporary name, fsynced, read back against its checksums and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from trl_offpolicy.engines.engine import SyncError

MANIFEST = "manifest.json"
SHARD_BYTES = 2 * 1024**3


def fsync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> int:
    """Write a model's tensors in shards of at most 2 GiB (or one tensor); returns the bytes.

    Raises:
        SyncError: the disk took less than was written (full, quota), or something else was read back.
    """
    return _publish(folder, {}, _shards(weights))


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Write a LoRA adapter in PEFT's layout; returns the bytes. Raises as :func:`write_weights`."""
    text = {"adapter_config.json": json.dumps(dict(config), indent=2, default=str)}
    return _publish(folder, text, iter([("adapter_model.safetensors", dict(tensors))]))


def verify(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        SyncError: a file is absent, short or changed; the message names it.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, expected in manifest.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            raise SyncError(f"{path} must have {expected['bytes']} bytes, but has {size}: a partial file (disk full?).")
        if _checksum(path) != expected["sha256"]:
            raise SyncError(f"{path} does not have the checksum of what was written: the file was changed or damaged.")


def remove_all_but(parent: Path, keep: Iterable[str]) -> None:
    """Delete all versions except those named, and the leftovers of interrupted writes."""
    kept = set(keep)
    for path in parent.iterdir() if parent.is_dir() else ():
        if path.name not in kept and (path / MANIFEST).exists() | path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)


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
        for name, tensors in shards:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary / name)
        total = _seal(temporary)
        verify(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        fsync(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SyncError) or not isinstance(error, Exception):
            raise
        raise SyncError(f"weights could not be written to {folder.parent}: {error}. Is the disk full?") from error
    return total


def _seal(folder: Path) -> int:
    """Write the manifest of the folder's files and wait until all is on the disk; returns the bytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        fsync(path)
    manifest = {path.name: {"bytes": path.stat().st_size, "sha256": _checksum(path)} for path in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2))
    fsync(folder / MANIFEST)
    fsync(folder)
    return sum(path.stat().st_size for path in files)


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    part: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > SHARD_BYTES:
            yield f"model-{number:05d}.safetensors", part
            part, size, number = {}, 0, number + 1
        part[name] = tensor.detach().to("cpu")
        size += tensor.nbytes
    yield f"model-{number:05d}.safetensors", part


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
