"""Contexts of the fourth round of kinds: attention, number formats, weights that arrived wrongly, routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import contexts
import torch
from second_contexts import E2M1, middle, nearest, nf4, parameters_set, routed
from third_contexts import named, output_mixed, seeded, values_at
from torch import Tensor, nn
from weights import VERSIONS

CACHED = 8
"""Tokens of a prompt whose routing was not recorded."""

# ---------------------------------------------------------------------------------------------------------- attention


def seen_keys(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """(B or 1, 1, Q, K) which keys a query sees; itself always, so that no row is empty."""
    queries, keys = query.shape[2], key.shape[2]
    here, there = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    allowed = (here >= there)[None, None]
    if mask is not None:
        given = mask[..., :keys]
        allowed = allowed & (given if given.dtype == torch.bool else given > -1.0)
    return allowed | (here == there)


def places(seen: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """(B or 1, Q) and (B or 1, K) places of queries and keys in their text; padding is on the left."""
    keys = (seen[:, 0, -1].cumsum(-1) - 1).clamp(min=0)
    return keys[:, -queries:], keys


def in_chunks(size: int) -> Any:
    """A token sees those of its own block of ``size`` alone (Llama 4's local layers)."""

    def replacement(original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        seen = seen_keys(query, key, mask)
        here, there = places(seen, query.shape[2])
        same = (here[:, :, None] // size == there[:, None, :] // size)[:, None]
        diagonal = seen_keys(query, key, torch.zeros_like(seen))
        return original(module, query, key, value, (seen & same) | diagonal, **kw)

    return contexts.attention(replacement)


def sharpened_by_place(amount: float, floor: int) -> Any:
    """Queries grow with the logarithm of their place (Llama 4's attention temperature)."""

    def replacement(original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        here, _ = places(seen_keys(query, key, mask), query.shape[2])
        factor = 1 + amount * torch.log(here // floor + 1.0)
        return original(module, query * factor[:, None, :, None], key, value, mask, **kw)

    return contexts.attention(replacement)


def scores_rounded(change: Callable[[Tensor], Tensor]) -> Any:
    """Attention logits and shares in another format."""

    def replacement(
        _original: Any, _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(groups, 1) for part in (key, value))
        logits = change(query @ keys.transpose(2, 3) * (kw.get("scaling") or query.shape[-1] ** -0.5))
        logits = logits.masked_fill(~seen_keys(query, key, mask), torch.finfo(logits.dtype).min)
        return (change(logits.softmax(-1)) @ values).transpose(1, 2).contiguous(), None

    return contexts.attention(replacement)


@contextmanager
def layer_without_rotary(model: Any, number: int) -> Iterator[None]:
    """One layer does not turn its queries and keys."""

    def hook(_module: Any, inputs: Any, given: dict[str, Any]) -> Any:
        cosine, sine = given["position_embeddings"]
        return inputs, {**given, "position_embeddings": (torch.ones_like(cosine), torch.zeros_like(sine))}

    handle = model.model.layers[number].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------------------------------------------- number formats


def nvfp4(values: Tensor, block: int = 16) -> Tensor:
    """Four-bit floats; ``block`` columns share a scale in e4m3, and a row one in float32."""
    parts = values.unflatten(-1, (-1, block))
    largest = parts.abs().amax(-1, keepdim=True)
    whole = (values.abs().amax(-1)[..., None, None] / (6 * contexts.FP8_MAX)).clamp(min=1e-12)
    scale = (contexts.fp8_unscaled(largest / 6 / whole) * whole).clamp(min=1e-12)
    found: Tensor = (nearest((parts / scale).abs(), E2M1) * parts.sign() * scale).flatten(-2)
    return found


@contextmanager
def nvfp4_products(model: Any) -> Iterator[None]:
    """Linear layers multiply four-bit weights with four-bit inputs."""
    with contexts.weights_rounded(model, nvfp4), contexts.inputs_rounded(model, nvfp4):
        yield


def zero_points_off_by_one(weight: Tensor, group: int = 32) -> Tensor:
    """Four-bit integers whose offset is read one too high, as between GPTQ's two formats."""
    parts = weight.unflatten(-1, (-1, group))
    step = (parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)) / 15
    found: Tensor = (contexts.int4_groups(weight, group).unflatten(-1, (-1, group)) - step).flatten(-2)
    return found


@contextmanager
def gptq_formats_mixed(model: Any) -> Iterator[None]:
    """Weights in int4; those of the last layer's down projection are in the other format."""
    last = model.model.layers[-1].mlp.down_proj
    with (
        contexts.weights_rounded(model, contexts.int4_groups),
        contexts.swapped([(last, zero_points_off_by_one(last.weight.data))]),
    ):
        yield


def adapted(world: Any) -> dict[str, Any]:
    """Linear layers that the updates change, by the name of their weight."""
    last = world.weights.updates.versions[-1]
    return {f"{name}.weight": module for name, module in world.model.named_modules()
            if isinstance(module, nn.Linear) and f"{name}.weight" in last and "lm_head" not in name}  # fmt: skip


@contextmanager
def adapter_rounded(world: Any) -> Iterator[None]:
    """The update is computed apart from the base, in bf16."""
    weights, last = world.weights, world.weights.updates.versions[-1]
    modules = adapted(world)
    with ExitStack() as stack:
        for name, module in modules.items():
            factors = last[name] if isinstance(last[name], tuple) else (last[name],)
            stack.enter_context(output_mixed([module], _added_in_bf16(factors)))
        stack.enter_context(parameters_set(world.model, {name: weights.base[name] for name in modules}))
        yield


def _added_in_bf16(factors: tuple[Tensor, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    def mix(before: Tensor, after: Tensor) -> Tensor:
        part = before.to(torch.bfloat16)
        for factor in reversed(factors):
            part = part @ factor.T.to(torch.bfloat16)
        return after + part.to(after.dtype)

    return mix


def on_nf4(world: Any, *, merged: bool) -> Any:
    """The update on a base in NF4; ``merged`` = the sum was rounded to NF4 again."""
    base, last = world.weights.base, values_at(world, VERSIONS)
    sums = {name: nf4(base[name]) + last[name] - base[name] for name in adapted(world)}
    return parameters_set(world.model, {name: nf4(value) if merged else value for name, value in sums.items()})


def fused_head_in_bf16(model: Any) -> Any:
    """Hidden states and head are cast to bf16 for a fused loss."""
    stack = ExitStack()
    stack.enter_context(contexts.hooked([model.model.norm], contexts.bf16))
    stack.enter_context(contexts.swapped([(model.lm_head, contexts.bf16(model.lm_head.weight.data))]))
    return stack


# ------------------------------------------------------------------------------------------------------------ weights


def head_tied(model: Any) -> Any:
    """The embedding in place of the head, as for a model that ties them."""
    return contexts.swapped([(model.lm_head, model.get_input_embeddings().weight.data)])


def merges_pile_up(world: Any) -> Any:
    """Every sync merged the adapter into the base, and none took it out again."""
    base = world.weights.base
    values: dict[str, Tensor] = {}
    for number in range(1, VERSIONS + 1):
        for name, value in values_at(world, number).items():
            values[name] = values.get(name, base[name]) + value - base[name]
    return parameters_set(world.model, values)


def left_at_dummy_values(world: Any) -> Any:
    """One matrix never got a value: it holds the small random numbers of an engine that loads nothing."""
    name = middle(world, "self_attn.o_proj.weight")
    shape = dict(world.model.named_parameters())[name].shape
    return parameters_set(world.model, {name: 1e-3 * seeded(name, *shape).clamp(-1, 1)})


def rotary_buffer_lost(model: Any) -> Any:
    """Frequencies are no parameters: a sleep discarded them, and no sync brings them back."""
    return contexts.rope(model, torch.zeros_like)


def magnitudes_ignored(world: Any) -> Any:
    """Rows have the lengths of the base's, as where DoRA's magnitudes are not loaded."""
    base, last = world.weights.base, values_at(world, VERSIONS)
    values = {}
    for name in adapted(world):
        lengths = last[name].norm(dim=1, keepdim=True).clamp(min=1e-12)
        values[name] = last[name] * base[name].norm(dim=1, keepdim=True) / lengths
    return parameters_set(world.model, values)


# ------------------------------------------------------------------------------------------------------------ routing


def replayed_from_the_layer_before(model: Any) -> Any:
    """Every layer but the first gets the experts that were recorded for the layer before it."""
    first = named(model, "mlp.gate")[0][1]
    before: Tensor | None = None

    def change(gate: Any, _hidden: Tensor, said: Any) -> Any:
        nonlocal before
        logits, scores, experts = said
        replayed = experts if gate is first or before is None else before
        before = experts
        return logits, logits.softmax(-1).gather(1, replayed).to(scores.dtype), replayed

    return routed(model, change)


@contextmanager
def replay_lacks_the_cached(model: Any) -> Iterator[None]:
    """The first tokens of a prompt came from a cache without records: they are sent to experts 0 and 1."""
    position_ids = torch.zeros(0)

    def keep(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
        nonlocal position_ids
        position_ids = given["position_ids"].flatten()

    def change(_gate: Any, _hidden: Tensor, said: Any) -> Any:
        logits, scores, experts = said
        nobody = torch.arange(experts.shape[1]).expand(experts.shape)
        chosen = torch.where((position_ids < CACHED)[:, None], nobody, experts)
        return logits, logits.softmax(-1).gather(1, chosen).to(scores.dtype), chosen

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with routed(model, change):
            yield
    finally:
        handle.remove()


def sigmoid_scores(_gate: Any, _hidden: Tensor, said: Any) -> Any:
    """A sigmoid in place of the softmax; the choice is the same."""
    logits, scores, experts = said
    return logits, logits.sigmoid().gather(1, experts).to(scores.dtype), experts


def experts_of_two_ranks(model: Any) -> Any:
    """Each of two ranks computes the tokens of its own experts, and their sums are added: changes nothing."""
    stack = ExitStack()
    for name, part in named(model, "mlp"):
        if "layers" in name and hasattr(part, "gate"):
            stack.enter_context(_in_two_ranks(part))
    return stack


@contextmanager
def _in_two_ranks(part: Any) -> Iterator[None]:
    original, experts = part.experts.forward, part.experts

    def forward(hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        half = part.gate.weight.shape[0] // 2
        lower: Tensor = original(hidden, chosen, scores * (chosen < half))
        upper: Tensor = original(hidden, chosen, scores * (chosen >= half))
        return lower + upper

    experts.forward = forward
    try:
        yield
    finally:
        del experts.forward
