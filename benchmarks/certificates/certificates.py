"""Bias and variance of an estimator of the policy gradient against the exact gradient.

What is one term for each response is summed over every response with its probability: no sampling, float64. What
depends on the batch (a mean weight, a budget, a group) is measured on batches drawn from the exact distribution, as
the exact expectation of a similar row plus the mean difference to it; its error is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import trl_offpolicy as op
from benchmarks.certificates.mdp import Space, in_float64
from benchmarks.certificates.mismatch import Case, World, case, graded
from benchmarks.certificates.terms import Mixture, Row, rows
from trl_offpolicy.functional.mixture import mixture_logps
from trl_offpolicy.objective.advantages import AdvantageEstimator, AdvantageInputs

BATCH = 64
"""Responses of a batch, at which variance and mean squared error are given."""

GROUP = 8
"""Responses to a prompt in it, for what looks at a prompt's responses together."""

ROUNDING = 1e-11
"""An exact relative bias below it is none."""

ROUNDING_32 = 1e-6
"""The same for drawn batches, which the kit computes in its own float32."""


@dataclass(frozen=True)
class Certificate:
    """What is known about one row under one kind of mismatch.

    Everything is in units of the wanted gradient: the true one times the constant that the row's normaliser has.

    Args:
        exact: True = a sum over every response; False = batches were drawn.
        bias: norm of the expected estimate minus the wanted gradient.
        error: standard error of that, from drawn batches; 0 where exact.
        angle: degrees between expectation and wanted gradient; it does not depend on any scale. NaN if the
            expectation is 0.
        length: the expectation's component along the wanted gradient; 1 = neither shrunk nor grown.
        variance: trace of the covariance of the estimate of one batch.
        mse: bias^2 + variance.
    """

    exact: bool
    bias: float
    error: float
    angle: float
    length: float
    variance: float
    mse: float

    @property
    def unbiased(self) -> bool:
        """Exactly, up to rounding; from drawn batches: not further than two standard errors."""
        return self.bias < ROUNDING if self.exact else self.bias <= 2 * self.error + ROUNDING_32


class Moments(NamedTuple):
    """Expectation (S, vocabulary) of one response's term and the trace of its covariance."""

    mean: Tensor
    variance: float


def case_of(row: Row, kind: str, made: World) -> Case:
    """The case of a kind of mismatch, with the rewards that ``row`` is about."""
    return _case_of(row.pass_rate, kind, made)


@lru_cache(maxsize=2)
def _case_of(pass_rate: float | None, kind: str, made: World) -> Case:
    return case(kind, made if pass_rate is None else graded(made, pass_rate))


def sampling_of(case: Case, mixture: Mixture | None) -> Tensor:
    """(N, T) log-probs of the denominator: each row's own sampler, or the mixture of all versions that sampled.

    The shares are those in expectation, as in a large batch: of the tokens at level "token", as in the trainers, and of
    the responses at level "sequence". Where one version samples, the mixture is that version.
    """
    if mixture is None or not case.versions:
        return case.sampling
    scored = torch.stack([case.space.logps(version) for version in case.versions])
    counted = case.probability * (case.space.lengths if mixture == "token" else 1.0)
    shares = torch.stack([counted[case.lag == lag].sum() for lag in range(len(case.versions))])
    return mixture_logps(scored, shares / shares.sum(), case.space.mask, level=mixture)


