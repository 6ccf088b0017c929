"""One run folder, one run: who may have it, and what is found before anything is loaded."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.run_folder import lock
from trl_offpolicy.run_folder.layout import LOCK_FILE, METRICS_FILE
from trl_offpolicy.run_folder.lock import RunFolderError, RunLock, check_free, check_run_folder, check_writable
from trl_offpolicy.run_folder.writer import RunFolderWriter

HOLD = "import sys, time; from trl_offpolicy.run_folder.writer import RunFolderWriter as W; "
HOLD += (
    "w = W(sys.argv[1], {}); w.begin(0, seed=1); w.log(1, {'loss': 1.0}); print('held', flush=True); time.sleep(300)"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has ``tmp_path / "run"`` and has logged a row."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def write(folder: Path, **changed: Any) -> None:
    """A lock of this process, changed."""
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_text(json.dumps({**lock._own(), **changed}))


@pytest.mark.integration
def test_a_second_run_is_refused_and_touches_nothing(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    folder = tmp_path / "run"
    for refused in (
        lambda: check_run_folder(folder, name="output_dir"),
        lambda: RunFolderWriter(folder, {}).begin(0, seed=1),
    ):
        with pytest.raises(RunFolderError, match=f"is in use by process {other.pid} on .*, begun 20"):
            refused()
    rows = (folder / METRICS_FILE).read_text().splitlines()
    assert len(rows) == 1 and not (folder / "_previous").exists()


@pytest.mark.integration
def test_the_lock_of_a_killed_run_is_taken_over(
    tmp_path: Path, other: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    writer = RunFolderWriter(tmp_path / "run", {})
    with caplog.at_level(logging.WARNING):
        writer.begin(1, seed=1)  # the run goes on from a checkpoint
    assert f"process {other.pid}" in caplog.text and "is gone: taking it over" in caplog.text
    assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == os.getpid()
    writer.end()
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_process_may_take_its_own_lock_again(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    second.acquire()
    second.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_number_that_was_given_to_another_process_is_no_run(tmp_path: Path) -> None:
    write(tmp_path, pid=os.getppid(), started="1")
    check_free(tmp_path)
    write(tmp_path, pid=os.getppid(), started=lock._started(os.getppid()))
    with pytest.raises(RunFolderError, match=r"in use by process"):
        check_free(tmp_path)


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"space": "pid:[1]"}], ids=["machine", "container"])
def test_elsewhere_a_lock_lives_as_long_as_it_is_renewed(
    tmp_path: Path, elsewhere: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a renewal it is that of a run that was killed a moment ago: the job that was queued anew has it."""
    monkeypatch.setattr(lock, "RENEWED", 0.1)
    write(tmp_path, **elsewhere)
    path = tmp_path / LOCK_FILE
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.01):
            os.utime(path)

    other = threading.Thread(target=renew)
    other.start()
    with pytest.raises(RunFolderError, match=f"delete {LOCK_FILE}"):
        check_free(tmp_path)
    ended.set()
    other.join()
    with caplog.at_level(logging.WARNING):
        check_free(tmp_path)
    assert "waiting up to 0.2 s" in caplog.text and "which is gone: taking it over" in caplog.text
    monkeypatch.setattr(lock, "RENEWED", 1000.0)
    check_free(tmp_path)  # it was waited for once
    write(tmp_path, **elsewhere)
    old = (tmp_path / LOCK_FILE).stat().st_mtime - 2 * lock.STALE_AFTER
    os.utime(tmp_path / LOCK_FILE, (old, old))
    check_free(tmp_path)


def test_what_cannot_be_locked_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{LOCK_FILE}.guard").mkdir()
    with pytest.raises(RunFolderError, match=r"must be a folder that can be locked, but .*_run.lock.guard"):
        RunLock(tmp_path).acquire()
    (tmp_path / f"{LOCK_FILE}.guard").rmdir()
    held = RunLock(tmp_path)
    held.acquire()
    assert all(one.name.startswith("_") for one in tmp_path.iterdir()), "the Hub's upload leaves these out"
    held.release()


def test_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWED", 0.01)
    held = RunLock(tmp_path)
    held.acquire()
    os.utime(held.path, (1, 1))
    for _ in range(500):
        if held.path.stat().st_mtime > 1:
            break
        lock.time.sleep(0.01)
    assert held.path.stat().st_mtime > 1
    held.release()


@pytest.mark.parametrize("content", ["", "no json", "[]"])
def test_a_lock_that_was_cut_short_is_that_of_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    check_free(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"output_dir must be a folder that can be written, but got .*file/run"):
        check_writable(tmp_path / "file" / "run", name="output_dir")


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a read-only disk, and only it writes past permissions")
def test_a_read_only_disk(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with pytest.raises(RunFolderError, match=r"Read-only file system. Nothing was loaded yet"):
            check_writable(tmp_path / "run", name="output_dir")
        with pytest.raises(RunFolderError, match=r"Read-only file system"):
            check_writable(tmp_path, name="output_dir")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_run_folder(tmp_path / "new" / "run", name="output_dir")
    assert list((tmp_path / "new" / "run").iterdir()) == []
