"""TRL's own options as a preset: which loss, weight, mask, KL and denominator they mean."""

import math
from functools import partial

import pytest
import torch
from batches import LOGP, policy_batch, to_tensor

from trl_offpolicy import BandWeight, OffPolicySequenceMask, Reduction, TruncateWeight, losses, presets
from trl_offpolicy.presets.frameworks.trl import AGGREGATION, GLOBAL_TOKEN_LOSSES

L = math.log(2)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
ROWS = [[1.0, 1.0, 1.0], [1.0, None, None]]
A13 = {"advantages": torch.tensor([1.0, 3.0])}


def loss_of(batch, reduction=None, **options):
    return presets.from_trl(**{"use_vllm": False, **options}).objective(batch, reduction).loss.item()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", -2.0),  # -(3/3 + 3/1) / 2
        ("bnpo", -1.5),  # -(1 + 1 + 1 + 3) / 4
        ("dapo", -6 / 8),  # over the tokens of the whole step
        ("dr_grpo", -0.3),  # -(3/10 + 3/10) / 2
        ("luspo", -3.0),  # -(3 + 3) / 2
    ],
)
def test_loss_types_differ_in_their_denominator(loss_type, expected):
    reduction = Reduction(tokens=8 if loss_type in GLOBAL_TOKEN_LOSSES else None, max_length=10)

    assert loss_of(policy_batch(ROWS, **A13), reduction, loss_type=loss_type) == pytest.approx(expected, abs=1e-6)


def test_every_loss_type_of_trl():
    assert set(AGGREGATION) == {"grpo", "sapo", "bnpo", "dapo", "cispo", "vespo", "dr_grpo", "luspo"}
    assert set(GLOBAL_TOKEN_LOSSES) == {"dapo", "cispo", "vespo"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, losses.PPOClip(low=0.2, high=0.2)),
        ({"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3}, losses.PPOClip(low=0.1, high=0.3)),
        ({"delta": 1.5}, losses.PPOClip(delta=1.5)),
        ({"importance_sampling_level": "sequence"}, losses.PPOClip(level="sequence_mean")),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, losses.CISPO(high=5.0)),
        ({"loss_type": "cispo"}, losses.CISPO(high=0.2)),
        (
            {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
            losses.SAPO(temperature_pos=2.0, temperature_neg=3.0),
        ),
        (
            {
                "loss_type": "vespo",
                "vespo_k_pos": 1.0,
                "vespo_lambda_pos": 2.0,
                "vespo_k_neg": 4.0,
                "vespo_lambda_neg": 5.0,
            },
            losses.VESPO(k_pos=1.0, lambda_pos=2.0, k_neg=4.0, lambda_neg=5.0),
        ),
    ],
)
def test_policy_loss(options, expected):
    assert presets.from_trl(**options).objective.policy_loss == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, BandWeight(level="sequence", low=None, high=3.0)),  # TRL's default: sequence_mask, 3.0
        ({"vllm_importance_sampling_mode": "token_truncate"}, TruncateWeight(level="token", max_weight=3.0)),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
            BandWeight(level="token", low=0.5, high=3.0),
        ),
        (
            {
                "vllm_importance_sampling_mode": "sequence_truncate",
                "vllm_importance_sampling_clip_max": 2.0,
                "vllm_importance_sampling_clip_min": 0.5,
            },
            TruncateWeight(level="sequence", max_weight=2.0, min_weight=0.5),
        ),
        ({"vllm_importance_sampling_correction": False}, None),
        ({"use_vllm": False}, None),
    ],
)
def test_weight(options, expected):
    preset = presets.from_trl(**options)

    assert preset.correction.weight == expected
    assert preset.requires == (() if expected is None else ("sampling_per_token_logps",))


def test_masked_tokens_stay_in_the_denominator():
    batch = policy_batch([[2.0, 1.0], [4.0, 1.0]])

    # weights 2, 2 and, above 3.0, 0, 0: -(2 + 2) / 4
    assert loss_of(batch, use_vllm=True) == pytest.approx(-1.0, abs=1e-6)


def test_the_weight_multiplies_before_the_kl_is_added():
    batch = policy_batch([[2.0, 1.0]], ref_per_token_logps=LOGP + to_tensor([[2.0, 2.0]]).log())

    # (-2 - 2) / 2 + 0.1 (1 - L)
    assert loss_of(batch, use_vllm=True, beta=0.1) == pytest.approx(-2 + 0.1 * (1 - L), abs=1e-6)


def test_kl():
    assert presets.from_trl().objective.kl is None
    biased = presets.from_trl(beta=0.1, use_bias_correction_kl=False).objective.kl
    assert (biased.coef, biased.ratio_weighted) == (0.1, False)
    assert presets.from_trl(beta=0.1).objective.kl.ratio_weighted


@pytest.mark.parametrize(("use_vllm", "ratio"), [(True, "current/sampling"), (False, "current/old")])
def test_off_policy_mask_threshold(use_vllm, ratio):
    keep = presets.from_trl(off_policy_mask_threshold=0.3, use_vllm=use_vllm).correction.keep

    assert keep == (OffPolicySequenceMask(max_divergence=0.3, ratio=ratio),)
    assert presets.from_trl().correction.keep == ()


def test_entropy_coefficient():
    assert presets.from_trl(entropy_coef=0.02).objective.entropy_coef == 0.02


def test_formula_names_the_mode():
    assert presets.from_trl().formula == "loss_type=dapo, sequence_mask"
    assert presets.from_trl(use_vllm=False).formula == "loss_type=dapo, no IS"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_type": "ppo"}, ValueError, r"^loss_type must be one of \['bnpo', .*, but got 'ppo'"),
        ({"epsilonn": 0.2}, TypeError, "epsilonn"),
        (
            {"importance_sampling_level": "turn"},
            ValueError,
            r"^importance_sampling_level must be 'token' or 'sequence', but got 'turn'",
        ),
        (
            {"vllm_importance_sampling_mode": "token"},
            ValueError,
            r"^vllm_importance_sampling_mode must be .*'token'",
        ),
        (
            {"vllm_importance_sampling_mode": "turn_mask"},
            ValueError,
            r"^vllm_importance_sampling_mode must be",
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            ValueError,
            r"^vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min must be given",
        ),
        (
            {"vllm_importance_sampling_clip_max": "3.0"},
            ValueError,
            r"^vllm_importance_sampling_clip_max must be a number or None, but got '3.0'",
        ),
        ({"beta": "0.1"}, ValueError, r"^beta must be a number, but got '0.1'"),
        ({"epsilon": "0.2"}, ValueError, r"^epsilon must be a number, but got '0.2'"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        presets.from_trl(**options)


def test_the_older_name_of_the_cap_wins_as_in_trl():
    with pytest.warns(UserWarning, match="^vllm_importance_sampling_cap is read as vllm_importance_sampling_clip_max"):
        preset = presets.from_trl(vllm_importance_sampling_cap=2.5, vllm_importance_sampling_clip_max=9.0)

    assert preset.correction == presets.from_trl(vllm_importance_sampling_clip_max=2.5).correction
    assert presets.from_trl(vllm_importance_sampling_cap=None).correction == presets.from_trl().correction


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_floor_without_a_cap_is_taken_as_trl_takes_it(level):
    weight = presets.from_trl(
        vllm_importance_sampling_mode=f"{level}_truncate",
        vllm_importance_sampling_clip_max=None,
        vllm_importance_sampling_clip_min=0.5,
    ).correction.weight
    ratios = torch.tensor([0.1, 0.7, 50.0])
    assert torch.equal(weight.bound(ratios), ratios.clamp(min=0.5, max=None))
