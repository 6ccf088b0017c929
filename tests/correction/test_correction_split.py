"""Corrections of wide scope in two stages: early on the generation batch, late in the loss step.

What both say together is what one call on the whole batch says.
"""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import (
    Correction,
    DivergenceBand,
    EqualRewards,
    ESSWeight,
    GroupRejection,
    Objective,
    OffPolicySequenceMask,
    OutlierVeto,
    PolicyBatch,
    PrefixMinWeight,
    PrefixWeight,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    SecondMomentBudget,
    ShapedWeight,
    StalenessBound,
    TruncateWeight,
    losses,
)
from trl_offpolicy.objective.staging import stage
from trl_offpolicy.types import WIDE_SCOPES

NAN, INF = float("nan"), float("inf")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

TIS = TruncateWeight(max_weight=1.2)
STALE = RawWeight(ratio="current/old")
OPSM = OffPolicySequenceMask(max_divergence=0.1)
BUDGET = SecondMomentBudget(budget=0.1)
BAND = RatioBand(level="token", low=0.5, high=1.8)
GEOMETRIC = RatioBand(level="sequence_mean", low=0.9, high=1.15)
GROUP = RatioBand(level="group", low=0.97, high=1.1)
LAG = StalenessBound(max_lag=2)
MOVED = ProbabilityDifferenceMask(low=-0.1, high=0.1, ratio="current/old")

MIXED = {
    "budget, then opsm": Correction(keep=(BUDGET, OPSM)),
    "opsm, then budget": Correction(keep=(OPSM, BUDGET, LAG, BAND)),
    "group level": Correction(keep=(GROUP, MOVED), weight=(TIS, replace(STALE, level="turn"))),
    "groups": Correction(
        keep=(BAND, GEOMETRIC, GroupRejection(max_dropped_fraction=0.4), OPSM, LAG, EqualRewards()), weight=STALE
    ),
    "ess and staleness": Correction(weight=(ESSWeight(target=0.95), STALE), keep=(OPSM,)),
    "ess of turns, capped staleness": Correction(
        weight=(ESSWeight(target=0.95, level="turn"), PrefixWeight(ratio="current/old")), keep=(BAND,)
    ),
    "normalised": Correction(weight=TIS, keep=(OPSM, LAG), normalize="original"),
    "normalised over kept": Correction(
        weight=TruncateWeight(level="sequence", max_weight=2.0), keep=(GEOMETRIC,), normalize="kept"
    ),
    "remaining": Correction(
        keep=(BAND, BUDGET, DivergenceBand(statistic="k3", level="turn", high=0.2, ratio="current/old"), OPSM),
        weight=RawWeight(level="turn", ratio="current/old"),
        measure_on="remaining",
    ),
    "remaining, all early": Correction(
        keep=(BAND, GROUP), weight=PrefixMinWeight(), measure_on="remaining", normalize="kept"
    ),
    "baseline": Correction(keep=(GEOMETRIC,), baseline="kept", weight=(TIS, replace(STALE, level="sequence"))),
    "sequence weights": Correction(
        weight=(
            ESSWeight(level="sequence", target=0.9),
            ShapedWeight(level="sequence", gamma=0.5, ratio="current/old"),
        ),
        keep=(OutlierVeto(low=0.6, high=1.7),),
    ),
    "row scope too": Correction(weight=TIS, keep=(BAND, OPSM)),
}
MICRO = {  # the rows of one call matter: compared with one micro-batch only
    "late normaliser": Correction(weight=STALE, keep=(BUDGET, OPSM), normalize="kept", normalize_over="micro_batch"),
    "ess by micro-batch": Correction(weight=ESSWeight(target=0.95, scope="micro_batch"), keep=(BUDGET,)),
    "budget by micro-batch": Correction(weight=ESSWeight(target=0.9), keep=(replace(BUDGET, scope="micro_batch"),)),
}
NONFINITE = ("neutral", "drop")


