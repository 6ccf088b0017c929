"""Contexts in which a model computes as if its configuration, its cache or its adapter were another one.

Each takes a causal LM of transformers and puts everything back at the end. What a model does not have (an adapter,
RoPE, an untied head) offers no context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.diagnosis.attribution.contexts.attention import (
    attention_cap,
    can_interleave,
    interleaved_rope,
    replaceable,
    rounded_attention,
    shown_attention,
    tf32_attention,
)
from trl_offpolicy.diagnosis.attribution.contexts.parts import ADAPTER_PART, holding, type_of
from trl_offpolicy.diagnosis.attribution.contexts.precision import (
    SIGNIFICANT_BITS,
    Inside,
    changed_inputs,
    changed_outputs,
    round_significant,
    rounded_outputs,
    routers,
    scaled_fp8,
    scaled_int8,
)
from trl_offpolicy.engines.rounding import parse_rounding

# --------------------------------------------------------------------------------------------- position and attention


@contextmanager
def rope_base(model: Any, factor: float) -> Iterator[None]:
    """RoPE with ``factor`` times the base: the frequency i of n is base^(-i / n)."""
    with ExitStack() as stack:
        for module in _rope_modules(model):
            frequencies = module.inv_freq
            steps = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
            stack.enter_context(_replaced(module, "inv_freq", frequencies * factor**-steps))
        yield


@contextmanager
def rope_scaling(model: Any, factor: float) -> Iterator[None]:
    """RoPE with all positions divided by ``factor`` ("linear" scaling)."""
    with ExitStack() as stack:
        for module in _rope_modules(model):
            stack.enter_context(_replaced(module, "inv_freq", module.inv_freq / factor))
        yield


@contextmanager
def norm_eps(model: Any, value: float) -> Iterator[None]:
    """Another epsilon in every norm."""
    with ExitStack() as stack:
        for module, name in _norms(model):
            stack.enter_context(_replaced(module, name, value))
        yield


@contextmanager
def attention_scale(model: Any, factor: float) -> Iterator[None]:
    """Attention scores times ``factor``."""
    with ExitStack() as stack:
        for module in _attentions(model):
            stack.enter_context(_replaced(module, "scaling", module.scaling * factor))
        yield


@contextmanager
def embedding_scale(model: Any, factor: float) -> Iterator[None]:
    """Embeddings of the input times ``factor``, as some models multiply them."""
    with changed_outputs([model.get_input_embeddings()], lambda _inputs, output: output * factor):
        yield


@contextmanager
def experts_per_token(model: Any, change: int) -> Iterator[None]:
    """More or fewer experts per token."""
    with ExitStack() as stack:
        for module in _choosers(model):
            stack.enter_context(_replaced(module, "top_k", module.top_k + change))
        yield


def _choosers(model: Any) -> list[Any]:
    """Modules that choose experts and know how many."""
    return [module for module in model.modules() if isinstance(vars(module).get("top_k"), int)]


def _rope_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]


def _norms(model: Any) -> list[tuple[Any, str]]:
    found = []
    for module in model.modules():
        if "Norm" in type(module).__name__:
            found += [
                (module, name) for name in ("variance_epsilon", "eps") if isinstance(vars(module).get(name), float)
            ]
    return found


def _attentions(model: Any) -> list[Any]:
    return [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__ and isinstance(vars(module).get("scaling"), float)
    ]


# -------------------------------------------------------------------------------------------------- cache and weights


@contextmanager
def rounded_cache(kind: str) -> Iterator[None]:
    """Keys and values pass through a format: "fp8" is e4m3 of scale 1, "int8" has a scale for each head."""
    from transformers.cache_utils import Cache

    plain = Cache.update

    def update(cache: Any, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:
        return plain(cache, _STORED[kind](keys), _STORED[kind](values), *args, **options)

    with _replaced(Cache, "update", update):
        yield


_STORED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda values: values.to(torch.float8_e4m3fn).to(values.dtype),
    "int8": scaled_int8,
    "bf16": lambda values: values.to(torch.bfloat16).to(values.dtype),
    "fp8 (e5m2)": lambda values: values.to(torch.float8_e5m2).to(values.dtype),
    "fp8 (scaled)": lambda values: scaled_fp8(values, whole=True),
}


@contextmanager
def rounded_head(model: Any, kind: str, *, inputs: bool = True, logits: bool = True) -> Iterator[None]:
    """The output head alone, with weights rounded as ``kind``; "bf16" and "fp16" also round its input and logits."""
    head = model.get_output_embeddings()
    with ExitStack() as stack:
        bits = SIGNIFICANT_BITS.get(kind)
        if bits is not None and inputs:
            stack.enter_context(changed_inputs([head], partial(round_significant, bits=bits)))
        if bits is not None and logits:
            stack.enter_context(rounded_outputs([head], bits))
        stack.enter_context(_head_weight(model, parse_rounding(kind)(head.weight.data)))
        yield


@contextmanager
def tied_head(model: Any) -> Iterator[None]:
    """The input embeddings as the output head."""
    with _head_weight(model, model.get_input_embeddings().weight.data):
        yield


@contextmanager
def _head_weight(model: Any, weight: Tensor) -> Iterator[None]:
    """Another weight in the head only: a tied head shares its parameter with the embeddings, which stay as they are."""
    head = model.get_output_embeddings()
    own = head.weight
    head.weight = nn.Parameter(weight, requires_grad=False)
    try:
        yield
    finally:
        head.weight = own


@contextmanager
def adapter_scale(model: Any, factor: float, only: str | None = None) -> Iterator[None]:
    """LoRA with ``factor`` times its scaling alpha / r, in one kind of layer or in all; 0 is no adapter."""
    layers = [layer for kind, layer in _lora_layers(model) if only in (None, kind)]
    before = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling = {name: value * factor for name, value in layer.scaling.items()}
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling = scaling


def _lora_layers(model: Any) -> list[tuple[str, Any]]:
    """The layers that an adapter changes, each with its kind."""
    return [
        (type_of(name), module)
        for name, module in model.named_modules()
        if hasattr(module, "lora_B") and isinstance(module.scaling, dict)
    ]


def adapter_parts(model: Any) -> dict[str, Inside]:
    """The adapter off in one kind of layer each, where it changes several kinds."""
    kinds = list(dict.fromkeys(kind for kind, _ in _lora_layers(model)))
    if len(kinds) < 2:
        return {}
    return {f"wrong_adapter:{ADAPTER_PART}{kind}": partial(adapter_scale, model, 0.0, kind) for kind in kinds}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _all_replaced(owners: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """One attribute of several modules at another value."""
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(_replaced(owner, name, value))
        yield


# ------------------------------------------------------------------------------------------------------ what to test


def adapter_changes(model: Any) -> dict[str, Inside]:
    """The adapter off, at half and at twice its scale; empty without an adapter."""
    if not _lora_layers(model):
        return {}
    return {
        "wrong_adapter:no adapter": partial(adapter_scale, model, 0.0),
        "wrong_adapter:adapter at half its scale": partial(adapter_scale, model, 0.5),
        "wrong_adapter:adapter at twice its scale": partial(adapter_scale, model, 2.0),
    }


def cache_changes(model: Any) -> dict[str, Inside]:
    """Storage formats of the KV cache, and attention in 16 bits and, of a float32 model, in TF32."""
    found: dict[str, Inside] = {f"precision:{kind} KV cache": partial(rounded_cache, kind) for kind in _STORED}
    if replaceable(model):
        if model.dtype == torch.float32:  # 16 bits have nothing that TF32 cuts off
            found["precision:attention in TF32"] = partial(tf32_attention, model)
        to_bf16 = partial(round_significant, bits=SIGNIFICANT_BITS["bf16"])
        found["precision:attention in bf16"] = partial(rounded_attention, model, to_bf16)
        found["precision:attention scores in bf16"] = partial(shown_attention, model, scores=to_bf16)
        found["precision:attention shares in bf16"] = partial(shown_attention, model, shares=to_bf16)
        found["precision:attention scores and shares in bf16"] = partial(
            shown_attention, model, scores=to_bf16, shares=to_bf16
        )
    return found


def head_changes(model: Any) -> dict[str, Inside]:
    """The head in less precision, or tied to the embeddings where it is not."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or "weight" not in head._parameters:  # an adapter of the head wraps it
        return {}
    found: dict[str, Inside] = {
        f"precision:{kind} output head": partial(rounded_head, model, kind) for kind in ("bf16", "fp16", "int8", "fp8")
    }
    for kind in ("bf16", "fp16"):
        found[f"precision:{kind} weights of the output head"] = partial(
            rounded_head, model, kind, inputs=False, logits=False
        )
        found[f"precision:{kind} output head with float32 logits"] = partial(rounded_head, model, kind, logits=False)
    if head.weight is not embeddings.weight and head.weight.shape == embeddings.weight.shape:
        found["other_weights:output head tied to the embeddings"] = partial(tied_head, model)
    return found


