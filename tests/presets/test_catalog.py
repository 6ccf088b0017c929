"""What each named preset does to one batch, by hand, and its defaults."""

import math
import warnings
from functools import partial

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import Correction, DivergenceBand, RatioBand, StalenessBound, losses, presets, shaping
from trl_offpolicy.objective.kl import KLPenalty
from trl_offpolicy.presets.catalog import PRESETS
from trl_offpolicy.presets.preset import make_preset

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

# Ratios old/sampling. Products: 3, 0.75, 1.01 ** 2, 1, 300; geometric means: their square roots, and 1.
RATIOS = [[1.5, 2.0], [0.25, 3.0], [1.01, 1.01], [1.0, None], [6.0, 50.0]]
ONES = [[1, 1], [1, 1], [1, 1], [1, 0], [1, 1]]

RAW = [[1.5, 2], [0.25, 3], [1.01, 1.01], [1, 0], [6, 50]]
SQUARES, SUM = 1.5**2 + 2**2 + 0.25**2 + 3**2 + 2 * 1.01**2 + 1 + 6**2, 1.5 + 2 + 0.25 + 3 + 2 * 1.01 + 1 + 6
CAP = (SUM + math.sqrt(SUM**2 - 3.5 * (4.5 * SQUARES - SUM**2))) / 3.5  # (SUM + C)^2 = 0.5 * 9 (SQUARES + C^2)

