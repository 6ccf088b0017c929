"""What a correction reports: which groups, over which tokens, in which unit."""

import math
from dataclasses import replace

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import (
    BandWeight,
    Correction,
    DivergenceBand,
    OffPolicySequenceMask,
    OutlierVeto,
    RatioBand,
    RawWeight,
    ShapedWeight,
    TruncateWeight,
)
from trl_offpolicy.correction.measure import CORE_DIAGNOSTICS, term_names
from trl_offpolicy.functional.diagnostics import RATIO_DIAGNOSTICS

NAN = float("nan")
L = math.log(2)
SEQUENCE_BAND = RatioBand(level="sequence", low=None, high=4.0)
TOKEN_BAND = RatioBand(level="token", low=0.4, high=3.0)


def stats_of(ratios, staleness=None, fields=None, **options):
    return Correction(**options)(policy_batch(ratios, staleness, **(fields or {}))).stats


def groups_of(batch, **options):
    return {key.split("/")[1] for key in Correction(**options)(batch).stats}


def value(stats, key):
    return float(stats[key])


# ----------------------------------------------------------------------------------------------------- ratios


@pytest.mark.parametrize(
    ("group", "kl_k1", "ppl_sampling", "ppl_old"),
    [  # ratio 2, staleness 4; log-probs: sampling -4 - L, old -4, current -4 + 2L
        ("mismatch", -L, math.exp(4) * 2, math.exp(4)),
        ("kept", -L, math.exp(4) * 2, math.exp(4)),
        ("staleness", -2 * L, math.exp(4), math.exp(4) / 4),
        ("total", -3 * L, math.exp(4) * 2, math.exp(4) / 4),
    ],
)
def test_each_group_compares_its_two_policies(group, kl_k1, ppl_sampling, ppl_old):
    stats = stats_of([[2.0, 2.0]], [[4.0, 4.0]])

    assert value(stats, f"{group}/kl_k1") == pytest.approx(kl_k1, abs=1e-6)
    assert value(stats, f"{group}/ppl_sampling") == pytest.approx(ppl_sampling, rel=1e-5)
    assert value(stats, f"{group}/ppl_old") == pytest.approx(ppl_old, rel=1e-5)


def test_each_ratio_group_has_every_diagnostic():
    stats = stats_of([[2.0]], weight=RawWeight(), keep=(TOKEN_BAND,))

    for group in ("mismatch", "staleness", "total", "kept"):
        names = {key.removeprefix(f"offpolicy/{group}/") for key in stats if key.startswith(f"offpolicy/{group}/")}
        assert names == {*RATIO_DIAGNOSTICS, "product_variance"}


RATIOS = [[2.0, 8.0], [0.5, 1.0]]  # products 16 and 1/2
KEPT = {
    "whole sequences": ({"keep": (SEQUENCE_BAND,)}, L / 2),  # row 1: -(-L + 0) / 2
    "tokens": ({"keep": (TOKEN_BAND,)}, 0.0),  # 2, 0.5, 1: -(L - L + 0) / 3
    "both": ({"keep": (TOKEN_BAND, SEQUENCE_BAND)}, L / 2),
    "nothing dropped": ({}, -3 * L / 4),  # -(L + 3L - L + 0) / 4
}


@pytest.mark.parametrize("case", KEPT)
def test_kept_measures_what_was_kept(case):
    options, kl_k1 = KEPT[case]

    stats = stats_of(RATIOS, **options)

    assert value(stats, "kept/kl_k1") == pytest.approx(kl_k1, abs=1e-6)
    assert value(stats, "mismatch/kl_k1") == pytest.approx(-3 * L / 4, abs=1e-6)  # before rejection


def test_kept_of_dropped_sequences_forgets_their_extremes():
    stats = stats_of(RATIOS, keep=(SEQUENCE_BAND,))

    assert value(stats, "mismatch/logp_diff_max") == pytest.approx(3 * L, abs=1e-6)
    assert value(stats, "kept/logp_diff_max") == pytest.approx(L, abs=1e-6)


def test_tokens_that_are_not_finite_are_counted_and_left_out():
    batch = policy_batch([[2.0, 2.0, 2.0], [2.0, None, None]])
    batch.sampling_per_token_logps[0, 1] = NAN

    neutral, dropped = (
        Correction()(batch).stats,
        Correction(keep=(TOKEN_BAND,), nonfinite="drop")(batch).stats,
    )

    for stats in (neutral, dropped):
        assert value(stats, "mismatch/nonfinite_fraction") == 0.25  # 1 of 4
        assert value(stats, "mismatch/kl_k1") == pytest.approx(-L, abs=1e-6)  # of 3
        assert value(stats, "staleness/nonfinite_fraction") == 0.0
    assert value(neutral, "kept/nonfinite_fraction") == 0.25
    assert value(Correction(weight=RawWeight(), nonfinite="drop")(batch).stats, "kept/nonfinite_fraction") == 0.0


