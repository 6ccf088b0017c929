"""What every policy loss declares, what it refuses, and what the objective makes of it."""

import dataclasses
from dataclasses import replace
from functools import partial

import pytest
import torch
from loss_inputs import on_policy_batch, random_inputs
from property_cases import LOSSES

from trl_offpolicy import Correction, Objective, RawWeight, TruncateWeight, losses
from trl_offpolicy.functional.aggregation import AGGREGATIONS
from trl_offpolicy.presets.parsing import LOSS_TYPES, parse_objective
from trl_offpolicy.presets.preset import make_preset
from trl_offpolicy.types import SCOPES

NAN, INF = float("nan"), float("inf")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-7)
BOUNDS = {"low_correct": 0.5, "high_correct": 1.0, "low_incorrect": 0.2, "high_incorrect": 0.1}
DISPO = partial(losses.DISPO, correct_threshold=0.5, **BOUNDS)


def test_every_loss_is_in_the_property_table_and_has_a_name():
    assert {type(loss) for loss in LOSSES.values()} == set(LOSS_TYPES.values())
    public = {getattr(losses, name) for name in losses.__all__}
    assert set(LOSS_TYPES.values()) == {
        one for one in public if hasattr(one, "weight_use") and one.__name__ != "PolicyLoss"
    }
    assert all(name == name.lower() for name in LOSS_TYPES)


@pytest.mark.parametrize("name", LOSSES)
def test_declarations(name):
    loss = LOSSES[name]
    assert loss.weight_use in ("multiply", "inside")
    assert loss.aggregation in AGGREGATIONS
    assert loss.scope in SCOPES and loss.scope in ("row", "micro_batch")
    assert loss.uses_ratio is (not isinstance(loss, losses.GPG))
    assert dataclasses.is_dataclass(loss) and loss.__dataclass_params__.frozen
    assert "arXiv" in type(loss).__doc__ + type(loss).__call__.__doc__ or isinstance(
        loss, losses.PPOClip | losses.PPOIS | losses.CISPO
    ), f"the docstring of {name} must name its paper as arXiv:number, but does not."
    assert "carries gradient" in " ".join(type(loss).__doc__.split())


def test_which_losses_look_at_more_than_a_row():
    wide = {name for name, loss in LOSSES.items() if loss.scope == "micro_batch"}
    assert wide == {"m2po", "p3o", "clip cov", "kl cov", "r2vpo", "quatro, rows at hand", "oapl, rows at hand"}
    assert Objective(policy_loss=losses.M2PO()).scope == "micro_batch"


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (DISPO(), "rewards"),
        (losses.R2VPO(), "group_ids"),
        (losses.QUATRO(), "group_rewards"),
        (losses.QUATRO(scope="micro_batch"), "rewards"),
        (losses.OAPL(beta=0.1), "rewards"),
        (losses.ESPO(vocab_size=50), "entropies"),
        (losses.TOPR(), "sampling_per_token_logps"),
        (losses.PPOIS(), "sampling_per_token_logps"),
    ],
)
def test_what_a_loss_needs_is_named(loss, field):
    batch = replace(on_policy_batch(), **{field: None})

    with pytest.raises(ValueError, match=rf"^{field} must be given"):
        Objective(policy_loss=loss, aggregation=loss.aggregation)(batch)


@pytest.mark.parametrize(
    ("loss", "required"),
    [
        (losses.TOPR(), ("sampling_per_token_logps",)),
        (losses.OAPL(beta=0.1), ("sampling_per_token_logps", "rewards", "group_rewards")),
        (losses.QUATRO(scope="micro_batch"), ("rewards", "group_ids")),
        (losses.ESPO(vocab_size=50), ("entropies",)),
        (losses.GMPO(), ()),
    ],
)
def test_a_preset_says_what_its_loss_needs(loss, required):
    preset = make_preset("x", Correction(), citation="-", notes="-", policy_loss=loss)
    assert preset.requires == required


@pytest.mark.parametrize("scope", ["row", "micro_batch"])
def test_oapl_needs_its_group(scope):
    field = "group_rewards" if scope == "row" else "group_ids"
    batch = replace(on_policy_batch(), **{field: None})

    with pytest.raises(ValueError, match=rf"^{field} must be given for OAPL"):
        Objective(policy_loss=losses.OAPL(beta=0.1, scope=scope))(batch)


