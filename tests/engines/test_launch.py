"""No process outlives the one that started it, and those that vLLM left before are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trl_offpolicy.engines import launch

# A server in small: it spawns a process, which spawns and forks others; each writes its pid and waits.
CHAIN = """
import multiprocessing, os, time
from pathlib import Path

def wait(folder, name):
    (Path(folder) / name).write_text(str(os.getpid()))
    time.sleep(600)

def engine(folder):
    spawn = multiprocessing.get_context("spawn")
    fork = multiprocessing.get_context("fork")
    spawn.Process(target=wait, args=(folder, "worker")).start()
    fork.Process(target=wait, args=(folder, "forked")).start()
    wait(folder, "engine")
"""


def fake_processes(folder: Path, *rows: tuple[int, int, str, int]) -> Path:
    for pid, parent, command, user in rows:
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        (folder / str(pid) / "status").write_text(
            f"Name:\tx\nPPid:\t{parent}\nUid:\t{user}\t{user}\nVmRSS:\t 547000 kB\n"
        )
    (folder / "cpuinfo").write_text("")
    return folder


def test_only_processes_whose_server_is_gone_are_leftovers(tmp_path: Path) -> None:
    rows = (
        (1, 0, "/sbin/init", 5),
        (10, 1, "python -m vllm.entrypoints.openai.api_server", 5),
        (11, 10, "VLLM::EngineCore", 5),
        (12, 11, "VLLM::Worker", 5),
        (20, 1, "VLLM::EngineCore", 5),  # its server is gone
        (21, 20, "VLLM::Worker", 5),
        (30, 1, "VLLM::EngineCore", 6),  # another user's
        (40, 1, "bash", 5),
        (50, 1, "/opt/serving --model x", 6),  # it lives, whatever it is and whoever's
        (51, 50, "VLLM::EngineCore", 5),
        (52, 60, "VLLM::EngineCore", 5),  # its parent is hidden
        (70, 1, "/usr/lib/systemd/systemd --user", 5),
        (71, 70, "VLLM::EngineCore", 5),  # its server is gone, and systemd has it
    )
    found = launch.leftovers(fake_processes(tmp_path, *rows), user=5)
    assert [one.pid for one in found] == [20, 21, 71]
    assert str(found[0]) == "20 (VLLM::EngineCore, 547 MB)"
    assert launch.leftovers(tmp_path / "none") == []


def test_a_start_beside_leftovers_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [launch.Leftover(20, "VLLM::EngineCore", 547)]
    monkeypatch.setattr(launch, "leftovers", lambda: left)
    with pytest.raises(ValueError, match=r"must be left, but got 20 \(VLLM::EngineCore, 547 MB\): .*kill -9 20\)"):
        launch.require_no_leftovers()
    left.clear()
    launch.require_no_leftovers()


@pytest.mark.integration
def test_kill_9_ends_every_process_of_a_server(tmp_path: Path) -> None:
    """The launcher itself, with a program in place of vLLM's that spawns and forks as vLLM does."""
    (tmp_path / "chain.py").write_text(CHAIN)
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    for part in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
        (tmp_path / part / "__init__.py").touch()
    (tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(
        "import multiprocessing, sys\nfrom chain import engine, wait\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.get_context('spawn').Process(target=engine, args=(sys.argv[1],)).start()\n"
        "    wait(sys.argv[1], 'server')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "trl_offpolicy.engines.launch", str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
    names = ("server", "engine", "worker", "forked")
    wait_for(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in names), 120)
    pids = {name: int((tmp_path / name).read_text()) for name in names}
    assert pids["server"] == server.pid and all(alive(pid) for pid in pids.values())
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids.values()), 20)
    text = (tmp_path / "log").read_text()
    for name in ("engine", "worker", "forked"):
        assert f"process {pids[name]} (" in text and f"is one of server {server.pid}" in text


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition, seconds: float) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
