"""Proximal log-probs: recomputed, interpolated by version (A-3PO), averaged (PPO-EWMA)."""

import math
from dataclasses import replace

import pytest
import torch
from batches import policy_batch

import trl_offpolicy as op
from trl_offpolicy import proximal
from trl_offpolicy.functional.proximal import averaged_logps, interpolated_logps

NAN = float("nan")


def between(versions, proximal_version=9, current_version=10):
    """From -3 (behaviour) to -1 (current)."""
    shape = (len(versions), 2)
    return interpolated_logps(
        torch.full(shape, -3.0),
        torch.full(shape, -1.0, requires_grad=True),
        torch.tensor(versions),
        proximal_version=proximal_version,
        current_version=current_version,
    )


@pytest.mark.parametrize(
    ("version", "alpha"),
    [(0, 9 / 10), (5, 4 / 5), (8, 1 / 2), (9, 0.0), (10, 0.0), (12, 0.0)],
)
def test_the_older_the_nearer_to_the_current_policy(version, alpha):
    out = between([version])

    assert out.tolist() == [pytest.approx([-3 + 2 * alpha] * 2, abs=1e-6)]
    assert not out.requires_grad


def test_versions_by_row_or_token():
    by_token = between([[0, 8], [9, 5]])

    assert by_token.flatten().tolist() == pytest.approx([-1.2, -2.0, -3.0, -1.4], abs=1e-6)
    assert torch.equal(between([[5], [8]]), between([5, 8]))


def test_lags_of_the_centre():
    assert between([4], proximal_version=10)[0, 0].item() == -1.0  # the current policy
    assert between([4], proximal_version=7)[0, 0].item() == pytest.approx(-2.0)
    assert between([4], proximal_version=3)[0, 0].item() == -3.0  # older than the token
    with pytest.raises(ValueError, match=r"^proximal_version must be at most current_version = 10, but got 11\."):
        between([4], proximal_version=11)


def test_averages_carry_geometric_weights():
    """After -1, -2, -4, -8 with decay 1/2: weights 1/8, 1/4, 1/2, 1."""
    values = [-1.0, -2.0, -4.0, -8.0]
    average = torch.tensor([[values[0]]])
    for count, value in enumerate(values[1:], start=1):
        average = averaged_logps(average, torch.tensor([[value]], requires_grad=True), decay=0.5, count=count)

    weights = [1 / 8, 1 / 4, 1 / 2, 1.0]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert average.item() == pytest.approx(expected, abs=1e-6)
    assert not average.requires_grad


@pytest.mark.parametrize(("decay", "expected"), [(0.0, -5.0), (1.0, -3.0)])
def test_decays_at_the_ends(decay, expected):
    """The current policy alone; the plain mean of -1, -3 and -5."""
    out = averaged_logps(torch.tensor([[-2.0]]), torch.tensor([[-5.0]]), decay=decay, count=2)

    assert out.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.1, "count": 1}, r"^decay must be in \[0, 1\], but got 1.1"),
        ({"decay": 0.5, "count": 0}, r"^count must be at least 1, but got 0"),
    ],
)
def test_what_cannot_be_averaged(options, message):
    with pytest.raises(ValueError, match=message):
        averaged_logps(torch.zeros(1, 1), torch.zeros(1, 1), **options)


# --------------------------------------------------------------------------------------------------- on a batch


def batch(**fields):
    """old = -4, current/old = 2 and 1/2, old/sampling = 2."""
    values = {"policy_versions": torch.tensor([6]), "current_version": 10, **fields}
    return policy_batch([[2.0, 2.0, None]], [[2.0, 0.5, None]], **values)


def test_recomputed_means_old():
    assert proximal.RecomputedProximal()(batch()) is None


def test_interpolated_starts_from_old_or_else_from_sampling():
    whole = batch()
    log2 = math.log(2)

    from_old = proximal.InterpolatedProximal()(whole)
    from_sampling = proximal.InterpolatedProximal()(replace(whole, old_per_token_logps=None))

    assert from_old[0, :2].tolist() == pytest.approx([-4 + 0.75 * log2, -4 - 0.75 * log2], abs=1e-6)
    assert from_sampling[0, :2].tolist() == pytest.approx([-4 - log2 + 0.75 * 2 * log2, -4 - log2], abs=1e-6)
    assert proximal.InterpolatedProximal(lag=0)(whole)[0, :2].tolist() == whole.per_token_logps[0, :2].tolist()


