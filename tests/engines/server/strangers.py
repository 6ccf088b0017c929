"""Listeners at an address that should be a server's: real sockets that answer what they should not."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Made for these tests alone: openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500
CERTIFICATE = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgF6qXv9Ina3LgfKql
8lHAuSpeInTB+eG/71P4mutZ8EihRANCAAT5WVhFnKfubqyQNfPlVsN7Mp6nEdwu
9/aL/4c0oLcHbplvA6eYxaqXGDW1GoF9NTW/b+NSdQ7JlFm4wik44o1b
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBgDCCASWgAwIBAgIUHDGnSZL8dwSbe30QhnTkTFsGiRswCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNDA5MjMyMloYDzIxMjYxMDMx
MDkyMzIyWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAT5WVhFnKfubqyQNfPlVsN7Mp6nEdwu9/aL/4c0oLcHbplvA6eYxaqX
GDW1GoF9NTW/b+NSdQ7JlFm4wik44o1bo1MwUTAdBgNVHQ4EFgQUfOesCHj5UTCN
fQEAyrGunojmmmkwHwYDVR0jBBgwFoAUfOesCHj5UTCNfQEAyrGunojmmmkwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEAlCqwjQUdZd6i9NCKrIE1
+Yn4xzjVsulSCmzCNgIOTzECIQCPod2flmYDI+ua7HLNQEPZC18m7h/lVu4sJuFH
lh/nrg==
-----END CERTIFICATE-----
"""
PAGE = b"<!doctype html><html><head><title>Grafana</title></head><body>hello</body></html>"


@contextmanager
def speaking_http(pages: dict[str, tuple[int, bytes]], *, certificate: Path | None = None) -> Iterator[str]:
    """An HTTP server with these pages, 404 elsewhere; over TLS with a certificate. Yields its port as a text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pages.get(self.path, (404, b'{"detail": "Not Found"}'))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign, assignment]
    if certificate is not None:
        certificate.write_text(CERTIFICATE)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield str(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def speaking(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A socket that does ``answer`` to each connection and closes it. Yields its port as a text."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2)
                try:
                    connection.recv(4096)
                    answer(connection)
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield str(listener.getsockname()[1])
    finally:
        listener.close()


def vllm_pages(**changes: tuple[int, bytes]) -> dict[str, tuple[int, bytes]]:
    """What a vLLM server answers to the first questions, with changes by the last part of the path."""
    models = {"data": [{"id": "policy", "max_model_len": 64, "parent": None}]}
    pages = {
        "/health": (200, b""),
        "/v1/models": (200, json.dumps(models).encode()),
        "/openapi.json": (200, json.dumps({"paths": {"/weight_info": {}}}).encode()),
    }
    for name, page in changes.items():
        pages[next(path for path in pages if name in path)] = page
    return pages
