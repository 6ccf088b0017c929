"""Contexts in which a model computes something else than its configuration says: architecture, precision, caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ROUND = 127.0
FP8_MAX = 448.0

# ------------------------------------------------------------------------------------------------------- architecture


@contextmanager
def attribute_set(modules: Sequence[Any], name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute of some modules changed."""
    before = [getattr(module, name) for module in modules]
    for module, value in zip(modules, before, strict=True):
        setattr(module, name, change(value))
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            setattr(module, name, value)


def modules_with(model: Any, name: str) -> list[Any]:
    """Modules that have an attribute, in order."""
    return [module for module in model.modules() if hasattr(module, name) and isinstance(module, nn.Module)]


def rope(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Other inverse frequencies of the rotary embedding."""
    return attribute_set(modules_with(model, "inv_freq"), "inv_freq", change)


def rope_theta(model: Any, factor: float) -> Any:
    """The base of the rotary embedding times ``factor``: theta^(-2i/d)."""

    def change(frequencies: Tensor) -> Tensor:
        share = torch.arange(len(frequencies)) / len(frequencies)
        return frequencies * factor**-share

    return rope(model, change)


def norm_eps(model: Any, value: float) -> Any:
    """Another epsilon in every RMS norm."""
    return attribute_set(modules_with(model, "variance_epsilon"), "variance_epsilon", lambda _old: value)


def attention_scale(model: Any, factor: float) -> Any:
    """Attention logits times ``factor``."""
    return attribute_set(modules_with(model, "scaling"), "scaling", lambda old: old * factor)


def activation(model: Any, function: nn.Module) -> Any:
    """Another non-linearity in the MLPs."""
    return attribute_set(modules_with(model, "act_fn"), "act_fn", lambda _old: function)


@contextmanager
def registered(modules: Sequence[Any], hook: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """A forward hook on some modules, taken off at the end."""
    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def hooked(modules: Sequence[Any], change: Callable[[Tensor], Tensor]) -> Any:
    """The outputs of some modules changed."""

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return registered(modules, hook)


def logits_changed(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The output of the head changed."""
    return hooked([model.lm_head], change)


def softcapped(values: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), as Gemma 2 does."""
    return cap * torch.tanh(values / cap)


# ---------------------------------------------------------------------------------------------------------- attention


@contextmanager
def attention(replacement: Callable[..., Any]) -> Iterator[None]:
    """``replacement(original, module, query, key, value, mask, scaling=..., **kw)`` in place of SDPA attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

    original = table["sdpa"]

    def faulty(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Any:
        return replacement(original, module, query, key, value, mask, **others)

    table["sdpa"] = faulty
    try:
        yield
    finally:
        table["sdpa"] = original


Layers = Callable[[int], bool]
"""Number of a layer -> whether it is concerned."""


def every_layer(_number: int) -> bool:
    return True


def kv_rounded(change: Callable[[Tensor], Tensor], layers: Layers = every_layer) -> Any:
    """Keys and values as a cache of another format holds them."""

    def replacement(original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        if not layers(module.layer_idx):
            return original(module, query, key, value, mask, **kw)
        return original(module, query, change(key), change(value), mask, **kw)

    return attention(replacement)


def attention_logits(
    *, cap: float | None = None, window: int | None = None, sink: bool = False, tiled: bool = False,
    layers: Layers = every_layer,
) -> Any:  # fmt: skip
    """Attention computed by hand.

    Args:
        cap: of the logits.
        window: tokens that a token sees.
        sink: one more logit, 0, takes its part of the attention.
        tiled: query heads go to the heads of keys in the order 0 1 0 1 in place of 0 0 1 1.
        layers: the others compute as they should.
    """

    def replacement(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kw: Any
    ) -> Any:
        if not layers(module.layer_idx):
            return original(module, query, key, value, mask, **kw)
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat(1, groups, 1, 1) if tiled else x.repeat_interleave(groups, 1) for x in (key, value))
        logits = query @ key.transpose(2, 3) * (kw.get("scaling") or query.shape[-1] ** -0.5)
        if cap is not None:
            logits = softcapped(logits, cap)
        logits = _masked(logits, mask, window)
        if sink:
            logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], -1)
        shares = logits.softmax(-1)[..., : key.shape[2]]
        return (shares @ value).transpose(1, 2).contiguous(), None

    return attention(replacement)


