"""What `trl-offpolicy serve` would start, and who may reach it."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from trl_offpolicy.cli import commands as cli
from trl_offpolicy.engines.engine import EngineUnreachable
from trl_offpolicy.engines.server.client import Patience, ServerClient
from trl_offpolicy.engines.server.guard import RefuseHalfLoaded, RequireKey
from trl_offpolicy.engines.server.labels import refusal
from trl_offpolicy.engines.server.serve import (
    ServeOptions,
    checkpoint_dtype,
    command,
    environment,
    exposure,
    require_free_port,
)
from trl_offpolicy.engines.weights.lora import served_rank


@pytest.mark.parametrize("more", [{}, {"expose": True}, {"api_key": "k"}])
def test_other_machines_need_both_the_flag_and_a_key(more):
    with pytest.raises(ValueError, match="host must be loopback"):
        ServeOptions(model="m", host="0.0.0.0", **more)
    ServeOptions(model="m", host="0.0.0.0", expose=True, api_key="k")


def test_the_key_is_never_on_the_command_line_and_guards_every_route():
    options = ServeOptions(model="m", api_key="topsecret", lora_rank=8)
    assert "topsecret" not in " ".join(command(options))
    assert environment(options)["VLLM_API_KEY"] == "topsecret"
    line = command(options)
    middleware = [line[place + 1] for place, word in enumerate(line) if word == "--middleware"]
    assert middleware[-1] == "trl_offpolicy.engines.server.guard.RequireKey"  # the last one is asked first
    assert all("API key" in who for routes, _, who in exposure(options) if routes != "/health")


def test_flags_that_the_trainer_relies_on(model_folder):
    line = " ".join(command(ServeOptions(model=str(model_folder()), lora_rank=12, extra=("--seed", "3"))))
    assert "--scheduling-policy priority" in line
    for part in ("--logprobs-mode processed_logprobs", "--dtype float32", "--max-lora-rank 16", "--host 127.0.0.1"):
        assert part in line
    assert line.endswith("--seed 3")
    assert environment(ServeOptions(model="m"))["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_sampling_mask_needs_two_flags_and_opens_a_route(model_folder):
    model = str(model_folder())
    for asked in (True, False):
        options = ServeOptions(model=model, sampling_mask=asked)
        assert [flag in command(options) for flag in ("--return-sampling-mask", "--enable-scale-out")] == [asked] * 2
        assert ("/inference/v1/generate" in [routes for routes, _, _ in exposure(options)]) == asked


def test_dtype_is_the_checkpoints(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float16"}))
    assert checkpoint_dtype(str(tmp_path)) == "float16"
    assert checkpoint_dtype("some/hub-name") == "auto"


def test_served_rank():
    assert [served_rank(rank) for rank in (1, 8, 9, 64, 600)] == [8, 8, 16, 64, 600]


def test_dry_run_prints_the_command_and_the_notice_but_not_the_key(model_folder, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "topsecret")
    assert cli.main(["serve", "--model", str(model_folder()), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "trl_offpolicy.engines.launch" in out and "CALL METHODS" in out.replace("\n", " ")
    assert "topsecret" not in out


def test_bad_input_is_one_line(capsys):
    assert cli.main(["serve", "--model", "m", "--host", "0.0.0.0", "--dry-run"]) == cli.BAD_INPUT
    assert "host must be loopback" in capsys.readouterr().err


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="port must be free"):
            require_free_port("127.0.0.1", taken.getsockname()[1])


def ask_guard(monkeypatch, path, headers):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    sent, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": "http", "path": path, "headers": headers}, None, send))
    return sent[0]["status"] if sent else 200, passed


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/collective_rpc", [], 401),
        ("/collective_rpc", [(b"authorization", b"Bearer wrong")], 401),
        ("/collective_rpc", [(b"authorization", b"Bearer k")], 200),
        ("/health", [], 200),
        ("/health/../collective_rpc", [], 401),
    ],
)
def test_guard(monkeypatch, path, headers, status):
    answered, passed = ask_guard(monkeypatch, path, headers)
    assert answered == status
    assert passed == ([path] if status == 200 else [])


@pytest.mark.parametrize(
    ("label", "path", "method", "status"),
    [
        ("run:3", "/v1/completions", "POST", 200),
        ("default", "/v1/chat/completions", "POST", 200),
        ("loading:run:3", "/v1/completions", "POST", 409),
        ("unusable:the disk was full", "/v1/chat/completions", "POST", 409),
        ("unusable:the disk was full", "/v1/models", "GET", 200),
        ("unusable:the disk was full", "/update_weight_version", "POST", 200),
        ("loading:run:3", "/v1/load_lora_adapter", "POST", 200),
    ],
)
def test_a_half_loaded_server_samples_nothing(label, path, method, status):
    sent, passed = [], []

    class Engine:
        async def get_weight_version(self):
            return label

    class App:
        class state:
            engine_client = Engine()

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "app": App}
    asyncio.run(RefuseHalfLoaded(app)(scope, None, send))
    assert (sent[0]["status"] if sent else 200) == status
    assert passed == ([path] if status == 200 else [])
    if status == 409:
        assert refusal(label) in json.loads(sent[1]["body"])["error"]["message"]


def test_guard_without_a_key_does_not_start(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY must be set"):
        RequireKey(lambda *_: None)


def test_client_names_what_is_wrong():
    with pytest.raises(ValueError, match="base_url must look like"):
        ServerClient("127.0.0.1:8000")
    with pytest.raises(ValueError, match="retries must be a whole number"):
        Patience(retries=1.5)
    with pytest.raises(EngineUnreachable, match="trl-offpolicy serve"):
        ServerClient("http://127.0.0.1:9", patience=Patience(start_timeout=0.1)).wait_until_up()
    assert [Patience().pause(i) for i in (0, 1, 2, 10)] == [1.0, 2.0, 4.0, 30.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_modules": ("q_proj",)}, "lora_modules must come with lora_rank"),
        ({"lora_rank": -1}, r"lora_rank must be 0 \(no adapters\) or more, but got -1"),
        ({"max_model_len": -5}, "max_model_len must be 1 or more, but got -5"),
    ],
)
def test_numbers_out_of_range_and_modules_without_a_rank_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeOptions(model="m", **options)
