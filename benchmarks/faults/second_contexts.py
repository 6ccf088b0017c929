"""Contexts of the second round of kinds: number formats, partial sums, positions, weights that were loaded wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import contexts
import torch
from torch import Tensor, nn

from trl_offpolicy.diagnosis.attribution.contexts.precision import round_significant

NF4 = torch.tensor([-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803,
                    0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0])  # fmt: skip
"""The 16 values of NF4 (Dettmers et al. 2023): quantiles of a normal distribution."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The absolute values of a four-bit float."""
TF32_BITS = 11
"""Significant binary digits of TF32."""

# ------------------------------------------------------------------------------------------------------ number formats


def nearest(values: Tensor, grid: Tensor) -> Tensor:
    """Every value becomes the nearest of a sorted grid."""
    return grid[torch.bucketize(values, (grid[1:] + grid[:-1]) / 2)]


def nf4(weight: Tensor, block: int = 64) -> Tensor:
    """Four bits as bitsandbytes stores the base of QLoRA: one scale per ``block`` columns."""
    parts = weight.unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (nearest(parts / scale, NF4) * scale).flatten(-2)


def mxfp4(weight: Tensor, block: int = 32) -> Tensor:
    """Four-bit floats with a power of two as the scale of ``block`` columns."""
    parts = weight.unflatten(-1, (-1, block))
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(largest.log2().floor() - 2)
    return (nearest((parts / scale).abs(), E2M1) * parts.sign() * scale).flatten(-2)


def fp8_of_old_scale(values: Tensor, share: float) -> Tensor:
    """e4m3 with the scale of a tensor whose largest value was ``share`` of today's: the largest are cut off."""
    scale = share * values.abs().amax().clamp(min=1e-12) / contexts.FP8_MAX
    return contexts.fp8_unscaled(values / scale) * scale


def int4_rows(values: Tensor) -> Tensor:
    """Symmetric four-bit integers, one scale per row."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return (values / scale).round() * scale


def tf32(values: Tensor) -> Tensor:
    return round_significant(values, TF32_BITS)


def tf32_products(model: Any) -> Any:
    """Linear layers multiply in TF32."""
    stack = ExitStack()
    stack.enter_context(contexts.weights_rounded(model, tf32))
    stack.enter_context(contexts.inputs_rounded(model, tf32))
    return stack


def mlps_rounded(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Only the linear layers of the MLPs are quantised."""
    chosen = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".mlp." in name]
    return contexts.swapped([(m, change(m.weight.data)) for m in chosen])


# --------------------------------------------------------------------------------------------------------- arithmetic


def residual_rounded(model: Any) -> Any:
    """What a layer hands to the next one is rounded to bf16."""
    return contexts.hooked(list(model.model.layers), contexts.bf16)


def partial_sums(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Two ranks compute half of each output projection; their parts and the sum go through ``change``."""

    def hook(module: nn.Module, inputs: Any, _output: Tensor) -> Tensor:
        (x,) = inputs
        weight = module.weight
        assert isinstance(weight, Tensor)
        half = weight.shape[1] // 2
        parts = [x[..., :half] @ weight[:, :half].T, x[..., half:] @ weight[:, half:].T]
        return change(change(parts[0]) + change(parts[1]))

    ends = [m for name, m in model.named_modules() if name.endswith(("o_proj", "down_proj")) and hasattr(m, "weight")]
    return contexts.registered(ends, hook)


def branches_scaled(model: Any, factor: float) -> Any:
    """What attention and MLPs add to the residual stream, times ``factor``."""
    parts = [m for name, m in model.named_modules() if name.endswith((".self_attn", ".mlp"))]
    return contexts.hooked(parts, lambda values: values * factor)


# ---------------------------------------------------------------------------------------------------------- positions


@contextmanager
def decoded_one_further(model: Any) -> Iterator[None]:
    """Positions of single tokens, which are decoded, are one too far; prompts have the right ones."""
    rotary = model.model.rotary_emb
    original = rotary.forward

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        return original(x, position_ids + (position_ids.shape[-1] == 1))

    rotary.forward = forward
    try:
        yield
    finally:
        del rotary.forward


def yarn(model: Any, factor: float = 4.0, fast: float = 32.0, slow: float = 1.0) -> Any:
    """YaRN (Peng et al. 2023): low frequencies are divided, and the attention is sharpened."""
    length = model.config.max_position_embeddings
    attention_factor = 0.1 * math.log(factor) + 1

    def change(frequencies: Tensor) -> Tensor:
        turns = length * frequencies / (2 * math.pi)  # full turns within the trained length
        kept = ((turns - slow) / (fast - slow)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor)

    stack = ExitStack()
    stack.enter_context(contexts.rope(model, change))
    rotary = contexts.modules_with(model, "attention_scaling")
    stack.enter_context(contexts.attribute_set(rotary, "attention_scaling", lambda old: old * attention_factor))
    return stack


# ------------------------------------------------------------------------------------------------------------ weights


@contextmanager
def parameters_set(model: Any, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters with other values, by name; what is tied to them follows."""
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].data for name in values}
    for name, value in values.items():
        parameters[name].data = value
    try:
        yield
    finally:
        for name, value in before.items():
            parameters[name].data = value


def middle(world: Any, ending: str) -> str:
    """Name of a parameter of the middle layer."""
    return f"model.layers.{len(world.model.model.layers) // 2}.{ending}"


def first_shard_new(world: Any, back: int) -> Any:
    """Of each matrix the first half of the rows arrived, the rest is ``back`` versions old."""
    weights, values = world.weights, {}
    for name, parameter in weights.parameters.items():
        if parameter.dim() < 2:
            continue
        value = parameter.data.clone()
        half = len(value) // 2
        value[half:] = weights.value(name, len(weights.updates.versions) - back)[half:]
        values[name] = value
    return parameters_set(world.model, values)


