"""Trust regions that are no fixed clip, and covariances: values by hand."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy.functional import policy_losses

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def row(*values):
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("p", "q", "a", "out"),
    [  # |p - q| against 0.1; out only where the step went the advantage's way
        (0.75, 0.5, 1.0, True),
        (0.55, 0.5, 1.0, False),
        (0.25, 0.5, 1.0, False),
        (0.25, 0.5, -1.0, True),
        (0.45, 0.5, -1.0, False),
        (0.75, 0.5, -1.0, False),
        (0.02, 0.01, 1.0, False),  # the ratio is 2, the probabilities are as good as equal
    ],
)
def test_dppo_tv(p, q, a, out):
    logps = row(math.log(p)).requires_grad_()

    terms = policy_losses.dppo(logps - math.log(q), logps, row(a), divergence="tv", low=0.1, high=0.1, max_ratio=20.0)
    terms.loss.sum().backward()

    assert (terms.clipped_low | terms.clipped_high).item() is out
    assert terms.loss.item() == pytest.approx(0.0 if out else -p / q * a * math.log(p), abs=1e-6)
    assert logps.grad.item() == pytest.approx(0.0 if out else -p / q * a, abs=1e-6)  # the ratio is detached


def test_dppo_kl_bounds_nats():
    # q = 0.5, p = 0.75: 0.5 log(2/3) + 0.5 log 2 = 0.1438
    logps = row(math.log(0.75))
    terms = [
        policy_losses.dppo(logps - math.log(0.5), logps, row(1.0), divergence="kl", low=1.0, high=h, max_ratio=20.0)
        for h in (0.14, 0.15)
    ]

    assert [one.clipped_high.item() for one in terms] == [True, False]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_stops_a_token_that_the_old_policy_excluded(divergence):
    """p = 0.75 and q = e^-40: the ratio is held at e^20, the divergence (0.75, log 4) is not."""
    logps = row(math.log(0.75))

    terms = policy_losses.dppo(logps + 40.0, logps, row(1.0), divergence=divergence, low=0.7, high=0.7, max_ratio=3.0)

    assert terms.clipped_high.item() and terms.loss.item() == 0.0


def test_dppo_truncates_the_ratio():
    logps = row(math.log(0.5))

    terms = policy_losses.dppo(logps - math.log(0.1), logps, row(-2.0), divergence="tv", low=1, high=1, max_ratio=3.0)

    close(terms.loss, row(3 * 2 * math.log(0.5)))


def test_p3o_caps_at_the_ess_and_pulls_by_what_it_lacks():
    """Ratios 2, 1, 1 (and one that does not count): ESS = 16 / (3 * 6) = 8 / 9."""
    ratios, mask = row(2.0, 1.0, 1.0, 50.0), torch.tensor([[True, True, True, False]])
    logps = row(-1.0, -2.0, -3.0, -4.0).requires_grad_()
    log_ratios = logps - logps.detach() + ratios.log()

    terms = policy_losses.p3o(log_ratios, logps, row(3.0), mask)
    (gradient,) = torch.autograd.grad(terms.loss[mask].sum(), logps)

    kl = (math.log(2) + 0.5 - 1) / 9
    close(terms.loss[mask], torch.tensor([8 / 9 * 3 * 1 + kl, 8 / 9 * 3 * 2, 8 / 9 * 3 * 3]))
    close(gradient, row(-8 / 9 * 3 + (1 - 0.5) / 9, -8 / 9 * 3, -8 / 9 * 3, 0.0))
    assert terms.clipped_high[mask].tolist() == [True, True, True] and terms.clipped_low is None
    close(terms.gate[0, 0], torch.tensor(8 / 9))
    empty = policy_losses.p3o(log_ratios, logps, row(3.0), torch.zeros_like(mask))
    assert empty.loss.isfinite().all() and empty.gate[0, 0] == 1.0


def test_m2po_takes_out_the_largest_of_those_that_moved_with_their_advantage():
    # moved: 0.1 and 0.5 up with A > 0, -0.3 down with A < 0; squares 0.01, 0.25, 0.09; the largest prefix with a mean
    # of at most 0.051 is {0.01, 0.09}
    log_ratios = torch.tensor([[0.1, 0.5, -0.7], [-0.3, 0.9, 5.0]], requires_grad=True)
    advantages = torch.tensor([[1.0], [-2.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])

    terms = policy_losses.m2po(log_ratios, advantages, mask, budget=0.051)
    terms.loss[mask].sum().backward()

    e = math.exp
    close(terms.loss[mask], torch.tensor([-e(0.1), 0.0, -e(-0.7), 2 * e(-0.3), 2 * e(0.9)]))
    close(log_ratios.grad, torch.tensor([[-e(0.1), 0.0, -e(-0.7)], [2 * e(-0.3), 2 * e(0.9), 0.0]]))
    assert terms.clipped_high.tolist() == [[False, True, False], [False, False, False]]
    assert not terms.clipped_low.any()


def test_r2vpo_narrows_the_clip_of_a_group_that_varies():
    # group 1: ratios 0.8 and 1.2, variance 0.04 = v: epsilon halves. Group 2: 1.15 twice, no variance.
    log_ratios = torch.tensor([[0.8], [1.2], [1.15], [1.15]]).log()
    arguments = log_ratios, torch.ones(4, 1), torch.ones(4, 1).bool(), torch.tensor([1, 1, 2, 2])

    terms = policy_losses.r2vpo(*arguments, low=0.2, high=0.2, variance=0.04)

    close(policy_losses.group_ratio_variance(log_ratios, *arguments[2:]), torch.tensor([[0.04], [0.04], [0.0], [0.0]]))
    close(terms.loss, -torch.tensor([[0.8], [1.1], [1.15], [1.15]]))


def test_quatros_stabiliser_is_not_rounding_where_the_policies_nearly_agree():
    """r log r - r + 1 is l^2 / 2 there; as written, float32 gave 0 at 1e-4."""
    log_ratios = row(1e-4, -3e-4, 1e-3)

    loss = policy_losses.quatro(log_ratios, row(0.0, 0.0, 0.0), row(1.0), radius=0.5).loss

    torch.testing.assert_close(loss, log_ratios.square() / 2, rtol=2e-2, atol=0.0)


def test_quatro_has_no_clip_and_pulls_back_by_the_querys_multiplier():
    # std 0.5, radius 0.125: lambda = 0.5 / 0.5 = 1; r = 2
    log_ratios = row(math.log(2)).requires_grad_()

    terms = policy_losses.quatro(log_ratios, row(1.0), row(0.5), radius=0.125)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(-2 + 2 * math.log(2) - 1)
    assert log_ratios.grad.item() == pytest.approx(-2 * (1 - math.log(2)))  # -r (A - lambda log r)
    assert terms.clipped_low is terms.clipped_high is None


def test_token_covariance_leaves_padding_out():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    logps = torch.tensor([[-1.0, -3.0, 99.0], [-2.0, 99.0, 99.0]])

    # means: A (2 + 2 - 1) / 3 = 1, log pi -2
    covariance = policy_losses.token_covariance(logps, torch.tensor([[2.0], [-1.0]]), mask)

    close(covariance, torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(("fraction", "taken"), [(0.01, 1), (0.4, 2), (0.6, 3), (1.0, 5)])
def test_clip_cov_takes_a_share_of_all_tokens_at_random(fraction, taken):
    torch.manual_seed(0)
    logps = row(-5.0, -4.0, -3.0, -2.0, -1.0)
    advantages = row(-2.0, -1.0, 0.0, 1.0, 2.0)  # covariances 4, 1, 0, 1, 4
    options = {"low": 0.2, "high": 0.2, "fraction": fraction, "cov_low": -1.0, "cov_high": 5.0}

    def draw():
        mask = torch.ones(1, 5).bool()
        return policy_losses.clip_cov(torch.zeros(1, 5), logps, advantages, mask, **options)

    draws = [draw() for _ in range(30)]

    assert {int((one.gate == 0).sum()) for one in draws} == {taken}
    for one in draws:
        close(one.loss, -advantages * one.gate)
    picks = torch.stack([one.gate == 0 for one in draws]).any(0)
    assert picks.all()  # each token falls to some draw


def test_clip_cov_takes_candidates_only():
    logps = row(-5.0, -4.0, -3.0, -2.0, -1.0)
    advantages = row(-2.0, -1.0, 0.0, 1.0, 2.0)
    log_ratios = row(0.0, 0.0, 0.0, 0.0, 1.0)  # the last is at PPO's clip already
    options = {"low": 0.2, "high": 0.2, "fraction": 1.0, "cov_low": 1.0, "cov_high": 5.0}

    terms = policy_losses.clip_cov(log_ratios, logps, advantages, torch.ones(1, 5).bool(), **options)

    assert terms.gate.tolist() == [[0.0, 1.0, 1.0, 1.0, 1.0]]
    assert terms.clipped_high.tolist() == [[False, False, False, False, True]]


def test_kl_cov_penalises_the_largest():
    logps = row(-5.0, -4.0, -3.0, -2.0, -1.0)
    advantages = row(-1.0, -1.0, 0.0, 1.0, 2.0)
    log_ratios = row(0.1, 0.1, 0.1, 0.1, -0.1).requires_grad_()

    terms = policy_losses.kl_cov(log_ratios, logps, advantages, torch.ones(1, 5).bool(), fraction=0.5, coef=3.0)
    terms.loss.sum().backward()

    # A - mean = -1.2, -1.2, -0.2, 0.8, 1.8; covariances 2.4, 1.2, 0, 0.8, 3.6; the two largest: first and last
    e = math.exp
    close(terms.loss, row(e(0.1) + 0.3, e(0.1), 0.0, -e(0.1), -2 * e(-0.1) + 0.3))
    close(log_ratios.grad, row(e(0.1) + 3, e(0.1), 0.0, -e(0.1), -2 * e(-0.1) - 3))