CASES = {
    "measure": ({}, ONES, ONES),
    "paper/vanilla-is": ({}, RAW, ONES),
    "paper/ppo-is": ({}, ONES, ONES),
    "paper/tis": ({}, [[1.5, 2], [0.25, 2], [1.01, 1.01], [1, 0], [2, 2]], ONES),
    "paper/sequence-tis": ({}, [[3, 3], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [5, 5]], ONES),
    "paper/vcpo": ({}, [[3, 3], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [5, 5]], ONES),
    "paper/mis": ({}, [[0, 0], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [0, 0]], ONES),
    "paper/mis with a floor": ({"min_weight": 0.8}, [[0, 0], [0, 0], [1.0201, 1.0201], [1, 0], [0, 0]], ONES),
    "paper/icepop": ({}, [[1.5, 2], [0, 3], [1.01, 1.01], [1, 0], [0, 0]], ONES),
    "paper/kpop": ({"high": 0.01}, RAW, [[1, 1], [0, 1], [1, 1], [1, 0], [0, 0]]),
    "paper/minpro": ({}, [[1.5, 3], [0.25, 0.75], [1.01, 1.0201], [1, 0], [6, 300]], ONES),
    "paper/ctpo": (
        {},
        [[1.25, 1.25 ** math.sqrt(2)], [0.8, 0.75], [1.01, 1.0201], [1, 0], [1.25, 1.25 ** math.sqrt(2)]],
        ONES,
    ),
    "paper/logit-fusion": ({}, [[1.5, 2], [0.25, 3], [1.01, 1.01], [1, 0], [3, 3]], ONES),
    "paper/logit-fusion-cap": ({}, [[1.5, 2], [0.25, 3], [1.01, 1.01], [1, 0], [3, 3]], ONES),
    "paper/logit-fusion-shaped": (
        {"gamma": 1.0},
        [[0.6, 2 / 3], [0.2, 0.75], [1.01 / 2.01] * 2, [0.5, 0], [6 / 7, 50 / 51]],
        ONES,
    ),
    "paper/shadow-mask": ({}, ONES, ONES),
    "paper/jet-rl": ({}, ONES, ONES),
    "paper/turn-is": ({}, [[2, 2], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [2, 2]], ONES),
    "kit/ess-cap": ({}, [[1.5, 2], [0.25, 3], [1.01, 1.01], [1, 0], [6, CAP]], ONES),
    "kit/ess-cap with a modest target": ({"target": 0.15}, RAW, ONES),
    "paper/geometric-mask": (
        {"low": 0.9, "high": 1.2},
        [[1.5, 2], [0.25, 2], [1.01, 1.01], [1, 0], [2, 2]],
        [[0, 0], [0, 0], [1, 1], [1, 0], [0, 0]],
    ),
    "paper/geometric-mask-veto": (
        {"low": 0.1, "high": 50.0, "veto_low": 0.3},
        ONES,
        [[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]],
    ),
    "paper/product-mask": ({}, ONES, [[0, 0], [1, 1], [1, 1], [1, 0], [0, 0]]),
    "paper/opsm": ({}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]]),  # -log 0.75 / 2 = 0.144 > 0.05
    "paper/trm": ({"high": 0.4}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [0, 0]]),  # k3: 0.31, 0.64, 0, 0, 45
    "paper/trm with k2": ({"statistic": "k2", "high": 0.8}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [0, 0]]),
    "paper/m2po": ({"budget": 0.2}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [0, 0]]),
    "paper/m2po as published": ({}, ONES, [[0, 0], [0, 0], [1, 1], [1, 0], [0, 0]]),
    # p = exp(-4) = 0.0183 and q = p / ratio, so |p - q| = 0.006, 0.009, 0.055, 0.012, 0, 0, 0, 0.015, 0.018
    "paper/dppo-mask": ({"high": 0.0151}, ONES, [[1, 1], [0, 1], [1, 1], [1, 0], [0, 0]]),
    # A = -1: only tokens with a ratio below 1 can go, which is 0.25: |p - q| = 0.055, 0.05 above what high allows
    "paper/cppo": ({"high": 0.05}, RAW, [[1, 1], [0, 1], [1, 1], [1, 0], [1, 1]]),
    "paper/cppo as published": ({}, RAW, ONES),
    "paper/mu-grpo": ({"low": 0.3}, ONES, [[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]]),
    "paper/p3o": ({}, ONES, ONES),
    "paper/fipo": ({}, ONES, ONES),
    "paper/dcmdp": ({}, ONES, ONES),
    "paper/ctpo-clip": ({}, ONES, ONES),
    "paper/minpro-policy": ({}, [[1.5, 3], [0.25, 0.75], [1.01, 1.0201], [1, 0], [6, 300]], ONES),
    "paper/qurl": ({}, [[1.5, 2], [0.25, 2], [1.01, 1.01], [1, 0], [2, 2]], ONES),
    "paper/rl-zvp": ({}, ONES, ONES),
    "paper/gac": ({}, ONES, ONES),
    "paper/staleness-ceiling": ({}, ONES, ONES),
    "paper/mipu": ({}, ONES, ONES),
    "paper/alp": ({}, ONES, ONES),
    "paper/dora": ({}, ONES, ONES),
    "paper/periodic-async": ({}, ONES, ONES),
    "paper/qerl": ({}, [[1.5, 2], [0.25, 2], [1.01, 1.01], [1, 0], [2, 2]], ONES),
    # geometric means: sqrt(3), sqrt(0.75), 1.01, 1, sqrt(300)
    "paper/qarl": ({}, [[3**0.5] * 2, [0.75**0.5] * 2, [1.01, 1.01], [1, 0], [2, 2]], ONES),
    "skyrl/token-tis": ({}, [[1.5, 2], [0.25, 2], [1.01, 1.01], [1, 0], [2, 2]], ONES),
    "skyrl/sequence-tis": ({}, [[3, 3], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [5, 5]], ONES),
    "skyrl/geometric-mask": ({"low": 0.9, "high": 1.2}, ONES, [[0, 0], [0, 0], [1, 1], [1, 0], [0, 0]]),
    "skyrl/product-mask": ({}, ONES, [[0, 0], [1, 1], [1, 1], [1, 0], [0, 0]]),
    "skyrl/token-mask": ({"high": 2.5}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [0, 0]]),
    "skyrl/long-context-moe": (
        {"low": 0.1, "high": 50.0, "outlier_low": 0.3, "outlier_high": 40.0},
        ONES,
        [[1, 1], [0, 0], [1, 1], [1, 0], [0, 0]],  # 0.25 and 50 are outliers
    ),
    "openrlhf/tis": ({}, [[1.5, 2], [0.5, 3], [1.01, 1.01], [1, 0], [5, 5]], ONES),
    "openrlhf/icepop": ({}, [[1.5, 2], [0, 3], [1.01, 1.01], [1, 0], [0, 0]], ONES),
    "openrlhf/seq-mask-tis": ({"low": 0.9, "high": 1.2}, RAW, [[0, 0], [0, 0], [1, 1], [1, 0], [0, 0]]),
    "areal/decoupled": ({}, RAW, [[1, 1], [1, 1], [1, 1], [1, 0], [0, 0]]),
    "trl/token-truncate": ({}, [[1.5, 2], [0.25, 3], [1.01, 1.01], [1, 0], [3, 3]], ONES),
    "trl/token-mask": ({"max_weight": 4.0}, [[1.5, 2], [0.25, 3], [1.01, 1.01], [1, 0], [0, 0]], ONES),
    "trl/sequence-truncate": ({}, [[3, 3], [0.75, 0.75], [1.0201, 1.0201], [1, 0], [3, 3]], ONES),
    "trl/sequence-mask": (
        {"max_weight": 4.0, "min_weight": 0.8},
        [[3, 3], [0, 0], [1.0201, 1.0201], [1, 0], [0, 0]],
        ONES,
    ),
    "trl/rloo": ({}, ONES, ONES),
    "prime-rl/probability-difference": ({"low": -0.05}, RAW, [[1, 1], [0, 1], [1, 1], [1, 0], [1, 1]]),
    "roll/token-filter": (
        {},
        [[1.2, 1.2], [0.25, 1.2], [1.01, 1.01], [1, 0], [1.2, 1.2]],
        [[0, 0], [0, 0], [1, 1], [1, 0], [0, 0]],
    ),
    "roll/segment-filter": (
        {"ratio_high": 2.0, "diff_low": -0.02},
        ONES,
        [[1, 1], [0, 0], [1, 1], [1, 0], [0, 0]],  # geometric 1.73, 0.87, 1.01, 1, 17; differences 0.008, -0.021, ...
    ),
    "ring-1t/icepop": ({}, [[1.5, 2], [0, 3], [1.01, 1.01], [1, 0], [0, 0]], ONES),
    "deepseek-v3.2/opsm": ({}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]]),
    "deepseek-v3.2/objective": ({}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]]),
    "deepseek-v3.2/whole": ({}, ONES, [[1, 1], [0, 0], [1, 1], [1, 0], [1, 1]]),
}
ELSEWHERE = {name for name in presets.names() if name.startswith("verl/")} | {"slime/mis"}
DEEPSEEK = {"mode": "bypass", "kl": KLPenalty(coef=0.01, estimator="k3", ratio_weighted=True)}
OWN_LOSS = {
    "paper/shadow-mask": {"kl": KLPenalty(coef=0.1)},
    "paper/cppo": {"policy_loss": losses.GPG(unit_ratio=True), "mode": "bypass"},
    "paper/ctpo-clip": {"policy_loss": losses.CTPO()},
    "paper/logit-fusion": {"policy_loss": losses.GPG(), "mode": "bypass"},
    "paper/minpro-policy": {"policy_loss": losses.GPG(), "mode": "bypass"},
    "deepseek-v3.2/objective": DEEPSEEK,
    "deepseek-v3.2/whole": DEEPSEEK,
    "paper/qurl": {"policy_loss": losses.QuRL()},
    "paper/alp": {"mode": "bypass"},
    "paper/mipu": {"mode": "bypass"},
    "paper/periodic-async": {"aggregation": "seq_mean_token_mean"},
    "paper/qarl": {"policy_loss": losses.TBPO(), "aggregation": "seq_mean_token_mean"},
    "paper/dcmdp": {"shaping": (shaping.DiscrepancyPenalty(),)},
    "paper/fipo": {"policy_loss": losses.FIPO()},
    "paper/mu-grpo": {"policy_loss": losses.PPOClip(low=1.0, high=4.0), "mode": "bypass"},
    "paper/p3o": {"policy_loss": losses.P3O(), "mode": "bypass"},
    "paper/ppo-is": {"mode": "bypass"},
    "paper/rl-zvp": {"shaping": (shaping.ZeroVariance(correct_threshold=0.5),)},
    "slime/mis": {"aggregation": "seq_mean_token_mean", "kl_on": "kept"},
    "trl/rloo": {
        "policy_loss": losses.PPOClip(level="sequence"),
        "kl": KLPenalty(coef=0.05, estimator="k1", place="reward"),
        "aggregation": "seq_mean_token_mean",
    },
    "prime-rl/probability-difference": {
        "policy_loss": losses.GPG(unit_ratio=True),
        "mode": "bypass",
        "drift_coef": 1e-3,
    },
    "roll/token-filter": {"kl_on": "kept"},
    "roll/segment-filter": {"kl_on": "kept"},
}
WIDE = {
    "paper/p3o": "micro_batch",
    "kit/ess-cap": "generation_batch",
    "paper/m2po": "generation_batch",
    "slime/mis": "micro_batch",
}