def batch_of(case: Case, index: Tensor | None = None, mixture: Mixture | None = None) -> tuple[op.PolicyBatch, Tensor]:
    """The rows of ``index`` (None = all) as the kit's batch before the first step, pi = pi_old, and its leaf (B, T)."""
    over = case.space if index is None else case.space.take(index)
    of = slice(None) if index is None else index
    logps = over.logps(case.target)
    leaf = logps.clone().requires_grad_()
    rewards = case.rewards[of]
    groups = torch.arange(len(rewards)) // GROUP
    # Responses to a prompt exist only in drawn batches.
    group_rewards = None if index is None else rewards.view(-1, GROUP)[groups]
    batch = op.PolicyBatch(
        per_token_logps=leaf,
        old_per_token_logps=logps,
        sampling_per_token_logps=sampling_of(case, mixture)[of],
        completion_mask=over.mask,
        advantages=case.advantages[of],
        rewards=rewards,
        entropies=over.entropies(case.target),
        turn_ids=(torch.arange(over.horizon) // 2).expand(over.mask.shape),
        group_ids=groups,
        group_rewards=group_rewards,
        policy_versions=-case.lag[of],
        current_version=0,
    )
    return batch, leaf


def greedy_reward(case: Case) -> Tensor:
    """Reward of the response that has the target's likeliest token at every place; all rows have one prompt."""
    likeliest = case.target.argmax(-1)[case.space.state]
    is_greedy = ((likeliest == case.space.token) | ~case.space.mask).all(-1)
    return case.rewards[is_greedy][0]


def estimated(
    batch: op.PolicyBatch, objective: op.Objective, estimator: AdvantageEstimator, squares: Tensor, greedy: Tensor
) -> Tensor:
    """(B,) or (B, T) advantages of drawn batches of ``BATCH`` rows, with the weights of the objective's correction.

    Args:
        batch: as :func:`batch_of` makes it.
        objective: whose correction weighs.
        estimator: makes the advantages.
        squares: (B, T) sums of squared probabilities.
        greedy: from :func:`greedy_reward`.
    """
    assert objective.correction is not None and batch.rewards is not None and batch.group_ids is not None
    assert batch.old_per_token_logps is not None
    weights = objective.correction(batch).weights
    found = []
    for start in range(0, len(batch.rewards), BATCH):  # an estimator may look at its whole batch
        of = slice(start, start + BATCH)
        inputs = AdvantageInputs(
            rewards=batch.rewards[of],
            group_ids=batch.group_ids[of],
            mask=batch.mask[of],
            per_token_logps=batch.old_per_token_logps[of],
            sum_sq_probs=squares[of],
            weights=weights[of],
            greedy_rewards=greedy.expand(len(batch.rewards[of])),
        )
        found.append(estimator(inputs))
    return torch.cat(found)


def coefficients(
    objective: op.Objective,
    case: Case,
    index: Tensor | None = None,
    *,
    advantages: AdvantageEstimator | None = None,
    mixture: Mixture | None = None,
) -> Tensor:
    """(B, T): minus the gradient of the kit's loss by the log-prob of each token. The step goes against the loss."""
    batch, leaf = batch_of(case, index, mixture)
    if advantages is not None:
        squares = (case.space if index is None else case.space.take(index)).square_sums(case.target)
        batch = replace(batch, advantages=estimated(batch, objective, advantages, squares, greedy_reward(case)))
    (gradient,) = torch.autograd.grad(objective(batch).loss, leaf)
    return torch.where(batch.mask, -gradient, 0.0)


def terms(row: Row, case: Case) -> Tensor:
    """(N, T) coefficients of each response's own term, whose mean over a batch is the estimate.

    All rows in one call, each weighing 1/N there, which is taken back; ``token_sum`` has no denominator, so that its
    estimate is BATCH times the mean.
    """
    factor = BATCH if row.objective.aggregation == "token_sum" else len(case.probability)
    return coefficients(row.objective, case, mixture=row.mixture) * factor


def moments(over: Space, by_response: Tensor, case: Case) -> Moments:
    """Exact, by summing over every response."""
    mean = over.gradient(by_response, case.probability, case.target)
    square = float(case.probability @ over.square_norms(by_response, case.target))
    return Moments(mean, square - float(mean.square().sum()))


def scale(row: Row, case: Case) -> float:
    """The constant by which the row's normaliser multiplies the gradient.

    The row's own factor if it has one. Else 1 for the sum over a response's tokens, 1 / L for Dr. GRPO's, the batch for
    a plain sum. For a mean over tokens it is 1 over the expected length: that of the ratio of sums in a large batch.
    """
    if row.factor != 1.0:
        return row.factor
    return {
        "seq_mean_token_sum": 1.0,
        "seq_mean_token_sum_norm": 1.0 / case.space.horizon,
        "token_sum": float(BATCH),
        "token_mean": 1.0 / case.tokens,
        "seq_mean_token_mean": 1.0 / case.tokens,
    }[row.objective.aggregation]


def certificate(row: Row, case: Case, *, batches: int = 64, seed: int = 0) -> Certificate:
    """Bias and variance of ``row`` under the mismatch of ``case``.

    Args:
        row: the estimator.
        case: the exact distribution.
        batches: how many are drawn for a row that is not exact.
        seed: of the draws.

    Raises:
        ValueError: the gradient of the case is 0, or fewer than 2 batches.
    """
    if not float(case.gradient.norm()) > 0:
        raise ValueError("case must have a gradient that is not 0, but got 0.")
    if batches < 2:
        raise ValueError(f"batches must be at least 2, but got {batches}.")
    wanted = scale(row, case) * case.gradient
    if row.exact:
        with in_float64():
            found = moments(case.space, terms(row, case), case)
        return _certificate(found.mean, wanted, found.variance / BATCH, spread=0.0, exact=True)
    mean, variance, spread = _from_batches(row, case, batches, seed)
    return _certificate(mean, wanted, variance, spread, exact=False)


def _from_batches(row: Row, case: Case, batches: int, seed: int) -> tuple[Tensor, float, float]:
    """Expectation, trace of the covariance of a batch's estimate, and mean squared error of the expectation."""
    assert row.control is not None
    control = rows()[row.control]
    with in_float64():
        by_response = terms(control, case) * (scale(row, case) / scale(control, case))
    known = moments(case.space, by_response, case).mean
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(case.probability, batches * BATCH, replacement=True, generator=generator)
    # groups that do not see each other: several batches in one call, each of which weighs less there
    pieces = torch.split(drawn, 8 * BATCH if row.by_group else BATCH)
    found = torch.cat([
        coefficients(row.objective, case, index, advantages=row.advantages).double() * (len(index) / BATCH)
        for index in pieces
    ])  # fmt: skip
    over = case.space.take(drawn)
    estimated = over.gradients(found, batches, case.target).flatten(1)
    differed = estimated - over.gradients(by_response[drawn] / BATCH, batches, case.target).flatten(1)
    spread = float(differed.var(0).sum()) / batches
    return known + differed.mean(0).view_as(known), float(estimated.var(0).sum()), spread


def _certificate(mean: Tensor, wanted: Tensor, variance: float, spread: float, *, exact: bool) -> Certificate:
    unit = float(wanted.norm())
    # The squared distance of a drawn mean is too large by its own variance.
    square = max(float((mean - wanted).square().sum()) - spread, 0.0) / unit**2
    norm = float(mean.norm())
    along = float((mean * wanted).sum()) / unit
    angle = math.nan
    if norm > ROUNDING * unit:
        across = math.sqrt(max(norm**2 - along**2, 0.0))
        angle = math.degrees(math.atan2(across, along))
    relative = max(variance, 0.0) / unit**2
    return Certificate(
        exact=exact,
        bias=math.sqrt(square),
        error=math.sqrt(spread) / unit,
        angle=angle,
        length=along / unit,
        variance=relative,
        mse=square + relative,
    )
