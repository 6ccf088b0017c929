"""A simulated compressed KV cache: keys and values are evicted or rounded, in a model of transformers on any machine.

Engines save memory by forgetting the keys and values of old tokens, or by holding them in 8 bits. What they sample
from is then the policy in a poorer context, not the trainer's. Here a model's own attention computes with what such a
cache would hold. Nothing is saved by it: it makes the mismatch visible, and lets the learner compute the same.

The rule of eviction depends on places alone (attention sinks and a window: Xiao et al. 2023, StreamingLLM,
arXiv:2309.17453; positions are not renumbered within the cache, as that paper does). A key that is evicted stays so.
So the rule is the record of what each token saw: a forward over a whole sequence repeats it exactly (Zhu et al. 2026,
Shadow Mask Distillation, arXiv:2605.06850, which records a retention mask for each position).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trl_offpolicy.checks import check_number, check_whole
from trl_offpolicy.parts import parse_settings

ATTENTION = "offpolicy_kv_cache"
"""Name of this attention in the tables of transformers."""
_FP8_MAX = 448.0
_SHOWN = ("sdpa", "eager", ATTENTION)
_HELD = "_offpolicy_kv_cache"
_WHOLE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """What a cache holds of the keys and values of the tokens so far.

    Args:
        keep_first: tokens at the start of a sequence that are never evicted (sinks), given with ``keep_last``.
        keep_last: a token sees so many of the last ones, itself among them. None = nothing is evicted.
        rounding: ``fp8`` holds keys and values as 8-bit floats (e4m3); None = as they are.
        scale: of ``fp8``: what is held is ``e4m3(x / scale)``, for all layers; values beyond 448 times it are cut.
            1 is what vLLM takes without calibration. A fixed scale does not depend on the batch, so that a token's
            context is the same in every forward.

    Raises:
        ValueError: a wrong value, a half of the rule, or a cache that compresses nothing.

    Example:
        >>> KVCache(keep_first=1, keep_last=2).kept(torch.ones(1, 5, dtype=torch.bool)).int().tolist()
        [[1, 0, 0, 1, 1]]
    """

    keep_first: int | None = None
    keep_last: int | None = None
    rounding: Literal["fp8"] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.keep_first is None) != (self.keep_last is None):
            raise ValueError(
                "keep_first and keep_last must be given together, but got "
                f"keep_first {self.keep_first!r} and keep_last {self.keep_last!r}."
            )
        if self.keep_first is not None:
            check_whole("keep_first", self.keep_first, least=0)
            check_whole("keep_last", self.keep_last, least=1)
        if self.rounding not in (None, "fp8"):
            raise ValueError(f"rounding must be 'fp8', but got {self.rounding!r}.")
        check_number("scale", self.scale)
        if self.scale <= 0:
            raise ValueError(f"scale must be above 0, but got {self.scale!r}.")
        if self.scale != 1.0 and self.rounding is None:
            raise ValueError(f"scale must be left out without rounding, but got {self.scale!r}.")
        if self.rounding is None and not self.evicts:
            raise ValueError("keep_last or rounding must be given: a cache without both compresses nothing.")

    @property
    def evicts(self) -> bool:
        """True if a long sequence loses tokens."""
        return self.keep_last is not None

    @property
    def text(self) -> str:
        """What it holds, in words: ``the first 4 and last 64 tokens in fp8``."""
        which = f"the first {self.keep_first} and last {self.keep_last} tokens" if self.evicts else ""
        how = "" if self.rounding is None else self.rounding
        return f"{which} in {how}" if which and how else which or how

    def kept(self, visible: Tensor) -> Tensor:
        """Those of the visible keys that the cache holds.

        Args:
            visible: (..., K) bool, the keys that a query sees in a whole cache, in their order; the last one is its
                own. Padding is not visible, wherever it is.

        Returns:
            (..., K) bool.
        """
        if self.keep_first is None or self.keep_last is None:
            return visible
        rank = visible.cumsum(-1)  # 1 for the first visible key
        recent = rank > rank[..., -1:] - self.keep_last
        return visible & ((rank <= self.keep_first) | recent)

    def held(self, values: Tensor) -> Tensor:
        """Keys or values as the cache holds them, in their own dtype; the gradient passes straight through."""
        if self.rounding is None:
            return values
        found: Tensor = _Fp8.apply(values, self.scale)  # type: ignore[no-untyped-call]
        return found


def parse_kv_cache(spec: Any, *, where: str = "engine.kv_cache") -> KVCache | None:
    """A cache from a mapping, ``{keep_first: 4, keep_last: 64}``, or from ``fp8``; None = it is whole.

    Raises:
        ValueError: a wrong value; the message names the field.

    Example:
        >>> parse_kv_cache("fp8")
        KVCache(keep_first=None, keep_last=None, rounding='fp8', scale=1.0)
    """
    if spec is None:
        return None
    cache: KVCache = parse_settings(spec, KVCache, where=where, short="rounding", choices=["fp8"])
    return cache


class _Fp8(torch.autograd.Function):
    """8-bit floats with a fixed scale; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        narrow = (values.float() / scale).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return narrow.float().mul_(scale).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


