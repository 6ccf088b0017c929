"""Shapes at the border: a wrong one is named, instead of being broadcast or failing somewhere inside."""

import re

import pytest
import torch

from trl_offpolicy.functional import (
    advantages,
    kl,
    levels,
    log_ratios,
    masks,
    moments,
    proximal,
    weight_moments,
    weights,
)
from trl_offpolicy.functional import policy_losses as losses
from trl_offpolicy.functional._shapes import check_broadcast, check_tokens_or_rows
from trl_offpolicy.functional.aggregation import aggregate_loss
from trl_offpolicy.functional.groups import group_members
from trl_offpolicy.functional.routing import routing_moments

TOKENS, ROWS, ROW = torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 1)
MASK, IDS, COUNTED = torch.ones(2, 3).bool(), torch.zeros(2).long(), torch.ones(2).bool()
LONG = torch.zeros(2, 4)


def future_influence(logs, advantages):
    return losses.future_influence(
        logs, advantages, MASK, half_life=1.0, low=0.2, high=0.2, max_ratio=None, safe_ratio=None
    )


def qurl(logs, mismatch, advantages):
    return losses.qurl(logs, mismatch, advantages, low=0.2, high=0.2, max_weight=2.0)


CALLS = {  # a call with one argument of a wrong shape, and the name of the argument
    "advantages: groups": (lambda: advantages.group_advantages(ROWS, torch.zeros(3).long(), COUNTED), "group_ids"),
    "advantages: energy": (lambda: advantages.score_energy(TOKENS, LONG, MASK), "sum_sq_probs"),
    "advantages: outcome": (lambda: advantages.returns_to_go(ROW, MASK), "outcome"),
    "groups": (lambda: group_members(IDS, MASK, across_ranks=False), "counted"),
    "loss per token": (lambda: aggregate_loss(ROWS, MASK, "token_mean"), "per_token_loss"),
    "levels": (lambda: levels.aggregate(LONG, MASK, "sequence"), "values"),
    "levels: turns": (lambda: levels.aggregate(TOKENS, MASK, "turn", turn_ids=IDS), "turn_ids"),
    "log-ratio": (lambda: log_ratios.log_ratio(TOKENS, ROW, MASK), "denominator"),
    "kl: reference": (lambda: kl.reference_log_ratio(TOKENS, LONG, MASK), "reference"),
    "kl: ratio": (lambda: kl.ratio_weighted_kl(TOKENS, torch.zeros(3)), "policy_log_ratios"),
    "veto": (lambda: masks.outlier_veto(LONG, MASK, low=None, high=2.0), "log_ratios"),
    "entropies": (lambda: masks.high_entropy_mask(LONG, MASK, top=0.5), "entropies"),
    "prefix budget": (
        lambda: masks.prefix_budget(LONG, MASK, high=1.0, budget=1.0, min_weight=0.5, adaptive=False),
        "divergences",
    ),
    "suffix veto: log-ratios": (lambda: masks.suffix_veto(LONG, MASK, ROW, low=0.1), "log_ratios"),
    "suffix veto: advantages (B,)": (lambda: masks.suffix_veto(TOKENS, MASK, ROWS, low=0.1), "advantages"),
    "divergence": (lambda: masks.divergence(TOKENS, "binary_tv", LONG), "denominator_logps"),
    "moments": (lambda: moments.ratio_rows(TOKENS, LONG, MASK), "denominator"),
    "weight moments": (lambda: weight_moments.weight_rows(MASK, TOKENS, LONG), "weights"),
    "proximal": (lambda: proximal.averaged_logps(TOKENS, LONG, decay=0.5, count=1), "previous"),
    "routing": (lambda: routing_moments(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 3)), "second"),
    "prefix": (lambda: weights.prefix_min_weight(LONG, MASK), "log_ratios"),
    "cap": (lambda: weights.ess_cap(TOKENS, target=0.5), "ratios"),
    "ppo: advantages (B,)": (lambda: losses.ppo_clip(TOKENS, torch.zeros(3), low=0.2, high=0.2), "advantages"),
    "gspo": (lambda: losses.gspo_token(LONG, ROW, MASK, low=0.2, high=0.2), "log_ratios"),
    "topr": (lambda: losses.topr(TOKENS, TOKENS, ROWS, MASK, low=0.0, high=1.0), "advantages"),
    "ctpo: log-ratios": (lambda: losses.ctpo(LONG, ROW, MASK, low=0.1, high=0.1), "log_ratios"),
    "ctpo: advantages (B,)": (lambda: losses.ctpo(TOKENS, torch.zeros(3), MASK, low=0.1, high=0.1), "advantages"),
    "fipo: log-ratios": (lambda: future_influence(LONG, ROW), "log_ratios"),
    "fipo: advantages (B,)": (lambda: future_influence(TOKENS, ROWS), "advantages"),
    "qurl: mismatch": (lambda: qurl(TOKENS, LONG, ROW), "mismatch_log_ratios"),
    "qurl: advantages (B,)": (lambda: qurl(TOKENS, TOKENS, torch.zeros(3)), "advantages"),
    "p3o: log-probs": (lambda: losses.p3o(TOKENS, LONG, ROW, MASK), "logps"),
    "p3o: advantages (B,)": (lambda: losses.p3o(TOKENS, TOKENS, ROWS, MASK), "advantages"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_shape_is_named(name):
    call, argument = CALLS[name]

    with pytest.raises(ValueError, match=rf"^{re.escape(argument)} must have .*, but got \("):
        call()


def test_what_broadcasts_as_meant_is_let_through():
    check_tokens_or_rows((2, 3), tokens=TOKENS, rows=ROW, one=torch.zeros(1, 1), none=None)
    check_broadcast(ratio=ROW, tokens=TOKENS, again=ROW, one=torch.zeros(1, 1), none=None)
    check_tokens_or_rows((0, 3), tokens=torch.zeros(0, 3), rows=torch.zeros(0, 1))


@pytest.mark.parametrize("shape", [(2,), (3, 3), (2, 2), (2, 3, 1)])
def test_what_does_not_is_not(shape):
    with pytest.raises(ValueError, match=r"^other must have shape"):
        check_broadcast(tokens=TOKENS, row=ROW, other=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"^other must have shape"):
        check_tokens_or_rows((2, 3), other=torch.zeros(shape))
