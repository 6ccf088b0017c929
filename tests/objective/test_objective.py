"""Objective: loss x correction + KL - entropy, denominators, gradient, and inputs that are not finite.

On-policy (staleness 1) the policy loss of a token is -A. Log-probs are -4; None is padding, which holds NaN.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import LOGP, policy_batch, to_tensor

from trl_offpolicy import (
    BandWeight,
    Correction,
    DivergenceBand,
    ESSWeight,
    KLPenalty,
    Objective,
    OffPolicySequenceMask,
    OutlierVeto,
    PolicyBatch,
    PrefixMinWeight,
    ProbabilityDifferenceMask,
    RatioBand,
    RawWeight,
    Reduction,
    SecondMomentBudget,
    ShapedWeight,
    TruncateWeight,
    losses,
)
from trl_offpolicy.functional.aggregation import AGGREGATIONS

NAN, INF = float("nan"), float("inf")
L = math.log(2)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

TWO_ROWS = [[1.0, 1.0, 1.0], [1.0, None, None]]
A13 = {"advantages": torch.tensor([1.0, 3.0])}
ALL_LOSSES = [losses.PPOClip(), losses.CISPO(), losses.SAPO(), losses.VESPO(), losses.GPG()]
DROP_HIGH = Correction(keep=(RatioBand(level="token", low=None, high=4.0),))


def evaluate(batch, reduction=None, **options):
    """The objective's output and the gradient of its loss."""
    out = Objective(**options)(batch, reduction)
    (gradient,) = torch.autograd.grad(out.loss, batch.per_token_logps, allow_unused=True)
    return out, gradient


def loss_of(batch, reduction=None, **options):
    return evaluate(batch, reduction, **options)[0].loss.item()


def ref(ratios):
    """Reference log-probs with ref/current = ``ratios`` where current is -4."""
    return {"ref_per_token_logps": LOGP + to_tensor(ratios).log()}


# ------------------------------------------------------------------------------------------------ aggregation


@pytest.mark.parametrize(
    ("aggregation", "max_length", "expected"),
    [
        ("token_mean", None, -1.5),  # -(1 + 1 + 1 + 3) / 4
        ("token_sum", None, -6.0),
        ("seq_mean_token_mean", None, -2.0),  # -(3/3 + 3/1) / 2
        ("seq_mean_token_sum", None, -3.0),  # -(3 + 3) / 2
        ("seq_mean_token_sum_norm", None, -1.0),  # -(3/3 + 3/3) / 2
        ("seq_mean_token_sum_norm", 10, -0.3),
    ],
)
def test_aggregation(aggregation, max_length, expected):
    batch = policy_batch(TWO_ROWS, **A13)

    assert loss_of(batch, Reduction(max_length=max_length), aggregation=aggregation) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(
    ("aggregation", "whole", "kept"),
    [  # the first token of row 0 is dropped: the policy sum is -(1 + 1 + 3)
        ("token_mean", -5 / 4, -5 / 3),
        ("token_sum", -5.0, -5.0),
        ("seq_mean_token_mean", -(2 / 3 + 3) / 2, -(2 / 2 + 3) / 2),
        ("seq_mean_token_sum", -5 / 2, -5 / 2),
        ("seq_mean_token_sum_norm", -5 / 6, -5 / 6),
    ],
)
def test_denominator_after_rejection(aggregation, whole, kept):
    batch = policy_batch([[8.0, 1.0, 1.0], [1.0, None, None]], **A13)
    options = {"aggregation": aggregation, "correction": DROP_HIGH}

    assert loss_of(batch, denominator="all", **options) == pytest.approx(whole, abs=1e-6)
    assert loss_of(batch, denominator="kept", **options) == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize(("denominator", "expected"), [("all", -1.5), ("kept", -3.0)])  # -(0 + 3) / 2 or / 1
def test_a_dropped_sequence_counts_unless_the_denominator_is_kept(denominator, expected):
    batch = policy_batch([[8.0, 9.0, 8.0], [1.0, None, None]], **A13)

    loss = loss_of(batch, aggregation="seq_mean_token_mean", correction=DROP_HIGH, denominator=denominator)

    assert loss == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_an_empty_row_counts_where_nothing_is_dropped(denominator):
    batch = policy_batch([[1.0, 1.0, 1.0], [None, None, None]], **A13)

    loss = loss_of(batch, aggregation="seq_mean_token_mean", denominator=denominator)

    assert loss == pytest.approx(-0.5, abs=1e-6)


