"""Asking real servers: a stock ``vllm serve`` that somebody else started, and that of this kit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines.server.servers import QUICK, Server, free_port
from tiny_models import save_tiny_model, tiny_model, tiny_tokenizer

from trl_offpolicy.diagnosis.probe.asked import Proof
from trl_offpolicy.diagnosis.probe.proof import Asking
from trl_offpolicy.diagnosis.probe.sides import ask_both
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.environment import CPU_SERVER_ENVIRONMENT
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.server.reader import ServerReader

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [[3, 4, 5, 6], [7, 8, 9]]


@contextmanager
def bare_server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """vLLM's own server without its development routes, as a user would start it."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "64", "--enforce-eager", *flags]
    environment = {**os.environ, **CPU_SERVER_ENVIRONMENT, "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        ServerClient(f"http://127.0.0.1:{port}", patience=QUICK).wait_until_up()
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked(url: str, model: Any, **sampling: Any) -> Proof:
    reader = ServerReader(url, patience=QUICK)
    interview = reader.interview(PROMPTS[0])
    with interview.watch() as requests:
        rollouts = reader.generate(PROMPTS, Sampling(max_tokens=4, **sampling), n=2)
    assert rollouts.prompt_ids == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    asking = Asking(prompts=PROMPTS, head=Head(sampling.get("temperature", 1.0)), requests=requests)
    found = ask_both(interview, model, tiny_tokenizer(), asking)
    print(*found.rows, sep="\n")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose folder asks for a repetition penalty."""
    place = save_tiny_model(tmp_path_factory.mktemp("model"))
    (place / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3, "eos_token_id": 1}))
    return place


def test_a_stock_server_tells_its_defaults_and_its_log_probs(folder: Path, tmp_path: Path) -> None:
    """It reports raw log-probs, vLLM's default, and says nothing of its weights."""
    with bare_server(folder, tmp_path / "log") as url:
        found = asked(url, tiny_model(), temperature=0.7)
        plain = asked(url, tiny_model())
    (seen,) = found.seen
    assert (seen.cause, seen.engine, seen.trainer) == ("unreported_sampling", "raw_logprobs", "processed_logprobs")
    assert plain.seen == ()  # at temperature 1 raw log-probs are those sampled from
    (default,) = [one for one in found.rows if one.what.startswith("repetition_penalty")]
    assert (default.outcome, default.engine, default.trainer) == ("no effect", "1.3", "1")
    assert {"prompts", "sampling", "tokenizer", "logprobs_mode"} <= found.compared
    assert {"weights", "adapter", "model_config"} <= set(found.not_compared)


def test_trials_find_what_processed_log_probs_show(folder: Path, tmp_path: Path) -> None:
    flags = ("--logprobs-mode", "processed_logprobs", "--override-generation-config", '{"temperature": 0.5}')
    with bare_server(folder, tmp_path / "log", *flags) as url:
        found = asked(url, tiny_model())
    rows = {one.what.split(" ")[0]: one for one in found.rows if one.outcome == "no effect"}
    assert found.seen == () and set(rows) == {"repetition_penalty", "temperature"}
    assert rows["repetition_penalty"].engine == "1.3" and rows["temperature"].engine.startswith(
        "not 1 (moves log-probs"
    )


def test_this_kits_server_tells_everything(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path / "log")
    try:
        server.start()
        clean = asked(server.url, tiny_model())
        other = asked(server.url, tiny_model(seed=1))
    finally:
        server.kill()
    assert clean.seen == () and clean.not_compared == ()
    assert other.seen[0].cause == "other_weights"
