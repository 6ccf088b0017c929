"""Every diagnostic by hand on one small sample.

Row 0: p_sampling = (1/8, 1/2), p_old = (1/2, 1/4), rho = (4, 1/2). Row 1: p_sampling = 1/2, p_old = 1/8,
rho = 1/4, a NaN and padding. Row 2: empty. With L = ln 2 the log-ratios are (2L, -L) and (-2L); n = 3
tokens in 2 rows.
"""

import math

import numpy as np
import pytest
import torch

from trl_offpolicy.functional.diagnostics import RATIO_DIAGNOSTICS, WEIGHT_DIAGNOSTICS, fraction
from trl_offpolicy.functional.kl import k3, reverse_k3
from trl_offpolicy.functional.log_ratios import log_ratio
from trl_offpolicy.functional.moments import Layout, fold_ratio_rows, moments, ratio_rows
from trl_offpolicy.functional.weight_moments import weight_moments
from trl_offpolicy.functional.weights import ess_fraction_of_logs

NAN = float("nan")
L = math.log(2)
SAMPLING = torch.tensor([[-3 * L, -L, NAN], [-L, NAN, -1.0], [-1.0, -1.0, -1.0]])
OLD = torch.tensor([[-L, -2 * L, -4.0], [-3 * L, -1.0, NAN], [-2.0, -2.0, -2.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]]).bool()

RATIO = {
    "kl_k1": L / 3,  # -(2L - L - 2L) / 3
    "kl_k3": (1.75 + L) / 3,  # rho - 1 = (3, -1/2, -3/4) sums to 1.75; minus the sum of l = -L
    "kl_reverse_k3": (7 * L - 1.75) / 3,  # rho l = (8L, -L/2, -L/2)
    "tv": 4.25 / 6,  # |rho - 1| = (3, 1/2, 3/4)
    "tv_p95": 10**-0.05,  # row 0: 3.5 / 4 = 0.875, in the bin (0.794, 0.891]; row 1: 0.375
    "chi2_token": 4.4375,  # (16 + 1/4 + 1/16) / 3 - 1
    "chi2_token_p95": 10**0.9,  # row 0: 16.25 / 2 - 1 = 7.125, in the bin (7.08, 7.94]; row 1 < 0
    "chi2_sequence": 1.03125,  # (2^2 - 1 + (1/4)^2 - 1) / 2
    "ppl_sampling": 3.0,  # b = (-2L, -L): (4 + 2) / 2
    "ppl_old": (2**1.5 + 8) / 2,  # a = (-3L/2, -3L)
    "ppl_ratio": (2**-0.5 + 4) / 2,  # b - a = (-L/2, 2L)
    "log_ppl_diff": 0.75 * L,
    "log_ppl_abs_diff": 1.25 * L,
    "log_ppl_diff_max": 2 * L,
    "log_ppl_diff_min": -0.5 * L,
    "prob_diff_mean": 1 / 3,  # p_old - p_sampling = (3/8, -1/4, -3/8)
    "prob_diff_max": 0.375,
    "prob_diff_std": math.sqrt(0.34375 / 3 - 1 / 9),
    "prob_pearson": -2.5 / math.sqrt(7),  # deviations (-6, 3, 3) / 24 and (5, -1, -4) / 24: -45 / sqrt(54 42)
    "logp_diff_mean": 5 * L / 3,
    "logp_diff_std": L * math.sqrt(3 - 25 / 9),  # |l| = (2L, L, 2L)
    "logp_diff_max": 2 * L,
    "confident_disagreement_fraction": 0.0,  # no l below -2: the smallest is -1.39
    "response_max_mean": 2 * L,  # (2L + 2L) / 2
    "response_mean_mean": 1.75 * L,  # (3L/2 + 2L) / 2
    "response_max_prob_diff_mean": 0.375,  # 3/8 and 3/8
    "response_mean_prob_diff_mean": (0.3125 + 0.375) / 2,
    "response_max_prob_diff_above_half": 0.0,
    "ess_sequence": 2.25**2 / (2 * (4 + 1 / 16)),  # products 2 and 1/4
    "nonfinite_fraction": 0.25,  # 1 of 4 trainable tokens
}


