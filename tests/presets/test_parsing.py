"""From YAML to terms: tagged unions, and errors that name the path."""

import pytest
import yaml

from trl_offpolicy import (
    BandWeight,
    Correction,
    DivergenceBand,
    KLPenalty,
    Objective,
    OffPolicySequenceMask,
    OutlierVeto,
    RatioBand,
    RawWeight,
    TruncateWeight,
    losses,
    presets,
)
from trl_offpolicy.checks import near
from trl_offpolicy.presets.parsing import parse_correction, parse_objective, parse_preset

WHERE = "offpolicy.correction"


def parse(text, base=None):
    return parse_correction(yaml.safe_load(text), where=WHERE, base=base)


def parse_into(text, base=None):
    return parse_objective(yaml.safe_load(text), where="offpolicy.objective", base=base or Objective())


def test_a_complete_correction():
    correction = parse(
        """
        weight: {type: truncate, level: sequence, max_weight: 2, min_weight: 0.5}
        keep:
          - {type: ratio_band, level: token, low: 0.5, high: null}
          - {type: divergence_band, statistic: k3, high: 0.01}
          - {type: outlier_veto, low: 1.0e-4, high: 100}
          - {type: off_policy_sequence_mask, max_divergence: 0.05}
        normalize: original
        measure_on: remaining
        nonfinite: drop
        correct_threshold: 1
        measure: [mismatch, kept]
        """
    )

    assert correction == Correction(
        weight=TruncateWeight(level="sequence", max_weight=2, min_weight=0.5),
        keep=(
            RatioBand(level="token", low=0.5, high=None),
            DivergenceBand(statistic="k3", high=0.01),
            OutlierVeto(low=1e-4, high=100),
            OffPolicySequenceMask(max_divergence=0.05),
        ),
        normalize="original",
        measure_on="remaining",
        nonfinite="drop",
        correct_threshold=1,
        measure=("mismatch", "kept"),
    )


def test_weights():
    assert parse("weight: {type: band, low: null, high: 2.0}").weight == BandWeight(low=None, high=2.0)
    assert parse("weight: [{type: raw}]").weight == RawWeight()
    two = parse("weight: [{type: raw}, {type: truncate, max_weight: 2.0, ratio: current/old}]")
    assert two.weight == (RawWeight(), TruncateWeight(max_weight=2.0, ratio="current/old"))
    assert parse("weight: null").weights == ()
    assert parse("weight: []").weights == ()


def test_keep_may_be_empty():
    assert parse("keep: []").keep == ()
    assert parse("keep: null").keep == ()


def test_what_is_left_out_comes_from_the_base():
    base = Correction(weight=RawWeight(), nonfinite="drop")

    assert parse("keep: [{type: outlier_veto, low: 0.1, high: null}]", base) == Correction(
        weight=RawWeight(), nonfinite="drop", keep=(OutlierVeto(low=0.1, high=None),)
    )
    assert parse("weight: null", base).weight is None
    assert parse("{}", base) == base


def test_a_complete_objective():
    objective = parse_into(
        """
        policy_loss: {type: ppo_clip, low: 0.2, high: 0.28}
        kl: {coef: 0.1, ratio_weighted: true}
        kl_on: kept
        kl_weighted: true
        entropy_coef: 0.01
        aggregation: seq_mean_token_mean
        denominator: kept
        """
    )

    assert objective == Objective(
        policy_loss=losses.PPOClip(low=0.2, high=0.28),
        kl=KLPenalty(coef=0.1, ratio_weighted=True),
        kl_on="kept",
        kl_weighted=True,
        entropy_coef=0.01,
        aggregation="seq_mean_token_mean",
        denominator="kept",
    )


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("{type: cispo, high: 3}", losses.CISPO(high=3)),
        ("{type: sapo, temperature_pos: 2.0}", losses.SAPO(temperature_pos=2.0)),
        ("{type: vespo, k_pos: 1.5}", losses.VESPO(k_pos=1.5)),
        ("{type: ppo_clip, level: sequence_mean}", losses.PPOClip(level="sequence_mean")),
    ],
)
def test_losses(text, loss):
    assert parse_into(f"policy_loss: {text}").policy_loss == loss


