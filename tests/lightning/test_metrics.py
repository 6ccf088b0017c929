"""The numbers of a window: merged over micro-batches, equal to the stats of the whole, and under TRL's names."""

from __future__ import annotations

import math

import pytest
import torch

import trl_offpolicy as op
from lightning_module.measuring import Measuring
from lightning_module.metrics import CompletionMetric
from trl_offpolicy.correction.measure import noise_floor


def batch(rows, seed):
    random = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, 5, generator=random)
    return op.PolicyBatch(
        per_token_logps=old,
        sampling_per_token_logps=old + 0.3 * torch.randn(rows, 5, generator=random),
        completion_mask=torch.ones(rows, 5).bool(),
        advantages=torch.ones(rows),
        group_ids=torch.arange(rows) // 2 + 10 * seed,
    )


OBJECTIVE = op.presets.get("paper/tis").objective


def stats_of(one):
    return OBJECTIVE(one).stats


def test_a_window_computes_what_merged_stats_compute():
    batches = [batch(rows, seed) for seed, rows in enumerate([4, 2, 6])]
    measuring, parts = Measuring([]), [stats_of(one) for one in batches]
    for part, one in zip(parts, batches, strict=True):
        measuring.add_loss(torch.tensor(0.5), part, one)
    step = measuring.end_step()
    assert (step.tokens, step.sampled, step.responses) == (60.0, 60.0, 12) and measuring.responses == 12
    logs = measuring.close(OBJECTIVE, torch.device("cpu"))
    expected = parts[0].merge(parts[1]).merge(parts[2]).compute()
    assert {key: logs[key] for key in expected} == pytest.approx(expected)
    assert logs["loss"] == 1.5 and "offpolicy/mismatch/kl_k1_ci95" in logs


def test_a_group_that_comes_later_is_added_and_forgotten_with_the_window():
    measuring, mask = Measuring([]), torch.ones(1, 1).bool()
    measuring.add_loss(torch.tensor(0.5), stats_of(batch(4, 0)), batch(4, 0))
    measuring.add_stats(noise_floor(torch.zeros(1, 1), torch.ones(1, 1), mask))
    measuring.end_step()
    assert "noise_floor" in measuring.stats.groups
    logs = measuring.close(OBJECTIVE, torch.device("cpu"))
    assert logs["offpolicy/noise_floor/kl_k1"] == pytest.approx(-1.0)
    assert not measuring.stats.groups


def test_completions_under_the_names_of_trl():
    metric = CompletionMetric(["first", "second"])
    by_function = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, math.nan], [2.0, math.nan]])
    lengths, ended = torch.tensor([3, 5, 4, 8]), torch.tensor([True, False, True, False])
    metric.update(by_function, by_function.nansum(1), lengths, ended, num_generations=2)
    values = metric.compute()
    assert values["reward"] == 1.25 and values["reward_std"] == pytest.approx(torch.tensor([1.0, 0, 2, 2]).std().item())
    assert values["frac_reward_zero_std"] == 0.5
    assert (values["completions/min_length"], values["completions/max_length"]) == (3, 8)
    assert values["completions/clipped_ratio"] == 0.5 and values["completions/mean_terminated_length"] == 3.5
    assert values["rewards/first/mean"] == 1.25 and values["rewards/second/mean"] == 0.0


def test_generation_batches_between_two_logging_steps_count_as_in_trl():
    """TRL appends a number per generation batch, and logs the mean of those that are not NaN."""
    metric = CompletionMetric(["first"])
    for total, ended in ([1.0, 3.0], True), ([10.0, 20.0], False):
        rewards = torch.tensor(total).unsqueeze(1)
        given = torch.full_like(rewards, math.nan) if ended else rewards
        metric.update(given, rewards[:, 0], torch.tensor(total).int(), torch.tensor([ended] * 2), num_generations=2)
    values = metric.compute()
    assert values["reward_std"] == pytest.approx((2**0.5 + 50**0.5) / 2)  # not that of the four rows, 8.6
    assert (values["completions/min_length"], values["completions/max_length"]) == (5.5, 11.5)
    assert values["completions/max_terminated_length"] == 1.5 and values["rewards/first/mean"] == 15.0
