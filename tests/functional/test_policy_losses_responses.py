"""Losses of tokens with detached weights, of whole responses, of turns and of entropy groups: values by hand."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy.functional import policy_losses

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
ONES = torch.ones(1, 2).bool()


def row(*values):
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "gradient"),
    [  # low 0.2, cap 3
        (2.0, 1.0, -0.5, -0.5),  # flipped: 1 / r
        (0.5, 1.0, -2.0, -2.0),
        (0.1, 1.0, -3.0, -3.0),  # soft cap: the gradient stays
        (2.0, -1.0, 2.0, 2.0),
        (5.0, -1.0, 3.0, 3.0),
        (0.5, -1.0, 0.8, 0.0),  # PPO's lower clip
        (1.0, 2.0, -2.0, -2.0),
    ],
)
def test_aspo(ratio, a, loss, gradient):
    logps = row(-2.0).requires_grad_()

    terms = policy_losses.aspo(row(math.log(ratio)), logps, row(a), low=0.2, max_weight=3.0)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(loss, rel=1e-5)
    assert logps.grad.item() == pytest.approx(gradient, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "correct", "weight"),
    [(3.0, True, 2.0), (0.1, True, 0.5), (3.0, False, 1.1), (0.1, False, 0.8), (1.05, False, 1.05)],
)
def test_dispo_has_four_bounds(ratio, correct, weight):
    logps = row(-2.0).requires_grad_()
    bounds = {"low_correct": 0.5, "high_correct": 1.0, "low_incorrect": 0.2, "high_incorrect": 0.1}

    terms = policy_losses.dispo(row(math.log(ratio)), logps, row(1.5), torch.tensor([[correct]]), **bounds)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(weight * 1.5 * 2)
    assert logps.grad.item() == pytest.approx(-weight * 1.5)
    assert terms.clipped_high.item() is (ratio > weight + 1e-6)
    assert terms.clipped_low.item() is (ratio < weight - 1e-6)


def test_dro_is_a_squared_penalty():
    logps = row(-2.0).requires_grad_()

    loss = policy_losses.dro(logps + 2.5, logps, row(3.0), beta=0.4).loss
    loss.sum().backward()

    assert loss.item() == pytest.approx(6 + 0.2 * 0.25)
    assert logps.grad.item() == pytest.approx(-(3.0 - 0.4 * 0.5))


def test_gspo_token_clips_on_the_response_and_moves_the_token():
    log_ratios = row(math.log(4.0), 0.0).requires_grad_()  # geometric mean 2

    terms = policy_losses.gspo_token(log_ratios, torch.tensor([[1.0, 3.0]]), ONES, low=0.5, high=1.5)
    terms.loss.sum().backward()

    close(terms.loss, row(-2.0, -6.0))
    close(log_ratios.grad, row(-2.0, -6.0))
    clipped = policy_losses.gspo_token(log_ratios, torch.ones(1, 1), ONES, low=0.5, high=0.9)
    assert clipped.clipped_high.tolist() == [[True, True]]


@pytest.mark.parametrize(("mean", "held", "slope"), [(9.0, 9.0, math.exp(9.0)), (15.0, 10.0, 0.0)])
def test_gspo_token_holds_the_ratio_of_a_response_at_e_to_the_10(mean, held, slope):
    log_ratios = row(2 * mean, 0.0).requires_grad_()

    terms = policy_losses.gspo_token(log_ratios, row(-1.0), ONES, low=0.2, high=0.2)
    terms.loss.sum().backward()

    close(terms.loss, row(math.exp(held), math.exp(held)))
    close(log_ratios.grad, row(slope, slope))


@pytest.mark.parametrize(
    ("a", "loss", "gradient"),
    [  # log-ratios 0.6 and -0.6, clipped to [-0.2, 0.4] where the advantage pushes that way
        (1.0, -math.exp(-0.1), (0.0, -0.5 * math.exp(-0.1))),
        (-1.0, math.exp(0.2), (0.5 * math.exp(0.2), 0.0)),
    ],
)
def test_gmpo_clips_one_side_of_each_token(a, loss, gradient):
    log_ratios = row(0.6, -0.6).requires_grad_()

    terms = policy_losses.gmpo(log_ratios, row(a), ONES, low=0.2, high=0.4)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(loss)
    close(log_ratios.grad, row(*gradient))


def test_gmpo_clips_each_token_by_its_own_advantage():
    log_ratios = row(0.6, -0.6, 0.6, -0.3, 0.9).requires_grad_()
    advantages = row(2.0, 1.0, -1.0, -1.0, 0.0)  # mean 0.2

    terms = policy_losses.gmpo(log_ratios, advantages, torch.ones(1, 5).bool(), low=0.2, high=0.4)
    terms.loss.sum().backward()

    s = math.exp((0.4 - 0.6 + 0.6 - 0.2 + 0.0) / 5)
    assert terms.loss.item() == pytest.approx(-0.2 * s)
    close(log_ratios.grad, row(0.0, 1.0, 1.0, 0.0, 0.0) * (-0.2 * s / 5))
    assert terms.clipped_high.tolist() == [[True, False, False, False, False]]
    assert terms.clipped_low.tolist() == [[False, False, False, True, False]]


def test_gmpo_takes_the_geometric_mean_of_the_weights():
    plain, weighted, zero = (
        policy_losses.gmpo(row(0.0, 0.0), row(2.0), ONES, low=0.2, high=0.4, weights=weights).loss.item()
        for weights in (None, row(4.0, 1.0), row(0.0, 1.0))
    )

    assert (plain, weighted) == (-2.0, pytest.approx(-4.0))
    assert zero == pytest.approx(-2e-5)  # sqrt(1e-10)


@pytest.mark.parametrize(
    ("ratio", "a", "value", "gradient"),
    [
        (1.3, 1.0, -1.1, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (0.9, -1.0, 0.9, 0.9),
        (3.0, -1.0, 1.4, 0.0),  # where PPO goes on pushing
    ],
)
def test_tbpo_has_a_band_for_negative_responses(ratio, a, value, gradient):
    log_ratio = row(math.log(ratio)).requires_grad_()

    terms = policy_losses.tbpo(log_ratio, row(a), high=0.1, negative_low=0.2, negative_high=0.4)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(value)
    assert log_ratio.grad.item() == pytest.approx(gradient, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("logs", "a", "weight"),
    [((0.5, 0.5), 1.0, 1.0), ((-2.0, -2.0), 1.0, 1.0), ((0.5, 0.5), -1.0, 1.0), ((-1.0, -0.5), -1.0, math.exp(-1.5))],
)
def test_topr_tapers_negative_responses(logs, a, weight):
    logps = row(-2.0, -3.0).requires_grad_()

    terms = policy_losses.topr(row(*logs), logps, row(a), ONES, low=0.0, high=1.0)
    terms.loss.sum().backward()

    close(terms.loss, row(2 * a * weight, 3 * a * weight))
    close(logps.grad, row(-a * weight, -a * weight))
    assert terms.gate.item() == pytest.approx(weight)


def test_oapl_regresses_the_log_ratio():
    # beta 0.5, log-ratio 0.4: 0.2 - (1 - 0.7) = -0.1
    log_ratios = row(0.1, 0.3).requires_grad_()

    terms = policy_losses.oapl(log_ratios, row(1.0), row(0.7), ONES, beta=0.5)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(0.01)
    close(log_ratios.grad, row(-0.1, -0.1))  # 2 beta (-0.1)


@pytest.mark.parametrize(("beta", "value"), [(1.0, math.log((1 + math.e) / 2)), (1e-3, 1.0), (1e3, 0.5)])
def test_soft_value_lies_between_the_mean_and_the_largest(beta, value):
    rewards, counted = row(0.0, 1.0, 9.0), torch.tensor([[True, True, False]])

    assert policy_losses.soft_value(rewards, counted, beta=beta).item() == pytest.approx(value, abs=2e-3)
    assert policy_losses.soft_value(rewards, ~counted & False, beta=beta).item() == 0.0


def test_entropy_groups_are_a_share_of_each_response():
    entropies = torch.tensor([[0.1, 0.9, 0.5, 0.7, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, False], [False, True, True, True, False]])

    top = policy_losses.entropy_groups(entropies, mask, fraction=0.5)

    assert top.tolist() == [[False, True, False, True, False], [False, True, True, False, False]]


def test_espo_clips_each_group_by_its_entropy():
    # the high group has entropy 2 and ratio 1.15: epsilon 0.2, inside; the low one 0.5 and 1.15: 0.05, clipped
    log_ratios = torch.full((1, 4), math.log(1.15)).requires_grad_()
    entropies = row(2.0, 0.5, 0.5, 0.5)

    terms = policy_losses.espo(
        log_ratios, row(1.0), entropies, torch.ones(1, 4).bool(), high_entropy_fraction=0.25, clip_scale=0.1
    )
    terms.loss.sum().backward()

    # shares: 4 / (2 * 1) and 4 / (2 * 3)
    close(terms.loss, row(-2 * 1.15, *[-1.05 * 2 / 3] * 3))
    close(log_ratios.grad, row(-2 * 1.15, 0.0, 0.0, 0.0))


def test_st_ppo_damps_the_turn_in_which_the_token_clip_sets_in():
    # turn 1: ratios 1.5 and 0.8, geometric mean sqrt(1.2), inside 1.2; the token clip would take 1.5 out
    # turn 2: 1.1
    log_ratios = row(1.5, 0.8, 1.0, 1.1).log().requires_grad_()
    mask = torch.tensor([[True, True, False, True]])
    s = math.sqrt(1.2)

    terms = policy_losses.st_ppo(log_ratios, row(1.0), mask, None, low=0.2, high=0.2, normalize=True)
    terms.loss[mask].sum().backward()

    close(terms.gate[mask], torch.tensor([1 / 1.75, 1 / 1.75, 1.0]))  # c = 1.5 / 2
    close(terms.loss[mask], torch.tensor([-s / 1.75, -s / 1.75, -1.1]))
    close(log_ratios.grad, row(-s / 1.75, -s / 1.75, 0.0, -1.1))
    turn_ppo = policy_losses.st_ppo(log_ratios, row(1.0), mask, None, low=0.2, high=0.2, normalize=False)
    close(turn_ppo.loss[mask], torch.tensor([-s, -s, -1.1]))
    assert turn_ppo.gate is None


def test_st_ppo_reads_turn_ids():
    log_ratios = row(math.log(4.0), 0.0)

    one, two = (
        policy_losses.st_ppo(log_ratios, row(1.0), ONES, ids, low=0.9, high=9.0, normalize=False).loss
        for ids in (torch.tensor([[0, 0]]), torch.tensor([[0, 1]]))
    )

    close(one, row(-2.0, -2.0))
    close(two, row(-4.0, -1.0))


@pytest.mark.parametrize("half_life", [0.01, 0.3, 1.0, 7.0])
def test_the_discounted_sum_over_several_blocks(half_life):
    """Blocks of 1, 9, 32 and 75 positions; the sum in a plain loop from the end."""
    logs = 0.05 * torch.randn(2, 75, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.rand(2, 75, generator=torch.Generator().manual_seed(1)) < 0.8

    got = policy_losses.future_influence(
        logs, torch.ones(2, 1), mask, half_life=half_life, low=0.99, high=99.0, max_ratio=None, safe_ratio=None
    )

    for i in range(2):
        rest = 0.0
        for t in reversed(range(75)):
            rest = rest * 2 ** (-1 / half_life) + (logs[i, t].item() if mask[i, t] else 0.0)
            assert got[i, t].item() == pytest.approx(math.exp(rest) if mask[i, t] else 1.0, rel=1e-9)


def test_fipo_leaves_outliers_out_and_does_not_punish_more():
    logs = torch.tensor([[4.0, 1.5, 12.0]]).log()

    def factors(advantage, **settings):
        options = {"half_life": 1.0, "low": 0.2, "high": 9.0, "max_ratio": 10.0, "safe_ratio": 3.0, **settings}
        return policy_losses.future_influence(logs, torch.tensor([[advantage]]), torch.ones(1, 3).bool(), **options)

    close(factors(1.0), torch.tensor([[4 * 1.5**0.5, 1.5, 1.0]]))  # the third is above max_ratio
    close(factors(-1.0), torch.tensor([[1.0, 1.5, 1.0]]))  # the first is above safe_ratio
    close(
        factors(-1.0, safe_ratio=None, max_ratio=None), torch.tensor([[4 * 1.5**0.5 * 12**0.25, 1.5 * 12**0.5, 10.0]])
    )


@pytest.mark.parametrize(("fraction", "tokens", "expected"), [(0.3, 100, 30), (0.3, 50, 15), (0.2, 11, 3), (0.5, 1, 1)])
def test_the_high_entropy_group_is_rounded_up_from_what_the_fraction_means(fraction, tokens, expected):
    entropies = torch.rand(1, tokens)
    assert int(policy_losses.entropy_groups(entropies, entropies > -1, fraction=fraction).sum()) == expected
