"""Settings of weights and keep terms: defaults, names, and values that are refused."""

import math

import pytest
import torch

from trl_offpolicy import (
    BandWeight,
    DivergenceBand,
    EqualRewards,
    ESSWeight,
    GroupRejection,
    OffPolicySequenceMask,
    OutlierVeto,
    PrefixBudget,
    PrefixMinWeight,
    PrefixWeight,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    ShapedWeight,
    StalenessBound,
    SuffixVeto,
    TruncateWeight,
)

NAN, INF = float("nan"), float("inf")
E20 = math.exp(20)


def test_defaults():
    weight = TruncateWeight(max_weight=2.0)
    assert (weight.level, weight.min_weight, weight.ratio, weight.scope) == ("token", None, "old/sampling", "row")
    assert (RawWeight().level, BandWeight(low=1, high=1).ratio) == ("token", "old/sampling")
    assert (ESSWeight().target, ESSWeight().level, ESSWeight().scope) == (0.5, "token", "generation_batch")
    assert (PrefixWeight().low, PrefixWeight().high, PrefixMinWeight().max_weight) == (0.8, 1.25, None)
    assert PrefixWeight().level == PrefixMinWeight().level == "prefix"
    assert ShapedWeight(gamma=1).level == "token"
    assert RatioBand(low=0.9, high=1.1).level == "sequence_mean"
    assert DivergenceBand(statistic="k3", high=0.1).level == "sequence_mean"
    assert OffPolicySequenceMask(max_divergence=0.1).ratio == "current/sampling"
    assert OutlierVeto(low=0.1, high=None).ratio == "old/sampling"
    assert (ProbabilityDifferenceMask().low, ProbabilityDifferenceMask().high) == (-0.2, 0.2)
    prefix = PrefixBudget()
    assert (prefix.high, prefix.budget, prefix.min_weight, prefix.adaptive) == (0.2, 0.02, 0.8, True)
    assert (prefix.ratio, prefix.scope) == ("current/sampling", "row")
    assert (SecondMomentBudget().scope, GroupRejection().scope) == ("generation_batch", "group")
    assert GroupRejection().max_dropped_fraction == 0.5


def test_scope_is_group_at_that_level():
    assert RatioBand(low=0.9, high=1.1, level="group").scope == "group"
    assert DivergenceBand(statistic="k1", high=0.1, level="group").scope == "group"
    assert RatioBand(low=0.9, high=1.1, level="turn").scope == "row"
    assert DivergenceBand(statistic="k1", high=0.1, level="turn").scope == "row"
    assert StalenessBound(max_lag=1).scope == ProbabilityDifferenceMask().scope == "row"


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (RatioBand(low=0.5, high=2.0, level="token"), "ratio_band_token"),
        (RatioBand(low=0.5, high=2.0), "ratio_band_sequence_mean"),
        (DivergenceBand(statistic="k2", high=2.0, level="sequence"), "divergence_k2_sequence"),
        (OutlierVeto(low=0.5, high=2.0), "outlier_veto"),
        (OffPolicySequenceMask(max_divergence=0.1), "off_policy_sequence_mask"),
        (ProbabilityDifferenceMask(), "probability_difference"),
        (PrefixBudget(), "prefix_budget"),
        (SuffixVeto(), "suffix_veto"),
        (StalenessBound(max_lag=1), "staleness_bound"),
        (SecondMomentBudget(), "second_moment_budget"),
        (EqualRewards(), "equal_rewards"),
        (GroupRejection(), "group_rejection"),
    ],
)
def test_names(term, name):
    assert term.name == name


# ----------------------------------------------------------------------------------------------------- errors

BANDS = [RatioBand, BandWeight, OutlierVeto]
NOT_NUMBERS = ["0.5", "0.5_5_0", "2.0", True, False, NAN, INF, -INF, [1.0], torch.tensor(1.0)]


@pytest.mark.parametrize("cls", BANDS)
@pytest.mark.parametrize("missing", ["low", "high"])
def test_a_band_needs_both_bounds_said(cls, missing):
    bounds = {"low": 0.5, "high": 2.0}
    del bounds[missing]

    with pytest.raises(TypeError, match=f"'{missing}'"):
        cls(**bounds)


@pytest.mark.parametrize("cls", [TruncateWeight, OffPolicySequenceMask, DivergenceBand])
def test_other_thresholds_are_required_too(cls):
    expected = {TruncateWeight: "max_weight", OffPolicySequenceMask: "max_divergence", DivergenceBand: "high"}
    options = {"statistic": "k3"} if cls is DivergenceBand else {}

    with pytest.raises(TypeError, match=rf"'{expected[cls]}'"):
        cls(**options)


