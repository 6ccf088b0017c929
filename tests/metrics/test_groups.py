"""Metrics that are fed with the stats of a call, or with one number at a time: the trainers' numbers."""

import pickle

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.metrics import (
    GROUP_METRICS,
    VALUE_METRICS,
    KeepDroppedRewardMean,
    LagClipFraction,
    LagTokens,
    SyncSeconds,
    TermDroppedFraction,
)
from trl_offpolicy.metrics.groups import LagMetric, TermMetric
from trl_offpolicy.objective.measure import kept_ids_stats, support_stats

BAND = op.RatioBand(level="token", low=0.9, high=1.1)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    sampling = -torch.rand(4, 6, generator=generator) - 0.1
    old = sampling + 0.3 * torch.randn(4, 6, generator=generator)
    return op.PolicyBatch(
        per_token_logps=old + 0.3 * torch.randn(4, 6, generator=generator),
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        ref_per_token_logps=old - 0.1,
        entropies=torch.rand(4, 6, generator=generator),
        completion_mask=torch.ones(4, 6).bool(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        rewards=torch.rand(4, generator=generator),
        policy_versions=torch.randint(0, 3, (4, 6), generator=generator),
        current_version=3,
        turn_ids=torch.tensor([[0, 0, 0, 1, 1, 1]] * 4),
    )


def stats(seed):
    correction = op.Correction(weight=op.TruncateWeight(max_weight=1.1), keep=(BAND,), correct_threshold=0.5)
    objective = op.Objective(
        correction=correction, kl=op.KLPenalty(coef=0.1), entropy_coef=0.01, shaping=(op.shaping.DiscrepancyPenalty(),)
    )
    outside = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)) > 0.5
    counts = torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(seed))
    of_sampler = support_stats(outside, batch(seed).mask).union(kept_ids_stats(counts, batch(seed).mask))
    return objective(batch(seed)).stats.union(of_sampler)


LAG = 2


def build(cls):
    if issubclass(cls, LagMetric):
        return cls(LAG)
    return cls(BAND.name) if issubclass(cls, TermMetric) else cls()


def logged_as(key):
    return "offpolicy/" + key.replace("<term>", BAND.name).replace("<lag>", str(LAG))


def test_they_give_the_trainers_numbers_over_several_calls():
    """By merging moments: of two calls, and through pickle between them; never a mean of means."""
    first, second = stats(0), stats(1)
    logged = first.merge(second).compute()
    for key, cls in GROUP_METRICS.items():
        metric = build(cls)
        metric.update(first)
        metric = pickle.loads(pickle.dumps(metric))
        metric.update(second)
        assert metric.compute().item() == logged[logged_as(key)], key
    moving = [key for key, cls in GROUP_METRICS.items() if logged[logged_as(key)] > 0]
    assert len(moving) > 25


def test_high_lags_are_measured_together_and_a_negative_one_is_an_error():
    assert LagTokens(8).group == "lag/8" and LagTokens(9).group == LagTokens(50).group == "lag/9_or_more"
    assert LagClipFraction(3).group == "lag/3#clip"
    with pytest.raises(ValueError, match="lag must be a whole number of at least 0, but got -1"):
        LagTokens(-1)


def test_what_the_stats_do_not_hold_is_named():
    without = op.Correction(keep=(BAND,))(op.PolicyBatch(
        per_token_logps=torch.zeros(1, 2), sampling_per_token_logps=torch.zeros(1, 2),
        completion_mask=torch.ones(1, 2).bool(), advantages=torch.ones(1),
    )).stats  # fmt: skip
    with pytest.raises(ValueError, match="stats must hold keep/dropped_reward_mean, but got"):
        KeepDroppedRewardMean().update(without)
    with pytest.raises(ValueError, match="stats must hold keep/outlier_veto/dropped_fraction, but got"):
        TermDroppedFraction("outlier_veto").update(without)


def test_values_are_means_and_shares_of_sums():
    for cls in VALUE_METRICS.values():
        metric, other = cls(), cls()
        metric.update(1.0, 4)
        other.update(torch.tensor(2.0), 2)
        other.merge_state(metric)
        assert other.compute().item() == 0.5
    seconds = SyncSeconds()
    for value in (1.0, 2.0, 6.0):
        seconds.update(value)
    assert seconds.compute().item() == 3.0 and seconds.half().compute().dtype == torch.float64
