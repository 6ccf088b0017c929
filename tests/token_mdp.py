"""A token process that is small enough to sum over: vocabulary 3, horizon 4, tabular softmax policies, in float64.

Token 0 ends a response, so that lengths differ. Bias and variance of a weighted policy gradient are sums over all
responses, without sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

VOCABULARY, HORIZON = 3, 4


def responses() -> list[tuple[int, ...]]:
    """Every response: tokens up to and with the first 0, at most HORIZON of them."""
    cut = {(y[: y.index(0) + 1] if 0 in y else y) for y in product(range(VOCABULARY), repeat=HORIZON)}
    return sorted(cut)


RESPONSES = responses()
PREFIXES = sorted({y[:t] for y in RESPONSES for t in range(len(y))})
MASK = torch.tensor([[t < len(y) for t in range(HORIZON)] for y in RESPONSES])
STATE = torch.tensor([[PREFIXES.index(y[:t]) if t < len(y) else 0 for t in range(HORIZON)] for y in RESPONSES])
TOKEN = torch.tensor([[y[t] if t < len(y) else 0 for t in range(HORIZON)] for y in RESPONSES])


@dataclass(frozen=True)
class Process:
    """A sampler mu and a target pi, as (prefixes, 3) logits, and the advantage (responses,) of each response."""

    sampler: Tensor
    target: Tensor
    advantages: Tensor

    def logps(self, logits: Tensor) -> Tensor:
        """(responses, HORIZON) log-probs of the tokens, 0 after the end."""
        return torch.where(MASK, logits.log_softmax(-1)[STATE, TOKEN], 0.0)

    @property
    def sampling(self) -> Tensor:
        return self.logps(self.sampler)

    @property
    def old(self) -> Tensor:
        return self.logps(self.target)

    @property
    def mu(self) -> Tensor:
        """(responses,) probability of each response under the sampler."""
        return self.sampling.sum(-1).exp()

    @property
    def scores(self) -> Tensor:
        """(responses, HORIZON, prefixes * 3): grad log pi of each token by the target's logits."""
        probs = self.target.softmax(-1)
        by_token = torch.zeros(len(RESPONSES), HORIZON, *self.target.shape, dtype=torch.float64)
        for i, y in enumerate(RESPONSES):
            for t in range(len(y)):
                by_token[i, t, STATE[i, t]] = -probs[STATE[i, t]]
                by_token[i, t, STATE[i, t], y[t]] += 1
        return by_token.flatten(2)

    def terms(self, weights: Tensor) -> Tensor:
        """(responses, parameters): A (1/n) sum_t w_t s_t of each response; weights (responses, HORIZON) or (., 1)."""
        each = (torch.where(MASK, weights, 0.0).unsqueeze(-1) * self.scores).sum(1) / MASK.sum(-1, keepdim=True)
        return self.advantages.unsqueeze(-1) * each

    @property
    def gradient(self) -> Tensor:
        """(parameters,) what is wanted: the expectation under the target itself."""
        return self.old.sum(-1).exp() @ self.terms(torch.ones_like(self.sampling))

    def bias(self, weights: Tensor) -> float:
        """Norm of the estimator's bias."""
        return float((self.mu @ self.terms(weights) - self.gradient).norm())

    def variance(self, weights: Tensor) -> float:
        """Trace of the covariance of one response's term."""
        terms = self.terms(weights)
        return float(self.mu @ terms.square().sum(-1) - (self.mu @ terms).square().sum())


def process(drift: float, seed: int = 0, *, shape: Callable[[Tensor], Tensor] | None = None) -> Process:
    """Random policies whose logits differ by ``drift`` standard deviations, and advantages in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(RESPONSES), generator=generator, dtype=torch.float64) * 2 - 1
    return Process(logits, logits + drift * (noise if shape is None else shape(noise)), rewards)
