"""Real vLLM servers for the tests, started as a user would: ``trl-offpolicy serve``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_models import LONG_CONTEXT, save_tiny_model

from trl_offpolicy.engines.server.client import Patience, ServerClient

QUICK = Patience(timeout=60.0, retries=3, start_timeout=400.0)  # two engines may start beside each other, on two cores


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A server of ``model``; ``stop`` and ``start`` again keep the port."""

    model: Path
    log: Path
    lora_rank: int = 0
    api_key: str | None = None
    flags: tuple[str, ...] = ("--max-model-len", "64", "--", "--max-num-seqs", "16")
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> Server:
        command = [sys.executable, "-m", "trl_offpolicy", "serve", "--model", str(self.model)]
        # the machine may run other tests, whose servers have been killed
        command += ["--beside-leftovers", "--port", str(self.port), "--lora-rank", str(self.lora_rank), *self.flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        environment.pop("VLLM_API_KEY", None)
        if self.api_key:
            environment["VLLM_API_KEY"] = self.api_key
        # In a session of its own it would be a scheduling group, which was seen to starve the trainer for seconds.
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        try:
            ServerClient(self.url, patience=QUICK).wait_until_up()
        except Exception as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.log.read_text()[-3000:]}") from error

    def kill(self) -> None:
        """End the server and its workers at once, as the kernel would."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def long_context_server(folder: Path, *flags: str, lora_rank: int = 0) -> Iterator[Server]:
    """A server of the tiny model for long responses, with further ``flags`` of vLLM; it ends with the context."""
    model = save_tiny_model(folder / "model", max_position_embeddings=LONG_CONTEXT)
    length = ("--max-model-len", str(LONG_CONTEXT))
    running = Server(model, folder / "log", lora_rank=lora_rank, flags=(*length, "--", *flags)).start()
    yield running
    running.kill()
