"""ASGI middleware of the server.

vLLM's own key guards only /v1, not the routes that replace weights. And a load that failed must not be asked.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from trl_offpolicy.engines.server.labels import refusal

OPEN_ROUTES = ("/health", "/ping")
SAMPLING_ROUTES = ("/v1/", "/inference/", "/generate")

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
        await _refuse(send, 401, "Unauthorized")


class RefuseHalfLoaded:
    """Answers 409 to requests for completions while the label says that weights are being loaded, or are broken.

    vLLM itself would answer with layers of two versions, or stop in the middle of a request.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what does not sample, and everything while the weights are whole."""
        samples = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(SAMPLING_ROUTES)
        if samples and not scope["path"].endswith("_lora_adapter"):
            label = await scope["app"].state.engine_client.get_weight_version()
            if (reason := refusal(str(label))) is not None:
                await _refuse(send, 409, f"This server's weights cannot be used: {reason}.")
                return
        await self.app(scope, receive, send)


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "code": status}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
