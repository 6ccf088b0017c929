"""Stats: access by name, merging, one collective, one transfer."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import Correction, Objective, RatioBand, RawWeight, Stat, Stats
from trl_offpolicy.correction.measure import noise_floor
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import Group

LAYOUT = Layout(sums=("a", "b"), maxima=("top",))


def group(a, b, top):
    parts = moments(LAYOUT, [torch.tensor(float(a)), torch.tensor(float(b))], [torch.tensor(float(top))])
    return Group(parts, {"share": fraction("a", "b"), "top": lambda m: m["top"]})


def test_a_stat_is_a_finaliser_over_moments():
    stat = Stat(group(3, 4, 0).moments, fraction("a", "b"))

    assert float(stat) == stat.value.item() == 0.75
    assert stat.value.dtype == torch.float64


def test_merging_adds_before_it_divides():
    one, two = (Stat(group(*parts, 0).moments, fraction("a", "b")) for parts in ((1, 1), (0, 3)))

    assert float(one.merge(two)) == 0.25  # (1 + 0) / (1 + 3), not (1 + 0) / 2


@pytest.mark.parametrize(("versions", "left"), [([3, 2], False), ([3, 4], True)])
def test_rows_of_older_weights_without_an_old_policy_have_no_mismatch(versions, left):
    """Nothing was measured, which is not the same as a mismatch of 0."""
    whole = policy_batch([[1.5, 0.7], [2.0, 1.1]])
    rows = replace(whole, old_per_token_logps=None, policy_versions=torch.tensor(versions), current_version=4)
    stats = Correction(weight=RawWeight())(rows).stats

    keys = stats.measured().compute()
    assert [f"offpolicy/{name}/kl_k1" in keys for name in ("mismatch", "kept")] == [left] * 2
    assert keys["offpolicy/total/kl_k1"] == stats.compute()["offpolicy/total/kl_k1"] != 0


def test_a_step_whose_responses_are_all_masked_measures_no_ratio_and_no_weight():
    """A correlation of 0 over nothing read as a broken engine."""
    rows = replace(policy_batch([[1.5, 0.7]]), completion_mask=torch.zeros(1, 2, dtype=torch.bool))
    stats = Correction(weight=RawWeight(), keep=(RatioBand(low=0.5, high=2.0),))(rows).stats
    groups = {key.split("/")[1] for key in stats.measured().compute()}
    assert "keep" in groups and not groups & {"mismatch", "kept", "staleness", "total", "weight", "weight_applied"}
    observed = Correction(weight=RawWeight())(policy_batch([[1.5, 0.7]])).stats
    assert observed.measured().compute() == observed.compute()


def test_names_with_and_without_prefix():
    stats = Stats({"keep/veto": group(1, 2, 0), "weight#bounds": group(1, 4, 5)})

    assert list(stats) == [
        "offpolicy/keep/veto/share",
        "offpolicy/keep/veto/top",
        "offpolicy/weight/share",
        "offpolicy/weight/top",
    ]
    assert len(stats) == 4
    assert float(stats["weight/share"]) == float(stats["offpolicy/weight/share"]) == 0.25
    assert "weight/share" in stats
    assert "weight/bounds" not in stats
    with pytest.raises(KeyError):
        stats["weight/mean"]


def test_compute():
    assert Stats({"x": group(1, 2, -3)}).compute() == {"offpolicy/x/share": 0.5, "offpolicy/x/top": -3.0}
    assert Stats({}).compute() == {}


def test_merge_by_group():
    one = Stats({"both": group(1, 1, 5), "mine": group(1, 2, 0)})
    two = Stats({"both": group(0, 3, 7), "yours": group(3, 4, 0)})

    merged = one.merge(two)

    assert float(merged["both/share"]) == 0.25
    assert float(merged["both/top"]) == 7.0
    assert float(merged["mine/share"]) == 0.5
    assert float(merged["yours/share"]) == 0.75
    assert float(one["both/share"]) == 1.0  # unchanged


def test_union_is_side_by_side():
    assert set(Stats({"x": group(1, 2, 0)}).union(Stats({"y": group(1, 2, 0)})).groups) == {"x", "y"}


@pytest.mark.parametrize("stacked", [True, False])
def test_all_reduce_merges_ranks_with_one_collective(stacked):
    ranks = [
        Stats({"x": group(1, 1, 5), "y": group(2, 2, -1)}),
        Stats({"x": group(0, 3, 7), "y": group(1, 4, -2)}),
    ]
    calls = []

    def packed(stats):
        return torch.cat([part for g in stats.groups.values() for part in (g.moments.sums, g.moments.maxima)])

    def gather(tensor):
        calls.append(tensor)
        assert torch.equal(tensor, packed(ranks[0]))
        whole = torch.stack([packed(stats) for stats in ranks])
        return whole if stacked else whole.flatten()

    reduced = ranks[0].all_reduce(gather)

    assert len(calls) == 1
    assert calls[0].dtype == torch.float64
    assert reduced.compute() == ranks[0].merge(ranks[1]).compute()
    assert reduced.compute() == {
        "offpolicy/x/share": 0.25,
        "offpolicy/x/top": 7.0,
        "offpolicy/y/share": 0.5,
        "offpolicy/y/top": -1.0,
    }


def test_all_reduce_of_nothing_needs_no_collective():
    def gather(tensor):
        raise AssertionError("called")

    assert Stats({}).all_reduce(gather).compute() == {}


def test_all_reduce_of_real_stats_is_the_whole_batch():
    correction = Correction(weight=RawWeight(level="sequence"), keep=(RatioBand(level="token", low=0.4, high=3.0),))
    rows = [[1.5, 8.0], [0.5, None], [3.0, 0.3]]
    stale = [[1.1, 1.0], [0.5, None], [1.0, 2.0]]
    objective = Objective(correction=correction)
    parts = [objective(policy_batch(rows[s], stale[s])).stats for s in (slice(0, 1), slice(1, 3))]

    whole = objective(policy_batch(rows, stale)).stats.compute()
    for reduced in all_reduced(parts):  # ranks hold different numbers of rows
        assert reduced.compute() == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert any(key.endswith("_ci95") for key in whole)


def test_groups_that_are_spread_over_ranks_are_one_cluster():
    correction = Correction(weight=RawWeight())
    batches = [
        policy_batch([[1.5, 0.7], [1.2, 0.9]], group_ids=torch.tensor([4, 9])),
        policy_batch([[0.8, 1.1], [2.0, 1.3]], group_ids=torch.tensor([9, 4])),
    ]
    both = policy_batch([[1.5, 0.7], [1.2, 0.9], [0.8, 1.1], [2.0, 1.3]], group_ids=torch.tensor([4, 9, 9, 4]))

    whole = correction(both).stats.compute()

    for reduced in all_reduced([correction(batch).stats for batch in batches]):
        assert reduced.compute() == pytest.approx(whole, rel=1e-9, abs=1e-12)
    alone = correction(replace(both, group_ids=None)).stats.compute()
    assert alone["offpolicy/mismatch/kl_k1_ci95"] != pytest.approx(whole["offpolicy/mismatch/kl_k1_ci95"], rel=0.1)


def test_ranks_may_have_met_their_groups_in_another_order():
    first, second = ranked = [Correction(weight=RawWeight())(policy_batch([[1.5, 0.7]])).stats for _ in range(2)]
    turned = Stats(dict(reversed(second.groups.items())))
    assert list(turned.groups) != list(first.groups)
    whole = all_reduced(ranked)[0].compute()
    for reduced in all_reduced([first, turned]):
        assert reduced.compute() == pytest.approx(whole, rel=1e-12)
    assert list(all_reduced([first, turned])[1].groups) == list(turned.groups)


def test_ranks_that_measured_different_groups_all_say_so():
    whole = Correction(weight=RawWeight())(policy_batch([[1.5, 0.7]])).stats
    part = Stats({name: one for name, one in whole.groups.items() if name != "total"})

    def refused(stats, gather):
        with pytest.raises(RuntimeError, match="All ranks must measure the same groups"):
            stats.all_reduce(gather)
        return True

    assert all_reduced([whole, part], after=refused) == [True, True]


def test_a_noise_floor_over_no_token_is_not_one_of_0():
    logps = torch.zeros(2, 3)
    empty, some = (noise_floor(logps, logps, torch.full((2, 3), there)).measured().compute() for there in (False, True))
    assert empty == {} and some["offpolicy/noise_floor/kl_k3"] == 0.0


def all_reduced(parts, after=Stats.all_reduce):
    """``Stats.all_reduce`` on one thread a rank, with a gather that waits for all of them."""
    barrier, slots = threading.Barrier(len(parts)), [None] * len(parts)

    def run(rank):
        def gather(tensor):
            slots[rank] = tensor
            barrier.wait(timeout=60)
            whole = torch.cat(slots)
            barrier.wait(timeout=60)
            return whole

        return after(parts[rank], gather)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))