def test_groups_follow_the_policies_that_are_there():
    full = policy_batch([[2.0, 2.0]], [[4.0, 4.0]])
    no_old, no_sampling = (
        replace(full, old_per_token_logps=None),
        replace(full, sampling_per_token_logps=None),
    )

    assert groups_of(full) == {"mismatch", "kept", "staleness", "total"}
    assert groups_of(no_old) == {"mismatch", "kept", "total"}
    assert groups_of(no_sampling) == {"staleness"}
    assert groups_of(replace(no_old, sampling_per_token_logps=None)) == set()
    for key in ("mismatch/kl_k1", "total/kl_k1"):  # old is the current policy: current/sampling
        assert value(Correction()(no_old).stats, key) == pytest.approx(-3 * L, abs=1e-6)


@pytest.mark.parametrize("group", ["mismatch", "kept", "staleness", "total"])
def test_measure_asks_for_one_group_alone(group):
    batch = policy_batch([[2.0, 2.0]], [[4.0, 4.0]])

    alone = Correction(measure=(group,))(batch).stats

    assert groups_of(batch, measure=(group,)) == {group}
    whole = Correction()(batch).stats
    assert all(value(alone, key) == value(whole, key) for key in alone)


def test_total_alone_without_old_log_probs():
    """With version lag and no old log-probs the mismatch is unknown, current/sampling is not."""
    batch = replace(policy_batch([[2.0, 2.0]]), old_per_token_logps=None)

    stats = Correction(measure=("total",))(batch).stats

    assert {key.split("/")[1] for key in stats} == {"total"}
    assert value(stats, "total/kl_k1") == pytest.approx(-L, abs=1e-6)


@pytest.mark.parametrize("keep", [(), (SEQUENCE_BAND,), (TOKEN_BAND,)])
@pytest.mark.parametrize("measure", ["core", ("mismatch", "kept", "staleness", "total", "core")])
def test_core_gives_the_same_numbers_of_fewer_diagnostics(measure, keep):
    ratios = [[2.0, 0.5, 3.0], [0.25, 1.0, None], [None, None, None], [8.0, 0.1, 1.5]]
    fields = {"group_ids": torch.tensor([0, 0, 1, 1])}
    options = {"keep": keep, "weight": TruncateWeight(max_weight=2.0)}
    core = stats_of(ratios, ratios[::-1], fields, measure=measure, **options)
    whole = stats_of(ratios, ratios[::-1], fields, **options)
    names = {key.split("/", 2)[2] for key in core if key.split("/")[1] in ("mismatch", "total", "kept", "staleness")}
    assert names == {*CORE_DIAGNOSTICS, "product_variance"}
    groups = {"mismatch", "total"} if measure == "core" else {"mismatch", "kept", "staleness", "total"}
    assert {key.split("/")[1] for key in core} & {"mismatch", "kept", "staleness", "total"} == groups
    ours, theirs = core.compute(), whole.compute()
    assert {"offpolicy/mismatch/kl_k1_ci95", "offpolicy/mismatch/ess_sequence_ci95"} <= ours.keys() <= theirs.keys()
    for key, number in ours.items():
        assert number == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key
    assert any(abs(number) > 0.1 for key, number in ours.items() if "/mismatch/" in key)


def test_core_stats_of_micro_batches_merge():
    parts = [stats_of([[2.0, 0.5]], measure="core"), stats_of([[3.0, None]], measure="core")]
    both = stats_of([[2.0, 0.5], [3.0, None]], measure="core")
    assert parts[0].merge(parts[1]).compute() == pytest.approx(both.compute(), rel=1e-6)


def test_levels_are_tuples_of_groups():
    assert Correction(measure="full") == Correction()
    assert Correction(measure="off").measure == ()
    early, late = Correction(measure="core", keep=(OffPolicySequenceMask(max_divergence=0.1),)).split()
    assert early.measure == ("mismatch", "core") and late.measure == ("total", "core")
    with pytest.raises(ValueError, match=r"measure must be one of \['full', 'core', 'off'\] or a tuple .* got 'some'"):
        Correction(measure="some")


def test_measuring_nothing():
    assert len(stats_of(RATIOS, measure=())) == 0


# ---------------------------------------------------------------------------------------------------- weights


