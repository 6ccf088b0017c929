"""The forms of the papers that are not the defaults, against sums and formulas that are written another way."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import trl_offpolicy as op
from trl_offpolicy import losses, presets
from trl_offpolicy.advantages import AdvantageInputs, OptimalTokenBaseline
from trl_offpolicy.objective.kl import KLPenalty


def probabilities(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(logits: Tensor, **others: Tensor) -> op.PolicyBatch:
    """Every token of a vocabulary as a response of its own, under the policy of ``logits``."""
    size = len(logits)
    logps = logits.log_softmax(-1).float().unsqueeze(1)
    given = {name: value.log().float().unsqueeze(1) for name, value in others.items()}
    fields: dict[str, Any] = {"completion_mask": torch.ones(size, 1).bool(), "advantages": torch.zeros(size), **given}
    return op.PolicyBatch(per_token_logps=logps, **fields)


NOW, OLD = probabilities(0.5, 0.2, 0.2, 0.1), probabilities(0.3, 0.4, 0.2, 0.1)
ENGINE, REFERENCE = probabilities(0.25, 0.25, 0.3, 0.2), probabilities(0.1, 0.4, 0.2, 0.3)


def expected_gradient(objective: op.Objective, sampled_from: Tensor, **others: Tensor) -> Tensor:
    """The gradient on the logits, averaged over every token that ``sampled_from`` can draw."""
    logits = NOW.log().requires_grad_()
    result = objective(one_token(logits, **others))
    (result.per_token_loss.squeeze(1).double() * sampled_from).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return logits.grad


def exact_gradient(divergence: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(divergence, logits)
    return gradient


def test_the_k3_penalty_of_kl_cov_has_the_gradient_of_the_papers_kl() -> None:
    """All tokens are penalised (fraction 1), so that nothing is picked by its own log-prob."""
    loss = losses.KLCov(fraction=1.0, coef=2.0, penalty="k3")
    found = expected_gradient(op.Objective(policy_loss=loss), OLD, old_per_token_logps=OLD)

    logits = NOW.log().requires_grad_()
    kl = (OLD * (OLD.log() - logits.log_softmax(-1))).sum()  # KL(pi_old || pi)
    torch.testing.assert_close(found, exact_gradient(2.0 * kl, logits), atol=1e-6, rtol=1e-5)

    plain = expected_gradient(op.Objective(policy_loss=replace(loss, penalty="abs")), OLD, old_per_token_logps=OLD)
    assert (plain - found).abs().max() > 0.1


@pytest.mark.parametrize("published", [True, False])
def test_the_corrected_k3_against_the_policy_that_sampled(published: bool) -> None:
    """Tokens of the engine: only with its weight is the mean gradient that of KL(pi || ref)."""
    penalty = KLPenalty(coef=1.0, estimator="k3", ratio_weighted=True)
    correction = presets.get("paper/vanilla-is").correction
    objective = op.Objective(kl=penalty, kl_weighted=published, correction=correction)
    policies = {"old_per_token_logps": OLD, "sampling_per_token_logps": ENGINE, "ref_per_token_logps": REFERENCE}
    found = expected_gradient(objective, ENGINE, **policies)

    logits = NOW.log().requires_grad_()
    logps = logits.log_softmax(-1)
    kl = (logps.exp() * (logps - REFERENCE.log())).sum()
    error = (found - exact_gradient(kl, logits)).abs().max()
    assert error < 1e-5 if published else error > 0.02


@pytest.mark.parametrize("published", [True, False])
def test_the_corrected_k3_in_bypass_mode_is_the_published_one(published: bool) -> None:
    penalty = KLPenalty(coef=1.0, estimator="k3", ratio_weighted=True)
    objective = op.Objective(kl=penalty, mode="bypass" if published else "decoupled")
    policies = {"old_per_token_logps": OLD, "sampling_per_token_logps": ENGINE, "ref_per_token_logps": REFERENCE}
    found = expected_gradient(objective, ENGINE, **policies)

    logits = NOW.log().requires_grad_()
    logps = logits.log_softmax(-1)
    error = (found - exact_gradient((logps.exp() * (logps - REFERENCE.log())).sum(), logits)).abs().max()
    assert error < 1e-5 if published else error > 0.02


def response(log_ratios: list[float], *, advantage: float, reward: float | None = None) -> op.PolicyBatch:
    """A response with these log(pi / mu), and pi_old = mu."""
    old = torch.tensor([[-1.0 - 0.3 * k for k in range(len(log_ratios))]])
    current = (old + torch.tensor([log_ratios])).requires_grad_()
    rewards = None if reward is None else torch.tensor([reward])
    return op.PolicyBatch(
        per_token_logps=current, old_per_token_logps=old, sampling_per_token_logps=old, rewards=rewards,
        completion_mask=torch.ones(1, len(log_ratios)).bool(), advantages=torch.tensor([advantage]),
    )  # fmt: skip


def weights_of(objective: op.Objective, batch: op.PolicyBatch) -> list[float]:
    """-dL / dlog pi of each token: what multiplies its score."""
    objective(batch).per_token_loss.sum().backward()  # type: ignore[no-untyped-call]
    assert batch.per_token_logps.grad is not None
    return [-value for value in batch.per_token_logps.grad[0].tolist()]


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.1, 1.0, 1 / 1.1),
        (1.3, 1.0, 0.0),  # the paper's upper clip
        (0.5, 1.0, 2.0),
        (0.1, 1.0, 3.0),  # the soft cap stays
        (1.3, -1.0, -1.3),  # it is one-sided
        (0.7, -1.0, 0.0),
    ],
)
def test_aspo_with_the_upper_clip(ratio: float, advantage: float, weight: float) -> None:
    batch = response([math.log(ratio)], advantage=advantage)
    objective = op.Objective(policy_loss=losses.ASPO(high=0.2))
    assert weights_of(objective, batch) == pytest.approx([weight], rel=1e-5, abs=1e-9)
    stats = objective(batch).stats.compute()
    assert stats["offpolicy/loss/clip_high_fraction"] == float(ratio == 1.3 and advantage > 0)
    plain = op.Objective(policy_loss=losses.ASPO())
    if weight == 0 and advantage > 0:
        assert weights_of(plain, response([math.log(ratio)], advantage=advantage)) == pytest.approx([1 / ratio])


@pytest.mark.parametrize(
    ("reward", "advantage", "by_reward", "by_advantage"),
    [
        (1.0, -0.5, 1.0, -0.5 * math.exp(-0.4)),  # a good answer in a better group
        (-1.0, 0.5, -math.exp(-0.4), 0.5),  # a bad one in a worse group
        (math.nan, 0.5, 0.0, 0.5),
    ],
)
def test_topr_by_the_reward(reward: float, advantage: float, by_reward: float, by_advantage: float) -> None:
    logs = [-0.1, -0.3]
    for baseline, weight in ((0.0, by_reward), (None, by_advantage)):
        objective = op.Objective(policy_loss=losses.TOPR(baseline=baseline), aggregation="seq_mean_token_sum")
        batch = response(logs, advantage=advantage, reward=reward)
        assert weights_of(objective, batch) == pytest.approx([weight, weight], rel=1e-5)


def test_topr_says_that_it_needs_the_reward() -> None:
    assert losses.TOPR().reads == ("sampling_log_ratios",)
    assert losses.TOPR(baseline=0.5).reads == ("sampling_log_ratios", "rewards")
    with pytest.raises(ValueError, match=r"^rewards must be given for TOPR"):
        op.Objective(policy_loss=losses.TOPR(baseline=0.0))(response([0.1], advantage=1.0))
    with pytest.raises(ValueError, match=r"^baseline must be a finite number"):
        losses.TOPR(baseline=math.nan)


@pytest.mark.parametrize("kind", ["prefix_min", "prefix"])
def test_minpro_and_ctpo_can_hold_the_policy_ratio(kind: str) -> None:
    """The weight of the plain policy gradient in bypass mode holds pi / mu, staleness included."""
    logs = [0.2, -0.1, 0.3, 0.05]
    weight: op.PrefixMinWeight | op.PrefixWeight
    if kind == "prefix_min":
        weight = op.PrefixMinWeight(ratio="current/sampling")
        before = [math.inf, 0.2, -0.1, -0.1]
        wanted = [math.exp(here + (0 if low == math.inf else low)) for here, low in zip(logs, before, strict=True)]
    else:
        weight = op.PrefixWeight(low=0.9, high=1.2, ratio="current/sampling")
        sums = [0.2, 0.1, 0.4, 0.45]
        bounds = [(math.sqrt(t) * math.log(0.9), math.sqrt(t) * math.log(1.2)) for t in (1, 2, 3, 4)]
        wanted = [math.exp(min(max(total, low), high)) for total, (low, high) in zip(sums, bounds, strict=True)]
        assert wanted[0] == pytest.approx(1.2) and any(a != b for a, b in pairwise(wanted))
    objective = op.Objective(mode="bypass", policy_loss=losses.GPG(), correction=op.Correction(weight=weight))
    assert weights_of(objective, response(logs, advantage=2.0)) == pytest.approx([2 * one for one in wanted], rel=1e-5)


def test_trm_can_read_the_policy_that_learns() -> None:
    """mu = pi_old, so that only the step of the policy can be above the bound."""
    batch = response([0.0, 0.5], advantage=1.0)
    kept = {}
    for ratio in ("old/sampling", "current/sampling"):
        correction = presets.get("paper/trm", high=0.05, ratio=ratio).correction
        assert correction is not None
        kept[ratio] = correction(batch).keep_mask.tolist()
    assert math.exp(0.5) - 1 - 0.5 > 0.05
    assert kept == {"old/sampling": [[True, True]], "current/sampling": [[False, False]]}


def inputs_of_a_group(weights: Tensor) -> AdvantageInputs:
    logps = torch.tensor([[0.5, 0.25, 0.8], [0.9, 0.1, 0.3]]).log()
    return AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]), group_ids=torch.zeros(2).long(), mask=torch.ones(2, 3).bool(),
        per_token_logps=logps, sum_sq_probs=torch.tensor([[0.5, 0.3, 0.7], [0.85, 0.2, 0.4]]), weights=weights,
    )  # fmt: skip


@pytest.mark.parametrize("multi_turn", [False, True])
@pytest.mark.parametrize("weigh", ["token", "path"])
def test_where_the_weight_enters_the_energy(weigh: str, multi_turn: bool) -> None:
    weights = [[1.0, 2.0, 0.5], [0.5, 1.0, 1.5]]
    given = inputs_of_a_group(torch.tensor(weights))
    estimator = OptimalTokenBaseline(is_aware=True, weigh=weigh, multi_turn=multi_turn)  # type: ignore[arg-type]
    energies = [
        [1 - 2 * p + s for p, s in zip((0.5, 0.25, 0.8), (0.5, 0.3, 0.7), strict=True)],
        [1 - 2 * p + s for p, s in zip((0.9, 0.1, 0.3), (0.85, 0.2, 0.4), strict=True)],
    ]
    for t in range(3):
        path = []
        for energy, weight in zip(energies, weights, strict=True):
            if weigh == "path":
                path.append(weight[t] ** 2 * sum(energy[: t + 1]))
            else:
                path.append(sum(w * w * e for w, e in zip(weight[: t + 1], energy, strict=False)))
        baseline = path[0] / sum(path)
        assert estimator(given)[:, t].tolist() == pytest.approx([1 - baseline, -baseline], rel=1e-5)


def test_both_energies_agree_for_one_weight_per_response() -> None:
    given = inputs_of_a_group(torch.tensor([[2.0], [0.5]]))
    by_token = OptimalTokenBaseline(is_aware=True)(given)
    torch.testing.assert_close(OptimalTokenBaseline(is_aware=True, weigh="path")(given), by_token)
    with pytest.raises(ValueError, match=r"^weigh must be 'token' unless is_aware"):
        OptimalTokenBaseline(weigh="path")
