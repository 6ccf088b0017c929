"""NeMo-RL's ``ClippedPGLossFn`` in plain floats, value and gradient, against ``from_nemo_rl``."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from batches import policy_batch
from plain_parity import GEO, PRODUCT, assert_both, assert_parity, gradient, ppo, ratio, rows_of

from trl_offpolicy import presets
from trl_offpolicy.presets.parsing import parse_objective, plain

NO_KL = {"reference_policy_kl_penalty": 0.0}
IS = {**NO_KL, "use_importance_sampling_correction": True}
SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}


def quiet(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return presets.from_nemo_rl(**options)


def truncated(kind, low, high):
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


def correct(log_ratios, kind, low, high, whole):
    """The factor of each token's loss."""
    rhos = [ratio(log_ratios, PRODUCT)] * len(log_ratios) if whole else [math.exp(value) for value in log_ratios]
    if kind == "tis":
        return [min(max(rho, low or 0.0), high) for rho in rhos]
    if kind == "icepop":
        return [rho * (low <= rho <= high) for rho in rhos]
    if kind == "seq-mask-tis":
        return [rho * (low <= ratio(log_ratios, GEO) <= high) for rho in rhos]
    return rhos


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("options", [{}, {"token_level_loss": False}, SEQUENCE], ids=["tokens", "responses", "gspo"])
@pytest.mark.parametrize("kind", [None, "tis", "icepop", "seq-mask-tis"])
def test_every_type_under_every_reduction(kind, options, seed, random_batch):
    whole = "sequence_level_importance_ratios" in options
    if kind == "seq-mask-tis" and whole:
        pytest.skip("NeMo-RL refuses it")
    low, high = {"seq-mask-tis": (0.9, 1.15), "tis": (None, 1.3)}.get(kind, (0.7, 1.4))
    batch, rows = random_batch(seed), rows_of(random_batch(seed))
    factors = [correct(row.mismatch, kind, low, high, whole) for row in rows]
    keep = [[kind != "seq-mask-tis" or factor > 0 for factor in row] for row in factors]
    if kind == "seq-mask-tis":
        assert_both(keep)
    by_row = []
    for row, own in zip(rows, factors, strict=True):
        steps = [now - old for now, old in zip(row.current, row.old, strict=True)]
        steps = [sum(steps) / max(len(steps), 1)] * len(steps) if whole else steps
        by_row.append([factor * ppo(step, row.advantage) for factor, step in zip(own, steps, strict=True)])
    if options.get("token_level_loss", True):
        loss = sum(map(sum, by_row)) / sum(map(len, by_row))
    else:
        loss = sum(sum(row) / max(len(row), 1) for row in by_row) / len(by_row)

    preset = quiet(**IS, **options, **(truncated(kind, low, high) if kind else {}))
    assert_parity(preset, batch, factors, keep, loss)


REFERENCE = [0.5, -0.4, 1.2, -2.0]  # log(pi / ref) of four tokens


def kl_batch(reference=REFERENCE, advantage=1.0):
    """One response. pi differs from pi_old and from mu on every token."""
    batch = policy_batch(
        [[1.1, 0.9, 1.2, 0.8]], staleness=[[1.15, 0.95, 1.1, 0.9]], advantages=torch.tensor([advantage])
    )
    return replace(batch, ref_per_token_logps=batch.per_token_logps.detach() - torch.tensor([reference]))


def estimate(kind, x):
    """Value of the estimate, and its slope in x."""
    return {
        "k1": (x, 1.0),
        "k2": (x * x / 2, x),
        "k3": (math.exp(-x) - 1 + x, 1 - math.exp(-x)),
    }[kind]


