"""Contexts of the sixth round of kinds: frequencies, number formats, weights that arrived wrongly, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import contexts
import engine_faults as e
import torch
from fifth_contexts import expert_layers, fp8_rows
from moe import rough_router
from second_contexts import int4_rows, parameters_set, replaced_after
from third_contexts import fp8_blocks, head_size, named, values_at
from time_faults import version_at
from torch import Tensor, nn
from weights import VERSIONS

RESUMED, UPGRADED = 7, 6
"""Steps in which a run is resumed, and in which an engine is upgraded."""

# ------------------------------------------------------------------------------------------------------- architecture


def long_factors(model: Any, longest: float = 4.0) -> Any:
    """LongRoPE's factors for long texts: from 1 for the fastest frequency to ``longest`` for the slowest."""
    return contexts.rope(model, lambda f: f / torch.linspace(1.0, longest, len(f)))


@contextmanager
def rope_theta_in(model: Any, factor: float, layers: contexts.Layers) -> Iterator[None]:
    """The base of the rotary embedding times ``factor`` in some layers (Gemma 3 has one for local layers)."""
    rotary = model.model.rotary_emb

    def hook(_module: Any, inputs: Any, given: dict[str, Any]) -> Any:
        with contexts.rope_theta(model, factor):
            return inputs, {**given, "position_embeddings": rotary(inputs[0], given["position_ids"])}

    with ExitStack() as stack:
        for number, layer in enumerate(model.model.layers):
            if layers(number):
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def norms_over_all_heads(model: Any) -> Any:
    """Norms of q and k over all heads together, as OLMo 2 has them, in place of each head alone (Qwen3)."""

    def hook(norm: Any, inputs: Any, _output: Any) -> Tensor:
        (x,) = inputs  # (..., heads, size of a head)
        mean = x.pow(2).mean((-2, -1), keepdim=True)
        found: Tensor = norm.weight * x * torch.rsqrt(mean + norm.variance_epsilon)
        return found

    return contexts.registered([norm for _, norm in named(model, "q_norm", "k_norm")], hook)


@contextmanager
def gate_limited(model: Any, limit: float) -> Iterator[None]:
    """Gates of the MLPs are at most ``limit``, and what they multiply lies within it (gpt-oss's swiglu_limit)."""
    gates = [module for _, module in named(model, "gate_proj")]
    ups = [module for _, module in named(model, "up_proj")]
    with (
        contexts.hooked(gates, lambda values: values.clamp(max=limit)),
        contexts.hooked(ups, lambda values: values.clamp(-limit, limit)),
    ):
        yield


# ---------------------------------------------------------------------------------------------------- number formats