@pytest.mark.parametrize("loss", [losses.TOPR(), losses.PPOIS(), losses.OAPL(beta=0.1)])
@pytest.mark.parametrize("ratio", ["old/sampling", "current/old", "current/sampling"])
def test_a_loss_that_holds_pi_over_mu_refuses_every_weight(loss, ratio):
    with pytest.raises(ValueError, match=r"own ratio is 'current/sampling'.*counted twice"):
        Objective(policy_loss=loss, correction=Correction(weight=RawWeight(ratio=ratio)))
    assert Objective(policy_loss=loss).needs_sampling


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_a_ratio_refuses_a_second_one(name):
    loss = LOSSES[name]
    make = partial(Objective, policy_loss=loss, aggregation=loss.aggregation)
    weight = Correction(weight=TruncateWeight(max_weight=2.0, ratio="current/old"))
    if loss.uses_ratio:
        with pytest.raises(ValueError, match="counted twice"):
            make(correction=weight)
    else:
        make(correction=weight)


def test_luspo_is_its_aggregation():
    with pytest.raises(ValueError, match=r"^aggregation must be 'seq_mean_token_sum' with LUSPO, but got 'token_mean'"):
        Objective(policy_loss=losses.LUSPO())
    batch = on_policy_batch()
    long = Objective(policy_loss=losses.LUSPO(), aggregation="seq_mean_token_sum")(batch)
    lengths = batch.mask.sum(-1).float()
    close(long.loss, -(lengths * batch.advantages).mean())


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF, "0.2", True])
@pytest.mark.parametrize(
    ("loss", "field"),
    [
        *((losses.GSPO, field) for field in ("low", "high")),
        *((losses.GSPOToken, field) for field in ("low", "high")),
        *((losses.LUSPO, field) for field in ("low", "high")),
        *((losses.GMPO, field) for field in ("low", "high")),
        *((losses.STPPO, field) for field in ("low", "high")),
        *((losses.TBPO, field) for field in ("high", "negative_low", "negative_high")),
        *((losses.PPOIS, field) for field in ("low", "high", "dual_clip")),
        *((losses.DPPO, field) for field in ("low", "high", "max_ratio")),
        *((losses.R2VPO, field) for field in ("low", "high", "variance")),
        *((losses.ASPO, field) for field in ("low", "max_weight", "high")),
        *((losses.ClipCov, field) for field in ("low", "high", "fraction")),
        *((losses.KLCov, field) for field in ("fraction", "coef")),
        *((DISPO, field) for field in BOUNDS),
        (losses.M2PO, "budget"),
        (losses.DRO, "beta"),
        (losses.OAPL, "beta"),
        (partial(losses.OAPL, beta=0.1), "value_beta"),
        (losses.QUATRO, "radius"),
        (losses.TOPR, "high"),
        (losses.CISPO, "low"),
        (partial(losses.ESPO, vocab_size=9), "alpha"),
        (partial(losses.ESPO, vocab_size=9), "high_entropy_fraction"),
    ],
)
def test_settings_are_positive_numbers(loss, field, bad):
    with pytest.raises(ValueError, match=rf"^{field} must be"):
        loss(**{field: bad})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.DPPO(divergence="js"), r"^divergence must be one of \['tv', 'kl'\], but got 'js'"),
        (lambda: losses.DPPO(low=1.5), r"^low and high must be below 1 with divergence 'tv'"),
        (lambda: losses.ClipCov(cov_low=5.0), r"^cov_low must be below cov_high=5.0"),
        (lambda: losses.ClipCov(fraction=1.5), r"^fraction must be at most 1"),
        (lambda: losses.KLCov(fraction=2.0), r"^fraction must be at most 1"),
        (lambda: losses.KLCov(penalty="k2"), r"^penalty must be one of \['abs', 'k3'\], but got 'k2'"),
        (lambda: losses.CISPO(low=6.0), r"^low must be at most high=5.0"),
        (lambda: losses.ASPO(max_weight=0.9), r"^max_weight must be above 1"),
        (lambda: losses.PPOIS(dual_clip=0.9), r"^dual_clip must be above 1"),
        (lambda: losses.TOPR(low=1.5), r"^low must be in \[0, high=1.0\]"),
        (lambda: losses.TOPR(low=-0.1), r"^low must be in \[0, high=1.0\]"),
        (lambda: losses.QUATRO(scope="group"), r"^scope must be 'row' \(group_rewards\) or 'micro_batch'"),
        (lambda: losses.OAPL(beta=0.1, scope="x"), r"^scope must be 'row' \(group_rewards\) or 'micro_batch'"),
        (lambda: losses.OAPL(beta=None), r"^beta must be a finite number"),
        (lambda: losses.DRO(beta=None), r"^beta must be a finite number"),
        (lambda: losses.ESPO(vocab_size=1), r"^vocab_size must be a whole number of at least 2"),
        (lambda: losses.ESPO(vocab_size=2.5), r"^vocab_size must be a whole number of at least 2"),
        (lambda: losses.STPPO(normalize=1), r"^normalize must be True or False"),
        (lambda: DISPO(correct_threshold=NAN), r"^correct_threshold must be a finite number"),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("missing", ["correct_threshold", *BOUNDS])
