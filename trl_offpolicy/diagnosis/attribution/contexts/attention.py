"""Contexts in which the attention of a model computes in another way: capped, windowed, in less precision, interleaved.

They replace the attention function of transformers by one that shows its scores. A model with an implementation that
is not in the table of transformers (its own, or flash attention) offers none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.contexts.precision import SIGNIFICANT_BITS, round_significant

SHOWN = ("sdpa", "eager")
"""Implementations that give the same numbers as this one."""
CHECKED = 12
"""Tokens on which that is checked."""


_SAME: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Models that were looked at, and whether attention in plain steps is theirs."""


def replaceable(model: Any) -> bool:
    """True if the model takes its attention from the table, and gives the same numbers with that of this module."""
    if _implementation(model) not in SHOWN:
        return False
    if model not in _SAME:
        _SAME[model] = _is_same(model)
    return _SAME[model]


@torch.no_grad()
def _is_same(model: Any) -> bool:
    """Whether a few tokens have the same logits (1 % of their spread) with attention in plain steps."""
    rows = len(model.get_input_embeddings().weight)
    ids = (torch.arange(CHECKED, device=next(model.parameters()).device) * 7 % rows)[None]
    plain = model(input_ids=ids, use_cache=False).logits.float()
    with shown_attention(model):
        shown = model(input_ids=ids, use_cache=False).logits.float()
    return bool((shown - plain).abs().max() <= 0.01 * plain.std())


def _implementation(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", None) or "")


@contextmanager
def shown_attention(
    model: Any,
    scores: Callable[[Tensor], Tensor] | None = None,
    inputs: Callable[[Tensor], Tensor] | None = None,
    shares: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """Attention in plain steps, with changed ``scores``, ``inputs`` or ``shares``.

    Args:
        model: a causal LM of transformers.
        scores: changes (B, heads, queries, keys) scores, scaled.
        inputs: changes (B, heads, length, size) queries, keys and values.
        shares: changes (B, heads, queries, keys) shares after the softmax, by which the values are weighted.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    same = lambda values: values  # noqa: E731
    change, prepare, weigh = scores or same, inputs or same, shares or same

    def attend(
        _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, **_others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        query, key, value = prepare(query), prepare(key), prepare(value)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        found = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
        if softcap is not None:
            found = softcap * torch.tanh(found / softcap)
        parts = _softmax(_masked(change(found), mask), s_aux)
        return (weigh(parts) @ value).transpose(1, 2).contiguous(), None

    name = _implementation(model)
    before = TABLE.get(name) if name in TABLE else None
    TABLE[name] = attend
    try:
        yield
    finally:
        if before is None:
            del TABLE[name]
        else:
            TABLE[name] = before


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Shares of the keys; ``sinks`` (heads) are scores of a key more each, which has no value (GPT-OSS)."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], -1).to(scores.dtype)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    lowest = torch.finfo(scores.dtype).min
    queries, keys = scores.shape[-2:]
    if mask is None:
        place = torch.arange(keys, device=scores.device)
        later = place[None] > place[keys - queries :, None]
        return scores.masked_fill(later, lowest)
    mask = mask[..., :keys]
    return scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask


def attention_cap(model: Any, cap: float) -> Any:
    """Attention scores s as cap tanh(s / cap), as in Gemma 2."""
    return shown_attention(model, scores=lambda scores: cap * torch.tanh(scores / cap))


def rounded_attention(model: Any, rounding: Callable[[Tensor], Tensor]) -> Any:
    """Queries, keys, values and scores in less precision."""
    return shown_attention(model, scores=rounding, inputs=rounding)


def tf32_attention(model: Any) -> Any:
    """Both products of attention as tensor cores make them from float32: what has no place in TF32 is cut off.

    Sums stay float32. vLLM's Triton kernel for a float32 model most likely does so: on an H200 KL k3 was 4.3e-6, and
    this gives 5.9e-6 where rounding to TF32 gives 0.9e-6 (SmolLM2-135M, docs/gpu_results.md).
    """
    cut = partial(round_significant, bits=SIGNIFICANT_BITS["tf32"], to_zero=True)
    return shown_attention(model, inputs=cut, shares=cut)


@contextmanager
def interleaved_rope(model: Any) -> Iterator[None]:
    """RoPE that turns neighbours (2i, 2i + 1) where the model turns halves (i, i + n / 2), as GPT-J does.

    Scores do not change if queries and keys are permuted alike, so the permuted halves are what is turned.
    """
    with ExitStack() as stack:
        for module, size in _rotated(model):
            order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
            handle = module.register_forward_hook(_permuted(order, size))
            stack.callback(handle.remove)
        yield


def _permuted(order: Tensor, size: int) -> Callable[[Any, Any, Tensor], Tensor]:
    def hook(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        heads = output.view(*output.shape[:-1], -1, size)
        return heads[..., order.to(output.device)].reshape(output.shape)

    return hook


def _rotated(model: Any) -> list[tuple[Any, int]]:
    """The modules whose outputs RoPE turns, with the size of a head: norms of queries and keys, or projections."""
    found = []
    for layer in model.modules():
        size = getattr(layer, "head_dim", None)
        if not isinstance(size, int) or not hasattr(layer, "q_proj") or not hasattr(layer, "k_proj"):
            continue
        norms = hasattr(layer, "q_norm") and hasattr(layer, "k_norm")
        names = ("q_norm", "k_norm") if norms else ("q_proj", "k_proj")
        found += [(getattr(layer, name), size) for name in names]
    return found


def can_interleave(model: Any) -> bool:
    """True if it has RoPE on separate queries and keys."""
    return bool(_rotated(model))
