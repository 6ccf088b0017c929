"""Objective: log-probs that are not finite, batches with nothing trainable, nothing kept or no rows, side effects."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import evaluate, policy_batch, rows_of

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
    SecondMomentBudget,
    ShapedWeight,
    TruncateWeight,
    losses,
)
from trl_offpolicy.functional.aggregation import AGGREGATIONS
from trl_offpolicy.objective.coefficients import StepWindow

NAN, INF = float("nan"), float("inf")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

ALL_LOSSES = [losses.PPOClip(), losses.CISPO(), losses.SAPO(), losses.VESPO(), losses.GPG()]
DROP_HIGH = Correction(keep=(RatioBand(level="token", low=None, high=4.0),))


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


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("by_token", [False, True])
def test_advantages_must_be_finite_on_trainable_tokens(by_token, bad):
    batch = finite_batch()
    advantages = torch.ones(batch.mask.shape if by_token else len(batch.mask))
    advantages[(0, 1) if by_token else 0] = bad

    with pytest.raises(ValueError, match=r"^advantages must be finite on trainable tokens, but got NaN or infinity: "):
        Objective()(replace(batch, advantages=advantages))
    window = StepWindow()
    for one in (batch, replace(batch, advantages=advantages)):
        window.add(batch := one, Objective()(finite_batch()).stats)
    assert window.close().no_advantage == (1 if by_token else batch.mask[0].sum().item())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_advantages_of_a_response_without_tokens_are_not_read(bad):
    batch, empty = finite_batch(), torch.tensor([[False], [True], [True]])
    batch = replace(batch, completion_mask=batch.mask & empty, advantages=torch.tensor([bad, 1.0, -1.0]))

    for policy_loss in ALL_LOSSES:
        out, gradient = evaluate(batch, policy_loss=policy_loss)
        assert math.isfinite(out.loss.item())
        assert gradient.isfinite().all(), policy_loss


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


# --------------------------------------------------------------------------------------------- what must not happen


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_only_the_loss_carries_gradient(configuration):
    out, _ = evaluate(finite_batch(), **CONFIGURATIONS[configuration])

    assert out.loss.requires_grad
    assert out.per_token_loss.requires_grad
    assert not out.weights.requires_grad
    assert not out.keep_mask.requires_grad
    assert not any(stat.value.requires_grad for stat in out.stats.values())


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_inputs_are_not_mutated(configuration):
    batch = corrupted("sampling_per_token_logps", "padding", NAN)
    before = {name: value.clone() for name, value in vars(batch).items() if value is not None}

    evaluate(batch, **CONFIGURATIONS[configuration])

    for name, value in before.items():
        assert torch.equal(value.nan_to_num(nan=77.0), getattr(batch, name).nan_to_num(nan=77.0)), name


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "loss", [losses.PPOClip(level="sequence"), losses.GSPO(), losses.SAPO(level="sequence_mean"), losses.TBPO()]
)
def test_what_advantages_hold_on_padding_does_not_reach_the_gradient(loss, bad):
    rows, drift = [[1.1, 0.9, None], [0.8, None, None]], [[1.0001, 1.0, 1.0], [0.9999, 1.0, 1.0]]
    by_token = torch.tensor([[1.0, 1.0, 0.0], [-2.0, 0.0, 0.0]])
    options = {"policy_loss": loss, "aggregation": loss.aggregation or "token_mean"}

    clean, expected = evaluate(policy_batch(rows, drift, advantages=by_token), **options)
    by_token = torch.where(policy_batch(rows).mask, by_token, bad)
    out, gradient = evaluate(policy_batch(rows, drift, advantages=by_token), **options)

    assert torch.equal(gradient, expected)
    assert out.loss.item() == clean.loss.item()
    assert gradient[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sampling_per_token_logps", {"drift_coef": 1e-3}),
        ("old_per_token_logps", {"policy_loss": losses.DRO(beta=1.0)}),
        ("ref_per_token_logps", {"kl": KLPenalty(coef=0.1, estimator="k2")}),
    ],
)
def test_the_lowest_float32_for_one_token_leaves_a_finite_loss(name, options):
    lowest = torch.tensor([[torch.finfo(torch.float32).min, -4.0]])
    batch = policy_batch([[1.0, 1.0]], ref_per_token_logps=torch.full((1, 2), -4.1))

    out, gradient = evaluate(replace(batch, **{name: lowest}), **options)

    assert out.loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["advantages", "rewards", "group_rewards"])
def test_what_the_advantages_were_made_from_gets_no_gradient(name):
    values = {"advantages": torch.ones(1), "rewards": torch.ones(1), "group_rewards": torch.tensor([[1.0, 0.0]])}
    leaf = values[name].requires_grad_()
    batch = policy_batch([[1.0, 2.0]], group_ids=torch.zeros(1).long(), **values)

    for loss in (losses.PPOClip(), losses.OAPL(beta=1.0)):
        Objective(policy_loss=loss, aggregation=loss.aggregation or "token_mean")(batch).loss.backward()

    assert leaf.grad is None
    assert batch.per_token_logps.grad is not None


def test_a_batch_or_a_reduction_of_another_type_is_refused():
    with pytest.raises(TypeError, match="batch must be a PolicyBatch, but got dict"):
        Objective()({})
    with pytest.raises(TypeError, match="batch must be a PolicyBatch, but got dict"):
        Correction()({})
    with pytest.raises(TypeError, match="reduction must be a Reduction or None, but got int"):
        Objective()(policy_batch([[1.0]]), 3)


def test_versions_by_token_of_no_row():
    none = policy_batch([[1.0, 1.0]], policy_versions=torch.zeros(1, 2).long(), current_version=1)

    out, _ = evaluate(rows_of_none(none))

    assert out.loss.item() == 0.0


def rows_of_none(batch):
    fields = {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in vars(batch).items()}
    fields = {name: value for name, value in fields.items() if name in PolicyBatch.__dataclass_fields__}
    return PolicyBatch(**{**fields, "per_token_logps": fields["per_token_logps"].detach().requires_grad_()})


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64])
def test_lags_of_versions_in_a_small_integer_type_do_not_wrap(dtype):
    batch = policy_batch([[1.0, 1.0]], policy_versions=torch.tensor([100], dtype=dtype), current_version=300)

    stats = evaluate(batch)[0].stats.compute()

    assert stats["offpolicy/rollout/version_lag_mean"] == 200.0
    assert stats["offpolicy/rollout/version_lag_max"] == 200.0
