"""What is not finite in the inputs of an estimator counts as absent: the response gets 0 and moves no other."""

from dataclasses import replace

import pytest
import torch

import trl_offpolicy as op

A = op.advantages
NAN, INF = float("nan"), float("inf")
IDS, REWARDS = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([2.0, 1.0, 0.0, 1.0, 3.0, 0.0])
WITH_TOKENS = {
    "grpo": A.GRPO(),
    "grpo batch": A.GRPO(scale="batch"),
    "grpo alone": A.GRPO(alone="return"),
    "dr_grpo": A.DrGRPO(),
    "rloo": A.RLOO(),
    "rloo, others": A.RLOO(scale="others"),
    "rloo, normalised": A.RLOO(normalize=True),
    "opo": A.OPO(),
    "reinforce++ baseline": A.REINFORCEPlusPlusBaseline(),
    "reinforce++": A.REINFORCEPlusPlus(),
    "reinforce++, discounted": A.REINFORCEPlusPlus(discount=0.9),
    "passk": A.PassK(),
    "gpg": A.GPG(),
    "remax": A.ReMax(),
    "otb": A.OptimalTokenBaseline(),
    "otb, by path": A.OptimalTokenBaseline(is_aware=True, weigh="path", multi_turn=True),
    "opob": A.OPOB(),
}
every_bad = pytest.mark.parametrize("bad", [NAN, INF, -INF])


def inputs():
    generator = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(6, 4, generator=generator)
    mask = torch.tensor([[True, False, True, True], [True, True, True, False]]).repeat(3, 1)
    return A.AdvantageInputs(
        rewards=REWARDS,
        group_ids=IDS,
        mask=mask,
        token_rewards=0.1 * torch.randn(6, 4, generator=generator),
        per_token_logps=logps,
        sum_sq_probs=logps.exp().square() + 0.1,
        weights=0.5 + torch.rand(6, 1, generator=generator),
        greedy_rewards=torch.full((6,), 0.5),
    )


def with_bad(values, place, bad):
    values = values.clone()
    values[place] = bad
    return values


@every_bad
@pytest.mark.parametrize("name", WITH_TOKENS)
def test_a_token_reward_is_no_reward(name, bad):
    x, estimator = inputs(), WITH_TOKENS[name]

    out = estimator(replace(x, token_rewards=with_bad(x.token_rewards, (0, 2), bad)))

    absent = estimator(replace(x, rewards=with_bad(REWARDS, 0, NAN)))
    assert out[0].abs().sum() == 0.0
    assert torch.equal(out, absent)
    assert out[1:].abs().sum() > 0.0


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_a_token_reward_outside_the_mask_is_not_read(name):
    x, estimator = inputs(), WITH_TOKENS[name]

    out = estimator(replace(x, token_rewards=with_bad(x.token_rewards, (0, 1), NAN)))

    assert torch.equal(out, estimator(x))


@every_bad
def test_a_greedy_reward_is_none(bad):
    x = replace(inputs(), token_rewards=None)

    out = A.ReMax()(replace(x, greedy_rewards=with_bad(x.greedy_rewards, 0, bad)))

    assert out.tolist() == [0.0, 0.5, -0.5, 0.5, 2.5, -0.5]


@every_bad
@pytest.mark.parametrize("weigh", ["token", "path"])
@pytest.mark.parametrize("multi_turn", [False, True])
def test_a_weight_makes_no_energy(weigh, multi_turn, bad):
    x = inputs()
    estimator = A.OptimalTokenBaseline(is_aware=True, weigh=weigh, multi_turn=multi_turn)

    for one in (estimator, A.OPOB()):
        out = one(replace(x, weights=with_bad(x.weights, 0, bad)))

        assert torch.equal(out, one(replace(x, weights=with_bad(x.weights, 0, 0.0))))
        assert torch.equal(out[3:], one(x)[3:])
        assert out.isfinite().all()


@every_bad
def test_a_gradient_norm_is_no_energy(bad):
    x = replace(inputs(), squared_grad_norms=torch.ones(6))

    out = A.OPOB()(replace(x, squared_grad_norms=with_bad(x.squared_grad_norms, 0, bad)))

    assert torch.equal(out[3:], A.OPOB()(x)[3:])
    assert out.isfinite().all()
