"""Correction: weights, keep mask, order of measurement, normalisation, and what is not finite.

Ratios are old/sampling unless said; None is padding, which holds NaN in every policy.
"""

import math
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import (
    BandWeight,
    Correction,
    DivergenceBand,
    OffPolicySequenceMask,
    OutlierVeto,
    PolicyBatch,
    RatioBand,
    RawWeight,
    ShapedWeight,
    TruncateWeight,
)

NAN, INF = float("nan"), float("inf")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

RATIOS = [[1.5, 8.0, 0.25], [0.5, 3.0, None], [None, None, None]]


def run(ratios, staleness=None, fields=None, **options):
    return Correction(**options)(policy_batch(ratios, staleness, **(fields or {})))


def weights_of(weight, ratios=RATIOS, staleness=None, **options):
    return run(ratios, staleness, weight=weight, **options).weights


# ---------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (TruncateWeight(max_weight=2.0), [[1.5, 2.0, 0.25], [0.5, 2.0, 0], [0, 0, 0]]),
        (TruncateWeight(max_weight=2.0, min_weight=0.4), [[1.5, 2.0, 0.4], [0.5, 2.0, 0], [0, 0, 0]]),
        (BandWeight(low=0.4, high=2.0), [[1.5, 0, 0], [0.5, 0, 0], [0, 0, 0]]),
        (BandWeight(low=None, high=2.0), [[1.5, 0, 0.25], [0.5, 0, 0], [0, 0, 0]]),
        (RawWeight(), [[1.5, 8.0, 0.25], [0.5, 3.0, 0], [0, 0, 0]]),
        # products 3 and 1.5; an empty row has weight 1 inside, but no token to put it on
        (TruncateWeight(level="sequence", max_weight=2.0), [[2.0, 2.0, 2.0], [1.5, 1.5, 0], [0, 0, 0]]),
        (BandWeight(level="sequence", low=0.4, high=2.0), [[0, 0, 0], [1.5, 1.5, 0], [0, 0, 0]]),
        (RawWeight(level="sequence"), [[3.0, 3.0, 3.0], [1.5, 1.5, 0], [0, 0, 0]]),
        # 3 ** (1/3) and 1.5 ** (1/2): over trainable tokens, not over 3 positions
        (
            RawWeight(level="sequence_mean"),
            [[3 ** (1 / 3)] * 3, [math.sqrt(1.5), math.sqrt(1.5), 0], [0, 0, 0]],
        ),
    ],
)
def test_weights_by_level(weight, expected):
    out = run(RATIOS, weight=weight)

    close(out.weights, torch.tensor(expected).float())
    assert out.weights.dtype == torch.float32
    assert torch.equal(out.keep_mask, ~policy_batch(RATIOS).per_token_logps.isnan())  # a weight drops nothing


def test_without_a_weight_every_trainable_token_weighs_one():
    out = run(RATIOS)

    assert out.weights.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert out.sequence_weights is None


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ("old/sampling", [[2.0, 3.0]]),
        ("current/old", [[5.0, 7.0]]),
        ("current/sampling", [[10.0, 21.0]]),
    ],
)
def test_each_ratio_is_numerator_over_denominator(ratio, expected):
    close(weights_of(RawWeight(ratio=ratio), [[2.0, 3.0]], [[5.0, 7.0]]), torch.tensor(expected))


def test_two_weights_on_distinct_ratios_multiply():
    weight = (
        TruncateWeight(max_weight=2.5),  # min(2, 2.5), min(3, 2.5)
        RawWeight(level="sequence", ratio="current/old"),  # 5 * 0.5 = 2.5
    )

    out = run([[2.0, 3.0]], [[5.0, 0.5]], weight=weight)

    close(out.weights, torch.tensor([[5.0, 6.25]]))
    assert out.sequence_weights is None


def test_two_sequence_weights_stay_compact():
    weight = (RawWeight(level="sequence"), RawWeight(level="sequence_mean", ratio="current/old"))

    out = run([[2.0, 3.0]], [[4.0, 1.0]], weight=weight)

    close(out.sequence_weights, torch.tensor([[12.0]]))  # 6 * sqrt(4)
    close(out.weights, torch.tensor([[12.0, 12.0]]))


