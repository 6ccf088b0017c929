"""Starts vLLM's server so that no process of it outlives it, however it ends.

vLLM's server runs its engine and its workers in processes of their own. After a ``kill -9`` of the server they would
stay and hold the memory that the next one needs. Python imports the module of the first process anew in every process
that it spawns, so this file is run in each of them before anything else, and watches the one that started it.

    python -m trl_offpolicy.engines.launch --model ... (vLLM's flags)
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

PARENT, SERVER = "TRL_OFFPOLICY_PARENT", "TRL_OFFPOLICY_SERVER"
"""Variables: pid of the process that starts the next one, and of the server itself."""
TITLE = "VLLM::"
"""Begins the titles that vLLM gives to its processes."""
ADOPTERS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "conmon", "containerd-shim-runc-v2",
            "slurmstepd")  # fmt: skip
"""Programs besides the first process that get the children of those that end (subreapers)."""
POLL = 0.5  # seconds between two looks at the parent where the system has no pidfd


def end_with(parent: int) -> None:
    """From now on, end this process at once when ``parent`` has ended."""
    try:
        watched: int | None = os.pidfd_open(parent)
    except ProcessLookupError:
        _end()
    except (AttributeError, OSError):  # no Linux, or an old one
        watched = None
    if os.getppid() != parent:  # it ended before it was watched, and its pid may be another's by now
        _end()

    def watch() -> None:
        if watched is None:
            while os.getppid() == parent:
                time.sleep(POLL)
        else:
            poll = select.poll()
            poll.register(watched, select.POLLIN)
            poll.poll()
        _end()

    threading.Thread(target=watch, name="ends with its parent", daemon=True).start()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # a worker that waits for its engine would not hear anything milder


def _join_server() -> None:
    """In a process of the server that was spawned or forked."""
    parent = int(os.environ[PARENT])
    end_with(parent)
    os.environ[PARENT] = str(os.getpid())
    name = multiprocessing.current_process().name
    print(f"trl-offpolicy serve: process {os.getpid()} ({name}) is one of server {os.environ[SERVER]}", file=sys.stderr)


@dataclass(frozen=True)
class Leftover:
    """A process of a vLLM server that is gone: its pid, its title, its memory in MB."""

    pid: int
    title: str
    megabytes: int

    def __str__(self) -> str:
        return f"{self.pid} ({self.title}, {self.megabytes} MB)"


def leftovers(processes: Path = Path("/proc"), *, user: int | None = None) -> list[Leftover]:
    """This user's processes of vLLM servers that have ended; empty where the system has no /proc.

    Args:
        processes: the system's table of processes.
        user: whose; None = this user's.
    """
    user = os.getuid() if user is None else user
    known: dict[int, tuple[int, str, int, bool]] = {}  # pid: parent, command line, kB, whether it is the user's
    for folder in processes.iterdir() if processes.is_dir() else ():
        if not folder.name.isdigit():
            continue
        try:
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended meanwhile
            continue
        memory, own = int(fields.get("VmRSS", "0 kB").split()[0]), int(fields["Uid"].split()[0]) == user
        known[int(folder.name)] = (int(fields["PPid"]), command, memory, own)
    found = []
    for pid, (parent, command, memory, own) in sorted(known.items()):
        while parent in known and known[parent][1].startswith(TITLE):
            parent = known[parent][0]
        if own and command.startswith(TITLE) and _adopts(parent, known.get(parent, (0, "", 0, False))[1]):
            found.append(Leftover(pid, command, memory // 1000))
    return found


def _adopts(pid: int, command: str) -> bool:
    """True if a process is one that gets the children of those that end, and did not start a server itself."""
    name = Path(command.split(" ", 1)[0]).name
    if pid == 1:  # in a container it may be the server
        return not any(word in command for word in ("python", "vllm", "trl", "ray"))
    return name in ADOPTERS


def require_no_leftovers() -> None:
    """Raise if processes of an earlier server hold memory.

    Raises:
        ValueError: there are some; the message names them.
    """
    if left := leftovers():
        raise ValueError(
            f"no process of an earlier vLLM server must be left, but got {', '.join(map(str, left))}: their server is "
            f"gone, and the memory that they hold may be what this one needs. End them (kill -9 "
            f"{' '.join(str(one.pid) for one in left)}), or start beside them with --beside-leftovers."
        )


def main() -> None:
    """Run vLLM's server in this process."""
    os.environ[PARENT] = os.environ[SERVER] = str(os.getpid())
    os.register_at_fork(after_in_child=_join_server)
    # As `python -m` would, but this module stays the main one, which Python imports anew where it spawns.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__mp_main__" and PARENT in os.environ:
    os.register_at_fork(after_in_child=_join_server)
    _join_server()
if __name__ == "__main__":
    main()
