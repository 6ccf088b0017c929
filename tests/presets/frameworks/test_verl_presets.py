"""verl's 19 named configurations: names, defaults, arguments, numbers."""

import math

import pytest
from plain_parity import assert_parity
from plain_verl import run

from trl_offpolicy import presets

NAMED = {
    "decoupled_token_is": {"rollout_is": "token"},
    "decoupled_seq_is": {"rollout_is": "sequence"},
    "decoupled_token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "decoupled_seq_is_rs": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    "decoupled_geo_rs_seq_tis": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1"},
    "decoupled_geo_rs_token_tis": {"rollout_is": "token", "rollout_rs": "seq_mean_k1"},
    "decoupled_k3_rs": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "decoupled_k3_rs_seq_tis": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "decoupled_k3_rs_token_tis": {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "bypass_ppo_clip": {"bypass_mode": True},
    "bypass_ppo_clip_geo_rs": {"bypass_mode": True, "rollout_rs": "seq_mean_k1"},
    "bypass_ppo_clip_k3_rs": {"bypass_mode": True, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "bypass_pg_is": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"},
    "bypass_pg_token_icepop": {
        "bypass_mode": True,
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_5.0",
    },
    "bypass_pg_geo_rs": {"bypass_mode": True, "loss_type": "reinforce", "rollout_rs": "seq_mean_k1"},
    "bypass_pg_geo_rs_seq_tis": {
        "bypass_mode": True,
        "loss_type": "reinforce",
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1",
    },
    "bypass_pg_geo_rs_token_tis": {
        "bypass_mode": True,
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_rs": "seq_mean_k1",
    },
    "disabled": {},
}


def test_there_are_19():
    assert {f"verl/{name}" for name in NAMED} == {name for name in presets.names() if name.startswith("verl/")}
    assert len(NAMED) == 19


@pytest.mark.parametrize("name", NAMED)
def test_named_presets(name, random_batch):
    options = NAMED[name]
    if options.get("rollout_rs") == "seq_mean_k1":
        options = {"rollout_rs_threshold": "0.999_1.001", **options}
    batch = random_batch(0, spread=0.05)

    preset = presets.get(f"verl/{name}")

    assert preset.citation == f"verl 0.9.1, RolloutCorrectionConfig.{name}"
    assert_parity(preset, batch, *run(batch, options))


def test_named_presets_have_verls_defaults():
    def band(name):
        term = presets.get(f"verl/{name}").correction.keep[0]
        return math.exp(term.low), math.exp(term.high)

    assert band("decoupled_seq_is_rs") == pytest.approx((0.5, 2.0))
    for name in NAMED:
        if "geo_rs" in name:
            assert band(name) == pytest.approx((0.999, 1.001))
        if "k3_rs" in name:
            assert presets.get(f"verl/{name}").correction.keep[0].high == 0.01


def test_named_presets_take_verls_arguments():
    weight = presets.get("verl/decoupled_token_icepop", threshold=4.0, threshold_lower=0.25).correction.weight
    assert (weight.low, weight.high) == (0.25, 4.0)
    both = presets.get("verl/decoupled_geo_rs_seq_tis", is_threshold=3.0, rs_threshold="0.99_1.01").correction
    assert both.weight.max_weight == 3.0
    assert both.keep[0].high == pytest.approx(math.log(1.01))
    assert presets.get("verl/bypass_ppo_clip_k3_rs", rs_threshold=0.1).correction.keep[0].high == 0.1