def test_a_length_of_its_own_goes_before_that_of_the_reduction():
    batch = policy_batch([[1.0, 1.0], [1.0, None]])
    options = {"aggregation": "seq_mean_token_sum_norm", "max_length": 8}

    assert loss_of(batch, Reduction(max_length=2), **options) == pytest.approx(-3 / 2 / 8, abs=1e-6)
    with pytest.raises(ValueError, match=r"^max_length must be None unless aggregation is 'seq_mean_token_sum_norm'"):
        Objective(max_length=8)
    with pytest.raises(ValueError, match=r"^max_length must be a whole number of at least 1, but got 0"):
        Objective(aggregation="seq_mean_token_sum_norm", max_length=0)
    with pytest.raises(ValueError, match=r"^entropy_aggregation must be one of"):
        Objective(entropy_aggregation="mean")


def test_advantages_by_token():
    batch = policy_batch(TWO_ROWS, advantages=torch.tensor([[1.0, -2.0, 4.0], [3.0, NAN, NAN]]))

    out, gradient = evaluate(batch)

    assert out.loss.item() == pytest.approx(-1.5, abs=1e-6)  # -(1 - 2 + 4 + 3) / 4
    close(gradient, torch.tensor([[-0.25, 0.5, -1.0], [-0.75, 0.0, 0.0]]))


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


# -------------------------------------------------------------------------------------------------- reduction


def rows_of(batch, rows):
    """Some rows of a batch, as a micro-batch with its own leaf."""
    part = {
        name: None if value is None else value[rows] for name, value in vars(batch).items() if name != "per_token_logps"
    }
    return PolicyBatch(per_token_logps=batch.per_token_logps.detach()[rows].requires_grad_(), **part)


FOUR_ROWS = [[1.5, 0.5, 2.0], [3.0, None, None], [0.25, 1.0, None], [1.0, 2.0, 0.5]]
STALE = [[1.1, 0.7, 1.5], [0.9, None, None], [1.0, 1.3, None], [0.5, 1.0, 1.2]]
FOUR = {"advantages": torch.tensor([1.0, -2.0, 0.5, -0.7])}
OPTIONS = {"correction": Correction(weight=TruncateWeight(max_weight=2.0)), "kl": KLPenalty(coef=0.1)}


def four_rows():
    return policy_batch(FOUR_ROWS, STALE, **FOUR, **ref([[2.0, 0.5, 1.0]] * 4))


def micro_batched(split, reduction, **options):
    """Sum of the losses and the stacked gradients of micro-batches with these rows."""
    total, gradients = 0.0, []
    for rows in split:
        out, gradient = evaluate(rows_of(four_rows(), rows), reduction, **options)
        total += out.loss.item()
        gradients.append(gradient)
    return total, torch.cat(gradients)


EVEN, UNEVEN = ([0, 1], [2, 3]), ([0], [1, 2, 3])


@pytest.mark.parametrize(
    ("aggregation", "split", "reduction"),
    [
        ("token_mean", EVEN, Reduction(tokens=9)),
        ("token_mean", UNEVEN, Reduction(tokens=torch.tensor(9.0), accumulation=2)),
        ("seq_mean_token_mean", EVEN, Reduction(accumulation=2)),
        ("seq_mean_token_mean", UNEVEN, Reduction(sequences=4, accumulation=2)),
        ("seq_mean_token_sum", EVEN, Reduction(accumulation=2)),
        ("seq_mean_token_sum", UNEVEN, Reduction(sequences=torch.tensor(4), accumulation=2)),
        ("seq_mean_token_sum_norm", EVEN, Reduction(accumulation=2, max_length=3)),
        ("seq_mean_token_sum_norm", UNEVEN, Reduction(sequences=4, max_length=3)),
        ("token_sum", UNEVEN, Reduction(accumulation=2)),
    ],
)
def test_micro_batches_add_up_to_the_whole_batch(aggregation, split, reduction):
    whole, gradient = evaluate(four_rows(), Reduction(max_length=3), aggregation=aggregation, **OPTIONS)

    total, gradients = micro_batched(split, reduction, aggregation=aggregation, **OPTIONS)

    assert total == pytest.approx(whole.loss.item(), abs=1e-5)
    close(gradients, gradient)


