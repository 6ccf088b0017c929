"""What an engine really runs with, in words that a model of transformers can be described in too.

Declarations say what was asked for. These are the settings that resulted: overrides, defaults of the model's folder and
choices of vLLM included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROPE_POSITIONS = (1, 3, 10, 31, 100, 310)
"""Positions at which the angles of the rotary embedding are compared."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a side says of itself; None or an absent key = it does not say.

    Args:
        source: who answered, e.g. "vLLM in this process".
        settings: dtype, kv_cache_dtype, logprobs_mode, tensor_parallel_size, ...: :func:`settings_of`.
        defaults: sampling options that requests get if they leave them out (``generation_config``).
        model_config: the configuration of the model as it holds it, ``hf_overrides`` included.
        modules: numbers read from its modules: epsilons of norms, scales of attention, angles of the rotary embedding.
        tokenizer: what :func:`tokenizer_facts` returns.
    """

    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] | None = None
    model_config: Mapping[str, Any] | None = None
    modules: Mapping[str, Any] | None = None
    tokenizer: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the numbers of single modules."""
        return {name: value for name, value in asdict(self).items() if name != "modules" and value is not None}


# ---------------------------------------------------------------------------------------------- vLLM's configuration

_PLACES = {
    "dtype": "model_config",
    "quantization": "model_config",
    "logprobs_mode": "model_config",
    "max_model_len": "model_config",
    "generation_config": "model_config",
    "logits_processors": "model_config",
    "cache_dtype": "cache_config",
    "enable_prefix_caching": "cache_config",
    "enable_chunked_prefill": "scheduler_config",
    "max_num_seqs": "scheduler_config",
    "max_num_batched_tokens": "scheduler_config",
    "enforce_eager": "model_config",
    "tensor_parallel_size": "parallel_config",
    "pipeline_parallel_size": "parallel_config",
    "data_parallel_size": "parallel_config",
    "enable_expert_parallel": "parallel_config",
    "decode_context_parallel_size": "parallel_config",
}
INVARIANT_VARIABLES = {"VLLM_BATCH_INVARIANT": "batch_invariant", "VLLM_TP_INVARIANT": "tp_invariant"}
"""vLLM's batch-invariant kernels, and TBIK's (arXiv:2511.17826), which are equal at every tensor parallel size."""
_OTHER_NAMES = {"cache_dtype": "kv_cache_dtype"}