def test_dispo_has_no_default_bounds(missing):
    given = {"correct_threshold": 0.5, **BOUNDS}
    del given[missing]
    with pytest.raises(ValueError, match=rf"policy_loss\.{missing} must be given for DISPO"):
        parse_objective({"policy_loss": {"type": "dispo", **given}}, where="objective", base=Objective())


# ------------------------------------------------------------------------------------------------------ groups and rows


def group_losses(scope):
    return {"quatro": losses.QUATRO(scope=scope), "oapl": losses.OAPL(beta=0.3, value_beta=0.7, scope=scope)}


@pytest.mark.parametrize("name", ["quatro", "oapl"])
def test_the_rewards_of_the_group_travel_with_the_row(name):
    """Row scope on parts of a batch gives what micro_batch gives on the whole, whose groups are complete."""
    inputs = random_inputs(1)[0]
    active = inputs.mask.any(-1)
    everyone = inputs.rewards.T.expand(len(active), -1)
    member = (inputs.group_ids[:, None] == inputs.group_ids[None]) & active[None]
    with_group = inputs._replace(group_rewards=torch.where(member, everyone, NAN), group_ids=None)
    whole = group_losses("micro_batch")[name](inputs).loss

    row_wise = group_losses("row")[name]
    parts = [row_wise(type(inputs)(*(None if x is None else x[i : i + 1] for x in with_group))).loss for i in range(7)]

    close(torch.cat(parts)[active], whole[active])
    alone = type(inputs)(*(None if x is None else x[:1] for x in inputs))
    assert not torch.allclose(group_losses("micro_batch")[name](alone).loss, whole[:1])  # one row is not its group


def test_a_group_whose_rewards_agree_has_no_stabiliser():
    inputs = random_inputs(1)[0]
    same = inputs._replace(rewards=torch.ones_like(inputs.rewards))

    loss = losses.QUATRO(scope="micro_batch")(same).loss[inputs.mask]

    close(loss, (-inputs.log_ratios.exp() * inputs.advantages)[inputs.mask])


def test_oapl_leaves_a_response_without_reward_where_it_is():
    inputs = random_inputs(1)[0]
    rewards = inputs.rewards.clone()
    rewards[0] = NAN
    loss = losses.OAPL(beta=0.3, scope="micro_batch")

    terms = loss(inputs._replace(rewards=rewards))

    close(terms.loss[0, 0], (0.3 * inputs.sampling_log_ratios[0].sum()) ** 2)
    assert terms.loss.isfinite().all()


def test_ppo_is_is_ppo_in_bypass_mode():
    generator = torch.Generator().manual_seed(0)
    batch = on_policy_batch()
    moved = batch.sampling_per_token_logps + 0.3 * torch.randn(batch.mask.shape, generator=generator)
    batch = replace(batch, sampling_per_token_logps=moved)

    own = Objective(policy_loss=losses.PPOIS())(batch).loss
    bypass = Objective(policy_loss=losses.PPOClip(), mode="bypass")(batch).loss

    assert torch.equal(own, bypass)
    assert not torch.equal(own, Objective(policy_loss=losses.PPOClip())(batch).loss)
