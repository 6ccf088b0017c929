"""Two real processes over gloo: diagnostics and normalised weights are those of one process on the union.

Most of the time goes into the import of torchmetrics in the second process.
"""

from dataclasses import fields
from functools import cache

import pytest
import torch
import torch.distributed as dist
import two_ranks

import trl_offpolicy as op
from trl_offpolicy.metrics import RATIO_METRICS, WEIGHT_METRICS, ratio_metrics, weight_metrics

WORLD = two_ranks.WORLD
SCENARIOS = ("uneven", "idle_rank")  # in the second, rank 1 has responses but no trainable token
WEIGHTS = {
    "token": op.TruncateWeight(max_weight=1.3),
    "sequence": op.TruncateWeight(max_weight=2.0, level="sequence"),
    "band": op.BandWeight(low=0.8, high=1.2),
}
KEEP = (
    op.RatioBand(level="token", low=0.6, high=1.5),
    op.RatioBand(level="sequence_mean", low=0.85, high=1.15),
    op.OutlierVeto(low=0.4, high=2.2),
)
NORMALIZED = [(weight, normalize) for weight in WEIGHTS for normalize in ("original", "kept")]
ROWS = {0: slice(0, 6), 1: slice(6, 9)}  # of the union; rank 1 is padded to 8 tokens only
WIDTH = {0: 16, 1: 8}


@cache
def union(scenario):
    """Nine ragged responses; NaN on padding and inside; rows 6 to 8 have at most 8 tokens."""
    generator = torch.Generator().manual_seed(SCENARIOS.index(scenario))
    sampling = -torch.rand(9, 16, generator=generator) - 0.1
    old = sampling + 0.35 * torch.randn(9, 16, generator=generator) + 0.1 * torch.randn(9, 1, generator=generator)
    old[2] += 0.2
    old[7] -= 0.3
    old[5, 2], old[6, 1] = sampling[5, 2] + 1.0, sampling[6, 1] - 1.0
    mask = torch.arange(16) < torch.tensor([16, 9, 12, 5, 0, 16, 8, 3, 6])[:, None]
    if scenario == "idle_rank":
        mask[ROWS[1]] = False
    old[1, 2] = float("inf")
    sampling[~mask] = float("nan")
    sampling[0, 1] = float("nan")
    turns = torch.tensor([1.0, -1.0] * 4 + [1.0])[:, None]  # pi moves up in some responses, down in others
    current = torch.where(mask, old.nan_to_num(posinf=-1.0) - 0.3 * turns * sampling.nan_to_num(), -1.0)
    reference = current - 0.1 * torch.rand(9, 16, generator=generator)
    reference[0, 3] = float("nan")
    return op.PolicyBatch(
        per_token_logps=current,
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        ref_per_token_logps=reference,
        completion_mask=mask,
        advantages=torch.linspace(-1, 1, 9),
        rewards=torch.linspace(0, 1, 9),
    )


def shard(scenario, rank):
    whole, rows, width = union(scenario), ROWS[rank], WIDTH[rank]
    return op.PolicyBatch(
        **{
            name: value[rows] if value.dim() == 1 else value[rows, :width]
            for name in (item.name for item in fields(whole))
            if (value := getattr(whole, name)) is not None
        }
    )


def collections():
    return ratio_metrics(), weight_metrics()


def update(metrics, batch):
    ratio, weight = metrics
    old, sampling, mask = batch.old_per_token_logps, batch.sampling_per_token_logps, batch.mask
    ratio.update(old, sampling, mask)
    weight.update(torch.where(mask, (old - sampling).nan_to_num(0.0).clamp(-5, 5).exp(), 0.0), mask)


def values(metrics):
    return {key: value.item() for metric in metrics for key, value in metric.compute().items()}


def objective_stats(batch):
    """Every group of diagnostics: of a correction with weight, keep terms and rewards, and of the loss."""
    correction = op.Correction(weight=WEIGHTS["token"], keep=KEEP, normalize="kept", correct_threshold=0.5)
    return op.Objective(correction=correction, kl=op.KLPenalty(coef=0.1))(batch).stats


