"""The table by version lag: current/sampling of the tokens of each lag, by loops; a lag without tokens is absent."""

import math

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.functional.lags import LAG_NAMES, sums_by_lag

ROWS, LENGTH, VERSION = 12, 7, 20
NAN = float("nan")


def batch(*, by_token, with_old=False, finite=False):
    generator = torch.Generator().manual_seed(0)
    sampling = -torch.rand(ROWS, LENGTH, generator=generator) - 0.1
    lag = torch.tensor((0, 0, 1, 2, 2, 2, 5, 8, 9, 10, 20, 0)).unsqueeze(1).expand(ROWS, LENGTH).clone()
    if by_token:
        lag[:, :3] += torch.randint(0, 2, (ROWS, 3), generator=generator)
    current = sampling - 0.05 * lag + 0.2 * torch.randn(ROWS, LENGTH, generator=generator)
    if not finite:
        current[1, 2] = NAN
    mask = torch.rand(ROWS, LENGTH, generator=generator) > 0.2
    mask[-1] = False  # an empty row
    return op.PolicyBatch(
        per_token_logps=torch.where(mask, current, NAN),
        old_per_token_logps=torch.where(mask, sampling + 0.01, NAN) if with_old else None,
        sampling_per_token_logps=torch.where(mask, sampling, NAN),
        completion_mask=mask,
        advantages=torch.linspace(-1, 1, ROWS),
        policy_versions=VERSION - (lag if by_token else lag[:, 0]),
        current_version=VERSION,
    )


def by_hand(data):
    """{lag name: list of log-ratios of its observed tokens}"""
    table = {name: [] for name in LAG_NAMES}
    for i in range(ROWS):
        for t in range(LENGTH):
            ratio = float(data.per_token_logps[i, t] - data.sampling_per_token_logps[i, t])
            if data.mask[i, t] and math.isfinite(ratio):
                lag = int(data.version_lags.expand(ROWS, LENGTH)[i, t])
                table[str(lag) if lag < 9 else "9_or_more"].append(ratio)
    return {name: values for name, values in table.items() if values}


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_every_lag_has_the_numbers_of_its_tokens(by_token, with_old):
    data = batch(by_token=by_token, with_old=with_old)
    logged = op.Correction(weight=op.TruncateWeight(max_weight=2.0))(data).stats.compute()
    table = by_hand(data)
    assert {key.split("/")[2] for key in logged if "/lag/" in key} == set(table)  # none without tokens
    assert len(table) >= 5
    for name, ratios in table.items():
        rho = [math.exp(one) for one in ratios]
        ess = sum(rho) ** 2 / (len(rho) * sum(one * one for one in rho))
        got = {
            key.rpartition("/")[2]: value for key, value in logged.items() if key.startswith(f"offpolicy/lag/{name}/")
        }
        wanted = {
            "tokens": len(ratios),
            "log_ratio_mean": sum(ratios) / len(ratios),
            "logp_diff_mean": sum(map(abs, ratios)) / len(ratios),
            "ess_token": ess,
        }
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-7), name


def test_staleness_and_mismatch_separate():
    """The trainer moved by 0.05 nats a version: lag 0 has none of it, the others have as much as their lag."""
    data = batch(by_token=False)
    logged = op.Correction()(data).stats.compute()
    means = [logged[f"offpolicy/lag/{lag}/log_ratio_mean"] for lag in (0, 2, 8)]
    assert means[0] > means[1] + 0.05 > means[2] + 0.1


def test_without_versions_there_is_no_table():
    data = batch(by_token=False)
    free = op.PolicyBatch(
        per_token_logps=data.per_token_logps, sampling_per_token_logps=data.sampling_per_token_logps,
        completion_mask=data.mask, advantages=data.advantages,
    )  # fmt: skip
    assert not [key for key in op.Correction()(free).stats if "/lag/" in key]
    assert not [key for key in op.Correction(measure=("mismatch",))(data).stats if "/lag/" in key]


def test_batches_merge_before_anything_is_divided():
    data = batch(by_token=False)
    whole = op.Correction()(data).stats.compute()
    parts = [
        op.PolicyBatch(
            per_token_logps=data.per_token_logps[rows], sampling_per_token_logps=data.sampling_per_token_logps[rows],
            completion_mask=data.mask[rows], advantages=data.advantages[rows],
            policy_versions=data.policy_versions[rows], current_version=VERSION,
        )
        for rows in (slice(0, 4), slice(4, ROWS))
    ]  # fmt: skip
    first, second = (op.Correction()(part).stats for part in parts)
    merged = first.merge(second).compute()
    of_lags = {key: value for key, value in whole.items() if "/lag/" in key}
    assert {key: merged[key] for key in of_lags} == pytest.approx(of_lags, rel=1e-6)


@pytest.mark.parametrize("by_token", [False, True])
def test_the_share_of_clipped_tokens_by_lag(by_token):
    data = batch(by_token=by_token, with_old=True, finite=True)
    stats = op.Objective(policy_loss=op.losses.PPOClip(low=0.2, high=0.2))(data).stats.compute()
    rho = (data.per_token_logps - data.old_per_token_logps).exp()
    positive = data.advantages.unsqueeze(1) > 0
    clipped = torch.where(positive, rho > 1.2, rho < 0.8) & data.mask & (data.advantages.unsqueeze(1) != 0)
    lags = data.version_lags.expand(ROWS, LENGTH).clamp(max=9)
    found = 0
    for place, name in enumerate(LAG_NAMES):
        here = (lags == place) & data.mask
        if here.any():
            share = (clipped & here).sum().item() / here.sum().item()
            assert stats[f"offpolicy/lag/{name}/clip_fraction"] == pytest.approx(share)
            found += share > 0
        else:
            assert f"offpolicy/lag/{name}/clip_fraction" not in stats
    assert found >= 2


def test_a_loss_that_clips_responses_counts_each_at_its_largest_lag():
    data = batch(by_token=True, with_old=True, finite=True)
    stats = op.Objective(policy_loss=op.losses.GSPO())(data).stats
    units = {name: float(stats.groups[f"lag/{name}#clip"].moments["units"]) for name in LAG_NAMES}
    rows = torch.where(data.mask, data.version_lags, 0).amax(1)[data.mask.any(1)].clamp(max=9).tolist()
    assert units == {name: rows.count(place) for place, name in enumerate(LAG_NAMES)}


def test_lags_below_zero_count_as_zero():
    table = sums_by_lag([torch.ones(3)], torch.tensor([-2, 0, 300]))
    assert table[:, 0].tolist() == [2.0, *[0.0] * 8, 1.0]
