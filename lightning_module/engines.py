"""The engine of a module, built from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_module.models import zero3_gathered
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Engine, Sampling
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.engines.sampling_states import engine_findings, judge, request_findings
from trl_offpolicy.engines.server.client import Patience
from trl_offpolicy.engines.server.engine import ServerEngine

ENGINES = ("transformers", "vllm", "server")


def engine_type(spec: Any) -> str:
    """``transformers``, ``vllm``, ``server`` or, for an object, ``own``.

    Raises:
        ValueError: an unknown type.
    """
    if not isinstance(spec, str | Mapping):
        return "transformers" if isinstance(spec, TransformersEngine) else "own"
    name = spec if isinstance(spec, str) else spec.get("type")
    if name not in ENGINES:
        raise ValueError(f"engine.type must be one of {list(ENGINES)}, but got {name!r}.")
    return str(name)


def build_engine(
    spec: Any,
    *,
    model_name: str | None,
    policy: Callable[[], nn.Module],
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    run: str,
    folder: Path,
) -> Engine:
    """The engine that ``spec`` names; further keys are the engine's own arguments.

    Args:
        spec: an engine's name, ``{type: ..., **arguments}``, or an engine.
        model_name: folder or Hub name, which vLLM loads.
        policy: gives the model to sample from.
        pad_token_id: for left padding.
        eos_token_ids: end a completion.
        run: name of the run, the same on all ranks.
        folder: where a server finds the weights, unless ``spec`` says.
    """
    kind = engine_type(spec)
    if not isinstance(spec, str | Mapping):
        engine: Engine = spec
        return engine
    options = {} if isinstance(spec, str) else {key: value for key, value in spec.items() if key != "type"}
    if kind == "transformers":
        return TransformersEngine(
            policy,
            pad_token_id=pad_token_id,
            eos_token_ids=eos_token_ids,
            unsharded=lambda: zero3_gathered(policy()),
            **options,
        )
    if kind == "server":
        if isinstance(options.get("patience"), Mapping):
            options["patience"] = Patience(**options["patience"])
        return ServerEngine(**{"run": run, "folder": folder, **options})
    if model_name is None and "model" not in options:
        raise ValueError("engine.model must be given when the module's model is an object, but it is missing.")
    dtype = str(next(policy().parameters()).dtype).removeprefix("torch.")
    return ColocateEngine(**{"model": model_name, "dtype": dtype, **options})


def in_this_process(engine: Engine) -> bool:
    """True for vLLM beside the model, of which a process can build one only."""
    return isinstance(engine, ColocateEngine)


@contextmanager
def engine_numerics(device: torch.device) -> Iterator[None]:
    """Outside of the trainer's precision: an engine in this process must not inherit autocast or a default dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)


def check_sampling(
    kind: str, sampling: Sampling, *, needs_sampling: bool, arguments: Mapping[str, Any] | None = None
) -> None:
    """The engine's log-probs can be compared with the trainer's.

    Args:
        kind: of the engine.
        sampling: how it samples.
        needs_sampling: a correction reads its log-probs.
        arguments: of the engine, as given.

    Raises:
        ValueError: a correction that needs an engine of its own, or options that the trainer does not mirror.
    """
    if kind == "transformers" and needs_sampling:
        raise ValueError(
            "correction must not read the sampling policy when engine is 'transformers', which samples from the "
            "trainer itself, so that old/sampling is 1. Use correction: measure, or another engine."
        )
    if kind != "transformers":
        found = request_findings({"generation_kwargs": dict(sampling.extra)}, device_type=_device_type())
        judge(found + engine_findings(arguments or {}), needs_sampling=needs_sampling)


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
