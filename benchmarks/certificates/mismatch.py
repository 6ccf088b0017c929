"""How sampler and trainer come to differ: each kind of mismatch as an exact distribution over responses.

Every kind has the same target policy, the same rewards and so the same true gradient. What differs is the distribution
that samples, and the log-probs that the engine reports, which need not be those it sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.certificates.mdp import Space, space

VERSIONS = 4
"""The trainer's updates between the oldest sampler and the target."""

STEP = 4.0
"""Step size of an exact policy gradient step on the logits."""

END = -1.5
"""Added to the logits of the token that ends a response, so that responses are not all short."""

SIZES = ((3, 4), (3, 6), (4, 4), (4, 5), (3, 8), (4, 6))
"""(vocabulary, horizon) of the seeds, in turn."""


@dataclass(frozen=True, eq=False)
class World:
    """One random task with the trainer's last versions.

    Args:
        space: its responses.
        rewards: (N,) in [0, 1].
        versions: (S, vocabulary) logits, oldest first; the last one is the target.
        noise: (S, vocabulary) standard normal, for perturbations.
    """

    space: Space
    rewards: Tensor
    versions: tuple[Tensor, ...]
    noise: Tensor

    @property
    def target(self) -> Tensor:
        """Logits of the policy that is trained."""
        return self.versions[-1]


@dataclass(frozen=True, eq=False)
class Case:
    """What can be sampled under a kind of mismatch, one row for each possibility (N rows).

    Args:
        space: the response of each row.
        probability: (N,) with which a row is sampled; they add up to 1.
        sampling: (N, T) log-probs that the engine reports, nats.
        target: (S, vocabulary) logits of the trainer now.
        lag: (N,) integer, versions between the sampler of the row and the trainer.
        rewards: (N,).
        baseline: constant that is subtracted from the rewards, the target's expected reward.
        gradient: (S, vocabulary), the exact gradient of the target's expected reward.
        token_advantages: (N, T) in place of the reward minus the baseline; None = that.
        versions: logits of the trainer's versions that sampled, where they are several; a row's own is the one with its
            lag. Oldest last.
    """

    space: Space
    probability: Tensor
    sampling: Tensor
    target: Tensor
    lag: Tensor
    rewards: Tensor
    baseline: float
    gradient: Tensor
    token_advantages: Tensor | None = None
    versions: tuple[Tensor, ...] = ()

    @property
    def advantages(self) -> Tensor:
        """(N,) reward minus the constant baseline, or (N, T) if it has others."""
        return self.rewards - self.baseline if self.token_advantages is None else self.token_advantages

    @property
    def tokens(self) -> float:
        """Expected tokens of a response."""
        return float(self.probability @ self.space.lengths)


def expected_gradient(over: Space, logits: Tensor, rewards: Tensor) -> tuple[float, Tensor]:
    """Expected reward under ``logits``, and its exact gradient, (S, vocabulary)."""
    probability = over.logps(logits).sum(-1).exp()
    value = float(probability @ rewards)
    # The baseline changes nothing in the sum; it only keeps rounding small.
    return value, over.gradient((rewards - value).unsqueeze(-1).expand_as(over.mask), probability, logits)


@lru_cache(maxsize=4)
def world(seed: int, size: tuple[int, int] | None = None) -> World:
    """The task of a seed; ``size`` is (vocabulary, horizon), by default the seed's turn in ``SIZES``."""
    over = space(*(SIZES[seed % len(SIZES)] if size is None else size))
    generator = torch.Generator().manual_seed(seed)
    shape = (over.prefixes, over.vocabulary)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    logits[:, 0] += END
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    rewards = torch.rand(len(over.mask), generator=generator, dtype=torch.float64)
    versions = [logits]
    for _ in range(VERSIONS):
        versions.append(versions[-1] + STEP * expected_gradient(over, versions[-1], rewards)[1])
    return World(over, rewards, tuple(versions), noise)


def graded(made: World, share: float) -> World:
    """The task with rewards of 0 and 1: the best responses, of at least ``share`` of the target's mass, are right.

    Args:
        made: the task.
        share: in (0, 1).
    """
    probability = made.space.logps(made.target).sum(-1).exp()
    order = made.rewards.argsort(descending=True)
    before = probability[order].cumsum(0) - probability[order]
    rewards = torch.zeros_like(made.rewards)
    rewards[order[before < share]] = 1.0
    return replace(made, rewards=rewards)