@pytest.mark.parametrize("cls", [*BANDS, lambda **bounds: DivergenceBand(statistic="k1", **bounds)])
def test_both_sides_open_is_refused(cls):
    with pytest.raises(ValueError, match=r"low and high must not both be None"):
        cls(low=None, high=None)


@pytest.mark.parametrize("cls", [*BANDS, lambda **bounds: DivergenceBand(statistic="k1", **bounds)])
def test_low_above_high_is_refused(cls):
    with pytest.raises(ValueError, match=r"low must be at most high, but got 2.0 > 1.5"):
        cls(low=2.0, high=1.5)
    cls(low=1.5, high=1.5)


def test_floor_above_cap_is_refused():
    with pytest.raises(ValueError, match=r"min_weight must be at most max_weight, but got 3.0 > 2.0"):
        TruncateWeight(max_weight=2.0, min_weight=3.0)


@pytest.mark.parametrize("bad", NOT_NUMBERS, ids=repr)
@pytest.mark.parametrize("cls", BANDS)
def test_bounds_are_finite_numbers(cls, bad):
    with pytest.raises(ValueError, match=r"^low must be a finite number, but got"):
        cls(low=bad, high=2.0)
    with pytest.raises(ValueError, match=r"^high must be a finite number, but got"):
        cls(low=0.5, high=bad)


@pytest.mark.parametrize("bad", NOT_NUMBERS, ids=repr)
def test_other_thresholds_are_finite_numbers(bad):
    with pytest.raises(ValueError, match=r"^max_weight must be a finite number"):
        TruncateWeight(max_weight=bad)
    with pytest.raises(ValueError, match=r"^min_weight must be a finite number"):
        TruncateWeight(max_weight=2.0, min_weight=bad)
    with pytest.raises(ValueError, match=r"^max_divergence must be a finite number"):
        OffPolicySequenceMask(max_divergence=bad)
    with pytest.raises(ValueError, match=r"^high must be a finite number"):
        DivergenceBand(statistic="k3", high=bad)


def test_a_missing_cap_is_refused():
    with pytest.raises(ValueError, match="max_weight must be a finite number, but got None"):
        TruncateWeight(max_weight=None)


@pytest.mark.parametrize("low", [0.0, 0, -1.0, 1 / E20, 1e-9])
@pytest.mark.parametrize("cls", BANDS)
def test_a_lower_bound_that_can_never_fire_is_refused(cls, low):
    with pytest.raises(ValueError, match=r"low must be a ratio above 2.1e-09 to ever fire .*None for"):
        cls(low=low, high=2.0)
    cls(low=2.1e-9, high=2.0)


@pytest.mark.parametrize("high", [E20, 1e9, 0.0, -1.0])
@pytest.mark.parametrize("cls", BANDS)
def test_an_upper_bound_that_can_never_fire_is_refused(cls, high):
    with pytest.raises(ValueError, match=r"high must be a ratio in \(0, 4.9e\+08\) to ever fire"):
        cls(low=None, high=high)
    cls(low=None, high=4.85e8)


@pytest.mark.parametrize("max_weight", [E20, 1e9, 0, -2.0])
def test_a_cap_that_can_never_fire_is_refused(max_weight):
    with pytest.raises(ValueError, match="max_weight must be a ratio in"):
        TruncateWeight(max_weight=max_weight)


@pytest.mark.parametrize("min_weight", [0.0, -1.0])
def test_a_floor_that_can_never_fire_is_refused(min_weight):
    with pytest.raises(ValueError, match="min_weight must be a ratio above"):
        TruncateWeight(max_weight=2.0, min_weight=min_weight)


@pytest.mark.parametrize("bad", [-0.1, 1e4, 1e9])
def test_max_divergence_that_can_never_fire_is_refused(bad):
    with pytest.raises(ValueError, match=r"max_divergence must be in \[0, 10000\) nats to ever fire"):
        OffPolicySequenceMask(max_divergence=bad)
    OffPolicySequenceMask(max_divergence=25.0)


@pytest.mark.parametrize("statistic", ["k2", "k3", "abs", "binary_tv", "binary_kl", "binary_kl_both"])
def test_divergence_bounds_of_a_statistic_that_is_never_negative(statistic):
    for bad in (0.0, -0.1):
        with pytest.raises(ValueError, match=f"high must be positive for {statistic}"):
            DivergenceBand(statistic=statistic, high=bad)
        with pytest.raises(ValueError, match=f"low must be positive or None for {statistic}"):
            DivergenceBand(statistic=statistic, low=bad, high=1.0)
    DivergenceBand(statistic="k1", low=-0.2, high=-0.1)  # k1 is signed


