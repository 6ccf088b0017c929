"""Contexts in which a model computes as if in another precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trl_offpolicy.engines.rounding import WeightRounding, is_rounded, parse_rounding

Inside = Callable[[], AbstractContextManager[Any]]
SIGNIFICANT_BITS = {"bf16": 8, "fp16": 11, "tf32": 11}


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is (in, out)."""
    from transformers.pytorch_utils import Conv1D  # here, as ``doctor`` without a model does without transformers

    return isinstance(module, Conv1D)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


@contextmanager
def data_restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context at whose end tensors have the ``data`` of its beginning, which may be replaced within."""
    before = [one.data for one in tensors]
    try:
        yield
    finally:
        for one, data in zip(tensors, before, strict=True):
            one.data = data


def matrices(model: Any, *, experts_only: bool = False) -> dict[str, nn.Parameter]:
    """What engines quantise, by name: (out, in) weights of linear layers, and (E, out, in) stacks of experts.

    The head, the embeddings and the routers are left out, as engines leave them.

    Args:
        model: a model of ``transformers``.
        experts_only: only the stacks, as in checkpoints of mixtures whose attention is not quantised.
    """
    linears = {id(m.weight) for m in model.modules() if _is_linear(m) and not experts_only}
    return {
        name: weight
        for name, weight in model.named_parameters()
        if is_rounded(name) and (id(weight) in linears or (weight.dim() == 3 and "experts" in name))
    }


@contextmanager
def changed_weights(model: Any, change: Callable[[Tensor], Tensor], *, experts_only: bool = False) -> Iterator[None]:
    """A context in which every matrix of :func:`matrices` is changed, each expert's for itself."""
    weights = list(matrices(model, experts_only=experts_only).values())
    transposed = {id(module.weight) for module in model.modules() if _is_transposed(module)}
    with data_restored(weights):
        for weight in weights:
            held = weight.data
            if id(weight) in transposed:
                weight.data = change(held.T.contiguous()).T.contiguous()
            else:
                weight.data = change(held) if held.dim() == 2 else torch.stack([change(one) for one in held])
        yield


def rounded_weights(model: Any, rounding: WeightRounding | str) -> AbstractContextManager[None]:
    """A context in which matrices are rounded as :func:`~trl_offpolicy.engines.rounding.round_weights` does."""
    return changed_weights(model, parse_rounding(rounding))


def _multipliers(model: Any) -> dict[str, Any]:
    """Modules that multiply by a matrix, by name: linear layers (the head too), and those that hold stacked experts."""
    stacks = {name.rpartition(".")[0] for name, weight in matrices(model).items() if weight.dim() == 3}
    return {name: m for name, m in model.named_modules() if _is_linear(m) or name in stacks}


@contextmanager
def rounded_activations(model: Any, bits: int) -> Iterator[None]:
    """A context in which outputs of linear layers, norms and attention are rounded to ``bits`` binary digits.

    8 digits are bfloat16, 11 float16 (its range is not limited here). Sums inside a layer stay float32, as on a GPU.
    """
    others = [m for m in model.modules() if "Norm" in type(m).__name__ or "Attention" in type(m).__name__]
    with rounded_outputs([*_multipliers(model).values(), *others], bits):
        yield