def test_objective_overrides_its_base_only_where_said():
    base = Objective(kl=KLPenalty(coef=0.1), policy_loss=losses.SAPO())

    assert parse_into("aggregation: token_sum", base).kl == KLPenalty(coef=0.1)
    assert parse_into("kl: null", base).kl is None
    assert parse_into("kl: null", base).policy_loss == losses.SAPO()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # not a mapping
        ("paper/tis", r"^offpolicy\.correction must be a mapping of options, but got 'paper/tis'"),
        ("[1]", r"^offpolicy\.correction must be a mapping of options"),
        (
            "weight: truncate",
            r"^offpolicy\.correction\.weight\.max_weight must be given for TruncateWeight .*, but it is missing\.$",
        ),
        ("weight: Raw", r"^offpolicy\.correction\.weight\.type must .*, but got 'Raw'\. Did you mean 'raw'\?$"),
        (
            "weight: 3",
            r"^offpolicy\.correction\.weight must be one of \['truncate', .* or a mapping with the key type, but got 3",
        ),
        ("keep: {type: outlier_veto}", r"^offpolicy\.correction\.keep must be a list of terms"),
        (
            "keep: outlier_veto",
            r"^offpolicy\.correction\.keep must be a list of terms, but got 'outlier_veto'",
        ),
        ("keep: 3", r"^offpolicy\.correction\.keep must be a list of terms, but got 3"),
        ("keep: [outlier_veto]", r"^offpolicy\.correction\.keep\[0\]\.low must be given for OutlierVeto"),
        ("keep: [true]", r"^offpolicy\.correction\.keep\[0\] must be one of .* with the key type, but got True\.$"),
        # unknown names
        (
            "wieght: null",
            r"^offpolicy\.correction\.wieght is not an option of Correction\. Did you mean 'weight'",
        ),
        ("bypass_mode: true", r"^offpolicy\.correction\.bypass_mode is not an option of Correction"),
        (
            "weight: {type: truncate, cap: 2}",
            r"^offpolicy\.correction\.weight\.cap is not an option of TruncateWeight\. Did you mean 'max_weight'\?$",
        ),
        (
            "weight: {type: tuncate}",
            r"^offpolicy\.correction\.weight\.type must be one of .*Did you mean 'truncate'",
        ),
        ("weight: {max_weight: 2.0}", r"^offpolicy\.correction\.weight\.type must be one of .* but it is missing\.$"),
        (
            "keep: [{type: outlier_veto, low: 0.1, high: null}, {type: ratio_bnd}]",
            r"^offpolicy\.correction\.keep\[1\]\.type must be one of .*Did you mean 'ratio_band'",
        ),
        (
            "weight: {type: truncate, max_wight: 2.0}",
            r"^offpolicy\.correction\.weight\.max_wight is not an option of TruncateWeight.*'max_weight'",
        ),
        # a bound that is not said
        (
            "keep: [{type: ratio_band, low: 0.5}]",
            r"^offpolicy\.correction\.keep\[0\]\.high must be given for RatioBand \(null = open side\)",
        ),
        (
            "keep: [{type: outlier_veto, high: 100}]",
            r"^offpolicy\.correction\.keep\[0\]\.low must be given for OutlierVeto",
        ),
        (
            "weight: {type: band, low: 0.5}",
            r"^offpolicy\.correction\.weight\.high must be given for BandWeight",
        ),
        (
            "weight: {type: truncate}",
            r"^offpolicy\.correction\.weight\.max_weight must be given for TruncateWeight",
        ),
        (
            "keep: [{type: divergence_band, high: 1.0}]",
            r"^offpolicy\.correction\.keep\[0\]\.statistic must be given for DivergenceBand",
        ),
        # values
        (
            "keep: [{type: ratio_band, low: null, high: null}]",
            r"^offpolicy\.correction\.keep\[0\]: low and high must not both be None",
        ),
        (
            "keep: [{type: ratio_band, low: 2.0, high: 0.5}]",
            r"^offpolicy\.correction\.keep\[0\]: low must be at most high, but got 2.0 > 0.5",
        ),
        (
            "weight: {type: band, low: 0.5, high: '0.5_5_0'}",
            r"^offpolicy\.correction\.weight: high must be a finite number, but got '0.5_5_0'",
        ),
        (
            "keep: [{type: outlier_veto, low: 1e-4x, high: 100}]",
            r"^offpolicy\.correction\.keep\[0\]: low must be a finite number, but got '1e-4x'",
        ),
        (
            "weight: {type: truncate, max_weight: yes}",
            r"^offpolicy\.correction\.weight: max_weight must be a finite number, but got True",
        ),
        (
            "weight: {type: truncate, max_weight: .nan}",
            r"^offpolicy\.correction\.weight: max_weight must be a finite number, but got nan",
        ),
        (
            "keep: [{type: off_policy_sequence_mask, max_divergence: .inf}]",
            r"^offpolicy\.correction\.keep\[0\]: max_divergence must be a finite number, but got inf",
        ),
        (
            "weight: {type: raw, level: 3}",
            r"^offpolicy\.correction\.weight: level must be one of .* but got 3",
        ),
        ("weight: [{type: raw}, {type: raw}]", r"^offpolicy\.correction: weight must name each ratio once"),
        ("normalize: batch", r"^offpolicy\.correction: normalize must be one of"),
        ("normalize: kept", r"^offpolicy\.correction: normalize must be 'none' without a weight"),
        ("correct_threshold: '1'", r"^offpolicy\.correction: correct_threshold must be a finite number"),
        (
            "measure: [mismatch, all]",
            r"^offpolicy\.correction: measure must name some of .* but got 'all'",
        ),
        (
            "measure: mismatch",
            r"^offpolicy\.correction: measure must be one of \['full', 'core', 'off'\] or a tuple of some of",
        ),
    ],
)
def test_errors_name_the_path(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("ppo", ValueError, r"^offpolicy\.objective must be a mapping of options, but got 'ppo'"),
        ("policy_loss: ppo", ValueError, r"^offpolicy\.objective\.policy_loss\.type must .*, but got 'ppo'"),
        (
            "policy_loss: [gspo]",
            ValueError,
            r"^offpolicy\.objective\.policy_loss must be one of .*, but got \['gspo'\]",
        ),
        (
            "policy_loss: {type: ppo}",
            ValueError,
            r"^offpolicy\.objective\.policy_loss\.type must .*'ppo_clip'",
        ),
        (
            "policy_loss: {type: ppo_clip, epsilon: 0.2}",
            ValueError,
            r"^offpolicy\.objective\.policy_loss\.epsilon is not an option of PPOClip",
        ),
        (
            "policy_loss: {type: ppo_clip, low: '0.2'}",
            ValueError,
            r"^offpolicy\.objective\.policy_loss: low must be a finite number, but got '0.2'",
        ),
        ("kl: 0.1", ValueError, r"^offpolicy\.objective\.kl must be a mapping of options, but got 0.1"),
        ("kl: {}", ValueError, r"^offpolicy\.objective\.kl\.coef must be given for KLPenalty"),
        (
            "kl: {coef: '0.1'}",
            ValueError,
            r"^offpolicy\.objective\.kl: coef must be a finite number, but got '0.1'",
        ),
        ("kl: {beta: 0.1}", ValueError, r"^offpolicy\.objective\.kl\.beta is not an option of KLPenalty"),
        ("entropy_coef: '0.1'", ValueError, r"^offpolicy\.objective: entropy_coef must be a finite number"),
        ("kl_on: none", ValueError, r"^offpolicy\.objective: kl_on must be one of"),
        ("loss: {}", ValueError, r"^offpolicy\.objective\.loss is not an option of Objective"),
        ("correction: {weight: null}", TypeError, r"^offpolicy\.objective: correction must be a Correction"),
    ],
)
def test_errors_of_an_objective_name_the_path(text, error, message):
    with pytest.raises(error, match=message):
        parse_into(text)


