"""verl 0.9.1's rollout correction, written down from its documentation and source, against ``from_verl``."""

import math
import warnings

import pytest
import torch
from batches import policy_batch
from plain_parity import assert_both, assert_parity, clamp, gradient, ppo, rows_of

from trl_offpolicy import losses, presets

MODES = {
    "token_k1": "0.7_1.6",
    "token_k2": 0.1,
    "token_k3": 0.08,
    "seq_sum_k1": "0.6_3.0",
    "seq_sum_k2": 0.3,
    "seq_sum_k3": 0.4,
    "seq_mean_k1": "0.9_1.2",
    "seq_mean_k2": 0.1,
    "seq_mean_k3": 0.12,
    "seq_max_k2": 0.35,
    "seq_max_k3": 0.5,
}
SEEDS = (0, 1, 2)


# ---------------------------------------------------------------------------------------- verl, one token at a time


def statistic(kind, log_ratio):
    log_ratio = clamp(log_ratio)
    return {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": math.exp(log_ratio) - 1 - log_ratio,
    }[kind]


def bounds_of(kind, threshold):
    if kind != "k1":
        return -math.inf, float(threshold)
    parts = [float(part) for part in str(threshold).split("_")]
    low, high = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    return math.log(low), math.log(high)  # of the ratio, though the statistic is minus its log


def keep_of(mode, threshold, log_ratios):
    level, kind = mode.rsplit("_", 1)
    low, high = bounds_of(kind, threshold)
    values = [statistic(kind, value) for value in log_ratios]
    if level == "token":
        return [low <= value <= high for value in values]
    total = {"seq_sum": sum(values), "seq_mean": sum(values) / max(len(values), 1), "seq_max": max(values, default=0)}
    return [low <= total[level] <= high] * len(values)


def weights_of(level, threshold, rows, *, normalize=False):
    parts = [float(part) for part in str(threshold).split("_")]
    weights = []
    for log_ratios in rows:
        logs = log_ratios if level == "token" else [sum(log_ratios)] * len(log_ratios)
        raw = [math.exp(clamp(value)) for value in logs]
        low, high = (None, parts[0]) if len(parts) == 1 else parts
        weights.append([min(w, high) if low is None else w * (low <= w <= high) for w in raw])
    if not normalize:
        return weights
    units = [w for row in weights for w in row] if level == "token" else [row[0] for row in weights if row]
    mean = sum(units) / len(units)
    return [[w / mean if mean > 1e-8 else w for w in row] for row in weights]


def run(batch, options):
    """Weights, keep masks and loss of verl with these options."""
    rows, bypass = rows_of(batch), options.get("bypass_mode", False)
    reinforce = bypass and options.get("loss_type") == "reinforce"
    logs = [row.total if bypass else row.mismatch for row in rows]
    weights = [[1.0] * len(row.at) for row in rows]
    if options.get("rollout_is") and (reinforce or not bypass):
        threshold, normalize = options.get("rollout_is_threshold", 2.0), options.get("rollout_is_batch_normalize")
        weights = weights_of(options["rollout_is"], threshold, logs, normalize=normalize)
    keep = [[True] * len(row.at) for row in rows]
    modes = options["rollout_rs"].split(",") if options.get("rollout_rs") else []
    thresholds = str(options.get("rollout_rs_threshold")).split(",")
    for mode, threshold in zip(modes, thresholds * (len(modes) if len(thresholds) == 1 else 1), strict=True):
        keep = [
            [a and b for a, b in zip(known, keep_of(mode, threshold, log), strict=True)]
            for known, log in zip(keep, logs, strict=True)
        ]
    total = 0.0
    for row, w, k in zip(rows, weights, keep, strict=True):
        for t in range(len(row.at)):
            centre = row.sampling[t] if bypass else row.old[t]
            clipped = ppo(row.current[t] - centre, row.advantage, dual=3.0)
            total += k[t] * w[t] * (-row.advantage * row.current[t] if reinforce else clipped)
    whole = bypass or options.get("use_v1")
    return weights, keep, total / sum(len(k) if whole else sum(k) for k in keep)


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return presets.from_verl(**options)


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_rejection_mode(mode, seed, random_batch):
    batch, options = random_batch(seed), {"rollout_rs": mode, "rollout_rs_threshold": MODES[mode]}
    weights, keep, loss = run(batch, options)

    assert_both(keep)
    assert_parity(quiet(**options), batch, weights, keep, loss)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", [2.0, 1.3, "1.3", "0.5_2.0"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_sampling(level, threshold, normalize, seed, random_batch):
    batch = random_batch(seed)
    options = {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalize,
    }

    assert_parity(quiet(**options), batch, *run(batch, options))


