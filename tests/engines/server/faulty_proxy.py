"""An HTTP proxy before a real vLLM server that makes it misbehave in the ways that a real one does rarely."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

Fault = Callable[[dict[str, Any], int], Any]


class FaultyProxy:
    """Passes everything on; ``fault(answer, count)`` may change the count-th answer of /v1/completions, or wait."""

    def __init__(self, target: str) -> None:
        self.fault: Fault | None = None
        self.count = 0
        self.asked: list[dict[str, Any]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(requests.get(target + self.path, timeout=60))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {"Content-Type": "application/json"}
                answer = requests.post(target + self.path, data=body, headers=headers, timeout=60)
                self._answer(answer, json.loads(body) if self.path == "/v1/completions" else None)

            def _answer(self, response: requests.Response, asked: dict[str, Any] | None = None) -> None:
                content = response.content
                if asked is not None and proxy.fault is not None:
                    proxy.asked.append(asked)
                    proxy.count += 1
                    changed = proxy.fault(response.json(), proxy.count)
                    content = json.dumps(changed).encode()
                self.send_response(response.status_code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def fewer_once(answer: dict[str, Any], count: int) -> dict[str, Any]:
    """The first answer lacks its last completion."""
    return {**answer, "choices": answer["choices"][:-1]} if count == 1 else answer


def fewer_always(answer: dict[str, Any], count: int) -> dict[str, Any]:
    return {**answer, "choices": []}


def no_logprob_on_the_first_token(answer: dict[str, Any], count: int) -> dict[str, Any]:
    for choice in answer["choices"]:
        choice["logprobs"]["token_logprobs"][0] = None
    return answer


def no_logprobs(answer: dict[str, Any], count: int) -> dict[str, Any]:
    for choice in answer["choices"]:
        choice["logprobs"] = None
    return answer


def slow(answer: dict[str, Any], count: int) -> dict[str, Any]:
    time.sleep(3.0)
    return answer
