"""The KL term inside an objective, its coefficient and its checkpoint."""

import math
from dataclasses import replace

import pytest
import torch
from batches import LOGP, policy_batch, to_tensor

import trl_offpolicy as op
from trl_offpolicy.functional.kl import KL_ESTIMATORS, kl_estimate
from trl_offpolicy.objective import kl as kl_module
from trl_offpolicy.objective import objective as objectives
from trl_offpolicy.presets.parsing import parse_objective

L = math.log(2)
NAN = float("nan")
ADAPTIVE = op.AdaptiveKL(coef=0.5, target=0.1, horizon=100)


def evaluate(ratios, staleness=None, **options):
    """Loss and gradient without policy term; ``ratios`` are ref / current where current is the old one."""
    batch = policy_batch(
        [[1.0] * len(row) for row in ratios],
        staleness,
        ref_per_token_logps=LOGP + to_tensor(ratios).log(),
        advantages=torch.zeros(len(ratios)),
    )
    out = op.Objective(kl=op.KLPenalty(**options))(batch)
    return out, torch.autograd.grad(out.loss, batch.per_token_logps)[0]


def test_a_cap_on_the_estimate():
    out, slope = evaluate([[2.0, 8.0]], coef=0.1, estimator="k3", max_value=2.0)  # k3 = 1 - log 2 and 7 - log 8

    assert out.loss.item() == pytest.approx(0.1 * (1 - L + 2.0) / 2, abs=1e-6)
    assert slope.tolist()[0] == pytest.approx([-0.1 / 2, 0.0], abs=1e-6)
    weighted, _ = evaluate([[8.0]], [[1.5]], coef=0.1, ratio_weighted=True, max_value=2.0)
    assert weighted.loss.item() == pytest.approx(0.1 * 1.5 * 2.0, abs=1e-6)
    with pytest.raises(ValueError, match=r"^max_value must be positive and finite, but got 0"):
        op.KLPenalty(coef=0.1, max_value=0)


def test_the_penalty_is_one_class_wherever_it_is_imported_from():
    assert op.KLPenalty is objectives.KLPenalty is kl_module.KLPenalty


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [  # ref/current = 2: x = -L
        ("k1", -L, 1.0),
        ("abs", L, -1.0),
        ("k2", L**2 / 2, -L),
        ("k3", 1 - L, -1.0),
        ("k1+", -L, -L),
        ("k3+", 1 - L, -L),
    ],
)
def test_estimators_reach_loss_gradient_and_stats(estimator, value, gradient):
    out, slope = evaluate([[2.0]], coef=0.1, estimator=estimator)

    assert out.loss.item() == pytest.approx(0.1 * value, abs=1e-6)
    assert slope.item() == pytest.approx(0.1 * gradient, abs=1e-6)
    assert float(out.stats["loss/kl"]) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "value", "gradient"),
    [  # current/old = 1.5, ref/current = 2; product rule: r k + r k'
        ({"estimator": "k1"}, 1.5 * -L, 1.5 * (1 - L)),
        ({"estimator": "k2"}, 1.5 * L**2 / 2, 1.5 * -L),
        ({"estimator": "k3"}, 1.5 * (1 - L), 1.5 * -L),
        ({"estimator": "k3+"}, 1.5 * (1 - L), 1.5 * -L),
        ({"estimator": "k2", "ratio_clip": 0.2}, 1.2 * L**2 / 2, 1.2 * -L),
        ({"estimator": "k3", "ratio_clip": 0.2}, 1.2 * (1 - L), 1.2 * -1.0),  # the cut ratio has no gradient
        ({"estimator": "k3", "ratio_clip": 0.6}, 1.5 * (1 - L), 1.5 * -L),
    ],
)
def test_weighted_by_the_ratio(options, value, gradient):
    out, slope = evaluate([[3.0]], [[1.5]], coef=1.0, ratio_weighted=True, **options)

    assert out.loss.item() == pytest.approx(value, abs=1e-6)
    assert slope.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_default_is_k3_by_token(weighted):
    """What KLPenalty computed before it had estimators, written out, in float64."""
    generator = torch.Generator().manual_seed(3)
    logps, old, ref = (-3 * torch.rand(4, 9, generator=generator) for _ in range(3))
    mask = torch.rand(4, 9, generator=generator) < 0.8
    ref[0, 1], ref[1, 2], ref[2, 3] = NAN, float("inf"), 40.0
    logps.requires_grad_()
    batch = op.PolicyBatch(
        per_token_logps=logps,
        old_per_token_logps=old,
        ref_per_token_logps=ref,
        completion_mask=mask,
        advantages=torch.zeros(4),
    )
    loss = op.Objective(kl=op.KLPenalty(coef=0.3, ratio_weighted=weighted))(batch).loss
    (gradient,) = torch.autograd.grad(loss, logps)

    here = torch.where(mask, logps.float(), 0.0)
    usable = mask & (ref.abs() < torch.inf)
    reverse = -(here - torch.where(mask, torch.where(usable, ref, here.detach()), 0.0))
    reverse = reverse.clamp(max=20.0)
    term = torch.expm1(reverse.double()) - reverse.double()
    if weighted:
        term = term * (here - torch.where(mask, old, 0.0)).clamp(-20.0, 20.0).exp()
    expected = torch.where(mask, 0.3 * term, 0.0).sum() / mask.sum()

    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logps)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_no_pull_where_the_reference_is_not_finite(estimator):
    batch = policy_batch([[1.0, 1.0]], ref_per_token_logps=torch.tensor([[NAN, -4.0]]), advantages=torch.zeros(1))

    out = op.Objective(kl=op.KLPenalty(coef=0.1, estimator=estimator))(batch)
    (gradient,) = torch.autograd.grad(out.loss, batch.per_token_logps)

    assert out.loss.item() == 0.0
    assert gradient[0, 0].item() == 0.0


