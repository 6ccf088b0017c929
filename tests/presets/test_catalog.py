"""What each named preset does to one batch, by hand, and its defaults."""

import math
from functools import partial

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import presets
from trl_offpolicy.presets.catalog import BUILDERS

close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)

# Ratios old/sampling. Products: 3, 0.75, 1.01 ** 2, 1, 300; geometric means: their square roots, and 1.
RATIOS = [[1.5, 2.0], [0.25, 3.0], [1.01, 1.01], [1.0, None], [6.0, 50.0]]
ONES = [[1, 1], [1, 1], [1, 1], [1, 0], [1, 1]]

CASES = {
    "measure": ({}, ONES, ONES),
    "paper/tis": ({}, [[1.5, 2], [0.25, 2], [1.01, 1.01], [1, 0], [2, 2]], ONES),
    "paper/sequence-tis": ({}, [[3, 3], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [5, 5]], ONES),
    "paper/mis": ({}, [[0, 0], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [0, 0]], ONES),
    "paper/mis with a floor": ({"min_weight": 0.8}, [[0, 0], [0, 0], [1.0201, 1.0201], [1, 0], [0, 0]], ONES),
    "paper/icepop": ({}, [[1.5, 2], [0, 3], [1.01, 1.01], [1, 0], [0, 0]], ONES),
    "paper/geometric-mask": (
        {"low": 0.9, "high": 1.2},
        [[1.5, 2], [0.25, 2], [1.01, 1.01], [1, 0], [2, 2]],
        [[0, 0], [0, 0], [1, 1], [1, 0], [0, 0]],
    ),
    "paper/opsm": ({}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]]),  # -log 0.75 / 2 = 0.144 > 0.05
    "skyrl/long-context-moe": (
        {"low": 0.1, "high": 50.0, "outlier_low": 0.3, "outlier_high": 40.0},
        ONES,
        [[1, 1], [0, 0], [1, 1], [1, 0], [0, 0]],  # 0.25 and 50 are outliers
    ),
}


def test_every_preset_has_a_case():
    assert {case.split(" with")[0] for case in CASES} == set(presets.names()) == set(BUILDERS)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_keep_by_hand(case):
    options, weights, keep = CASES[case]
    preset = presets.get(case.split(" with")[0], **options)

    out = preset.correction(policy_batch(RATIOS, advantages=-torch.ones(5)))

    close(out.weights, torch.tensor(weights).float())
    assert out.keep_mask.int().tolist() == keep


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_the_rest_of_the_objective_is_plain_ppo(name):
    objective = presets.get(name).objective

    assert objective.policy_loss.level == "token"
    assert (objective.kl, objective.entropy_coef, objective.aggregation) == (None, 0.0, "token_mean")
    assert (objective.denominator, objective.scope) == ("all", "row")
    assert objective.correction.normalize == "none"


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_requires_what_the_correction_reads(name):
    preset = presets.get(name)

    assert preset.requires == (("sampling_per_token_logps",) if preset.correction.needs_sampling else ())
    assert preset.correction.needs_sampling is (name != "measure")


def test_defaults_are_those_of_the_sources():
    def correction(name):
        return presets.get(name).correction

    assert correction("paper/sequence-tis").weight.max_weight == 5.0
    assert (correction("paper/mis").weight.low, correction("paper/mis").weight.high) == (None, 2.0)
    assert (correction("paper/icepop").weight.low, correction("paper/icepop").weight.high) == (0.5, 5.0)
    geometric = correction("paper/geometric-mask")
    assert (geometric.keep[0].low, geometric.keep[0].high, geometric.weight.max_weight) == (0.99, 1.01, 2.0)
    assert correction("paper/opsm").keep[0].max_divergence == 0.05
    veto, band = correction("skyrl/long-context-moe").keep
    assert (veto.low, veto.high, band.low, band.high) == (1e-4, 100.0, 0.99, 1.01)
    assert correction("skyrl/long-context-moe").measure_on == "remaining"


def test_loss_of_a_preset_by_hand():
    out = presets.get("paper/tis", max_weight=3.0).objective(policy_batch(RATIOS))

    total = 1.5 + 2 + 0.25 + 3 + 1.01 + 1.01 + 1 + 3 + 3
    assert out.loss.item() == pytest.approx(-total / 9, abs=1e-6)  # A = 1, on-policy, 9 tokens
    assert math.isfinite(float(out.stats["weight_applied/ess_token"]))
