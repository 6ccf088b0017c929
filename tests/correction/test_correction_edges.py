"""Corrections at the edge: nothing to correct, nothing finite, huge ratios, other dtypes, odd ids, cut units."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import policy_batch
from property_cases import CORRECTIONS, KEEPS, on_policy_weight, terms_of

from trl_offpolicy import (
    Correction,
    DivergenceBand,
    ESSWeight,
    GroupRejection,
    Objective,
    OffPolicySequenceMask,
    OutlierVeto,
    PolicyBatch,
    RatioBand,
    RawWeight,
    StalenessBound,
    TruncateWeight,
    presets,
)
from trl_offpolicy.functional.masks import PROBABILITY_STATISTICS, divergence

NAN, INF = float("nan"), float("inf")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
every_correction = pytest.mark.parametrize("name", CORRECTIONS)
LOGPS = ("per_token_logps", "old_per_token_logps", "sampling_per_token_logps")


def a_batch(rows, length, trainable=True, **fields):
    """Log-probs that are multiples of 1/16 (exact in 8 bits of mantissa)."""
    generator = torch.Generator().manual_seed(rows + length)
    values = {name: -torch.randint(0, 48, (rows, length), generator=generator) / 16 for name in LOGPS}
    return PolicyBatch(
        **{
            **values,
            "completion_mask": torch.full((rows, length), trainable),
            "advantages": torch.linspace(-1, 1, rows),
            "rewards": torch.ones(rows),
            "group_ids": torch.arange(rows) // 3 - 1,
            "group_rewards": torch.tensor([1.0, 0.0]).expand(rows, 2),
            "policy_versions": torch.arange(rows) % 5,
            "current_version": 4,
            **fields,
        }
    )


def assert_finite(out, shape):
    assert out.weights.shape == out.keep_mask.shape == shape
    assert out.weights.isfinite().all()
    assert (out.weights.dtype, out.keep_mask.dtype) == (torch.float32, torch.bool)
    values = out.stats.compute()
    assert {key: value for key, value in values.items() if not math.isfinite(value)} == {}


@pytest.mark.parametrize("length", [1, 3])
@every_correction
def test_a_batch_without_rows(name, length):
    assert_finite(CORRECTIONS[name](a_batch(0, length)), (0, length))


@pytest.mark.parametrize("length", [1, 3])
@every_correction
def test_nothing_trainable(name, length):
    out = CORRECTIONS[name](a_batch(4, length, trainable=False))

    assert_finite(out, (4, length))
    assert not out.weights.any() and not out.keep_mask.any()


@every_correction
def test_one_row_of_one_token(name):
    assert_finite(CORRECTIONS[name](a_batch(1, 1)), (1, 1))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@every_correction
def test_nothing_finite_is_as_on_policy(name, bad):
    """Every ratio is unobserved: neutral, or dropped; also by statistics of the denominator's probability."""
    correction = CORRECTIONS[name]
    nothing = torch.full((6, 4), bad)
    batch = a_batch(6, 4, old_per_token_logps=nothing, sampling_per_token_logps=nothing, current_version=0)

    out = correction(batch)

    assert_finite(out, (6, 4))
    close(out.weights, torch.full((6, 4), on_policy_weight(correction)))
    assert out.keep_mask.all() if correction.nonfinite == "neutral" else not out.keep_mask.any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("statistic", PROBABILITY_STATISTICS)
@pytest.mark.parametrize("ratio", ["old/sampling", "current/old", "current/sampling"])
def test_probability_statistics_read_zero_where_either_policy_is_not_finite(ratio, statistic, bad):
    batch = policy_batch([[1.0, 1.0]], [[1.0, 1.0]])
    band = DivergenceBand(statistic=statistic, level="token", high=1e-6, ratio=ratio)
    for name in ("old_per_token_logps", "sampling_per_token_logps"):
        value = getattr(batch, name).clone()
        value[0, 1] = bad

        assert Correction(keep=(band,))(replace(batch, **{name: value})).keep_mask.all()