# --------------------------------------------------------------------------------------------------- in the reward


def test_k1_in_the_reward_is_detached():
    logps = torch.tensor([[-1.0, -2.0, NAN]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -1.0]])
    mask = torch.tensor([[True, True, False]])

    costs = op.KLPenalty(coef=0.1, estimator="k1", place="reward").token_rewards(logps, reference, mask)

    assert costs.tolist() == [pytest.approx([-0.05, 0.1, 0.0])]
    assert not costs.requires_grad


def test_k1_in_the_reward_is_k2_in_the_loss():
    """-A' log pi with A' = A - beta k1 has the gradient of -A log pi + beta k2."""
    logps = torch.tensor([[-1.0, -2.0, -0.3]], requires_grad=True)
    reference, mask = torch.tensor([[-1.5, -1.0, -0.4]]), torch.ones(1, 3).bool()
    costs = op.KLPenalty(coef=0.2, estimator="k1", place="reward").token_rewards(logps, reference, mask)

    shaped = -((0.7 + costs) * logps).sum()
    as_loss = (-0.7 * logps + 0.2 * kl_estimate(logps - reference, "k2")).sum()

    torch.testing.assert_close(
        torch.autograd.grad(shaped, logps), torch.autograd.grad(as_loss, logps), rtol=1e-5, atol=1e-7
    )


# ----------------------------------------------------------------------------------------------------- controllers


def test_a_controller_gives_the_coefficient():
    plain, _ = evaluate([[2.0]], coef=0.5)

    for coef in (op.FixedKL(coef=0.5), ADAPTIVE):
        out, _ = evaluate([[2.0]], coef=coef)
        assert torch.equal(out.loss, plain.loss)


def test_an_adaptive_coefficient_follows_the_target():
    penalty = op.KLPenalty(coef=ADAPTIVE)

    above, below = penalty.updated(kl=0.11, samples=50), penalty.updated(kl=0.0, samples=50)

    assert above.beta == pytest.approx(0.5 * (1 + 0.1 / 2))
    assert below.beta == pytest.approx(0.5 * (1 - 0.2 / 2))
    assert penalty.beta == 0.5
    assert replace(above, coef=ADAPTIVE) == penalty