@contextmanager
def without_norms(model: Any) -> Iterator[None]:
    """Queries and keys without their norms."""
    with changed_outputs(_query_norms(model), lambda inputs, _output: inputs[0]):
        yield


def _query_norms(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(("q_norm", "k_norm"))]


@contextmanager
def without_biases(model: Any) -> Iterator[None]:
    """Linear layers without their biases."""
    with _all_replaced(_biased(model), "bias", None):
        yield


def _biased(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None]


@contextmanager
def activation(model: Any, name: str) -> Iterator[None]:
    """Another activation function in the feed-forward layers."""
    from transformers.activations import ACT2FN

    with _all_replaced(_activated(model), "act_fn", ACT2FN[name]):
        yield


def _activated(model: Any) -> list[Any]:
    return [module for module in model.modules() if callable(getattr(module, "act_fn", None))]


def _capped_attentions(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(vars(m).get("attn_logit_softcapping"), float | int)]


@contextmanager
def norm_offset(model: Any, offset: float) -> Iterator[None]:
    """Weights of the norms plus ``offset``: Gemma's norms multiply by 1 + weight, those of others by weight."""
    norms = {id(getattr(module, "weight", None)) for module, _ in _norms(model)}
    moved = {name: weight.data + offset for name, weight in model.named_parameters() if id(weight) in norms}
    with holding(model, moved):
        yield


