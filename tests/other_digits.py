"""Another machine's last digits: float32 sums, products and exponentials perturbed by a rounding error.

CPUs, thread counts and libraries add in other orders and approximate ``exp`` in other ways, so the same code gives
other last digits. ``pytest --other-digits SEED`` runs the tests with results that differ as much. The perturbation is
the same for the same call and another for another shape, as with real kernels. A tolerance at float noise fails here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ULP = 2.0**-23
"""Relative spacing of float32. A sum of n terms in another order is off by about sqrt(n) / 2 of these."""

PERTURBED = {
    "mm", "addmm", "bmm", "baddbmm", "linear", "dot", "linalg_vecdot",
    "_scaled_dot_product_flash_attention_for_cpu",
    "sum", "mean", "prod", "cumsum", "var", "std", "logsumexp",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "sigmoid", "log_sigmoid_forward",
    "exp", "exp_", "exp2", "expm1", "expm1_", "log", "log1p", "log2", "tanh", "silu",
}  # fmt: skip


class OtherDigits(TorchDispatchMode):
    """Perturb float32 results of sums, products and exponentials, forward and backward.

    Whole numbers and short binary fractions stay exact, as on every machine.

    Args:
        ulps: standard deviation of the perturbation, in units of the spacing of float32.
        seed: which machine.
    """

    def __init__(self, ulps: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        self.ulps, self.seed = ulps, seed
        self._factors: dict[tuple[int, ...], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PERTURBED:
            first = out[0] if isinstance(out, tuple) else out
            if first.dtype is torch.float32 and first.device.type == "cpu" and first.numel():
                first.copy_(torch.where(_is_exact(first), first, first * self._factor(first.shape)))
        return out

    def _factor(self, shape: torch.Size) -> Tensor:
        key = tuple(shape)
        if key not in self._factors:
            random = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**63)
            self._factors[key] = 1.0 + self.ulps * ULP * torch.randn(shape, generator=random)
        return self._factors[key]


def _is_exact(values: Tensor) -> Tensor:
    return (1024 * values).frac() == 0