def ratio_moments(old=OLD, sampling=SAMPLING, mask=MASK):
    return fold_ratio_rows(ratio_rows(log_ratio(old, sampling, mask), sampling, mask))


def test_the_table_is_complete():
    assert set(RATIO) == set(RATIO_DIAGNOSTICS)
    assert set(WEIGHT) == set(WEIGHT_DIAGNOSTICS)


@pytest.mark.parametrize("name", RATIO)
def test_ratio_diagnostic(name):
    value = RATIO_DIAGNOSTICS[name](ratio_moments())

    assert value.dtype == torch.float64
    assert value.shape == ()
    assert value.item() == pytest.approx(RATIO[name], abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "old", "counts"),
    [(0.5, -2.01, True), (0.5, -1.99, False), (0.49, -3.0, False), (0.99, -3.0, True), (0.99, 3.0, False)],
)
def test_a_confident_disagreement_is_a_likely_token_two_nats_below(sampling, old, counts):
    """Three tokens are observed, one is not; only the first may count."""
    likely = math.log(sampling)
    logps = torch.tensor([[likely, -0.1, -5.0, -0.1]])
    other = torch.tensor([[likely + old, -0.2, -9.0, NAN]])
    found = ratio_moments(other, logps, torch.ones(1, 4).bool())

    assert RATIO_DIAGNOSTICS["confident_disagreement_fraction"](found).item() == pytest.approx(counts / 3)


def test_largest_log_ratio_is_found_on_both_sides():
    up = ratio_moments(torch.tensor([[-1.0]]), torch.tensor([[-4.0]]), torch.ones(1, 1).bool())

    assert RATIO_DIAGNOSTICS["logp_diff_max"](up).item() == 3.0
    assert RATIO_DIAGNOSTICS["response_max_mean"](up).item() == 3.0


def test_smallest_log_ppl_diff_is_not_zero_where_all_are_positive():
    sampling = torch.tensor([[-1.0, -1.0], [-1.0, -9.0]])
    old = torch.tensor([[-2.0, -3.0], [-4.0, -9.0]])
    mask = torch.tensor([[True, True], [True, False]])

    both = ratio_moments(old, sampling, mask)

    assert RATIO_DIAGNOSTICS["log_ppl_diff_min"](both).item() == 1.5  # (1 + 2) / 2 and 3
    assert RATIO_DIAGNOSTICS["log_ppl_diff_max"](both).item() == 3.0


@pytest.mark.parametrize("name", RATIO)
def test_ratio_diagnostic_of_nothing_is_zero(name):
    assert RATIO_DIAGNOSTICS[name](ratio_moments(mask=torch.zeros(3, 3).bool())).item() == 0.0


@pytest.mark.parametrize("name", RATIO)
def test_ratio_diagnostic_on_policy(name):
    both = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])

    value = RATIO_DIAGNOSTICS[name](ratio_moments(both, both, torch.ones(2, 2).bool())).item()

    perplexity = (math.exp(1.5) + math.exp(1.75)) / 2
    perplexities = {"ppl_sampling": perplexity, "ppl_old": perplexity}
    on_policy = {**perplexities, "ppl_ratio": 1.0, "prob_pearson": 1.0, "ess_sequence": 1.0}
    assert value == pytest.approx(on_policy.get(name, 0.0), abs=1e-6)


@pytest.mark.parametrize("name", ["kl_k3", "kl_reverse_k3"])
@pytest.mark.parametrize("length", [7, 33, 257])
def test_k3_is_never_negative(name, length):
    """A log-ratio of -1e-7 on every token: the difference of the float32 sums is smaller than their rounding."""
    shift = torch.full((3, length), -1e-7)

    sample = ratio_moments(shift, torch.zeros(3, length), torch.ones(3, length).bool())

    assert RATIO_DIAGNOSTICS[name](sample).item() >= 0.0


