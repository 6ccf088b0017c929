"""Contexts of the third round of kinds: positions, masks, old caches, experts, weights that arrived wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from zlib import crc32

import contexts
import torch
from second_contexts import parameters_set
from torch import Tensor, nn
from weights import VERSIONS

Change = Callable[[Tensor], Tensor]
IMAGE, SIDE = 16, 4
"""Tokens of an image, and positions that its grid takes."""


def seeded(name: str, *shape: int) -> Tensor:
    """Normal random numbers that hang on a name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))


def named(model: Any, *endings: str) -> list[tuple[str, Any]]:
    """Modules whose name ends so."""
    return [(name, module) for name, module in model.named_modules() if name.endswith(endings)]


@contextmanager
def while_wanted(
    model: Any, wanted: Callable[[Mapping[str, Any]], bool], begin: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """A context that is on in those forwards whose arguments are wanted."""
    stack, on = ExitStack(), False

    def hook(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
        nonlocal on
        if wanted(given) == on:
            return
        on = not on
        if on:
            stack.enter_context(begin())
        else:
            stack.close()

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        stack.close()


def many_at_once(given: Mapping[str, Any]) -> bool:
    """A prompt, not a decoded token."""
    return bool(given["input_ids"].shape[1] > 1)


# ---------------------------------------------------------------------------------------------------------- positions


@contextmanager
def grid_positions(model: Any, mark: int) -> Iterator[None]:
    """The tokens of an image count as rows of a grid: 16 of them take 4 positions, and what follows moves up."""
    saved = IMAGE - SIDE

    def hook(_module: Any, inputs: Any, given: dict[str, Any]) -> Any:
        ids, places = given["input_ids"], given["position_ids"]
        if not many_at_once(given):
            return inputs, {**given, "position_ids": places - saved}
        inside = ids == mark
        number = inside.cumsum(1) - 1
        behind = torch.where(number == IMAGE - 1, saved, 0)
        lost = torch.where(inside, number - number // (IMAGE // SIDE), behind)
        return inputs, {**given, "position_ids": places - lost}

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def head_size(model: Any) -> int:
    config = model.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def interleaved_rope(model: Any) -> Any:
    """Rotary pairs are neighbours (GPT-J), not halves of a head (NeoX)."""
    size = head_size(model)
    parts = named(model, "q_norm", "k_norm") or named(model, "q_proj", "k_proj")

    def change(values: Tensor) -> Tensor:
        heads = values.unflatten(-1, (-1, size))
        return torch.cat([heads[..., 0::2], heads[..., 1::2]], -1).flatten(-2)

    return contexts.hooked([module for _, module in parts], change)


def partial_rotary(model: Any) -> Any:
    """Only the first half of the frequencies turns."""
    return contexts.rope(model, lambda f: torch.where(torch.arange(len(f)) < len(f) // 2, f, torch.zeros_like(f)))


@contextmanager
def rope_tables_rounded(model: Any, change: Change) -> Iterator[None]:
    """Frequencies, cosines and sines in another format."""
    rotary = model.model.rotary_emb
    original = rotary.forward

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        return tuple(change(table) for table in original(x, position_ids))

    rotary.forward = forward
    try:
        with contexts.rope(model, change):
            yield
    finally:
        del rotary.forward


def both_ways() -> Any:
    """Within the prompt, tokens see those behind them as well."""

    def replacement(original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        queries, keys = query.shape[2], key.shape[2]
        if queries > 1 and queries == keys:
            if mask is None:
                mask = torch.ones(query.shape[0], 1, queries, keys, dtype=torch.bool)
            else:
                mask = mask[..., -1:, :keys].expand(-1, -1, queries, -1)
        return original(module, query, key, value, mask, **kw)

    return contexts.attention(replacement)


# ----------------------------------------------------------------------------------------------------------- modules


@contextmanager
def with_biases(model: Any, scale: float) -> Iterator[None]:
    """Projections to queries, keys and values have a bias."""
    with ExitStack() as stack:
        for name, module in named(model, "q_proj", "k_proj", "v_proj"):
            bias = scale * seeded(name, module.weight.shape[0])
            stack.enter_context(contexts.hooked([module], lambda values, bias=bias: values + bias))
        yield


def norms_rounded(model: Any, change: Change) -> Any:
    """What norms put out, in another format."""
    return contexts.hooked(contexts.modules_with(model, "variance_epsilon"), change)


def output_mixed(modules: list[Any], mix: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """``mix(input, output)`` in place of the output."""

    def hook(_module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (mix(inputs[0], output[0]), *output[1:])
        return mix(inputs[0], output)

    return contexts.registered(modules, hook)


def last_layer_skipped(model: Any) -> Any:
    """A draft that leaves the model before its last layer."""
    return output_mixed([model.model.layers[-1]], lambda before, _after: before)


def layers_dropped(model: Any, share: float) -> Any:
    """Stochastic depth: each row skips each layer with a probability."""

    def mix(before: Tensor, after: Tensor) -> Tensor:
        skipped = torch.rand(len(after)) < share
        return torch.where(skipped[:, None, None], before, after)

    return output_mixed(list(model.model.layers), mix)


@contextmanager
def adapter_apart(world: Any) -> Iterator[None]:
    """The update of linear layers is computed apart from the base and added, as engines apply LoRA."""
    weights, last = world.weights, world.weights.updates.versions[-1]
    with ExitStack() as stack:
        values = {}
        for name, module in world.model.named_modules():
            change = last.get(f"{name}.weight")
            if change is None or not isinstance(module, nn.Linear) or "lm_head" in name:
                continue
            values[f"{name}.weight"] = weights.base[f"{name}.weight"]
            factors = change if isinstance(change, tuple) else (change,)
            stack.enter_context(output_mixed([module], _added(factors)))
        stack.enter_context(parameters_set(world.model, values))
        yield


def _added(factors: tuple[Tensor, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    def mix(before: Tensor, after: Tensor) -> Tensor:
        for factor in reversed(factors):
            before = before @ factor.T.to(before.dtype)
        return after + before

    return mix


# ---------------------------------------------------------------------------------------------------- number formats


def fp8_blocks(weight: Tensor, block: int = 32, *, late: int = 0) -> Tensor:
    """e4m3 with a scale for each square block; ``late`` = read with the scale of the block so many rows above."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight, (0, -columns % block, 0, -rows % block))
    parts = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # blocks, rows, blocks, columns
    scale = parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / contexts.FP8_MAX
    whole = contexts.fp8_unscaled(parts / scale) * scale.roll(late, 0)
    return whole.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def block_scales_late(model: Any) -> Any:
    """Weights in fp8; those that are split along their inputs get the scales of other blocks."""
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name]
    return contexts.swapped([(m, fp8_blocks(m.weight.data, late=int(n.endswith("down_proj")))) for n, m in linears])


def experts_rounded(model: Any, change: Change) -> Any:
    """Every matrix of every expert is quantised; routers and attention are not."""
    values = {name: torch.stack([change(one) for one in parameter.data])
              for name, parameter in model.named_parameters() if ".experts." in name}  # fmt: skip
    return parameters_set(model, values)


def merged(world: Any, change: Change) -> Any:
    """A base in bf16 with the update on it; the sum goes through ``change``."""
    weights, last = world.weights, len(world.weights.updates.versions)
    values = {name: change(contexts.bf16(base) + (weights.value(name, last) - base))
              for name, base in weights.base.items()}  # fmt: skip
    return parameters_set(world.model, values)


def int8_prefill(model: Any) -> Any:
    """Prompts are computed by a node with int8 weights, decoded tokens by one without."""
    return while_wanted(model, many_at_once, lambda: contexts.weights_rounded(model, contexts.int8))


# ------------------------------------------------------------------------------------------------------------ weights


def values_at(world: Any, version: Any) -> dict[str, Tensor]:
    return {name: world.weights.value(name, version) for name in world.weights.base}


def both_adapters(world: Any) -> Any:
    """Another adapter is added to the policy's."""
    base, last = world.weights.base, values_at(world, VERSIONS)
    return parameters_set(world.model, {n: last[n] + (v - base[n]) for n, v in values_at(world, "other").items()})


def added_twice(world: Any) -> Any:
    """The last update arrived twice."""
    last = values_at(world, VERSIONS)
    return parameters_set(world.model, {n: 2 * last[n] - v for n, v in values_at(world, VERSIONS - 1).items()})


def largest_changes(world: Any, back: int, share: float) -> Any:
    """Weights ``back`` versions old, with the largest of the changes since."""
    values, last = {}, values_at(world, VERSIONS)
    for name, old in values_at(world, VERSIONS - back).items():
        size = (last[name] - old).abs()
        count = max(1, int((1 - share) * size.numel()))
        values[name] = torch.where(size > size.flatten().kthvalue(count).values, last[name], old)
    return parameters_set(world.model, values)


def query_heads_moved(world: Any) -> Any:
    """Shards of the query projection are put together in another order: every head is a third of them further."""
    model = world.model
    step = head_size(model) * max(1, model.config.num_attention_heads // 3)
    values = {f"{name}.weight": module.weight.data.roll(step, 0) for name, module in named(model, "q_proj")}
    return parameters_set(model, values)


def cache_of_old_weights(world: Any, version: float, wanted: Callable[[Mapping[str, Any]], bool] = many_at_once) -> Any:
    """Keys and values of prompts were computed with older weights."""
    old = values_at(world, version)
    return while_wanted(world.model, wanted, lambda: parameters_set(world.model, old))


# ------------------------------------------------------------------------------------------------------------ routing


def _chosen(logits: Tensor, ranked: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    experts = ranked.topk(count, -1).indices
    return logits, logits.softmax(-1).gather(1, experts).to(dtype), experts


def within_a_group(gate: Any, _hidden: Tensor, said: Any) -> Any:
    """Experts of one of two groups alone: that whose two best scores have the larger sum."""
    logits, scores, experts = said
    grouped = logits.softmax(-1).unflatten(-1, (2, -1))
    best = grouped.topk(2, -1).values.sum(-1).argmax(-1)
    allowed = torch.arange(2) == best[:, None]
    ranked = (grouped * allowed[..., None]).flatten(-2)
    return _chosen(logits, ranked, experts.shape[1], scores.dtype)


def selected_with_bias(scale: float) -> Callable[[Any, Tensor, Any], Any]:
    """A bias takes part in the choice of experts, not in their weights (balance without a loss)."""

    def change(gate: Any, _hidden: Tensor, said: Any) -> Any:
        logits, scores, experts = said
        bias = scale * seeded(f"{gate.weight[0, 0].item():.6f}", logits.shape[-1])
        return _chosen(logits, logits.softmax(-1) + bias, experts.shape[1], scores.dtype)

    return change


def router_tempered(temperature: float) -> Callable[[Any, Tensor, Any], Any]:
    """The softmax over experts at another temperature; the choice is the same."""

    def change(_gate: Any, _hidden: Tensor, said: Any) -> Any:
        logits, scores, experts = said
        return logits, (logits / temperature).softmax(-1).gather(1, experts).to(scores.dtype), experts

    return change


@contextmanager
def shared_expert(model: Any, scale: float) -> Iterator[None]:
    """An expert that answers every token, beside those that are chosen."""
    with ExitStack() as stack:
        for name, module in named(model, ".mlp"):
            width = model.config.hidden_size
            up, down = seeded(f"{name}.up", width, width), seeded(f"{name}.down", width, width)
            stack.enter_context(output_mixed([module], _shared(scale / width * up, down)))
        yield


def _shared(up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda before, after: after + (nn.functional.silu(before) @ up @ down).view_as(after)


def experts_permuted(world: Any) -> Any:
    """Experts and the rows of their routers in another order: the same function."""
    values = {}
    for name, parameter in world.model.named_parameters():
        if ".experts." in name or name.endswith("mlp.gate.weight"):
            values[name] = parameter.data.flip(0)
    return parameters_set(world.model, values)