@pytest.mark.parametrize(
    ("aggregation", "reduction"),
    [
        ("token_mean", Reduction(tokens=9, world_size=2)),
        ("seq_mean_token_mean", Reduction(sequences=4, world_size=2)),
        ("seq_mean_token_sum_norm", Reduction(sequences=4, world_size=2, max_length=3)),
    ],
)
def test_ranks_average_to_the_whole_batch(aggregation, reduction):
    whole, gradient = evaluate(four_rows(), Reduction(max_length=3), aggregation=aggregation, **OPTIONS)

    total, gradients = micro_batched(UNEVEN, reduction, aggregation=aggregation, **OPTIONS)

    assert total / 2 == pytest.approx(whole.loss.item(), abs=1e-6)
    close(gradients / 2, gradient)


def test_without_global_tokens_each_micro_batch_is_its_own_mean():
    batch = policy_batch(TWO_ROWS, **A13)

    assert loss_of(batch, Reduction(accumulation=4)) == pytest.approx(-1.5 / 4, abs=1e-6)
    assert loss_of(batch, Reduction(sequences=100, accumulation=4)) == pytest.approx(-1.5 / 4, abs=1e-6)


def test_a_token_count_is_ignored_by_sequence_means():
    batch = policy_batch(TWO_ROWS, **A13)

    loss = loss_of(batch, Reduction(tokens=100, accumulation=4), aggregation="seq_mean_token_mean")

    assert loss == pytest.approx(-2.0 / 4, abs=1e-6)


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


def test_only_the_loss_carries_gradient():
    out, _ = evaluate(four_rows(), **OPTIONS)

    assert out.loss.requires_grad
    assert out.per_token_loss.requires_grad
    assert not out.weights.requires_grad
    assert not out.keep_mask.requires_grad
    assert not any(stat.value.requires_grad for stat in out.stats.values())


def test_inputs_are_not_mutated():
    batch = four_rows()
    before = {name: value.clone() for name, value in vars(batch).items() if value is not None}

    evaluate(batch, **OPTIONS)

    for name, value in before.items():
        assert torch.equal(value.nan_to_num(nan=77.0), getattr(batch, name).nan_to_num(nan=77.0)), name


# ------------------------------------------------------------------------------------------------- not finite

CONFIGURATIONS = {
    "token truncation": {
        "correction": Correction(weight=TruncateWeight(max_weight=2.0)),
        "kl": KLPenalty(coef=0.1, ratio_weighted=True),
    },
    "sequence band, normalised": {
        "correction": Correction(weight=BandWeight(level="sequence", low=0.1, high=9.0), normalize="original"),
        "kl": KLPenalty(coef=0.1),
        "kl_weighted": True,
        "aggregation": "seq_mean_token_mean",
    },
    "all keep terms, dropped": {
        "policy_loss": losses.GPG(),
        "correction": Correction(
            weight=(TruncateWeight(max_weight=2.0), RawWeight(level="sequence_mean", ratio="current/old")),
            keep=(
                OutlierVeto(low=1e-4, high=100.0),
                RatioBand(level="token", low=0.1, high=5.0),
                DivergenceBand(statistic="k3", high=1.0),
                DivergenceBand(statistic="binary_kl", level="sequence_max", high=0.5),
                ProbabilityDifferenceMask(low=-0.9, high=0.9),
                SecondMomentBudget(budget=0.5),
                OffPolicySequenceMask(max_divergence=0.2),
            ),
            normalize="kept",
            normalize_over="micro_batch",
            measure_on="remaining",
            nonfinite="drop",
        ),
        "kl": KLPenalty(coef=0.1),
        "kl_on": "kept",
        "denominator": "kept",
    },
    "VESPO, sequence weight": {
        "policy_loss": losses.VESPO(),
        "correction": Correction(
            weight=TruncateWeight(level="sequence", max_weight=3.0),
            keep=(OffPolicySequenceMask(max_divergence=0.2),),
        ),
        "kl": KLPenalty(coef=0.1),
    },
    "GPG, total ratio by prefix": {
        "policy_loss": losses.GPG(),
        "correction": Correction(
            weight=PrefixMinWeight(ratio="current/sampling"),
            keep=(RatioBand(level="sequence_mean", low=0.1, high=None),),
        ),
        "kl": KLPenalty(coef=0.1, ratio_weighted=True),
    },
    "CISPO, bypass": {
        "policy_loss": losses.CISPO(),
        "correction": Correction(keep=(RatioBand(level="turn", low=0.1, high=None, ratio="current/sampling"),)),
        "kl": KLPenalty(coef=0.1, ratio_weighted=True),
        "mode": "bypass",
    },
    "capped at an ESS, shaped": {
        "policy_loss": losses.GPG(),
        "correction": Correction(
            weight=(ESSWeight(target=0.9), ShapedWeight(gamma=0.5, level="turn", ratio="current/old")),
            measure_on="remaining",
        ),
    },
}
PLACES = {"trainable token": (0, slice(1, 2)), "padding": (0, slice(2, 3)), "whole row": (1, slice(0, 3))}
COUNTS = {"trainable token": 1 / 7, "padding": 0.0, "whole row": 3 / 7}  # of 7 trainable tokens
COUNTED_IN = {
    "sampling_per_token_logps": {"mismatch", "total"},
    "old_per_token_logps": {"mismatch", "staleness"},
    "ref_per_token_logps": set(),
}


