"""prime-rl's default and IPO losses in plain floats, value and gradient, against ``from_prime_rl``."""

import math
import warnings

import pytest
import torch
from batches import policy_batch
from plain_parity import assert_both, gradient, rows_of

from trl_offpolicy import presets


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return presets.from_prime_rl(**options)


def kept(p, q, advantage, options):
    moved = p - q
    if options.get("type") == "ipo":
        return abs(moved) <= options.get("ipo_threshold", 0.1)
    if advantage > 0:
        return moved <= options.get("dppo_mask_high", 0.2)
    return moved >= -options.get("dppo_mask_low", 0.2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_tau": 0.0},
        {"kl_tau": 0.3, "dppo_mask_low": 0.01, "dppo_mask_high": 0.02},
        {"type": "ipo", "ipo_threshold": 0.05, "kl_tau": 0.2},
    ],
)
def test_value_and_gradient_with_the_regulariser(options, random_batch):
    """-A pi / mu on kept tokens + kl_tau log^2(pi / mu) on all of them, over all tokens; kl_tau is 1e-3 if left out."""
    batch, preset = random_batch(1, spread=0.8), quiet(**options)
    tau, loss, slopes, keep = options.get("kl_tau", 1e-3), 0.0, torch.zeros(batch.mask.shape), []
    count = int(batch.mask.sum())
    for index, row in enumerate(rows_of(batch)):
        for t, now, mu in zip(row.at, row.current, row.sampling, strict=True):
            rho, stays = math.exp(now - mu), kept(math.exp(now), math.exp(mu), row.advantage, options)
            loss += tau * (now - mu) ** 2 - stays * rho * row.advantage
            slopes[index, t] = (2 * tau * (now - mu) - stays * rho * row.advantage) / count
            keep.append(stays)
    if "dppo_mask_low" in options or "ipo_threshold" in options:
        assert_both([keep])

    out = preset.objective(batch)
    assert out.loss.item() == pytest.approx(loss / count, rel=2e-5, abs=1e-7)
    assert int(out.keep_mask.sum()) == sum(keep)
    torch.testing.assert_close(gradient(preset, batch), slopes, rtol=2e-4, atol=1e-7)


def test_a_token_that_the_sampler_excluded_is_dropped():
    """vLLM writes -9999 for a log-prob of minus infinity: the token's probability moved by all of exp(-0.5)."""
    lifted = torch.tensor([[-0.5, -0.5]])
    for below in (-31.0, -9999.0):
        fields = {"old_per_token_logps": lifted, "sampling_per_token_logps": torch.tensor([[below, -0.5]])}
        batch = policy_batch([[1.0, 1.0]], per_token_logps=lifted.clone().requires_grad_(), **fields)

        for options in ({"dppo_mask_high": 0.6}, {"type": "ipo", "ipo_threshold": 0.6}):
            assert quiet(**options).objective(batch).keep_mask.tolist() == [[False, True]]


def test_a_threshold_of_0_drops_every_move_away():
    """prime-rl allows it (``ge=0``)."""
    batch = policy_batch([[1.2, 0.8], [1.0, 1.2]], advantages=torch.tensor([1.0, -1.0]))
    kept = quiet(dppo_mask_low=0.0, dppo_mask_high=0.0).objective(batch).keep_mask
    assert kept.tolist() == [[False, True], [True, True]]
    assert quiet(type="ipo", ipo_threshold=0.0).correction.keep


def test_bounds_that_nothing_reaches_are_left_open():
    with pytest.warns(UserWarning, match=r"^dppo_mask_low=1 is taken as no bound: probabilities differ by less than 1"):
        preset = presets.from_prime_rl(dppo_mask_low=1.0, dppo_mask_high=0.3)
    (term,) = preset.correction.keep
    assert term.high == 0.3 and -1 < term.low < -0.999999
    with pytest.warns(UserWarning, match="is taken as no bound"):
        assert presets.from_prime_rl(type="ipo", ipo_threshold=2.0).correction.keep == ()
        assert presets.from_prime_rl(dppo_mask_low=1.0, dppo_mask_high=1.0).correction.keep == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kl_tau": -1.0}, ValueError, r"^kl_tau must be at least 0"),
        ({"dppo_mask_low": -0.5}, ValueError, r"^dppo_mask_low must be 0 or more, but got -0.5"),
        ({"type": "ipo", "ipo_threshold": -0.1}, ValueError, r"^ipo_threshold must be 0 or more, but got -0.1"),
        ({"adv_tau": 0.5}, NotImplementedError, r"^adv_tau must be 1: multiply the learning rate by it"),
        ({"type": "custom"}, NotImplementedError, r"^type 'custom' is a function of your own"),
    ],
)
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        quiet(**options)
