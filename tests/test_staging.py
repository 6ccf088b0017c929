"""The two parts of a wide correction: what each decides, measures and refuses."""

import pytest
import torch
from batches import policy_batch

import trl_offpolicy as op
from trl_offpolicy.staging import stage

TOKEN_BAND = op.RatioBand(level="token", low=0.5, high=2.0)
OPSM = op.OffPolicySequenceMask(max_divergence=0.0)
BUDGET = op.SecondMomentBudget(budget=0.05)
IDS = torch.tensor([0, 0, 1, 1])
RATIOS = [[1.1, 9.0], [0.9, 1.0], [8.0, 7.0], [1.0, 1.2]]


def batch(**fields):
    return policy_batch(RATIOS, group_ids=IDS, rewards=torch.tensor([1.0, 0.0, 4.0, 2.0]), **fields)


def test_a_row_correction_has_one_stage():
    assert stage(op.Objective(correction=op.Correction(keep=(TOKEN_BAND, OPSM)))) is None
    assert stage(op.Objective()) is None


def test_parts_measure_each_group_once():
    stages = stage(op.Objective(correction=op.Correction(keep=(BUDGET, OPSM))))

    assert stages.early.measure == ("mismatch",)
    assert set(stages.late.correction.measure) == {"staleness", "total", "kept"}
    assert "keep" not in stages.decide(batch()).stats.groups  # the loss steps count all that is dropped
    alone = stage(op.Objective(correction=op.Correction(keep=(BUDGET,))))
    assert alone.early.measure == ("mismatch", "kept")
    assert "keep" in alone.decide(batch()).stats.groups


def test_kept_counts_are_those_of_the_mask():
    decided = stage(op.Objective(correction=op.Correction(keep=(BUDGET,)))).decide(batch())

    assert decided.kept_tokens.item() == decided.rows["decided_keep"].sum().item() == 5
    assert decided.kept_sequences.item() == 3


def test_token_rejection_never_erases_the_reward():
    """The token that carries 9.0 goes; its response stays in the baseline and keeps its advantage."""
    correction = op.Correction(keep=(TOKEN_BAND,), baseline="kept")
    decided = stage(op.Objective(correction=correction), op.advantages.DrGRPO()).decide(batch())

    assert decided.rows["decided_keep"].tolist() == [[True, False], [True, True], [False, False], [True, True]]
    assert decided.rows["advantages"].tolist() == [0.5, -0.5, 0.0, 0.0]  # row 2 is gone: its group is down to one


def test_a_kept_baseline_needs_rewards_and_groups():
    stages = stage(op.Objective(correction=op.Correction(keep=(TOKEN_BAND,), baseline="kept")))

    with pytest.raises(ValueError, match="rewards and group_ids must be given for advantages and baseline='kept'"):
        stages.decide(policy_batch(RATIOS))


def test_a_kept_denominator_needs_the_whole_batch():
    stages = stage(op.Objective(correction=op.Correction(keep=(TOKEN_BAND,)), denominator="kept"))

    assert stages.decide(batch()).kept_tokens.item() == 5
    with pytest.raises(ValueError, match="denominator must be 'all' with off_policy_sequence_mask"):
        stage(op.Objective(correction=op.Correction(keep=(OPSM,)), denominator="kept"))


@pytest.mark.parametrize(
    "term", [op.OffPolicySequenceMask(max_divergence=0.1, ratio="old/sampling"), op.ProbabilityDifferenceMask()]
)
def test_a_kept_baseline_refuses_terms_that_read_its_sign(term):
    with pytest.raises(ValueError, match=f"baseline must be 'all' with {term.name}, which decides by the sign"):
        op.Correction(keep=(term,), baseline="kept")


def test_a_kept_denominator_costs_nothing_where_nothing_can_be_dropped():
    assert stage(op.Objective(correction=op.Correction(weight=op.RawWeight()), denominator="kept")) is None
    assert stage(op.Objective(correction=op.Correction(nonfinite="drop"), denominator="kept")) is not None