def test_a_name_alone_is_a_part():
    assert parse("weight: raw").weight == parse("weight: {type: raw}").weight
    assert parse("weight: [raw]").weight == parse("weight: raw").weight
    assert parse("keep: [second_moment_budget]").keep == parse("keep: [{type: second_moment_budget}]").keep
    assert parse_into("policy_loss: gspo").policy_loss == losses.GSPO()


def test_numbers_with_an_exponent_which_yaml_takes_for_text():
    """YAML 1.1 reads 1e-4 as a string; 1.0e-4 is a number."""
    veto = parse("keep: [{type: outlier_veto, low: 1e-4, high: 1E2}]").keep[0]
    assert (veto.low, veto.high) == (1e-4, 100) and isinstance(veto.low, float)
    assert parse("weight: {type: truncate, max_weight: 2.5e0}").weight.max_weight == 2.5
    assert parse_into("kl: {coef: 1e-3}").kl.coef == 1e-3
    adaptive = parse_into("kl: {coef: {type: adaptive, coef: 1e-3, target: 1e-2, horizon: 1e4}}").kl.coef
    assert (adaptive.coef, adaptive.target, adaptive.horizon) == (1e-3, 1e-2, 10_000)
    assert parse_preset({"preset": "paper/tis", "options": {"max_weight": "3e0"}}, where="offpolicy")[0].correction == (
        parse("weight: {type: truncate, max_weight: 3.0}")
    )
    assert (
        parse_preset({"preset": "auto", "options": {"ess_floor": "3e-1"}}, where="offpolicy")[0].auto.ess_floor == 0.3
    )


