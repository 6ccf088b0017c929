"""ASGI middleware of the server: vLLM's own key guards only /v1, not the routes that replace weights."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN_ROUTES = ("/health", "/ping")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class RequireKey:
    """Answers 401 to every request without ``Authorization: Bearer $VLLM_API_KEY``, except on /health.

    Raises:
        RuntimeError: ``VLLM_API_KEY`` is not set in the server's environment.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise RuntimeError("VLLM_API_KEY must be set for RequireKey, but it is not.")
        self.app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what has the key."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_ROUTES:
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._wanted):
            await self.app(scope, receive, send)
            return
        body = json.dumps({"error": {"message": "Unauthorized", "code": 401}}).encode()
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