def test_sequence_weights_are_given_where_all_weights_are_constant_over_the_sequence():
    close(run(RATIOS, weight=RawWeight(level="sequence")).sequence_weights, torch.tensor([[3.0], [1.5], [1.0]]))
    assert run(RATIOS, weight=RawWeight()).sequence_weights is None


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_one_token_sequences_weigh_the_same_at_every_level(level):
    out = run([[3.0], [0.5], [None]], weight=TruncateWeight(level=level, max_weight=2.0))

    close(out.weights, torch.tensor([[2.0], [0.5], [0.0]]))


def test_extreme_ratios_are_clamped_at_20_nats():
    batch = policy_batch([[1.0, 1.0]], sampling_per_token_logps=torch.tensor([[-104.0, 96.0]]))

    close(Correction(weight=RawWeight())(batch).weights, torch.tensor([[math.exp(20), math.exp(-20)]]))


def test_old_is_the_current_policy_where_absent():
    batch = replace(policy_batch([[2.0, 3.0]], [[5.0, 7.0]]), old_per_token_logps=None)

    close(Correction(weight=RawWeight())(batch).weights, torch.tensor([[10.0, 21.0]]))
    assert Correction(weight=RawWeight(ratio="current/old"))(batch).weights.tolist() == [[1.0, 1.0]]


# ------------------------------------------------------------------------------------------------- keep terms