def test_every_preset_has_a_case():
    assert {case.split(" ")[0] for case in CASES} | ELSEWHERE == set(presets.names()) == set(PRESETS)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_keep_by_hand(case):
    options, weights, keep = CASES[case]
    preset = presets.get(case.split(" ")[0], **options)

    out = preset.correction(policy_batch(RATIOS, advantages=-torch.ones(5)))

    close(out.weights, torch.tensor(weights).float())
    assert out.keep_mask.int().tolist() == keep


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {n for n in PRESETS if n.startswith("verl/")}))
def test_the_rest_of_the_objective_is_plain_ppo_unless_the_method_says_more(name):
    preset = presets.get(name)

    assert preset.objective_changes == OWN_LOSS.get(name, {})
    assert preset.objective.scope == WIDE.get(name, "row")
    assert preset.correction.normalize == ("original" if name == "slime/mis" else "none")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_requires_what_the_objective_reads(name):
    preset = presets.get(name)

    shaped = ("entropies", "rewards", "group_rewards") if name == "paper/rl-zvp" else ()
    assert preset.requires == (("sampling_per_token_logps",) if preset.objective.needs_sampling else shaped)
    without = {"measure", "paper/ctpo-clip", "paper/fipo", "paper/rl-zvp", "trl/rloo", "verl/disabled"}
    without |= {
        "paper/jet-rl",
        "paper/shadow-mask",
        "paper/gac",
        "paper/staleness-ceiling",
        "paper/dora",
        "paper/periodic-async",
    }
    assert preset.objective.needs_sampling is (name not in without)


