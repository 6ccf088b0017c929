"""What listens at a server's address: a vLLM server, one that is starting, or something that will never be one."""

from __future__ import annotations

import re
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

import requests

from trl_offpolicy.engines.engine import EngineError

KNOCK = 5.0  # seconds for the health check and for a trial of TLS
_SHOWN = 60  # characters of an answer that are shown
_LOST = ("BadStatusLine", "RemoteDisconnected", "reset by peer", "Connection aborted", "IncompleteRead")
_ADDRESS = "Give the address of a server that was started with `trl-offpolicy serve`, such as http://127.0.0.1:8000."


class Refused(EngineError):
    """The server answered, with an error that another try would not change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message

    def __reduce__(self) -> tuple[type[Refused], tuple[int, str]]:
        """How other ranks get it."""
        return Refused, (self.status, self.message)


class NotAServer(EngineError):
    """What listens at the address is no vLLM server, or is addressed in the wrong way; waiting would not help."""


def check_base_url(base_url: str, *, where: str = "base_url") -> None:
    """Raise unless an address can be that of a server.

    Args:
        base_url: the address.
        where: name of the option in the message.

    Raises:
        ValueError: it cannot.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{where} must look like http://127.0.0.1:8000, but got {base_url!r}.")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{where} must have a port from 1 to 65535, but got {base_url!r}.")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{where} must end before /v1, which this kit adds itself, but got {base_url!r}.")


def knock(session: requests.Session, base_url: str) -> str | None:
    """Ask for the health of a server; None = it is up, otherwise why it may be up later, in words.

    Raises:
        NotAServer: what listens there is no vLLM server, and will not become one.
        EngineError: it wants another key.
    """
    try:
        response = session.get(f"{base_url}/health", timeout=KNOCK)
    except requests.exceptions.SSLError as error:
        _explain_tls(base_url, error)
        return "the TLS handshake fails"
    except requests.Timeout:
        return f"no answer within {KNOCK:.0f} s"
    except requests.ConnectionError as error:
        return _lost(base_url, str(error))
    except requests.RequestException as error:
        return one_line(str(error))
    if response.status_code == 400 and "HTTPS port" in response.text:
        raise NotAServer(_use_https(base_url))
    if response.status_code in (401, 403):
        raise EngineError(_needs_key(base_url, response.status_code))
    if 400 <= response.status_code < 500 and response.status_code not in (408, 425, 429):
        raise NotAServer(_no_route(base_url, response.status_code, "/health"))
    return None if response.ok else f"it answers {response.status_code} to /health"


def _lost(base_url: str, error: str) -> str:
    """Why a connection came to nothing."""
    if any(name in error for name in ("NameResolution", "getaddrinfo", "Name or service", "nodename")):
        return f"the name {urlsplit(base_url).hostname} is not known"
    if not any(name in error for name in _LOST):
        return "nothing listens there" if "refused" in error else one_line(error)
    if base_url.startswith("http://") and _speaks_tls(base_url):
        raise NotAServer(_use_https(base_url))
    if "BadStatusLine" in error:
        said = error.partition("BadStatusLine(")[2].strip("'\")(")
        raise NotAServer(f"What listens at {base_url} does not speak HTTP (it says {one_line(said)!r}). {_ADDRESS}")
    return "it accepts connections and closes them without an answer"


def _explain_tls(base_url: str, error: Exception) -> None:
    text = str(error)
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text or "http request" in text:
        plain = base_url.replace("https://", "http://", 1)
        raise NotAServer(f"The server at {base_url} speaks plain HTTP, not TLS. Write {plain}.") from error
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate" in text:
        raise NotAServer(
            f"The certificate of {base_url} is not trusted ({one_line(text.rpartition('certificate verify')[2])}). "
            "Name the file of its authority in REQUESTS_CA_BUNDLE."
        ) from error


def _speaks_tls(base_url: str) -> bool:
    parts = urlsplit(base_url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((str(parts.hostname), parts.port or 80), timeout=KNOCK) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname),
        ):
            return True
    except OSError:
        return False


def _use_https(base_url: str) -> str:
    return f"The server at {base_url} speaks TLS. Write {base_url.replace('http://', 'https://', 1)}."


def _needs_key(base_url: str, status: int) -> str:
    return (
        f"The server at {base_url} wants another API key ({status}). Set VLLM_API_KEY to the one that it was started "
        "with, for the trainer as well."
    )


def _no_route(base_url: str, status: int, path: str) -> str:
    return f"What listens at {base_url} answers {status} to {path}: another program, or a wrong path. {_ADDRESS}"


def meet(client: Any) -> tuple[dict[str, Any], set[str]]:
    """The first questions to a server: its base model's entry in /v1/models, and the paths that it serves.

    Args:
        client: the :class:`~trl_offpolicy.engines.server.client.ServerClient`.

    Raises:
        EngineError: it is not up in time, is no vLLM server, or wants a key; the message holds the address.
    """
    client.wait_until_up()
    models = [one for one in _listed(client) if isinstance(one, dict) and "id" in one and not one.get("parent")]
    if not models:
        raise NotAServer(f"The server at {client.base_url} lists no model at /v1/models. {_ADDRESS}")
    paths = _asked(client, "/openapi.json").get("paths")
    if not isinstance(paths, dict):
        raise NotAServer(_no_json(client.base_url, "/openapi.json", paths))
    return models[0], set(paths)


def _listed(client: Any) -> list[Any]:
    data = _asked(client, "/v1/models").get("data")
    if not isinstance(data, list):
        raise NotAServer(_no_json(client.base_url, "/v1/models", data))
    return data


def _asked(client: Any, path: str) -> dict[str, Any]:
    try:
        answer = client.get(path)
    except Refused as error:
        if error.status in (401, 403):
            raise EngineError(_needs_key(client.base_url, error.status)) from error
        raise NotAServer(_no_route(client.base_url, error.status, path)) from error
    if not isinstance(answer, dict):
        raise NotAServer(_no_json(client.base_url, path, answer))
    return answer


def _no_json(base_url: str, path: str, answer: Any) -> str:
    kind = "an HTML page" if str(answer).lstrip()[:1] == "<" else "other content"
    return f"What listens at {base_url} answers {path} with {kind} ({excerpt(answer)}), not as vLLM does. {_ADDRESS}"


def excerpt(answer: Any) -> str:
    """The beginning of an answer, of an HTML page its title."""
    title = re.search(r"<title>(.*?)</title>", str(answer), re.IGNORECASE | re.DOTALL)
    return repr(one_line(title[1] if title else str(answer)))


def one_line(text: str) -> str:
    """The beginning of a text, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
