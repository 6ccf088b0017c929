"""Contexts of the fifth round of kinds: positions, number formats, weights that arrived wrongly, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import contexts
import torch
from fourth_contexts import adapted
from second_contexts import int4_rows, parameters_set
from third_contexts import named, seeded, values_at
from time_faults import version_at
from torch import Tensor, nn
from weights import VERSIONS

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BUCKET = 3
"""Tensors of a bucket of a sync."""

# ------------------------------------------------------------------------------------------------------- architecture


def llama3_rope(model: Any, factor: float = 8.0, low: float = 1.0, high: float = 4.0, original: int = 64) -> Any:
    """Llama 3.1's scaling: slow frequencies are divided by ``factor``; ``original`` is the trained length in tokens."""

    def change(frequencies: Tensor) -> Tensor:
        turns = original * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor)

    return contexts.rope(model, change)


@contextmanager
def positions_clamped(model: Any, last: int) -> Iterator[None]:
    """The table of cosines and sines ends at a position; what comes behind it has that position as well."""
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(x, position_ids.clamp(max=last))
    try:
        yield
    finally:
        del rotary.forward


@contextmanager
def norms_behind_the_rotary(model: Any) -> Iterator[None]:
    """Queries and keys are turned first and normed then."""

    def replacement(original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        normed = module.q_norm.forward(query), module.k_norm.forward(key)  # past the hook
        return original(module, *normed, value, mask, **kw)

    with ExitStack() as stack:
        for _, norm in named(model, "q_norm", "k_norm"):
            stack.callback(norm.register_forward_hook(lambda _module, inputs, _output: inputs[0]).remove)
        stack.enter_context(contexts.attention(replacement))
        yield


# ---------------------------------------------------------------------------------------------------- number formats


def embedding_rounded(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The table of embeddings in another format; a head that is tied to it keeps its own."""
    table = model.get_input_embeddings()
    return contexts.swapped([(table, change(table.weight.data))])


def attention_rounded(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Only the four projections of the attention are quantised."""
    return contexts.swapped([(module, change(module.weight.data)) for _, module in named(model, *ATTENTION)])


def fp8_rows(values: Tensor) -> Tensor:
    """e4m3 with a scale for each row (last dimension): a channel of a weight, or a token."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / contexts.FP8_MAX
    return contexts.fp8_unscaled(values / scale) * scale


def fp8_powers(values: Tensor) -> Tensor:
    """e4m3 with a power of two as the scale of each row (UE8M0)."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / contexts.FP8_MAX
    whole = torch.exp2(scale.log2().ceil())
    return contexts.fp8_unscaled(values / whole) * whole


@contextmanager
def fp8_products(model: Any) -> Iterator[None]:
    """Linear layers multiply weights and inputs in fp8, with scales by channel and by token."""
    with contexts.weights_rounded(model, fp8_rows), contexts.inputs_rounded(model, fp8_rows):
        yield


def randomly_rounded(name: str, values: Tensor) -> Tensor:
    """To one of the two nearest bf16 numbers, the nearer one more often: the dropped 16 bits are the probability."""
    chance = torch.Generator().manual_seed(int(1000 * seeded(name, 1).abs().item()))
    added = torch.randint(0, 1 << 16, values.shape, generator=chance, dtype=torch.int32)
    bits = values.contiguous().view(torch.int32) + added
    return (bits & ~0xFFFF).view(torch.float32)


def weights_randomly_rounded(model: Any) -> Any:
    """Every matrix in bf16, rounded at random."""
    return parameters_set(model, {name: randomly_rounded(name, parameter.data)
                                  for name, parameter in model.named_parameters() if parameter.dim() >= 2})  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ weights


def bucket_dropped(world: Any, name: str) -> bool:
    """Whether a parameter is in a bucket that does not arrive: every second one, in the order of names."""
    return sorted(world.weights.base).index(name) // BUCKET % 2 == 1


def beyond_q_and_v(world: Any, name: str) -> bool:
    """Linear layers whose adapter an engine leaves out that knows adapters of q and v alone."""
    return name in adapted(world) and not name.endswith(("q_proj.weight", "v_proj.weight"))


def layers_exchanged(model: Any) -> Any:
    """The two middle layers stand in each other's place."""
    upper = len(model.model.layers) // 2
    pair = {
        f"model.layers.{upper - 1}.": f"model.layers.{upper}.",
        f"model.layers.{upper}.": f"model.layers.{upper - 1}.",
    }
    parameters = dict(model.named_parameters())
    values = {name: parameters[name.replace(mine, other)].data
              for name in parameters for mine, other in pair.items() if name.startswith(mine)}  # fmt: skip
    return parameters_set(model, values)


def other_base(world: Any, amount: float) -> Any:
    """Another revision of the base under the same updates: matrices differ by ``amount`` of their spread."""
    values = {}
    for name, value in values_at(world, VERSIONS).items():
        if value.dim() >= 2:
            values[name] = value + amount * value.std() * seeded(name, *value.shape)
    return parameters_set(world.model, values)


def rounded_deltas(world: Any, step: int) -> Any:
    """A sync sends what has changed since the last one in four bits, and the engine adds it to what it has."""
    values = dict(world.weights.base)
    for number in range(1, step + 1):
        new, old = (values_at(world, version_at(world, at)) for at in (number, number - 1))
        values = {name: value + int4_rows(new[name] - old[name]) for name, value in values.items()}
    return parameters_set(world.model, values)


# ------------------------------------------------------------------------------------------------------- the trainer


def embedding_noise(model: Any, alpha: float) -> Any:
    """NEFTune's noise (Jain et al. 2023): uniform, up to alpha / sqrt(tokens x width)."""

    def change(values: Tensor) -> Tensor:
        size = alpha / (values.shape[1] * values.shape[2]) ** 0.5
        return values + size * (2 * torch.rand_like(values) - 1)

    return contexts.hooked([model.get_input_embeddings()], change)


# ------------------------------------------------------------------------------------------------------------ routing


def expert_layers(model: Any) -> list[Any]:
    """The blocks that have a router."""
    return [part for name, part in named(model, "mlp") if "layers" in name and hasattr(part, "gate")]


def experts_scaled(model: Any, factor: float) -> Any:
    """What the chosen experts add together, times ``factor``."""
    return contexts.hooked(expert_layers(model), lambda values: values * factor)


@contextmanager
def last_experts_lost(model: Any, share: float) -> Iterator[None]:
    """What the last ``share`` of the experts say is not added: their rank's answer got lost."""
    chosen = expert_layers(model)
    for part in chosen:
        part.experts.forward = _without(part.experts.forward, int((1 - share) * part.gate.weight.shape[0]))
    try:
        yield
    finally:
        for part in chosen:
            del part.experts.forward


def _without(original: Any, first: int) -> Any:
    def forward(hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        answer: Tensor = original(hidden, chosen, scores * (chosen < first))
        return answer

    return forward


def replayed_batch_first(rows: int) -> Callable[[Any, Tensor, Any], Any]:
    """Recorded experts of ``rows`` texts lie row after row, and are read token after token."""

    def change(_gate: Any, _hidden: Tensor, said: Any) -> Any:
        logits, scores, experts = said
        replayed = experts.view(rows, -1, experts.shape[1]).transpose(0, 1).reshape(experts.shape)
        return logits, logits.softmax(-1).gather(1, replayed).to(scores.dtype), replayed

    return change


def replayed_as_they_were(_gate: Any, _hidden: Tensor, said: Any) -> Any:
    """Recorded experts, in the right order: changes nothing."""
    logits, scores, experts = said
    return logits, logits.softmax(-1).gather(1, experts).to(scores.dtype), experts.clone()


def neurons_moved(model: Any) -> Any:
    """The neurons of every MLP in another order, in all of its three matrices: the same function."""
    stack = ExitStack()
    for ending, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        pairs = [
            (module, module.weight.data.flip(axis))
            for _, module in named(model, ending)
            if isinstance(module, nn.Linear)
        ]
        stack.enter_context(contexts.swapped(pairs))
    return stack
