"""Number formats, and an engine that computes in one of them: weights, activations, KV cache, or all three."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from trl_offpolicy.diagnosis.attribution.contexts.precision import SIGNIFICANT_BITS, round_significant
from trl_offpolicy.engines.rounding import WeightRounding

Where = Literal["weights", "activations", "kv", "all"]
WHERE: tuple[Where, ...] = get_args(Where)
_E5M2_MAX = 57344.0
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Format:
    """How numbers are rounded.

    Args:
        name: a key of :data:`FORMATS`.
        rounding: from a float32 matrix to the nearest numbers of the format, a row at a time where it has a scale.
        everywhere: activations are rounded after every operation too, as in an engine that runs in this type. Otherwise
            only what goes into a matrix product is rounded, as in an engine that quantises it.
    """

    name: str
    rounding: Callable[[Tensor], Tensor]
    everywhere: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded tensor, of any shape; a row is the last dimension."""
        return self.rounding(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def round_e5m2(x: Tensor) -> Tensor:
    """Round to 8-bit floats with 2 digits and back, ``s * e5m2(x / s)`` with ``s = max|x| / 57344`` of a row.

    Example:
        >>> round_e5m2(torch.tensor([[57344.0, 9.4, 1.1]]))
        tensor([[57344., 10., 1.]])
    """
    step = x.abs().amax(dim=-1, keepdim=True).clamp(min=_TINY) / _E5M2_MAX
    return (x / step).clamp(-_E5M2_MAX, _E5M2_MAX).to(torch.float8_e5m2).float() * step


FORMATS = {
    one.name: one
    for one in (
        Format("fp32", lambda x: x),
        Format("tf32", lambda x: round_significant(x, SIGNIFICANT_BITS["tf32"])),
        Format("fp16", WeightRounding("fp16"), everywhere=True),
        Format("bf16", WeightRounding("bf16"), everywhere=True),
        Format("fp8 e4m3", WeightRounding("fp8", scale="row")),
        Format("int8", WeightRounding("int8")),
        Format("fp8 e5m2", round_e5m2),
        Format("int4", WeightRounding("int4")),
    )
}
"""{name: format}. fp8 and integers have a scale for each row of a weight, each token, and each head's key or value."""


def engine(model: Any, form: Format, where: Where) -> Any:
    """A copy of a lab model (or of a Llama of transformers) that computes in a format; without gradient.

    - weights: those of every linear layer, the head's too.
    - activations: what goes into every linear layer. With ``form.everywhere`` also what comes out of it (the logits are
      one such output), and what is added up between the blocks.
    - kv: keys and values as they are cached. In a Llama keys are rounded before they are rotated.

    Sums inside a matrix product, softmax and norms stay float32.

    Raises:
        ValueError: an unknown part.
    """
    if where not in WHERE:
        raise ValueError(f"where must be one of {WHERE}, but got {where!r}.")
    copy = deepcopy(model).requires_grad_(False)
    if where in ("weights", "all"):
        _round_weights(copy, form)
    if where in ("activations", "all"):
        _round_activations(copy, form)
    if where in ("kv", "all"):
        _round_cache(copy, form)
    return copy


def _round_weights(model: nn.Module, form: Format) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(form(module.weight.data), requires_grad=False)  # not the tied embedding


def _round_activations(model: nn.Module, form: Format) -> None:
    def inputs(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (form(args[0]), *args[1:])

    def output(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        return form(result)

    def stream(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].copy_(form(args[0]))  # in place: the sum that the block goes on with is this same tensor

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(inputs)
            if form.everywhere:
                module.register_forward_hook(output)
        elif form.everywhere and "Norm" in type(module).__name__:
            module.register_forward_pre_hook(stream)


def _round_cache(model: nn.Module, form: Format) -> None:
    def by_head(x: Tensor, size: int) -> Tensor:
        return form(x.unflatten(-1, (-1, size))).flatten(-2)

    def fused(heads: int) -> Callable[..., Tensor]:
        def hook(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
            q, k, v = result.chunk(3, -1)
            return torch.cat([q, *(by_head(part, part.shape[-1] // heads) for part in (k, v))], dim=-1)

        return hook

    found = 0
    for name, module in model.named_modules():
        if hasattr(module, "qkv"):
            module.qkv.register_forward_hook(fused(module.heads))
            found += 1
        elif name.endswith(("k_proj", "v_proj")):
            size = model.config.head_dim
            module.register_forward_hook(lambda _m, _a, result, size=size: by_head(result, size))
            found += 1
    if not found:
        raise ValueError(f"model must have layers qkv, or k_proj and v_proj, but got {type(model).__name__}.")
