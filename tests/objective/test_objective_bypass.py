"""Objective with two policies (bypass), the plain policy gradient, and factors that would be counted twice.

Log-probs are -4 (old); None is padding.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import LOGP, evaluate, policy_batch

from trl_offpolicy import (
    Correction,
    Objective,
    OffPolicySequenceMask,
    PrefixMinWeight,
    PrefixWeight,
    RatioBand,
    RawWeight,
    TruncateWeight,
    losses,
)

NAN = float("nan")
LOSSES = [losses.PPOClip(), losses.CISPO(), losses.SAPO(), losses.VESPO(), losses.GPG()]
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def loss_of(batch, **options):
    return evaluate(batch, **options)[0].loss.item()


def test_bypass_takes_the_ratio_against_the_sampling_policy():
    batch = policy_batch([[1.05, 0.5]], [[1.1, 1.5]])  # old/sampling, current/old; A = 1

    decoupled, _ = evaluate(batch)
    bypass, gradient = evaluate(batch, mode="bypass")

    close(decoupled.per_token_loss, torch.tensor([[-1.1, -1.2]]))
    close(bypass.per_token_loss, torch.tensor([[-1.155, -0.75]]))  # of the products
    close(gradient, torch.tensor([[-1.155 / 2, -0.75 / 2]]))


def test_bypass_needs_no_old_log_probs_and_ignores_the_proximal_ones():
    batch = policy_batch([[1.05]], [[1.1]])
    bare = replace(batch, old_per_token_logps=None, proximal_per_token_logps=torch.zeros(1, 1))

    assert loss_of(bare, mode="bypass") == pytest.approx(-1.155, abs=1e-6)


@pytest.mark.parametrize("policy_loss", [losses.PPOClip(level="sequence_mean"), losses.SAPO(), losses.VESPO()])
def test_bypass_is_decoupled_with_old_equal_to_sampling(policy_loss):
    batch = policy_batch([[1.2, 0.5], [0.9, None]], [[1.1, 1.5], [0.8, None]], advantages=torch.tensor([1.0, -1.0]))
    collapsed = replace(batch, old_per_token_logps=batch.sampling_per_token_logps)

    bypass, gradient = evaluate(batch, mode="bypass", policy_loss=policy_loss)
    expected, other = evaluate(collapsed, policy_loss=policy_loss)

    close(bypass.per_token_loss, expected.per_token_loss)
    close(gradient, other)


def test_bypass_reads_a_sampling_log_prob_that_is_not_finite_as_ratio_one():
    batch = policy_batch([[1.5, 1.05]])
    batch.sampling_per_token_logps[0, 0] = NAN

    out, gradient = evaluate(batch, mode="bypass")

    close(out.per_token_loss, torch.tensor([[-1.0, -1.05]]))
    close(gradient, torch.tensor([[-0.5, -0.525]]))


def test_bypass_needs_sampling_log_probs_where_the_loss_has_a_ratio():
    batch = replace(policy_batch([[1.0]]), sampling_per_token_logps=None)

    assert Objective(mode="bypass").needs_sampling
    assert not Objective(mode="bypass", policy_loss=losses.GPG()).needs_sampling
    assert not Objective().needs_sampling
    with pytest.raises(ValueError, match=r"^sampling_per_token_logps must be given"):
        Objective(mode="bypass")(batch)
    assert loss_of(batch, mode="bypass", policy_loss=losses.GPG()) == pytest.approx(4.0)


def test_gpg_is_the_plain_policy_gradient_whatever_the_drift():
    batch = policy_batch([[1.5, 0.2], [3.0, None]], [[2.0, 0.5], [7.0, None]], advantages=torch.tensor([1.0, -2.0]))

    out, gradient = evaluate(batch, policy_loss=losses.GPG())

    logps = LOGP + torch.tensor([[2.0, 0.5], [7.0, 1.0]]).log()
    close(out.per_token_loss, torch.tensor([[-1.0, -1.0], [2.0, 0.0]]) * logps)
    close(gradient, torch.tensor([[-1.0, -1.0], [2.0, 0.0]]) / 3)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
@pytest.mark.parametrize("ratio", ["old/sampling", "current/old", "current/sampling"])
def test_gpg_takes_weights_on_any_ratio(ratio, mode):
    batch = policy_batch([[1.5, 0.5]], [[2.0, 0.5]])
    correction = Correction(weight=RawWeight(ratio=ratio))

    _, gradient = evaluate(batch, policy_loss=losses.GPG(), correction=correction, mode=mode)

    expected = {"old/sampling": [1.5, 0.5], "current/old": [2.0, 0.5], "current/sampling": [3.0, 0.25]}
    close(gradient, -torch.tensor([expected[ratio]]) / 2)  # the weight stands still


RATIO_LOSSES = [loss for loss in LOSSES if loss.uses_ratio]


def test_the_losses_that_hold_a_ratio():
    assert [type(loss).__name__ for loss in RATIO_LOSSES] == ["PPOClip", "CISPO", "SAPO", "VESPO"]


@pytest.mark.parametrize("policy_loss", RATIO_LOSSES)
@pytest.mark.parametrize(
    ("mode", "ratio", "held"),
    [
        ("decoupled", "current/old", "current/old"),
        ("decoupled", "current/sampling", "current/old"),
        ("bypass", "old/sampling", "current/sampling"),
        ("bypass", "current/old", "current/sampling"),
        ("bypass", "current/sampling", "current/sampling"),
    ],
)
def test_no_factor_of_the_ratio_is_counted_twice(mode, ratio, held, policy_loss):
    for weight in (RawWeight(ratio=ratio), (TruncateWeight(max_weight=2.0, ratio=ratio),)):
        with pytest.raises(
            ValueError,
            match=rf"^correction.weight must not hold '{ratio}' in {mode} mode with {type(policy_loss).__name__}, "
            rf"whose own ratio is '{held}': it would be counted twice",
        ):
            Objective(mode=mode, policy_loss=policy_loss, correction=Correction(weight=weight))


@pytest.mark.parametrize("policy_loss", RATIO_LOSSES)
def test_what_is_counted_once_is_allowed(policy_loss):
    keep = (OffPolicySequenceMask(max_divergence=0.1), RatioBand(low=0.5, high=2.0, ratio="current/old"))

    Objective(policy_loss=policy_loss, correction=Correction(weight=RawWeight(), keep=keep))
    Objective(policy_loss=policy_loss, correction=Correction(keep=keep), mode="bypass")


@pytest.mark.parametrize(
    "weight",
    [RawWeight(level="turn"), TruncateWeight(max_weight=2.0, level="turn_mean"), PrefixWeight(), PrefixMinWeight()],
    ids=lambda weight: type(weight).__name__,
)
def test_a_loss_with_the_weights_inside_counts_each_once(weight):
    """VESPO multiplies the token weights of a response: a turn's weight would enter once a token."""
    with pytest.raises(
        ValueError, match=r"^correction.weight must be at level 'token', 'sequence' or 'sequence_mean' w"
    ):
        Objective(policy_loss=losses.VESPO(), correction=Correction(weight=weight))
    Objective(correction=Correction(weight=weight))