@every_correction
def test_huge_ratios(name):
    far = torch.tensor([-1e30, -1e4, -25.0, 0.0])
    batch = a_batch(4, 4, old_per_token_logps=far.expand(4, 4), sampling_per_token_logps=far.flip(0).expand(4, 4))

    for reach in (1.0, 1e30):
        assert_finite(
            CORRECTIONS[name](replace(batch, per_token_logps=-reach * torch.linspace(0, 1, 16).view(4, 4))), (4, 4)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_correction
def test_dtypes_of_log_probs(name, dtype):
    batch = a_batch(6, 5)
    expected = CORRECTIONS[name](batch)

    out = CORRECTIONS[name](replace(batch, **{field: getattr(batch, field).to(dtype) for field in LOGPS}))

    assert torch.equal(out.weights, expected.weights)
    assert torch.equal(out.keep_mask, expected.keep_mask)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_dtypes_of_ids_and_versions(dtype):
    terms = (RatioBand(level="token", low=0.4, high=3.0), RatioBand(level="turn", low=0.3, high=3.0), GroupRejection())
    correction = Correction(keep=(*terms, RatioBand(level="group", low=0.9, high=1.2), StalenessBound(max_lag=1)))
    turns = torch.tensor([[0, 0, 1, 2, 2]]).expand(6, 5)
    batch = a_batch(6, 5, group_ids=torch.arange(6) // 3, turn_ids=turns, policy_versions=torch.arange(6))

    small = {field: getattr(batch, field).to(dtype) for field in ("group_ids", "turn_ids", "policy_versions")}

    assert torch.equal(correction(replace(batch, **small)).keep_mask, correction(batch).keep_mask)


def test_a_version_ahead_of_the_trainer_is_not_stale():
    batch = a_batch(3, 2, policy_versions=torch.tensor([9, 4, 1], dtype=torch.uint8))

    assert Correction(keep=(StalenessBound(max_lag=2),))(batch).keep_mask[:, 0].tolist() == [True, True, False]


def test_ids_may_be_any_integers():
    band = Correction(keep=(RatioBand(level="group", low=0.5, high=2.0),))
    batch = policy_batch([[1.0], [8.0], [1.5], [8.0]])
    far = torch.tensor([-(2**63), 2**63 - 1, -(2**63), -1])

    assert band(replace(batch, group_ids=far)).keep_mask.flatten().tolist() == [True, False, True, False]


# --------------------------------------------------------------------------------- units that earlier terms cut


TURNS = [[2.0, 8.0, 3.0, None, 5.0]]  # turns of products 48 (6 without the second token) and 5


@pytest.mark.parametrize(
    ("measure_on", "expected"), [("remaining", [6.0, 1.0, 6.0, 0.0, 5.0]), ("original", [48.0, 48.0, 48.0, 0.0, 5.0])]
)
def test_a_dropped_token_does_not_cut_a_turn(measure_on, expected):
    keep = (RatioBand(level="token", low=None, high=6.5),)

    out = Correction(weight=RawWeight(level="turn"), keep=keep, measure_on=measure_on)(policy_batch(TURNS))

    close(out.weights, torch.tensor([expected]))
    assert out.keep_mask.tolist() == [[True, False, True, False, True]]


def test_a_token_that_is_not_finite_does_not_cut_a_turn():
    batch = policy_batch(TURNS)
    batch.sampling_per_token_logps[0, 1] = NAN

    for nonfinite, second in (("neutral", 6.0), ("drop", 1.0)):
        out = Correction(weight=RawWeight(level="turn"), nonfinite=nonfinite)(batch)
        close(out.weights, torch.tensor([[6.0, second, 6.0, 0.0, 5.0]]))


def test_turn_ids_of_the_batch_reach_the_terms():
    batch = replace(policy_batch(TURNS), turn_ids=torch.tensor([[0, 1, 1, 1, 1]]))

    close(Correction(weight=RawWeight(level="turn"))(batch).weights, torch.tensor([[2.0, 120.0, 120.0, 0.0, 120.0]]))


def test_group_rejection_counts_what_is_dropped_as_not_finite():
    batch = policy_batch([[1.0], [1.0], [9.0]], group_ids=torch.tensor([4, 4, 4]))
    batch.sampling_per_token_logps[0, 0] = NAN
    terms = (OutlierVeto(low=None, high=5.0), GroupRejection(max_dropped_fraction=0.5))

    assert Correction(keep=terms)(batch).keep_mask.flatten().tolist() == [True, True, False]  # 1 of 3
    assert not Correction(keep=terms, nonfinite="drop")(batch).keep_mask.any()  # 2 of 3
    assert Correction(keep=terms[1:], nonfinite="drop")(batch).keep_mask.flatten().tolist() == [False, True, True]


@pytest.mark.parametrize("measure_on", ["original", "remaining"])
def test_group_rejection_counts_only_the_terms_before_it(measure_on):
    batch = policy_batch([[1.0, 1.0], [9.0, 1.0], [0.1, 0.1]], group_ids=torch.tensor([0, 0, 0]))
    high, low = RatioBand(level="sequence", low=None, high=5.0), RatioBand(level="token", low=0.5, high=None)
    groups = GroupRejection(max_dropped_fraction=0.5)

    def kept(*terms):
        return Correction(keep=terms, measure_on=measure_on)(batch).keep_mask.any(-1).tolist()

    assert kept(high, groups, low) == [True, False, False]
    assert kept(high, low, groups) == [False, False, False]


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_the_ess_that_is_applied_reaches_the_target(target):
    batch = a_batch(8, 16)

    for level, key in (("token", "ess_token"), ("sequence", "ess_sequence")):
        stats = Correction(weight=ESSWeight(target=target, level=level))(batch).stats
        assert float(stats[f"weight/{key}"]) < target
        assert float(stats[f"weight_applied/{key}"]) == pytest.approx(target, rel=1e-5)


@pytest.mark.parametrize(
    ("measure_on", "cap"),
    [
        ("remaining", (4 + math.sqrt(16 - 6.82)) / 3.1),  # (2 + C)^2 = 0.85 * 3 * (2 + C^2)
        ("original", (8 + math.sqrt(64 - 31.36)) / 5.6),  # (2 + 2 C)^2 = 0.85 * 4 * (2 + 2 C^2)
    ],
)
def test_the_ess_cap_measures_what_is_left(measure_on, cap):
    keep = (RatioBand(level="token", low=None, high=5.0),)
    correction = Correction(weight=ESSWeight(target=0.85), keep=keep, measure_on=measure_on)

    out = correction(policy_batch([[1.0, 1.0, 9.0, 4.0]]))

    close(out.weights[out.keep_mask], torch.tensor([1.0, 1.0, cap]))


def test_every_keep_term_alone_and_together_only_drops():
    batch = a_batch(6, 6)
    together = Correction(keep=terms_of(KEEPS.values()))(batch).keep_mask
    for name in KEEPS:
        if name != "groups":
            assert not (together & ~CORRECTIONS[name](batch).keep_mask).any(), name
    weighed = Correction(weight=TruncateWeight(max_weight=1.5), keep=terms_of(KEEPS.values()))(batch)
    assert torch.equal(weighed.keep_mask, together)


OPPOSITE = [30.0, -25.0, 0.3, -4.9, 0.1]  # log-ratios that add up to 0.5; held within +-20 nats each they made -4.5
PRODUCT, GEOMETRIC = math.exp(0.5), math.exp(0.1)
BY_RESPONSE = {  # preset, weight, kept
    "verl": (presets.from_verl(rollout_is="sequence", rollout_is_threshold=5.0), PRODUCT, True),
    "skyrl": (presets.from_skyrl(tis_ratio_type="sequence"), PRODUCT, True),
    "skyrl product": (presets.from_skyrl(sequence_mask_metric="product"), 1.0, True),
    "skyrl geometric": (presets.from_skyrl(sequence_mask_metric="geometric", geo_mask_high=1.2), 1.0, True),
    "slime": (presets.from_slime(tis_level="sequence"), PRODUCT, True),
    "slime geometric": (presets.from_slime(tis_level="geometric", tis_mode="mask"), GEOMETRIC, True),
    "areal": (presets.from_areal(level="sequence", agg="sum", upper=2.0, lower=0.5), GEOMETRIC, True),
    "trl": (presets.from_trl(vllm_importance_sampling_mode="sequence_mask"), PRODUCT, True),
}


@pytest.mark.parametrize("name", BY_RESPONSE)
def test_extreme_tokens_of_one_response_add_up_before_anything_is_clamped(name):
    preset, weight, kept = BY_RESPONSE[name]
    sampling = torch.tensor([[-31.0, -2.0, -3.0, -2.0, -1.0]])
    old = sampling + torch.tensor([OPPOSITE])
    batch = PolicyBatch(
        per_token_logps=old.clone().requires_grad_(), old_per_token_logps=old, sampling_per_token_logps=sampling,
        completion_mask=torch.ones(1, 5).bool(), advantages=torch.ones(1),
    )  # fmt: skip

    out = preset.correction(batch)

    assert out.keep_mask.expand(1, 5).tolist() == [[kept] * 5]
    torch.testing.assert_close(out.weights.expand(1, 5), torch.full((1, 5), weight), rtol=1e-4, atol=0)


def test_divergences_are_of_log_ratios_held_within_20_nats_as_in_verl():
    held = divergence(torch.tensor([[30.0, -30.0]]), "k2")
    assert held.tolist() == [[200.0, 200.0]]
    assert divergence(torch.tensor([[30.0, -30.0]]), "k1").tolist() == [[-20.0, 20.0]]


def test_the_off_policy_mask_averages_log_ratios_as_they_are():
    """TRL and DeepSeek: the mean of log(mu / pi), here 7 nats over -35 and 21; held within 20 it is -0.5 nats."""
    log_ratios = torch.tensor([[-35.0, 21.0]])
    batch = PolicyBatch(
        per_token_logps=torch.full((1, 2), -40.0) + log_ratios, completion_mask=torch.ones(1, 2).bool(),
        sampling_per_token_logps=torch.full((1, 2), -40.0), advantages=-torch.ones(1),
    )  # fmt: skip
    out = Correction(keep=(OffPolicySequenceMask(max_divergence=1.0),))(batch)
    assert not out.keep_mask.any()


@pytest.mark.parametrize("bad", [NAN, -INF])
def test_without_terms_the_option_for_missing_logps_acts_on_old_over_sampling(bad):
    batch = policy_batch([[1.0, 2.0]])
    batch = replace(batch, sampling_per_token_logps=torch.tensor([[bad, -4.0]]))

    assert Correction(nonfinite="drop")(batch).keep_mask.tolist() == [[False, True]]
    assert Correction()(batch).keep_mask.tolist() == [[True, True]]
    with pytest.raises(ValueError, match="old and sampling log-probs must be finite"):
        Correction(nonfinite="raise")(batch)
    bypass = Objective(mode="bypass", correction=Correction(nonfinite="drop"))(batch)
    assert bypass.keep_mask.tolist() == [[False, True]]
    assert Correction(nonfinite="drop")(replace(batch, sampling_per_token_logps=None)).keep_mask.all()
