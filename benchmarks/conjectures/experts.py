"""The lab's transformer with a mixture of experts, whose routing can be recorded, replayed and forced to flip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lab.sorting import Block, Sorter
from trl_offpolicy.functional.routing import expert_flip_mean, routing_flip_fraction, routing_moments

HIDDEN = 64
"""Width of an expert; a quarter of the dense model's feed-forward."""
Choice = Callable[[Tensor], Tensor]
"""From router logits (B, L, K) to the ids of the experts (B, L, k) that answer."""


class Experts(nn.Module):
    """K small feed-forwards of which the router picks ``top``; their outputs are weighted by a softmax over those.

    ``choose`` (None = the best) may be set to record, replay or change the choice. The weights of the chosen experts
    are always the router's own.
    """

    def __init__(self, width: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.ModuleList([nn.Linear(width, HIDDEN) for _ in range(experts)])
        self.down = nn.ModuleList([nn.Linear(HIDDEN, width) for _ in range(experts)])
        self.choose: Choice | None = None

    def best(self, logits: Tensor) -> Tensor:
        """The likeliest experts."""
        return logits.topk(self.top).indices

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, width)."""
        logits = self.router(x)
        chosen = (self.choose or self.best)(logits)
        gates = logits.gather(-1, chosen).softmax(-1)
        # every expert runs once, on the tokens that chose it
        flat, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            picked = chosen.flatten(0, 1) == number
            rows = picked.any(-1).nonzero().squeeze(-1)
            if len(rows):
                gate = torch.where(picked, gates.flatten(0, 1), 0.0).sum(-1)[rows]
                out = out.index_add(0, rows, gate.unsqueeze(-1) * down(functional.gelu(up(flat[rows]))))
        return out.view_as(x)


class ExpertBlock(Block):
    """A block whose feed-forward is a mixture of experts."""

    def __init__(self, width: int, heads: int, experts: int, top: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.experts = Experts(width, experts, top)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The experts'."""
        return self.experts(x)


def mixture(experts: int, top: int = 2) -> Callable[[], Sorter]:
    """A builder for ``warm_model``, named by its sizes.

    Raises:
        ValueError: fewer experts than one more than answer (then nothing could flip).
    """
    if experts <= top:
        raise ValueError(f"experts must exceed top={top}, but got {experts}.")

    def build() -> Sorter:
        model = Sorter()
        width, heads = model.tokens.embedding_dim, model.blocks[0].heads
        model.blocks = nn.ModuleList([ExpertBlock(width, heads, experts, top) for _ in model.blocks])
        return model

    build.__name__ = f"experts{experts}_top{top}"
    return build


def expert_layers(model: nn.Module) -> list[Experts]:
    """Those of a model, in order; empty for a dense one."""
    return [module for module in model.modules() if isinstance(module, Experts)]


@contextmanager
def choosing(model: nn.Module, choices: list[Choice]) -> Iterator[None]:
    """Each layer chooses by its own function."""
    layers = expert_layers(model)
    for layer, choice in zip(layers, choices, strict=True):
        layer.choose = choice
    try:
        yield
    finally:
        for layer in layers:
            layer.choose = None


class Record:
    """Notes what each layer chooses, by another choice or its own; ``routes`` is (B, L, layers, k)."""

    def __init__(self, model: nn.Module, choices: list[Choice] | None = None) -> None:
        inner = choices or [layer.best for layer in expert_layers(model)]
        self._seen: list[list[Tensor]] = [[] for _ in inner]
        self.choices = [self._noting(choice, seen) for choice, seen in zip(inner, self._seen, strict=True)]

    @staticmethod
    def _noting(choice: Choice, seen: list[Tensor]) -> Choice:
        def choose(logits: Tensor) -> Tensor:
            seen.append(choice(logits).detach())
            return seen[-1]

        return choose

    @property
    def routes(self) -> Tensor:
        """Of all calls so far, joined along the tokens (a cached sampler calls once a token)."""
        return torch.stack([torch.cat(calls, dim=1) for calls in self._seen], dim=2)


def replayed(routes: Tensor) -> list[Choice]:
    """Choices that repeat ``routes`` (B, L, layers, k) in one forward over all tokens."""
    return [lambda logits, layer=layer: routes[:, :, layer] for layer in range(routes.shape[2])]


def flipping(
    model: nn.Module, rate: float, generator: torch.Generator, *, limits: list[float] | None = None
) -> list[Choice]:
    """Choices in which the last chosen expert gives way to the next best, with probability ``rate`` a token and layer.

    With ``limits``, one a layer, it does so where its router logit is less than that above the next: at near-ties, as
    where rounding decides.
    """

    def choice(layer: Experts, limit: float | None) -> Choice:
        def choose(logits: Tensor) -> Tensor:
            ranked = logits.topk(layer.top + 1)
            if limit is None:
                flips = torch.rand(logits.shape[:-1], generator=generator) < rate
            else:
                flips = ranked.values[..., -2] - ranked.values[..., -1] < limit
            ids = ranked.indices
            last = torch.where(flips, ids[..., -1], ids[..., -2])
            return torch.cat([ids[..., :-2], last.unsqueeze(-1)], dim=-1)

        return choose

    layers = expert_layers(model)
    return [choice(layer, limit) for layer, limit in zip(layers, limits or [None] * len(layers), strict=True)]


def moments_of(first: Tensor, second: Tensor, mask: Tensor, experts: int) -> dict[str, float]:
    """How often two routings differ, by the kit's diagnostics.

    Args:
        first: (B, L, layers, k), of prompt and answer but the last token.
        second: likewise.
        mask: (B, T) of the answer's tokens.
        experts: K.

    Returns:
        ``delta``, the share of tokens for which one side alone chose an expert (mean over experts and layers), and
        ``flips``, the share of tokens and layers whose choices differ at all.
    """
    attended = functional.pad(mask[:, :-1], (first.shape[1] - mask.shape[1] + 1, 0), value=True)
    found = routing_moments(first, second, attended, experts=experts)
    return {"delta": float(expert_flip_mean(found)), "flips": float(routing_flip_fraction(found))}
