"""TRL's client of a vLLM server, for a server that asks for an API key."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from requests import PreparedRequest
from trl.generation.vllm_client import VLLMClient


class KeyedClient(VLLMClient):  # type: ignore[misc]
    """TRL's client, which sends ``VLLM_API_KEY``, if set, with every request, as this kit's own client does."""

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """TRL's wait for the server, after which its client sends the first request of its session."""
        if key := os.environ.get("VLLM_API_KEY"):
            self.session.auth = _bearer(key)
        super().check_server(*args, **kwargs)


def _bearer(key: str) -> Callable[[PreparedRequest], PreparedRequest]:
    """Puts the key on a request. Unlike a header of the session, a password in ``~/.netrc`` does not replace it."""

    def sign(request: PreparedRequest) -> PreparedRequest:
        request.headers["Authorization"] = f"Bearer {key}"
        return request

    return sign
