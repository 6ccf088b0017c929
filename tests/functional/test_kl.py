"""KL estimators: values by hand, gradients against autograd, and their bias on a small categorical policy.

Value and gradient are checked both in expectation over the whole vocabulary (to float64 rounding) and on samples.
"""

import math

import pytest
import torch

from trl_offpolicy.functional.kl import (
    K2_GRADIENT,
    KL_ESTIMATORS,
    adaptive_kl_coef,
    k3,
    kl_estimate,
    ratio_weighted_kl,
    reference_log_ratio,
    reverse_k3,
)

NAN, INF = float("nan"), float("inf")
L = math.log(2)

# ----------------------------------------------------------------------------------------- k3 of any two policies


def test_k3_is_the_kl_from_the_sampler_and_reverse_k3_the_one_to_it():
    """In expectation over a whole vocabulary; the two differ, so that neither the sign nor the direction may slip."""
    sampler, other = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
    l = (other / sampler).log()  # noqa: E741 - as in the docstring

    assert (sampler * k3(l)).sum().item() == pytest.approx((sampler * -l).sum().item(), rel=1e-9)
    assert (sampler * reverse_k3(l)).sum().item() == pytest.approx((other * l).sum().item(), rel=1e-9)
    assert (other * k3(-l)).sum().item() == pytest.approx((other * l).sum().item(), rel=1e-9)
    torch.testing.assert_close(reverse_k3(l), l.exp() * k3(-l), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("estimator", [k3, reverse_k3])
def test_k3_of_small_log_ratios_is_not_rounding_and_has_their_gradient(estimator):
    l = torch.tensor([1e-5, -1e-4, 3e-4, 1e-3], requires_grad=True)  # noqa: E741

    value = estimator(l)
    (slope,) = torch.autograd.grad(value.sum(), l)

    torch.testing.assert_close(value, l.square() / 2, rtol=2e-2, atol=0.0)
    torch.testing.assert_close(slope, l.detach(), rtol=2e-2, atol=0.0)


# ----------------------------------------------------------------------------------------------- value, gradient


VALUES = [  # pi / ref = 2 and 1/2: x = L and -L
    ("k1", (L, -L), (1.0, 1.0)),
    ("abs", (L, L), (1.0, -1.0)),
    ("k2", (L**2 / 2, L**2 / 2), (L, -L)),
    ("k3", (0.5 - 1 + L, 2 - 1 - L), (0.5, -1.0)),
    ("k1+", (L, -L), (L, -L)),
    ("k3+", (0.5 - 1 + L, 2 - 1 - L), (L, -L)),
]


@pytest.mark.parametrize(("estimator", "value", "gradient"), VALUES)
def test_a_cap_ends_value_and_gradient(estimator, value, gradient):
    x = torch.tensor([[L, -L, 0.0]], requires_grad=True)
    cap, through = 0.25, estimator.endswith("+")

    estimate = kl_estimate(x, estimator, max_value=cap)
    (slope,) = torch.autograd.grad(estimate.sum(), x)

    capped = [each > cap for each in value]
    assert estimate.tolist()[0][:2] == pytest.approx([min(each, cap) for each in value], abs=1e-6)
    free = [g if through or not over else 0.0 for g, over in zip(gradient, capped, strict=True)]
    assert slope.tolist()[0][:2] == pytest.approx(free, abs=1e-6)
    doubled = ratio_weighted_kl(x.detach(), torch.full((1, 3), math.log(2)), estimator, max_value=cap)
    assert doubled.tolist()[0][:2] == pytest.approx([2 * min(each, cap) for each in value], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_k3_of_policies_that_nearly_agree_is_not_rounding(estimator):
    """exp(-x) - 1 + x in float32 gave 0 at 1e-4 and was 5 % off at 1e-3."""
    x = torch.tensor([1e-5, -1e-4, 3e-4, 1e-3])

    value = kl_estimate(x, estimator).tolist()

    assert value == pytest.approx((x.double().square() / 2).tolist(), rel=2e-2)


@pytest.mark.parametrize(("estimator", "value", "gradient"), VALUES)
def test_value_and_gradient(estimator, value, gradient):
    x = torch.tensor([[L, -L, 0.0]], requires_grad=True)

    out = kl_estimate(x, estimator)
    (slope,) = torch.autograd.grad(out.sum(), x)

    assert out[0, :2].tolist() == pytest.approx(value, abs=1e-6)
    assert out[0, 2].item() == 0.0
    assert slope[0, :2].tolist() == pytest.approx(gradient, abs=1e-6)
    assert slope[0, 2].item() == (1.0 if estimator == "k1" else 0.0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradient_is_autograds_of_the_formula(estimator):
    formulas = {
        "k1": lambda x: x,
        "abs": lambda x: torch.sqrt(x**2),
        "k2": lambda x: 0.5 * x**2,
        "k3": lambda x: torch.expm1(-x) + x,
        "k1+": lambda x: 0.5 * x**2,
        "k3+": lambda x: 0.5 * x**2,
    }
    x = torch.linspace(-3, 3, 12, dtype=torch.float64).unsqueeze(0).requires_grad_()

    (got,) = torch.autograd.grad(kl_estimate(x, estimator).sum(), x)
    (expected,) = torch.autograd.grad(formulas[estimator](x).sum(), x)

    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_ratio_weighted_gradient_is_that_of_the_formula(estimator, clip):
    x = torch.tensor([[-1.5, -0.2, 0.4, 2.0]] * 3, dtype=torch.float64, requires_grad=True)
    r = torch.tensor([[0.4], [1.1], [2.5]], dtype=torch.float64).log().expand(3, 4).clone().requires_grad_()

    got = torch.autograd.grad(ratio_weighted_kl(x, r, estimator, ratio_clip=clip).sum(), (x, r), allow_unused=True)

    ratio = r.exp().detach() if estimator in K2_GRADIENT else r.exp()
    estimate = kl_estimate(x, estimator)
    term = ratio * estimate
    if clip is not None:  # as source 001 writes it
        term = torch.minimum(term, ratio.clamp(1 - clip, 1 + clip) * estimate)
    expected = torch.autograd.grad(term.sum(), (x, r), allow_unused=True)

    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)
    assert (got[1] is None) == (estimator in K2_GRADIENT)
    if got[1] is not None:
        torch.testing.assert_close(got[1], expected[1], rtol=1e-12, atol=1e-12)


def test_the_clip_cuts_above_where_the_estimate_is_positive_and_below_where_it_is_negative():
    x = torch.tensor([1.0, 1.0, -1.0, -1.0])
    r = torch.tensor([2.0, 0.5, 2.0, 0.5]).log()

    assert ratio_weighted_kl(x, r, "k1", ratio_clip=0.2).tolist() == pytest.approx([1.2, 0.5, -2.0, -0.8])
    assert ratio_weighted_kl(x, r, "k2", ratio_clip=0.2).tolist() == pytest.approx([0.6, 0.25, 0.6, 0.25])


def test_far_references():
    x = torch.tensor([50.0, -50.0], requires_grad=True)

    values = {estimator: kl_estimate(x, estimator) for estimator in KL_ESTIMATORS}
    (slope,) = torch.autograd.grad(values["k3"].sum(), x, retain_graph=True)
    (straight,) = torch.autograd.grad(values["k3+"].sum(), x)

    assert all(value.isfinite().all() for value in values.values())
    assert values["k3"][1].item() == pytest.approx(math.exp(20) - 21, rel=1e-5)
    assert slope.tolist() == [1.0, 0.0]  # the clamp ends it
    assert straight.tolist() == [50.0, -50.0]  # and not the one of k2


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"^estimator must be one of \['k1', .*\], but got 'k4'\."):
        kl_estimate(torch.zeros(1), "k4")


# ------------------------------------------------------------------------------------------- the log-ratio itself


def test_log_ratio_is_zero_without_gradient_where_it_cannot_be_known():
    logps = torch.tensor([[-1.0, -2.0, NAN, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, NAN, -1.0, -INF]], requires_grad=True)
    mask = torch.tensor([[True, True, False, True]])

    out = reference_log_ratio(logps, reference, mask)
    kl_estimate(out, "k1").sum().backward()

    assert out.tolist() == [[0.5, 0.0, 0.0, 0.0]]
    assert logps.grad.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert reference.grad is None


def test_log_ratio_subtracts_in_float32():
    a, b = torch.tensor([[-1.0]]).bfloat16(), torch.tensor([[-1.0078125]])

    assert reference_log_ratio(a, b, torch.ones(1, 1).bool()).tolist() == [[0.0078125]]


# ----------------------------------------------------------------------------------------------------------- bias

UNBIASED_VALUE = {"k1", "k3", "k1+", "k3+"}
UNBIASED_GRADIENT = {"k2", "k1+", "k3+"}
UNBIASED_WEIGHTED_GRADIENT = UNBIASED_GRADIENT | {"k1", "k3"}


def policies():
    """Logits of pi (a leaf) and log-probs of the reference and of an older policy, over 5 tokens."""
    theta = torch.tensor([0.3, -0.8, 1.1, 0.0, -0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.6, 0.2, -1.0, 0.4], dtype=torch.float64).log_softmax(-1)
    older = torch.tensor([0.5, -0.2, 0.4, 0.3, -0.9], dtype=torch.float64).log_softmax(-1)
    return theta, reference, older


def exact():
    """KL(pi || ref) and its gradient."""
    theta, reference, _ = policies()
    logps = theta.log_softmax(-1)
    kl = (logps.exp() * (logps - reference)).sum()
    return kl.item(), torch.autograd.grad(kl, theta)[0]


def expected(estimator, *, older=None, clip=None):
    """Value and gradient over the whole vocabulary, tokens weighted by what samples them."""
    theta, reference, _ = policies()
    logps = theta.log_softmax(-1)
    if older is None:
        weight, term = logps.exp().detach(), kl_estimate(logps - reference, estimator)
    else:
        weight, term = older.exp(), ratio_weighted_kl(logps - reference, logps - older, estimator, ratio_clip=clip)
    mean = (weight * term).sum()
    return mean.item(), torch.autograd.grad(mean, theta)[0]


def is_close(got, want):
    return bool((got - want).abs().max() < 1e-10)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_bias_on_policy(estimator):
    kl, gradient = exact()

    value, slope = expected(estimator)

    assert (abs(value - kl) < 1e-10) == (estimator in UNBIASED_VALUE)
    assert is_close(slope, gradient) == (estimator in UNBIASED_GRADIENT)
    assert not is_close(-slope, gradient)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_bias_of_weighted_tokens_of_another_policy(estimator):
    kl, gradient = exact()

    value, slope = expected(estimator, older=policies()[2])

    assert (abs(value - kl) < 1e-10) == (estimator in UNBIASED_VALUE)
    assert is_close(slope, gradient) == (estimator in UNBIASED_WEIGHTED_GRADIENT)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_clip_wider_than_every_ratio_changes_nothing_and_a_tight_one_biases(estimator):
    older = policies()[2]
    _, free = expected(estimator, older=older)

    assert is_close(expected(estimator, older=older, clip=10.0)[1], free)
    assert not is_close(expected(estimator, older=older, clip=0.1)[1], free)


def test_k1_as_loss_does_nothing_on_average_and_k3_pulls_by_the_other_direction():
    theta, reference, _ = policies()
    forward = (reference.exp() * (reference - theta.log_softmax(-1))).sum()  # KL(ref || pi)

    assert is_close(expected("k1")[1], torch.zeros(5))
    assert is_close(expected("k3")[1], torch.autograd.grad(forward, theta)[0])


SAMPLES = 200_000


def sampled(estimator, weighted):
    """Mean gradient over samples and its standard error, per logit."""
    theta, reference, older = (values.detach() for values in policies())
    logps = theta.log_softmax(-1)
    behaviour = older if weighted else logps
    tokens = torch.multinomial(behaviour.exp(), SAMPLES, replacement=True, generator=torch.Generator().manual_seed(0))
    leaf = logps[tokens].unsqueeze(1).requires_grad_()
    x = reference_log_ratio(leaf, reference[tokens].unsqueeze(1), torch.ones(SAMPLES, 1).bool())
    term = kl_estimate(x, estimator)
    if weighted:
        term = ratio_weighted_kl(x, leaf.float() - older[tokens].unsqueeze(1).float(), estimator)
    (slope,) = torch.autograd.grad(term.sum(), leaf)
    score = torch.nn.functional.one_hot(tokens, 5) - logps.exp()  # d log pi(token) / d theta
    by_sample = slope * score
    return by_sample.mean(0), by_sample.std(0) / SAMPLES**0.5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_monte_carlo_gradient(estimator, weighted):
    """Within 4 standard errors (at most 0.003) where unbiased, beyond 8 somewhere where not."""
    _, gradient = exact()

    mean, error = sampled(estimator, weighted)

    deviation = ((mean - gradient).abs() / error).max().item()
    unbiased = UNBIASED_WEIGHTED_GRADIENT if weighted else UNBIASED_GRADIENT
    assert error.max() < 0.003
    assert deviation < 4 if estimator in unbiased else deviation > 8
    assert ((mean + gradient).abs() / error).max() > 8  # the other sign


# ---------------------------------------------------------------------------------------------------- coefficient


@pytest.mark.parametrize(
    ("kl", "coef"),
    [  # n / H = 1/2: 1 + error / 2
        (6.0, 0.1),
        (6.6, 0.105),
        (5.4, 0.095),
        (60.0, 0.11),  # clipped at +0.2
        (0.0, 0.09),
        (-3.0, 0.09),
    ],
)
def test_adaptive_coefficient(kl, coef):
    assert adaptive_kl_coef(0.1, kl, target=6.0, samples=50, horizon=100) == pytest.approx(coef, rel=1e-12)


@pytest.mark.parametrize("kl", [NAN, INF])
def test_a_kl_that_is_not_finite_does_not_reach_the_coefficient(kl):
    with pytest.raises(ValueError, match=r"^kl must be finite, but got (nan|inf)\."):
        adaptive_kl_coef(0.1, kl, target=6.0, samples=1, horizon=100)


def test_too_many_samples_would_turn_the_sign():
    with pytest.raises(ValueError, match=r"^samples must be below 5 \* horizon = 50, but got 50\."):
        adaptive_kl_coef(0.1, 1.0, target=6.0, samples=50, horizon=10)