def test_moments_give_what_the_functions_by_token_give():
    """One pass adds up rho - 1, (rho - 1) l, ...: KL k3, its reverse and the ESS of products must agree."""
    generator = torch.Generator().manual_seed(0)
    sampling = -torch.rand(8, 16, generator=generator)
    old = sampling + 0.3 * torch.randn(8, 16, generator=generator)
    mask = torch.rand(8, 16, generator=generator) < 0.7
    log_ratios = (old - sampling)[mask].double()
    products = torch.where(mask, old - sampling, 0.0).double().sum(-1)

    got = {name: RATIO_DIAGNOSTICS[name](ratio_moments(old, sampling, mask)) for name in RATIO_DIAGNOSTICS}

    assert got["kl_k3"].item() == pytest.approx(k3(log_ratios).mean().item(), rel=1e-5)
    assert got["kl_reverse_k3"].item() == pytest.approx(reverse_k3(log_ratios).mean().item(), rel=1e-5)
    assert got["ess_sequence"].item() == pytest.approx(ess_fraction_of_logs(products).item(), rel=1e-4)


def test_pearson_without_variance():
    pearson, mask = RATIO_DIAGNOSTICS["prob_pearson"], torch.ones(1, 2).bool()
    flat, other = torch.tensor([[-L, -L]]), torch.tensor([[-L, -2 * L]])

    assert pearson(ratio_moments(flat, flat, mask)).item() == 1.0  # they agree
    assert pearson(ratio_moments(other, flat, mask)).item() == 0.0


def test_pearson_of_a_policy_that_is_sure_of_everything_is_not_rounding():
    """All probabilities within 1e-4 of 1, both policies within 1e-6: the sums' rounding gave any value, -1 included."""
    pearson, generator = RATIO_DIAGNOSTICS["prob_pearson"], torch.Generator().manual_seed(0)
    for _ in range(20):
        sampling = -1e-4 * torch.rand(4, 64, generator=generator)
        old = sampling + 1e-6 * torch.randn(4, 64, generator=generator)
        assert pearson(ratio_moments(old, sampling, torch.ones(4, 64).bool())).item() == 1.0


def test_pearson_of_a_linear_map_is_one():
    sampling = torch.tensor([[0.1, 0.2, 0.4]])
    old = 0.5 * sampling + 0.3

    sample = ratio_moments(old.log(), sampling.log(), torch.ones(1, 3).bool())
    value = RATIO_DIAGNOSTICS["prob_pearson"](sample)

    assert value.item() == pytest.approx(1.0, abs=1e-5)


def test_responses_with_a_probability_off_by_more_than_a_half():
    sampling = torch.tensor([[0.9, 0.5], [0.9, 0.5], [0.9, 0.9], [0.1, 0.5]]).log()
    old = torch.tensor([[0.9, 0.01], [0.3, 0.5], [0.35, 0.3], [0.7, 0.5]]).log()

    share = RATIO_DIAGNOSTICS["response_max_prob_diff_above_half"]

    assert share(ratio_moments(old, sampling, torch.ones(4, 2).bool())).item() == 0.75  # 0.49, 0.6, 0.6, 0.6


@pytest.mark.parametrize("sd", [0.05, 0.1, 0.3])
def test_ess_by_sequence_is_that_of_the_products(sd):
    """Means of token weights would leave 1.0000, 1.0000 and 0.9999 of the responses; the products next to none."""
    ratios = sd * torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    sampling = torch.full_like(ratios, -1.0)

    got = RATIO_DIAGNOSTICS["ess_sequence"](ratio_moments(sampling + ratios, sampling, torch.ones(64, 512).bool()))

    products = np.exp((sampling + ratios - sampling).double().numpy().sum(1))
    assert got.item() == pytest.approx(products.sum() ** 2 / (64 * (products**2).sum()), rel=1e-3)
    assert got.item() < 0.6