def mixed_batch(seed, *, bad=False, old=True):
    """Twelve ragged responses of four groups; with ``bad`` some log-probs are not finite."""
    generator = torch.Generator().manual_seed(seed)
    shape = (12, 7)

    def noise(scale):
        return scale * torch.randn(shape, generator=generator)

    sampling = -0.1 - 3 * torch.rand(shape, generator=generator)
    trainer = (sampling + noise(0.3)).clamp(max=-0.01)
    current = (trainer + noise(0.2)).clamp(max=-0.01)
    mask = torch.rand(shape, generator=generator) < 0.8
    mask[3] = False
    if bad:
        places = torch.rand(shape, generator=generator)
        sampling = torch.where(places < 0.08, NAN, torch.where(places < 0.12, -INF, sampling))
        trainer = torch.where(places > 0.92, INF, trainer)
    return PolicyBatch(
        per_token_logps=current,
        old_per_token_logps=trainer if old else None,
        sampling_per_token_logps=sampling,
        completion_mask=mask,
        advantages=torch.randn(12, generator=generator),
        group_ids=torch.randint(-2, 2, (12,), generator=generator),
        policy_versions=torch.randint(3, 8, (12,), generator=generator),
        group_rewards=torch.randint(2, (12, 2), generator=generator).float(),
        current_version=8,
    )


def rows_of(batch, rows):
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return PolicyBatch(
        **{key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    )


def decide(early, batch):
    """The batch with what the early part says; it sees no current policy."""
    blind = batch
    if batch.old_per_token_logps is not None:
        blind = replace(batch, per_token_logps=torch.full_like(batch.per_token_logps, NAN))
    out = early(blind)
    weights = out.weights if out.sequence_weights is None else out.sequence_weights
    return replace(batch, decided_weights=weights, decided_keep=out.keep_mask)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("name", MIXED)
def test_two_stages_say_what_one_call_says(name, nonfinite, bad):
    correction = replace(MIXED[name], nonfinite=nonfinite)
    early, late = correction.split()
    dropped = 0
    for seed in range(4):
        batch = mixed_batch(seed, bad=bad)
        whole = correction(batch)
        decided = decide(early, batch)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))

        for rows in (order[:5], order[5:6], order[6:]):  # shuffled and split
            out = late(rows_of(decided, rows))

            close(out.weights, whole.weights[rows])
            assert torch.equal(out.keep_mask, whole.keep_mask[rows])
            assert (out.sequence_weights is None) == (whole.sequence_weights is None)
        dropped += int(batch.mask.sum() - whole.keep_mask.sum())
    assert dropped > 0 or not correction.keep


@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("name", MICRO)
def test_two_stages_on_one_micro_batch(name, nonfinite):
    correction = replace(MICRO[name], nonfinite=nonfinite)
    early, late = correction.split()
    assert late.scope == "micro_batch"
    for seed in range(4):
        batch = mixed_batch(seed, bad=True)
        whole = correction(batch)

        out = late(decide(early, batch))

        close(out.weights, whole.weights)
        assert torch.equal(out.keep_mask, whole.keep_mask)


def test_without_old_log_probs_old_is_the_current_policy_in_both_stages():
    correction = Correction(weight=TIS, keep=(BUDGET, OPSM), normalize="original")
    early, late = correction.split()
    batch = mixed_batch(0, old=False)

    out, whole = late(decide(early, batch)), correction(batch)

    close(out.weights, whole.weights)
    assert torch.equal(out.keep_mask, whole.keep_mask)


@pytest.mark.parametrize("name", [*MIXED, *MICRO])
def test_parts_are_sorted_by_what_they_need(name):
    correction = {**MIXED, **MICRO}[name]
    early, late = correction.split()

    assert late.scope not in WIDE_SCOPES
    assert early.scope == correction.scope or correction.scope not in WIDE_SCOPES
    assert early.required_ratios <= {"old/sampling"}
    assert set(early.keep) | set(late.keep) == set(correction.keep)
    assert set(early.weights) | set(late.weights) == set(correction.weights)
    assert early.baseline == correction.baseline and late.baseline == "all"


