"""Failures of other frameworks that must not happen here: verl, then SkyRL."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import (
    BandWeight,
    Correction,
    DivergenceBand,
    Objective,
    OffPolicySequenceMask,
    OutlierVeto,
    RatioBand,
    RawWeight,
    TruncateWeight,
)
from trl_offpolicy.presets.parsing import parse_correction

NAN = float("nan")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

TOKEN_BAND = RatioBand(level="token", low=0.5, high=2.0)


def run(ratios, fields=None, **options):
    return Correction(**options)(policy_batch(ratios, **(fields or {})))


def finite_loss_and_gradient(batch, **options):
    """Loss and gradient of a batch, after checking that they and all stats are finite."""
    out = Objective(correction=Correction(**options))(batch)
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert batch.per_token_logps.grad.isfinite().all()
    assert all(math.isfinite(value) for value in out.stats.compute().values())
    return out


@pytest.mark.parametrize("options", [{}, {"normalize": "original"}, {"normalize": "kept"}])
def test_verl_zero_division_when_every_token_is_out_of_band(options):
    batch = policy_batch([[8.0, 9.0], [0.1, None]])

    out = finite_loss_and_gradient(batch, weight=BandWeight(low=0.5, high=5.0), **options)

    assert out.loss.item() == 0.0
    assert out.weights.abs().sum().item() == 0.0
    assert batch.per_token_logps.grad.abs().sum().item() == 0.0


def test_verl_ess_of_34_for_tiny_weights():
    stats = run([[1.5e-9] * 4, [4e-9] * 4], weight=RawWeight()).stats

    # log 1.5e-9 = -20.3 is clamped at -20: weights 2.06e-9 and 4e-9
    low, high = math.exp(-20), 4e-9
    expected = (low + high) ** 2 / (2 * (low**2 + high**2))
    assert float(stats["weight/ess_token"]) == pytest.approx(expected, rel=1e-5)
    assert float(stats["weight/ess_sequence"]) == pytest.approx(expected, rel=1e-5)


def test_verl_empty_rows_counted_into_metrics():
    options = {
        "weight": RawWeight(level="sequence"),
        "keep": (RatioBand(level="sequence", low=None, high=2.0), TOKEN_BAND),
        "correct_threshold": 1.0,
    }
    rows = [[1.5, 1.5], [0.5, 8.0]]

    alone = run(rows, fields={"rewards": torch.tensor([1.0, 0.0])}, **options).stats.compute()
    empty = {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    with_empty = run([*rows, [None, None], [None, None]], fields=empty, **options).stats.compute()

    assert with_empty == pytest.approx(alone, rel=1e-5, abs=1e-5)


def test_verl_nan_at_padding_poisons_weights():
    batch = policy_batch([[2.0, None, None]])

    out = finite_loss_and_gradient(batch, weight=RawWeight(level="sequence"), normalize="original")

    close(out.weights, torch.tensor([[1.0, 0.0, 0.0]]))
    assert batch.per_token_logps.grad.tolist() == [[-1.0, 0.0, 0.0]]


def test_verl_k3_overflow():
    sampling = torch.tensor([[-1004.0, -4.0], [-4.0, -4.0]])
    batch = policy_batch([[1.0, 1.0], [1.0, 1.0]], sampling_per_token_logps=sampling)

    out = finite_loss_and_gradient(batch, keep=(DivergenceBand(statistic="k3", high=0.01),))

    assert out.keep_mask.tolist() == [[False, False], [True, True]]
    # (e^20 - 21) / 4 tokens
    assert float(out.stats["mismatch/kl_k3"]) == pytest.approx((math.exp(20) - 21) / 4, rel=1e-5)


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_verl_everything_rejected(denominator, aggregation):
    batch = policy_batch([[8.0, 9.0], [7.0, None]], rewards=torch.ones(2))
    correction = Correction(
        weight=RawWeight(), keep=(RatioBand(level="sequence", low=None, high=2.0),), normalize="kept"
    )

    out = Objective(correction=correction, denominator=denominator, aggregation=aggregation)(batch)
    out.loss.backward()

    assert out.loss.item() == 0.0
    assert batch.per_token_logps.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert float(out.stats["keep/dropped_token_fraction"]) == 1.0
    assert all(math.isfinite(value) for value in out.stats.compute().values())


def test_verl_rejecting_the_last_token_erases_the_reward():
    ratios = [[1.0, 1.0, 8.0]]

    rejected = Objective(correction=Correction(keep=(TOKEN_BAND,)))(policy_batch(ratios))
    whole = Objective()(policy_batch(ratios))

    assert rejected.per_token_loss.tolist() == [[-1.0, -1.0, 0.0]]  # the others keep their advantage
    assert whole.per_token_loss.tolist() == [[-1.0, -1.0, -1.0]]


def test_verl_settings_silently_ignored():
    with pytest.raises(TypeError, match="bypass_mode"):
        Correction(bypass_mode=True)
    with pytest.raises(ValueError, match=r"^offpolicy.correction.bypass_mode is not an option of Correction"):
        parse_correction({"bypass_mode": True}, where="offpolicy.correction")


def test_verl_a_string_parsed_as_a_bound():
    spec = {"weight": {"type": "band", "low": 0.5, "high": "0.5_5_0"}}

    with pytest.raises(
        ValueError, match=r"^offpolicy.correction.weight: high must be a finite number, but got '0.5_5_0'"
    ):
        parse_correction(spec, where="offpolicy.correction")


def test_skyrl_smallest_ratio_is_zero_as_soon_as_there_is_padding():
    stats = run([[2.0, 3.0], [4.0, None], [None, None]], weight=RawWeight()).stats

    assert float(stats["weight/min"]) == pytest.approx(2.0, abs=1e-6)
    assert float(stats["weight_applied/min"]) == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize(
    "term",
    [
        TOKEN_BAND,
        RatioBand(level="sequence", low=0.5, high=2.0),
        RatioBand(level="sequence_mean", low=0.5, high=2.0),
        OutlierVeto(low=0.5, high=2.0),
        DivergenceBand(statistic="k3", high=1.0),
        OffPolicySequenceMask(max_divergence=0.5),
    ],
    ids=lambda term: term.name,
)
def test_skyrl_nan_kept_by_some_masks_and_not_by_others(term):
    batch = policy_batch([[1.0, 1.0], [1.0, None]], advantages=-torch.ones(2))
    batch.sampling_per_token_logps[0, 0] = NAN

    assert Correction(keep=(term,))(batch).keep_mask.tolist() == [[True, True], [True, False]]
    assert Correction(keep=(term,), nonfinite="drop")(batch).keep_mask.tolist() == [
        [False, True],
        [True, False],
    ]
    with pytest.raises(ValueError, match="must be finite"):
        Correction(keep=(term,), nonfinite="raise")(batch)


def test_skyrl_one_sided_token_mask_is_silently_off():
    with pytest.raises(TypeError, match="'high'"):
        RatioBand(level="token", low=0.5)
    one_sided = run([[0.25, 8.0]], keep=(RatioBand(level="token", low=0.5, high=None),))
    assert one_sided.keep_mask.tolist() == [[False, True]]


def test_skyrl_missing_log_probs_silently_mean_no_correction():
    batch = replace(policy_batch([[2.0]]), sampling_per_token_logps=None)

    with pytest.raises(ValueError, match="sampling_per_token_logps must be given"):
        Objective(correction=Correction(weight=TruncateWeight(max_weight=2.0)))(batch)