def products(*logs):
    """One response a number, its log-ratios adding up to it."""
    length = 32
    sampling = torch.full((len(logs), length), -20.0)
    ratios = torch.tensor(logs).unsqueeze(1) / length
    return ratio_moments(sampling + ratios, sampling, torch.ones(len(logs), length).bool())


@pytest.mark.parametrize("shift", [-280.0, -200.0, 0.0, 200.0, 280.0])
def test_ess_of_products_neither_overflows_nor_vanishes(shift):
    ess = RATIO_DIAGNOSTICS["ess_sequence"]

    assert ess(products(shift, shift, shift, shift)).item() == pytest.approx(1.0, rel=1e-3)
    assert ess(products(shift, shift, shift - 20.0, shift - 20.0)).item() == pytest.approx(0.5, rel=1e-3)
    assert ess(products(shift).merge(products(-shift))).item() == pytest.approx(1.0 if shift == 0 else 0.5, rel=1e-3)


def test_products_beyond_the_range_are_not_equal_weights():
    """Below e^-300 a response counts for nothing: long responses far from the sampler must not look effective."""
    ess = RATIO_DIAGNOSTICS["ess_sequence"]

    assert ess(products(-400.0, -330.0, -310.0)).item() == 0.0
    assert ess(products(-400.0, -10.0)).item() == pytest.approx(0.5, rel=1e-3)
    assert ess(products(500.0, 0.0, 0.0, 0.0)).item() == pytest.approx(0.25, rel=1e-3)


WEIGHT = {  # weights (1, 3), (0.5, padding), an empty row
    "mean": 1.5,  # 4.5 / 3
    "std": math.sqrt(10.25 / 3 - 2.25),
    "min": 0.5,
    "max": 3.0,
    "ess_token": 20.25 / 30.75,  # 4.5^2 / (3 * 10.25)
    "ess_sequence": 6.25 / 8.5,  # row means 2 and 0.5: 2.5^2 / (2 * 4.25)
}
WEIGHTS = torch.tensor([[1.0, 3.0], [0.5, 0.0], [9.0, NAN]])
WEIGHT_MASK = torch.tensor([[True, True], [True, False], [False, False]])


@pytest.mark.parametrize("name", WEIGHT)
def test_weight_diagnostic(name):
    value = WEIGHT_DIAGNOSTICS[name](weight_moments(WEIGHTS, WEIGHT_MASK)).item()

    assert value == pytest.approx(WEIGHT[name], abs=1e-6)


@pytest.mark.parametrize("name", WEIGHT)
def test_weight_diagnostic_of_nothing_and_of_zeros_is_zero(name):
    for weights, mask in ((WEIGHTS, torch.zeros(3, 2).bool()), (torch.zeros(3, 2), WEIGHT_MASK)):
        assert WEIGHT_DIAGNOSTICS[name](weight_moments(weights, mask)).item() == 0.0


@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.1, 1.0, 4.85e8])
def test_equal_weights_of_any_size_are_fully_effective(size):
    sample = weight_moments(torch.full((3, 70), size), torch.ones(3, 70).bool())

    for name in ("ess_token", "ess_sequence"):
        value = WEIGHT_DIAGNOSTICS[name](sample).item()
        assert value <= 1.0
        assert value == pytest.approx(1.0, abs=1e-6)
    assert WEIGHT_DIAGNOSTICS["std"](sample).item() <= 1e-3 * size


def test_one_dominant_weight_leaves_one_effective_sample():
    sample = weight_moments(torch.tensor([[1e6], [1e-9], [1e-9], [1e-9]]), torch.ones(4, 1).bool())

    assert WEIGHT_DIAGNOSTICS["ess_token"](sample).item() == pytest.approx(0.25, abs=1e-6)


def test_fraction():
    share, layout = fraction("a", "b"), Layout(sums=("a", "b"))

    assert share(moments(layout, [torch.tensor(3.0), torch.tensor(4.0)])).item() == 0.75
    assert share(moments(layout, [torch.tensor(3.0), torch.tensor(0.0)])).item() == 0.0
    assert share(moments(layout, [torch.tensor(-3.0), torch.tensor(0.5)])).item() == -6.0
