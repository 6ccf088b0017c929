"""Addresses that lead to no vLLM server: each has a sentence of its own, and those that can be known come at once."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.server.servers import free_port
from engines.server.strangers import PAGE, speaking, speaking_http, vllm_pages

from lightning_module.engines import engine_type
from trl_offpolicy.engines.engine import EngineError, EngineUnreachable
from trl_offpolicy.engines.server.answers import choices_of, require_room, scored
from trl_offpolicy.engines.server.client import Patience, ServerClient
from trl_offpolicy.engines.server.contact import NotAServer, Refused, check_base_url, meet
from trl_offpolicy.engines.server.reader import ServerReader
from trl_offpolicy.trl.checks import check_address

AT_ONCE = Patience(timeout=5.0, retries=0, start_timeout=60.0)  # a test that waited for it would show
HASTY = Patience(timeout=5.0, retries=0, start_timeout=0.1)


def met(url: str, patience: Patience = AT_ONCE) -> str:
    """What the first questions to ``url`` say, which holds the address."""
    start = time.monotonic()
    with pytest.raises(EngineError) as caught:
        meet(ServerClient(url, patience=patience))
    assert time.monotonic() - start < 20
    assert url in str(caught.value)
    assert isinstance(caught.value, NotAServer) or patience is HASTY or "API key" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:99999", "must have a port from 1 to 65535, but got 'http://127.0.0.1:99999'"),
        ("http://127.0.0.1:abc", "must have a port from 1 to 65535"),
        ("http://127.0.0.1:0", "must have a port from 1 to 65535"),
        ("http://127.0.0.1:8000/v1", "must end before /v1"),
        ("http://127.0.0.1:8000/v1/", "must end before /v1"),
        ("127.0.0.1:8000", "must look like http://127.0.0.1:8000"),
        ("ftp://127.0.0.1", "must look like"),
        ("http://", "must look like"),
    ],
)
def test_an_address_that_is_none_is_refused_without_a_request(url: str, said: str) -> None:
    for build in (ServerClient, ServerReader):
        with pytest.raises(ValueError, match="base_url " + said):
            build(url)


def test_both_trainers_refuse_an_address_before_they_load_a_model(
    make_args: Callable[..., Any], tmp_path: Path
) -> None:
    server = {"use_vllm": True, "vllm_mode": "server"}
    for options, said in (
        ({"vllm_server_base_url": "http://127.0.0.1:abc"}, "vllm_server_base_url must have a port"),
        ({"vllm_server_port": 99999}, "vllm_server_host and vllm_server_port must have a port"),
        ({"engine": {"folder": "/proc/none"}}, "engine.folder must be a folder that can be written to"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            check_address(make_args(**server, **options))
    check_address(make_args(**server, vllm_server_base_url="http://127.0.0.1:8000", engine={"folder": str(tmp_path)}))
    check_address(make_args(vllm_server_port=99999))  # not asked for
    with pytest.raises(ValueError, match=r"engine\.base_url must end before /v1"):
        engine_type({"type": "server", "base_url": "http://127.0.0.1:8000/v1"})
    assert engine_type({"type": "server", "base_url": "http://127.0.0.1:8000"}) == "server"


def test_addresses_that_are_taken() -> None:
    for url in ("http://127.0.0.1:8000", "https://host/vllm", "http://[::1]:8000/", "http://host"):
        check_base_url(url)


def test_a_web_page_with_200_is_no_server() -> None:
    pages = dict.fromkeys(("/health", "/v1/models", "/openapi.json"), (200, PAGE))
    with speaking_http(pages) as port:
        assert "answers /v1/models with an HTML page ('Grafana')" in met(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"health": (404, b"no")}, "answers 404 to /health: another program, or a wrong path"),
        ({"models": (404, b"{}")}, "answers 404 to /v1/models: another program, or a wrong path"),
        ({"models": (200, b'{"object": "list"}')}, "answers /v1/models with other content"),
        ({"models": (200, b'{"data": []}')}, "lists no model at /v1/models"),
        ({"models": (200, b'["a"]')}, "answers /v1/models with other content"),
        ({"models": (200, b"\x00\xff garbage")}, "answers /v1/models with other content"),
        ({"models": (401, b'{"error": "Unauthorized"}')}, r"wants another API key (401). Set VLLM_API_KEY"),
        ({"openapi": (404, b"{}")}, "answers 404 to /openapi.json"),
        ({"health": (400, b"The plain HTTP request was sent to HTTPS port")}, "speaks TLS. Write https://127.0.0.1"),
    ],
)
def test_answers_of_another_program(changes: dict[str, tuple[int, bytes]], said: str) -> None:
    with speaking_http(vllm_pages(**changes)) as port:
        assert said in met(f"http://127.0.0.1:{port}")


def test_a_wrong_path_is_named() -> None:
    with speaking_http(vllm_pages()) as port:
        assert "answers 404 to /health: another program, or a wrong path" in met(f"http://127.0.0.1:{port}/wrong")
        assert meet(ServerClient(f"http://127.0.0.1:{port}"))[0]["id"] == "policy"  # it is only the path


def test_tls_on_a_plain_port_and_the_other_way_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with speaking_http(vllm_pages(), certificate=tmp_path / "pem") as port:
        assert f"speaks TLS. Write https://127.0.0.1:{port}" in met(f"http://127.0.0.1:{port}")
        assert "is not trusted" in met(f"https://127.0.0.1:{port}")
        assert "REQUESTS_CA_BUNDLE" in met(f"https://127.0.0.1:{port}")
    with speaking_http(vllm_pages()) as port:
        assert f"speaks plain HTTP, not TLS. Write http://127.0.0.1:{port}" in met(f"https://127.0.0.1:{port}")


def test_what_does_not_speak_http() -> None:
    with speaking(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as port:
        assert "does not speak HTTP (it says 'SSH-2.0-OpenSSH_9.2" in met(f"http://127.0.0.1:{port}")
    with speaking(lambda connection: connection.sendall(bytes(range(1, 200)))) as port:
        assert "does not speak HTTP" in met(f"http://127.0.0.1:{port}")


def test_what_may_still_become_a_server_is_waited_for_and_described() -> None:
    with speaking(lambda connection: None) as port:
        assert "(it accepts connections and closes them" in met(f"http://127.0.0.1:{port}", HASTY)
    assert "(nothing listens there)" in met(f"http://127.0.0.1:{free_port()}", HASTY)
    with speaking_http(vllm_pages(health=(503, b""))) as port:
        assert "(it answers 503 to /health)" in met(f"http://127.0.0.1:{port}", HASTY)
    unknown = "http://no-such-host.invalid:8000"
    with pytest.raises(EngineUnreachable, match=r"the name no-such-host.invalid is not known|answers"):
        meet(ServerClient(unknown, patience=HASTY))


@pytest.mark.parametrize("answer", [None, "<html>", [], {"choices": None}, {"choices": ["a"]}, {"choices": [{}]}])
def test_an_answer_without_choices_names_the_server(answer: object) -> None:
    with pytest.raises(
        EngineError, match="at http://host must answer /v1/completions with choices that have token_ids"
    ):
        choices_of(answer, "http://host")


def test_scores_that_are_no_scores() -> None:
    places = [None, {"7": {"logprob": -0.5}}]
    assert scored([[5, 7]], {"choices": [{"prompt_logprobs": places}]}, "u") == [[-0.5]]
    for rows, answer in (
        ([[5, 8]], places), ([[5, 7, 9]], places), ([[5, 7], [5, 7]], places),
        ([[5, 7]], [None, None]), ([[5, 7]], None),
    ):  # fmt: skip
        with pytest.raises(EngineError, match="at http://host must return the log-prob of every token"):
            scored(rows, {"choices": [{"prompt_logprobs": answer}]}, "http://host")


def test_a_context_that_is_too_short_for_the_probe_is_explained() -> None:
    require_room([[1] * 15], 16, "it")
    require_room([[1] * 500], None, "it")
    with pytest.raises(
        EngineError, match=r"max_model_len must be at least 17, because the probe that proves every sync"
    ):
        require_room([[1] * 3, [1] * 16], 16, "it")


def test_a_refusal_reaches_other_ranks() -> None:
    again = pickle.loads(pickle.dumps(Refused(404, "gone")))
    assert (again.status, str(again)) == (404, "404: gone")