@pytest.mark.parametrize("coef", [0.5, op.FixedKL(coef=0.5)])
def test_a_fixed_one_stays(coef):
    penalty = op.KLPenalty(coef=coef)

    assert penalty.updated(kl=9.0, samples=50) is penalty
    assert penalty.state_dict() == {}
    assert penalty.restored({}) is penalty


def test_state_is_plain_and_comes_back():
    penalty = op.KLPenalty(coef=ADAPTIVE, estimator="k3+")
    later = penalty.updated(kl=0.2, samples=30).updated(kl=0.05, samples=30)

    state = later.state_dict()

    assert state == {"coef": later.beta}
    assert type(state["coef"]) is float
    assert penalty.restored(state) == later


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"^state must have the keys \['coef'\] of AdaptiveKL, but got \[\]\."):
        op.KLPenalty(coef=ADAPTIVE).restored({})
    with pytest.raises(ValueError, match=r"^state must have the keys \[\] of float, but got \['coef'\]\."):
        op.KLPenalty(coef=0.1).restored({"coef": 0.2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "k4"}, r"^estimator must be one of \['k1', 'abs', 'k2', 'k3', 'k1\+', 'k3\+'\], but got 'k4'"),
        ({"ratio_clip": 0.2}, r"^ratio_weighted must be True with ratio_clip"),
        ({"ratio_clip": 0.0, "ratio_weighted": True}, r"^ratio_clip must be positive and finite, but got 0.0"),
        ({"ratio_clip": "a", "ratio_weighted": True}, r"^ratio_clip must be a finite number, but got 'a'"),
    ],
)
def test_settings_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        op.KLPenalty(coef=0.1, **options)


@pytest.mark.parametrize("name", ["coef", "target", "horizon"])
@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, "1"])
def test_controllers_need_positive_numbers(name, bad):
    with pytest.raises(ValueError, match=rf"^{name} must be "):
        replace(ADAPTIVE, **{name: bad})
    if name == "coef":
        with pytest.raises(ValueError, match=r"^coef must be "):
            op.FixedKL(coef=bad)


# ------------------------------------------------------------------------------------------------------------ YAML


def parsed(kl):
    return parse_objective({"kl": kl}, where="objective", base=op.Objective()).kl


@pytest.mark.parametrize(
    ("spec", "penalty"),
    [
        ({"coef": 0.1}, op.KLPenalty(coef=0.1)),
        ({"coef": 0.1, "estimator": "k3+"}, op.KLPenalty(coef=0.1, estimator="k3+")),
        (
            {"coef": 0.1, "estimator": "k2", "ratio_weighted": True, "ratio_clip": 0.2},
            op.KLPenalty(coef=0.1, estimator="k2", ratio_weighted=True, ratio_clip=0.2),
        ),
        ({"coef": {"type": "fixed", "coef": 0.1}}, op.KLPenalty(coef=op.FixedKL(coef=0.1))),
        (
            {"coef": {"type": "adaptive", "coef": 0.5, "target": 0.1, "horizon": 100}, "estimator": "k1+"},
            op.KLPenalty(coef=ADAPTIVE, estimator="k1+"),
        ),
        (None, None),
    ],
)
def test_a_mapping_becomes_a_penalty(spec, penalty):
    assert parsed(spec) == penalty


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"coef": 0.1, "estimator": "k4"}, r"^objective\.kl: estimator must be one of"),
        ({"coef": {"type": "adaptiv"}}, r"^objective\.kl\.coef\.type must be one of .* Did you mean 'adaptive'\?"),
        ({"coef": {"type": "adaptive", "coef": 0.1}}, r"^objective\.kl\.coef\.target must be given for AdaptiveKL"),
        ({"coef": 0.1, "ratio_clip": 0.2}, r"^objective\.kl: ratio_weighted must be True with ratio_clip"),
    ],
)
def test_a_wrong_mapping_names_its_path(spec, message):
    with pytest.raises(ValueError, match=message):
        parsed(spec)
