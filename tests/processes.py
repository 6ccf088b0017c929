"""Commands that tests start: what such a command started in turn (ranks, an engine) ends with it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


def run_command(
    command: Sequence[str | Path], *, seconds: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` and keeps what it printed.

    ``subprocess.run`` with a timeout ends the command alone: ranks and engines that it started compute on, and it
    waits for them as long as they hold the command's output. Here the whole family ends, also when the test is stopped.

    Args:
        command: program and arguments.
        seconds: how long it may take.
        cwd: the folder it runs in; the present one by default.
        env: its environment; the present one by default.

    Raises:
        AssertionError: it took longer; the message holds the end of what it had printed.
    """
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_family(process.pid)
        out, err = process.communicate()
        raise AssertionError(
            f"not done within {seconds:g} s: {' '.join(words)}\n{out[-2000:]}\n{err[-4000:]}"
        ) from None
    except BaseException:  # the test's own time limit, or an interrupt
        end_family(process.pid)
        process.wait()
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def end_family(pid: int) -> None:
    """Ends a process and all that it started, directly or not, and waits until they have; ended ones are left out."""
    try:
        first = psutil.Process(pid)
        family = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    until = time.monotonic() + 30  # a busy machine takes its time with what was killed
    while any(map(computes, family)) and time.monotonic() < until:
        time.sleep(0.01)


def computes(process: psutil.Process) -> bool:
    """False if the process has ended, whether or not its parent has asked for its exit status."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