def normalized(batch):
    """Weights, and the normalizer that was logged, for every kind of weight."""
    out = {}
    for weight, normalize in NORMALIZED:
        result = op.Correction(weight=WEIGHTS[weight], keep=KEEP, normalize=normalize)(batch)
        out[weight, normalize] = result.weights, result.stats.compute()["offpolicy/weight/normalizer"]
    return out


def measure(batch, gather):
    """Everything that is compared; ``gather`` None = one process."""
    metrics = collections()
    update(metrics, batch)
    first = values(metrics)
    update(metrics, batch)  # computing must leave the local states as they were
    twice = values(metrics)
    local = objective_stats(batch)
    stats = local if gather is None else local.all_reduce(gather)
    return {"first": first, "twice": twice, "stats": stats.compute(), "normalized": normalized(batch)}


def all_gather(vector):
    everyone = [torch.empty_like(vector) for _ in range(WORLD)]
    dist.all_gather(everyone, vector)
    return torch.cat(everyone)


def run(rank):
    """Take part as ``rank`` in everything that is compared."""
    return {scenario: measure(shard(scenario, rank), all_gather) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both processes, by rank."""
    return two_ranks.launch(__file__, run, tmp_path_factory.mktemp("ranks"))


@cache
def alone(scenario):
    return measure(union(scenario), None)


def same(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-12), key


every = pytest.mark.parametrize("scenario", SCENARIOS)


@pytest.mark.integration
@every
@pytest.mark.parametrize("updates", ["first", "twice"])
def test_collections(ranks, scenario, updates):
    expected = alone(scenario)[updates]
    assert len(expected) == len(RATIO_METRICS) + len(WEIGHT_METRICS)
    for rank in range(WORLD):
        same(ranks[rank][scenario][updates], expected)


@pytest.mark.integration
@every
def test_stats_of_a_correction_and_its_objective(ranks, scenario):
    expected = alone(scenario)["stats"]
    idle = (
        "gate_mean",
        "nonfinite_current",
        "loss/entropy",
        "response_clip_low_min",
        "response_max_prob_diff_above_half",  # in some of the groups
        "confident_disagreement_fraction",  # the same
    )
    if scenario == "uneven":  # a value of 0 would compare nothing
        assert [key for key, value in expected.items() if value == 0 and not key.endswith(idle)] == []
    assert 0 < expected["offpolicy/keep/dropped_token_fraction"] < 1
    for rank in range(WORLD):
        same(ranks[rank][scenario]["stats"], expected)


@pytest.mark.integration
@every
@pytest.mark.parametrize("key", NORMALIZED, ids="-".join)
def test_normalized_weights(ranks, scenario, key):
    expected, normalizer = alone(scenario)["normalized"][key]
    assert abs(normalizer - 1) > 1e-3
    for rank, rows in ROWS.items():
        weights, logged = ranks[rank][scenario]["normalized"][key]
        torch.testing.assert_close(weights, expected[rows, : WIDTH[rank]], rtol=1e-5, atol=0)
        assert logged == pytest.approx(normalizer, rel=1e-5)


@pytest.mark.integration
@every
def test_means_of_the_ranks_would_be_wrong(scenario):
    """The comparison has teeth: the mean of what the ranks compute alone is off by more than 1e-4."""
    parts = [measure(shard(scenario, rank), None) for rank in range(WORLD)]
    union_values = alone(scenario)["first"]
    wrong = [
        key
        for key, value in union_values.items()
        if sum(part["first"][key] for part in parts) / WORLD != pytest.approx(value, rel=1e-4)
    ]
    assert len(wrong) >= 26, sorted(set(union_values) - set(wrong))
    for key, (_, normalizer) in alone(scenario)["normalized"].items():
        own = [part["normalized"][key][1] for part in parts]
        assert any(value != pytest.approx(normalizer, rel=1e-4) for value in own), key


if __name__ == "__main__":
    two_ranks.join(run)
