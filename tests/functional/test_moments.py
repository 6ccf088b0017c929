"""Additive moments: every sum by hand, rows that do not count, merging."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy.functional.log_ratios import LogRatio, log_ratio
from trl_offpolicy.functional.moments import (
    HISTOGRAM_BINS,
    RATIO_LAYOUT,
    Layout,
    Moments,
    RatioRows,
    fold_ratio_rows,
    histogram_quantile,
    moments,
    ratio_rows,
)
from trl_offpolicy.functional.weight_moments import cut_rows, weight_moments

NAN, INF = float("nan"), float("inf")
L = math.log(2)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

# Row 0: p = (1/2, 1/4), rho = (2, 1/2), then a NaN and padding. Row 1: p = 1/2, rho = 1/4. Row 2: empty.
SAMPLING = torch.tensor([[-L, -2 * L, -1.0, NAN], [-L, NAN, -5.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
OLD = torch.tensor([[0.0, -3 * L, NAN, -1.0], [-3 * L, -1.0, NAN, 0.0], [-2.0, -2.0, -2.0, -2.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


def rows():
    return ratio_rows(log_ratio(OLD, SAMPLING, MASK), SAMPLING, MASK)


ROW_SUMS = {  # row 0, row 1
    "tokens": (2, 1),
    "nonfinite": (1, 0),
    "log_ratio": (0, -2 * L),  # L - L
    "abs_log_ratio": (2 * L, 2 * L),
    "excess": (0.5, -0.75),  # 1 - 1/2; 1/4 - 1
    "abs_excess": (1.5, 0.75),
    "excess_sq": (1.25, 0.5625),
    "excess_log_ratio": (1.5 * L, 1.5 * L),  # 1 L + (-1/2)(-L); (-3/4)(-2L)
    "logp": (-3 * L, -L),
    "prob": (0.75, 0.5),
    "prob_sq": (0.3125, 0.25),  # 1/4 + 1/16
    "prob_diff": (0.375, -0.375),  # 1/2 - 1/8
    "abs_prob_diff": (0.625, 0.375),
    "prob_diff_sq": (0.265625, 0.140625),  # 1/4 + 1/64; 9/64
    "prob_prob_diff": (0.21875, -0.1875),  # 1/2 1/2 - 1/4 1/8; -1/2 3/8
    "log_ratio_sq": (2 * L * L, 4 * L * L),
}


@pytest.mark.parametrize("name", ROW_SUMS)
def test_row_sums(name):
    column = rows().sums[:, RATIO_LAYOUT.sums.index(name)]

    assert column.dtype == torch.float64
    close(column, torch.tensor([*ROW_SUMS[name], 0], dtype=torch.float64))


def test_row_maxima():
    close(  # max l, max -l (padding reads 0), max |dp|
        rows().maxima,
        torch.tensor([[L, L, 0.5], [0.0, 2 * L, 0.375], [0.0, 0.0, 0.0]], dtype=torch.float64),
    )


FOLDED = {  # a = mean log old, b = mean log sampling: row 0 (-3L/2, -3L/2), row 1 (-3L, -L)
    "rows": 2,
    "tokens": 3,
    "nonfinite": 1,
    "ppl_denominator": 2**1.5 + 2,
    "ppl_numerator": 2**1.5 + 8,
    "ppl_ratio": 1 + 4,
    "log_ppl_diff": 2 * L,
    "abs_log_ppl_diff": 2 * L,
    "chi2_sequence": 0 + 1 / 16 - 1,  # (2 * 1/2)^2 - 1; (1/4)^2 - 1
    "row_max_abs_log_ratio": L + 2 * L,
    "row_mean_abs_log_ratio": L + 2 * L,
    "row_max_abs_prob_diff": 0.5 + 0.375,
    "row_mean_abs_prob_diff": 0.3125 + 0.375,
    "row_high_prob_diff": 0,  # 0.5 is not above 0.5
    "product": 1 + 1 / 4,
    "product_sq": 1 + 1 / 16,
    "log_ratio_max": L,
    "log_ratio_min_negated": 2 * L,
    "abs_prob_diff_max": 0.5,
    "log_ppl_diff_max": 2 * L,
    "log_ppl_diff_min_negated": 0.0,
}


@pytest.mark.parametrize("name", FOLDED)
def test_fold_counts_rows_with_an_observed_token(name):
    assert fold_ratio_rows(rows())[name].item() == pytest.approx(FOLDED[name], abs=1e-6)


def test_fold_of_some_rows_is_the_fold_of_those_rows():
    kept = fold_ratio_rows(rows(), torch.tensor([False, True, True]))

    assert kept["tokens"].item() == 1
    assert kept["nonfinite"].item() == 0
    assert kept["rows"].item() == 1
    assert kept["log_ratio"].item() == pytest.approx(-2 * L, abs=1e-6)
    assert kept["log_ratio_max"].item() == 0.0
    assert kept["abs_prob_diff_max"].item() == pytest.approx(0.375, abs=1e-6)
    assert kept.histogram.sum().item() == 2  # one response in both histograms


def test_fold_of_nothing_has_no_maximum():
    none = fold_ratio_rows(rows(), torch.zeros(3).bool())

    assert none.sums.abs().sum().item() == 0
    assert none.maxima.tolist() == [-INF] * 5


def test_a_batch_without_rows_folds_to_zero():
    empty = torch.empty(0, 3)

    folded = fold_ratio_rows(ratio_rows(log_ratio(empty, empty, empty.bool()), empty, empty.bool()))

    assert folded.sums.abs().sum().item() == 0
    assert folded.maxima.tolist() == [-INF] * 5


def test_garbage_log_probs_give_finite_perplexities():
    garbage = torch.full((1, 2), -500.0)
    mask = torch.ones(1, 2).bool()

    folded = fold_ratio_rows(ratio_rows(log_ratio(garbage, garbage, mask), garbage, mask))

    assert folded["ppl_denominator"].item() == pytest.approx(math.exp(80), rel=1e-5)
    assert folded["ppl_numerator"].item() == pytest.approx(math.exp(80), rel=1e-5)


def test_the_product_of_ratios_is_clamped_in_chi2_sequence():
    ratio = LogRatio(torch.tensor([[15.0, 15.0], [-15.0, -15.0]]), torch.ones(2, 2).bool())

    folded = fold_ratio_rows(ratio_rows(ratio, torch.full((2, 2), -20.0), ratio.observed))

    assert folded["chi2_sequence"].item() == pytest.approx(math.exp(40) + math.exp(-40) - 2, rel=1e-5)


def test_small_mismatch_is_not_rounding_noise():
    mask = torch.ones(1, 1000).bool()
    ratio = LogRatio(torch.full((1, 1000), 1e-4), mask)

    folded = fold_ratio_rows(ratio_rows(ratio, torch.full((1, 1000), -1.0), mask))

    k3 = (folded["excess"] - folded["log_ratio"]).item() / 1000
    assert k3 == pytest.approx(5.00017e-9, rel=2e-2)  # l^2/2 + l^3/6; 1 + l in float32 rounds to 1.2e-7


@pytest.mark.parametrize("below", [-40.0, -9999.0])
def test_a_token_that_the_sampler_excluded_differs_by_its_whole_probability(below):
    """Its ratio is held at e^20, its difference of probabilities is not."""
    sampling, old, mask = torch.tensor([[below, -L]]), torch.tensor([[-2 * L, -L]]), torch.ones(1, 2).bool()

    found = fold_ratio_rows(ratio_rows(log_ratio(old, sampling, mask), sampling, mask))

    assert found["prob_diff"].item() == pytest.approx(0.25, rel=2e-3)
    assert found["abs_prob_diff_max"].item() == pytest.approx(0.25, rel=2e-3)
    assert found["excess"].item() == pytest.approx(math.expm1(20.0), rel=1e-6)


def test_autocast_does_not_round_the_products():
    weights, mask = torch.tensor([[1.001, 0.998]]), torch.ones(1, 2).bool()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums, weighted = rows().sums, weight_moments(weights, mask)

    assert torch.equal(sums, rows().sums)
    assert weighted["weight_sq"].item() == pytest.approx(1.002001 + 0.996004, abs=1e-6)


# -------------------------------------------------------------------------------------------------- histogram


@pytest.mark.parametrize(
    ("chi2", "bin_index"),
    [
        (-0.5, 0),
        (0.0, 0),
        (1e-8, 0),
        (1.01e-8 * 10**0.05, 1),  # bins are 12 / 240 = 0.05 decades wide
        (1.01, 160),  # 8 / 0.05
        (0.99, 159),
        (1e5, 239),  # beyond the last edge
    ],
)
def test_histogram_bins(chi2, bin_index):
    sums = torch.zeros(1, RATIO_LAYOUT.sums.index("rows"), dtype=torch.float64)  # the sums over tokens
    sums[0, RATIO_LAYOUT.sums.index("tokens")] = 2
    sums[0, RATIO_LAYOUT.sums.index("excess_sq")] = 2 * chi2  # mean over 2 tokens = chi2
    sums[0, RATIO_LAYOUT.sums.index("abs_excess")] = 4 * chi2  # half of the mean over 2 tokens = chi2
    folded = fold_ratio_rows(RatioRows(sums, torch.zeros(1, 3, dtype=torch.float64)))

    by_chi2, by_tv = folded.histogram.view(2, HISTOGRAM_BINS)
    assert by_chi2.argmax().item() == by_tv.argmax().item() == bin_index
    assert by_chi2.sum().item() == by_tv.sum().item() == 1


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [
        (0.05, 0.0),  # the first bin reads 0
        (0.1, 0.0),  # 10 of 100: reached exactly
        (0.11, 10**0.05),
        (0.9, 10**0.05),
        (0.95, 10**1.05),
        (1.0, 10**1.05),
    ],
)
def test_quantile_is_the_upper_edge_of_its_bin(quantile, expected):
    counts = torch.zeros(HISTOGRAM_BINS, dtype=torch.float64)
    counts[0], counts[160], counts[180] = 10, 80, 10

    assert histogram_quantile(counts, quantile).item() == pytest.approx(expected, rel=1e-5)


def test_quantile_of_nothing_is_zero():
    assert histogram_quantile(torch.zeros(HISTOGRAM_BINS, dtype=torch.float64), 0.95).item() == 0.0


# ---------------------------------------------------------------------------------------------------- weights

WEIGHTS = {
    "tokens": 3,
    "weight": 4.5,  # 1 + 3 + 0.5
    "weight_sq": 10.25,  # 1 + 9 + 0.25
    "rows": 2,
    "row_weight": 2.5,  # row means 2 and 0.5
    "row_weight_sq": 4.25,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight_sums(name):
    weights = torch.tensor([[1.0, 3.0], [0.5, 9.0], [7.0, NAN]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])

    assert weight_moments(weights, mask)[name].item() == pytest.approx(WEIGHTS[name], abs=1e-6)


def test_what_caps_and_floors_change():
    raw = torch.tensor([[3.0, 0.5, 1.0, 9.0], [2.5, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [False, False, False, False]])

    changed, cut = cut_rows(mask, raw, raw.clamp(0.75, 2.0))

    assert changed.tolist() == [2, 1, 0]  # 3 and 0.5; 2.5
    assert cut.tolist() == [1.0, 0.5, 0.0]  # the floor under 0.5 takes nothing off
    with pytest.raises(ValueError, match=r"^bounded must have shape \(3, 4\), but got \(3, 1\)\.$"):
        cut_rows(mask, raw, raw[:, :1])


def test_weight_extrema_leave_padding_out():
    mask = torch.tensor([[True, True], [True, False]])

    sample = weight_moments(torch.tensor([[1.0, 3.0], [0.5, 0.0]]), mask)

    assert sample["weight_max"].item() == 3.0
    assert sample["weight_min_negated"].item() == -0.5


def test_sequence_weights_count_once_a_token_and_once_a_row():
    weights = torch.tensor([[2.0], [0.5], [9.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])

    compact = weight_moments(weights, mask)

    # tokens 2, 2, 0.5; rows 2, 0.5
    assert compact.sums.tolist() == [3.0, 4.5, 8.25, 2.0, 2.5, 4.25]
    assert compact.maxima.tolist() == [2.0, -0.5]
    expanded = weight_moments(weights.expand(3, 2), mask)
    close(compact.sums, expanded.sums)
    close(compact.maxima, expanded.maxima)


@pytest.mark.parametrize("shape", [(0, 3), (0, 1)])
def test_weights_of_a_batch_without_rows(shape):
    empty = weight_moments(torch.empty(shape), torch.empty(0, 3).bool())

    assert empty.sums.tolist() == [0.0] * 6
    assert empty.maxima.tolist() == [-INF, -INF]


# ------------------------------------------------------------------------------------------------------ merge

LAYOUT = Layout(sums=("a", "b"), maxima=("top",))


def test_moments_by_name_in_float64():
    packed = moments(LAYOUT, [torch.tensor(1), torch.tensor(2.5)], [torch.tensor(-3.0)])

    assert (packed["a"].item(), packed["b"].item(), packed["top"].item()) == (1.0, 2.5, -3.0)
    assert packed.sums.dtype == packed.maxima.dtype == torch.float64


def test_merge_adds_sums_and_takes_maxima():
    one = moments(LAYOUT, [torch.tensor(1.0), torch.tensor(2.0)], [torch.tensor(5.0)])
    two = moments(LAYOUT, [torch.tensor(10.0), torch.tensor(20.0)], [torch.tensor(4.0)])

    merged = one.merge(two)

    assert merged.sums.tolist() == [11.0, 22.0]
    assert merged.maxima.tolist() == [5.0]
    assert one.sums.tolist() == [1.0, 2.0]


def test_merge_of_different_layouts_is_refused():
    one = moments(Layout(sums=("a",)), [torch.tensor(1.0)])

    with pytest.raises(ValueError, match="layout must be"):
        one.merge(moments(Layout(sums=("b",)), [torch.tensor(1.0)]))


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="not in tuple"):
        Moments(LAYOUT, torch.zeros(2), torch.zeros(1))["c"]
