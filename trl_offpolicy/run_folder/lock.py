"""One run folder, one run: a lock with the pid and the host of the run, and a check that the folder can be written.

The lock of a process that is gone is taken over. A process of this machine can be asked for; that another machine's
still lives is seen by the time of its lock, which a thread renews: whoever wants the folder waits for a renewal.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trl_offpolicy.run_folder.layout import LOCK_FILE

logger = logging.getLogger(__name__)

RENEWED = 30.0
"""Seconds between two renewals of a lock."""
STALE_AFTER = 300.0
"""Seconds without renewal after which another machine's lock counts as left behind without waiting for one."""
POLL = 1.0
"""Seconds between two looks at another machine's lock."""
_silent: set[tuple[str, int]] = set()
"""Locks, with the time of their last renewal, for whose next one this process has waited in vain."""


class RunFolderError(RuntimeError):
    """The folder of a run cannot be used; the message says why and what to do."""


class RunLock:
    """The lock of a run folder, held from :meth:`acquire` to :meth:`release` or the end of the process.

    A process may take over its own lock: a notebook that builds a trainer anew runs one at a time.

    Args:
        folder: folder of the run, which exists.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LOCK_FILE
        self._held = threading.Event()

    def acquire(self) -> None:
        """Take the lock. A stale one is taken over, with a line that says so.

        Raises:
            RunFolderError: another run that lives has it; the message names its process and machine.
        """
        with _one_at_a_time(self.path):
            check_free(self.path.parent)
            self.path.write_text(json.dumps(_own()) + "\n")
        if not self._held.is_set():
            self._held.set()
            atexit.register(self.release)
            threading.Thread(target=self._renew, daemon=True, name="run-lock").start()

    def release(self) -> None:
        """Give the lock back, if this process still has it."""
        self._held.clear()
        atexit.unregister(self.release)
        if _is_own(_read(self.path)):
            self.path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while self._held.is_set():
            time.sleep(RENEWED)
            with suppress(OSError):
                if self._held.is_set() and _is_own(_read(self.path)):
                    os.utime(self.path)


def check_free(folder: str | Path) -> None:
    """Raise if a run that lives has this folder. Another machine's shows by a renewal, for which this may wait.

    Raises:
        RunFolderError: the message names its process and machine.
    """
    path = Path(folder) / LOCK_FILE
    holder = _read(path)
    if holder is None or _is_own(holder):
        return
    where = f"process {holder.get('pid')} on {holder.get('host')}, begun {holder.get('began')}"
    if _is_alive(path, holder):
        raise RunFolderError(
            f"The run folder must belong to one run, but {Path(folder).resolve()} is in use by {where}. Give this run "
            f"a folder of its own, or end that run first. If it is certainly gone, delete {LOCK_FILE} there."
        )
    logger.warning("The run folder %s was left behind by %s, which is gone: taking it over.", folder, where)


def check_writable(folder: str | Path, *, name: str) -> None:
    """Raise unless a file can be written in a folder, which is made if it does not exist.

    Args:
        folder: folder of the run.
        name: name of the option in the message.

    Raises:
        RunFolderError: the message says what the system said.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        raise RunFolderError(
            f"{name} must be a folder that can be written, but got {str(folder)!r}: {error.strerror or error}. Nothing "
            "was loaded yet. Choose another folder, or make room or rights there."
        ) from error


def check_run_folder(folder: str | Path, *, name: str) -> None:
    """:func:`check_writable` and :func:`check_free`: what can be known before anything is loaded.

    Raises:
        RunFolderError: the folder cannot be used.
    """
    check_writable(folder, name=name)
    check_free(folder)


def _own() -> dict[str, Any]:
    began = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return {"pid": os.getpid(), "started": _started(os.getpid()), "host": socket.gethostname(), "space": _pid_space(),
            "began": began}  # fmt: skip


def _read(path: Path) -> dict[str, Any] | None:
    """What a lock says; an empty one if it is no JSON; None if there is none."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_own(holder: dict[str, Any] | None) -> bool:
    own = _own()
    return holder is not None and all(holder.get(key) == own[key] for key in ("pid", "started", "host", "space"))


def _is_alive(path: Path, holder: dict[str, Any]) -> bool:
    """Whether the holder of a lock lives, as far as can be told: otherwise it does not."""
    own, pid = _own(), holder.get("pid")
    if isinstance(pid, int) and holder.get("host") == own["host"] and holder.get("space") == own["space"]:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # of another user
        return _started(pid) == holder.get("started")  # or its number was given to another process
    try:
        return _is_renewed(path)
    except FileNotFoundError:  # given back meanwhile
        return False


def _is_renewed(path: Path) -> bool:
    """Whether a lock is renewed within twice the time in which it should be."""
    seen = path.stat().st_mtime_ns
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as file:
        now = os.stat(file.name).st_mtime_ns  # of the disk, whose clock may differ from this machine's
    if now - seen >= STALE_AFTER * 1e9 or (str(path.resolve()), seen) in _silent:
        return False
    logger.warning(
        "The run folder %s was last used from another machine or container: waiting up to %g s for a sign that its run "
        "lives.", path.parent, 2 * RENEWED,
    )  # fmt: skip
    end = time.monotonic() + 2 * RENEWED
    while time.monotonic() < end:
        time.sleep(min(POLL, RENEWED))
        path.read_bytes()  # a shared disk looks anew when a file is opened
        if path.stat().st_mtime_ns != seen:
            return True
    _silent.add((str(path.resolve()), seen))
    return False


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None where the system does not tell."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if stat[0] in "ZX" else stat[19]  # a zombie is gone
    return None


def _pid_space() -> str:
    """The space in which a pid means a process: a container has one of its own."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Of several processes that look at a lock at once, one looks and writes at a time."""
    from filelock import FileLock

    guard = path.with_name(f"{path.name}.guard")  # begins with "_" as the lock does: neither is uploaded
    try:
        with FileLock(guard, timeout=60 + 2 * RENEWED):
            yield
    except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError
        raise RunFolderError(
            f"The run folder must be a folder that can be locked, but {path.parent.resolve()} cannot: {error} (another "
            f"process may hold {guard.name}, or its disk may be full or have no locks). Choose another folder."
        ) from error