def test_what_belongs_to_the_trainer_is_taken_where_it_is_left_open(caplog):
    with_parts = {
        "shadow-mask",
        "jet-rl",
        "alp",
        "dora",
        "gac",
        "mipu",
        "periodic-async",
        "qarl",
        "qerl",
        "staleness-ceiling",
        "vcpo",
    }
    expected = {*(f"paper/{name}" for name in with_parts), "deepseek-v3.2/whole"}
    assert {name for name in PRESETS if presets.get(name).trainer} == expected
    preset, open_to_all = presets.get("deepseek-v3.2/whole"), {"routing_replay": "none", "control": "warn"}

    assert preset.fields_for(open_to_all, open_to_all) == {"routing_replay": "r3"}
    assert caplog.messages == ["deepseek-v3.2/whole sets routing_replay: r3."]
    caplog.clear()
    assert preset.fields_for({"routing_replay": "r3"}, open_to_all) == {} and not caplog.messages
    assert preset.fields_for({"routing_replay": "r2"}, open_to_all) == {}
    assert caplog.messages == ["deepseek-v3.2/whole is without its routing_replay: r3, because that is 'r2'."]


def test_options_of_the_engine_are_taken_one_by_one(caplog):
    preset, defaults = presets.get("paper/qarl", rounding="int8"), {"engine": None, "learner_rounding": None}
    ours = {"engine": {"weight_rounding": "int8"}, "learner_rounding": "engine"}

    assert preset.fields_for(defaults, defaults) == ours
    own = {"engine": {"dtype": "float32", "weight_rounding": None}, "learner_rounding": None}
    assert preset.fields_for(own, defaults)["engine"] == {"dtype": "float32", "weight_rounding": "int8"}
    assert own["engine"]["weight_rounding"] is None  # the user's own mapping stays as it is
    assert preset.fields_for({**defaults, "engine": "vllm"}, defaults)["engine"] == {
        "type": "vllm",
        "weight_rounding": "int8",
    }
    caplog.clear()
    other = {"engine": {"weight_rounding": "fp8"}, "learner_rounding": None}
    assert preset.fields_for(other, defaults) == {"learner_rounding": "engine"}
    assert caplog.messages[0] == ("paper/qarl is without its engine.weight_rounding: int8, because that is 'fp8'.")
    caplog.clear()
    assert preset.fields_for({"engine": object(), "learner_rounding": "engine"}, defaults) == {}
    assert "paper/qarl is without its engine: {'weight_rounding': 'int8'}" in caplog.text


