"""Weights and keep terms one by one: what they compute, and settings that are refused."""

import math
from functools import partial

import pytest
import torch

from trl_offpolicy import (
    BandWeight,
    DivergenceBand,
    OffPolicySequenceMask,
    OutlierVeto,
    RatioBand,
    RawWeight,
    TruncateWeight,
)
from trl_offpolicy.terms import TermInputs

NAN, INF = float("nan"), float("inf")
L = math.log(2)
E20 = math.exp(20)
POSITIVE = torch.ones(3, 1)
close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)

# Row 0: ratios (4, 1); row 1: (1/2, 1/2); row 2: (1, padding).
LOG_RATIOS = torch.tensor([[2 * L, 0.0], [-L, -L], [0.0, NAN]])
MASK = torch.tensor([[True, True], [True, True], [True, False]])


NONE = [False, False]


def flags(violations, side):
    value = getattr(violations, side)
    return None if value is None else value.tolist()


# ---------------------------------------------------------------------------------------------------- weights


def test_truncate_weight_caps_and_floors():
    ratio = torch.tensor([0.1, 0.5, 1.0, 2.0, 9.0])

    assert TruncateWeight(max_weight=2.0).bound(ratio).tolist() == pytest.approx([0.1, 0.5, 1.0, 2.0, 2.0])
    assert TruncateWeight(max_weight=2, min_weight=0.5).bound(ratio).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0]


def test_band_weight_is_raw_inside_inclusive_bounds():
    ratio = torch.tensor([0.25, 0.5, 1.0, 2.0, 2.5])

    assert BandWeight(low=0.5, high=2.0).bound(ratio).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert BandWeight(low=None, high=2.0).bound(ratio).tolist() == [0.25, 0.5, 1.0, 2.0, 0.0]
    assert BandWeight(low=0.5, high=None).bound(ratio).tolist() == [0.0, 0.5, 1.0, 2.0, 2.5]


def test_raw_weight_is_the_ratio():
    ratio = torch.tensor([1e-6, 1.0, 1e6])

    assert torch.equal(RawWeight().bound(ratio), ratio)


def test_defaults():
    weight = TruncateWeight(max_weight=2.0)
    assert (weight.level, weight.min_weight, weight.ratio, weight.scope) == (
        "token",
        None,
        "old/sampling",
        "row",
    )
    assert (RawWeight().level, BandWeight(low=1, high=1).ratio) == ("token", "old/sampling")
    assert RatioBand(low=0.9, high=1.1).level == "sequence_mean"
    assert DivergenceBand(statistic="k3", high=0.1).level == "sequence_mean"
    assert OffPolicySequenceMask(max_divergence=0.1).ratio == "current/sampling"
    assert OutlierVeto(low=0.1, high=None).ratio == "old/sampling"


# ------------------------------------------------------------------------------------------------- keep terms


@pytest.mark.parametrize(
    ("level", "above", "below"),
    [  # band [0.6, 1.5], above and below
        ("token", [[True, False], NONE, NONE], [NONE, [True, True], NONE]),
        ("sequence", [[True], [False], [False]], [[False], [True], [False]]),  # products 4, 1/4, 1
        ("sequence_mean", [[True], [False], [False]], [[False], [True], [False]]),  # 2, 1/2, 1
    ],
)
def test_ratio_band(level, above, below):
    violations = RatioBand(low=0.6, high=1.5, level=level).violations(TermInputs(LOG_RATIOS, MASK, POSITIVE))

    assert flags(violations, "above") == above
    assert flags(violations, "below") == below


def test_ratio_band_levels_differ():
    def above(level):
        band = RatioBand(low=None, high=3.0, level=level)
        return flags(band.violations(TermInputs(LOG_RATIOS, MASK, POSITIVE)), "above")

    assert above("sequence") == [[True], [False], [False]]  # product 4
    assert above("sequence_mean") == [[False], [False], [False]]  # geometric mean 2


def test_ratio_band_bounds_are_inclusive():
    on_policy = torch.zeros(1, 2), torch.ones(1, 2).bool(), torch.ones(1, 1)

    for level in ("token", "sequence", "sequence_mean"):
        violations = RatioBand(low=1.0, high=1.0, level=level).violations(TermInputs(*on_policy))
        assert not violations.above.any()
        assert not violations.below.any()


def test_open_sides_cannot_be_violated():
    open_low = RatioBand(low=None, high=1.5).violations(TermInputs(LOG_RATIOS, MASK, POSITIVE))
    open_high = RatioBand(low=0.6, high=None).violations(TermInputs(LOG_RATIOS, MASK, POSITIVE))

    assert (open_low.below, flags(open_low, "above")) == (None, [[True], [False], [False]])
    assert (open_high.above, flags(open_high, "below")) == (None, [[False], [True], [False]])


