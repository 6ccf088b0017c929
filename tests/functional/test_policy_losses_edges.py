"""What mutation testing found untested in the policy losses: clip flags, gates, bounds, single tokens and rows."""

import math

import pytest
import torch

from trl_offpolicy.functional.advantages import normalised_by_function, weighted_baseline
from trl_offpolicy.functional.kl import ratio_weighted_kl
from trl_offpolicy.functional.policy_losses import (
    aspo,
    cispo,
    clip_cov,
    ctpo,
    dppo,
    espo,
    future_influence,
    gmpo,
    kl_cov,
    m2po,
    p3o,
    quatro,
    soft_value,
    st_ppo,
    tbpo,
    topr,
    vespo_phi,
)
from trl_offpolicy.functional.policy_losses.common import masked_mean
from trl_offpolicy.functional.policy_losses.trust_regions import group_ratio_variance
from trl_offpolicy.functional.truncated_sampling import Truncation

LOW, HIGH = -math.log(2.0), math.log(2.0)


def row(*values):
    return torch.tensor([values])


def everywhere(like):
    return torch.ones_like(like, dtype=torch.bool)


def flags(tensor):
    return tensor.flatten().tolist()


def test_gmpo_flags_tokens_by_the_sign_of_the_advantage():
    logs = torch.tensor([[0.5, 0.4, -0.5, 0.1], [0.5, 0.1, -0.5, -0.4]])
    mask = everywhere(logs)
    terms = gmpo(logs, torch.tensor([[1.0], [-1.0]]), mask, low=0.4, high=0.4)
    assert terms.clipped_high.tolist() == [[True, False, False, False], [False] * 4]
    assert terms.clipped_low.tolist() == [[False] * 4, [False, False, True, False]]  # at the bound is not beyond it
    still = gmpo(logs, torch.zeros(2, 1), mask, low=0.4, high=0.4)
    assert not still.clipped_high.any() and not still.clipped_low.any()


def test_tbpo_flags_both_bounds_of_a_negative_response():
    ratio = torch.tensor([[0.5], [1.0], [2.0], [2.0], [0.5]])
    advantages = torch.tensor([[-1.0], [-1.0], [-1.0], [1.0], [1.0]])
    terms = tbpo(ratio.log(), advantages, high=0.25, negative_low=0.25, negative_high=0.5)
    assert flags(terms.clipped_low) == [True, False, False, False, False]
    assert flags(terms.clipped_high) == [False, False, True, True, False]
    torch.testing.assert_close(terms.loss, torch.tensor([[0.75], [1.0], [1.5], [-1.25], [-0.5]]))


def test_tbpo_takes_a_response_without_advantage_as_a_good_one():
    """Its loss is 0 either way; below the band of bad responses it is not clipped."""
    terms = tbpo(row(math.log(0.5)), row(0.0), high=0.25, negative_low=0.25, negative_high=0.5)
    assert not terms.clipped_low.any()


def test_aspo_flags_only_bad_tokens_below_the_clip_and_may_go_without_a_cap():
    logs = row(math.log(0.5), math.log(0.5), math.log(0.01), 0.0)
    advantages = row(-1.0, 1.0, 1.0, -1.0)
    terms = aspo(logs, logs, advantages, low=0.25, max_weight=None)
    assert flags(terms.clipped_low) == [True, False, False, False]
    torch.testing.assert_close(terms.loss, row(0.75, -2.0, -100.0, 1.0))
    capped = aspo(logs, logs, advantages, low=0.25, max_weight=3.0)
    torch.testing.assert_close(capped.loss, row(0.75, -2.0, -3.0, 1.0))


def test_aspo_at_the_clip_keeps_its_gradient():
    logps = row(math.log(0.5)).requires_grad_()
    terms = aspo(logps.detach(), logps, row(-1.0), low=0.5, max_weight=None)
    terms.loss.sum().backward()
    assert not terms.clipped_low.any()
    torch.testing.assert_close(logps.grad, row(0.5))


def test_dppo_flags_by_the_side_of_the_move_and_does_not_overflow():
    logs = row(0.5, -0.5, 0.5, -0.5, -0.5)
    logps = row(-0.2, -1.5, -0.2, -1.5, -1.5)
    advantages = row(1.0, 1.0, -1.0, -1.0, 0.0)
    terms = dppo(logs, logps, advantages, divergence="tv", low=0.1, high=0.1, max_ratio=5.0)
    assert flags(terms.clipped_high) == [True, False, False, False, False]
    assert flags(terms.clipped_low) == [False, False, False, True, True]
    far = dppo(
        row(1000.0, -1000.0), row(-1.0, -1001.0), row(-1.0, 1.0), divergence="tv", low=0.1, high=0.1, max_ratio=9.0
    )
    assert torch.isfinite(far.loss).all()
    torch.testing.assert_close(far.loss[0, 0], torch.tensor(-9.0))
    torch.testing.assert_close(far.loss[0, 1], torch.tensor(1001.0 * math.exp(-20.0)))