@pytest.mark.parametrize(
    ("statistic", "largest"),
    [
        ("k1", 20.0),
        ("k2", 200.0),
        ("k3", math.expm1(20) - 20),
        ("abs", 20.0),
        ("binary_kl", 20.0),
        ("binary_kl_both", 13.8155),  # log 1e6
        ("binary_tv", 1.0),
    ],
)
def test_divergence_bounds_out_of_reach_are_refused(statistic, largest):
    for level in ("token", "turn_mean", "sequence_mean", "group"):
        with pytest.raises(ValueError, match=rf"^high must be below .* for {statistic} to ever fire"):
            DivergenceBand(statistic=statistic, high=largest, level=level)
        DivergenceBand(statistic=statistic, high=0.99 * largest, level=level)
    for level in ("turn", "sequence"):
        DivergenceBand(statistic=statistic, high=10 * largest, level=level)  # a sum has no such limit


def test_divergence_lower_bound_out_of_reach_is_refused():
    with pytest.raises(ValueError, match=r"^low must be above -20.0 for k1 to ever fire"):
        DivergenceBand(statistic="k1", low=-20.0, high=1.0)
    DivergenceBand(statistic="k1", low=-19.9, high=1.0)
    DivergenceBand(statistic="k1", low=-200.0, high=1.0, level="sequence")
    for low, high in ((-1.0, 0.5), (-0.5, 1.0)):
        with pytest.raises(ValueError, match="for prob_diff to ever fire"):
            DivergenceBand(statistic="prob_diff", low=low, high=high)
    DivergenceBand(statistic="prob_diff", low=-0.99, high=0.99)


@pytest.mark.parametrize("statistic", ["k4", "K3", None, 3])
def test_unknown_statistic_is_refused(statistic):
    with pytest.raises(ValueError, match=r"^statistic must be one of \['k1', .*'binary_kl_both'\], but got"):
        DivergenceBand(statistic=statistic, high=1.0)


@pytest.mark.parametrize(
    ("make", "field", "bad", "message"),
    [
        (ShapedWeight, "gamma", (0, 0.0, -1.0), "gamma must be positive"),
        (ESSWeight, "target", (0, 1, 1.0, 1.5, -0.1), r"target must be a fraction in \(0, 1\)"),
        (PrefixWeight, "low", (1.0, 1.2), "low and high must lie on both sides of 1"),
        (PrefixWeight, "low", (0.0, -0.5), "low must be a ratio above"),
        (PrefixWeight, "high", (1.0, 0.9), "low and high must lie on both sides of 1"),
        (PrefixWeight, "high", (E20,), "high must be a ratio in"),
        (PrefixMinWeight, "max_weight", (0, -1.0, E20), "max_weight must be a ratio in"),
        (ProbabilityDifferenceMask, "low", (0.0, -1.0, 0.1), "low and high must be in"),
        (ProbabilityDifferenceMask, "high", (0.0, 1.0, -0.1), "low and high must be in"),
        (SuffixVeto, "low", (0, -0.5, 1e-10), "low must be a ratio above"),
        (PrefixBudget, "high", (0, -0.1), "high must be positive and finite"),
        (PrefixBudget, "high", (1.0, 2), "high must be below 1 for binary_tv to ever fire"),
        (PrefixBudget, "budget", (0, -0.1), "budget must be positive and finite"),
        (PrefixBudget, "min_weight", (0, -0.1), "min_weight must be positive and finite"),
        (PrefixBudget, "min_weight", (1.1, 2), "min_weight must be at most 1"),
        (SecondMomentBudget, "budget", (0, -0.1, 1e8), r"budget must be in \(0, 100000000\) nats squared to ever fire"),
        (EqualRewards, "tolerance", (-1e-9, -1), r"tolerance must be at least 0, but got -"),
        (GroupRejection, "max_dropped_fraction", (-0.1, 1, 1.5), r"max_dropped_fraction must be in \[0, 1\) to ever"),
    ],
)
def test_settings_out_of_range_are_refused(make, field, bad, message):
    for value in bad:
        with pytest.raises(ValueError, match=f"^{message}"):
            make(**{field: value})
    optional = field == "max_weight"
    for value in NOT_NUMBERS if optional else (*NOT_NUMBERS, None):
        with pytest.raises(ValueError, match=f"^{field} must be a finite number, but got"):
            make(**{field: value})


@pytest.mark.parametrize("bad", [-1, 1.0, "3", True, None, NAN])
def test_max_lag_is_a_whole_number(bad):
    with pytest.raises(ValueError, match=r"^max_lag must be a whole number of at least 0, but got"):
        StalenessBound(max_lag=bad)


@pytest.mark.parametrize(("cls", "field"), [(ShapedWeight, "gamma"), (StalenessBound, "max_lag"), (OutlierVeto, "low")])
def test_settings_without_a_sensible_default_are_required(cls, field):
    with pytest.raises(TypeError, match=f"'{field}'"):
        cls()
