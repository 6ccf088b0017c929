"""A mask of 0 and 1 in another dtype is refused by name: ``~`` makes 254 or -2 of it, which count as True."""

import re
from functools import partial

import pytest
import torch

from trl_offpolicy.functional import advantages, aggregation, kl, levels, masks, mixture, moments, shaping, weights
from trl_offpolicy.functional import policy_losses as losses
from trl_offpolicy.functional.estimator import estimator_rows
from trl_offpolicy.functional.groups import group_members
from trl_offpolicy.functional.log_ratios import log_ratio
from trl_offpolicy.functional.routing import routing_moments
from trl_offpolicy.functional.weight_moments import cut_rows, weight_moments

TOKENS, ROW, ROWS, IDS = torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2), torch.zeros(2).long()
MASK = torch.ones(2, 3).bool()
fipo = partial(losses.future_influence, half_life=1.0, low=0.2, high=0.2, max_ratio=None, safe_ratio=None)
covariance = {"low": 0.2, "high": 0.2, "fraction": 0.5, "cov_low": 0.0, "cov_high": 1.0}
TOKEN_MASKS = {
    "aggregate_loss": lambda mask: aggregation.aggregate_loss(TOKENS, mask, "token_mean"),
    "aggregate_loss of rows": lambda mask: aggregation.aggregate_loss(TOKENS, mask, "seq_mean_token_mean"),
    "aggregate": lambda mask: levels.aggregate(TOKENS, mask, "sequence"),
    "turn_index": levels.turn_index,
    "log_ratio": lambda mask: log_ratio(TOKENS, TOKENS, mask),
    "reference_log_ratio": lambda mask: kl.reference_log_ratio(TOKENS, TOKENS, mask),
    "mixture_logps": lambda mask: mixture.mixture_logps(TOKENS[None], torch.ones(1), mask),
    "prefix_min_weight": lambda mask: weights.prefix_min_weight(TOKENS, mask),
    "prefix_bounds": lambda mask: weights.prefix_bounds(mask, low=0.5, high=2.0),
    "outlier_veto": lambda mask: masks.outlier_veto(TOKENS, mask, low=0.1, high=9.0),
    "suffix_veto": lambda mask: masks.suffix_veto(TOKENS, mask, ROW, low=0.1),
    "second_moment_budget": lambda mask: masks.second_moment_budget(TOKENS, mask, budget=0.1, across_ranks=False),
    "prefix_budget": lambda mask: masks.prefix_budget(
        TOKENS, mask, high=1.0, budget=1.0, min_weight=0.5, adaptive=False
    ),
    "high_entropy_mask": lambda mask: masks.high_entropy_mask(TOKENS, mask, top=0.5),
    "penalised_advantages": lambda mask: shaping.penalised_advantages(ROW, TOKENS, mask, coef=0.1),
    "zero_variance_advantages": lambda mask: shaping.zero_variance_advantages(
        ROW, TOKENS, mask, MASK[:, :1], MASK[:, :1], alpha=0.1
    ),
    "ratio_rows": lambda mask: moments.ratio_rows(TOKENS, TOKENS, mask),
    "weight_moments": lambda mask: weight_moments(TOKENS, mask),
    "cut_rows": lambda mask: cut_rows(mask, TOKENS, TOKENS),
    "estimator_rows": lambda mask: estimator_rows(TOKENS, ROW, mask, ROW),
    "routing_moments": lambda mask: routing_moments(
        torch.zeros(2, 3, 1, 2).long(), torch.zeros(2, 3, 1, 2).long(), mask
    ),
    "masked_mean": lambda mask: losses.masked_mean(TOKENS, mask),
    "token_covariance": lambda mask: losses.token_covariance(TOKENS, ROW, mask),
    "clip_cov": lambda mask: losses.clip_cov(TOKENS, TOKENS, ROW, mask, **covariance),
    "kl_cov": lambda mask: losses.kl_cov(TOKENS, TOKENS, ROW, mask, fraction=0.5, coef=1.0),
    "future_influence": lambda mask: fipo(TOKENS, ROW, mask),
    "topr": lambda mask: losses.topr(TOKENS, TOKENS, ROW, mask, low=0.0, high=1.0),
    "oapl": lambda mask: losses.oapl(TOKENS, ROW, ROW, mask, beta=1.0),
    "entropy_groups": lambda mask: losses.entropy_groups(TOKENS, mask, fraction=0.5),
    "espo": lambda mask: losses.espo(TOKENS, ROW, TOKENS, mask, high_entropy_fraction=0.5, clip_scale=0.1),
    "ctpo": lambda mask: losses.ctpo(TOKENS, ROW, mask, low=0.1, high=0.1),
    "st_ppo": lambda mask: losses.st_ppo(TOKENS, ROW, mask, None, low=0.1, high=0.1, normalize=True),
    "gspo_token": lambda mask: losses.gspo_token(TOKENS, ROW, mask, low=0.1, high=0.1),
    "gmpo": lambda mask: losses.gmpo(TOKENS, ROW, mask, low=0.1, high=0.1),
    "p3o": lambda mask: losses.p3o(TOKENS, TOKENS, ROW, mask),
    "m2po": lambda mask: losses.m2po(TOKENS, ROW, mask, budget=0.1),
    "r2vpo": lambda mask: losses.r2vpo(TOKENS, ROW, mask, IDS, low=0.1, high=0.1, variance=0.1),
    "group_ratio_variance": lambda mask: losses.group_ratio_variance(TOKENS, mask, IDS),
    "score_energy": lambda mask: advantages.score_energy(TOKENS, TOKENS, mask),
    "returns_to_go": lambda mask: advantages.returns_to_go(ROWS, mask),
    "discounted_returns": lambda mask: advantages.discounted_returns(ROWS, mask),
    "whitened_tokens": lambda mask: advantages.whitened_tokens(TOKENS, mask),
    "optimal_token_baseline": lambda mask: advantages.optimal_token_baseline(TOKENS, TOKENS, mask, IDS, MASK[:, 0]),
    "optimal_token_baseline, multi-turn": lambda mask: advantages.optimal_token_baseline(
        TOKENS, TOKENS, mask, IDS, MASK[:, 0], multi_turn=True
    ),
}
COUNTED = {
    "group_members": lambda counted: group_members(IDS, counted, across_ranks=False),
    "group_advantages": lambda counted: advantages.group_advantages(ROWS, IDS, counted),
    "leave_one_out": lambda counted: advantages.leave_one_out(ROWS, IDS, counted),
    "scaled_by_the_others": lambda counted: advantages.scaled_by_the_others(ROWS, IDS, counted),
    "in_company": lambda counted: advantages.in_company(IDS, counted),
    "reward_if_alone": lambda counted: advantages.reward_if_alone(ROWS, ROWS, IDS, counted),
    "weighted_baseline": lambda counted: advantages.weighted_baseline(ROWS, IDS, counted, ROWS),
    "normalised_by_function": lambda counted: advantages.normalised_by_function(TOKENS, IDS, counted),
    "normalised_by_response": lambda counted: advantages.normalised_by_response(ROWS, counted),
    "best_of_group": lambda counted: advantages.best_of_group(ROWS, IDS, counted),
    "scaled_by_rewarded": lambda counted: advantages.scaled_by_rewarded(ROWS, IDS, counted),
    "optimal_token_baseline": lambda counted: advantages.optimal_token_baseline(TOKENS, TOKENS, MASK, IDS, counted),
    "soft_value": lambda counted: losses.soft_value(ROWS.unsqueeze(1), counted.unsqueeze(1), beta=1.0),
}
OTHERS = {
    "first_ranked": ("candidates", MASK, lambda mask: losses.first_ranked(TOKENS, mask, torch.ones(()))),
    "group_mean": ("active", MASK[:, 0], lambda active: levels.group_mean(ROWS, active, IDS)),
}
CALLS = {name: ("mask", MASK, call) for name, call in TOKEN_MASKS.items()}
CALLS |= {f"counted: {name}": ("counted", MASK[:, 0], call) for name, call in COUNTED.items()} | OTHERS


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_a_mask_of_another_dtype_is_named(name, dtype):
    argument, mask, call = CALLS[name]
    call(mask)

    with pytest.raises(TypeError, match=rf"^{argument} must be a bool tensor, but got {re.escape(str(dtype))}\.$"):
        call(mask.to(dtype))


def test_company_is_bool():
    assert advantages.in_company(IDS, MASK[:, 0]).dtype == torch.bool