def test_quatro_is_finite_on_ratios_beyond_float32():
    terms = quatro(row(1000.0, -1000.0), row(1.0, 1.0), torch.tensor([[1.0]]), radius=0.5)
    ratio = math.exp(20.0)
    small = math.exp(-20.0)
    expected = row(-ratio + ratio * 20.0 - ratio + 1.0, -small - small * 20.0 - small + 1.0)
    torch.testing.assert_close(terms.loss, expected)


def test_m2po_flags_what_it_takes_out_by_sign():
    logs = row(1.0, -1.0, 0.01, 1.0, -1.0)
    advantages = row(1.0, -1.0, 1.0, -1.0, 0.0)
    terms = m2po(logs, advantages, everywhere(logs), budget=0.01)
    assert flags(terms.clipped_high) == [True, False, False, False, False]
    assert flags(terms.clipped_low) == [False, True, False, False, False]


def test_variance_of_a_group_with_a_single_token_is_none():
    logs = torch.tensor([[HIGH, 0.0], [HIGH, LOW]])
    mask = torch.tensor([[True, False], [True, True]])
    variance = group_ratio_variance(logs, mask, torch.tensor([0, 1]))
    torch.testing.assert_close(variance, torch.tensor([[0.0], [0.5625]]))  # ratios 2 and 1/2 about 1.25


def test_kl_cov_penalises_at_least_one_token_and_says_which():
    logps = row(-3.0, -1.0, -0.5)
    terms = kl_cov(row(0.1, 0.2, 0.3), logps, row(-1.0, 0.0, 1.0), everywhere(logps), fraction=0.01, coef=1.0)
    assert terms.gate.dtype == torch.float32 and terms.gate.sum() == 1
    plain = -row(0.1, 0.2, 0.3).exp() * row(-1.0, 0.0, 1.0)
    torch.testing.assert_close(terms.loss, plain + terms.gate * row(0.1, 0.2, 0.3))


def test_clip_cov_leaves_tokens_at_the_upper_end_of_the_band():
    logps, advantages = row(-2.0, -1.0), row(-1.0, 1.0)  # both have the covariance 0.5
    mask = everywhere(logps)
    options = {"low": 0.2, "high": 0.2, "fraction": 1.0, "cov_low": 0.0}
    at_the_end = clip_cov(torch.zeros(1, 2), logps, advantages, mask, cov_high=0.5, **options)
    inside = clip_cov(torch.zeros(1, 2), logps, advantages, mask, cov_high=0.6, **options)
    assert flags(at_the_end.gate) == [1.0, 1.0] and flags(inside.gate) == [0.0, 0.0]
    assert inside.gate.dtype == torch.float32


def test_topr_tapers_between_its_bounds_and_leaves_what_has_no_advantage():
    logs, logps = row(-2.0), row(-1.0)
    taper = topr(logs, logps, row(-1.0), everywhere(logs), low=0.25, high=1.0)
    torch.testing.assert_close(taper.gate, row(0.25))
    neutral = topr(logs, logps, row(0.0), everywhere(logs), low=0.25, high=1.0)
    torch.testing.assert_close(neutral.gate, row(1.0))


def test_st_ppo_normalises_the_turns_that_it_is_told():
    logs = row(math.log(2.0), 0.0, 0.0, 0.0)
    mask = everywhere(logs)
    options = {"low": 0.2, "high": 0.2, "normalize": True}
    two = st_ppo(logs, row(1.0), mask, torch.tensor([[0, 0, 1, 1]]), **options)
    one = st_ppo(logs, row(1.0), mask, None, **options)  # a single run of tokens
    torch.testing.assert_close(two.gate, row(0.5, 0.5, 1.0, 1.0))  # c = 2 / 2, 0
    torch.testing.assert_close(one.gate, torch.full((1, 4), 1 / 1.5))


@pytest.mark.parametrize("count", [1, 2])
def test_espo_with_few_tokens_weighs_both_groups_the_same(count):
    logs = torch.full((1, count), 0.1)
    terms = espo(
        logs, row(1.0), torch.full((1, count), 0.5), everywhere(logs), high_entropy_fraction=0.5, clip_scale=10.0
    )
    torch.testing.assert_close(terms.loss, torch.full((1, count), -math.exp(0.1)))


def test_soft_value_of_one_reward_is_that_reward():
    rewards, counted = torch.tensor([[0.7, 9.0], [1.0, 2.0]]), torch.tensor([[True, False], [False, False]])
    torch.testing.assert_close(soft_value(rewards, counted, beta=0.5), torch.tensor([[0.7], [0.0]]))
    far = soft_value(torch.tensor([[1000.0]]), torch.tensor([[True]]), beta=1.0)
    torch.testing.assert_close(far, torch.tensor([[1000.0]]))


def test_mean_of_one_token():
    assert masked_mean(row(3.0, 5.0), torch.tensor([[True, False]])) == 3.0


