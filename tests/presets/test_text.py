"""Weights, keep terms and objectives as text."""

import pytest

import trl_offpolicy as op
from trl_offpolicy.correction.terms.base import mapping_text, settings_text
from trl_offpolicy.presets.text import formula_of


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (op.TruncateWeight(max_weight=2.0), "w = min(rho_t, 2)"),
        (op.TruncateWeight(max_weight=2, min_weight=0.5, level="turn"), "w = clip(rho_turn, 0.5, 2)"),
        (op.BandWeight(low=0.5, high=5.0), "w = rho_t if 0.5 <= rho_t <= 5 else 0"),
        (op.BandWeight(low=None, high=5.0, level="sequence"), "w = rho_seq if rho_seq <= 5 else 0"),
        (op.RawWeight(level="sequence_mean"), "w = rho_geo"),
        (op.ShapedWeight(gamma=0.1), "w = rho_t / (rho_t + 0.1)"),
        (op.PrefixMinWeight(), "w = rho_t min_{s<t} rho_s"),
        (op.PrefixMinWeight(max_weight=3.0), "w = min(rho_t min_{s<t} rho_s, 3)"),
        (op.PrefixWeight(), "w = clip(rho_1:t, 0.8^sqrt(t), 1.25^sqrt(t))"),
        (op.ESSWeight(target=0.25), "w = min(rho_t, C), the largest C with ESS >= 0.25"),
    ],
)
def test_weights(weight, text):
    assert weight.formula == text


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (op.RatioBand(low=0.99, high=1.01), "keep if 0.99 <= rho_geo <= 1.01"),
        (op.RatioBand(low=0.5, high=None, level="sequence_max"), "keep if 0.5 <= max_t rho_t"),
        (op.DivergenceBand(statistic="k3", high=0.01), "keep if mean_t k3 <= 0.01"),
        (op.DivergenceBand(statistic="k2", high=1, level="sequence"), "keep if sum_t k2 <= 1"),
        (op.DivergenceBand(statistic="k1", low=-1.0, high=2.0, level="token"), "keep if 0.135335 <= rho_t <= 2.71828"),
        (op.DivergenceBand(statistic="binary_tv", high=0.2, level="token"), "keep if |p - q|_t <= 0.2"),
        (op.OutlierVeto(low=1e-4, high=100), "drop the response unless every 0.0001 <= rho_t <= 100"),
        (op.OffPolicySequenceMask(max_divergence=0.05), "drop if A < 0 and -log rho_geo > 0.05"),
        (op.ProbabilityDifferenceMask(), "drop if A > 0 and p - q > 0.2, or A < 0 and p - q < -0.2"),
        (op.SuffixVeto(), "drop if A < 0 and an earlier rho_t < 0.0001"),
        (op.PrefixBudget(), "drop if A (rho_t - 1) > 0 and w_t |p - q| > min(0.2, 0.2 + 0.02 W - S)"),
        (op.SecondMomentBudget(), "drop the largest |log rho_t| until mean_t log^2 rho_t <= 0.04"),
        (op.GroupRejection(), "drop a prompt of which more than 0.5 were dropped"),
        (op.EqualRewards(), "drop a prompt with max R - min R <= 1e-06"),
        (op.StalenessBound(max_lag=4), "drop a response older than 4 versions"),
        (
            op.presets.from_areal(metric="kl_k3", upper=0.1).correction.keep[0],
            "areal_kl_k3_token: high=0.1, low=None, level=token",
        ),
    ],
)
def test_keep_terms(term, text):
    assert term.formula == text


def test_formula():
    keep = (op.OffPolicySequenceMask(max_divergence=0.1), op.StalenessBound(max_lag=1))

    assert formula_of(op.Objective()) == "w = 1; nothing dropped"
    assert formula_of(op.Objective(correction=op.Correction(weight=op.RawWeight()))) == "w = rho_t; nothing dropped"
    assert formula_of(op.Objective(correction=op.Correction(keep=keep))) == (
        "w = 1; drop if A < 0 and -log rho_geo > 0.1; drop a response older than 1 versions; rho = pi / mu"
    )
    assert formula_of(op.Objective(mode="bypass")) == "w = 1; nothing dropped; PPOClip on pi / mu"


def test_settings():
    assert settings_text(op.OutlierVeto(low=0.5, high=2.0), leave_out=("ratio",)) == "low=0.5, high=2"
    assert mapping_text({}) == "-"


@pytest.mark.parametrize("name", op.presets.names())
def test_every_part_of_a_preset_has_a_text_of_its_own(name):
    correction = op.presets.get(name).correction

    for part in correction.weights:
        assert type(part).__name__ not in part.formula
    for part in correction.keep:
        assert part.name not in part.formula
