"""In what two presets differ."""

from dataclasses import replace

import pytest

import trl_offpolicy as op
from trl_offpolicy.presets.diff import semantics
from trl_offpolicy.presets.preset import make_preset


def preset(correction=None, **objective):
    return make_preset("mine", correction or op.Correction(), citation="-", notes="-", **objective)


def rows(a, b):
    return {row.semantics: (row.a, row.b) for row in op.presets.diff(a, b)}


@pytest.mark.parametrize("name", op.presets.names())
def test_nothing_differs_from_itself(name):
    assert op.presets.diff(name, op.presets.get(name)) == []


def test_presets_that_differ_in_name_only():
    assert op.presets.diff("paper/icepop", "ring-1t/icepop") == []
    assert op.presets.diff("paper/opsm", "deepseek-v3.2/opsm") == []


def test_the_other_way_round():
    forward, back = rows("paper/tis", "skyrl/long-context-moe"), rows("skyrl/long-context-moe", "paper/tis")

    assert back == {name: (b, a) for name, (a, b) in forward.items()}


def test_weights():
    assert rows("paper/tis", "paper/sequence-tis") == {
        "weight: level": ("token", "sequence"),
        "weight: bounds": ("max_weight=2, min_weight=None", "max_weight=5, min_weight=None"),
    }
    assert rows("paper/tis", "measure")["weight: type"] == ("TruncateWeight", "none (1)")
    two = op.Correction(weight=(op.RawWeight(), op.RawWeight(ratio="current/old")))
    assert rows(preset(two, policy_loss=op.losses.GPG()), "measure")["weight 2: ratio"] == ("pi / pi_old", "-")


def test_keep_terms_and_their_bounds():
    found = rows("skyrl/geometric-mask", "skyrl/long-context-moe")

    assert found == {
        "keep: outlier_veto": ("-", "low=0.0001, high=100, on pi_old / mu"),
        "order": ("ratio_band_sequence_mean -> weights", "outlier_veto -> ratio_band_sequence_mean -> weights"),
    }
    band = rows("skyrl/geometric-mask", op.presets.get("skyrl/geometric-mask", low=0.9))
    assert band == {
        "keep: ratio_band_sequence_mean": (
            "low=0.99, high=1.01, on pi_old / mu",
            "low=0.9, high=1.01, on pi_old / mu",
        )
    }


def test_order_and_what_is_measured():
    found = rows("paper/product-mask", "skyrl/product-mask")

    assert found == {
        "measured on": ("all trainable tokens", "what earlier terms kept"),
        "order": ("any", "ratio_band_sequence -> weights"),
    }


def test_normalisation_denominator_mode_loss_and_clamp():
    found = rows("verl/decoupled_token_is", op.presets.from_verl(rollout_is="token", rollout_is_batch_normalize=True))
    assert found == {
        "normalisation": ("none", "mean over original units, over each generation batch"),
        "scope": ("row", "generation_batch"),
    }
    found = rows("verl/decoupled_k3_rs", "verl/bypass_ppo_clip_k3_rs")
    assert "denominator" not in found
    assert found["mode"][1] == "bypass (two policies, pi / mu)"
    assert found["KL of dropped tokens"] == ("goes with them", "stays")
    assert found["keep: divergence_k3_sequence_mean"][1].endswith("on pi / mu")
    rejection = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    legacy = rows("verl/decoupled_k3_rs", op.presets.from_verl(**rejection, use_v1=False))
    assert legacy["denominator"] == ("dropped tokens stay", "dropped tokens leave")
    assert rows("verl/decoupled_token_is", "skyrl/token-tis")["policy loss"][0].startswith("PPOClip: low=0.2")
    assert rows("skyrl/token-tis", "slime/mis")["aggregation"] == ("token_mean", "seq_mean_token_mean")
    assert rows("paper/tis", op.presets.get("trl/token-truncate", max_weight=2.0)) == {
        "log clamp": ("+-20 nats", "+-20 nats (source: none)")
    }


