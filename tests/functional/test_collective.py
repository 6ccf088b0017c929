"""What reads every rank: two processes that hold a part of the batch each decide as one process on the whole.

Groups are spread over both ranks; rank 1 is padded to fewer tokens than rank 0.
"""

from dataclasses import fields
from functools import cache, partial

import pytest
import torch
import two_ranks

import trl_offpolicy as op
from trl_offpolicy.functional.collective import (
    gather_flat,
    gather_objects,
    gather_padded,
    gather_rows,
    is_distributed,
    sum_ranks,
)
from trl_offpolicy.functional.masks import high_entropy_mask
from trl_offpolicy.objective.staging import stage

NAN = float("nan")
SCENARIOS = ("spread", "idle_rank")  # in the second, rank 1 has responses but no trainable token
ROWS = {0: slice(0, 5), 1: slice(5, 10)}
WIDTH = {0: 12, 1: 7}
GROUPS = [3, -1, 0, 3, 8, 0, 3, -1, 5, 0]  # 8 and 5 are on one rank, and alone
TIS = op.TruncateWeight(max_weight=1.3)
TOKENS = op.RatioBand(level="token", low=0.7, high=1.6)
SEQUENCES = op.RatioBand(level="sequence_mean", low=0.9, high=1.15)
CORRECTIONS = {
    "group ratio": op.Correction(keep=(op.RatioBand(level="group", low=0.97, high=1.05),)),
    "group divergence": op.Correction(keep=(op.DivergenceBand(statistic="abs", level="group", high=0.197),)),
    "group rejection": op.Correction(keep=(TOKENS, SEQUENCES, op.GroupRejection(max_dropped_fraction=0.4))),
    "budget": op.Correction(keep=(op.SecondMomentBudget(budget=0.05),)),
    "ess of tokens": op.Correction(weight=op.ESSWeight(target=0.95)),
    "ess of sequences": op.Correction(weight=op.ESSWeight(target=0.95, level="sequence")),
    "normalised over kept tokens": op.Correction(weight=TIS, keep=(TOKENS, SEQUENCES), normalize="kept"),
    "normalised over sequences": op.Correction(weight=op.RawWeight(level="sequence"), normalize="original"),
    "all, remaining": op.Correction(
        weight=op.ESSWeight(target=0.98, level="turn"),
        keep=(TOKENS, op.GroupRejection(max_dropped_fraction=0.7), op.SecondMomentBudget(budget=0.03)),
        normalize="kept",
        measure_on="remaining",
        nonfinite="drop",
    ),
}
LOCAL = {  # one call's rows, whatever the others have
    "ess": op.Correction(weight=op.ESSWeight(target=0.95, scope="micro_batch")),
    "budget": op.Correction(keep=(op.SecondMomentBudget(budget=0.05, scope="micro_batch"),)),
    "normalised": op.Correction(weight=TIS, normalize="original", normalize_over="micro_batch"),
}


@cache
def union(scenario):
    """Ten ragged responses with holes; NaN on padding and inside; rows 5 to 9 have at most 7 tokens."""
    generator = torch.Generator().manual_seed(1)
    sampling = -torch.rand(10, 12, generator=generator) - 0.2
    old = sampling + 0.25 * torch.randn(10, 12, generator=generator) + 0.1 * torch.randn(10, 1, generator=generator)
    mask = torch.arange(12) < torch.tensor([12, 7, 9, 4, 0, 7, 5, 6, 2, 7])[:, None]
    mask &= torch.rand(10, 12, generator=generator) < 0.85
    if scenario == "idle_rank":
        mask[ROWS[1]] = False
    old[0, 2], sampling[6, 1] = float("inf"), NAN
    return op.PolicyBatch(
        per_token_logps=torch.where(mask, old.nan_to_num(posinf=-1.0), NAN),
        old_per_token_logps=torch.where(mask, old, NAN),
        sampling_per_token_logps=torch.where(mask, sampling, NAN),
        completion_mask=mask,
        advantages=torch.linspace(-1, 1, 10),
        rewards=torch.tensor([0.0, 1.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]),
        group_ids=torch.tensor(GROUPS),
    )


def shard(scenario, rank):
    whole, rows, width = union(scenario), ROWS[rank], WIDTH[rank]
    values = {item.name: getattr(whole, item.name) for item in fields(whole)}
    return op.PolicyBatch(
        **{name: v if v is None else v[rows] if v.dim() == 1 else v[rows, :width] for name, v in values.items()}
    )


def decide(batch, corrections):
    outputs = {name: correction(batch) for name, correction in corrections.items()}
    return {name: (out.weights, out.keep_mask) for name, out in outputs.items()}


def kept_baseline(batch):
    """What the early stage says with a baseline of kept responses."""
    decided = stage(op.Objective(correction=op.Correction(keep=(SEQUENCES,), baseline="kept"))).decide(batch)
    return {**decided.rows, "kept_tokens": decided.kept_tokens, "kept_sequences": decided.kept_sequences}