# ------------------------------------------------------------------------------------- what was decided before


def test_decided_weights_multiply_and_decided_keep_is_anded():
    batch = policy_batch([[1.0, 1.0, 1.0]], [[2.0, 4.0, 8.0]])
    decided = {
        "decided_weights": torch.tensor([[0.5, 3.0, 1.0]]),
        "decided_keep": torch.tensor([[True, True, False]]),
    }

    out = Correction(weight=STALE, keep=(RatioBand(level="token", low=None, high=3.0, ratio="current/old"),))(
        replace(batch, **decided)
    )
    alone = Correction()(replace(batch, **decided))

    close(out.weights, torch.tensor([[1.0, 12.0, 8.0]]))
    assert out.keep_mask.tolist() == [[True, False, False]]
    close(alone.weights, torch.tensor([[0.5, 3.0, 1.0]]))
    assert alone.keep_mask.tolist() == [[True, True, False]]


@pytest.mark.parametrize("name", [*MIXED, *MICRO])
def test_everything_decided_away(name):
    _, late = {**MIXED, **MICRO}[name].split()
    nothing = torch.zeros(12, 7).bool()
    batch = replace(mixed_batch(0), decided_keep=nothing, decided_weights=torch.zeros(12, 7))
    batch = replace(batch, per_token_logps=batch.per_token_logps.requires_grad_())

    out = Objective(correction=late, policy_loss=losses.GPG())(batch)
    out.loss.backward()

    assert not out.keep_mask.any()
    assert out.loss.item() == 0.0
    assert batch.per_token_logps.grad.abs().sum().item() == 0.0
    assert all(stat.value.isfinite() for stat in out.stats.values())


def test_decided_fields_are_zero_on_padding_whatever_they_hold():
    batch = policy_batch([[2.0, None]])
    decided = replace(batch, decided_weights=torch.tensor([[0.5, NAN]]), decided_keep=torch.ones(1, 2).bool())

    out = Correction()(decided)

    assert out.weights.tolist() == [[0.5, 0.0]]
    assert out.keep_mask.tolist() == [[True, False]]


def test_decided_weights_are_by_token_or_by_sequence():
    batch = policy_batch([[2.0, 3.0], [1.0, 1.0]])

    by_sequence = Correction()(replace(batch, decided_weights=torch.tensor([[0.5], [2.0]])))

    assert by_sequence.weights.tolist() == [[0.5, 0.5], [2.0, 2.0]]
    assert by_sequence.sequence_weights.tolist() == [[0.5], [2.0]]
    for shape in ((2,), (1, 2), (2, 3)):
        with pytest.raises(ValueError, match=r"^decided_weights must have shape \(2, 1\) or \(2, 2\)"):
            replace(batch, decided_weights=torch.ones(shape))


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_a_loss_with_the_weights_inside_reads_decided_ones_once(level):
    correction = Correction(weight=TruncateWeight(max_weight=2.0, level=level), normalize="original")
    objective = Objective(policy_loss=losses.VESPO(), correction=correction)
    batch = mixed_batch(0)
    stages = stage(objective)

    out = stages.late(replace(batch, **stages.decide(batch).rows))

    close(out.per_token_loss, objective(batch).per_token_loss)


def test_kept_is_measured_where_the_last_terms_decide():
    assert [part.measure for part in Correction(keep=(BUDGET,)).split()] == [
        ("mismatch", "kept"),
        ("staleness", "total"),
    ]
    assert [part.measure for part in Correction(keep=(BUDGET, OPSM)).split()] == [
        ("mismatch",),
        ("kept", "staleness", "total"),
    ]
