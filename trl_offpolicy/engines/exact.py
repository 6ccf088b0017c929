"""``exact: true``: one line that sets everything which brings engine and trainer together, and says what cannot be had.

What it sets in an engine that is started here::

    dtype                  the trainer's                        enforce_eager           true
    enable_prefix_caching  false                                kv_cache_dtype          auto
    logprobs_mode          processed_logprobs                   quantization            none
    disable_cascade_attn   true                                 max_num_seqs            rows of the trainer's forward
    hf_overrides.head_dtype  float32, for a 16-bit trainer

and in the trainer: torch's deterministic algorithms, float32 products at full precision, and the LM head in float32.
A server is not changed: :func:`server_findings` says with which flags it must be started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_offpolicy.engines.environment import engine_has_triton

WANTED: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_cascade_attn": True,
    "kv_cache_dtype": "auto",
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "speculative_config": None,
}
"""Arguments of vLLM that do not depend on the trainer."""
_DEFAULTS = ("quantization", "speculative_config", "kv_cache_dtype")
"""Those that are vLLM's defaults: they are checked, not passed."""
_HEAD = {"head_dtype": "float32"}
LEAST_CAPABILITY = (8, 0)
"""CUDA capability from which on vLLM 0.31 has batch-invariant kernels."""
VLLM_VARIABLE = "VLLM_BATCH_INVARIANT"
"""Switches them on. They take the place of torch's own in the whole process, and none has a backward: with an engine in
the trainer's process the trainer could not learn, so only a server can have them."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What ``exact: true`` comes to.

    Args:
        arguments: arguments of ``vllm.LLM``, those that were given among them.
        missing: what this hardware, or this engine, cannot have; each a reason for a distance above the floor.
    """

    arguments: dict[str, Any]
    missing: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What is set, in a line."""
        return ", ".join(f"{name}={value}" for name, value in self.arguments.items())


def check_exact(engine: Mapping[str, Any], *, where: str = "engine.") -> None:
    """Raise for options of an engine that contradict ``exact``, whatever the trainer is.

    Args:
        engine: arguments of ``vllm.LLM`` and this kit's ``weight_rounding`` and ``norm_noise``.
        where: prefix of the names in messages.

    Raises:
        ValueError: an option contradicts; the message names it and ``exact``.
    """
    for name in ("weight_rounding", "norm_noise"):
        if engine.get(name):
            raise ValueError(_must(f"{where}{name}", "be left out", where, engine[name]))
    for name, value in WANTED.items():
        given = engine.get(name, value)
        off = value is None and given in (None, "none")
        if given != value and not off:
            wanted = "be left out" if value is None else f"be {_yaml(value)}"
            raise ValueError(_must(f"{where}{name}", wanted, where, given))
    overrides = dict(engine.get("hf_overrides") or {})
    if overrides.pop("head_dtype", "float32") != "float32" or overrides:
        raise ValueError(
            _must(f"{where}hf_overrides", "hold nothing but head_dtype: float32", where, engine["hf_overrides"])
        )


def exact_engine(
    engine: Mapping[str, Any], *, dtype: str, rows: int | None, merged: bool = False, where: str = "engine."
) -> Exact:
    """The arguments of an engine that is started in this process.

    Args:
        engine: arguments of ``vllm.LLM`` as they were given.
        dtype: data type of the trainer's weights, e.g. "float32".
        rows: rows of one forward of the trainer; None = any.
        merged: whether the engine gets the trainer's adapter merged into its weights.
        where: prefix of the names in messages.

    Raises:
        ValueError: an argument contradicts ``exact``; the message names both.

    Example:
        >>> exact_engine({"max_model_len": 256}, dtype="float32", rows=8).arguments["max_num_seqs"]
        8
        >>> exact_engine({"dtype": "bfloat16"}, dtype="float32", rows=8)
        Traceback (most recent call last):
        ValueError: engine.dtype must be float32 (the trainer's) with engine.exact: true, but got 'bfloat16'.
    """
    check_exact(engine, where=where)
    _check_variable(where)
    wanted = {name: value for name, value in WANTED.items() if name not in _DEFAULTS}
    if engine.get("dtype", dtype) != dtype:
        raise ValueError(_must(f"{where}dtype", f"be {dtype} (the trainer's)", where, engine["dtype"]))
    if engine.get("enable_return_routed_experts") or (engine.get("return_routing") and engine_has_triton()):
        absent = "be left out (vLLM reports the routing with its prefix cache on, which exact switches off)"
        raise ValueError(_must(f"{where}return_routing", absent, where, True))
    if rows is not None and engine.get("max_num_seqs", rows) != rows:
        same = f"be {rows} (the rows of the trainer's forward)"
        raise ValueError(_must(f"{where}max_num_seqs", same, where, engine["max_num_seqs"]))
    own: dict[str, Any] = {**wanted, "dtype": dtype, **({} if rows is None else {"max_num_seqs": rows})}
    if dtype != "float32":
        own["hf_overrides"] = dict(_HEAD)
    missing = list(hardware_lacks())
    # TBIK's kernels are a patch of vLLM that this variable switches on
    tree = os.environ.get("VLLM_TP_INVARIANT", "0") not in ("", "0")
    if (size := int(engine.get("tensor_parallel_size") or 1)) > 1 and not tree:
        missing.append(
            f"one worker: {where}tensor_parallel_size {size} sums in parts what the trainer sums whole "
            "(TBIK's patch of vLLM, VLLM_TP_INVARIANT=1, does not)"
        )
    if merged and dtype != "float32":
        missing.append(f"the adapter by itself: merged into {dtype} weights it is rounded, in the trainer it is not")
    return Exact(arguments={**engine, **own}, missing=tuple(missing))


def _check_variable(where: str) -> None:
    """Refuse batch-invariant kernels in this process, whoever switched them on."""
    variable = os.environ.get(VLLM_VARIABLE, "0")
    if variable.lower() not in ("", "0", "false") and has_batch_invariant_kernels():
        wanted = "be unset where the engine is in this process (its kernels have no backward; a server can have them)"
        raise ValueError(_must(VLLM_VARIABLE, wanted, where, variable))


def exact_trainer(model: nn.Module | None = None) -> tuple[str, ...]:
    """Set what torch can do in the trainer's process; returns what was set, in words.

    Args:
        model: the trainer's model; the head of a 16-bit one computes in float32 from now on. None = leave it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    said = ["deterministic algorithms", "float32 products at full precision"]
    if model is not None and float32_head(model):
        said.append("LM head in float32")
    return tuple(said)


def float32_head(model: Any) -> bool:
    """Have the LM head of a 16-bit model compute in float32; True if that changed something.

    The weights stay as they are, so that a tied embedding does too.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.weight.dtype == torch.float32:
        return False

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward  # type: ignore[method-assign, assignment]
    return True


# ------------------------------------------------------------------------------------------------------- the hardware


def has_batch_invariant_kernels() -> bool:
    """True if vLLM has kernels for this machine whose sums do not depend on the batch."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= LEAST_CAPABILITY


def hardware_lacks() -> tuple[str, ...]:
    """What cannot be had on this machine."""
    if has_batch_invariant_kernels():
        return (
            "batch-invariant kernels: sums are taken in an order that depends on the shape of the batch. vLLM's own "
            f"have no backward, so only a server can have them ({VLLM_VARIABLE}=1)",
        )
    kind = "a CPU" if not torch.cuda.is_available() else f"CUDA capability {torch.cuda.get_device_capability()}"
    return (
        f"batch-invariant kernels: vLLM has none for {kind}, so sums are taken in an order that depends on the shape "
        "of the batch, and decoding has other shapes than scoring",
    )


# --------------------------------------------------------------------------------------------------------- a server


def server_findings(settings: Mapping[str, Any], *, dtype: str, rows: int | None) -> tuple[str, ...]:
    """What a server runs with that keeps it from being exact; empty = nothing that it says.

    Args:
        settings: :func:`~trl_offpolicy.engines.effective.settings_of` of a vLLM server, or
            :func:`~trl_offpolicy.engines.effective.settings_of_sglang`.
        dtype: data type of the trainer's weights.
        rows: rows of one forward of the trainer; None = any.
    """
    wanted = {
        "dtype": dtype, "enforce_eager": True, "enable_prefix_caching": False, "logprobs_mode": "processed_logprobs",
        "quantization": None, "batch_invariant": True, "tensor_parallel_size": 1,
        **({} if rows is None else {"max_num_seqs": rows}),
    }  # fmt: skip
    found = [
        f"{name} is {_yaml(settings[name])}, not {_yaml(value)}"
        for name, value in wanted.items()
        if name in settings and settings[name] != value
    ]
    cache = settings.get("kv_cache_torch_dtype") or settings.get("kv_cache_dtype", "auto")
    if cache not in ("auto", dtype):
        found.append(f"kv_cache_dtype is {cache}, not auto")
    if "dtype" not in settings:
        found.append("the server does not say what it runs with (VLLM_SERVER_DEV_MODE=1 lets it)")
    return tuple(found)


def server_flags(*, dtype: str, rows: int | None, sglang: bool = False) -> str:
    """The flags with which an exact server is started.

    Args:
        dtype: data type of the trainer's weights.
        rows: rows of one forward of the trainer; None = any.
        sglang: for SGLang in place of vLLM.

    Example:
        >>> server_flags(dtype="float32", rows=8)
        '--dtype float32 --enforce-eager --no-enable-prefix-caching --disable-cascade-attn --max-num-seqs 8'
    """
    if sglang:
        head = "" if dtype == "float32" else " --enable-fp32-lm-head"
        size = "" if rows is None else f" --max-running-requests {rows}"
        return (
            f"--dtype {dtype} --enable-deterministic-inference --disable-radix-cache --disable-cuda-graph{size}{head}"
        )
    head = "" if dtype == "float32" else """ --hf-overrides '{"head_dtype": "float32"}'"""
    size = "" if rows is None else f" --max-num-seqs {rows}"
    return f"--dtype {dtype} --enforce-eager --no-enable-prefix-caching --disable-cascade-attn{size}{head}"


def _must(name: str, wanted: str, where: str, given: Any) -> str:
    return f"{name} must {wanted} with {where}exact: true, but got {given!r}."


def _yaml(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
