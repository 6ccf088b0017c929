"""Token processes that are small enough to sum over: tabular softmax policies, every response, float64.

Token 0 ends a response, so that lengths differ; a response without it ends at the horizon. A state is a prefix, and
every prefix has its own logits. Expectation and variance of an estimator of the policy gradient are sums over all
responses, without sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, eq=False)
class Space:
    """Every response of N, of at most T tokens, and the S prefixes that they pass.

    Args:
        vocabulary: tokens; 0 ends a response.
        horizon: T.
        mask: (N, T) bool, the tokens of a response.
        state: (N, T) integer, the prefix before each token; 0 where there is none.
        token: (N, T) integer; 0 where there is none.
        prefixes: S.
    """

    vocabulary: int
    horizon: int
    mask: Tensor
    state: Tensor
    token: Tensor
    prefixes: int

    @property
    def lengths(self) -> Tensor:
        """(N,) float64 tokens of each response."""
        return self.mask.sum(-1).double()

    def logps(self, logits: Tensor) -> Tensor:
        """(N, T) log-probs of the tokens under (S, vocabulary) ``logits``, nats; 0 after the end."""
        return torch.where(self.mask, logits.log_softmax(-1)[self.state, self.token], 0.0)

    def entropies(self, logits: Tensor) -> Tensor:
        """(N, T) entropy of the next token before each token, nats; 0 after the end."""
        logps = logits.log_softmax(-1)
        by_state = -torch.where(logps > -torch.inf, logps.exp() * logps, 0.0).sum(-1)
        return torch.where(self.mask, by_state[self.state], 0.0)

    def square_sums(self, logits: Tensor) -> Tensor:
        """(N, T) sum over the vocabulary of the probabilities squared, before each token; 0 after the end."""
        by_state = logits.softmax(-1).square().sum(-1)
        return torch.where(self.mask, by_state[self.state], 0.0)

    def gradient(self, coefficients: Tensor, probability: Tensor, logits: Tensor) -> Tensor:
        """Sum over responses of their probability times sum_t c_t grad log pi(y_t), with pi the softmax of ``logits``.

        The gradient of a log-prob by the logits of its own prefix is (1 at the token, else 0) - pi.

        Args:
            coefficients: (N, T), c.
            probability: (N,), or a factor of each response.
            logits: (S, vocabulary).

        Returns:
            (S, vocabulary).
        """
        by_token = (torch.where(self.mask, coefficients, 0.0) * probability.unsqueeze(-1)).flatten()
        at_token = torch.zeros(self.prefixes * self.vocabulary, dtype=by_token.dtype)
        at_token.index_add_(0, (self.state * self.vocabulary + self.token).flatten(), by_token)
        at_token = at_token.view(self.prefixes, self.vocabulary)
        return at_token - at_token.sum(-1, keepdim=True) * logits.softmax(-1)

    def gradients(self, coefficients: Tensor, pieces: int, logits: Tensor) -> Tensor:
        """:meth:`gradient` of each of ``pieces`` equal parts of the rows, which all have a factor of 1.

        Args:
            coefficients: (N, T), N a multiple of ``pieces``.
            pieces: P.
            logits: (S, vocabulary).

        Returns:
            (P, S, vocabulary).
        """
        by_token = torch.where(self.mask, coefficients, 0.0)
        size = self.prefixes * self.vocabulary
        piece = torch.arange(pieces).repeat_interleave(len(by_token) // pieces).unsqueeze(-1)
        place = (piece * size + self.state * self.vocabulary + self.token).flatten()
        at_token = torch.zeros(pieces * size, dtype=by_token.dtype).index_add_(0, place, by_token.flatten())
        at_token = at_token.view(pieces, self.prefixes, self.vocabulary)
        return at_token - at_token.sum(-1, keepdim=True) * logits.softmax(-1)

    def square_norms(self, coefficients: Tensor, logits: Tensor) -> Tensor:
        """(N,) squared norm of sum_t c_t grad log pi(y_t) of each response.

        A response meets a prefix once, so the tokens' gradients lie in different rows of the logits and their squares
        add up: c^2 (1 - 2 pi(y_t) + sum_v pi(v)^2).
        """
        probs = logits.softmax(-1)
        by_token = (1 - 2 * probs + probs.square().sum(-1, keepdim=True))[self.state, self.token]
        return torch.where(self.mask, coefficients.square() * by_token, 0.0).sum(-1)

    def take(self, index: Tensor) -> Space:
        """The responses of ``index``, which may repeat."""
        return Space(
            self.vocabulary, self.horizon, self.mask[index], self.state[index], self.token[index], self.prefixes
        )


@lru_cache
def space(vocabulary: int, horizon: int) -> Space:
    """Every response.

    Raises:
        ValueError: fewer than 2 tokens or a horizon below 1.

    Example:
        >>> space(3, 2).mask.sum(-1).tolist()  # 0; 1 0, 1 1, 1 2; 2 0, 2 1, 2 2
        [1, 2, 2, 2, 2, 2, 2]
    """
    if vocabulary < 2 or horizon < 1:
        raise ValueError(f"vocabulary must be at least 2 and horizon at least 1, but got {vocabulary} and {horizon}.")
    prefixes: list[tuple[int, ...]] = [()]
    responses: list[tuple[int, ...]] = []
    for prefix in prefixes:  # grows while it is read: breadth first
        for token in range(vocabulary):
            longer = (*prefix, token)
            (responses if token == 0 or len(longer) == horizon else prefixes).append(longer)
    responses.sort()
    prefixes.sort()
    place = {prefix: index for index, prefix in enumerate(prefixes)}
    padded = [[*y, *([0] * (horizon - len(y)))] for y in responses]
    states = [[place[y[:t]] if t < len(y) else 0 for t in range(horizon)] for y in responses]
    mask = [[t < len(y) for t in range(horizon)] for y in responses]
    return Space(vocabulary, horizon, torch.tensor(mask), torch.tensor(states), torch.tensor(padded), len(prefixes))


@dataclass(frozen=True, eq=False)
class Process:
    """A sampler mu and a target pi, as (S, vocabulary) logits, and the advantage (N,) of each response."""

    space: Space
    sampler: Tensor
    target: Tensor
    advantages: Tensor

    @property
    def sampling(self) -> Tensor:
        """(N, T) log mu."""
        return self.space.logps(self.sampler)

    @property
    def old(self) -> Tensor:
        """(N, T) log pi."""
        return self.space.logps(self.target)

    @property
    def mu(self) -> Tensor:
        """(N,) probability of each response under the sampler."""
        return self.sampling.sum(-1).exp()

    def coefficients(self, weights: Tensor) -> Tensor:
        """(N, T): A w_t / n, the mean over the tokens; weights (N, T) or (N, 1)."""
        return self.advantages.unsqueeze(-1) * weights / self.space.lengths.unsqueeze(-1)

    def bias(self, weights: Tensor) -> float:
        """Norm of the difference to the gradient with every response from the target itself."""
        wanted = self.space.gradient(self.coefficients(torch.ones_like(self.old)), self.old.sum(-1).exp(), self.target)
        found = self.space.gradient(self.coefficients(weights), self.mu, self.target)
        return float((found - wanted).norm())

    def variance(self, weights: Tensor) -> float:
        """Trace of the covariance of one response's term."""
        coefficients = self.coefficients(weights)
        mean = self.space.gradient(coefficients, self.mu, self.target)
        return float(self.mu @ self.space.square_norms(coefficients, self.target) - mean.square().sum())


def process(
    drift: float,
    seed: int = 0,
    *,
    vocabulary: int = 3,
    horizon: int = 4,
    shape: Callable[[Tensor], Tensor] | None = None,
) -> Process:
    """Random policies whose logits differ by ``drift`` standard deviations, and advantages in [-1, 1]."""
    over = space(vocabulary, horizon)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(over.prefixes, vocabulary, generator=generator, dtype=torch.float64)
    noise = torch.randn(over.prefixes, vocabulary, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(over.mask), generator=generator, dtype=torch.float64) * 2 - 1
    return Process(over, logits, logits + drift * (noise if shape is None else shape(noise)), rewards)


class _Double(TorchFunctionMode):
    """Every request for float32 becomes one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """The kit's own code, which casts to float32, computes in float64 inside this block.

    Then what remains of an unbiased estimator's bias is the rounding of float64, 1e-16, and a claim is checked at 1e-12
    instead of 1e-6. Not one line of the kit's arithmetic is copied or changed.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(default)
