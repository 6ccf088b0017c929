"""Per-token policy losses: values, clip flags and gradients."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy.functional.policy_losses import cispo, ctpo, ppo_clip, sapo, vespo_phi

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def at(ratio):
    """A (1, 1) log-ratio with gradient."""
    return torch.tensor([[math.log(ratio)]], requires_grad=True)


def advantage(value):
    return torch.tensor([[value]])


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "low", "high", "gradient"),
    [  # low = 0.2, high = 0.3; gradient is d loss / d log-ratio = -A r where not clipped
        (1.0, 2.0, -2.0, False, False, -2.0),
        (1.5, 2.0, -2.6, False, True, 0.0),  # -min(3, 1.3 * 2)
        (0.5, 2.0, -1.0, False, False, -1.0),  # -min(1, 0.8 * 2)
        (1.5, -2.0, 3.0, False, False, 3.0),  # -min(-3, -2.6)
        (0.5, -2.0, 1.6, True, False, 0.0),  # -min(-1, -1.6)
        (1.25, 2.0, -2.5, False, False, -2.5),  # inside 1 + high, outside 1 + low
        (0.75, -2.0, 1.6, True, False, 0.0),  # below 1 - low, above 1 - high
        (1.5, 0.0, 0.0, False, False, 0.0),
    ],
)
def test_ppo_clip(ratio, a, loss, low, high, gradient):
    log_ratios = at(ratio)

    terms = ppo_clip(log_ratios, advantage(a), low=0.2, high=0.3)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    assert (terms.clipped_low.item(), terms.clipped_high.item()) == (low, high)
    assert log_ratios.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "gradient"),
    [
        (5.0, -1.0, 3.0, 0.0),  # PPO alone: 5
        (2.0, -1.0, 2.0, 2.0),  # below the bound
        (0.5, -1.0, 0.8, 0.0),
        (5.0, 1.0, -1.2, 0.0),  # positive advantages are not touched
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, a, loss, gradient):
    log_ratios = at(ratio)

    value = ppo_clip(log_ratios, advantage(a), low=0.2, high=0.2, dual_clip=3.0).loss
    value.sum().backward()

    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert log_ratios.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("loss", ["ppo_clip", "ctpo"])
def test_a_token_on_the_dual_clip_keeps_its_gradient(loss):
    log_ratios = at(3.0)
    if loss == "ppo_clip":
        terms = ppo_clip(log_ratios, advantage(-1.0), low=0.2, high=0.2, dual_clip=log_ratios.exp().item())
    else:
        terms = ctpo(
            log_ratios, advantage(-1.0), torch.ones(1, 1).bool(), low=0.2, high=0.2, dual_clip=log_ratios.item()
        )
    terms.loss.sum().backward()

    assert log_ratios.grad.item() == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "gradient"),
    [
        (5.0, -1.0, 4.0, 0.0),  # r capped at delta = 4
        (3.0, -1.0, 3.0, 3.0),
        (5.0, 1.0, -1.2, 0.0),
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_delta_caps_the_ratio_before_it_meets_the_advantage(ratio, a, loss, gradient):
    log_ratios = at(ratio)

    value = ppo_clip(log_ratios, advantage(a), low=0.2, high=0.2, delta=4.0).loss
    value.sum().backward()

    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert log_ratios.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_delta_leaves_the_clip_flags_on_the_raw_ratio():
    assert ppo_clip(at(5.0), advantage(1.0), low=0.2, high=0.2, delta=1.1).clipped_high.item()


@pytest.mark.parametrize("size", [50.0, -50.0])
def test_extreme_log_ratios_stay_finite(size):
    log_ratios = torch.tensor([[size]], requires_grad=True)

    for terms in (
        ppo_clip(log_ratios, advantage(-1.0), low=0.2, high=0.2),
        cispo(log_ratios, torch.tensor([[-1.0]]), advantage(-1.0), high=1e9),
        sapo(log_ratios, advantage(-1.0), temperature_pos=1.0, temperature_neg=1.05),
    ):
        assert terms.loss.isfinite().all()
    loss = ppo_clip(log_ratios, advantage(-1.0), low=0.2, high=0.2).loss
    assert loss.item() == pytest.approx(max(0.8, math.exp(math.copysign(20, size))), rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "clipped", "gradient"),
    [  # logp = -3, cap 1.5; loss = -min(r, 1.5) A logp, gradient to logp = -min(r, 1.5) A
        (2.0, 0.5, 2.25, True, -0.75),
        (0.1, 0.5, 0.15, False, -0.05),  # no lower bound
        (2.0, -0.5, -2.25, False, 0.75),  # capped, but not counted: A < 0
        (1.0, 0.5, 1.5, False, -0.5),
    ],
)
def test_cispo_caps_the_detached_ratio(ratio, a, loss, clipped, gradient):
    log_ratios, logps = at(ratio), torch.tensor([[-3.0]], requires_grad=True)

    terms = cispo(log_ratios, logps, advantage(a), high=1.5)
    terms.loss.sum().backward()

    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    assert terms.clipped_high.item() is clipped
    assert terms.clipped_low is None
    assert logps.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert log_ratios.grad is None


@pytest.mark.parametrize(
    ("ratio", "a", "loss"),
    [  # tau 1 for A > 0, 2 elsewhere
        (1.0, 1.0, -2.0),  # sigmoid(0) * 4 / 1
        (1.5, 1.0, -2.4898373),  # 4 sigmoid(0.5) = 4 * 0.62245933
        (1.0, -1.0, 1.0),  # sigmoid(0) * 4 / 2
        (1.5, -1.0, 1.4621172),  # 2 sigmoid(1) = 2 * 0.73105858
        (1.5, 0.0, 0.0),
    ],
)
def test_sapo_gates_softly(ratio, a, loss):
    terms = sapo(at(ratio), advantage(a), temperature_pos=1.0, temperature_neg=2.0)

    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    assert terms.clipped_low is None
    assert terms.clipped_high is None


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_sapo_on_policy_has_the_policy_gradient(a):
    log_ratios = at(1.0)

    sapo(log_ratios, advantage(a), temperature_pos=1.0, temperature_neg=2.0).loss.sum().backward()

    assert log_ratios.grad.item() == pytest.approx(-a, abs=1e-6)  # 4 / tau * tau * sigmoid'(0) = 1


GAMMA = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


@pytest.mark.parametrize(
    ("w", "a", "phi"),
    [
        (1.0, 1.0, 1.0),
        (1.0, -1.0, 1.0),
        (2.0, 1.0, 0.19914827),  # e^3 2^2 e^-6 = 4 e^-3
        (2.0, 0.0, 0.19914827),  # A = 0 counts as positive
        (2.0, -1.0, 1.0826823),  # e^2 2^3 e^-4 = 8 e^-2
        (0.5, 1.0, 1.1204223),  # e^3 0.25 e^-1.5 = 0.25 e^1.5
        (1e9, 1.0, 0.0),
    ],
)
def test_vespo_phi(w, a, phi):
    log_w = torch.tensor([[math.log(w)]], requires_grad=True)

    value = vespo_phi(log_w, advantage(a), **GAMMA)

    assert value.item() == pytest.approx(phi, rel=1e-5, abs=1e-6)
    assert not value.requires_grad


def test_vespo_phi_floors_w_at_1e_8():
    floored = vespo_phi(torch.tensor([[-100.0]]), advantage(1.0), **{**GAMMA, "k_pos": 0.1})

    assert floored.item() == pytest.approx(math.exp(3) * 1e-8**0.1, rel=1e-5)  # = 3.183; without a floor 9e-4


def test_vespo_phi_rate_has_a_floor():
    options = {**GAMMA, "k_pos": 0.5, "lambda_pos": 0.0}
    value = vespo_phi(torch.tensor([[math.log(1e4)]]), advantage(1.0), **options)

    assert value.item() == pytest.approx(math.exp(1e-4) * 100 * math.exp(-1), rel=1e-5)  # rate 1e-4, w 1e4


def test_vespo_phi_by_token_where_advantages_are():
    value = vespo_phi(torch.tensor([[math.log(2)]]), torch.tensor([[1.0, -1.0]]), **GAMMA)

    close(value, torch.tensor([[4 * math.exp(-3), 8 * math.exp(-2)]]))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, a: ppo_clip(x, a, low=0.2, high=0.28).loss,
        lambda x, a: ppo_clip(x, a, low=0.2, high=0.28, dual_clip=2.0).loss,
        lambda x, a: ppo_clip(x, a, low=0.2, high=0.28, delta=1.7).loss,
        lambda x, a: sapo(x, a, temperature_pos=1.0, temperature_neg=1.05).loss,
        lambda x, a: cispo(torch.full_like(x, 0.3), x, a, high=1.2).loss,
    ],
    ids=["ppo", "dual_clip", "delta", "sapo", "cispo"],
)
def test_gradients_match_finite_differences(loss):
    log_ratios = torch.tensor([[-1.0, -0.1, 0.05], [0.1, 0.5, 1.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.3], [-0.7]], dtype=torch.float64)

    torch.autograd.gradcheck(lambda x: loss(x, advantages), log_ratios, eps=1e-6, atol=1e-6)
    torch.autograd.gradcheck(lambda x: loss(x, -advantages), log_ratios, eps=1e-6, atol=1e-6)