def settings_of(config: Any, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ``VllmConfig`` that decide the log-probs.

    Args:
        config: the object, or the mapping that a server's ``/server_info`` returns.
        environment: vLLM's variables.

    Example:
        >>> settings_of({"model_config": {"dtype": "torch.bfloat16"}}, {"VLLM_BATCH_INVARIANT": 0})
        {'dtype': 'bfloat16', 'batch_invariant': False}
    """
    found = {}
    for name, place in _PLACES.items():
        section = _item(config, place)
        if section is not None and (value := _item(section, name, default=_ABSENT)) is not _ABSENT:
            found[_OTHER_NAMES.get(name, name)] = plain_value(value)
    method = _item(_item(config, "speculative_config") or {}, "method")
    found |= {"speculative": str(method)} if method is not None else {}
    for variable, name in INVARIANT_VARIABLES.items():
        if (value := environment.get(variable)) is not None:
            found[name] = bool(int(value))
    return found


_SGLANG = {
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "max_running_requests": "max_num_seqs",
    "context_length": "max_model_len",
    "attention_backend": "attention_backend",
    "speculative_algorithm": "speculative",
    "enable_deterministic_inference": "batch_invariant",
    "disable_cuda_graph": "enforce_eager",
    "rl_on_policy_target": "rl_on_policy_target",
}


def settings_of_sglang(info: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings of an SGLang server, from the arguments that its ``/get_server_info`` returns.

    ``batch_invariant`` is its deterministic mode, which ``rl_on_policy_target`` switches on too.

    Example:
        >>> settings_of_sglang({"tp_size": 2, "enable_deterministic_inference": True, "disable_radix_cache": True})
        {'server': 'SGLang', 'tensor_parallel_size': 2, 'batch_invariant': True, 'enable_prefix_caching': False}
    """
    found = {name: plain_value(info[own]) for own, name in _SGLANG.items() if info.get(own) is not None}
    if info.get("rl_on_policy_target"):
        found["batch_invariant"] = True
    if "disable_radix_cache" in info:
        found["enable_prefix_caching"] = not info["disable_radix_cache"]
    if "ep_size" in info:
        found["enable_expert_parallel"] = int(info["ep_size"] or 1) > 1
    return {"server": "SGLang", **found}


_ABSENT = object()


def _item(holder: Any, name: str, default: Any = None) -> Any:
    return holder.get(name, default) if isinstance(holder, Mapping) else getattr(holder, name, default)


def plain_value(value: Any) -> Any:
    """A JSON value; dtypes without "torch."."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return str(value).removeprefix("torch.")


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names.

    Example:
        >>> flat_config({"rope_parameters": {"rope_theta": 1e4}, "vocab_size": 9})
        {'rope_parameters.rope_theta': 10000.0, 'vocab_size': 9}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat_config(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def folder_defaults(folder: str | Path) -> dict[str, Any] | None:
    """Sampling options in the ``generation_config.json`` of a model's folder; None if there is none to be read.

    A vLLM server applies them to requests that leave them out (``--generation-config auto``, its default).
    """
    path = Path(folder) / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None if not Path(folder).is_dir() else {}
    return {name: found[name] for name in SAMPLING_DEFAULTS if found.get(name) is not None}


SAMPLING_DEFAULTS = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
}
"""Options that a model's folder can set, and their values without effect."""


# ------------------------------------------------------------------------------------------- models of transformers


def facts_of_model(model: nn.Module, *, source: str = "transformers in this process") -> EngineFacts:
    """What a model of transformers (or PEFT around one) says of itself.

    Args:
        model: the model.
        source: see :class:`EngineFacts`.
    """
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return EngineFacts(
        source=source,
        settings={
            "dtype": plain_value(next(base.parameters()).dtype),
            "attention_backend": str(getattr(text, "_attn_implementation", None)),
            "max_model_len": getattr(text, "max_position_embeddings", None),
        },
        model_config=None if text is None else dict(text.to_dict()),
        modules=module_facts(base),
    )


def module_facts(model: Any) -> dict[str, Any]:
    """Numbers of the modules that decide the log-probs, by name; as vLLM's worker says them of its own model."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    norms, scales, windows, caps, ropes = {}, {}, {}, {}, {}
    for path, module in model.named_modules():
        name = path.replace(".base_layer", "")
        if (epsilon := getattr(module, "variance_epsilon", getattr(module, "eps", None))) is not None:
            norms[name] = float(epsilon)
        if isinstance(getattr(module, "scaling", None), float) and hasattr(module, "o_proj"):
            scales[name] = float(module.scaling)
            windows[name] = _window(module, config)
            caps[name] = float(getattr(config, "attn_logit_softcapping", None) or 0.0)
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            ropes[id(module)] = module
    (rope,) = ropes.values() if len(ropes) == 1 else (None,)
    return {
        "norm_eps": norms,
        "attention_scale": scales,
        "attention_window": windows,
        "attention_soft_cap": caps,
        "logits": _logits(model, config),
        "rope": None if rope is None else _rope(rope),
    }


def _window(module: Any, config: Any) -> int | None:
    if hasattr(module, "sliding_window"):
        window: int | None = module.sliding_window
        return window
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def _logits(model: Any, config: Any) -> dict[str, Any]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    divisor = getattr(config, "logits_scaling", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    found = {
        "scale": 1.0 / float(divisor) if divisor else float(scale),
        "soft_cap": float(getattr(config, "final_logit_softcapping", None) or 0.0),
    }
    weight = getattr(getattr(head, "base_layer", head), "weight", None)
    return found if weight is None else {**found, "tokens": int(weight.shape[0])}


def _rope(module: Any) -> dict[str, Any]:
    """Cosines and sines as vLLM keeps them: first all cosines, then all sines."""
    frequencies: Tensor = module.inv_freq.detach().to("cpu", torch.float64)
    scale = float(getattr(module, "attention_scaling", 1.0) or 1.0)
    angles = torch.outer(torch.tensor(ROPE_POSITIONS, dtype=torch.float64), frequencies)
    return {"dtype": "float32", "angles": (torch.cat([angles.cos(), angles.sin()], 1) * scale).tolist()}


# --------------------------------------------------------------------------------------------------------- tokenizer

TEST_TEXT = "Hello, world!  12345\n\tπ ≈ 3.14 – naïve 東京 🙂 <think>x</think>"
TEST_CHAT = ({"role": "user", "content": "What is 17 + 26?"},)


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """How a tokenizer encodes a test text and renders a test chat, as token ids.

    Returns:
        ``text`` with special tokens, ``chat`` (None without a template), ``eos`` and ``size``.
    """
    chat = None
    if getattr(tokenizer, "chat_template", None):
        rendered = tokenizer.apply_chat_template(list(TEST_CHAT), add_generation_prompt=True, tokenize=False)
        chat = list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    text = list(tokenizer(TEST_TEXT)["input_ids"])
    return {"text": text, "chat": chat, "eos": tokenizer.eos_token_id, "size": len(tokenizer)}