def updates_one_layer_up(world: Any) -> Any:
    """Every layer has the update of the layer below; the first one has none."""
    weights, values = world.weights, {}
    last = len(weights.updates.versions)
    for name, base in weights.base.items():
        parts = name.split(".")
        if base.dim() < 2 or "layers" not in parts:
            continue
        place = parts.index("layers") + 1
        below = ".".join([*parts[:place], str(int(parts[place]) - 1), *parts[place + 1 :]])
        change = weights.value(below, last) - weights.base[below] if below in weights.base else 0.0
        values[name] = base + change
    return parameters_set(world.model, values)


def averaged_versions(world: Any, decay: float) -> Any:
    """The exponential mean of all versions."""
    weights = world.weights
    last = len(weights.updates.versions)
    shares = [decay ** (last - number) for number in range(last + 1)]
    total = sum(shares)
    values = {name: sum(share / total * weights.value(name, number) for number, share in enumerate(shares))
              for name in weights.base}  # fmt: skip
    return parameters_set(world.model, values)


def synced_on_the_way(world: Any, back: int, tokens: int) -> Any:
    """An update arrives after ``tokens`` decoded tokens; keys and values of those before stay in the cache."""
    weights = world.weights
    old = {name: weights.value(name, len(weights.updates.versions) - back) for name in weights.base}
    return replaced_after(world, old, tokens)


@contextmanager
def replaced_after(world: Any, old: dict[str, Any], tokens: int) -> Iterator[None]:
    """The model has the ``old`` parameters until ``tokens`` tokens are decoded, and its own from then on."""
    stack, decoded = ExitStack(), 0
    stack.enter_context(parameters_set(world.model, old))

    def hook(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
        nonlocal decoded
        decoded += given["input_ids"].shape[1] == 1
        if decoded == tokens:
            stack.close()

    handle = world.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        stack.close()


def rows_lost(world: Any, rows: Sequence[int]) -> Any:
    """Rows of the embedding hold the mean of all, as new rows do after a resize."""
    name = "model.embed_tokens.weight"
    value = dict(world.model.named_parameters())[name].data.clone()
    value[list(rows)] = value.mean(0)
    return parameters_set(world.model, {name: value})


def transposed(world: Any) -> Any:
    """The middle layer's square output projection was loaded the wrong way round."""
    name = middle(world, "self_attn.o_proj.weight")
    value = dict(world.model.named_parameters())[name].data
    return parameters_set(world.model, {name: value.T.contiguous()})


def gate_and_up_swapped(world: Any) -> Any:
    """The middle layer's fused projection was loaded in the wrong order."""
    names = [middle(world, f"mlp.{part}_proj.weight") for part in ("gate", "up")]
    values = [dict(world.model.named_parameters())[name].data for name in names]
    return parameters_set(world.model, dict(zip(names, values[::-1], strict=True)))


def first_experts_swapped(world: Any) -> Any:
    """Two experts have changed places in each layer; the router has not."""
    values = {}
    for name, parameter in world.model.named_parameters():
        if ".experts." in name:
            value = parameter.data.clone()
            value[[0, 1]] = value[[1, 0]]
            values[name] = value
    return parameters_set(world.model, values)


def factors_of_two_versions(world: Any, back: int) -> Any:
    """LoRA's B is ``back`` versions old and A is new."""
    weights = world.weights
    versions, values = weights.updates.versions, {}
    for name, base in weights.base.items():
        new, old = versions[-1].get(name), versions[-1 - back].get(name)
        if isinstance(new, tuple) and isinstance(old, tuple):
            values[name] = base + (old[0] @ new[1]).to(base.dtype)
    return parameters_set(world.model, values)


# ------------------------------------------------------------------------------------------------------------ routing


@contextmanager
def routed(model: Any, change: Callable[[Any, Tensor, Any], Any]) -> Iterator[None]:
    """``change(gate, hidden, (logits, scores, experts))`` in place of what each router says."""
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]

    def forward_of(gate: Any, original: Any) -> Any:
        def forward(hidden: Tensor) -> Any:
            return change(gate, hidden, original(hidden))

        return forward

    for gate in gates:
        gate.forward = forward_of(gate, gate.forward)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def renormalised(_gate: Any, _hidden: Tensor, said: Any) -> Any:
    """The scores of the chosen experts sum to 1."""
    logits, scores, experts = said
    return logits, scores / scores.sum(-1, keepdim=True), experts


def over_capacity_dropped(factor: float) -> Callable[[Any, Tensor, Any], Any]:
    """An expert answers the first ``factor`` times its fair share of tokens and drops the others."""

    def change(gate: Any, _hidden: Tensor, said: Any) -> Any:
        logits, scores, experts = said
        most = math.ceil(factor * experts.numel() / gate.num_experts)
        asked = nn.functional.one_hot(experts, gate.num_experts).sum(1)  # tokens x experts
        place = asked.cumsum(0).gather(1, experts)
        return logits, scores * (place <= most), experts

    return change


def replayed_late(_gate: Any, _hidden: Tensor, said: Any) -> Any:
    """Every token goes to the experts of the token before it, as a replay with an offset of one sends it."""
    logits, scores, experts = said
    late = experts.roll(1, 0)
    return logits, logits.softmax(-1).gather(1, late).to(scores.dtype), late


def jittered(model: Any, amount: float) -> Any:
    """Routers see their input times a random number near 1, as in training mode."""
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    stack = ExitStack()
    for gate in gates:
        handle = gate.register_forward_pre_hook(
            lambda _gate, inputs: (inputs[0] * (1 + amount * (2 * torch.rand_like(inputs[0]) - 1)),)
        )
        stack.callback(handle.remove)
    return stack
