"""Serves the report of a run while it trains, on this machine only: ``trl-offpolicy watch RUN_DIR``.

The page is the file that ``trl-offpolicy report`` writes, made anew when the run folder has changed. The browser asks
for it again by itself. The server listens on loopback and answers only requests that name it so: no page of another
site can read it (DNS rebinding).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from trl_offpolicy.diagnosis.report.examples import Decode
from trl_offpolicy.diagnosis.report.page import render_page, script_hash
from trl_offpolicy.diagnosis.report.report import make_report
from trl_offpolicy.run_folder import layout
from trl_offpolicy.run_folder.run_data import metrics_file

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")
_READ = (layout.RUN_FILE, layout.SYNCS_FILE, layout.ROLLOUTS_FILE, layout.WORST_FOLDER)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; script-src '{script}'"
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def _stamp(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    return str(path), found.st_mtime_ns, found.st_size


class LivePage:
    """The report of a run folder as it is at each call; made once for each state of the folder.

    Args:
        run_dir: an existing folder; it may be empty still.
        every: seconds after which the browser asks again, which the page says.
        decode: turns token ids into text; None shows the ids.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    def __init__(self, run_dir: str | Path, *, every: int, decode: Decode | None = None) -> None:
        self.run_dir, self.every, self._decode = Path(run_dir), every, decode
        if not self.run_dir.is_dir():
            raise FileNotFoundError(f"run_dir must be an existing folder, but got {run_dir}.")
        self._lock = Lock()  # matplotlib's settings are global, and two browsers may ask at once
        self._state: tuple[tuple[str, int, int], ...] | None = None
        self._html = ""

    def html(self) -> str:
        """The page; one that says what is missing if there is nothing to report yet."""
        with self._lock:
            state = tuple(self._stamps())
            if state != self._state:
                self._html, self._state = self._made(), state
            return self._html

    def _stamps(self) -> Iterator[tuple[str, int, int]]:
        for name in _READ:
            path = self.run_dir / name
            for one in sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []:
                if not one.name.startswith("."):  # being written
                    yield _stamp(one)
        with suppress(OSError):  # metrics.jsonl, or of another trainer its log or the state in its newest checkpoint
            yield _stamp(metrics_file(self.run_dir))

    def _made(self) -> str:
        live = f"Live: the page is made anew every {self.every} s, if the run has logged something."
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a line that is being written
            try:
                return make_report(self.run_dir, decode=self._decode, live=live).html
            except (OSError, ValueError) as error:
                title = f"Off-policy report: {self.run_dir.resolve().name}"
                return render_page("waiting.html", title=title, live=live, error=str(error))


def report_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """A server for one page, bound to loopback. ``serve_forever`` runs it; port 0 takes a free one.

    Raises:
        ValueError: there is no such port.
        OSError: the port is taken.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, but got {port}.")

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "trl-offpolicy", ""

        def do_GET(self) -> None:
            """The page at ``/``, nothing else."""
            if self.headers.get("Host", "").split(":")[0] not in _NAMES:
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST, f"Ask for {HOST} or localhost")
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._answer(page.html().encode())

        do_HEAD = do_GET

        def _answer(self, body: bytes) -> None:
            self.send_response(HTTPStatus.OK)
            policy = {"Content-Security-Policy": _POLICY.format(script=script_hash())}
            changing = {"Refresh": str(page.every), "Content-Length": str(len(body))}
            for name, value in {**_HEADERS, **policy, **changing}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line for each refresh helps nobody."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise OSError(f"--port must be free, but got {port}: {error.strerror}.") from None
    server.daemon_threads = True
    return server