@contextmanager
def without_output(modules: Sequence[Any]) -> Iterator[None]:
    """Modules whose output is 0: what they add is missing."""
    with changed_outputs(modules, lambda _inputs, output: torch.zeros_like(output)):
        yield


def _shared_experts(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith((".shared_expert", ".shared_experts"))]


def part_changes(model: Any) -> dict[str, Inside]:
    """Parts that another implementation may leave out or take for another: norms, biases, the activation function."""
    found: dict[str, Inside] = {}
    if _query_norms(model):
        found["model_config:no norms of queries and keys"] = partial(without_norms, model)
    if capped := _capped_attentions(model):  # Gemma 2
        found["model_config:no soft cap on attention scores"] = partial(
            _all_replaced, capped, "attn_logit_softcapping", None
        )
    if sinks := {name: p for name, p in model.named_parameters() if name.endswith(".sinks")}:
        least = {name: torch.full_like(p.data, torch.finfo(p.dtype).min / 2) for name, p in sinks.items()}
        found["model_config:no attention sinks"] = partial(holding, model, least)
    if _biased(model):
        found["model_config:no biases of linear layers"] = partial(without_biases, model)
    if _norms(model):
        for offset in (1.0, -1.0):
            found[f"model_config:weights of the norms {offset:+g} (Gemma's norms)"] = partial(
                norm_offset, model, offset
            )
    if _activated(model):
        for name in ("gelu", "gelu_pytorch_tanh", "silu", "relu", "quick_gelu"):
            found[f"model_config:activation {name}"] = partial(activation, model, name)
    return found


def expert_changes(model: Any) -> dict[str, Inside]:
    """One expert more or less per token; empty for a dense model."""
    count = min((module.top_k for module in _choosers(model)), default=0)
    most = min((len(module.weight) for module in routers(model) if hasattr(module, "weight")), default=0)
    found: dict[str, Inside] = {}
    if count > 1:
        found[f"model_config:{count - 1} experts per token for {count}"] = partial(experts_per_token, model, -1)
    if 0 < count < most:
        found[f"model_config:{count + 1} experts per token for {count}"] = partial(experts_per_token, model, 1)
    if shared := _shared_experts(model):
        found["model_config:no shared expert"] = partial(without_output, shared)
    for normed in {bool(module.norm_topk_prob) for module in _normalising(model)}:
        words = "add up to 1" if not normed else "do not add up to 1"
        found[f"model_config:weights of the experts {words} (norm_topk_prob)"] = partial(normalised, model, not normed)
    return found


@contextmanager
def normalised(model: Any, on: bool) -> Iterator[None]:
    """Weights of the chosen experts that add up to 1, or those of the softmax over all."""
    with _all_replaced(_normalising(model), "norm_topk_prob", on):
        yield


def _normalising(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(vars(module).get("norm_topk_prob"), bool)]


def _scaled_experts(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(vars(module).get("routed_scaling_factor"), float)]


@contextmanager
def expert_scale(model: Any, factor: float) -> Iterator[None]:
    """What the routed experts add, times ``factor``."""
    with ExitStack() as stack:
        for module in _scaled_experts(model):
            own = module.routed_scaling_factor
            stack.enter_context(_replaced(module, "routed_scaling_factor", own * factor))
        yield


@dataclass(frozen=True)
class Setting:
    """A setting of one number.

    Args:
        context: makes the context of a value.
        values: tried first.
        text: a value in words.
        neutral: the value of the model itself; None = it has none.
    """

    context: Callable[[float], AbstractContextManager[Any]]
    values: tuple[float, ...]
    text: Callable[[float], str]
    neutral: float | None = 1.0