def high_entropies(batch):
    entropies = torch.where(batch.mask, -batch.per_token_logps, torch.nan)
    return high_entropy_mask(entropies, batch.mask, top=0.3)


def collectives(rank):
    mine = torch.arange(3) + 10 * rank
    total = sum_ranks(mine)
    return {
        "distributed": is_distributed(),
        "sum": total.tolist(),
        "input": mine.tolist(),
        "rows": gather_rows(torch.stack([mine, mine])).tolist(),
        "bool": gather_rows(mine > 1).tolist(),
        "strided": gather_rows(torch.arange(6).view(3, 2)[:, rank]).tolist(),
        "flat": gather_flat(torch.ones(2, 2 - rank) * rank, padding=-5.0).tolist(),
        "none": gather_flat(torch.ones(0, 3), padding=0.0).tolist(),
        "padded": gather_padded(torch.ones(2, 2 - rank) * rank, padding=-5.0).tolist(),
        "objects": gather_objects({"rank": rank}),
    }


def run(rank):
    results = {"collectives": collectives(rank)}
    for scenario in SCENARIOS:
        batch = shard(scenario, rank)
        results[scenario] = decide(batch, CORRECTIONS)
        results[scenario, "local"] = decide(batch, LOCAL)
        results[scenario, "baseline"] = kept_baseline(batch)
        results[scenario, "entropies"] = high_entropies(batch)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.launch(__file__, run, tmp_path_factory.mktemp("ranks"))


def part(whole, rank):
    return whole[ROWS[rank], : WIDTH[rank]]


close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)
both_ranks = pytest.mark.parametrize("rank", [0, 1])
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS)
every_correction = pytest.mark.parametrize("name", CORRECTIONS)


def test_alone_everything_comes_back_as_it_is():
    values = torch.arange(6.0).view(2, 3)

    assert not is_distributed()
    assert sum_ranks(values) is values
    assert gather_rows(values) is values
    assert gather_padded(values, padding=0.0) is values
    assert gather_flat(values, padding=0.0).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert gather_objects("alone") == ["alone"]


@pytest.mark.integration
@both_ranks
def test_collectives(ranks, rank):
    assert ranks[rank]["collectives"] == {
        "distributed": True,
        "sum": [10, 12, 14],
        "input": [10 * rank, 10 * rank + 1, 10 * rank + 2],  # unchanged
        "rows": [[0, 1, 2]] * 2 + [[10, 11, 12]] * 2,
        "bool": [False, False, True, True, True, True],
        "strided": [0, 2, 4, 1, 3, 5],
        "flat": [0.0] * 4 + [1.0, 1.0, -5.0, -5.0],
        "none": [],
        "padded": [[0.0, 0.0]] * 2 + [[1.0, -5.0]] * 2,
        "objects": [{"rank": 0}, {"rank": 1}],
    }


@both_ranks
@every_scenario
@every_correction
def test_both_ranks_decide_as_one_process(ranks, name, scenario, rank):
    weights, keep = decide(union(scenario), {name: CORRECTIONS[name]})[name]

    got, kept = ranks[rank][scenario][name]

    close(got, part(weights, rank))
    assert torch.equal(kept, part(keep, rank))


@both_ranks
@every_scenario
@pytest.mark.parametrize("name", LOCAL)
def test_micro_batches_do_not_read_the_other_rank(ranks, name, scenario, rank):
    weights, keep = decide(shard(scenario, rank), {name: LOCAL[name]})[name]

    got, kept = ranks[rank][scenario, "local"][name]

    close(got, weights)
    assert torch.equal(kept, keep)


@both_ranks
@every_scenario
def test_a_baseline_of_kept_responses_is_that_of_the_whole_group(ranks, scenario, rank):
    expected, got = kept_baseline(union(scenario)), ranks[rank][scenario, "baseline"]

    close(got["advantages"], expected["advantages"][ROWS[rank]])
    for count in ("kept_tokens", "kept_sequences"):
        assert got[count].item() == expected[count].item() > 0


@both_ranks
@every_scenario
def test_high_entropies_are_those_of_all_ranks(ranks, scenario, rank):
    expected = high_entropies(union(scenario))

    assert torch.equal(ranks[rank][scenario, "entropies"], part(expected, rank))
    if scenario == "spread":
        assert not torch.equal(high_entropies(shard(scenario, 0)), part(expected, 0)), "alone it decides otherwise"


@every_correction
def test_ranks_by_themselves_would_decide_otherwise(name):
    """The comparison has teeth, and the terms do fire."""
    weights, keep = decide(union("spread"), {name: CORRECTIONS[name]})[name]
    differs = False
    for rank in (0, 1):
        alone, kept = decide(shard("spread", rank), {name: CORRECTIONS[name]})[name]
        differs |= not torch.equal(kept, part(keep, rank))
        differs |= not torch.allclose(alone, part(weights, rank), rtol=1e-4)

    assert differs
    assert 0 < keep.sum() < union("spread").mask.sum() or not CORRECTIONS[name].keep


if __name__ == "__main__":
    two_ranks.join(run)
