"""Scopes of corrections: what is wide, what cannot be decided or split, and who asks the other ranks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import (
    BandWeight,
    Correction,
    ESSWeight,
    GroupRejection,
    OffPolicySequenceMask,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    StalenessBound,
    TruncateWeight,
)

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

TIS = TruncateWeight(max_weight=1.2)
STALE = RawWeight(ratio="current/old")
OPSM = OffPolicySequenceMask(max_divergence=0.1)
BUDGET = SecondMomentBudget(budget=0.1)
BAND = RatioBand(level="token", low=0.5, high=1.8)
GEOMETRIC = RatioBand(level="sequence_mean", low=0.9, high=1.15)
GROUP = RatioBand(level="group", low=0.97, high=1.1)
LAG = StalenessBound(max_lag=2)
MOVED = ProbabilityDifferenceMask(ratio="current/old")


def test_a_kept_baseline_is_decided_by_group():
    correction = Correction(keep=(GEOMETRIC,), baseline="kept")

    assert correction.scope == "group"
    assert Correction(keep=(GEOMETRIC,)).scope == "row"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "kept"}, r"^baseline must be 'all' without a keep term"),
        ({"baseline": "mean"}, r"^baseline must be one of \['all', 'kept'\], but got 'mean'"),
        ({"baseline": "kept", "keep": (GEOMETRIC, OPSM)}, r"^baseline must be 'all' with off_policy_sequence_mask"),
        ({"baseline": "kept", "keep": (LAG,)}, r"^baseline must be 'all' with staleness_bound"),
        (
            {"baseline": "kept", "keep": (replace(BUDGET, scope="micro_batch"),)},
            r"^baseline must be 'all' with second_moment_budget",
        ),
        (
            {"weight": STALE, "normalize": "kept"},
            r"^normalize_over must be 'micro_batch' with a weight on 'current/old' .* but got 'generation_batch'",
        ),
        (
            {"weight": ESSWeight(scope="micro_batch"), "normalize": "original"},
            r"^normalize_over must be 'micro_batch' with a weight on 'old/sampling' of scope 'micro_batch'",
        ),
        ({"normalize_over": "batch"}, r"^normalize_over must be one of \['generation_batch', 'micro_batch'\]"),
        (
            {"weight": (RawWeight(), RawWeight(ratio="current/sampling"))},
            r"^weight must hold each factor of current/sampling = current/old x old/sampling once",
        ),
        ({"keep": (GroupRejection(),)}, r"^keep must name the terms that group_rejection counts before it"),
        (
            {"keep": (GEOMETRIC, OPSM, GroupRejection())},
            r"^keep must name off_policy_sequence_mask behind group_rejection",
        ),
        ({"keep": (LAG, GroupRejection())}, r"^keep must name staleness_bound behind group_rejection"),
    ],
)
def test_what_cannot_be_decided_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Correction(**options)


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        (
            Correction(weight=TIS, keep=(BUDGET, OPSM), measure_on="remaining"),
            r"^measure_on must be 'original' .*\(off_policy_sequence_mask\).*but got 'remaining'",
        ),
        (
            Correction(keep=(OPSM, BUDGET), measure_on="remaining"),
            r"^measure_on must be 'original' .*\(off_policy_sequence_mask\)",
        ),
        (
            Correction(weight=TIS, keep=(OPSM,), normalize="kept"),
            r"^normalize must not be 'kept' .*\(off_policy_sequence_mask\)",
        ),
        (
            Correction(weight=TIS, keep=(BUDGET,), normalize="original", normalize_over="micro_batch"),
            r"^normalize_over must be 'generation_batch' .* but got 'micro_batch'",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(correction, message):
    with pytest.raises(ValueError, match=message):
        correction.split()
    correction(policy_batch([[1.0, 3.0], [0.5, None]]))  # one call on a whole batch can do it


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ({"weight": TIS, "keep": (OPSM, LAG, MOVED)}, "row"),
        ({"weight": ESSWeight(scope="micro_batch")}, "micro_batch"),
        ({"weight": STALE, "normalize": "kept", "normalize_over": "micro_batch"}, "micro_batch"),
        ({"keep": (GROUP,)}, "group"),
        ({"keep": (BAND, GroupRejection())}, "group"),
        ({"keep": (GROUP, BUDGET)}, "generation_batch"),
        ({"weight": ESSWeight(), "keep": (GROUP,)}, "generation_batch"),
        ({"weight": BandWeight(low=0.5, high=2.0), "normalize": "original"}, "generation_batch"),
    ],
)
def test_scope_is_the_widest_of_the_parts(options, scope):
    correction = Correction(**options)

    assert correction.scope == scope


def test_a_micro_batch_normaliser_asks_no_other_rank(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a collective was called")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    batch = policy_batch([[1.0, 3.0]])

    for weight in (TruncateWeight(max_weight=4.0), ESSWeight(target=0.1, scope="micro_batch")):
        correction = Correction(weight=weight, normalize="original", normalize_over="micro_batch")
        close(correction(batch).weights, torch.tensor([[0.5, 1.5]]))
    keep = (replace(BUDGET, scope="micro_batch"),)
    assert Correction(keep=keep)(batch).keep_mask.tolist() == [[True, False]]
    for correction in (Correction(weight=TIS, normalize="kept"), Correction(keep=(BUDGET,)), Correction(keep=(GROUP,))):
        with pytest.raises(AssertionError, match="a collective was called"):
            correction(replace(batch, group_ids=torch.tensor([0])))
