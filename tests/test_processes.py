"""A command that takes too long ends with everything that it started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import computes, run_command

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""
"""A command whose child holds its output, as the ranks of a launcher do."""


def test_what_a_command_started_ends_with_it(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)not done within 2 s: .*child \d+"):
        run_command([sys.executable, "-c", FAMILY, tmp_path / "child"], seconds=2)
    assert time.monotonic() - began < 30
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or not computes(psutil.Process(child))


def test_what_it_printed_and_returned_is_kept(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['A']); print('no', file=sys.stderr); sys.exit(3)"
    done = run_command([sys.executable, "-c", code], seconds=60, cwd=tmp_path, env={"A": "set"})
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{tmp_path} set\n", "no\n")