@pytest.mark.parametrize("missing", ["policy_versions", "current_version"])
def test_interpolation_needs_versions(missing):
    with pytest.raises(ValueError, match=r"^policy_versions and current_version must be given"):
        proximal.InterpolatedProximal()(batch(**{missing: None}))


def test_interpolation_needs_the_policy_that_sampled():
    with pytest.raises(ValueError, match=r"^sampling_per_token_logps must be given"):
        proximal.InterpolatedProximal()(batch(old_per_token_logps=None, sampling_per_token_logps=None))


def test_averaged_over_the_steps_on_a_batch():
    rule = proximal.AveragedProximal(decay=0.5)
    first = batch()
    second = replace(first, per_token_logps=first.per_token_logps - 1, current_version=11)

    past = rule.step(first)
    again = rule.step(second, past)

    assert (past.count.tolist(), again.count.tolist()) == ([[2]], [[3]])
    old, one, two = first.old_per_token_logps[0, 0], first.per_token_logps[0, 0], second.per_token_logps[0, 0]
    assert again.logps[0, 0].item() == pytest.approx(((old / 4 + one / 2 + two) / 1.75).item(), abs=1e-6)
    assert torch.equal(rule(first).nan_to_num(), past.logps.nan_to_num())


def test_an_average_of_other_rows_is_refused():
    with pytest.raises(ValueError, match=r"^past.logps must have shape \(1, 3\), but got \(2, 3\)"):
        proximal.AveragedProximal(decay=0.5)(batch(), proximal.Average(torch.zeros(2, 3), 1))


