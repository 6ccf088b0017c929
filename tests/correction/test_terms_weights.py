"""Weights one by one: what they compute at which level, by hand and by plain loops."""

import math
from functools import partial

import plain
import pytest
import torch

from trl_offpolicy import (
    BandWeight,
    ESSWeight,
    PrefixMinWeight,
    PrefixWeight,
    RawWeight,
    ShapedWeight,
    TruncateWeight,
)
from trl_offpolicy.correction.terms import TermInputs
from trl_offpolicy.correction.terms.weights import WEIGHT_LEVELS

NAN = float("nan")
E20 = math.exp(20)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def inputs(log_ratios, mask=None, **fields):
    log_ratios = torch.tensor(log_ratios) if isinstance(log_ratios, list) else log_ratios
    mask = ~log_ratios.isnan() if mask is None else mask
    return TermInputs(log_ratios, mask, torch.ones(len(mask), 1), **fields)


def of_ratios(*rows):
    """Inputs from ratios; None is padding."""
    return inputs(torch.tensor([[NAN if value is None else math.log(value) for value in row] for row in rows]))


def random_inputs(seed):
    log_ratios, mask, turn_ids, group_ids = plain.random_case(seed)
    return inputs(torch.where(mask, log_ratios, NAN), mask, turn_ids=turn_ids, group_ids=group_ids)


# ------------------------------------------------------------------------------------------- truncate, band, raw


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


FORMULAS = {  # of one ratio
    "truncate": (lambda **o: TruncateWeight(max_weight=1.5, min_weight=0.4, **o), lambda r: min(max(r, 0.4), 1.5)),
    "band": (lambda **o: BandWeight(low=0.4, high=1.5, **o), lambda r: r if 0.4 <= r <= 1.5 else 0.0),
    "raw": (RawWeight, lambda r: r),
    "shaped": (lambda **o: ShapedWeight(gamma=0.3, **o), lambda r: r / (r + 0.3)),
}


@pytest.mark.parametrize("level", WEIGHT_LEVELS)
@pytest.mark.parametrize("name", FORMULAS)
def test_weights_by_plain_loops(name, level):
    make, formula = FORMULAS[name]
    for seed in range(8):
        seen = random_inputs(seed)
        listed = seen.log_ratios.tolist(), seen.mask.tolist(), level, seen.turn_ids.tolist()
        ratios = [[plain.ratio(value) for value in row] for row in plain.aggregate(*listed)]

        raw, bounded, _ = make(level=level).weigh(seen)

        close(raw, torch.tensor(ratios))
        close(bounded, torch.tensor([[formula(value) for value in row] for row in ratios]))


@pytest.mark.parametrize(
    ("level", "expected"),
    [  # two turns, (4, 1/2) and (2, 1/4)
        ("turn", [[2.0, 2.0, 1.0, 0.5, 0.5]]),
        ("turn_mean", [[math.sqrt(2)] * 2 + [1.0] + [math.sqrt(0.5)] * 2]),
        ("prefix", [[4.0, 2.0, 1.0, 4.0, 1.0]]),
        ("sequence", [[1.0]]),
    ],
)
def test_raw_weight_by_level(level, expected):
    close(RawWeight(level=level).weigh(of_ratios([4.0, 0.5, None, 2.0, 0.25])).raw, torch.tensor(expected))


def test_turns_stay_whole_when_an_earlier_term_dropped_a_token_in_the_middle():
    trainable = torch.tensor([[1, 1, 1, 0, 1]]).bool()
    measured = torch.tensor([[1, 0, 1, 0, 1]]).bool()
    log_ratios = torch.tensor([[2.0, 8.0, 4.0, 8.0, 3.0]]).log()

    raw = RawWeight(level="turn").weigh(inputs(log_ratios, measured, trainable=trainable)).raw

    close(raw, torch.tensor([[8.0, 1.0, 8.0, 1.0, 3.0]]))


# --------------------------------------------------------------------------------------------------- shaped


def test_shaped_weight():
    raw, shaped, by_design = ShapedWeight(gamma=0.5).weigh(of_ratios([1.0, 0.5, 4.5, None]))
    assert by_design

    close(raw, torch.tensor([[1.0, 0.5, 4.5, 1.0]]))
    close(shaped, torch.tensor([[2 / 3, 0.5, 0.9, 2 / 3]]))


def test_shaped_weight_of_extreme_ratios_stays_inside_zero_and_one():
    for gamma in (1e-6, 1.0, 1e6):
        shaped = ShapedWeight(gamma=gamma, level="sequence").weigh(inputs([[20.0] * 3, [-20.0] * 3])).bounded

        assert ((shaped > 0) & (shaped <= 1)).all()


# -------------------------------------------------------------------------------------------------- prefix min


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([2.0, 3.0, 0.5, 4.0, 1.5], [2.0, 6.0, 1.0, 2.0, 0.75]),  # times 1, 2, 2, 1/2, 1/2
        ([2.0, None, 3.0, None, 5.0], [2.0, 1.0, 6.0, 1.0, 10.0]),  # times 1, 2, 2: a minimum, not a product
        ([None, 0.5, 0.25, 8.0, 1.0], [1.0, 0.5, 0.125, 2.0, 0.25]),
    ],
)
def test_prefix_min_weight(ratios, expected):
    raw, bounded, _ = PrefixMinWeight().weigh(of_ratios(ratios))

    close(raw, torch.tensor([expected]))
    assert torch.equal(raw, bounded)


