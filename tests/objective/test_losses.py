"""Policy losses as settings: levels, what they read, and settings that are refused."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy import losses
from trl_offpolicy.objective.losses import LossInputs

NAN, INF = float("nan"), float("inf")
L = math.log(2)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
ALL = [losses.PPOClip, losses.CISPO, losses.SAPO, losses.VESPO]


def inputs(ratios=((4.0, 1.0),), advantage=1.0, mask=None, weights=None):
    log_ratios = torch.tensor(ratios).log()
    mask = torch.ones_like(log_ratios).bool() if mask is None else torch.tensor(mask)
    advantages = torch.full((len(log_ratios), 1), advantage)
    return LossInputs(torch.full_like(log_ratios, -3.0), log_ratios, advantages, mask, weights)


@pytest.mark.parametrize(
    ("loss", "token", "sequence"),
    [  # token ratios (4, 1); sequence ratio sqrt(4 * 1) = 2
        (losses.PPOClip(low=0.2, high=1.5), [[-2.5, -1.0]], [[-2.0]]),
        (losses.CISPO(high=3.0), [[9.0, 3.0]], [[6.0, 6.0]]),  # -min(r, 3) * 1 * -3
        # 4 sigmoid(3), 4 sigmoid(0); 4 sigmoid(1)
        (losses.SAPO(), [[-3.8102965, -2.0]], [[-2.9242343]]),
    ],
)
def test_levels(loss, token, sequence):
    sequence_loss = type(loss)(**{**vars(loss), "level": "sequence_mean"})

    close(loss(inputs()).loss, torch.tensor(token))
    close(sequence_loss(inputs()).loss, torch.tensor(sequence))


def test_sequence_ratio_is_over_trainable_tokens():
    loss = losses.PPOClip(level="sequence_mean", high=3.5)

    close(loss(inputs(mask=[[True, False]])).loss, torch.tensor([[-4.0]]))  # 4 alone


@pytest.mark.parametrize(
    ("options", "advantage", "expected"),
    [
        ({"low": 0.2, "high": 0.3}, 1.0, [[-1.3, -1.0]]),
        ({"low": 0.2, "high": 0.3}, -1.0, [[4.0, 1.0]]),
        ({"dual_clip": 2.5}, -1.0, [[2.5, 1.0]]),
        ({"delta": 3.0}, -1.0, [[3.0, 1.0]]),
    ],
)
def test_ppo_options_reach_the_function(options, advantage, expected):
    close(losses.PPOClip(**options)(inputs(advantage=advantage)).loss, torch.tensor(expected))


def test_ppo_low_clip_reaches_the_function():
    terms = losses.PPOClip(low=0.4, high=0.2)(inputs(ratios=((0.5, 0.7),), advantage=-1.0))

    close(terms.loss, torch.tensor([[0.6, 0.7]]))
    assert terms.clipped_low.tolist() == [[True, False]]


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, -2.0), (-1.0, 1.0)])
def test_sapo_temperatures_by_sign(advantage, expected):
    loss = losses.SAPO(temperature_pos=1.0, temperature_neg=2.0)

    assert loss(inputs(ratios=((1.0,),), advantage=advantage)).loss.item() == pytest.approx(expected, abs=1e-6)


def test_vespo_constants_by_sign():
    loss = losses.VESPO(k_pos=1.0, lambda_pos=0.5, k_neg=2.0, lambda_neg=0.25)

    positive, negative = (loss(inputs(ratios=((2.0,),), advantage=a)).loss.item() for a in (1.0, -1.0))

    # phi = e^lambda w^k e^(-lambda w) at w = 2: 2 e^-0.5 and 4 e^-0.25; loss = -phi A logp, logp = -3
    assert positive == pytest.approx(3 * 2 * math.exp(-0.5), rel=1e-5)
    assert negative == pytest.approx(-3 * 4 * math.exp(-0.25), rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "w"),
    [
        (None, 4.0),
        ([[0.5, 0.25]], 0.5),  # 4 * 1 * 0.5 * 0.25
        ([[0.5]], 2.0),
        ([[1.0, 1.0]], 4.0),
    ],
)
def test_vespo_w_is_the_product_over_the_sequence(weights, w):
    weights = None if weights is None else torch.tensor(weights)
    loss = losses.VESPO(k_pos=1.0, lambda_pos=0.5)

    gate = loss(inputs(weights=weights)).gate

    assert gate.item() == pytest.approx(math.exp(0.5) * w * math.exp(-0.5 * w), rel=1e-5)


def test_vespo_leaves_padding_out():
    values = LossInputs(
        logps=torch.tensor([[-3.0, NAN]]),
        log_ratios=torch.tensor([[L, 0.0]]),
        advantages=torch.ones(1, 1),
        mask=torch.tensor([[True, False]]),
        weights=torch.tensor([[1.0, 0.0]]),
    )

    terms = losses.VESPO(k_pos=1.0, lambda_pos=0.5)(values)

    phi = 2 * math.exp(-0.5)
    close(terms.loss, torch.tensor([[3 * phi, 0.0]]))
    close(terms.gate, torch.tensor([[phi]]))


def test_vespo_clamps_token_ratios_before_the_product():
    ratios = torch.tensor([[25.0, -20.0]])  # clamped 20 - 20 = 0
    values = inputs()._replace(log_ratios=ratios)

    assert losses.VESPO()(values).gate.item() == pytest.approx(1.0, abs=1e-6)


def test_how_weights_enter():
    assert [loss.weight_use for loss in ALL] == ["multiply", "multiply", "multiply", "inside"]
    assert {loss().scope for loss in ALL} == {"row"}


def test_defaults():
    ppo, vespo = losses.PPOClip(), losses.VESPO()
    assert (ppo.low, ppo.high, ppo.dual_clip, ppo.delta, ppo.level) == (0.2, 0.2, None, None, "token")
    assert losses.CISPO().high == 5.0
    assert (losses.SAPO().temperature_pos, losses.SAPO().temperature_neg) == (1.0, 1.05)
    assert (vespo.k_pos, vespo.lambda_pos, vespo.k_neg, vespo.lambda_neg) == (2.0, 3.0, 3.0, 2.0)


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("level", ["sequence", "geometric", None])
def test_unknown_level_is_refused(loss, level):
    if (loss, level) == (losses.PPOClip, "sequence"):
        assert loss(level=level).level == level  # RLOO's
        return
    with pytest.raises(ValueError, match=r"^level must be 'token'(,| or) 'sequence_mean' \(GSPO\).*, but got"):
        loss(level=level)


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF, "0.2", True])
@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (losses.PPOClip, "low"),
        (losses.PPOClip, "high"),
        (losses.PPOClip, "delta"),
        (losses.PPOClip, "dual_clip"),
        (losses.CISPO, "high"),
        (losses.SAPO, "temperature_pos"),
        (losses.SAPO, "temperature_neg"),
        (losses.VESPO, "k_pos"),
        (losses.VESPO, "k_neg"),
    ],
)
def test_settings_are_positive_numbers(loss, field, bad):
    with pytest.raises(ValueError, match=rf"^{field} must be"):
        loss(**{field: bad})


@pytest.mark.parametrize("field", ["lambda_pos", "lambda_neg"])
@pytest.mark.parametrize("bad", [NAN, INF, "3", True])
def test_vespo_rates_are_numbers(field, bad):
    with pytest.raises(ValueError, match=rf"^{field} must be a finite number"):
        losses.VESPO(**{field: bad})


@pytest.mark.parametrize("dual_clip", [0.5, 1.0])
def test_dual_clip_is_above_one(dual_clip):
    with pytest.raises(ValueError, match=r"^dual_clip must be above 1, but got"):
        losses.PPOClip(dual_clip=dual_clip)


@pytest.mark.parametrize("loss", ALL)
def test_options_are_named_only(loss):
    with pytest.raises(TypeError):
        loss(0.2)
    with pytest.raises(TypeError, match="epsilon"):
        loss(epsilon=0.2)
