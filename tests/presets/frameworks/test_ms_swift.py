"""ms-swift's rollout importance sampling in plain floats, value and gradient, against ``from_ms_swift``."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from plain_parity import GEO, assert_both, gradient, ratio, rows_of

from trl_offpolicy import presets

CAP, DELTA, BETA = 1.12, 0.05, 0.3


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return presets.from_ms_swift(**options)


def weights(log_ratios, mode):
    rhos, whole = [math.exp(value) for value in log_ratios], ratio(log_ratios, GEO)
    return {
        None: [1.0] * len(rhos),
        "token_truncate": [min(rho, CAP) for rho in rhos],
        "token_mask": [rho * (rho <= CAP) for rho in rhos],
        "sequence_truncate": [min(whole, CAP)] * len(rhos),
        "sequence_mask": [rho * (whole <= CAP) for rho in rhos],
    }[mode]


@pytest.mark.parametrize("delta", [None, DELTA])
@pytest.mark.parametrize("mode", [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_weight_multiplies_policy_and_kl_term(mode, delta, random_batch):
    """(PPO's loss + beta k3) w, over all tokens; off-policy sequence masking takes whole responses out of the sum."""
    batch = random_batch(2)
    batch = replace(batch, ref_per_token_logps=batch.old_per_token_logps + 0.4)
    loss, slopes, seen, count = 0.0, torch.zeros(batch.mask.shape), [], int(batch.mask.sum())
    for index, row in enumerate(rows_of(batch)):
        drift = -sum(row.total) / max(len(row.total), 1)
        masked = delta is not None and row.advantage < 0 and drift > delta
        own = weights(row.mismatch, mode)
        for t, now, old, weight in zip(row.at, row.current, row.old, own, strict=True):
            r, x = math.exp(now - old), now - (old + 0.4)
            factor = weight * (not masked) / count
            clipped = max(-r * row.advantage, -min(max(r, 0.8), 1.2) * row.advantage)
            moves = -r * row.advantage if clipped == -r * row.advantage else 0.0
            loss += factor * (clipped + BETA * (math.exp(-x) - 1 + x))
            slopes[index, t] = factor * (moves + BETA * (1 - math.exp(-x)))
            seen.append(factor > 0)
    if delta is not None or mode in ("token_mask", "sequence_mask"):
        assert_both([seen])

    given = {} if mode is None else {"rollout_importance_sampling_mode": mode}
    given |= {} if mode is None else {"rollout_importance_sampling_threshold": CAP}
    preset = quiet(**given, off_policy_sequence_mask_delta=delta, beta=BETA, loss_type="bnpo")
    assert preset.objective(batch).loss.item() == pytest.approx(loss, rel=2e-5, abs=1e-7)
    torch.testing.assert_close(gradient(preset, batch), slopes, rtol=2e-4, atol=1e-6)


def test_the_loss_type_is_the_denominator(random_batch):
    """ms-swift's default is a mean by response; one response of the batch has no token, and counts."""
    batch = random_batch(2)
    means = []
    for row in rows_of(batch):
        ratios = [math.exp(now - old) for now, old in zip(row.current, row.old, strict=True)]
        terms = [max(-r * row.advantage, -min(max(r, 0.8), 1.2) * row.advantage) for r in ratios]
        means.append(sum(terms) / max(len(terms), 1))
    losses = {one: quiet(beta=0.0, loss_type=one).objective(batch).loss.item() for one in ("grpo", "bnpo", "dapo")}
    assert losses["grpo"] == quiet(beta=0.0).objective(batch).loss.item()
    assert losses["grpo"] == pytest.approx(sum(means) / len(means), rel=2e-5, abs=1e-7)
    assert losses["bnpo"] == losses["dapo"] != losses["grpo"]
    assert quiet(loss_type=None).objective.aggregation == "token_mean"
    assert quiet(loss_type="dr_grpo").objective.aggregation == "seq_mean_token_sum_norm"
    with pytest.raises(ValueError, match=r"^loss_type must be one of .* but got 'cispo'"):
        quiet(loss_type="cispo")


def test_defaults():
    preset = quiet(rollout_importance_sampling_mode="token_mask")

    assert preset.correction.weight.high == 2.0 and preset.correction.weight.low is None
    assert preset.objective.kl.coef == quiet(beta=None).objective.kl.coef == 0.04
    assert quiet().correction.weights == () and quiet(beta=0.0).objective.kl is None