def finite_batch():
    """Rows of 2, 3, 2 trainable tokens; padding is finite."""
    mismatch = torch.tensor([[1.5, 0.5, 1.0], [2.0, 1.1, 0.7], [0.8, 1.2, 1.0]])
    drift = torch.tensor([[1.1, 0.9, 1.0], [0.8, 1.3, 1.0], [1.0, 0.7, 1.0]])
    old = torch.tensor([[-1.0, -2.0, -1.5], [-0.5, -3.0, -1.0], [-2.0, -0.1, -1.0]])
    return PolicyBatch(
        per_token_logps=(old + drift.log()).requires_grad_(),
        old_per_token_logps=old,
        sampling_per_token_logps=old - mismatch.log(),
        ref_per_token_logps=old + 0.3,
        completion_mask=torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]]),
        advantages=torch.tensor([1.0, -0.5, -1.0]),
        rewards=torch.tensor([1.0, 0.0, 0.0]),
    )


def corrupted(field, place, bad):
    batch = finite_batch()
    value = getattr(batch, field).clone()
    value[PLACES[place]] = bad
    return replace(batch, **{field: value})


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("field", COUNTED_IN)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_log_probs_that_are_not_finite(bad, field, place, configuration):
    out, gradient = evaluate(corrupted(field, place, bad), **CONFIGURATIONS[configuration])

    values = out.stats.compute()
    assert math.isfinite(out.loss.item())
    assert gradient.isfinite().all()
    assert out.per_token_loss.isfinite().all()
    assert out.weights.isfinite().all()
    assert {key: value for key, value in values.items() if not math.isfinite(value)} == {}
    for group in ("mismatch", "total", "staleness"):
        expected = COUNTS[place] if group in COUNTED_IN[field] else 0.0
        assert values[f"offpolicy/{group}/nonfinite_fraction"] == pytest.approx(expected)
    expected = COUNTS[place] if field == "ref_per_token_logps" else 0.0
    assert values["offpolicy/loss/nonfinite_reference"] == pytest.approx(expected)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("field", [*COUNTED_IN, "per_token_logps"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_padding_changes_nothing_to_the_last_bit(bad, field, configuration):
    clean, expected = evaluate(finite_batch(), **CONFIGURATIONS[configuration])

    out, gradient = evaluate(corrupted(field, "padding", bad), **CONFIGURATIONS[configuration])

    assert torch.equal(out.loss, clean.loss)
    assert torch.equal(gradient, expected)
    assert torch.equal(out.weights, clean.weights)
    assert torch.equal(out.keep_mask, clean.keep_mask)
    assert out.stats.compute() == clean.stats.compute()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_neutral_is_as_if_the_policies_agreed_on_the_token(bad):
    options = CONFIGURATIONS["token truncation"]

    for field, agree in (
        ("sampling_per_token_logps", {"sampling_per_token_logps": "old_per_token_logps"}),
        ("ref_per_token_logps", {"ref_per_token_logps": "per_token_logps"}),
    ):
        batch = finite_batch()
        value = getattr(batch, field).clone()
        value[0, 1] = getattr(batch, agree[field]).detach()[0, 1]
        expected, gradient = evaluate(replace(batch, **{field: value}), **options)

        out, grad = evaluate(corrupted(field, "trainable token", bad), **options)

        close(out.loss, expected.loss)
        close(out.weights, expected.weights)
        close(grad, gradient)


def test_a_dropped_token_has_no_policy_gradient():
    correction = Correction(weight=TruncateWeight(max_weight=2.0), nonfinite="drop")

    _, gradient = evaluate(corrupted("sampling_per_token_logps", "trainable token", NAN), correction=correction)

    assert gradient[0, 1].item() == 0.0
    assert gradient[0, 0].item() != 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_current_log_probs_must_be_finite_on_trainable_tokens(bad):
    batch = finite_batch()
    current = batch.per_token_logps.detach().clone()
    current[0, 1] = bad

    with pytest.raises(ValueError, match=r"^per_token_logps must be finite on trainable tokens.*0 \* NaN stays NaN"):
        Objective()(replace(batch, per_token_logps=current))


def test_entropies_and_advantages_may_be_nan_on_padding():
    advantages = torch.tensor([[1.0, 2.0, NAN], [1.0, 1.0, 1.0], [NAN, -1.0, -1.0]])
    batch = replace(finite_batch(), advantages=advantages, entropies=torch.where(advantages.isnan(), NAN, 1.0))

    for policy_loss in ALL_LOSSES:
        out, gradient = evaluate(batch, policy_loss=policy_loss, entropy_coef=0.1)
        assert math.isfinite(out.loss.item())
        assert gradient.isfinite().all(), policy_loss
        assert all(math.isfinite(value) for value in out.stats.compute().values())


# ------------------------------------------------------------------------------------------------- edge sizes


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_nothing_trainable_gives_a_zero_loss(configuration, aggregation):
    batch = replace(finite_batch(), completion_mask=torch.zeros(3, 3))

    out, gradient = evaluate(batch, **{**CONFIGURATIONS[configuration], "aggregation": aggregation})

    assert out.loss.item() == 0.0
    assert gradient.abs().sum().item() == 0.0
    assert all(math.isfinite(value) for value in out.stats.compute().values())


@pytest.mark.parametrize("policy_loss", ALL_LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_everything_dropped_gives_a_zero_loss_and_no_gradient(level, policy_loss):
    nothing = Correction(weight=RawWeight(), keep=(RatioBand(level=level, low=None, high=1e-3),))

    out, gradient = evaluate(finite_batch(), correction=nothing, policy_loss=policy_loss)

    assert out.loss.item() == 0.0
    assert gradient.abs().sum().item() == 0.0
    assert not out.keep_mask.any()
    assert all(math.isfinite(value) for value in out.stats.compute().values())


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_batch_without_rows_gives_a_zero_loss(configuration):
    none = rows_of(finite_batch(), slice(0, 0))

    out, _ = evaluate(none, **CONFIGURATIONS[configuration])

    assert out.loss.item() == 0.0
    assert out.weights.shape == (0, 3)
    assert all(math.isfinite(value) for value in out.stats.compute().values())


def test_an_empty_row_adds_to_no_token_mean():
    rows = [[1.5, 0.5, 2.0], [3.0, None, None]]
    advantages = torch.tensor([1.0, -2.0, 5.0])

    alone, _ = evaluate(policy_batch(rows, advantages=advantages[:2]), correction=DROP_HIGH)
    padded, gradient = evaluate(policy_batch([*rows, [None] * 3], advantages=advantages), correction=DROP_HIGH)

    assert padded.loss.item() == pytest.approx(alone.loss.item(), abs=1e-6)
    assert gradient[2].tolist() == [0.0, 0.0, 0.0]
    assert padded.stats.compute() == pytest.approx(alone.stats.compute(), rel=1e-5, abs=1e-5)


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