@contextmanager
def changed_outputs(modules: Iterable[Any], change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """A context in which modules give ``change(inputs, output)``."""
    hooks = [module.register_forward_hook(lambda _module, inputs, output: change(inputs, output)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def changed_inputs(modules: Iterable[Any], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A context in which modules get another first input."""
    hooks = [
        module.register_forward_pre_hook(lambda _module, inputs: (change(inputs[0]), *inputs[1:])) for module in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def rounded_outputs(modules: Iterable[Any], bits: int) -> Iterator[None]:
    """A context in which the outputs of some modules are rounded to ``bits`` binary digits."""
    with changed_outputs(modules, lambda _inputs, output: _rounded(output, bits)):
        yield


@contextmanager
def rounded_products(model: Any, name: str) -> Iterator[None]:
    """A context in which matrix products alone are in ``bf16`` or ``fp16``, as under ``torch.autocast``."""
    bits = SIGNIFICANT_BITS[name]
    products, cut = _multipliers(model).values(), partial(round_significant, bits=bits)
    with rounded_weights(model, name), rounded_outputs(products, bits), rounded_inputs(model, cut):
        yield


def part_roundings(model: Any) -> dict[str, Inside]:
    """Contexts in which one kind of layer computes in bf16 and the others do not, by ``precision:detail``."""
    bits = SIGNIFICANT_BITS["bf16"]
    kinds = {
        "embeddings": [model.get_input_embeddings()],
        "norms": [module for module in model.modules() if "Norm" in type(module).__name__],
        "residual stream": [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")],
        "RoPE cosines and sines": [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")],
        "MLPs": [m for name, m in model.named_modules() if name.endswith((".mlp", ".feed_forward"))],
    }
    found: dict[str, Inside] = {
        f"precision:{name} in bf16": partial(rounded_outputs, modules, bits)
        for name, modules in kinds.items()
        if modules
    }
    found["precision:matrix products in bf16 (autocast)"] = partial(rounded_products, model, "bf16")
    return found


@contextmanager
def rounded_inputs(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A context in which inputs of linear layers and of experts are rounded, as with quantised activations.

    What an expert of a stack computes inside is not rounded.
    """
    with changed_inputs([m for name, m in _multipliers(model).items() if "lm_head" not in name], change):
        yield


def scaled_int8(values: Tensor, *, whole: bool = False) -> Tensor:
    """Symmetric 8-bit integers with a scale for each row of the last dimension, or for the ``whole`` tensor."""
    largest = values.abs().amax() if whole else values.abs().amax(-1, keepdim=True)
    scale = largest.clamp(min=1e-12) / 127
    return (values / scale).round() * scale


def scaled_fp8(values: Tensor, *, whole: bool = False) -> Tensor:
    """8-bit floats (e4m3) with a scale for each row of the last dimension, or for the ``whole`` tensor."""
    largest = values.abs().amax() if whole else values.abs().amax(-1, keepdim=True)
    scale = largest.float().clamp(min=1e-12) / 448.0
    return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


def activation_roundings(model: Any) -> dict[str, Inside]:
    """Contexts of quantised activations, by ``precision:detail``."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "int8 activations": scaled_int8,
        "fp8 activations": scaled_fp8,
        "fp8 activations with a scale a tensor": partial(scaled_fp8, whole=True),
        "int8 activations with a scale a tensor": partial(scaled_int8, whole=True),
    }
    return {f"precision:{name}": partial(rounded_inputs, model, way) for name, way in ways.items()}


FP8_BLOCK = 128
"""Rows and columns of a block with one scale."""
NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)  # fmt: skip
"""Levels of QLoRA's NormalFloat4 (arXiv:2305.14314, appendix E)."""


def round_nf4(weight: Tensor, *, block: int = 64) -> Tensor:
    """A matrix in NF4 with a scale for each block, as bitsandbytes holds it (without double quantisation)."""
    parts = weight.float().reshape(-1, block)
    scale = parts.abs().amax(1, keepdim=True).clamp(min=1e-12)
    levels = torch.tensor(NF4, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    return (levels[torch.bucketize(parts / scale, middles)] * scale).reshape(weight.shape).to(weight.dtype)


def round_int4(weight: Tensor, *, group: int) -> Tensor:
    """4-bit integers with a scale and an offset per ``group`` columns, as AWQ and GPTQ store weights."""
    parts = weight.float().reshape(len(weight), -1, group)
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-12)
    rounded: Tensor = ((parts - low) / scale).round() * scale + low
    return rounded.reshape(weight.shape).to(weight.dtype)


def round_fp8_blocks(weight: Tensor, *, block: int = 128) -> Tensor:
    """8-bit floats (e4m3) with a scale for each square block, as DeepSeek-V3 stores weights (arXiv:2412.19437, 3.3)."""
    rows, columns = weight.shape
    whole = torch.zeros(-(-rows // block) * block, -(-columns // block) * block, device=weight.device)
    whole[:rows, :columns] = weight.float()
    parts = whole.reshape(len(whole) // block, block, -1, block)
    scale = parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448.0
    rounded = ((parts / scale).to(torch.float8_e4m3fn).float() * scale).reshape(whole.shape)
    return rounded[:rows, :columns].to(weight.dtype)


FP4 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of 4-bit floats (e2m1; OCP Microscaling Formats, 5.3.3)."""


def round_fp4(weight: Tensor, *, block: int, powers: bool) -> Tensor:
    """4-bit floats with a scale per ``block`` columns: MXFP4 has 32 and a power of two, NVFP4 has 16 and an e4m3."""
    parts = weight.float().reshape(-1, block)
    largest = parts.abs().amax(1, keepdim=True).clamp(min=1e-12)
    if powers:
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 2)  # 2 is the exponent of 4, the largest power of e2m1
    else:
        whole = largest.max() / (448.0 * 6.0)
        scale = (largest / 6.0 / whole).to(torch.float8_e4m3fn).float().clamp(min=2.0**-9) * whole
    levels = torch.tensor(FP4, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    return (levels[torch.bucketize(parts / scale, middles)] * scale).reshape(weight.shape).to(weight.dtype)


def weight_roundings(model: Any) -> dict[str, Inside]:
    """Contexts of weights that are rounded in rarer ways, by ``precision:detail``."""
    shapes = [weight.shape[-2:] for weight in matrices(model).values()]
    columns = [shape[1] for shape in shapes]
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "fp8 weights with a scale a tensor": partial(scaled_fp8, whole=True),
        "int8 weights with a scale a tensor": partial(scaled_int8, whole=True),
    }
    if any(max(shape) > FP8_BLOCK for shape in shapes):
        ways["fp8 weights in blocks of 128"] = partial(round_fp8_blocks, block=FP8_BLOCK)
    for name, block, powers in (("mxfp4", 32, True), ("nvfp4", 16, False)):
        if all(count % block == 0 for count in columns):
            ways[f"{name} weights"] = partial(round_fp4, block=block, powers=powers)
    for group in (32, 128):
        if all(count % group == 0 for count in columns):
            ways[f"int4 weights in groups of {group}"] = partial(round_int4, group=group)
    if all(shape.numel() % 64 == 0 for shape in shapes):
        ways["nf4 weights"] = round_nf4
    found: dict[str, Inside] = {f"precision:{name}": partial(changed_weights, model, way) for name, way in ways.items()}
    if matrices(model, experts_only=True):
        found |= {
            f"precision:{name}, experts only": partial(changed_weights, model, way, experts_only=True)
            for name, way in ways.items()
        }
    return found


@contextmanager
def widened(model: Any) -> Iterator[None]:
    """A context in which a model of 16 bits computes in float32, from the weights that it has."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
    with data_restored(tensors):
        for one in tensors:
            one.data = one.data.float()
        yield


@contextmanager
def simulated_dtype(model: Any, name: str) -> Iterator[None]:
    """A context in which weights and activations of a float32 model are rounded as in ``bf16`` or ``fp16``."""
    with rounded_weights(model, name), rounded_activations(model, SIGNIFICANT_BITS[name]):
        yield


def routers(model: Any) -> list[Any]:
    """The modules that choose experts; empty for a dense model."""
    return [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]


@contextmanager
def rounded_routers(model: Any, bits: int) -> Iterator[None]:
    """A context in which routers see their input rounded to ``bits`` digits, so some tokens go to other experts."""
    with changed_inputs(routers(model), partial(round_significant, bits=bits)):
        yield


@contextmanager
def rounded_router_weights(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """A context in which the weights of routers are rounded to ``dtype``, as by a sync in 16 bits."""
    parameters = [parameter for router in routers(model) for parameter in router.parameters()]
    with data_restored(parameters):
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        yield


def _rounded(output: Any, bits: int) -> Any:
    if isinstance(output, tuple):  # the first is the output, or cosines and sines
        return tuple(_rounded(one, bits) for one in output[:2]) + output[2:]
    return round_significant(output, bits) if isinstance(output, Tensor) else output


def round_significant(values: Tensor, bits: int, *, to_zero: bool = False) -> Tensor:
    """Round float32 to ``bits`` significant binary digits, half away from zero; ``to_zero`` cuts off the others.

    Example:
        >>> round_significant(torch.tensor([1.0, 1.1, -3.3]), 3)
        tensor([ 1.0000,  1.0000, -3.5000])
        >>> round_significant(torch.tensor([1.0, 1.1, -3.3]), 3, to_zero=True)
        tensor([ 1.,  1., -3.])
    """
    cut = 24 - bits
    if cut <= 0:
        return values
    raw = values.float().contiguous().view(torch.int32)
    half = 0 if to_zero else 1 << (cut - 1)
    return ((raw + half) & ~((1 << cut) - 1)).view(torch.float32).to(values.dtype)