def test_prefix_min_weight_is_capped():
    raw, bounded, _ = PrefixMinWeight(max_weight=2.5).weigh(of_ratios([2.0, 3.0, 0.5, 4.0]))

    close(raw, torch.tensor([[2.0, 6.0, 1.0, 2.0]]))
    close(bounded, torch.tensor([[2.0, 2.5, 1.0, 2.0]]))


def test_prefix_min_weight_is_clamped_at_20_nats():
    raw = PrefixMinWeight().weigh(inputs([[15.0, 15.0], [-15.0, -15.0]])).raw

    close(raw, torch.tensor([[math.exp(15), E20], [math.exp(-15), 1 / E20]]))


def test_prefix_min_weight_is_at_most_the_prefix_product_where_all_ratios_exceed_one():
    """The conservative case of the paper: a minimum of factors above 1 is at most their product."""
    seen = inputs(torch.rand(20, 12, generator=torch.Generator().manual_seed(0)))

    assert (PrefixMinWeight().weigh(seen).raw <= RawWeight(level="prefix").weigh(seen).raw * (1 + 1e-6)).all()


# ------------------------------------------------------------------------------------------------------ prefix


def test_prefix_weight_is_held_in_bounds_that_grow_with_the_root():
    # products 2, 4, 4, 1/2, 1/32 against 1.25^sqrt(t) above and 0.8^sqrt(t) below; t skips padding
    raw, bounded, _ = PrefixWeight().weigh(of_ratios([2.0, 2.0, None, 1.0, 1 / 8, 1 / 16]))

    close(raw, torch.tensor([[2.0, 4.0, 1.0, 4.0, 0.5, 1 / 32]]))
    roots = [1, math.sqrt(2), None, math.sqrt(3), 2, math.sqrt(5)]
    expected = [1.25 ** roots[0], 1.25 ** roots[1], 1.0, 1.25 ** roots[3], 0.8 ** roots[4], 0.8 ** roots[5]]
    close(bounded, torch.tensor([expected]))


def test_prefix_weight_is_the_product_inside_its_bounds():
    raw, bounded, _ = PrefixWeight(low=0.5, high=3.0).weigh(of_ratios([1.5, 2.0, 0.4, 0.7]))

    close(raw, torch.tensor([[1.5, 3.0, 1.2, 0.84]]))
    assert torch.equal(raw, bounded)


def test_prefix_weight_by_plain_loops():
    for seed in range(20):
        seen = random_inputs(seed)
        expected = torch.ones_like(seen.log_ratios)
        for b, t in seen.mask.nonzero().tolist():
            before = [seen.log_ratios[b, s].item() for s in range(t + 1) if seen.mask[b, s]]
            root = math.sqrt(len(before))
            expected[b, t] = math.exp(min(max(sum(before), math.log(0.7) * root), math.log(1.6) * root))

        close(PrefixWeight(low=0.7, high=1.6).weigh(seen).bounded, expected)


# --------------------------------------------------------------------------------------------------------- ESS


def test_ess_weight_caps_tokens():
    # as ess_cap by hand: 2.2 C^2 - 6 C + 0.6 = 0
    raw, bounded, _ = ESSWeight(target=0.8).weigh(of_ratios([1.0, 9.0, None], [1.0, 1.0, None]))

    cap = (6 + math.sqrt(36 - 5.28)) / 4.4
    close(raw, torch.tensor([[1.0, 9.0, 1.0], [1.0, 1.0, 1.0]]))
    close(bounded, torch.tensor([[1.0, cap, 1.0], [1.0, 1.0, 1.0]]))


@pytest.mark.parametrize("scope", ["generation_batch", "micro_batch"])
@pytest.mark.parametrize("target", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_ess_weight_reaches_its_target_with_the_largest_cap(level, target, scope):
    for seed in range(3):
        seen = random_inputs(seed)
        raw, bounded, _ = ESSWeight(target=target, level=level, scope=scope).weigh(seen)
        by_row = raw.shape[1] == 1
        unit = seen.mask.any(-1, keepdim=True) if by_row else seen.mask

        units = raw[unit].tolist()

        close(bounded[unit], torch.tensor([min(r, plain.ess_cap(units, target)) for r in units]))
        assert plain.ess(bounded[unit].tolist()) >= target * (1 - 1e-6)


def test_ess_weight_leaves_healthy_weights_alone():
    raw, bounded, _ = ESSWeight(target=0.5).weigh(of_ratios([1.0, 1.2, 0.9, None]))

    assert torch.equal(raw, bounded)


@pytest.mark.parametrize("shape", [(0, 3), (3, 1), (2, 4)])
@pytest.mark.parametrize("level", WEIGHT_LEVELS)
@pytest.mark.parametrize(
    "make",
    [
        lambda level: TruncateWeight(max_weight=2.0, level=level),
        lambda level: ShapedWeight(gamma=1.0, level=level),
        lambda level: ESSWeight(level=level),
        lambda level: PrefixMinWeight(max_weight=2.0),
        lambda level: PrefixWeight(),
    ],
    ids=["truncate", "shaped", "ess", "prefix_min", "prefix"],
)
def test_nothing_trainable_weighs_one_before_its_bounds(make, level, shape):
    raw, bounded, _ = make(level).weigh(inputs(torch.full(shape, NAN)))

    assert torch.equal(raw, torch.ones(shape[0], raw.shape[1]))
    assert bounded.shape == raw.shape and bounded.isfinite().all()