# ------------------------------------------------------------------------------------------------- kinds of mismatch


def _case(made: World, sampler: Tensor, reported: Tensor | None = None, *, lag: int = 0) -> Case:
    """One sampler, as logits (minus infinity = never); it reports its own log-probs unless ``reported`` are others."""
    sampled = made.space.logps(sampler)
    probability = sampled.sum(-1).exp()
    possible = probability > 0  # where the sampler cannot go its log-prob is minus infinity, and nobody sees it
    over = made.space.take(possible.nonzero().squeeze(-1))
    baseline, gradient = expected_gradient(made.space, made.target, made.rewards)
    return Case(
        space=over,
        probability=probability[possible],
        sampling=over.logps(sampler if reported is None else reported),
        target=made.target,
        lag=torch.full((len(over.mask),), lag),
        rewards=made.rewards[possible],
        baseline=baseline,
        gradient=gradient,
    )


def _perturbed(made: World, spread: float) -> Case:
    return _case(made, made.target + spread * made.noise)


def _lagging(made: World, lag: int) -> Case:
    return _case(made, made.versions[-1 - lag], lag=lag)


def _mixed(made: World) -> Case:
    """An equal share of every version from lag 0 to lag 4, each with its own log-probs."""
    cases = [_lagging(made, lag) for lag in range(VERSIONS + 1)]
    every = torch.arange(len(made.rewards)).repeat(len(cases))
    first = cases[0]
    return Case(
        space=made.space.take(every),
        probability=torch.cat([case.probability for case in cases]) / len(cases),
        sampling=torch.cat([case.sampling for case in cases]),
        target=first.target,
        lag=torch.cat([case.lag for case in cases]),
        rewards=made.rewards[every],
        baseline=first.baseline,
        gradient=first.gradient,
        versions=tuple(made.versions[::-1]),
    )


def _cooled(made: World, *, said: bool) -> Case:
    """Temperature 0.9; the log-probs are those of temperature 1 unless it is said."""
    return _case(made, made.target / 0.9, None if said else made.target)


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """(S, vocabulary) logits, minus infinity outside the smallest set of likeliest tokens of mass ``top_p``."""
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    before = probs.cumsum(-1) - probs
    outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return logits.masked_fill(outside, -torch.inf)


def _cut(made: World, *, said: bool) -> Case:
    """Nucleus sampling of 0.9; the log-probs are those of the whole vocabulary unless it is said."""
    return _case(made, nucleus(made.target, 0.9), None if said else made.target)


def _flipped(made: World, share: float = 0.02) -> Case:
    """A share of the tokens is replaced by a random one after its log-prob was taken: the sampler of a kernel fault."""
    flips = (1 - share) * made.target.softmax(-1) + share / made.space.vocabulary
    return _case(made, flips.log(), made.target)


KINDS: dict[str, tuple[str, Callable[[World], Case]]] = {
    "none": ("the sampler is the target", lambda made: _case(made, made.target)),
    "rounding": ("logits off by 0.05 standard deviations", lambda made: _perturbed(made, 0.05)),
    "large": ("logits off by 0.7 standard deviations", lambda made: _perturbed(made, 0.7)),
    "lag 1": ("the sampler is one exact policy gradient step behind", lambda made: _lagging(made, 1)),
    "lag 4": ("four steps behind", lambda made: _lagging(made, 4)),
    "mixed lags": ("a fifth of the batch from each of the last five versions", _mixed),
    "temperature": ("sampled at 0.9, reported so", lambda made: _cooled(made, said=True)),
    "temperature unsaid": ("sampled at 0.9, log-probs of temperature 1", lambda made: _cooled(made, said=False)),
    "top-p": ("nucleus 0.9, reported so: a part of the support is missing", lambda made: _cut(made, said=True)),
    "top-p unsaid": ("nucleus 0.9, log-probs of the whole vocabulary", lambda made: _cut(made, said=False)),
    "token flips": ("2 % of the tokens replaced after their log-prob was taken", _flipped),
}
"""{name: (what it is, how to make it)}."""

REPORTED = ("none", "rounding", "large", "lag 1", "lag 4", "mixed lags", "temperature")
"""The kinds in which the engine reports what it sampled from and can sample every response."""


def case(kind: str, made: World) -> Case:
    """The exact distribution of a kind of mismatch.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, but got {kind!r}.")
    return KINDS[kind][1](made)