def test_weighted_baseline_of_energies_below_one_and_of_groups_of_one():
    every = torch.ones(2, dtype=torch.bool)
    group = torch.tensor([0, 0])
    small = weighted_baseline(row(1.0, 0.0)[0], group, every, row(0.3, 0.1)[0])
    torch.testing.assert_close(small, torch.tensor([0.25, -0.75]))
    alone = weighted_baseline(row(1.0, 0.0)[0], torch.tensor([0, 1]), every, torch.zeros(2))
    torch.testing.assert_close(alone, torch.zeros(2))


def test_normalised_by_function_over_two_responses_divides_by_one():
    """n - 1 = 1; group advantages are +-1 / sqrt(2), and so is their sum's deviation."""
    found = normalised_by_function(torch.tensor([[1.0], [0.0]]), torch.zeros(2).long(), torch.ones(2).bool())
    torch.testing.assert_close(found, torch.tensor([0.7070, -0.7070]), atol=1e-3, rtol=0)


def test_cispo_with_a_floor_flags_bad_tokens_below_it():
    logs = row(*map(math.log, (0.25, 0.6, 0.25, 4.0, 1.9, 4.0)))
    advantages = row(-1.0, -1.0, 1.0, 1.0, 1.0, -1.0)
    terms = cispo(logs, row(-1.0), advantages, low=0.5, high=2.0)
    assert flags(terms.clipped_low) == [True, False, False, False, False, False]
    assert flags(terms.clipped_high) == [False, False, False, True, False, False]
    torch.testing.assert_close(terms.loss, row(-0.5, -0.6, 0.5, 2.0, 1.9, -2.0))
    neutral = cispo(row(math.log(0.25), math.log(4.0)), row(-1.0), row(0.0, 0.0), low=0.5, high=2.0)
    assert not neutral.clipped_low.any() and not neutral.clipped_high.any()
    assert cispo(logs, row(-1.0), advantages, high=2.0).clipped_low is None


def test_vespo_gives_no_weight_where_the_ratio_is_not_a_number():
    options = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    phi = vespo_phi(torch.tensor([[math.nan], [0.0], [1000.0]]), torch.ones(3, 1), **options)
    torch.testing.assert_close(phi, torch.tensor([[0.0], [1.0], [0.0]]))
    steep = vespo_phi(torch.tensor([[20.0]]), torch.ones(1, 1), **(options | {"k_pos": 5000.0, "lambda_pos": 1e-9}))
    assert steep == 0.0  # beyond float32


def test_weighted_kl_is_k3_unless_said_and_bounds_the_ratio():
    logs = row(0.5, 0.5)
    found = ratio_weighted_kl(logs, row(1000.0, -1000.0))
    k3 = math.exp(-0.5) + 0.5 - 1.0
    torch.testing.assert_close(found, row(k3 * math.exp(20.0), k3 * math.exp(-20.0)))


def test_min_p_of_one_is_the_most_likely_token_alone():
    assert Truncation(min_p=1.0)
    with pytest.raises(ValueError, match=r"min_p must be in \[0, 1\], but got 1.5"):
        Truncation(min_p=1.5)


def test_ctpo_flags_by_the_sign_of_the_advantage_and_beyond_the_bound_alone():
    low, high = math.log(1.25), math.log(1.5)
    logs = torch.tensor([[-0.5], [-0.5], [0.5], [0.5], [-low], [high]])
    advantages = torch.tensor([[0.5], [-0.5], [0.5], [-0.5], [-0.5], [0.5]])
    terms = ctpo(logs, advantages, everywhere(logs), low=low, high=high)
    assert flags(terms.clipped_low) == [False, True, False, False, False, False]
    assert flags(terms.clipped_high) == [False, False, True, False, False, False]


def test_p3o_flags_nothing_on_policy_and_small_ratios_have_their_own_ess():
    logps = row(-1.0, -2.0)
    on_policy = p3o(torch.zeros(1, 2), logps, row(1.0), everywhere(logps))
    assert not on_policy.clipped_high.any() and on_policy.gate.eq(1.0).all()
    small = p3o(row(0.1, 0.2).log(), logps, row(1.0), everywhere(logps))
    assert small.gate[0, 0].item() == pytest.approx(0.3**2 / (2 * 0.05))


def test_fipo_at_its_bounds_and_without_an_advantage():
    logs = row(2.0, 8.0, 1.0).log()

    def factors(advantage, **bounds):
        options = {"half_life": 1.0, "low": 0.2, "high": 99.0, "max_ratio": None, "safe_ratio": None, **bounds}
        return future_influence(logs, row(advantage), everywhere(logs), **options)[0].tolist()

    free = factors(-1.0)
    assert free == pytest.approx([2 * 8**0.5, 8.0, 1.0])
    assert factors(-1.0, max_ratio=8.0) == pytest.approx(free)  # at the bound it still counts
    assert factors(-1.0, safe_ratio=7.0) == pytest.approx([2 * 8**0.5, 1.0, 1.0])
    assert factors(0.0, safe_ratio=7.0) == pytest.approx(free)