def settings(model: Any) -> dict[str, Setting]:
    """Settings of the configuration that are one number each, on a log scale: RoPE, norms, attention, embeddings."""
    found: dict[str, Setting] = {}
    if _rope_modules(model):
        base = _rope_theta(model)
        found["rope base"] = Setting(
            partial(rope_base, model), (0.01, 0.1, 0.5, 2.0, 10.0, 100.0),
            lambda factor: f"RoPE base {base * factor:.3g} for {base:.3g}" if base else f"RoPE base times {factor:.3g}",
        )  # fmt: skip
        found["rope scaling"] = Setting(
            partial(rope_scaling, model), (0.25, 0.5, 0.75, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 8.0),
            lambda factor: f"RoPE positions divided by {factor:.3g}",
        )  # fmt: skip
    if norms := _norms(model):
        now = float(getattr(*norms[0]))
        found["norm epsilon"] = Setting(
            lambda factor: norm_eps(model, now * factor), (0.1, 10.0, 100.0, 1e3, 1e4),
            lambda factor: f"norm epsilon {now * factor:.2g} for {now:.2g}",
        )  # fmt: skip
    if _attentions(model):
        found["attention scale"] = Setting(
            partial(attention_scale, model), (0.5, 0.8, 1.25, 2.0),
            lambda factor: f"attention scores times {factor:.3g}",
        )  # fmt: skip
    if replaceable(model):
        found["attention cap"] = Setting(
            partial(attention_cap, model), (1.0, 5.0, 20.0, 50.0),
            lambda cap: f"attention scores soft-capped at {cap:.3g}", neutral=None,
        )  # fmt: skip
    if scaled := _scaled_experts(model):
        own = scaled[0].routed_scaling_factor
        found["expert scale"] = Setting(
            partial(expert_scale, model), (1 / own, 0.5, 2.0) if own not in (0.0, 1.0) else (0.5, 2.0, 2.5),
            lambda factor: f"routed experts times {own * factor:.3g} for {own:.3g} (routed_scaling_factor)",
        )  # fmt: skip
    root = float(model.get_input_embeddings().weight.shape[1]) ** 0.5  # Gemma multiplies by this
    found["embedding scale"] = Setting(
        partial(embedding_scale, model),
        (0.5, 0.9, 1.1, 2.0, root),
        # Norms take out the scale of the residual stream: the same as layers that add 1 / factor times as much.
        lambda factor: f"embeddings times {factor:.3g} (or what layers add times {1 / factor:.3g})",
    )
    return found


@contextmanager
def rope_type(model: Any, kind: str, factor: float) -> Iterator[None]:
    """RoPE of transformers' type ``kind`` ("llama3", "yarn"), with a factor and its usual other options."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(model.config)
    longest = int(getattr(config, "max_position_embeddings", 0) or 2048)
    now = dict(getattr(config, "rope_parameters", None) or {})
    options: dict[str, Any] = {"original_max_position_embeddings": max(1, int(longest / factor))}
    if kind == "llama3":
        options |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config.rope_parameters = {**now, "rope_type": kind, "factor": factor, **options}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, None)
    with ExitStack() as stack:
        for module in _rope_modules(model):
            if module.inv_freq.shape == frequencies.shape:
                stack.enter_context(_replaced(module, "inv_freq", frequencies.to(module.inv_freq)))
                stack.enter_context(_replaced(module, "attention_scaling", scaling))
        yield


@contextmanager
def rope_rounded(model: Any, *, tables: bool = False) -> Iterator[None]:
    """Frequencies of RoPE in bf16, as a model that was cast as a whole holds them; ``tables``: their values, too."""
    with ExitStack() as stack:
        for module in _rope_modules(model):
            frequencies = module.inv_freq.to(torch.bfloat16).to(module.inv_freq.dtype)
            stack.enter_context(_replaced(module, "inv_freq", frequencies))
        if tables:
            stack.enter_context(rounded_outputs(_rope_modules(model), SIGNIFICANT_BITS["bf16"]))
        yield


def position_changes(model: Any) -> dict[str, Inside]:
    """Other kinds of RoPE."""
    found: dict[str, Inside] = {}
    if _rope_modules(model):
        found["precision:RoPE frequencies in bf16"] = partial(rope_rounded, model)
        found["precision:RoPE frequencies, cosines and sines in bf16"] = partial(rope_rounded, model, tables=True)
        for kind, factor in (("llama3", 8.0), ("llama3", 32.0), ("yarn", 2.0), ("yarn", 4.0)):
            if _has_rope_types(model):
                found[f"model_config:RoPE of type {kind}, factor {factor:g}"] = partial(rope_type, model, kind, factor)
    if can_interleave(model):
        found["model_config:RoPE on neighbours in place of halves"] = partial(interleaved_rope, model)
    return found


def _has_rope_types(model: Any) -> bool:
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return parameters.get("rope_type") == "default"


def _rope_theta(model: Any) -> float | None:
    config = model.config
    parameters = getattr(config, "rope_parameters", None) or {}
    value = getattr(config, "rope_theta", None) or parameters.get("rope_theta")
    return float(value) if isinstance(value, int | float) else None