@pytest.mark.parametrize("options", [{}, SEQUENCE, {"disable_ppo_ratio": True}], ids=["tokens", "gspo", "reinforce"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_has_the_value_of_the_estimate_and_the_score_function_gradient(kind, options):
    """Off pi_old as well: NeMo-RL's factor pi / sg[pi] is 1, and each token has its own, also under GSPO."""
    batch, coef = kl_batch(), 0.5
    out = [
        quiet(**{**options, "reference_policy_kl_penalty": c, "reference_policy_kl_type": kind}) for c in (coef, 0.0)
    ]
    losses = [preset.objective(batch).loss.item() for preset in out]
    slopes = [gradient(preset, batch) for preset in out]

    parts = [estimate(kind, x) for x in REFERENCE]
    assert losses[0] - losses[1] == pytest.approx(coef * sum(value for value, _ in parts) / 4, rel=1e-4)
    expected = torch.tensor([[coef * (value + slope) / 4 for value, slope in parts]])
    torch.testing.assert_close(slopes[0] - slopes[1], expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_kl_ends_at_both_clips():
    """log(pi / ref) of 25 is held at 20, k1 of it at 10; -12 is held at -10; k1 without clips is x itself."""
    batch = kl_batch([25.0, -12.0, 4.0, 0.0])
    common = {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": "k1"}

    def term(**options):
        both = [quiet(**{**common, **options}), quiet(**NO_KL)]
        losses = [preset.objective(batch).loss.item() for preset in both]
        slopes = [gradient(preset, batch) for preset in both]
        return 4 * (losses[0] - losses[1]), (4 * (slopes[0] - slopes[1]))[0].tolist()

    value, slope = term()
    assert value == pytest.approx(10 - 10 + 4, rel=1e-4)
    assert slope == pytest.approx([0.0, 0.0, 5.0, 1.0], abs=1e-4)
    value, slope = term(kl_output_clamp_value=None)
    assert value == pytest.approx(20 - 12 + 4, rel=1e-4)
    assert slope == pytest.approx([0.0, -11.0, 5.0, 1.0], abs=1e-4)
    value, slope = term(kl_output_clamp_value=None, kl_input_clamp_value=None)
    assert value == pytest.approx(25 - 12 + 4, rel=1e-4)
    assert slope == pytest.approx([26.0, -11.0, 5.0, 1.0], abs=1e-4)


def test_a_forced_ratio_is_1_and_the_weights_hold_the_whole_shift():
    """-A w with w = pi / mu, capped: NeMo-RL takes pi for pi_old; the gradient is w times that of -A log pi."""
    batch = kl_batch(advantage=-0.5)
    total = [1.1 * 1.15, 0.9 * 0.95, 1.2 * 1.1, 0.8 * 0.9]
    plain_preset = quiet(**NO_KL, force_on_policy_ratio=True)
    assert plain_preset.objective(batch).loss.item() == pytest.approx(0.5, rel=1e-5)

    preset = quiet(**IS, **truncated("tis", None, 1.2), force_on_policy_ratio=True)
    weights = [min(rho, 1.2) for rho in total]
    assert preset.objective(batch).loss.item() == pytest.approx(0.5 * sum(weights) / 4, rel=1e-5)
    expected = torch.tensor([[0.5 * w / 4 for w in weights]])
    torch.testing.assert_close(gradient(preset, batch), expected, rtol=1e-4, atol=1e-7)
    masked = {**IS, **truncated("seq-mask-tis", 0.99, 1.01)}  # geometric means: pi / mu 1.007, pi_old / mu 0.987
    assert quiet(**masked, force_on_policy_ratio=True).objective(batch).keep_mask.all()
    assert not quiet(**masked).objective(batch).keep_mask.any()


def test_the_kl_term_is_written_to_yaml_and_read_again():
    objective = quiet().objective
    written = plain(replace(objective, correction=None))
    again = parse_objective(written, where="objective", base=type(objective)())

    assert written["kl"]["type"] == "trl_offpolicy.presets.frameworks.nemo_rl:ScoreFunctionKL"
    assert again.kl == objective.kl


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_level_importance_ratios": True}, r"^token_level_loss must be False with sequence_level_importance"),
        ({"truncated_importance_sampling_ratio": 2.0}, r"^truncated_importance_sampling_type must be one of \['tis',"),
        ({"truncated_importance_sampling_type": "tis"}, r"^use_importance_sampling_correction must be True with"),
        ({**IS, **SEQUENCE, **truncated("seq-mask-tis", 0.9, 1.1)}, r"^sequence_level_importance_ratios must be False"),
        ({**IS, **truncated("icepop", None, 2.0)}, r"^truncated_importance_sampling_ratio_min must be given with"),
        ({**IS, **truncated("tis", 3.0, 2.0)}, r"^truncated_importance_sampling_ratio_min must be at most"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, r"^ratio_clip_c must be None with use_cispo"),
        ({"use_cispo": True, "token_level_loss": False}, r"^token_level_loss must be True with use_cispo"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, r"^disable_ppo_ratio must be False with use_cispo"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, r"^force_on_policy_ratio must be False with use_cispo"),
        ({"reference_policy_kl_type": "k4"}, r"^reference_policy_kl_type must be one of"),
    ],
)
def test_what_nemo_rl_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        quiet(**options)


def test_options_of_the_kl_term_are_not_read_without_a_penalty():
    """Most of NeMo-RL's own configurations have both; a penalty makes it an error."""
    with pytest.warns(UserWarning, match="use_on_policy_kl_approximation=True has no effect"):
        found = presets.from_nemo_rl(**NO_KL, use_on_policy_kl_approximation=True)
    assert found.objective == quiet(**NO_KL).objective
    with pytest.raises(NotImplementedError, match=r"^use_on_policy_kl_approximation must be False"):
        presets.from_nemo_rl(use_on_policy_kl_approximation=True)


def test_a_number_that_pyyaml_reads_as_text():
    assert quiet(ratio_clip_max="3e-4").objective == quiet(ratio_clip_max=3e-4).objective
