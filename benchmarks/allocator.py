"""How glibc hands memory to tensors, fixed for a whole run, so that no candidate profits from what ran before it."""

from __future__ import annotations

import os
import sys

_COLD = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_WARM = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def fix_allocator(*, warm: bool) -> None:
    """Start this script again under one setting (read by glibc when a process starts).

    Args:
        warm: memory stays with the process and is used again; else every freed tensor goes back to the kernel, and a
            new one pays for its pages.
    """
    wanted = _WARM if warm else _COLD
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ |= wanted
        os.execv(sys.executable, [sys.executable, *sys.argv])