def test_the_centre_moves_the_ratio_of_the_loss():
    """current/old = 2, three quarters of the way: current/centre = 2^(1/4)."""
    whole = batch()
    centre = proximal.InterpolatedProximal()(whole)

    alone = replace(whole, old_per_token_logps=None, proximal_per_token_logps=centre)
    out = op.Objective(policy_loss=op.losses.PPOClip(low=0.9, high=9.0))(alone)
    (gradient,) = torch.autograd.grad(out.loss, whole.per_token_logps)

    assert out.loss.item() == pytest.approx(-(2**0.25 + 2**-0.25) / 2, abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([-(2**0.25) / 2, -(2**-0.25) / 2, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: proximal.InterpolatedProximal(lag=-1), r"^lag must be a whole number of at least 0, but got -1"),
        (lambda: proximal.InterpolatedProximal(lag=1.0), r"^lag must be a whole number of at least 0, but got 1.0"),
        (lambda: proximal.AveragedProximal(decay=2.0), r"^decay must be in \[0, 1\], but got 2.0"),
        (lambda: proximal.AveragedProximal(decay=NAN), r"^decay must be a finite number, but got nan"),
    ],
)
def test_settings_that_mean_nothing(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ----------------------------------------------------------------------------------------------------- in the objective

LOSS = op.losses.PPOClip(low=0.15, high=0.15)
AVERAGED = proximal.AveragedProximal(decay=0.5)


def ratios(value):
    """One row of two tokens: old/sampling = 2, current/old = ``value``; four versions old."""
    return policy_batch([[2.0, 2.0]], [[value, value]], policy_versions=torch.tensor([6]), current_version=10)


@pytest.mark.parametrize(("current", "clipped"), [(1.1, False), (1.4, False), (1.6, True)])
def test_only_the_clip_moves_with_the_centre(current, clipped):
    """Before it clips, the loss on a centre is the plain importance-weighted one: each factor once."""
    data = ratios(current)
    out = op.Objective(policy_loss=LOSS, proximal=AVERAGED)(data)
    (gradient,) = torch.autograd.grad(out.loss, data.per_token_logps)

    centre = current ** (2 / 3)  # of old: the average has weight 1/2 on old, 1 on current
    assert (current / centre > 1.15) == clipped and current > 1.0
    assert out.loss.item() == pytest.approx(-1.15 * centre if clipped else -current, abs=1e-5)
    assert gradient[0].tolist() == pytest.approx([0.0 if clipped else -current / 2] * 2, abs=1e-5)


def test_without_old_log_probs_the_weight_goes_up_to_the_centre():
    """weight x ratio = (centre/mu) (current/centre) = current/mu = 2 x 1.1, not (current/mu) (current/centre)."""
    data = replace(ratios(1.1), old_per_token_logps=None)
    weight = op.Correction(weight=op.RawWeight())
    out = op.Objective(
        policy_loss=op.losses.PPOClip(high=0.3), proximal=proximal.InterpolatedProximal(), correction=weight
    )(data)

    assert out.weights[0].tolist() == pytest.approx([2.2**0.75] * 2, abs=1e-5)
    assert out.loss.item() == pytest.approx(-2.2, abs=1e-5)
    assert not any(key.startswith("offpolicy/staleness") for key in out.stats)


def test_with_old_log_probs_weights_and_mismatch_stay_those_of_the_engine():
    weight = op.Correction(weight=op.RawWeight())
    out = op.Objective(policy_loss=LOSS, proximal=proximal.InterpolatedProximal(), correction=weight)(ratios(1.1))

    assert out.weights[0].tolist() == pytest.approx([2.0, 2.0], abs=1e-5)
    assert float(out.stats["mismatch/kl_k1"]) == pytest.approx(-math.log(2), abs=1e-5)
    assert out.loss.item() == pytest.approx(-2.2, abs=1e-5)


def test_rows_of_the_current_version_are_their_own_centre():
    fresh = replace(ratios(1.1), old_per_token_logps=None, policy_versions=torch.tensor([10]))
    weight = op.Correction(weight=op.RawWeight())
    out = op.Objective(policy_loss=LOSS, proximal=proximal.InterpolatedProximal(), correction=weight)(fresh)

    assert out.weights[0].tolist() == pytest.approx([2.2, 2.2], abs=1e-5)
    assert out.loss.item() == pytest.approx(-2.2, abs=1e-5)


def test_an_average_counts_every_version_once():
    """At the version that sampled the current policy is old; a second micro-step at the same weights adds nothing."""
    fresh = replace(ratios(1.0), policy_versions=torch.tensor([10]))
    first = AVERAGED.step(fresh)
    moved = replace(ratios(3.0), policy_versions=torch.tensor([10]), current_version=11)
    second = AVERAGED.step(moved, first)

    assert torch.equal(first.logps, fresh.old_per_token_logps) and first.count.tolist() == [[1]]
    assert AVERAGED.step(moved, second) is second
    assert (second.logps - fresh.old_per_token_logps)[0].tolist() == pytest.approx([2 / 3 * math.log(3)] * 2, abs=1e-5)


def test_the_objective_hands_the_average_on():
    objective = op.Objective(policy_loss=LOSS, proximal=AVERAGED)
    first = objective(ratios(1.1))
    again = objective(replace(ratios(1.2), current_version=11, past_average=first.average))

    assert first.average.version == 10 and again.average.version == 11
    assert op.Objective()(ratios(1.1)).average is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "bypass"}, "in bypass mode with PPOClip, which takes no ratio against it"),
        ({"policy_loss": op.losses.GPG()}, "with GPG, which takes no ratio"),
        ({"policy_loss": op.losses.TOPR()}, "with TOPR, which takes no ratio"),
        ({"policy_loss": op.losses.VESPO()}, "with VESPO, which reads one weight for a response"),
    ],
)
def test_losses_without_a_centre_refuse_one(options, message):
    with pytest.raises(ValueError, match=rf"^proximal must be RecomputedProximal\(\) .*{message}"):
        op.Objective(**{"aggregation": "seq_mean_token_sum", **options, "proximal": AVERAGED})


def test_a_centre_is_given_once():
    with pytest.raises(ValueError, match=r"^proximal_per_token_logps must be None with AveragedProximal"):
        op.Objective(proximal=AVERAGED)(replace(ratios(1.1), proximal_per_token_logps=torch.zeros(1, 2)))
    with pytest.raises(TypeError, match=r"^proximal must be one of trl_offpolicy\.proximal, but got 'averaged'"):
        op.Objective(proximal="averaged")


def test_a_ratio_weighted_kl_keeps_the_whole_ratio():
    """KL on tokens of pi_old is weighted with current/old, wherever the clip has its centre."""
    data = replace(ratios(1.4), ref_per_token_logps=torch.full((1, 2), -4.5))
    kl = op.KLPenalty(coef=1.0, ratio_weighted=True)
    plain, centred = (
        op.Objective(policy_loss=LOSS, kl=kl, proximal=centre)(data).stats["loss/kl"]
        for centre in (proximal.RecomputedProximal(), AVERAGED)
    )

    assert float(centred) == pytest.approx(float(plain), rel=1e-5) and float(plain) > 0.1