def test_parts_of_the_trainer_are_described_and_compared():
    assert "  trainer:  perturbation={'std': 0.001}" in presets.describe("paper/alp").splitlines()
    rows = presets.diff(presets.get("paper/alp", std=0.5), "paper/ppo-is")
    assert [(row.semantics, row.a, row.b) for row in rows] == [("trainer: perturbation", "{'std': 0.5}", "-")]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_warns_about_nothing(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        presets.get(name)


def test_what_a_preset_needs_beyond_log_probs():
    terms = (RatioBand(level="group", low=0.5, high=2.0), StalenessBound(max_lag=4))
    preset = make_preset("mine", Correction(keep=terms), citation="-", notes="-")

    assert preset.requires == ("sampling_per_token_logps", "group_ids", "policy_versions", "current_version")


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
    assert correction("paper/m2po").keep[0].budget == 0.04
    assert correction("paper/dppo-mask").keep[0] == DivergenceBand(
        statistic="binary_tv", level="token", high=0.2, ratio="current/sampling"
    )
    mask = correction("prime-rl/probability-difference").keep[0]
    assert (mask.low, mask.high, mask.ratio) == (-0.2, 0.2, "current/sampling")
    assert correction("trl/sequence-mask") == presets.from_trl().correction


def test_opsm_on_staleness_alone_needs_no_sampler():
    preset = presets.get("paper/opsm", ratio="current/old")

    assert preset.requires == ()
    assert preset.formula == "w = 1; drop if A < 0 and -log rho_geo > 0.05; rho = pi / pi_old"


def test_ppo_is_clips_the_whole_shift_by_hand():
    batch = policy_batch([[1.1, 1.5], [0.5, 1.0]], [[1.05, 1.0], [1.0, 1.1]])  # pi / mu = 1.155, 1.5, 0.5, 1.1
    out = presets.get("paper/ppo-is").objective(batch)

    assert out.loss.item() == pytest.approx(-(1.155 + 1.2 + 0.5 + 1.1) / 4, rel=1e-5)


def test_prime_rls_gradient_by_hand():
    batch = policy_batch([[2.0, 1.0]], [[1.5, 1.0]])
    out = presets.get("prime-rl/probability-difference").objective(batch)
    (gradient,) = torch.autograd.grad(out.loss, batch.per_token_logps)

    pull = 2 * 1e-3 * math.log(3)
    close(gradient, torch.tensor([[(-3.0 + pull) / 2, -1.0 / 2]]))  # (-(pi / mu) A + 2 tau log(pi / mu)) / tokens


def test_prime_rl_draws_a_dropped_token_back():
    """The whole default loss, token by token in plain floats; p = exp(-4) and q = p / ratio, as in ``policy_batch``."""
    ratios, sides, tau, high = [[2.0, 1.0], [1.5, 0.25]], [1.0, -1.0], 0.5, 0.008
    batch = policy_batch(ratios, advantages=torch.tensor(sides))
    out = presets.get("prime-rl/probability-difference", high=high, low=-0.05, tau=tau).objective(batch)
    (gradient,) = torch.autograd.grad(out.loss, batch.per_token_logps)

    loss, slopes, p = 0.0, [], math.exp(-4)
    for row, side in zip(ratios, sides, strict=True):
        for ratio in row:
            moved = p - p / ratio
            kept = not (moved > high if side > 0 else moved < -0.05)
            loss += tau * math.log(ratio) ** 2
            slopes.append((2 * tau * math.log(ratio) - kept * ratio * side) / 4)
    assert out.keep_mask.tolist() == [[False, True], [True, False]]
    close(gradient.flatten(), torch.tensor(slopes))
    policy = float(out.stats["loss/policy"])
    assert out.loss.item() - policy == pytest.approx(loss / 4, abs=1e-6)


def test_loss_of_a_preset_by_hand():
    out = presets.get("paper/tis", max_weight=3.0).objective(policy_batch(RATIOS))

    total = 1.5 + 2 + 0.25 + 3 + 1.01 + 1.01 + 1 + 3 + 3
    assert out.loss.item() == pytest.approx(-total / 9, abs=1e-6)  # A = 1, on-policy, 9 tokens
    assert math.isfinite(float(out.stats["weight_applied/ess_token"]))