@pytest.mark.parametrize("use_v1", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("modes", "thresholds"),
    [
        ("token_k1,seq_mean_k3", "0.7_1.6,0.12"),
        ("seq_max_k2,token_k2,seq_sum_k1", "0.6,0.1,0.2_5.0"),
        ("token_k2,seq_max_k3", "0.3"),
        ("seq_sum_k1,seq_mean_k1", "1.3"),
    ],
)
def test_weights_and_several_modes_together(modes, thresholds, normalize, use_v1, random_batch):
    batch = random_batch(3)
    options = {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.5,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": modes,
        "rollout_rs_threshold": thresholds,
        "use_v1": use_v1,
    }
    weights, keep, loss = run(batch, options)

    assert_both(keep)
    assert_parity(quiet(**options), batch, weights, keep, loss)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("mode", [None, *MODES])
def test_bypass_mode(mode, loss_type, seed, random_batch):
    batch = random_batch(seed)
    options = {"bypass_mode": True, "loss_type": loss_type}
    if mode is not None:
        options |= {"rollout_rs": mode, "rollout_rs_threshold": MODES[mode]}
    if loss_type == "reinforce":
        options |= {"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": seed == 1}

    assert_parity(quiet(**options), batch, *run(batch, options))


def test_reinforce_does_not_differentiate_its_weights(random_batch):
    batch = random_batch(0)
    options = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}
    weights, _, _ = run(batch, options)
    tokens = int(batch.mask.sum())

    found = gradient(quiet(**options), batch)

    for index, row in enumerate(rows_of(batch)):
        for t, weight in zip(row.at, weights[index], strict=True):
            assert found[index, t].item() == pytest.approx(-weight * row.advantage / tokens, rel=2e-5)


def test_ppo_clip_in_bypass_mode_applies_no_weight_and_says_so(random_batch):
    options = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": "sequence"}
    with pytest.warns(UserWarning, match=r"^rollout_is='sequence' has no effect in bypass_mode with .*'ppo_clip'"):
        preset = presets.from_verl(**options)
    batch = random_batch(0)

    assert preset.correction.weights == ()
    assert_parity(preset, batch, *run(batch, options))


# ---------------------------------------------------------------------------------------------------- bugs and defaults


@pytest.mark.parametrize("mode", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_the_sign_of_k1_is_verls(mode):
    batch = policy_batch([[0.2], [0.3], [0.45], [1.0], [1.9], [2.1], [3.5]])

    keep = quiet(rollout_rs=mode, rollout_rs_threshold="0.5_4.0").correction(batch).keep_mask

    assert keep.squeeze(1).tolist() == [False, True, True, True, True, False, False]  # [1/4, 2], not [0.5, 4]


def test_a_single_k1_bound_is_its_own_reciprocal():
    batch = policy_batch([[0.45], [0.6], [1.6], [2.2]])

    assert quiet(rollout_rs="token_k1", rollout_rs_threshold=2.0).correction(batch).keep_mask.squeeze(1).tolist() == [
        False,
        True,
        True,
        False,
    ]


def test_defaults_correct_nothing():
    preset = quiet()

    assert preset.correction.weights == preset.correction.keep == ()
    assert preset.objective.policy_loss == losses.PPOClip(low=0.2, high=0.2, dual_clip=3.0)
    assert (preset.objective.mode, preset.objective.aggregation) == ("decoupled", "token_mean")
    assert preset.requires == ()
    assert quiet(rollout_is="token").correction.weight.max_weight == 2.0


def test_the_whole_yaml_can_be_pasted():
    yaml = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
        "rollout_is_batch_normalize": False,
    }

    assert quiet(**yaml).objective == quiet().objective


