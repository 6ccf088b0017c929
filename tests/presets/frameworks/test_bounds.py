"""A bound that no ratio reaches is "no bound" in other frameworks: taken so, and said."""

import math

import pytest
import torch

from trl_offpolicy import presets
from trl_offpolicy.correction.terms import BandWeight, DivergenceBand, OutlierVeto, RatioBand, RawWeight, TruncateWeight
from trl_offpolicy.presets.frameworks import bounds

LOW = {"low": 0.5, "high": None}
CASES = [  # framework, options with CAP in place of the bound, the weight, the keep terms
    ("verl", {"rollout_is": "token", "rollout_is_threshold": "CAP"}, RawWeight(), ()),
    ("verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_CAP"}, BandWeight(**LOW), ()),
    (
        "verl",
        {"rollout_is": "sequence", "rollout_is_threshold": "CAP", "bypass_mode": True, "loss_type": "reinforce"},
        RawWeight(level="sequence", ratio="current/sampling"),
        (),
    ),
    ("verl", {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "CAP"}, None, ()),
    (
        "verl",
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_CAP"},
        None,
        (DivergenceBand(statistic="k1", level="token", low=math.log(0.5), high=None),),
    ),
    ("skyrl", {"tis_ratio_type": "token", "token_tis_ratio_clip_high": "CAP"}, RawWeight(), ()),
    (
        "skyrl",
        {"sequence_mask_metric": "product", "product_mask_high": "CAP"},
        None,
        (RatioBand(level="sequence", **LOW),),
    ),
    ("skyrl", {"outlier_token_is_threshold_high": "CAP"}, None, ()),
    (
        "skyrl",
        {"outlier_token_is_threshold_high": "CAP", "outlier_token_is_threshold_low": 0.5},
        None,
        (OutlierVeto(**LOW),),
    ),
    ("slime", {"tis_upper_bound": "CAP"}, RawWeight(), ()),
    ("slime", {"tis_upper_bound": "CAP", "tis_mode": "clip"}, RawWeight(), ()),  # its floor is 1 / CAP
    (
        "slime",
        {"use_rs": True, "rs_upper_bound": "CAP"},
        TruncateWeight(max_weight=2.0),
        (RatioBand(level="token", **LOW),),
    ),
    ("areal", {"upper": "CAP"}, RawWeight(), ()),
    ("areal", {"upper": "CAP", "lower": 0.5}, RawWeight(), (RatioBand(level="token", **LOW),)),
    ("areal", {"upper": "CAP", "metric": "kl_k1", "level": "sequence", "agg": "max"}, RawWeight(), ()),
    ("areal", {"upper": "CAP", "metric": "kl_k2"}, RawWeight(), ()),
    ("areal", {"upper": "CAP", "metric": "kl_k3"}, RawWeight(), ()),
    ("areal", {"upper": "CAP", "metric": "binary_kl"}, RawWeight(), ()),
    ("openrlhf", {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [0.0, "CAP"]}, RawWeight(), ()),
    (
        "openrlhf",
        {
            "enable_vllm_is_correction": True,
            "vllm_is_correction_type": "icepop",
            "vllm_is_truncated_threshold": [0.5, "CAP"],
        },
        BandWeight(**LOW),
        (),
    ),
    ("trl", {"vllm_importance_sampling_clip_max": "CAP"}, RawWeight(level="sequence"), ()),
    (
        "trl",
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": "CAP"},
        RawWeight(),
        (),
    ),
]


def put(value, cap):
    if isinstance(value, list):
        return [put(item, cap) for item in value]
    if isinstance(value, str) and "CAP" in value:
        return cap if value == "CAP" else value.replace("CAP", f"{cap:g}")
    return value


def test_a_cap_that_nothing_reaches_is_no_cap():
    for framework, options, weight, keep in CASES:
        for cap in (1e9, 1e12, math.inf):
            given = {name: put(value, cap) for name, value in options.items()}
            with pytest.warns(UserWarning, match="is taken as no (cap|floor): log-ratios are held") as caught:
                correction = presets.FRAMEWORKS[framework](**given).correction
            assert any("taken as no cap" in str(warning.message) for warning in caught)
            assert (correction.weight, correction.keep) == (weight, keep), (framework, given)
            assert caught[0].filename == __file__


def test_a_floor_alone_still_holds():
    weight = bounds.truncate("token", 0.5, math.inf)
    ratios = torch.tensor([0.1, 1.0, 1e8])

    assert torch.equal(weight.bound(ratios), torch.tensor([0.5, 1.0, 1e8]))


def test_bounds_that_act_and_mistakes_stay():
    assert bounds.upper("cap", 4e8) == 4e8
    assert bounds.lower("floor", -1.0) == -1.0
    assert bounds.upper("cap", None) is None
    for framework, options in (
        ("skyrl", {"tis_ratio_type": "token", "token_tis_ratio_clip_high": None}),
        ("trl", {"vllm_importance_sampling_clip_max": None}),
        ("openrlhf", {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [-1.0, 5.0]}),
        ("areal", {"upper": math.nan}),
        ("slime", {"tis_upper_bound": "1e9"}),
    ):
        with pytest.raises(ValueError, match="must"):
            presets.FRAMEWORKS[framework](**options)