OTHER_KIND = "a preset's name (e.g. paper/tis), a mapping, a Correction, an Objective or a Preset, but got"
KEYS = "['preset', 'framework', 'options', 'file', 'correction', 'objective', 'advantages']"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, f"offpolicy must be {OTHER_KIND} 3."),
        (True, f"offpolicy must be {OTHER_KIND} True."),
        (["paper/tis"], f"offpolicy must be {OTHER_KIND} ['paper/tis']."),
        (False, f"offpolicy must be {OTHER_KIND} False. No correction is called measure."),
        ("TIS", "offpolicy must be NAMES, but got 'TIS'. Did you mean 'paper/tis', 'openrlhf/tis'?"),
        ("", "offpolicy must be NAMES, but got ''."),
        ("none", "offpolicy must be NAMES, but got 'none'. No correction is called measure."),
        (
            "GSPO",
            "offpolicy must be NAMES, but got 'GSPO'. Did you mean offpolicy: {objective: {policy_loss: gspo}}?",
        ),
        ("rloo", "offpolicy must be NAMES, but got 'rloo'. Did you mean offpolicy: {advantages: rloo}?"),
        ({"preset": 3}, "offpolicy.preset must be NAMES, but got 3."),
        ({"preset": "paper/tsi"}, "offpolicy.preset must be NAMES, but got 'paper/tsi'. Did you mean 'paper/tis',"),
        ({"options": 3}, "offpolicy.options must be a mapping of options, but got 3."),
        (
            {"preset": "paper/tis", "options": {"max_weight": "2"}},
            "offpolicy.options.max_weight must be a finite number, but got '2'.",
        ),
        (
            {"framework": "verl", "options": {"rollout_iss": "token"}},
            "offpolicy.options.rollout_iss is not an option of verl's ",
        ),
        ({"framework": 3}, "offpolicy.framework must be one of ['areal', "),
        ({"policy_loss": "gspo"}, f"offpolicy.policy_loss must be one of {KEYS}. Did you mean offpolicy.objective.pol"),
        ({"weight": "raw"}, f"offpolicy.weight must be one of {KEYS}. Did you mean offpolicy.correction.weight?"),
        (
            {"preset": "paper/tis", "max_weight": 2},
            f"offpolicy.max_weight must be one of {KEYS}. Did you mean offpolicy.options.max_weight?",
        ),
    ],
)
def test_errors_of_a_method_are_one_sentence(spec, message):
    message = message.replace("NAMES", f"one of the {len(presets.names())} presets that `trl-offpolicy presets` lists")
    with pytest.raises(ValueError) as error:
        parse_preset(spec, where="offpolicy")
    assert str(error.value).startswith(message)


def test_near_names():
    assert near("truncat", ["truncate", "band"]) == " Did you mean 'truncate'?"
    assert near("xyz", ["truncate", "band"]) == ""
    assert near("low", ["lower", "slow", "lows", "blow"]).count("'") == 6  # at most three