@pytest.mark.parametrize(
    ("statistic", "level", "values"),
    [
        ("k1", "token", [[-2 * L, 0.0], [L, L], [0.0, 0.0]]),
        ("k1", "sequence", [[-2 * L], [2 * L], [0.0]]),
        ("k1", "sequence_mean", [[-L], [L], [0.0]]),
        ("k2", "sequence", [[2 * L * L], [L * L], [0.0]]),  # (2L)^2 / 2; 2 L^2 / 2
        ("k2", "sequence_mean", [[L * L], [L * L / 2], [0.0]]),
        ("k3", "sequence", [[3 - 2 * L], [2 * L - 1], [0.0]]),  # 4 - 1 - 2L; 2 (1/2 - 1 + L)
        ("k3", "sequence_mean", [[1.5 - L], [L - 0.5], [0.0]]),
    ],
)
def test_divergence_band_measures(statistic, level, values):
    """The bounds just below and just above each value decide, so the value is what is claimed."""
    values = torch.tensor(values)
    for value in values.unique().tolist():
        for edge in (value - 1e-5, value + 1e-5):
            if statistic != "k1" and edge <= 0:
                continue
            high = DivergenceBand(statistic=statistic, level=level, high=edge)
            low = DivergenceBand(statistic=statistic, level=level, low=edge, high=None)
            assert torch.equal(high.violations(TermInputs(LOG_RATIOS, MASK, POSITIVE)).above, values > edge)
            assert torch.equal(low.violations(TermInputs(LOG_RATIOS, MASK, POSITIVE)).below, values < edge)


def test_divergence_band_bounds_are_inclusive():
    measured = torch.tensor([[-0.5, 0.5]]), torch.ones(1, 2).bool(), torch.ones(1, 1)

    for statistic, low, high in (("k1", -0.5, 0.5), ("k2", 0.125, 0.125)):  # k2 = 0.5^2 / 2
        band = DivergenceBand(statistic=statistic, level="token", low=low, high=high).violations(TermInputs(*measured))
        assert not (band.above | band.below).any()


def test_divergence_k1_and_ratio_band_agree_in_direction():
    """k1 = -log rho: rho <= 1.5 is k1 >= -log 1.5 (verl's k1 band keeps the reciprocal)."""
    ratio = RatioBand(level="sequence_mean", low=0.6, high=1.5).violations(TermInputs(LOG_RATIOS, MASK, POSITIVE))
    k1 = DivergenceBand(statistic="k1", level="sequence_mean", low=-math.log(1.5), high=-math.log(0.6)).violations(
        TermInputs(LOG_RATIOS, MASK, POSITIVE)
    )

    assert torch.equal(ratio.above, k1.below)
    assert torch.equal(ratio.below, k1.above)


def test_outlier_veto_takes_the_whole_sequence():
    veto = OutlierVeto(low=0.6, high=3.0).violations(TermInputs(LOG_RATIOS, MASK, POSITIVE))

    assert flags(veto, "above") == [[True], [False], [False]]  # the token with ratio 4
    assert flags(veto, "below") == [[False], [True], [False]]
    assert OutlierVeto(low=None, high=3.0).violations(TermInputs(LOG_RATIOS, MASK, POSITIVE)).below is None
    assert OutlierVeto(low=0.6, high=None).violations(TermInputs(LOG_RATIOS, MASK, POSITIVE)).above is None


def test_outlier_veto_bounds_are_inclusive():
    log_ratios, mask, advantages = torch.tensor([[0.5, -0.25]]), torch.ones(1, 2).bool(), torch.ones(1, 1)
    veto = OutlierVeto(low=math.exp(-0.25), high=math.exp(0.5)).violations(TermInputs(log_ratios, mask, advantages))

    assert not (veto.above | veto.below).any()


def test_off_policy_sequence_mask_of_row_advantages():
    # mean log(mu / pi) = -mean l: -L, L, 0
    advantages = torch.tensor([[-1.0], [-1.0], [-1.0]])

    def dropped(max_divergence, a=advantages):
        term = OffPolicySequenceMask(max_divergence=max_divergence)
        return term.violations(TermInputs(LOG_RATIOS, MASK, a)).below.tolist()

    assert dropped(0.5) == [[False], [True], [False]]
    assert dropped(0.7) == [[False], [False], [False]]  # L = 0.693
    assert dropped(0.5, -advantages) == [[False], [False], [False]]
    assert dropped(0.5, 0 * advantages) == [[False], [False], [False]]
    assert OffPolicySequenceMask(max_divergence=0.5).violations(TermInputs(LOG_RATIOS, MASK, advantages)).above is None