# ----------------------------------------------------------------------------------------------------- in a model


@dataclass(frozen=True)
class _Held:
    """What an attention layer computes with, and the implementation that it had before."""

    cache: KVCache
    before: str


def set_kv_cache(model: nn.Module, cache: KVCache | None) -> KVCache | None:
    """Let the attention of a model compute with what ``cache`` holds, from now on: in ``generate`` and in forwards.

    Attention is then PyTorch's (``sdpa``), which differs from ``eager`` in the last digits.

    Args:
        model: of transformers, whole or with an adapter; wrapped by nothing but PEFT.
        cache: the cache; None = a whole one, as at first.

    Returns:
        The cache that it had before; None = a whole one.

    Raises:
        ValueError: its attention is not one of transformers' ``sdpa`` and ``eager``, or some of its layers remember in
            another way.
    """
    layers = _attention_layers(model)
    known: _Held | None = next((vars(layer)[_HELD] for layer in layers if _HELD in vars(layer)), None)
    if cache is not None:
        _check(model, layers)
        _register()
    for layer in layers:
        config = layer.config
        if cache is None:
            if known is not None:
                config._attn_implementation = known.before
                del layer.__dict__[_HELD]
            continue
        before = known.before if known is not None else str(config._attn_implementation)
        layer.__dict__[_HELD] = _Held(cache, before)
    for layer in layers if cache is not None else ():  # after all have read it: they share one configuration
        layer.config._attn_implementation = ATTENTION
    return None if known is None else known.cache


@contextmanager
def with_kv_cache(model: nn.Module, cache: KVCache | None) -> Iterator[None]:
    """A context of :func:`set_kv_cache`; the model then has the cache that it had before."""
    before = set_kv_cache(model, cache)
    try:
        yield
    finally:
        set_kv_cache(model, before)


def kv_cache_of(model: nn.Module) -> KVCache | None:
    """The cache that :func:`set_kv_cache` gave the model; None = a whole one."""
    held = next((vars(layer)[_HELD] for layer in model.modules() if _HELD in vars(layer)), None)
    return None if held is None else held.cache


def _attention_layers(model: nn.Module) -> list[Any]:
    """The modules that hand themselves to an attention function: with a number among the layers, and causal."""
    return [one for one in model.modules() if hasattr(one, "layer_idx") and hasattr(one, "is_causal")]


def _check(model: nn.Module, layers: list[Any]) -> None:
    name = type(model).__name__
    if not layers:
        raise ValueError(f"kv_cache must be left out: {name} has no attention layer of transformers.")
    for layer in layers:
        if (found := layer.config._attn_implementation) not in _SHOWN:
            raise ValueError(f"attn_implementation must be 'sdpa' or 'eager' with kv_cache, but got {found!r}.")
        if other := set(getattr(layer.config, "layer_types", None) or ()) - _WHOLE_LAYERS:
            raise ValueError(f"kv_cache must be left out: {name} has layers without keys of each token ({min(other)}).")


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention of transformers' ``sdpa`` over what the cache of this layer holds.

    Args:
        module: the layer.
        query: (B, heads, Q, size): the last Q tokens.
        key: (B, key heads, K, size), of all tokens so far, rotated.
        value: (B, key heads, K, size).
        attention_mask: (B, 1, Q, K), true (or 0, if it is added) where a query sees a key; None = all before it.
        **options: transformers'.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    held: _Held | None = vars(module).get(_HELD)
    if held is not None:
        key, value = held.cache.held(key), held.cache.held(value)
        if held.cache.evicts:
            attention_mask = held.cache.kept(_visible(attention_mask, query.shape[2], key))
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out


def _visible(mask: Tensor | None, queries: int, key: Tensor) -> Tensor:
    """(B, 1, Q, K) bool, or (1, 1, Q, K) without a mask."""
    keys = key.shape[2]
    if mask is None:
        place = torch.arange(keys, device=key.device)
        return (place <= place[keys - queries :, None])[None, None]
    mask = mask[..., :keys]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