def _masked(logits: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """Attention logits (B, H, Q, K) without the future, what lies before the window, and what ``mask`` hides."""
    queries, keys = logits.shape[-2:]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    lowest = torch.finfo(logits.dtype).min
    logits = logits.masked_fill(~allowed, lowest)
    if mask is None:
        return logits
    given = mask[..., :keys]
    return logits.masked_fill(~given, lowest) if given.dtype == torch.bool else logits + given


# ---------------------------------------------------------------------------------------------------------- precision


def fp8(values: Tensor) -> Tensor:
    """Rounded to e4m3 with one scale per tensor."""
    scale = values.abs().amax().clamp(min=1e-12) / FP8_MAX
    return ((values / scale).to(torch.float8_e4m3fn).to(values.dtype)) * scale


def fp8_unscaled(values: Tensor) -> Tensor:
    """Rounded to e4m3 as it is, as vLLM's KV cache is without calibrated scales."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(values.dtype)


def int8(values: Tensor) -> Tensor:
    """Symmetric 8-bit integers, one scale per row (last dimension)."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / ROUND
    return (values / scale).round() * scale


def int4_groups(weight: Tensor, group: int = 32) -> Tensor:
    """4-bit integers with a scale and an offset per ``group`` columns, as AWQ and GPTQ store weights."""
    parts = weight.unflatten(-1, (-1, group))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-12)
    return (((parts - low) / scale).round() * scale + low).flatten(-2)


def bf16(values: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    return values.to(torch.bfloat16).to(values.dtype)


@contextmanager
def weights_rounded(model: Any, change: Callable[[Tensor], Tensor], *, head: bool = False) -> Iterator[None]:
    """Linear weights changed; the head only if ``head``."""
    modules = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and (head or "lm_head" not in name)]
    with swapped([(module, change(module.weight.data)) for module in modules]):
        yield


@contextmanager
def swapped(pairs: Sequence[tuple[Any, Tensor]]) -> Iterator[None]:
    """Modules with other weight tensors; a tied partner keeps its own."""
    before = [module.weight for module, _ in pairs]
    for module, weight in pairs:
        module.weight = nn.Parameter(weight, requires_grad=False)
    try:
        yield
    finally:
        for (module, _), weight in zip(pairs, before, strict=True):
            module.weight = weight


@contextmanager
def inputs_rounded(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inputs of linear layers changed, as engines with quantised activations do."""
    hooks = [
        module.register_forward_pre_hook(lambda _module, inputs: (change(inputs[0]), *inputs[1:]))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in name
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@contextmanager
def cast(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """The whole model in another dtype, with its kernels; the exact weights come back at the end."""
    parameters = [(p, p.data) for p in model.parameters()]
    for tensor, data in parameters:
        tensor.data = data.to(dtype)
    try:
        yield
    finally:
        for tensor, data in parameters:
            tensor.data = data


# ------------------------------------------------------------------------------------------------------------ dropout


@contextmanager
def attention_dropout(model: Any, share: float) -> Iterator[None]:
    """Dropout on attention probabilities, as in training mode."""
    modules = modules_with(model, "attention_dropout")
    with attribute_set(modules, "attention_dropout", lambda _old: share):
        model.train()
        try:
            yield
        finally:
            model.eval()


def mlp_dropout(model: Any, share: float) -> Any:
    """Dropout behind every MLP."""
    modules = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    return hooked(modules, lambda values: nn.functional.dropout(values, share))


@contextmanager
def adapter_dropout(weights: Any, share: float) -> Iterator[None]:
    """LoRA dropout: the adapter's part of each linear layer sees a thinned input."""
    last = weights.updates.versions[-1]
    modules = dict(weights.model.named_modules())
    with ExitStack() as stack:
        for name, change in last.items():
            module = modules[name.removesuffix(".weight")]
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                whole = change[0] @ change[1] if isinstance(change, tuple) else change
                handle = module.register_forward_hook(_thinned(whole, share))
                stack.callback(handle.remove)
        yield


def _thinned(change: Tensor, share: float) -> Any:
    def hook(_module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        (x,) = inputs
        return output + (nn.functional.dropout(x, share) - x) @ change.T

    return hook
