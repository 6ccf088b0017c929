"""``from_verl`` against verl's semantics in plain Python, its bugs, and what it refuses or says aloud."""

import warnings

import pytest
import torch
from batches import policy_batch
from plain_parity import assert_both, assert_parity, gradient, rows_of
from plain_verl import MODES, run

from trl_offpolicy import losses, presets

SEEDS = (0, 1, 2)


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


def test_a_mode_named_twice_is_one_term_with_one_threshold():
    keep = quiet(rollout_rs="token_k2, token_k3,token_k2", rollout_rs_threshold="0.1,0.2").correction.keep

    assert [(term.statistic, term.high) for term in keep] == [("k2", 0.1), ("k3", 0.2)]


def test_binary_kl_is_kpops_mask():
    """Of an open pull request of verl: a token stays if the KL of "this one or another" is small in both directions."""
    term = quiet(rollout_rs="binary_kl", rollout_rs_threshold=0.1).correction.keep
    assert term == presets.get("paper/kpop", high=0.1).correction.keep
    with pytest.raises(ValueError, match="must be one upper bound"):
        quiet(rollout_rs="binary_kl", rollout_rs_threshold="0.1_0.2")


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

    v1, legacy = quiet(**rejection).objective, quiet(**rejection, use_v1=False).objective
    bypass = quiet(**rejection, bypass_mode=True).objective

    assert (legacy.denominator, v1.denominator, bypass.denominator) == ("kept", "all", "all")
    assert (legacy.kl_on, v1.kl_on, bypass.kl_on) == ("kept", "kept", "all")
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
        ({"rollout_is": "token", "rollout_is_threshold": True}, r"^rollout_is_threshold must be a number"),
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
