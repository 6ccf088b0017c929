"""Collections: the right names, one pass over the tokens an update, the numbers of a Correction's Stats."""

import copy
import pickle

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.metrics import RATIO_METRICS, WEIGHT_METRICS, base, ratio_metrics, weight_metrics


def ratio_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sampling = -torch.rand(6, 9, generator=generator) - 0.1
    old = sampling + 0.3 * torch.randn(6, 9, generator=generator)
    return old, sampling, torch.rand(6, 9, generator=generator) > 0.3


def weight_batch(seed=0):
    old, sampling, mask = ratio_batch(seed)
    return (old - sampling).exp(), mask


CASES = {
    "ratio": (ratio_metrics, RATIO_METRICS, ratio_batch, "ratio_rows"),
    "weight": (weight_metrics, WEIGHT_METRICS, weight_batch, "weight_moments"),
}
both = pytest.mark.parametrize(("build", "classes", "batch", "pass_name"), CASES.values(), ids=CASES)


@pytest.fixture
def passes(monkeypatch):
    """Counts passes over the tokens: calls of the pure functions, made nowhere else in the package."""
    calls = []
    for name in ("ratio_rows", "weight_moments"):
        whole = getattr(base, name)
        monkeypatch.setattr(base, name, lambda *a, _name=name, _whole=whole: calls.append(_name) or _whole(*a))
    return calls


@both
def test_names(build, classes, batch, pass_name):
    default = {"ratio_rows": "offpolicy/mismatch/", "weight_moments": "offpolicy/weight/"}[pass_name]
    assert set(build().keys()) == {default + name for name in classes}
    assert set(build(prefix="offpolicy/x/").keys()) == {"offpolicy/x/" + name for name in classes}
    assert {name: type(metric) for name, metric in build(prefix="").items()} == classes


@both
def test_one_pass_an_update(build, classes, batch, pass_name, passes):
    """Also the first one, after a reset, after computing, and in copies; never one a metric."""
    metrics = build()
    for count in (1, 2):
        metrics.update(*batch(count))
        assert passes == [pass_name] * count
    metrics.compute()
    metrics.update(*batch(3))
    metrics.reset()
    metrics.update(*batch(4))
    for twin in (metrics.clone(), copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics))):
        passes.clear()
        twin.update(*batch(5))
        assert passes == [pass_name]
    assert len(metrics.compute_groups) == 1


@both
def test_values_are_those_of_each_metric_alone(build, classes, batch, pass_name):
    metrics = build(prefix="")
    metrics.update(*batch(0))
    metrics.compute()
    metrics.update(*batch(1))
    for name, got in metrics.compute().items():
        alone = classes[name]()
        alone.update(*batch(0))
        alone.update(*batch(1))
        assert got.item() == alone.compute().item(), name


@both
def test_reset_and_forward(build, classes, batch, pass_name):
    metrics, fresh = build(), build()
    metrics.update(*batch(0))
    metrics.reset()
    metrics.update(*batch(1))
    fresh.update(*batch(1))
    assert metrics.compute() == fresh.compute()
    fresh.reset()
    fresh.update(*batch(2))
    assert metrics(*batch(2)) == fresh.compute()
    fresh.update(*batch(1))
    metrics.update(*batch(3))
    fresh.update(*batch(3))
    got, expected = metrics.compute(), fresh.compute()
    assert {key: got[key].item() for key in got} == pytest.approx({key: expected[key].item() for key in expected})


@both
def test_pickle_and_state_dict(build, classes, batch, pass_name):
    metrics = build()
    metrics.persistent(True)
    metrics.update(*batch(0))
    restored = build()
    restored.persistent(True)
    restored.load_state_dict(metrics.state_dict())
    twin = pickle.loads(pickle.dumps(metrics))
    for collection in (metrics, twin, restored):
        collection.update(*batch(1))
    assert metrics.compute() == twin.compute() == restored.compute()
    assert all(metric.sums.dtype == torch.float64 for metric in restored.set_dtype(torch.float16).values())


def test_several_collections_side_by_side():
    """Mismatch, staleness and weights of one batch keep their own states."""
    mismatch, staleness = ratio_metrics(), ratio_metrics("offpolicy/staleness/")
    old, sampling, mask = ratio_batch()
    mismatch.update(old, sampling, mask)
    staleness.update(old, old, mask)
    assert mismatch.compute()["offpolicy/mismatch/kl_k3"] > 0
    assert staleness.compute()["offpolicy/staleness/kl_k3"] == 0


def test_same_numbers_as_the_stats_of_a_correction():
    old, sampling, mask = ratio_batch()
    current = old + 0.1 * torch.randn(6, 9, generator=torch.Generator().manual_seed(9))
    batch = op.PolicyBatch(
        per_token_logps=current,
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        completion_mask=mask,
        advantages=torch.ones(6),
    )
    correction = op.Correction(
        weight=op.TruncateWeight(max_weight=1.2), keep=(op.RatioBand(level="token", low=0.6, high=1.5),)
    )
    out = correction(batch)
    sets = [
        (ratio_metrics(), (old, sampling, mask)),
        (ratio_metrics("offpolicy/kept/"), (old, sampling, out.keep_mask)),
        (ratio_metrics("offpolicy/staleness/"), (current, old, mask)),
        (ratio_metrics("offpolicy/total/"), (current, sampling, mask)),
        (weight_metrics(), ((old - sampling).exp(), mask)),
        (weight_metrics("offpolicy/weight_applied/"), (out.weights, out.keep_mask)),
    ]
    stats = out.stats.compute()
    assert not torch.equal(out.keep_mask, mask)
    for metrics, arguments in sets:
        metrics.update(*arguments)
        for key, got in metrics.compute().items():
            assert got.item() == pytest.approx(stats[key], rel=1e-5, abs=1e-9), key