def test_off_policy_sequence_mask_equality_is_kept():
    log_ratios, mask = torch.tensor([[-0.25, -0.75]]), torch.ones(1, 2).bool()  # mean 0.5, exact in binary

    def dropped(max_divergence, values=log_ratios):
        term = OffPolicySequenceMask(max_divergence=max_divergence)
        return term.violations(TermInputs(values, mask, -torch.ones(1, 1))).below.item()

    assert not dropped(0.5)
    assert dropped(0.4999)
    assert not dropped(0, 0 * log_ratios)


def test_off_policy_sequence_mask_of_token_advantages():
    advantages = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])

    below = OffPolicySequenceMask(max_divergence=0.5).violations(TermInputs(LOG_RATIOS, MASK, advantages)).below

    assert below.tolist() == [[False, False], [True, False], [False, False]]


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (RatioBand(low=0.5, high=2.0, level="token"), "ratio_band_token"),
        (RatioBand(low=0.5, high=2.0), "ratio_band_sequence_mean"),
        (DivergenceBand(statistic="k2", high=2.0, level="sequence"), "divergence_k2_sequence"),
        (OutlierVeto(low=0.5, high=2.0), "outlier_veto"),
        (OffPolicySequenceMask(max_divergence=0.1), "off_policy_sequence_mask"),
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


@pytest.mark.parametrize("bad", [-0.1, 20.0, 25.0])
def test_max_divergence_that_can_never_fire_is_refused(bad):
    with pytest.raises(ValueError, match=r"max_divergence must be in \[0, 20.0\) nats to ever fire"):
        OffPolicySequenceMask(max_divergence=bad)
    OffPolicySequenceMask(max_divergence=19.9)


@pytest.mark.parametrize("statistic", ["k2", "k3"])
def test_divergence_bounds_of_a_statistic_that_is_never_negative(statistic):
    for bad in (0.0, -0.1):
        with pytest.raises(ValueError, match=f"high must be positive for {statistic}"):
            DivergenceBand(statistic=statistic, high=bad)
        with pytest.raises(ValueError, match=f"low can never fire for {statistic}"):
            DivergenceBand(statistic=statistic, low=bad, high=1.0)
    DivergenceBand(statistic="k1", low=-0.2, high=-0.1)  # k1 is signed


@pytest.mark.parametrize(("statistic", "largest"), [("k1", 20.0), ("k2", 200.0), ("k3", math.expm1(20) - 20)])
def test_divergence_bounds_out_of_reach_are_refused(statistic, largest):
    for level in ("token", "sequence_mean"):
        with pytest.raises(ValueError, match=rf"high must be below .* nats for {statistic} to ever fire"):
            DivergenceBand(statistic=statistic, high=largest, level=level)
        DivergenceBand(statistic=statistic, high=0.99 * largest, level=level)
    DivergenceBand(statistic=statistic, high=10 * largest, level="sequence")  # a sum has no such limit


def test_divergence_lower_bound_out_of_reach_is_refused():
    with pytest.raises(ValueError, match=r"low must be above -20.0 nats for k1 to ever fire"):
        DivergenceBand(statistic="k1", low=-20.0, high=1.0)
    DivergenceBand(statistic="k1", low=-19.9, high=1.0)
    DivergenceBand(statistic="k1", low=-200.0, high=1.0, level="sequence")


@pytest.mark.parametrize("statistic", ["k4", "K3", None, 3])
def test_unknown_statistic_is_refused(statistic):
    with pytest.raises(ValueError, match="statistic must be one of 'k1', 'k2', 'k3', but got"):
        DivergenceBand(statistic=statistic, high=1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: TruncateWeight(max_weight=2.0, **o),
        lambda **o: BandWeight(low=0.5, high=2.0, **o),
        RawWeight,
        lambda **o: RatioBand(low=0.5, high=2.0, **o),
        lambda **o: DivergenceBand(statistic="k3", high=1.0, **o),
        lambda **o: OutlierVeto(low=0.5, high=2.0, **o),
        lambda **o: OffPolicySequenceMask(max_divergence=0.1, **o),
    ],
    ids=["truncate", "band", "raw", "ratio_band", "divergence", "veto", "opsm"],
)
def test_unknown_level_and_ratio_are_refused(make):
    with pytest.raises(ValueError, match=r"ratio must be one of \['old/sampling', .* but got 'sampling/old'"):
        make(ratio="sampling/old")
    with pytest.raises((ValueError, TypeError), match=r"'geometric'|'level'"):  # the veto and OPSM have none
        make(level="geometric")