@pytest.mark.parametrize(
    ("term", "kept"),
    [
        (RatioBand(level="token", low=0.4, high=4.0), [[1, 0, 0], [1, 1, 0], [0, 0, 0]]),
        (RatioBand(level="token", low=None, high=4.0), [[1, 0, 1], [1, 1, 0], [0, 0, 0]]),
        (RatioBand(level="token", low=0.4, high=None), [[1, 1, 0], [1, 1, 0], [0, 0, 0]]),
        (RatioBand(level="sequence", low=0.5, high=2.0), [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),  # 3; 1.5
        (RatioBand(level="sequence", low=2.0, high=None), [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        (RatioBand(level="sequence_mean", low=1.23, high=1.43), [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (
            RatioBand(level="sequence_mean", low=1.22, high=1.44),
            [[0, 0, 0], [1, 1, 0], [0, 0, 0]],
        ),  # 1.442; 1.225
        (OutlierVeto(low=None, high=4.0), [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        (OutlierVeto(low=0.4, high=None), [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        (OutlierVeto(low=0.6, high=10.0), [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        (
            DivergenceBand(statistic="k1", level="token", high=0.5),
            [[1, 1, 0], [0, 1, 0], [0, 0, 0]],
        ),  # -log rho
        (
            DivergenceBand(statistic="k1", low=-0.3, high=0.1),
            [[0, 0, 0], [1, 1, 0], [0, 0, 0]],
        ),  # -0.37; -0.20
        (
            DivergenceBand(statistic="k2", level="sequence", high=1.0),
            [[0, 0, 0], [1, 1, 0], [0, 0, 0]],
        ),  # 3.2; 0.84
        (DivergenceBand(statistic="k3", high=0.6), [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),  # 1.88; 0.55
    ],
)
def test_keep_terms(term, kept):
    out = run(RATIOS, keep=(term,))

    assert out.keep_mask.dtype == torch.bool
    assert out.keep_mask.int().tolist() == kept
    assert out.weights.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]  # dropping is not a weight


def test_keep_terms_are_anded():
    out = run(
        [[1.0, 8.0], [1.0, 1.0], [0.1, 1.0]],
        keep=(RatioBand(level="token", low=None, high=4.0), OutlierVeto(low=0.5, high=None)),
    )

    assert out.keep_mask.tolist() == [[True, False], [True, True], [False, False]]


def test_a_weight_and_a_keep_term_work_side_by_side():
    out = run(
        [[1.5, 8.0]],
        weight=TruncateWeight(max_weight=2.0),
        keep=(RatioBand(level="token", low=None, high=4.0),),
    )

    assert out.keep_mask.tolist() == [[True, False]]
    close(out.weights, torch.tensor([[1.5, 2.0]]))


# mean log(mu / pi): row 0: log 2 - log 1.5 = 0.288, row 1: log 4 = 1.386, row 2: -log 4
DRIFT = {"ratios": [[0.5, 1.5], [0.5, 0.5], [4.0, 4.0]], "staleness": [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0]]}


@pytest.mark.parametrize(
    ("advantages", "kept"),
    [
        ([-1.0, -1.0, -1.0], [[True, True], [False, False], [True, True]]),
        ([1.0, 1.0, 1.0], [[True, True], [True, True], [True, True]]),
        ([-1.0, 0.0, -1.0], [[True, True], [True, True], [True, True]]),
        ([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]], [[True, True], [False, True], [True, True]]),
    ],
)
def test_off_policy_sequence_mask_reads_the_sign_of_the_advantage(advantages, kept):
    term = OffPolicySequenceMask(max_divergence=0.5)

    out = run(DRIFT["ratios"], DRIFT["staleness"], {"advantages": torch.tensor(advantages)}, keep=(term,))

    assert out.keep_mask.tolist() == kept


def test_off_policy_sequence_mask_of_staleness_only():
    term = OffPolicySequenceMask(max_divergence=0.7, ratio="current/old")  # row 1: log 2 = 0.693

    out = run(DRIFT["ratios"], DRIFT["staleness"], {"advantages": -torch.ones(3)}, keep=(term,))

    assert out.keep_mask.all()


# ----------------------------------------------------------------------------------------- order of measuring

TOKEN_BAND = RatioBand(level="token", low=0.5, high=2.0)


def test_sequence_weight_after_a_token_band_measures_what_is_left():
    """SkyRL's example: token ratios (1.5, 8), band [0.5, 2]: the sequence weight is 1.5, not 12."""
    options = {"weight": TruncateWeight(level="sequence", max_weight=10.0), "keep": (TOKEN_BAND,)}

    remaining = run([[1.5, 8.0]], measure_on="remaining", **options)
    original = run([[1.5, 8.0]], measure_on="original", **options)

    close(remaining.weights, torch.tensor([[1.5, 1.5]]))
    close(original.weights, torch.tensor([[10.0, 10.0]]))  # min(12, 10)
    assert remaining.keep_mask.tolist() == original.keep_mask.tolist() == [[True, False]]


def test_original_is_the_default():
    assert Correction().measure_on == "original"


@pytest.mark.parametrize(
    ("measure_on", "keep", "expected"),
    [  # the product is 12; without the second token 1.5
        ("original", (TOKEN_BAND, RatioBand(level="sequence", low=None, high=2.0)), [[False, False]]),
        ("remaining", (TOKEN_BAND, RatioBand(level="sequence", low=None, high=2.0)), [[True, False]]),
        ("remaining", (RatioBand(level="sequence", low=None, high=2.0), TOKEN_BAND), [[False, False]]),
        ("remaining", (TOKEN_BAND, OutlierVeto(low=None, high=4.0)), [[True, False]]),
        ("original", (TOKEN_BAND, OutlierVeto(low=None, high=4.0)), [[False, False]]),
    ],
)
def test_order_of_keep_terms(measure_on, keep, expected):
    assert run([[1.5, 8.0]], keep=keep, measure_on=measure_on).keep_mask.tolist() == expected


# ---------------------------------------------------------------------------------------------- normalisation


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("none", [[1.0, 2.0], [3.0, 0.0]]),
        ("original", [[0.5, 1.0], [1.5, 0.0]]),  # mean (1 + 2 + 3) / 3 trainable tokens = 2, after the cap
        ("kept", [[2 / 3, 4 / 3], [2.0, 0.0]]),  # mean (1 + 2) / 2 kept tokens = 1.5
    ],
)
def test_token_weights_are_normalised_over_tokens(normalize, expected):
    out = run(
        [[1.0, 2.0], [30.0, None]],
        weight=TruncateWeight(max_weight=3.0),
        keep=(RatioBand(level="token", low=None, high=4.0),),
        normalize=normalize,
    )

    close(out.weights, torch.tensor(expected))


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        (
            "original",
            [[0.75] * 3, [0.25, 0, 0], [2.0, 2.0, 0], [0, 0, 0]],
        ),  # mean (3 + 1 + 8) / 3 sequences = 4
        ("kept", [[1.5] * 3, [0.5, 0, 0], [4.0, 4.0, 0], [0, 0, 0]]),  # mean (3 + 1) / 2 kept = 2
    ],
)
def test_sequence_weights_are_normalised_over_sequences_with_tokens(normalize, expected):
    out = run(
        [[3.0, 1.0, 1.0], [1.0, None, None], [2.0, 4.0, None], [None, None, None]],
        weight=RawWeight(level="sequence"),
        keep=(RatioBand(level="sequence", low=None, high=4.0),),
        normalize=normalize,
    )

    close(out.weights, torch.tensor(expected).float())


def test_normalisation_of_rejected_and_of_vanishing_weights_divides_by_one():
    everything = RatioBand(level="sequence", low=None, high=0.5)

    close(
        run([[2.0, 4.0]], weight=RawWeight(), keep=(everything,), normalize="kept").weights,
        torch.tensor([[2.0, 4.0]]),
    )
    assert weights_of(BandWeight(low=None, high=0.5), [[2.0, 4.0]], normalize="original").tolist() == [[0.0, 0.0]]
    close(weights_of(RawWeight(), [[3e-9, 6e-9]], normalize="original"), torch.tensor([[3e-9, 6e-9]]))
    assert run([[None, None]], weight=RawWeight(), normalize="kept").weights.tolist() == [[0.0, 0.0]]


def test_small_weights_above_the_floor_are_normalised():
    close(weights_of(RawWeight(), [[3e-8, 5e-8]], normalize="original"), torch.tensor([[0.75, 1.25]]))


def test_normaliser_sums_over_ranks(monkeypatch):
    def other_rank_has_sum_6_over_1(total):
        total += torch.tensor([6.0, 1.0], dtype=total.dtype)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", other_rank_has_sum_6_over_1)

    out = run([[1.0, 2.0]], weight=RawWeight(), normalize="original")

    close(out.weights, torch.tensor([[1 / 3, 2 / 3]]))  # (1 + 2 + 6) / (2 + 1) = 3


# ------------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("field", ["sampling_per_token_logps", "old_per_token_logps"])
def test_a_token_that_is_not_finite_is_neutral_or_dropped(field, bad):
    batch = policy_batch([[4.0, 9.0]])
    getattr(batch, field)[0, 1] = bad

    def corrected(**options):
        return Correction(weight=RawWeight(level="sequence_mean"), **options)(batch)

    neutral, dropped = corrected(), corrected(nonfinite="drop")
    close(neutral.weights, torch.tensor([[2.0, 2.0]]))  # (4 * 1) ** (1/2): ratio 1
    assert neutral.keep_mask.tolist() == [[True, True]]
    close(dropped.weights, torch.tensor([[4.0, 4.0]]))  # 4 ** (1/1)
    assert dropped.keep_mask.tolist() == [[True, False]]
    with pytest.raises(ValueError, match="old and sampling log-probs must be finite on trainable tokens"):
        corrected(nonfinite="raise")


def test_a_neutral_token_weighs_one():
    batch = policy_batch([[4.0, 9.0]])
    batch.sampling_per_token_logps[0, 1] = NAN

    close(Correction(weight=RawWeight())(batch).weights, torch.tensor([[4.0, 1.0]]))


@pytest.mark.parametrize("nonfinite", ["neutral", "drop", "raise"])
def test_padding_that_is_not_finite_is_nobodys_business(nonfinite):
    out = run([[4.0, None]], weight=RawWeight(), nonfinite=nonfinite)  # NaN on padding

    close(out.weights, torch.tensor([[4.0, 0.0]]))
    assert out.keep_mask.tolist() == [[True, False]]


def test_only_the_ratios_that_are_read_count():
    batch = policy_batch([[4.0, 9.0]])
    batch.old_per_token_logps[0, 1] = NAN
    total = TruncateWeight(max_weight=2.0, ratio="current/sampling")

    assert Correction(weight=total, nonfinite="drop")(batch).keep_mask.all()
    Correction(weight=total, nonfinite="raise")(batch)
    both = (RawWeight(), RawWeight(ratio="current/old"))
    assert Correction(weight=both, nonfinite="drop")(batch).keep_mask.tolist() == [[True, False]]


def test_keep_terms_do_not_measure_dropped_tokens():
    batch = policy_batch([[4.0, 9.0]])
    batch.sampling_per_token_logps[0, 1] = NAN
    band = RatioBand(level="sequence_mean", low=None, high=3.0)

    assert Correction(keep=(band,))(batch).keep_mask.tolist() == [[True, True]]  # neutral: 4 ** (1/2) = 2
    assert Correction(keep=(band,), nonfinite="drop")(batch).keep_mask.tolist() == [[False, False]]  # 4


# ----------------------------------------------------------------------------------------- invariants, errors

EVERYTHING = {
    "weight": (TruncateWeight(max_weight=2.0), RawWeight(level="sequence", ratio="current/old")),
    "keep": (
        OutlierVeto(low=1e-4, high=100.0),
        RatioBand(level="token", low=0.1, high=10.0),
        DivergenceBand(statistic="k3", high=5.0),
        OffPolicySequenceMask(max_divergence=0.5),
    ),
    "normalize": "kept",
    "normalize_over": "micro_batch",
    "measure_on": "remaining",
}


def test_nothing_carries_gradient():
    batch = policy_batch(RATIOS, [[2.0, 1.0, 0.5], [1.0, 3.0, None], [None, None, None]])
    assert batch.per_token_logps.requires_grad

    out = Correction(**EVERYTHING)(batch)

    assert not out.weights.requires_grad
    assert not out.keep_mask.requires_grad
    assert not any(stat.value.requires_grad for stat in out.stats.values())
    sequence = run(RATIOS, weight=RawWeight(level="sequence", ratio="current/old"))
    assert not sequence.sequence_weights.requires_grad


def test_inputs_are_not_mutated():
    batch = policy_batch(RATIOS, rewards=torch.tensor([1.0, NAN, 0.0]))
    before = {item.name: value.clone() for item in fields(batch) if (value := getattr(batch, item.name)) is not None}

    Correction(**EVERYTHING, nonfinite="drop")(batch)

    for name, value in before.items():
        assert torch.equal(value.nan_to_num(nan=77.0), getattr(batch, name).nan_to_num(nan=77.0)), name


@pytest.mark.parametrize("normalize", ["none", "original", "kept"])
def test_weights_and_keep_are_zero_outside_the_mask(normalize):
    out = run(RATIOS, weight=RawWeight(level="sequence"), keep=(TOKEN_BAND,), normalize=normalize)
    padding = policy_batch(RATIOS).per_token_logps.isnan()

    assert out.weights[padding].tolist() == [0.0] * 4
    assert not out.keep_mask[padding].any()


def test_zero_one_masks_and_bfloat16_are_accepted():
    batch = PolicyBatch(
        per_token_logps=torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16),
        sampling_per_token_logps=torch.tensor([[-1.5, -2.0]], dtype=torch.bfloat16),
        completion_mask=torch.tensor([[1, 0]]),
        advantages=torch.ones(1, dtype=torch.bfloat16),
    )

    close(Correction(weight=RawWeight())(batch).weights, torch.tensor([[math.exp(0.5), 0.0]]))


@pytest.mark.parametrize(
    "options",
    [
        {"weight": TruncateWeight(max_weight=2.0)},
        {"keep": (RatioBand(low=0.9, high=1.1),)},
        {"keep": (OffPolicySequenceMask(max_divergence=0.1),)},
    ],
)
def test_missing_sampling_log_probs_are_an_error_where_they_are_read(options):
    batch = replace(policy_batch([[1.0]]), sampling_per_token_logps=None)

    with pytest.raises(ValueError, match=r"^sampling_per_token_logps must be given, because the correction reads"):
        Correction(**options)(batch)


def test_missing_sampling_log_probs_are_fine_where_nothing_reads_them():
    batch = replace(policy_batch([[1.0, 1.0]], [[3.0, 1.0]]), sampling_per_token_logps=None)

    close(Correction(weight=RawWeight(ratio="current/old"))(batch).weights, torch.tensor([[3.0, 1.0]]))
    assert Correction()(batch).keep_mask.all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"normalize": "batch"},
            ValueError,
            r"^normalize must be one of \['none', 'original', 'kept'\], but got 'batch'",
        ),
        ({"normalize": "kept"}, ValueError, "^normalize must be 'none' without a weight, but got 'kept'"),
        (
            {"measure_on": "all"},
            ValueError,
            r"^measure_on must be one of \['original', 'remaining'\], but got 'all'",
        ),
        (
            {"nonfinite": "zero"},
            ValueError,
            r"^nonfinite must be one of \['neutral', 'drop', 'raise'\], but got 'zero'",
        ),
        (
            {"measure": ("mismatch", "mu")},
            ValueError,
            r"^measure must name some of .*'kept'.*, but got 'mu'",
        ),
        ({"keep": [TOKEN_BAND]}, TypeError, "^keep must be a tuple of keep terms"),
        ({"keep": TOKEN_BAND}, TypeError, "^keep must be a tuple of keep terms"),
        ({"keep": (RawWeight(),)}, TypeError, "^keep must be a tuple of keep terms"),
        ({"weight": [RawWeight()]}, TypeError, "^weight must be a weight, a tuple of weights or None"),
        ({"weight": TOKEN_BAND}, TypeError, "^weight must be a weight, a tuple of weights or None"),
        ({"weight": 2.0}, TypeError, "^weight must be a weight, a tuple of weights or None"),
        ({"correct_threshold": "1"}, ValueError, "^correct_threshold must be a finite number, but got '1'"),
        ({"correct_threshold": True}, ValueError, "^correct_threshold must be a finite number"),
        (
            {"weight": (RawWeight(), TruncateWeight(max_weight=2.0))},
            ValueError,
            r"^weight must name each ratio once, but got \['old/sampling', 'old/sampling'\]",
        ),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        Correction(**options)


def test_it_is_frozen_and_has_no_positional_options():
    with pytest.raises(FrozenInstanceError):
        Correction().normalize = "kept"
    with pytest.raises(TypeError):
        Correction(RawWeight())


def test_what_it_needs():
    staleness = RawWeight(ratio="current/old")

    assert Correction().required_ratios == frozenset()
    assert not Correction(weight=staleness).needs_sampling
    both = Correction(weight=staleness, keep=(TOKEN_BAND,))
    assert both.required_ratios == {"current/old", "old/sampling"}
    assert both.needs_sampling


def test_scope():
    assert Correction(weight=RawWeight(), keep=(TOKEN_BAND,)).scope == "row"
    assert Correction(weight=RawWeight(), normalize="original").scope == "generation_batch"


# ------------------------------------------------------------------------------------------------------- cut mass


@pytest.mark.parametrize(
    ("weight", "truncated", "cut"),
    [
        (TruncateWeight(max_weight=2.0), 2 / 4, (2 + 1) / (4 + 1 + 3 + 0.5)),  # rho is 4, 1 | 3, 0.5
        (TruncateWeight(max_weight=2.0, min_weight=0.75), 3 / 4, 3 / 8.5),  # a floor gives nothing back
        (TruncateWeight(max_weight=2.0, level="sequence"), 1 / 2, 2 / (4 + 1.5)),  # the products are 4 and 1.5
        (BandWeight(low=0.75, high=3.5), 2 / 4, (4 + 0.5) / 8.5),
        (RawWeight(), 0.0, 0.0),
        (ShapedWeight(gamma=0.5), 0.0, 0.0),
    ],
)
def test_what_caps_take_away(weight, truncated, cut):
    ratios = torch.tensor([[4.0, 1.0, 7.0], [3.0, 0.5, 7.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    batch = PolicyBatch(
        per_token_logps=torch.full((3, 3), -9.0) + ratios.log(),
        sampling_per_token_logps=torch.full((3, 3), -9.0),
        completion_mask=mask,
        advantages=torch.ones(3),
    )
    stats = Correction(weight=weight)(batch).stats
    assert float(stats["weight/truncated_fraction"]) == pytest.approx(truncated, rel=1e-5)
    assert float(stats["weight/cut_mass"]) == pytest.approx(cut, rel=1e-5)
