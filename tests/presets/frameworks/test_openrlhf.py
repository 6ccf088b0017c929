"""OpenRLHF's vLLM correction in plain floats, against ``from_openrlhf``."""

import math
import re
import warnings

import pytest
from plain_parity import GEO, assert_both, assert_parity, ppo, ratio, rows_of

from trl_offpolicy import losses, presets

ON = {"enable_vllm_is_correction": True}


def correct(log_ratios, kind, low, high):
    """The factor of each token's loss; OpenRLHF's denominator holds all tokens."""
    rhos = [math.exp(value) for value in log_ratios]
    if kind == "tis":
        return [min(max(rho, low), high) for rho in rhos]
    if kind == "icepop":
        return [rho * (low <= rho <= high) for rho in rhos]
    return [rho * (low <= ratio(log_ratios, GEO) <= high) for rho in rhos]


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return presets.from_openrlhf(**options)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_every_type(kind, seed, random_batch):
    low, high = (0.9, 1.15) if kind == "seq-mask-tis" else (0.7, 1.4)
    batch, rows = random_batch(seed), rows_of(random_batch(seed))
    factors = [correct(row.mismatch, kind, low, high) for row in rows]
    keep = [[True] * len(row.at) for row in rows]
    if kind == "seq-mask-tis":
        keep = [[factor > 0 for factor in row] for row in factors]
        assert_both(keep)
    total = sum(
        factor * ppo(now - old, row.advantage)
        for row, fs in zip(rows, factors, strict=True)
        for now, old, factor in zip(row.current, row.old, fs, strict=True)
    )
    preset = quiet(**ON, vllm_is_correction_type=kind, vllm_is_truncated_threshold=[low, high])

    assert_parity(preset, batch, factors, keep, total / sum(len(row.at) for row in rows))


def test_gspo_takes_the_whole_shift_into_its_own_ratio(random_batch):
    batch = random_batch(0)
    with pytest.warns(UserWarning, match=r"^enable_vllm_is_correction applies no weight with policy_loss_type='gspo'"):
        preset = presets.from_openrlhf(**ON, policy_loss_type="gspo")
    total = 0.0
    for row in rows_of(batch):
        if row.at:
            total += ppo(sum(row.total) / len(row.at), row.advantage)

    keep = [[True] * len(row.at) for row in rows_of(batch)]
    weights = [[1.0] * len(row.at) for row in rows_of(batch)]
    assert_parity(preset, batch, weights, keep, total / 8)  # 8 responses, the empty one included


def test_defaults():
    assert quiet().correction.weights == ()
    weight = quiet(**ON).correction.weight
    assert (weight.min_weight, weight.max_weight) == (0.5, 5.0)
    assert quiet().objective.policy_loss == losses.PPOClip()
    assert quiet(policy_loss_type="gspo").objective.policy_loss.level == "sequence_mean"
    assert quiet(policy_loss_type="gspo").objective.mode == "decoupled"
    assert quiet(vllm_is_truncated_threshold=[0.5, 5.0]).source_clamp is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_is_correction_type": "icepop"}, r"^vllm_is_correction_type='icepop' has no effect without enable_"),
        ({"vllm_is_truncated_threshold": [0.1, 2]}, r"^vllm_is_truncated_threshold=\[0.1, 2\] has no effect without"),
        (
            {**ON, "policy_loss_type": "gspo", "vllm_is_correction_type": "icepop"},
            r"^vllm_is_correction_type='icepop' has no effect with policy_loss_type='gspo'",
        ),
    ],
)
def test_what_openrlhf_ignores_silently_is_said(options, message):
    with pytest.warns(UserWarning) as caught:
        preset = presets.from_openrlhf(**options)

    assert any(re.search(message, str(warning.message)) for warning in caught)
    assert preset.correction.weights == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**ON, "vllm_is_correction_type": "mis"}, r"^vllm_is_correction_type must be one of"),
        ({**ON, "vllm_is_correction_type": "seq_mask_tis"}, r"Did you mean 'seq-mask-tis'"),
        (
            {**ON, "vllm_is_truncated_threshold": 5.0},
            r"^vllm_is_truncated_threshold must be \[low, high\], but got 5.0",
        ),
        ({**ON, "vllm_is_truncated_threshold": [0.5]}, r"^vllm_is_truncated_threshold must be \[low, high\]"),
        ({**ON, "vllm_is_truncated_threshold": "0.5"}, r"^vllm_is_truncated_threshold must be \[low, high\]"),
        ({**ON, "vllm_is_truncated_threshold": [0.5, "5"]}, r"^vllm_is_truncated_threshold must be a finite number"),
        ({"policy_loss_type": "dpo"}, r"^policy_loss_type must be one of"),
        ({"enable_vllm_is_correction": None}, r"^enable_vllm_is_correction must be True or False"),
        ({"enable_vllm_is": True}, r"^enable_vllm_is is not an option of .*'enable_vllm_is_correction'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        presets.from_openrlhf(**options)
