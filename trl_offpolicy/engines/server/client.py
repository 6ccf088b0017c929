"""Requests to a vLLM server: a time limit each, bounded retries with back-off, one clear error at the end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from trl_offpolicy.checks import check_positive, check_whole
from trl_offpolicy.engines.engine import EngineUnreachable
from trl_offpolicy.engines.server.contact import Refused, check_base_url, knock, one_line

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECT_TIMEOUT = 10.0
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a server.

    Args:
        timeout: seconds for one request.
        retries: further tries after a failed one, with waits of 1, 2, 4, ... seconds (at most 30) between them.
        start_timeout: seconds to wait for a server that is starting.
    """

    timeout: float = 600.0
    retries: int = 5
    start_timeout: float = 300.0

    def __post_init__(self) -> None:
        check_positive(timeout=self.timeout, start_timeout=self.start_timeout)
        check_whole("retries", self.retries, least=0)

    def pause(self, attempt: int) -> float:
        """Seconds to wait after failed try ``attempt`` (0, 1, ...)."""
        return min(2.0**attempt, 30.0)


class ServerClient:
    """JSON over HTTP with one server.

    Args:
        base_url: ``http://host:port``.
        api_key: sent as a bearer token; None = the variable ``VLLM_API_KEY`` if set.
        patience: time limits.

    Raises:
        ValueError: ``base_url`` is no http(s) address, its port is none, or it holds ``/v1``.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, patience: Patience | None = None) -> None:
        check_base_url(base_url)
        self.base_url = base_url.rstrip("/")
        parts = urlsplit(base_url)
        self.host, self.port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
        self.is_local = self.host in LOOPBACK
        self.patience = patience or Patience()
        self._session = requests.Session()
        self._session.trust_env = not self.is_local  # a proxy must not see requests to this machine
        self._session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=256))
        if key := api_key or os.environ.get("VLLM_API_KEY"):
            self._session.headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of the answer to a GET request, after retries."""
        return self.ask("GET", path, params=params)

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> Any:
        """The JSON of the answer to a POST request, after retries; keyword arguments as for :meth:`ask`."""
        return self.ask("POST", path, json=body, **kwargs)

    def ask(
        self, method: str, path: str, *, recover: Callable[[], None] | None = None, final: int = 0, **kwargs: Any
    ) -> Any:
        """Send one request with retries, and wait for a server that went away.

        Args:
            method: GET or POST.
            path: path of the route.
            recover: called before each further try.
            final: a status that counts as an answer and not as a reason for another try.
            **kwargs: arguments of ``requests``.

        Raises:
            Refused: an answer that another try would not change (400, 401, 404, ...).
            EngineUnreachable: no usable answer after all tries.
        """
        last = ""
        for attempt in range(self.patience.retries + 1):
            try:
                if attempt:
                    self.wait_until_up()
                if attempt and recover is not None:
                    recover()
                return self.once(method, path, final=final, **kwargs)
            except (requests.RequestException, _Transient) as error:
                last = _short(error)
            if attempt < self.patience.retries:
                pause = self.patience.pause(attempt)
                logger.warning("%s %s failed (%s); trying again in %.0f s.", method, path, last, pause)
                time.sleep(pause)
        raise EngineUnreachable(
            f"The vLLM server at {self.base_url} gave no usable answer to {method} {path} in "
            f"{self.patience.retries + 1} tries; the last: {last}. Look at the server's log, start it again "
            "(trl-offpolicy serve) and resume from the last checkpoint."
        )

    def once(self, method: str, path: str, *, final: int = 0, bounded: bool = True, **kwargs: Any) -> Any:
        """Send one request, with a single try; ``bounded=False`` waits for the answer as long as it takes."""
        limit = (CONNECT_TIMEOUT, self.patience.timeout if bounded else None)
        response = self._session.request(method, self.base_url + path, timeout=limit, **kwargs)
        if response.status_code in _TRANSIENT and response.status_code != final:
            raise _Transient(f"{response.status_code} {_message(response)}")
        if response.status_code != 200:
            raise Refused(response.status_code, _message(response))
        return _json(response)

    def wait_until_up(self, seconds: float | None = None) -> None:
        """Wait for a server that is starting.

        Raises:
            EngineUnreachable: it is not up in time; the message says what was seen last.
            NotAServer: at once, if what listens there is no vLLM server.
        """
        limit = self.patience.start_timeout if seconds is None else seconds
        end = time.monotonic() + limit
        while (seen := knock(self._session, self.base_url)) is not None:
            if time.monotonic() >= end:
                raise EngineUnreachable(
                    f"No vLLM server answers at {self.base_url} after {limit:.0f} s ({seen}). Start one with "
                    "`trl-offpolicy serve --model ...` and give its address."
                )
            time.sleep(0.5)


class _Transient(Exception):
    """An answer that another try may change."""


def _message(response: requests.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except ValueError:
        return response.text[:500]


def _json(response: requests.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        return response.text


def _short(error: Exception) -> str:
    if isinstance(error, requests.Timeout):
        return "no answer within the time limit"
    if isinstance(error, requests.ConnectionError):
        return "connection refused or lost"
    return one_line(str(error))
