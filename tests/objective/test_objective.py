"""Objective: loss x correction + KL - entropy, and its gradient.

On-policy (staleness 1) the policy loss of a token is -A. Log-probs are -4; None is padding, which holds NaN. What the
loss is divided by: test_objective_reduction.py. Inputs that are not finite, and empty ones: test_objective_edges.py.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import LOGP, evaluate, policy_batch, to_tensor

from trl_offpolicy import (
    BandWeight,
    Correction,
    KLPenalty,
    Objective,
    RatioBand,
    RawWeight,
    Reduction,
    TruncateWeight,
    losses,
)

NAN, INF = float("nan"), float("inf")
L = math.log(2)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

TWO_ROWS = [[1.0, 1.0, 1.0], [1.0, None, None]]
A13 = {"advantages": torch.tensor([1.0, 3.0])}
ALL_LOSSES = [losses.PPOClip(), losses.CISPO(), losses.SAPO(), losses.VESPO(), losses.GPG()]
DROP_HIGH = Correction(keep=(RatioBand(level="token", low=None, high=4.0),))


def loss_of(batch, reduction=None, **options):
    return evaluate(batch, reduction, **options)[0].loss.item()


def ref(ratios):
    """Reference log-probs with ref/current = ``ratios`` where current is -4."""
    return {"ref_per_token_logps": LOGP + to_tensor(ratios).log()}


# ------------------------------------------------------------------------------------------------------ drift


def test_drift_is_on_every_token_and_no_weight_multiplies_it():
    """pi / mu is 3, 0.5, 1 (no log-prob of mu) and 2; the second token is dropped, the first weighs 1.5 at most."""
    batch = policy_batch([[3.0, 0.5, 1.0], [2.0, None, None]])
    batch.sampling_per_token_logps[0, 2] = NAN
    correction = Correction(weight=TruncateWeight(max_weight=1.5), keep=(RatioBand(level="token", low=0.8, high=None),))
    plain, plain_gradient = evaluate(batch, correction=correction)

    out, gradient = evaluate(batch, correction=correction, drift_coef=0.1)

    logs = [[math.log(3), math.log(0.5), 0.0], [math.log(2), 0.0, 0.0]]
    expected = 0.1 * sum(x * x for row in logs for x in row) / 4
    assert out.keep_mask.tolist() == [[True, False, True], [True, False, False]]
    assert out.loss.item() - plain.loss.item() == pytest.approx(expected, abs=1e-6)
    close(gradient - plain_gradient, torch.tensor(logs) * 2 * 0.1 / 4)
    assert float(out.stats["loss/policy"]) == pytest.approx(plain.loss.item(), abs=1e-6)


def test_drift_needs_the_sampler_and_a_whole_denominator():
    assert Objective(drift_coef=1e-3).needs_sampling and not Objective().needs_sampling
    batch = replace(policy_batch(TWO_ROWS), sampling_per_token_logps=None)
    with pytest.raises(ValueError, match=r"^sampling_per_token_logps must be given"):
        Objective(drift_coef=1e-3)(batch)
    with pytest.raises(ValueError, match=r"^drift_coef must be at least 0 .*, but got -0.1"):
        Objective(drift_coef=-0.1)
    with pytest.raises(ValueError, match=r"^drift_coef must be 0 with denominator='kept'"):
        Objective(drift_coef=0.1, denominator="kept")


# --------------------------------------------------------------------------------------- policy term, weights


def test_weights_multiply_the_loss_after_clipping():
    batch = policy_batch([[1.5, 8.0]], [[1.5, 1.0]])

    out, gradient = evaluate(batch, correction=Correction(weight=TruncateWeight(max_weight=2.0)))

    close(out.per_token_loss, torch.tensor([[-1.8, -2.0]]))  # 1.5 * min(1.5, 1.2); 2 * 1
    assert out.loss.item() == pytest.approx(-1.9, abs=1e-6)
    close(gradient, torch.tensor([[0.0, -1.0]]))  # clipped; -2 / 2 tokens
    close(out.weights, torch.tensor([[1.5, 2.0]]))


def test_no_correction_is_weight_one_and_still_measures():
    out, _ = evaluate(policy_batch([[1.5, 8.0]]))

    assert out.loss.item() == pytest.approx(-1.0, abs=1e-6)
    assert out.weights.tolist() == [[1.0, 1.0]]
    assert float(out.stats["mismatch/kl_k1"]) == pytest.approx(-math.log(12) / 2, abs=1e-6)


def test_the_clip_is_around_the_proximal_policy_and_every_factor_counts_once():
    batch = policy_batch([[1.0]], [[1.8]])  # current/old = 1.8
    centred = replace(batch, proximal_per_token_logps=batch.old_per_token_logps + math.log(1.2))

    assert loss_of(batch) == pytest.approx(-1.2, abs=1e-6)  # clipped
    assert loss_of(centred) == pytest.approx(-1.2 * 1.2, abs=1e-6)  # proximal/old x the clip of 1.5
    near = replace(batch, proximal_per_token_logps=batch.old_per_token_logps + math.log(1.6))
    assert loss_of(near) == pytest.approx(-1.8, abs=1e-6)  # 1.6 x 1.125, not clipped
    alone = replace(near, old_per_token_logps=None)
    assert loss_of(alone) == pytest.approx(-1.125, abs=1e-6)  # the weights hold proximal/sampling


def test_a_loss_with_the_weights_inside_refuses_a_centre_beside_old():
    batch = policy_batch([[1.0]], [[1.1]])
    centred = replace(batch, proximal_per_token_logps=batch.old_per_token_logps)
    with pytest.raises(ValueError, match="proximal_per_token_logps must be None beside old_per_token_logps with VESPO"):
        Objective(policy_loss=losses.VESPO())(centred)


def test_old_absent_is_ratio_one_with_gradient():
    out, gradient = evaluate(replace(policy_batch([[1.0, 1.0]], [[3.0, 0.1]]), old_per_token_logps=None))

    assert out.loss.item() == -1.0
    assert gradient.tolist() == [[-0.5, -0.5]]


def test_policy_mask_leaves_the_policy_term_but_no_denominator():
    batch = policy_batch(TWO_ROWS, policy_mask=torch.tensor([[1, 0, 0], [1, 1, 1]]), **A13, **ref([[2.0] * 3] * 2))

    out, gradient = evaluate(batch)
    with_kl, _ = evaluate(batch, kl=KLPenalty(coef=0.1))

    assert out.loss.item() == pytest.approx(-1.0, abs=1e-6)  # -(1 + 3) / 4
    close(gradient, torch.tensor([[-0.25, 0.0, 0.0], [-0.75, 0.0, 0.0]]))
    # every trainable token keeps its KL: k3 = 2 - 1 - L
    assert with_kl.loss.item() == pytest.approx(-1.0 + 0.1 * (1 - L), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [  # ratio 5, A = -1
        ({}, 5.0),
        ({"dual_clip": 3.0}, 3.0),
        ({"delta": 4.0}, 4.0),
    ],
)
def test_dual_clip_and_delta_reach_the_loss(options, expected):
    batch = policy_batch([[1.0]], [[5.0]], advantages=-torch.ones(1))

    assert loss_of(batch, policy_loss=losses.PPOClip(**options)) == pytest.approx(expected, abs=1e-5)


# --------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize(
    ("ratio", "k3", "gradient"),
    [  # ref/current; k3 = ratio - 1 - log ratio, its gradient to log pi is 1 - ratio
        (2.0, 1 - L, -1.0),
        (0.5, L - 0.5, 0.5),
        (1.0, 0.0, 0.0),
    ],
)
def test_kl_is_k3_of_the_reference(ratio, k3, gradient):
    batch = policy_batch([[1.0]], **ref([[ratio]]), advantages=torch.zeros(1))

    out, grad = evaluate(batch, kl=KLPenalty(coef=0.1))

    assert out.loss.item() == pytest.approx(0.1 * k3, abs=1e-6)
    assert grad.item() == pytest.approx(0.1 * gradient, abs=1e-6)
    assert float(out.stats["loss/kl"]) == pytest.approx(k3, abs=1e-6)


def test_kl_of_a_far_reference_is_clamped():
    batch = policy_batch([[1.0]], ref_per_token_logps=torch.tensor([[46.0]]), advantages=torch.zeros(1))

    out, gradient = evaluate(batch, kl=KLPenalty(coef=1.0))

    assert out.loss.item() == pytest.approx(math.exp(20) - 21, rel=1e-5)
    assert gradient.item() == 0.0


@pytest.mark.parametrize(
    ("kl_on", "kl_weighted", "kl"),
    [  # k3 = 1 - L on both tokens; weights 1.5 and 2; the second token is dropped
        ("all", False, 2 * (1 - L)),
        ("kept", False, 1 - L),
        ("all", True, 3.5 * (1 - L)),
        ("kept", True, 1.5 * (1 - L)),
    ],
)
def test_what_rejection_and_weights_do_to_the_kl(kl_on, kl_weighted, kl):
    correction = replace(DROP_HIGH, weight=TruncateWeight(max_weight=2.0))
    batch = policy_batch([[1.5, 8.0]], **ref([[2.0, 2.0]]))

    loss = loss_of(batch, correction=correction, kl=KLPenalty(coef=0.1), kl_on=kl_on, kl_weighted=kl_weighted)

    assert loss == pytest.approx((-1.5 + 0.1 * kl) / 2, abs=1e-6)


def test_ratio_weighted_kl_and_its_gradient():
    batch = policy_batch([[1.0]], [[1.5]], **ref([[3.0]]), advantages=torch.zeros(1))  # ref/current = 2

    out, gradient = evaluate(batch, kl=KLPenalty(coef=1.0, ratio_weighted=True))

    assert out.loss.item() == pytest.approx(1.5 * (1 - L), abs=1e-6)
    # product rule: r k3 + r (1 - ref/current) = 1.5 (1 - L) - 1.5
    assert gradient.item() == pytest.approx(-1.5 * L, abs=1e-6)


def test_ratio_weighted_kl_follows_the_level_of_the_loss():
    batch = policy_batch([[1.0, 1.0]], [[4.0, 1.0]], **ref([[8.0, 2.0]]), advantages=torch.zeros(1))
    options = {"kl": KLPenalty(coef=1.0, ratio_weighted=True)}

    token = loss_of(batch, policy_loss=losses.PPOClip(), **options)
    sequence = loss_of(batch, policy_loss=losses.PPOClip(level="sequence_mean"), **options)

    assert token == pytest.approx((4 + 1) * (1 - L) / 2, abs=1e-6)
    assert sequence == pytest.approx((2 + 2) * (1 - L) / 2, abs=1e-6)  # sqrt(4 * 1)


def test_kl_needs_the_reference():
    with pytest.raises(ValueError, match=r"^ref_per_token_logps must be given when kl is set"):
        loss_of(policy_batch([[1.0]]), kl=KLPenalty(coef=0.1))


# ---------------------------------------------------------------------------------------------------- entropy


def test_entropy_bonus_is_the_mean_over_the_tokens_of_the_policy_term():
    entropies = torch.tensor([[1.0, 2.0, 6.0], [4.0, NAN, NAN]], requires_grad=True)
    batch = policy_batch(TWO_ROWS, entropies=entropies, policy_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), **A13)

    out = Objective(entropy_coef=0.1)(batch, Reduction(accumulation=2))
    out.loss.backward()

    # (-(1 + 1 + 3) / 4 - 0.1 (1 + 2 + 4) / 3) / 2
    assert out.loss.item() == pytest.approx((-1.25 - 0.7 / 3) / 2, abs=1e-6)
    close(entropies.grad, torch.tensor([[-1 / 60, -1 / 60, 0.0], [-1 / 60, 0.0, 0.0]]))
    assert float(out.stats["loss/entropy"]) == pytest.approx(13 / 4, abs=1e-6)  # all trainable tokens


def test_entropy_bonus_is_not_divided_by_the_tokens_of_the_step():
    batch = policy_batch([[1.0, 1.0]], entropies=torch.ones(1, 2))

    assert loss_of(batch, Reduction(tokens=8), entropy_coef=0.5) == pytest.approx(-2 / 8 - 0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "reduction", "bonus"),
    [  # entropies 1 2 / 4, the token of 4 dropped
        ("token_mean", Reduction(), {"all": 7 / 3, "kept": 3 / 3}),
        ("token_mean", Reduction(tokens=12, world_size=2), {"all": 7 / 6, "kept": 3 / 6}),
        ("token_sum", Reduction(accumulation=3), {"all": 7.0, "kept": 3.0}),
        ("seq_mean_token_sum", Reduction(sequences=4), {"all": 7 / 4, "kept": 3 / 4}),
        ("seq_mean_token_mean", Reduction(accumulation=2), {"all": 5.5 / 4, "kept": 1.5 / 4}),
    ],
)
def test_entropy_bonus_reduced_as_the_loss(aggregation, reduction, bonus):
    keep = Correction(keep=(RatioBand(level="token", low=None, high=2.0),))
    entropies = torch.tensor([[1.0, 2.0], [4.0, torch.nan]], requires_grad=True)
    batch = policy_batch([[1.0, 1.0], [3.0, None]], entropies=entropies, advantages=torch.zeros(2))
    for kl_on, expected in bonus.items():
        objective = Objective(
            correction=keep, entropy_coef=0.1, entropy_aggregation="loss", aggregation=aggregation, kl_on=kl_on
        )
        out = objective(batch, reduction)
        assert out.loss.item() == pytest.approx(-0.1 * expected, abs=1e-6)
        (slope,) = torch.autograd.grad(out.loss, entropies)
        assert slope.isfinite().all()
        assert (slope[1, 0] != 0) == (kl_on == "all")
        assert out.per_token_loss.abs().max().item() == 0.0


def test_entropy_bonus_needs_entropies():
    with pytest.raises(ValueError, match=r"^entropies must be given when entropy_coef is 0.1"):
        loss_of(policy_batch([[1.0]]), entropy_coef=0.1)


# --------------------------------------------------------------------------------- losses with weights inside


@pytest.mark.parametrize(
    ("weight", "w"),
    [  # ratios (2, 1, padding), log pi = -4
        (TruncateWeight(max_weight=4.0), 2.0),  # 2 * 1
        (TruncateWeight(max_weight=1.5), 1.5),
        (TruncateWeight(level="sequence", max_weight=4.0), 2.0),  # once, not once a token
        (RawWeight(level="sequence_mean"), math.sqrt(2)),
        (None, 1.0),
    ],
)
@pytest.mark.parametrize("drift", [1.0, 1.2])
def test_vespo_takes_the_weight_inside(weight, w, drift):
    batch = policy_batch([[2.0, 1.0, None]], [[drift, drift, None]])

    out, gradient = evaluate(batch, policy_loss=losses.VESPO(), correction=Correction(weight=weight))

    w = w * drift**2
    phi = math.exp(3 + 2 * math.log(w) - 3 * w)  # k 2, lambda 3
    logp = LOGP + math.log(drift)
    close(out.per_token_loss, torch.tensor([[-phi * logp, -phi * logp, 0.0]]))
    close(gradient, torch.tensor([[-phi / 2, -phi / 2, 0.0]]))
    assert float(out.stats["loss/gate_mean"]) == pytest.approx(phi, rel=1e-5)


def test_vespo_reads_a_weight_of_zero_as_1e_8():
    batch = policy_batch([[9.0, 1.0]])

    out, _ = evaluate(
        batch,
        policy_loss=losses.VESPO(k_pos=0.1),
        correction=Correction(weight=BandWeight(low=None, high=5.0)),
    )

    phi = math.exp(3) * 1e-8**0.1  # 3.18
    assert out.loss.item() == pytest.approx(4 * phi, rel=1e-5)


def test_vespo_drops_rejected_tokens():
    out, _ = evaluate(policy_batch([[8.0, 1.0]]), policy_loss=losses.VESPO(), correction=DROP_HIGH)

    assert out.per_token_loss[0, 0].item() == 0.0
    assert out.per_token_loss[0, 1].item() == pytest.approx(4.0, abs=1e-6)  # -phi(1) * -4


# --------------------------------------------------------------------------------------------------- gradient


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "seq_mean_token_mean"},
        {"policy_loss": losses.PPOClip(level="sequence_mean"), "aggregation": "seq_mean_token_mean"},
        {"policy_loss": losses.PPOClip(dual_clip=1.3, delta=1.25)},
        {"policy_loss": losses.SAPO()},
        {"policy_loss": losses.GPG()},
        {"policy_loss": losses.SAPO(level="sequence_mean"), "aggregation": "seq_mean_token_sum"},
        {"kl": KLPenalty(coef=0.5)},
        {"kl": KLPenalty(coef=0.5, ratio_weighted=True), "kl_weighted": True},
        {
            "kl": KLPenalty(coef=0.5, ratio_weighted=True),
            "policy_loss": losses.PPOClip(level="sequence_mean"),
        },
        {"kl": KLPenalty(coef=0.5), "kl_on": "kept", "denominator": "kept"},
    ],
    ids=str,
)
def test_gradient_matches_finite_differences(options):
    """Log-probs are cast to float32: a step of 1/128 rounds to 1e-5 and curves by 1e-5, hence 1e-4."""
    correction = replace(DROP_HIGH, weight=TruncateWeight(max_weight=1.5))
    base = policy_batch(
        [[1.5, 0.5, 8.0], [3.0, 1.0, None]],
        [[1.1, 0.7, 1.4], [0.9, 1.33, None]],
        advantages=torch.tensor([1.0, -0.7]),
        **ref([[2.0, 0.5, 1.0], [1.2, 0.8, 1.0]]),
    )
    objective = Objective(correction=correction, **options)
    _, gradient = evaluate(base, correction=correction, **options)

    step = 1 / 128
    for index in base.mask.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = base.per_token_logps.detach().clone()
            moved[tuple(index)] += sign * step
            ends.append(objective(replace(base, per_token_logps=moved)).loss.item())
        assert gradient[tuple(index)].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-4), index
    assert gradient[1, 2].item() == 0.0


@pytest.mark.parametrize("policy_loss", ALL_LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(policy_loss):
    batch = policy_batch(TWO_ROWS, advantages=torch.tensor([1.0, -3.0]))

    _, gradient = evaluate(batch, policy_loss=policy_loss)

    close(gradient, torch.tensor([[-0.25, -0.25, -0.25], [0.75, 0.0, 0.0]]))  # -A / 4 tokens


def test_cispo_gradient_is_the_capped_ratio():
    batch = policy_batch([[1.0, 1.0]], [[8.0, 0.5]])

    _, gradient = evaluate(batch, policy_loss=losses.CISPO(high=5.0))

    close(gradient, torch.tensor([[-2.5, -0.25]]))  # -min(r, 5) / 2 tokens


# ------------------------------------------------------------------------------------------------------ stats


def test_loss_stats():
    # ratios 1.5 (clipped high, A > 0), 1, 0.5 (not clipped) | 0.5 (clipped low, A < 0), padding | empty
    batch = policy_batch(
        [[1.0, 1.0, 1.0], [1.0, None, None], [None, None, None]],
        [[1.5, 1.0, 0.5], [0.5, None, None], [None, None, None]],
        advantages=torch.tensor([1.0, -1.0, 1.0]),
        **ref([[3.0, 1.0, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]]),  # ref/current 2, 1, 2, 1
    )

    out, _ = evaluate(batch, kl=KLPenalty(coef=0.1))

    values = {
        key.removeprefix("offpolicy/loss/"): value for key, value in out.stats.compute().items() if "/loss/" in key
    }
    assert values == pytest.approx(
        {
            "policy": -0.475,  # (-1.2 - 1 - 0.5 + 0.8) / 4
            "kl": (1 - L) / 2,  # 2 (1 - L) / 4, without its coefficient
            "kl_coef": 0.1,
            "entropy": 0.0,
            "clip_low_fraction": 0.25,
            "clip_high_fraction": 0.25,
            "clip_region_fraction": 0.5,
            "response_clip_low_min": 0.0,  # row 0; the empty row is left out
            "response_clip_high_max": 1 / 3,  # row 0
            "nonfinite_current": 0.0,
            "nonfinite_reference": 0.0,
            "gate_mean": 0.0,
        },
        abs=1e-6,
    )


def test_smallest_low_clip_share_of_a_response():
    batch = policy_batch([[1.0, 1.0], [1.0, 1.0]], [[0.5, 1.0], [0.5, 0.6]], advantages=-torch.ones(2))

    out, _ = evaluate(batch)

    assert float(out.stats["loss/response_clip_low_min"]) == 0.5
    assert float(out.stats["loss/clip_low_fraction"]) == 0.75


def test_sequence_ratios_are_counted_by_sequence():
    batch = policy_batch(
        [[1.0, 1.0, 1.0], [1.0, None, None], [None] * 3], [[3.0, 1.0, 1.0], [1.0, None, None], [None] * 3]
    )

    out, _ = evaluate(batch, policy_loss=losses.PPOClip(level="sequence_mean"))

    assert float(out.stats["loss/clip_high_fraction"]) == 0.5  # row 0 of 2 with tokens: 3 ** (1/3) > 1.2
    assert float(out.stats["loss/response_clip_high_max"]) == 1.0


def test_policy_stat_is_weighted_and_masked():
    correction = replace(DROP_HIGH, weight=TruncateWeight(max_weight=2.0))

    out, _ = evaluate(policy_batch([[1.5, 8.0, 3.0]]), correction=correction)

    assert float(out.stats["loss/policy"]) == pytest.approx(-3.5 / 3, abs=1e-6)  # -(1.5 + 0 + 2) / 3


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kl_on": "dropped"}, ValueError, r"^kl_on must be one of \['all', 'kept'\], but got 'dropped'"),
        (
            {"denominator": "none"},
            ValueError,
            r"^denominator must be one of \['all', 'kept'\], but got 'none'",
        ),
        (
            {"aggregation": "mean"},
            ValueError,
            r"^aggregation must be one of \['token_mean', .*but got 'mean'",
        ),
        ({"mode": "three"}, ValueError, r"^mode must be one of \['decoupled', 'bypass'\], but got 'three'"),
        ({"kl": 0.1}, TypeError, r"^kl must be a KLPenalty or None, but got 0.1"),
        ({"kl_weighted": True}, ValueError, r"^kl_weighted must be False without a KL term"),
        ({"correction": {"weight": None}}, TypeError, r"^correction must be a Correction or None, but got {"),
        (
            {"policy_loss": "ppo"},
            TypeError,
            r"^policy_loss must be a loss of trl_offpolicy.objective.losses or .*, but got 'ppo'",
        ),
        ({"entropy_coef": "0.1"}, ValueError, r"^entropy_coef must be a finite number, but got '0.1'"),
        ({"entropy_coef": NAN}, ValueError, r"^entropy_coef must be a finite number, but got nan"),
        ({"entropy_coef": True}, ValueError, r"^entropy_coef must be a finite number, but got True"),
        (
            {"kl": KLPenalty(coef=0.1), "denominator": "kept"},
            ValueError,
            r"^kl_on must be 'kept' with denominator='kept'",
        ),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        Objective(**options)


@pytest.mark.parametrize("bad", [0.0, -0.1, NAN, INF, "0.1", True, None])
def test_kl_coefficient_is_a_positive_number(bad):
    with pytest.raises(ValueError, match=r"^coef must be"):
        KLPenalty(coef=bad)


def test_scope_is_the_widest_of_the_parts():
    assert Objective().scope == "row"
    assert Objective(correction=DROP_HIGH).scope == "row"
    assert Objective(denominator="kept").scope == "row"  # nothing can be dropped
    assert Objective(correction=DROP_HIGH, denominator="kept").scope == "generation_batch"
    normalised = Correction(weight=RawWeight(), normalize="kept")
    assert Objective(correction=normalised).scope == "generation_batch"