def test_weight_is_raw_and_weight_applied_is_what_multiplies_the_loss():
    stats = stats_of([[1.0, 8.0], [3.0, None]], weight=TruncateWeight(max_weight=2.0), normalize="original")

    assert value(stats, "weight/mean") == pytest.approx(4.0, abs=1e-6)  # (1 + 8 + 3) / 3
    assert value(stats, "weight/max") == pytest.approx(8.0, abs=1e-5)
    assert value(stats, "weight/normalizer") == pytest.approx(5 / 3, abs=1e-6)  # (1 + 2 + 2) / 3
    assert value(stats, "weight_applied/mean") == pytest.approx(1.0, abs=1e-6)
    assert value(stats, "weight_applied/max") == pytest.approx(1.2, abs=1e-6)  # 2 / (5/3)
    assert value(stats, "weight_applied/min") == pytest.approx(0.6, abs=1e-6)
    assert value(stats, "weight_applied/ess_token") == pytest.approx(25 / 27, abs=1e-6)  # 5^2 / (3 (1 + 4 + 4))


def test_weight_applied_is_over_kept_tokens():
    stats = stats_of([[1.0, 8.0], [2.0, None]], weight=RawWeight(), keep=(TOKEN_BAND,))

    assert value(stats, "weight/mean") == pytest.approx(11 / 3, abs=1e-6)
    assert value(stats, "weight_applied/mean") == pytest.approx(1.5, abs=1e-6)
    assert value(stats, "weight_applied/max") == pytest.approx(2.0, abs=1e-6)


def test_two_weights_report_their_product():
    weight = (TruncateWeight(max_weight=2.0), RawWeight(ratio="current/old"))

    stats = stats_of([[4.0]], [[3.0]], weight=weight)

    assert value(stats, "weight/mean") == pytest.approx(12.0, abs=1e-5)
    assert value(stats, "weight_applied/mean") == pytest.approx(6.0, abs=1e-6)


@pytest.mark.parametrize(
    ("weight", "fraction"),
    [
        (TruncateWeight(max_weight=2.0), 0.5),  # 8 and 3 of 4 trainable tokens
        (TruncateWeight(max_weight=2.0, min_weight=1.0), 0.75),  # and 0.5
        (BandWeight(low=0.4, high=None), 0.0),
        (TruncateWeight(level="sequence", max_weight=2.0), 0.5),  # 8 of (8, 1.5): sequences with tokens
        (RawWeight(), 0.0),
    ],
)
def test_truncated_fraction_counts_trainable_units(weight, fraction):
    stats = stats_of([[1.0, 8.0], [0.5, 3.0], [None, None]], weight=weight)

    assert value(stats, "weight/truncated_fraction") == fraction


def test_a_shaped_weight_truncates_nothing_alone_or_beside_another():
    batch = policy_batch([[0.5, 3.0, 1.0]], staleness=[[3.0, 1.0, 1.0]])
    shaped, capped = ShapedWeight(gamma=0.5), TruncateWeight(max_weight=2.0, ratio="current/old")

    for weight in (shaped, (shaped, capped), (capped, shaped)):
        assert value(Correction(weight=weight)(batch).stats, "weight/truncated_fraction") == 0.0
    assert value(Correction(weight=capped)(batch).stats, "weight/truncated_fraction") == pytest.approx(1 / 3)


def test_normalizer_is_one_without_normalisation():
    assert value(stats_of([[8.0]], weight=RawWeight()), "weight/normalizer") == 1.0


def test_sequence_weights_count_each_token_and_each_sequence():
    stats = stats_of([[2.0, 2.0], [0.5, None], [None, None]], weight=RawWeight(level="sequence"))

    assert value(stats, "weight/mean") == pytest.approx(8.5 / 3, abs=1e-6)  # tokens 4, 4, 0.5
    assert value(stats, "weight/ess_sequence") == pytest.approx(4.5**2 / (2 * 16.25), abs=1e-6)  # 4, 0.5
    assert value(stats, "weight/min") == pytest.approx(0.5, abs=1e-6)


def test_no_weight_no_weight_stats():
    assert not any(key.startswith("offpolicy/weight") for key in stats_of(RATIOS))


# ------------------------------------------------------------------------------------------------------- keep

# Token band [0.4, 3]: row 0 loses one token, row 1 all of them, row 2 none, row 3 is empty.
KEEP_RATIOS = [[1.0, 8.0, 1.0], [0.1, 9.0, None], [2.0, None, None], [None, None, None]]


