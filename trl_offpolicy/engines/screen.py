"""What other packages print while vLLM is imported, started and synced, and what is not about the user's run.

Every message is named here, by its logger and its text. What is not named is printed as before.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from typing import Any

KNOWN = {
    # a tied head and rotary embeddings have no weights of their own in a sync, which is proved on a probe
    "vllm.model_executor.model_loader.reload.layerwise": (
        "RotaryEmbedding: Failed to load weights",
        "ParallelLMHead: Failed to load weights",
    ),
    # an engine on a CPU, as this kit starts it: eager, in this process, with one seed, without Triton
    "vllm.triton_utils.importing": ("Triton is installed",),
    "vllm.platforms.cpu": ("Triton is not installed. triton-cpu is expected", "Reset SSM cache type"),
    "vllm.config.vllm": ("Model Runner V2 requires Triton", "Inductor compilation was disabled", "Enforce eager set"),
    "vllm.v1.worker.cpu_worker": ("CPU backend doesn't allow to use `torch.set_num_threads`",),
    "vllm.engine.arg_utils": ("The global random seed is set to",),
    "vllm.model_executor.layers.indexer_topk": ("Failed to import the DeepSelect extension",),
}
"""{logger: parts of its messages}."""
DEPRECATED = r"`torch\.distributed\.reduce_op` is deprecated"
"""vLLM looks at every attribute of torch.distributed; nobody calls this one."""
LEAVES = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""Lightning's, at every batch that it moves."""
NUMA = "Warning: NUMA binding"
"""Written by C++ when vLLM's CPU worker takes the memory of its node, on machines with one node as well."""


class Unnamed(logging.Filter):
    """Lets a record pass unless it holds one of the given texts."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        super().__init__()
        self.texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a record with one of the texts."""
        message = record.getMessage()
        return not any(text in message for text in self.texts)


def quiet_vllm() -> None:
    """Leave out what is named here. Call it before vLLM is imported; a second call changes nothing."""
    for name, texts in KNOWN.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, Unnamed) for one in logger.filters):
            logger.addFilter(Unnamed(texts))
    for message in (DEPRECATED, LEAVES):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def quiet_start() -> Iterator[None]:
    """While an engine is built in this process: without the line of C++ about NUMA memory.

    Standard output has a descriptor meanwhile: vLLM asks for it, and the captured cell of a notebook has none.
    """
    with redirect_stdout(_stdout()), _quiet_numa():
        yield


@contextmanager
def _quiet_numa() -> Iterator[None]:
    import torch

    with suppress(ImportError):
        import_module("vllm._custom_ops")  # registers the operator
    operators: Any = torch.ops._C
    name = "init_cpu_memory_env"
    original = getattr(operators, name, None)
    if original is None:  # a GPU, or another version of vLLM
        yield
        return

    def bind(*args: Any) -> Any:
        with _without_lines(NUMA):
            return original(*args)

    setattr(operators, name, bind)
    try:
        yield
    finally:
        setattr(operators, name, original)


class _WithDescriptor:
    """A stream that has no file, with the descriptor of the process's standard output."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def fileno(self) -> int:
        """The descriptor that is redirected; what is written goes to the stream."""
        return 1


def _stdout() -> Any:
    """Standard output, with a descriptor."""
    try:
        sys.stdout.fileno()
    except (AttributeError, OSError):  # io.UnsupportedOperation is an OSError
        return _WithDescriptor(sys.stdout)
    return sys.stdout


@contextmanager
def _without_lines(text: str) -> Iterator[None]:
    """Leave out the lines with ``text`` of what is written to standard error, also by C++."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if text.encode() not in line:
                    os.write(2, line)


def say(text: str) -> None:
    """A line on standard error about what takes long at the start, on the main process."""
    if os.environ.get("RANK", "0") == "0":
        print(f"trl-offpolicy: {text}", file=sys.stderr, flush=True)