@pytest.mark.parametrize(
    ("change", "row", "values"),
    [
        ({"nonfinite": "drop"}, "non-finite log-probs", ("neutral", "drop")),
        ({"normalize": "kept"}, "normalisation", ("none", "mean over kept units, over each generation batch")),
    ],
)
def test_other_settings_of_a_correction(change, row, values):
    correction = op.Correction(weight=op.TruncateWeight(max_weight=2.0))

    assert rows(preset(correction), preset(replace(correction, **change)))[row] == values


def test_baseline():
    keep = (op.OutlierVeto(low=0.1, high=None),)
    found = rows(preset(op.Correction(keep=keep)), preset(op.Correction(keep=keep, baseline="kept")))

    assert found["group baseline"] == ("all responses", "kept responses")


def test_kl_and_entropy():
    found = rows(preset(), preset(kl=op.KLPenalty(coef=0.1), kl_weighted=True, entropy_coef=0.01))

    settings = "coef=0.1, estimator=k3, ratio_weighted=False, ratio_clip=None, max_value=None, place=loss"
    assert found["KL term"] == ("none", f"{settings}, weighted=True")
    assert found["entropy bonus"] == ("0", "0.01")
    assert rows(preset(), preset(drift_coef=1e-3)) == {"drift term": ("none", "0.001 log^2(pi / mu)")}
    found = rows(
        preset(aggregation="seq_mean_token_sum_norm"),
        preset(aggregation="seq_mean_token_sum_norm", max_length=64, entropy_aggregation="loss"),
    )
    assert found["entropy bonus"] == ("0", "0, reduced as the loss")
    assert found["aggregation"] == ("seq_mean_token_sum_norm", "seq_mean_token_sum_norm, L = 64")
    assert rows(preset(), preset(source_clamp=10.0))["log clamp"][1] == "+-20 nats (source: +-10 nats)"


def test_every_field_that_changes_a_number_has_a_row():
    text = " ".join(semantics(op.presets.get("verl/decoupled_geo_rs_token_tis")))

    for word in ("weight: type", "weight: level", "weight: bounds", "weight: ratio", "keep: ", "measured on", "order"):
        assert word in text
    for word in ("normalisation", "denominator", "mode", "non-finite", "log clamp", "policy loss", "aggregation"):
        assert word in text


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"but got 'paper/tiss'\. Did you mean 'paper/tis'"):
        op.presets.diff("paper/tiss", "paper/tis")


def test_advantages_and_the_centre_of_the_clip_are_semantics():
    other = make_preset(
        "other",
        op.Correction(),
        citation="-",
        notes="-",
        advantages=op.advantages.RLOO(),
        proximal=op.proximal.InterpolatedProximal(),
    )
    assert rows(preset(), other) == {
        "centre of the clip": ("RecomputedProximal: -", "InterpolatedProximal: lag=1"),
        "advantages": ("the trainer's", "RLOO: scale=none, epsilon=1e-06, normalize=False, alone=zero"),
    }
    assert "proximal" in other.objective_changes


def test_the_order_of_terms_is_no_difference_where_nothing_is_dropped():
    assert "measured on" not in rows("paper/tis", "skyrl/token-tis")


def test_terms_of_one_name_and_the_place_of_a_group_rejection():
    def keeping(*terms):
        return replace(op.presets.get("measure"), objective=op.Objective(correction=op.Correction(keep=terms)))

    old = op.OffPolicySequenceMask(max_divergence=0.05, ratio="current/old")
    near, far = (op.OffPolicySequenceMask(max_divergence=d, ratio="current/sampling") for d in (0.05, 0.5))
    (found,) = op.presets.diff(keeping(old, near), keeping(old, far))
    assert "0.05" in found.a and "0.5" in found.b
    band, veto, group = op.RatioBand(low=0.5, high=2.0), op.OutlierVeto(low=1e-3, high=1e3), op.GroupRejection()
    assert {"order"} == {
        one.semantics for one in op.presets.diff(keeping(veto, band, group), keeping(veto, group, band))
    }
    assert [one.b for one in op.presets.diff(keeping(band, band), keeping(band))] == ["-"]