def kv_of_two_formats(keys: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor]) -> Any:
    """A cache that holds keys in one format and values in another."""

    def replacement(original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        return original(module, query, keys(key), values(value), mask, **kw)

    return contexts.attention(replacement)


def kv_of_eight_and_four_bits() -> Any:
    return kv_of_two_formats(contexts.int8, int4_rows)


def int4_symmetric(weight: Tensor, group: int) -> Tensor:
    """Four-bit integers without an offset, one scale for ``group`` columns."""
    return int4_rows(weight.unflatten(-1, (-1, group))).flatten(-2)


def int4_of_groups(model: Any, group: int) -> Any:
    return contexts.weights_rounded(model, partial(int4_symmetric, group=group))


@contextmanager
def fp8_training(model: Any) -> Iterator[None]:
    """Linear layers multiply weights in blocks with inputs by token, both in e4m3 (the blockwise recipe)."""
    with contexts.weights_rounded(model, fp8_blocks), contexts.inputs_rounded(model, fp8_rows):
        yield


def activations_rounded(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What the non-linearity of an MLP puts out, in another format."""
    return contexts.hooked([module for _, module in named(model, "act_fn")], change)


def eight_bits_with_outliers(model: Any, threshold: float = 6.0) -> Any:
    """LLM.int8 (Dettmers et al. 2022): integers, but for input columns that have a value above ``threshold``."""

    def hook(module: Any, inputs: Any, _output: Any) -> Tensor:
        (x,) = inputs
        large = x.abs().flatten(0, -2).amax(0) > threshold
        weight = module.weight
        small = contexts.int8(x.masked_fill(large, 0.0)) @ contexts.int8(weight.masked_fill(large, 0.0)).T
        found: Tensor = small + x[..., large] @ weight[:, large].T
        return found if module.bias is None else found + module.bias

    linears = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name]
    return contexts.registered(linears, hook)


# ------------------------------------------------------------------------------------------------------------ weights


def saved_apart(_world: Any, name: str) -> bool:
    """Parameters that are trained whole beside an adapter (modules_to_save): embedding, head and norms."""
    return "embed_tokens" in name or "lm_head" in name or "norm" in name


def fused_qkv_read_in_order(world: Any) -> Any:
    """The last layer's fused projection lies group by group (q.. k v | q.. k v), and is read as all q, all k, all v."""
    model = world.model
    layer, size = f"model.layers.{len(model.model.layers) - 1}.self_attn", head_size(model)
    parameters = dict(model.named_parameters())
    names = [f"{layer}.{part}_proj.weight" for part in "qkv"]
    queries, keys, values = (parameters[name].data for name in names)
    groups = len(keys) // size
    fused = torch.cat([torch.cat(parts) for parts in zip(
        queries.chunk(groups), keys.chunk(groups), values.chunk(groups), strict=True)])  # fmt: skip
    read = fused.split([len(queries), len(keys), len(values)])
    return parameters_set(model, {name: part.clone() for name, part in zip(names, read, strict=True)})


def upper_half_old(world: Any, back: float) -> Any:
    """A sync that is under way: layers below the middle are new, the others are ``back`` versions old."""
    old = e.version_of(world, back)
    return world.weights.holding(lambda name: (VERSIONS if e.layer_of(name) < e.middle_layer(world) else old, 1.0))


def head_rows_lost(world: Any) -> Any:
    """The head's rows of the end and of the first token hold the mean of all, as new rows do after a resize."""
    rows = [*world.stop, world.bos]

    def change(weight: Tensor) -> Tensor:
        found = weight.clone()
        found[rows] = weight.mean(0)
        return found

    return e.head_changed(world, change)


def merged_and_unmerged(world: Any) -> Any:
    """The update taken out and added again: changes the last bits alone."""
    base, values = world.weights.base, {}
    for name, last in values_at(world, VERSIONS).items():
        change = last - base[name]
        values[name] = (last - change) + change
    return parameters_set(world.model, values)


# ------------------------------------------------------------------------------------------------------------ routing


@contextmanager
def experts_called(model: Any, change: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """``change(original, hidden, chosen, scores)`` in place of what the experts of each layer answer."""
    chosen = expert_layers(model)
    for part in chosen:
        part.experts.forward = partial(change, part.experts.forward)
    try:
        yield
    finally:
        for part in chosen:
            del part.experts.forward


def scores_on_the_input(original: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Scores multiply what an expert reads, not what it answers (Llama 4)."""
    answers = [
        original(hidden * scores[:, [rank]], chosen[:, [rank]], torch.ones_like(scores[:, [rank]]))
        for rank in range(chosen.shape[1])
    ]
    found: Tensor = torch.stack(answers).sum(0)
    return found


def map_of_the_last_rebalance(world: Any) -> Any:
    """Experts of the last layer were moved by one place to balance the load; the map still sends to the old places."""
    layer = len(world.model.model.layers) - 1
    values = {name: parameter.data.roll(1, 0) for name, parameter in world.model.named_parameters()
              if f"layers.{layer}.mlp.experts." in name}  # fmt: skip
    return parameters_set(world.model, values)


def routers_rounded(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Weights of the routers in another format."""
    return parameters_set(model, {name: change(parameter.data) for name, parameter in model.named_parameters()
                                  if name.endswith("mlp.gate.weight")})  # fmt: skip


def of_the_next_request(rows: int) -> Callable[[Any, Tensor, Any], Any]:
    """Recorded experts of ``rows`` texts of one length; every text gets those of the next one."""

    def change(_gate: Any, _hidden: Tensor, said: Any) -> Any:
        logits, scores, experts = said
        replayed = experts.view(rows, -1, experts.shape[1]).roll(-1, 0).reshape(experts.shape)
        return logits, logits.softmax(-1).gather(1, replayed).to(scores.dtype), replayed

    return change


def router_in_float64(gate: Any, hidden: Tensor, said: Any) -> Any:
    """A router that decides in float64: changes nothing."""
    logits, scores, experts = said
    exact = (hidden.reshape(-1, gate.hidden_dim).double() @ gate.weight.double().T).softmax(-1)
    found = exact.topk(experts.shape[1], -1)
    return logits, found.values.to(scores.dtype), found.indices


# ----------------------------------------------------------------------------------------------------------- the runs


def half_an_adapter_later(world: Any, step: int) -> AbstractContextManager[Any]:
    """A run that is resumed in step 7 reads another scale of the adapter."""
    found: AbstractContextManager[Any] = nullcontext()
    if step >= RESUMED:
        found = world.weights.at(version_at(world, step), 0.5)
    return found


def updated_in_flight(world: Any, step: int, *, back: int, tokens: int) -> AbstractContextManager[None]:
    """Responses begin with weights ``back`` steps old; the new ones arrive after ``tokens`` decoded tokens.

    Keys and values of what was said before stay in the cache.
    """
    return replaced_after(world, values_at(world, version_at(world, max(0, step - back))), tokens)


def routers_in_bf16_later(world: Any, step: int) -> AbstractContextManager[Any]:
    """An upgrade in step 6 has the engine's routers compute in bf16."""
    found: AbstractContextManager[Any] = nullcontext()
    if step >= UPGRADED:
        found = rough_router(world.model, 8, select_only=False)
    return found
