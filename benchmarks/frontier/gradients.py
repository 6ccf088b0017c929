"""Gradients of many estimators from one forward pass: each is a sum over tokens, coefficient times grad log pi.

They are gradients of the parameters whose effect on a token's log-prob runs through that token's own position only: the
head, the last norm, and of the last block the queries, the attention's output, the feed-forward and its norm. There the
gradient of a linear layer is delta (outer) input, both made once by a backward pass of the sum of all log-probs, and a
coefficient only scales a token's delta. An estimator more is one matrix product more, not one backward pass more.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.frontier.walk import Walker
from benchmarks.lab.sorting import COUNT, token_logps


class Pair(NamedTuple):
    """Of a linear layer: ``delta`` (B, T, out), d log pi / d output, and ``input`` (B, T, in), with a 1 for a bias."""

    delta: Tensor
    input: Tensor


@dataclass(frozen=True)
class Factors:
    """What the gradients of B responses of T tokens are made of.

    Args:
        logps: (B, T) log-probs of the answer's tokens, nats.
        pairs: of the linear layers.
        direct: (B, T, P), the gradient of the parameters that scale or shift a unit (the norms').
    """

    logps: Tensor
    pairs: tuple[Pair, ...]
    direct: Tensor

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(pair.delta.shape[2] * pair.input.shape[2] for pair in self.pairs) + self.direct.shape[2]


NAMES = ("head", "down", "up", "out", "query")


def factors(model: Walker, ids: Tensor) -> Factors:
    """Of every answer token of ``ids`` (B, 11 + T)."""
    with torch.no_grad():
        x = model.embed(ids[:, :-1])
        for block in model.blocks[:-1]:
            x = block(x, [])
        block = model.blocks[-1]
        rows, length, width = x.shape
        first = block.norms[0](x)
        q, k, v = block.qkv(first).chunk(3, -1)
    taps: dict[str, tuple[Tensor, Tensor]] = {}

    def tap(name: str, output: Tensor, source: Tensor) -> Tensor:
        taps[name] = (output, source)
        return output

    with torch.enable_grad():
        q = tap("query", q.requires_grad_(), first)
        heads = [part.view(rows, length, block.heads, -1).transpose(1, 2) for part in (q, k, v)]
        mixed = (
            functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        )
        x = x + tap("out", block.out(mixed), mixed)
        inner_unit, inner = _norm(block.norms[1], x)
        up = tap("up", block.up(inner), inner)
        active = functional.gelu(up)
        x = x + tap("down", block.down(active), active)
        last_unit, last = _norm(model.norm, x)
        logits = tap("head", model.head(last), last)
        logps = logits[:, COUNT:].log_softmax(-1).gather(-1, ids[:, COUNT + 1 :].unsqueeze(-1)).squeeze(-1)
        wanted = [taps[name][0] for name in NAMES] + [inner, last]
        *deltas, inner_delta, last_delta = (part[:, COUNT:] for part in torch.autograd.grad(logps.sum(), wanted))
    pairs = []
    for name, delta in zip(NAMES, deltas, strict=True):
        source = taps[name][1].detach()[:, COUNT:]
        pairs.append(Pair(delta, source if name == "head" else functional.pad(source, (0, 1), value=1.0)))
    units = (inner_unit.detach()[:, COUNT:], last_unit.detach()[:, COUNT:])
    direct = torch.cat([inner_delta * units[0], inner_delta, last_delta * units[1], last_delta], dim=2)
    return Factors(logps.detach(), tuple(pairs), direct)


def _norm(norm: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm before and after its scale and shift."""
    unit = functional.layer_norm(x, x.shape[-1:], eps=norm.eps)
    return unit, unit * norm.weight + norm.bias


def beginnings(parts: Factors, length: int) -> Factors:
    """The first ``length`` tokens of every answer, with the tokens of all answers in one row: (1, B T, ...)."""
    pairs = tuple(Pair(*(part[:, :length].flatten(0, 1).unsqueeze(0) for part in pair)) for pair in parts.pairs)
    direct = parts.direct[:, :length].flatten(0, 1).unsqueeze(0)
    return Factors(parts.logps[:, :length].flatten().unsqueeze(0), pairs, direct)


def weighted_sum(parts: Factors, coefficients: Tensor) -> Tensor:
    """(P,): sum over tokens of coefficient times grad log pi, for coefficients (B, T)."""
    flat = coefficients.reshape(-1, 1)
    blocks = [((flat * pair.delta.flatten(0, 1)).T @ pair.input.flatten(0, 1)).flatten() for pair in parts.pairs]
    return torch.cat([*blocks, flat.squeeze(1) @ parts.direct.flatten(0, 1)])


def whole_sums(model: Walker, ids: Tensor, coefficients: Tensor, rows: int) -> Tensor:
    """(F, P): the same sums for all parameters of the model, by one backward pass for each of F estimators.

    Args:
        model: the policy.
        ids: (B, 11 + T).
        coefficients: (F, B, T).
        rows: answers of one forward pass.
    """
    policy = deepcopy(model).requires_grad_(True)
    parameters = list(policy.parameters())
    total = torch.zeros(len(coefficients), sum(one.numel() for one in parameters))
    for part, scales in zip(ids.split(rows), coefficients.split(rows, dim=1), strict=True):
        logps = token_logps(policy, part)
        for place, scale in enumerate(scales):
            found = torch.autograd.grad(logps, parameters, scale, retain_graph=True)
            total[place] += torch.cat([one.flatten() for one in found])
    return total


@dataclass(frozen=True)
class Sketch:
    """A fixed random projection of P numbers to ``size``: each is added, with a random sign, to one of them.

    Linear; squared lengths and inner products are unbiased, with a relative standard deviation of about sqrt(2 / size).
    Reference: the CountSketch of Charikar, Chen and Farach-Colton 2002.
    """

    size: int
    seed: int = 0

    def __call__(self, vectors: Tensor) -> Tensor:
        """(F, size) of (F, P)."""
        chance = torch.Generator().manual_seed(self.seed)
        place = torch.randint(self.size, (vectors.shape[1],), generator=chance)
        sign = 2.0 * torch.randint(2, (vectors.shape[1],), generator=chance) - 1.0
        return torch.zeros(len(vectors), self.size).index_add_(1, place, vectors * sign)
