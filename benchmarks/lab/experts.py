"""The model of the small experiments with experts in place of each feed-forward, and routers that differ."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lab.sorting import Block, Sorter

EXPERTS = 8


class ExpertBlock(Block):
    """Each token goes to the expert that its router likes best, weighed by the router's probability (top 1 of 8)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.first = nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)
        self.second = nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, L, width); every expert is computed and one is taken, which is simple and fast enough here."""
        probability, chosen = self.router(x).softmax(-1).max(-1)
        hidden = functional.gelu(torch.einsum("blw,ewh->bleh", x, self.first))
        answers = torch.einsum("bleh,ehw->blew", hidden, self.second)
        index = chosen[..., None, None].expand(*chosen.shape, 1, x.shape[-1])
        return probability.unsqueeze(-1) * answers.gather(2, index).squeeze(2)


class ExpertSorter(Sorter):
    """2 layers, width 64, 8 experts of one hidden layer of 64 in each."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__(width, layers, heads)
        self.blocks = nn.ModuleList([ExpertBlock(width, heads) for _ in range(layers)])


def with_other_routers(model: Sorter, noise: float, generator: torch.Generator) -> Sorter:
    """A copy whose routers' weights have Gaussian noise of ``noise`` standard deviations of themselves added.

    Raises:
        ValueError: a model without experts.
    """
    copy = deepcopy(model).requires_grad_(False)
    routers = [module.router.weight for module in copy.modules() if isinstance(module, ExpertBlock)]
    if not routers:
        raise ValueError(f"model must have experts (ExpertSorter), but got {type(model).__name__}.")
    for weight in routers:
        weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return copy


@torch.no_grad()
def flipped(one: Sorter, other: Sorter, ids: Tensor, mask: Tensor) -> float:
    """The share of (answer token, layer) that two models send to other experts; ``ids`` (B, L), ``mask`` (B, T)."""
    ways = []
    for model in (one, other):
        chosen: list[Tensor] = []
        hooks = [
            module.router.register_forward_hook(lambda _m, _x, logits, kept=chosen: kept.append(logits.argmax(-1)))
            for module in model.modules()
            if isinstance(module, ExpertBlock)
        ]
        model(ids[:, :-1])
        for hook in hooks:
            hook.remove()
        ways.append(torch.stack(chosen)[..., -mask.shape[1] :])
    return float((ways[0] != ways[1])[:, mask].float().mean())