def test_rejected_tokens_and_the_rest_of_the_loss():
    rejection = {"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0}

    decoupled, v1 = quiet(**rejection).objective, quiet(**rejection, use_v1=True).objective
    bypass = quiet(**rejection, bypass_mode=True).objective

    assert (decoupled.denominator, v1.denominator, bypass.denominator) == ("kept", "all", "all")
    assert (decoupled.kl_on, v1.kl_on, bypass.kl_on) == ("kept", "kept", "all")
    assert quiet(rollout_is="token").objective.denominator == "all"
    assert (v1.scope, bypass.scope) == ("row", "row")  # no extra forward


def test_nothing_kept_is_loss_0(random_batch):
    preset = quiet(rollout_rs="token_k2", rollout_rs_threshold=1e-12)
    out = preset.objective(random_batch(0))

    assert not out.keep_mask.any()
    assert out.loss.item() == 0.0


def test_nan_stays_where_it_is(random_batch):
    batch = random_batch(0)
    sampling = batch.sampling_per_token_logps.clone()
    sampling[0, 0] = torch.nan
    batch = type(batch)(**{**vars(batch), "sampling_per_token_logps": sampling})

    out = quiet(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=9.0).objective(batch)

    assert out.weights[0, 0].item() == 1.0
    assert out.loss.isfinite()


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5_0"},
            r"^rollout_is_threshold must be 'high' or 'low_high', but got '0.5_5_0' with 3 parts",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5_0"},
            r"^rollout_rs_threshold of token_k1 must be 'high' or 'low_high', but got '0.5_5_0'",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "_5"}, r"^rollout_is_threshold must hold positive numbers"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"}, r"^rollout_is_threshold must hold positive numbers"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, r"^rollout_is_threshold must be 'low_high'"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, r"^rollout_is_threshold must be a number or a string"),
        ({"rollout_is": "token", "rollout_is_threshold": -2.0}, r"^rollout_is_threshold must hold positive numbers"),
        ({"rollout_is": "turn"}, r"^rollout_is must be one of \['token', 'sequence'\], but got 'turn'"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, r"^rollout_rs must be one of .*Did you mean"),
        ({"rollout_rs": "", "rollout_rs_threshold": 2}, r"^rollout_rs must be a non-empty string"),
        ({"rollout_rs": "token_k1"}, r"^rollout_rs_threshold must be given with rollout_rs"),
        (
            {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"},
            r"^rollout_rs_threshold of token_k2 must be one upper bound, but got '0.1_0.2'",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.01},
            r"^rollout_rs_threshold of token_k1 must be 'low_high' with low <= high, or a number >= 1",
        ),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"},
            r"^rollout_rs_threshold must hold 1 or 3 values",
        ),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": ","}, r"^rollout_rs_threshold must be a non-empty"),
        ({"bypass_mode": True, "loss_type": "pg"}, r"^loss_type must be one of \['ppo_clip', 'reinforce'\]"),
        ({"bypass_mode": "true"}, r"^bypass_mode must be True or False, but got 'true'"),
        ({"rollout_iss": "token"}, r"^rollout_iss is not an option of verl's .*Did you mean 'rollout_is'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        presets.from_verl(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is_threshold": 3.0}, r"^rollout_is_threshold=3.0 has no effect without rollout_is"),
        ({"rollout_is_batch_normalize": True}, r"^rollout_is_batch_normalize=True has no effect"),
        ({"rollout_rs_threshold": 3.0}, r"^rollout_rs_threshold=3.0 has no effect without rollout_rs"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, r"^rollout_is='token' has no effect without"),
        ({"loss_type": "reinforce"}, r"^loss_type='reinforce' has no effect without bypass_mode"),
    ],
)
def test_what_verl_ignores_silently_is_said(options, message):
    with pytest.warns(UserWarning, match=message) as caught:
        presets.from_verl(**options)
    assert caught[0].filename == __file__


# ---------------------------------------------------------------------------------------------------- the named presets

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


def test_named_presets_take_verls_arguments():
    weight = presets.get("verl/decoupled_token_icepop", threshold=4.0, threshold_lower=0.25).correction.weight
    assert (weight.low, weight.high) == (0.25, 4.0)
    both = presets.get("verl/decoupled_geo_rs_seq_tis", is_threshold=3.0, rs_threshold="0.99_1.01").correction
    assert both.weight.max_weight == 3.0
    assert both.keep[0].high == pytest.approx(math.log(1.01))
    assert presets.get("verl/bypass_ppo_clip_k3_rs", rs_threshold=0.1).correction.keep[0].high == 0.1
