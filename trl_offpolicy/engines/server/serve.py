"""How a stock vLLM server is started so that a trainer can sync to it: flags, environment and what that exposes."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from trl_offpolicy.engines.environment import CPU_SERVER_ENVIRONMENT, machine_has_gpu
from trl_offpolicy.engines.launch import require_no_leftovers
from trl_offpolicy.engines.sampling_states import engine_findings, flag_arguments
from trl_offpolicy.engines.server.client import LOOPBACK
from trl_offpolicy.engines.weights.lora import LORA_MODULES, served_rank
from trl_offpolicy.engines.worker import EXTENSION
from trl_offpolicy.packages import check_model, require

GUARD = "trl_offpolicy.engines.server.guard.RequireKey"
WHOLE = "trl_offpolicy.engines.server.guard.RefuseHalfLoaded"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `trl-offpolicy serve`.

    Args:
        model: folder or Hub name.
        host: address to listen on; other addresses than loopback need ``expose`` and an API key.
        port: TCP port.
        dtype: dtype of the engine; "auto" = that of the checkpoint (vLLM's "auto" would read float32 as bfloat16).
        api_key: if it is set, every route except /health requires it.
        expose: allow an address that other machines can reach.
        lora_rank: adapters up to this rank can be hot-loaded; 0 = none.
        lora_modules: module names that adapters may touch; None = those of attention and MLP. LoRA on lm_head would
            break vLLM's prompt log-probs.
        max_model_len: longest prompt + completion; None = the model's.
        sampling_mask: report which tokens top-k, top-p and min-p kept (vLLM 0.28+ with Model Runner V2); callers must
            then send a top_k.
        gpu_transfer: on a GPU, prepare TRL's NCCL weight transfer.
        extra: further flags for vLLM, as on its command line.

    Raises:
        ValueError: an address beyond loopback without ``expose`` and a key, a number out of range, or modules of
            adapters that are not loaded.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    api_key: str | None = None
    expose: bool = False
    lora_rank: int = 0
    lora_modules: tuple[str, ...] | None = None
    max_model_len: int | None = None
    sampling_mask: bool = False
    gpu_transfer: bool = True
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"port must lie in 1 to 65535, but got {self.port}.")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be 0 (no adapters) or more, but got {self.lora_rank}.")
        if self.lora_modules is not None and not self.lora_rank:
            raise ValueError("lora_modules must come with lora_rank: without a rank the server loads no adapter.")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be 1 or more, but got {self.max_model_len}.")
        if self.host not in LOOPBACK and not (self.expose and self.api_key):
            raise ValueError(
                f"host must be loopback (127.0.0.1) unless --expose and an API key are given, but got {self.host!r}: "
                "the development routes let a caller replace the weights and call methods of the worker."
            )


def command(options: ServeOptions) -> list[str]:
    """The command line that starts the server, see :mod:`trl_offpolicy.engines.launch`."""
    own = [
        "--model", options.model, "--host", options.host, "--port", str(options.port),
        "--dtype", checkpoint_dtype(options.model) if options.dtype == "auto" else options.dtype,
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
        "--served-model-name", "policy", "--worker-extension-cls", EXTENSION, "--middleware", WHOLE,
    ]  # fmt: skip
    if options.max_model_len is not None:
        own += ["--max-model-len", str(options.max_model_len)]
    if options.lora_rank:
        own += ["--enable-lora", "--max-lora-rank", str(served_rank(options.lora_rank)), "--max-loras", "2"]
        own += ["--scheduling-policy", "priority"]  # the probe of a sync does not wait behind rollouts in flight
        own += ["--lora-target-modules", *(options.lora_modules or LORA_MODULES)]
    if options.sampling_mask:
        own += ["--return-sampling-mask", "--enable-scale-out"]  # the second adds the route that tells it
    if options.api_key:
        own += ["--middleware", GUARD]  # the last one is asked first
    if machine_has_gpu():
        own += ["--weight-transfer-config", json.dumps({"backend": "nccl"})] if options.gpu_transfer else []
    else:
        own += ["--enforce-eager"]
    return [sys.executable, "-m", "trl_offpolicy.engines.launch", *own, *options.extra]


def environment(options: ServeOptions) -> dict[str, str]:
    """Variables to add to the environment of the server. The key is passed here, not on the command line."""
    chosen = {"VLLM_SERVER_DEV_MODE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    if options.lora_rank:
        chosen["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if options.api_key:
        chosen["VLLM_API_KEY"] = options.api_key
    if not machine_has_gpu():
        chosen |= {name: value for name, value in CPU_SERVER_ENVIRONMENT.items() if name not in os.environ}
    return chosen


def exposure(options: ServeOptions) -> list[tuple[str, str, str]]:
    """Rows (routes, what a caller can do, who may call) for the notice at the start."""
    where = "this machine" if options.host in LOOPBACK else f"whoever reaches {options.host}:{options.port}"
    who = f"{where}, with the API key" if options.api_key else where
    rows = [
        ("/v1/completions, /v1/models", "sample, list the model", who),
        ("/collective_rpc, /reset_prefix_cache", "load weights from a folder, CALL METHODS OF THE WORKER", who),
        ("/weight_info, /update_weight_version, /pause, /resume", "read and set the version, stop sampling", who),
        ("/health", "ask whether it is up", where),
    ]
    if options.sampling_mask:
        rows.insert(1, ("/inference/v1/generate", "sample, and read what truncated sampling kept", who))
    if options.lora_rank:
        rows.insert(2, ("/v1/load_lora_adapter", f"load adapters up to rank {options.lora_rank} from a folder", who))
    return rows


def announce(options: ServeOptions) -> None:
    """Print the command and what the server exposes, before it starts."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    settings = " ".join(f"{name}={'***' if 'KEY' in name else value}" for name, value in environment(options).items())
    console.print(f"{settings} {shlex.join(command(options))}", soft_wrap=True, highlight=False)
    table = Table(title="What this server exposes", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in ("routes", "what a caller can do", "who"):
        table.add_column(column, overflow="fold")
    for row in exposure(options):
        table.add_row(*row)
    console.print(table)
    for one in engine_findings(flag_arguments(options.extra)):
        console.print(f"{one.severity}: {one}.", soft_wrap=True, highlight=False)
    if not options.api_key:
        console.print("No API key is set: any user of this machine can call these. Set VLLM_API_KEY to ask for one.")


def require_free_port(host: str, port: int) -> None:
    """Raise if the port is taken, before minutes are spent on loading a model.

    Raises:
        ValueError: something listens on the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"port must be free, but {host}:{port} is taken ({error.strerror}). Try --port."
            ) from error


def checkpoint_dtype(model: str) -> str:
    """The dtype in which the checkpoint was saved; "auto" if only vLLM can tell (a Hub name)."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return "auto"
    config = json.loads(path.read_text())
    name = config.get("dtype") or config.get("torch_dtype")
    return str(name).removeprefix("torch.") if name else "auto"


def start(options: ServeOptions, *, beside_leftovers: bool = False) -> None:
    """Replace this process by the server, so that its pid and signals are the server's.

    Args:
        options: how to start it.
        beside_leftovers: start although processes of an earlier server are left.

    Raises:
        MissingPackageError: vLLM is not installed.
        FileNotFoundError: the model's folder does not exist.
        ValueError: something listens on the port, or processes of an earlier server are left.
    """
    require("vllm", by="a server")
    check_model("--model", options.model)
    require_free_port(options.host, options.port)
    if not beside_leftovers:
        require_no_leftovers()
    print(f"The server is process {os.getpid()}. Those that it starts are named below, and end with it.", flush=True)
    arguments = command(options)
    os.execve(arguments[0], arguments, {**os.environ, **environment(options)})