def test_dropped_fractions():
    stats = stats_of(KEEP_RATIOS, keep=(TOKEN_BAND,))

    assert value(stats, "keep/dropped_token_fraction") == 0.5  # 3 of 6
    assert value(stats, "keep/dropped_sequence_fraction") == pytest.approx(1 / 3)  # row 1 of 3 with tokens


def test_rewards_of_dropped_sequences():
    rewards = torch.tensor([5.0, 0.25, 7.0, 9.0])

    stats = stats_of(KEEP_RATIOS, fields={"rewards": rewards}, keep=(TOKEN_BAND,), correct_threshold=0.25)

    assert value(stats, "keep/dropped_reward_mean") == 0.25  # row 1 alone
    assert value(stats, "keep/dropped_correct_fraction") == 1.0  # reward >= threshold


def test_correct_fraction_is_a_share_of_dropped_sequences():
    rewards = torch.tensor([1.0, 0.0, NAN, 0.5])

    stats = stats_of([[9.0]] * 4, fields={"rewards": rewards}, keep=(TOKEN_BAND,), correct_threshold=0.5)

    assert value(stats, "keep/dropped_reward_mean") == 0.5  # (1 + 0 + 0.5) / 3: a NaN reward is left out
    assert value(stats, "keep/dropped_correct_fraction") == pytest.approx(2 / 3)


def test_reward_stats_need_rewards_and_a_threshold():
    rewards = {"rewards": torch.ones(4)}

    assert "keep/dropped_reward_mean" not in stats_of(KEEP_RATIOS, keep=(TOKEN_BAND,), correct_threshold=0.5)
    assert "keep/dropped_correct_fraction" not in stats_of(KEEP_RATIOS, fields=rewards, keep=(TOKEN_BAND,))
    assert "keep/dropped_reward_mean" in stats_of(KEEP_RATIOS, fields=rewards, keep=(TOKEN_BAND,))


@pytest.mark.parametrize(
    ("term", "name", "dropped", "above", "below"),
    [
        (TOKEN_BAND, "ratio_band_token", 3 / 6, 2 / 6, 1 / 6),
        # products 8, 0.9, 2
        (RatioBand(level="sequence", low=1.5, high=4.0), "ratio_band_sequence", 2 / 3, 1 / 3, 1 / 3),
        # row 1 is both above and below: dropped once
        (OutlierVeto(low=0.4, high=3.0), "outlier_veto", 2 / 3, 2 / 3, 1 / 3),
        (DivergenceBand(statistic="k3", high=1.0), "divergence_k3_sequence_mean", 2 / 3, 2 / 3, 0.0),
        (OffPolicySequenceMask(max_divergence=0.01), "off_policy_sequence_mask", 1 / 3, 0.0, 1 / 3),
    ],
)
def test_each_term_counts_in_its_own_unit(term, name, dropped, above, below):
    stats = stats_of(KEEP_RATIOS, fields={"advantages": -torch.ones(4)}, keep=(term,))

    assert value(stats, f"keep/{name}/dropped_fraction") == pytest.approx(dropped)
    assert value(stats, f"keep/{name}/above_fraction") == pytest.approx(above)
    assert value(stats, f"keep/{name}/below_fraction") == pytest.approx(below)


def test_terms_are_counted_each_on_its_own():
    stats = stats_of([[8.0, 1.0]], keep=(TOKEN_BAND, RatioBand(level="token", low=None, high=100.0)))

    assert value(stats, "keep/ratio_band_token/dropped_fraction") == 0.5
    assert value(stats, "keep/ratio_band_token_2/dropped_fraction") == 0.0
    assert value(stats, "keep/dropped_token_fraction") == 0.5


def test_dropping_what_is_not_finite_is_reported_without_terms():
    batch = policy_batch([[1.0, 1.0]])
    batch.sampling_per_token_logps[0, 0] = NAN

    stats = Correction(weight=RawWeight(), nonfinite="drop")(batch).stats

    assert value(stats, "keep/dropped_token_fraction") == 0.5
    assert value(stats, "keep/dropped_sequence_fraction") == 0.0


def test_no_keep_stats_where_nothing_can_be_dropped():
    assert not any("/keep/" in key for key in stats_of(RATIOS, weight=RawWeight()))


def test_term_names_number_repetitions_only():
    def named(*levels):
        return term_names(tuple(RatioBand(level=level, low=None, high=2.0) for level in levels))

    assert named("token", "token", "token") == [
        "ratio_band_token",
        "ratio_band_token_2",
        "ratio_band_token_3",
    ]
    assert named("sequence_mean", "sequence") == ["ratio_band_sequence_mean", "ratio_band_sequence"]
    assert named("sequence", "sequence_mean") == ["ratio_band_sequence", "ratio_band_sequence_mean"]
