"""What leaves a machine: whole files, JSON that every reader takes, and texts without the machine's own paths."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PATH = r"/(?:[\w.@+=%-]+/)+[\w.@+=%-]*"
_BEFORE = r"(?<![\w.:/<~…-])"  # not a part of an address, of a relative path or of a tag
_ROOTS = (
    "home", "root", "Users", "mnt", "data", "scratch", "work", "workspace", "tmp", "var", "opt", "srv", "media",
    "lustre", "gpfs", "nfs", "fsx", "storage", "cluster", "private",
)  # fmt: skip
"""Folders that hold what is a machine's own. What all machines have, like ``/usr/bin/env``, may stand in a text."""
_ANY = re.compile(_BEFORE + _PATH)
_OWN = re.compile(f"{_BEFORE}(?=/(?:{'|'.join(_ROOTS)})/){_PATH}")


def strict_json(value: Any) -> Any:
    """The value with None in place of NaN and infinities, which JSON does not have.

    Example:
        >>> strict_json({"kl": float("nan"), "steps": (1, 2.5)})
        {'kl': None, 'steps': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON; what JSON has no form for is its text.

    Example:
        >>> dump_json({"kl": float("inf")})
        '{"kl": null}'
    """
    # what `default` makes is text, so nothing that is not finite can come in behind `strict_json`
    return json.dumps(strict_json(value), indent=indent, default=str, allow_nan=False)


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one move: a reader, and a run that was killed meanwhile, finds the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")  # hidden, so readers of the folder skip it
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def without_paths(text: str, *, every: bool = False) -> str:
    """A text in which only the name is left of each absolute path of this machine.

    Args:
        text: any text.
        every: True = of each absolute path, also of one that other machines may have, like ``/usr/bin/env``.

    Example:
        >>> without_paths("python /home/ann/grpo.py --model=/data/models/small, see https://example.org/home/a")
        'python …/grpo.py --model=…/small, see https://example.org/home/a'
        >>> without_paths("#!/usr/bin/env python"), without_paths("/usr/lib/model", every=True)
        ('#!/usr/bin/env python', '…/model')
    """
    return (_ANY if every else _OWN).sub(lambda found: f"…/{found[0].rstrip('/').rpartition('/')[2]}", text)


def info_without_paths(value: Any) -> Any:
    """Entries of ``run.json`` with :func:`without_paths` in every text, whatever the path.

    Example:
        >>> info_without_paths({"model": "/models/small", "hub": "org/small", "seed": 1})
        {'model': '…/small', 'hub': 'org/small', 'seed': 1}
    """
    if isinstance(value, Mapping):
        return {key: info_without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [info_without_paths(item) for item in value]
    return without_paths(value, every=True) if isinstance(value, str) else value
