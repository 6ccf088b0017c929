"""Every policy loss against its published formula (``plain_losses.py``): value, gradient, and the case of ratio 1."""

from dataclasses import replace

import pytest
import torch
from loss_inputs import LENGTH, ROWS, on_policy_batch, plain, random_inputs
from plain_losses import FORMULAS

from trl_offpolicy import Objective, losses
from trl_offpolicy.presets.parsing import LOSS_TYPES


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_are_those_of_the_published_formula(name, seed):
    loss, formula = FORMULAS[name]
    inputs, logps, centre, sampling = random_inputs(seed)
    weight = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    got = loss(inputs).loss.expand(ROWS, LENGTH)
    expected = formula(plain(inputs, logps, centre, sampling))

    assert set(expected) == {tuple(index) for index in inputs.mask.nonzero().tolist()}
    for (i, t), value in expected.items():
        assert got[i, t].item() == pytest.approx(value.item(), rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad((got * weight)[inputs.mask].sum(), logps)
    (wanted,) = torch.autograd.grad(sum(weight[key] * value for key, value in expected.items()), logps)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    assert wanted.abs().max() > 0.01  # so that a flipped sign would show


@pytest.mark.parametrize("name", FORMULAS)
def test_the_batches_above_reach_every_clip(name):
    """Each side on which a loss says it clips is seen active and inactive."""
    sides = {"clipped_low": set(), "clipped_high": set()}
    for seed in range(6):
        inputs = random_inputs(seed)[0]
        terms = FORMULAS[name][0](inputs)
        for side, seen in sides.items():
            flags = getattr(terms, side)
            if flags is None:
                seen |= {True, False}
            else:
                unit = inputs.mask if flags.shape[1] > 1 else inputs.mask.any(-1, keepdim=True)
                seen |= set(flags[unit].tolist())
    assert all(seen == {True, False} for seen in sides.values())


def test_every_loss_has_a_formula():
    assert {type(loss) for loss, _ in FORMULAS.values()} == set(LOSS_TYPES.values())


# ---------------------------------------------------------------------------------------------------------- at ratio 1


def gradient_of(loss, batch, aggregation):
    value = Objective(policy_loss=loss, aggregation=aggregation)(batch).loss
    return torch.autograd.grad(value, batch.per_token_logps)[0]


SAME = [name for name in FORMULAS if name not in ("gpg", "espo", "oapl", "clip cov")]


@pytest.mark.parametrize("name", SAME)
def test_at_ratio_1_the_gradient_is_the_policy_gradient(name):
    """Of the mean over responses of their token mean; for LUSPO of their token sum. The factor is 1."""
    batch, loss = on_policy_batch(), FORMULAS[name][0]
    aggregation = "seq_mean_token_sum" if name == "luspo" else "seq_mean_token_mean"

    expected = gradient_of(losses.GPG(), batch, aggregation)

    tokens = batch.mask.sum(-1, keepdim=True) if name != "luspo" else 1
    by_hand = torch.where(batch.mask, -batch.advantages[:, None] / (ROWS * tokens), 0.0)
    torch.testing.assert_close(expected, by_hand, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(gradient_of(loss, batch, aggregation), expected, rtol=1e-5, atol=1e-7)


def test_gpg_with_a_unit_ratio_has_the_value_of_minus_a_and_the_same_gradient():
    batch, mean = on_policy_batch(), "token_mean"
    tokens = batch.mask.sum(-1)

    out = Objective(policy_loss=losses.GPG(unit_ratio=True), aggregation=mean)(batch)

    assert out.loss.item() == pytest.approx(-(batch.advantages * tokens).sum().item() / tokens.sum().item(), rel=1e-5)
    expected = gradient_of(losses.GPG(), batch, mean)
    torch.testing.assert_close(gradient_of(losses.GPG(unit_ratio=True), batch, mean), expected, rtol=1e-6, atol=0.0)


def test_at_ratio_1_clip_cov_is_the_policy_gradient_without_the_tokens_it_takes():
    batch = on_policy_batch()
    loss = FORMULAS["clip cov"][0]
    mean = aggregation = "seq_mean_token_mean"
    a, logps = batch.advantages[:, None].expand(ROWS, LENGTH), batch.per_token_logps.detach()
    covariance = (a - a[batch.mask].mean()) * (logps - logps[batch.mask].mean())
    taken = (covariance > 0.3) & (covariance < 2.0)

    expected = torch.where(taken, 0.0, gradient_of(losses.GPG(), batch, mean))

    assert taken[batch.mask].any()
    torch.testing.assert_close(gradient_of(loss, batch, aggregation), expected, rtol=1e-5, atol=1e-7)


def test_at_ratio_1_espo_weighs_both_entropy_groups_the_same():
    """The factor is n / (2 n_g): half of a response's gradient is that of its high-entropy tokens."""
    batch, loss = on_policy_batch(), FORMULAS["espo"][0]
    mean = "seq_mean_token_mean"
    factor = gradient_of(loss, batch, mean) / gradient_of(losses.GPG(), batch, mean)

    for i in range(ROWS):
        inside = batch.mask[i]
        top = batch.entropies[i][inside].argsort(descending=True)[: -int(-0.4 * inside.sum() // 1)]
        high, low = len(top), int(inside.sum()) - len(top)
        expected = torch.full((high + low,), (high + low) / (2 * low) if low else 1.0)
        expected[top] = (high + low) / (2 * high) if low else 1.0
        torch.testing.assert_close(factor[i][inside], expected, rtol=1e-4, atol=1e-4)


def test_at_ratio_1_oapl_is_2_beta_n_times_the_policy_gradient_of_its_own_advantage():
    batch = on_policy_batch()
    soft = {
        group: 0.5 * (batch.rewards[batch.group_ids == group] / 0.5).exp().mean().log() for group in (3, 8)
    }  # all rows have a token
    own = torch.stack([r - soft[int(g)] for r, g in zip(batch.rewards, batch.group_ids, strict=True)])

    got = gradient_of(FORMULAS["oapl"][0], batch, "seq_mean_token_mean")

    assert batch.mask.any(-1).all()
    expected = torch.where(batch.mask, -2 * 0.2 * own[:, None] / ROWS, 0.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    as_policy_gradient = gradient_of(losses.GPG(), replace(batch, advantages=own), "seq_mean_token_sum")
    torch.testing.assert_close(got, 2 * 0.2 * as_policy_gradient, rtol=1e-5, atol=1e-7)


def test_gspo_token_has_gspos_gradient_under_the_mean_over_tokens():
    """With one advantage for the response; the stop-gradient sits on the geometric mean alone."""

    def gradient(loss):
        inputs, logps, _, _ = random_inputs(0)
        mask = inputs.mask
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        per_token = loss(inputs).loss.expand(ROWS, LENGTH)
        return torch.autograd.grad((torch.where(mask, per_token, 0.0) / count).sum(), logps)[0]

    whole, by_token = (gradient(loss(low=0.1, high=0.1)) for loss in (losses.GSPO, losses.GSPOToken))

    torch.testing.assert_close(by_token, whole, rtol=1e-9, atol=1e-12)
    # with an advantage for a single token only that token moves
    one = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    one[4, 3] = 1.0
    inputs, logps, _, _ = random_inputs(0)
    inputs = inputs._replace(advantages=one)
    moved = torch.autograd.grad(losses.GSPOToken(low=0.9, high=0.9)(inputs).loss.sum(), logps)[0]
    assert moved.nonzero().tolist() == [[4, 3]]
