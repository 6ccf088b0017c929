"""``trl-offpolicy watch``: the page of a growing run, from a real process, and in a real browser where there is one."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.cli import commands as cli
from trl_offpolicy.diagnosis.report import watch
from trl_offpolicy.diagnosis.report.page import script_hash
from trl_offpolicy.diagnosis.report.watch import LivePage, report_server

SECONDS = 60
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")


def log(run: Path, step: int, kl: float = 0.2) -> None:
    row = {"step": step, "reward": 0.5, "offpolicy/mismatch/kl_k3": kl}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_the_page_is_made_once_for_each_state_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = watch.make_report

    def counted(run_dir: Path, **options: Any) -> Any:
        made.append(run_dir)
        return make(run_dir, **options)

    monkeypatch.setattr(watch, "make_report", counted)
    page = LivePage(tmp_path, every=7)
    assert "No report yet: run_dir must contain metrics.jsonl" in page.html()
    log(tmp_path, 1)
    first = page.html()
    assert "critical at step 1:" in first and "made anew every 7 s" in first
    assert page.html() is first and len(made) == 2
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')  # a line that is being written
    assert "critical at step 1:" in page.html() and len(made) == 3
    (tmp_path / "rollouts.parquet").mkdir()
    (tmp_path / "rollouts.parquet" / ".part.tmp").write_text("not finished")
    page.html()
    assert len(made) == 3


@contextmanager
def serving(run: Path) -> Iterator[int]:
    with report_server(LivePage(run, every=3), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(port: int, path: str = "/", host: str = "localhost", method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path, headers={"Host": host})
    return connection.getresponse()


def test_the_log_of_another_trainer_renews_the_page(tmp_path: Path) -> None:
    """transformers keeps its log in checkpoints; a hook may write a log under any name."""
    page = LivePage(tmp_path, every=7)
    missing = page.html()
    for step in (2, 4):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        rows = [{"step": n, "loss": 0.5, "reward": n / 10} for n in range(1, step + 1)]
        state.write_text(json.dumps({"global_step": step, "log_history": rows}))
        assert page.html() != missing
        missing = page.html()


def test_only_the_page_is_served_and_only_to_this_machine(tmp_path: Path) -> None:
    with serving(tmp_path) as port:
        found = ask(port, host=f"127.0.0.1:{port}")
        assert (found.status, found.getheader("Refresh"), found.getheader("Cache-Control")) == (200, "3", "no-store")
        policy = str(found.getheader("Content-Security-Policy"))
        assert "default-src 'none'" in policy and policy.endswith(f"script-src '{script_hash()}'")
        assert ask(port, "/metrics.jsonl").status == 404 and ask(port, "/../../etc/passwd").status == 404
        assert ask(port, host=f"evil.example:{port}").status == 421
        head = ask(port, method="HEAD")
        assert head.status == 200 and head.read() == b"" and int(str(head.getheader("Content-Length"))) > 500
        with socket.socket() as other:  # no other address of this machine answers: 127.0.0.2 is loopback too
            assert other.connect_ex(("127.0.0.2", port)) != 0


def test_bad_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as port:
        cases = (
            ([str(tmp_path), "--port", str(port)], f"--port must be free, but got {port}: Address already in use."),
            ([str(tmp_path), "--port", "70000"], "--port must be between 0 and 65535, but got 70000."),
            ([str(tmp_path), "--every", "0"], "--every must be at least 1, but got 0."),
            ([str(tmp_path / "no")], f"run_dir must be an existing folder, but got {tmp_path / 'no'}."),
        )
        for argv, message in cases:
            assert cli.main(["watch", *argv]) == cli.BAD_INPUT
            assert capsys.readouterr().err == f"trl-offpolicy watch: {message}\n"


@contextmanager
def watching(run: Path) -> Iterator[str]:
    """A real process that watches the folder; yields its address."""
    argv = [sys.executable, "-m", "trl_offpolicy", "watch", str(run), "--port", "0", "--every", "1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.match(r"(http://127\.0\.0\.1:[0-9]+/)  shows ", process.stdout.readline())
            assert found is not None
            yield found[1]
        finally:
            process.terminate()


def wait_for(seen: Callable[[], str], text: str) -> None:
    """Until ``seen()`` holds the text."""
    end = time.monotonic() + SECONDS
    while text not in (last := seen()):
        assert time.monotonic() < end, last[:500]
        time.sleep(0.2)


@pytest.mark.integration
def test_a_process_shows_a_run_that_grows(tmp_path: Path) -> None:
    with watching(tmp_path) as address:

        def page() -> str:
            with urllib.request.urlopen(address, timeout=SECONDS) as answer:
                return str(answer.read().decode())

        assert "No report yet" in page()
        log(tmp_path, 1)
        wait_for(page, "critical at step 1:")
        log(tmp_path, 2, kl=0.001)
        wait_for(page, "critical at step 2:")


@pytest.mark.integration
@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
def test_a_browser_renews_the_page_by_itself(tmp_path: Path) -> None:
    run, profile = tmp_path / "run", tmp_path / "profile"
    run.mkdir()
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
    ]
    with watching(run) as address, subprocess.Popen([BROWSER, *flags, address], stderr=subprocess.DEVNULL) as browser:
        try:

            def title() -> str:
                """Of the page that is open, as the browser tells it; the port is in a file of the profile."""
                port = profile / "DevToolsActivePort"
                if not port.exists() or not port.read_text().strip():
                    return ""
                where = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
                with urllib.request.urlopen(where, timeout=SECONDS) as answer:
                    return "; ".join(one["title"] for one in json.load(answer) if one["type"] == "page")

            wait_for(title, "Off-policy report: run")
            log(run, 1)
            wait_for(title, "critical at step 1: Off-policy report: run")
            log(run, 2)
            wait_for(title, "critical at step 2: Off-policy report: run")
        finally:
            browser.terminate()
