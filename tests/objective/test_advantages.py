"""Advantage estimators: by hand, once more in plain Python loops, on two ranks, and what they are meant to minimise."""

import math
import statistics
from dataclasses import fields, replace

import pytest
import torch
import two_ranks

import trl_offpolicy as op
from trl_offpolicy.functional.advantages import (
    group_advantages,
    optimal_token_baseline,
    score_energy,
    weighted_baseline,
)
from trl_offpolicy.types import WIDE_SCOPES

A = op.advantages
NAN = float("nan")
close = pytest.approx

ESTIMATORS = {
    "grpo": A.GRPO(),
    "grpo batch": A.GRPO(scale="batch"),
    "dr_grpo": A.DrGRPO(),
    "rloo": A.RLOO(),
    "rloo, spread of the others": A.RLOO(scale="others"),
    "opo": A.OPO(),
    "gdpo": A.GDPO(),
    "reinforce++ baseline": A.REINFORCEPlusPlusBaseline(),
    "reinforce++ baseline, by group": A.REINFORCEPlusPlusBaseline(scale="group"),
    "reinforce++": A.REINFORCEPlusPlus(),
    "passk": A.PassK(),
    "gpg": A.GPG(),
    "otb": A.OptimalTokenBaseline(),
    "otb, is-aware": A.OptimalTokenBaseline(is_aware=True),
    "otb, multi-turn": A.OptimalTokenBaseline(is_aware=True, multi_turn=True),
    "otb, return": A.OptimalTokenBaseline(alone="return", multi_turn=True),
    "opob": A.OPOB(),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def inputs(seed=0, rows=10, length=8, functions=1):
    """Groups of unequal size, one of them single; ragged rows with holes; one row not counted, one without reward."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(rows, length, generator=generator)
    p = logps.exp()
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask &= torch.rand(rows, length, generator=generator) < 0.8
    mask[0] = True
    rewards = torch.randn(rows, functions, generator=generator)
    rewards[4] = NAN
    counted = torch.ones(rows).bool()
    counted[7] = False
    return A.AdvantageInputs(
        rewards=rewards.squeeze(1),
        group_ids=torch.tensor([3, -1, 0, 3, 3, 0, 3, -1, 5, 0])[:rows],
        counted=counted,
        mask=mask,
        per_token_logps=torch.where(mask, logps, NAN),
        sum_sq_probs=torch.where(mask, p**2 + (1 - p) ** 2 * torch.rand(rows, length, generator=generator), NAN),
        weights=torch.where(mask, 2 * torch.rand(rows, length, generator=generator), 0.0),
    )


# ------------------------------------------------------------------------------------------ plain Python, row by row


def peers(x, row):
    """Rows of the group that count."""
    ids, rewards = x.group_ids.tolist(), x.rewards.tolist()
    here = [c and not math.isnan(r) for c, r in zip(x.counted.tolist(), rewards, strict=True)]
    return [i for i in range(len(ids)) if ids[i] == ids[row] and here[i]] if here[row] else []


def energies(x, row, weighted):
    """One number a trainable token, from its probabilities."""
    out = []
    for t in range(x.mask.shape[1]):
        if x.mask[row, t]:
            p, w = math.exp(x.per_token_logps[row, t]), float(x.weights[row, t]) if weighted else 1.0
            out.append((t, w * w * (1 - 2 * p + float(x.sum_sq_probs[row, t]))))
    return out


def plain_scalar(name, x, row):
    group, r = peers(x, row), x.rewards.tolist()
    if len(group) < 2:
        return 0.0
    if name == "rloo":
        return r[row] - statistics.mean(r[i] for i in group if i != row)
    if name in ("opo", "opob"):
        size = {i: int(x.mask[i].sum()) if name == "opo" else sum(e for _, e in energies(x, i, True)) for i in group}
        return r[row] - sum(size[i] * r[i] for i in group) / sum(size.values())
    if name == "passk":
        lead = max(0.0, r[row] - max(r[i] for i in group if i != row))
        return lead / (statistics.stdev(r[i] for i in group) + 1e-4)
    centred = r[row] - statistics.mean(r[i] for i in group)
    if name == "gpg":
        counted = [r[i] for i in range(10) if peers(x, i)]
        return centred * len(counted) / sum(value != 0 for value in counted)
    return centred / (statistics.stdev(r[i] for i in group) + 1e-4) if name == "grpo" else centred


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "opob", "passk", "gpg"])
def test_scalars_are_those_of_plain_loops(name, seed):
    x = inputs(seed)

    assert ESTIMATORS[name](x).tolist() == close([plain_scalar(name, x, i) for i in range(10)], abs=2e-6)


def plain_token(x, row, *, weighted, multi_turn, alone):
    """Advantages of the trainable tokens of one row, in order."""
    group, out = peers(x, row), []
    if not group:
        return [0.0] * int(x.mask[row].sum())
    steps = {i: energies(x, i, weighted) for i in group}
    second = max((len(steps[i]) for i in group if i != row), default=0)
    for k, (t, _) in enumerate(steps[row]):
        paths = {}
        for i in group:
            if multi_turn and len(steps[i]) > k:
                paths[i] = sum(e for _, e in steps[i][: k + 1])
            elif not multi_turn and x.mask[i, t]:
                paths[i] = sum(e for s, e in steps[i] if s <= t)
        r = x.rewards.tolist()
        baseline = sum(w * r[i] for i, w in paths.items()) / sum(paths.values())
        if len(paths) == 1:
            baseline = r[row]
        if alone == "return" and len(steps[row]) > second and (k if multi_turn else t) >= second:
            baseline = 0.0
        out.append(r[row] - baseline)
    return out


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("multi_turn", [False, True])
@pytest.mark.parametrize("alone", ["zero", "return"])
def test_token_baselines_are_those_of_plain_loops(seed, weighted, multi_turn, alone):
    x = inputs(seed)

    out = A.OptimalTokenBaseline(is_aware=weighted, multi_turn=multi_turn, alone=alone)(x)

    for row in range(10):
        expected = plain_token(x, row, weighted=weighted, multi_turn=multi_turn, alone=alone)
        assert out[row][x.mask[row]].tolist() == close(expected, abs=5e-6), row
    assert out[~x.mask].abs().sum().item() == 0.0


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reinforce_plus_plus_is_that_of_plain_loops(seed, discount):
    x = inputs(seed)
    x = replace(x, token_rewards=torch.randn(x.mask.shape, generator=torch.Generator().manual_seed(seed)))
    returns = {}
    for row in range(10):
        places = [t for t in range(8) if x.mask[row, t] and x.present[row]]
        running = 0.0
        for t in reversed(places):
            reward = float(x.token_rewards[row, t]) + (float(x.rewards[row]) if t == places[-1] else 0.0)
            running = returns[row, t] = reward + discount * running
    mean, std = statistics.mean(returns.values()), statistics.stdev(returns.values())

    out = A.REINFORCEPlusPlus(discount=discount)(x)

    expected = {place: (value - mean) / std for place, value in returns.items()}
    for row in range(10):
        for t in range(8):
            assert out[row, t].item() == close(expected.get((row, t), 0.0), abs=5e-6), (row, t)


def test_pass_k_pays_the_best_of_a_group_its_lead():
    x = simple([3.0, 1.0, 2.5, 2.0, 2.0, 7.0], [0, 0, 0, 1, 1, 2])

    assert A.PassK(scale="none")(x).tolist() == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_gpg_is_larger_where_few_responses_are_rewarded():
    few, many = simple([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]), simple([1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1])

    assert A.GPG()(few).tolist() == [2.0, -2.0, 0.0, 0.0]
    assert A.GPG()(many).tolist() == close([0.5 * 4 / 3, -0.5 * 4 / 3, 0.25 * 4 / 3, -0.25 * 4 / 3])
    assert A.GPG()(simple([0.0, 0.0])).tolist() == [0.0, 0.0]


# -------------------------------------------------------------------------------------------------------- by hand


def simple(rewards, group_ids=None, **fields):
    rewards = torch.tensor(rewards)
    ids = torch.zeros(len(rewards), dtype=torch.long) if group_ids is None else torch.tensor(group_ids)
    return A.AdvantageInputs(rewards=rewards, group_ids=ids, **fields)


def lengths(*counts, total=4):
    return torch.arange(total) < torch.tensor(counts)[:, None]


def test_by_hand():
    x = simple([1.0, 0.0, 5.0], mask=lengths(1, 3, 2))

    assert A.GRPO(scale="none")(x).tolist() == [-1.0, -2.0, 3.0]
    assert A.DrGRPO()(x).tolist() == [-1.0, -2.0, 3.0]
    assert A.GRPO()(x).tolist() == close([v / (7**0.5 + 1e-4) for v in (-1, -2, 3)])
    assert A.RLOO()(x).tolist() == close([1 - 5 / 2, 0 - 6 / 2, 5 - 1 / 2])
    assert A.OPO()(x).tolist() == close([1 - 11 / 6, -11 / 6, 5 - 11 / 6])


def test_the_spread_of_the_others_by_hand():
    # of 1, 0 and 5: the others of 1 are 0 and 5, their mean 2.5 and their deviation 5 / sqrt(2)
    found = A.RLOO(scale="others")(simple([1.0, 0.0, 5.0]))
    by_hand = [(1 - 2.5) * 2**0.5 / 5, (0 - 3) * 2**0.5 / 4, (5 - 0.5) * 2**0.5]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-5)  # 1e-6 is added to the deviation
    # where the others are equal, or there is one alone, nothing is divided
    assert A.RLOO(scale="others")(simple([1.0, 0.0, 0.0, 0.0])).tolist()[0] == 1.0
    assert A.RLOO(scale="others")(simple([1.0, 0.0])).tolist() == [1.0, -1.0]
    assert A.RLOO(scale="others")(simple([0.7, 0.7, 0.7])).tolist() == [0.0, 0.0, 0.0]


def test_the_spread_of_the_others_is_that_of_every_subset():
    generator = torch.Generator().manual_seed(0)
    for size in (3, 4, 7):
        rewards = torch.rand(size, generator=generator) * 100 - 50
        expected = []
        for place in range(size):
            others = torch.cat([rewards[:place], rewards[place + 1 :]])
            expected.append(float((rewards[place] - others.mean()) / (others.std() + 1e-6)))
        assert A.RLOO(scale="others")(simple(rewards.tolist())).tolist() == pytest.approx(expected, rel=1e-4)


def test_a_baseline_may_be_scaled_by_the_group_before_the_batch():
    x = simple([1.0, 0.0, 10.0, 0.0], group_ids=[0, 0, 1, 1], mask=lengths(1, 1, 1, 1))
    plain = A.REINFORCEPlusPlusBaseline()(x)
    scaled = A.REINFORCEPlusPlusBaseline(scale="group")(x)
    assert plain[2] > 5 * plain[0]  # the prompt of larger rewards counts more
    assert scaled.tolist() == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: A.RLOO(scale="group"), "scale"),
        (lambda: A.RLOO(scale="others", normalize=True), "scale must be 'none' with normalize"),
        (lambda: A.RLOO(scale="others", epsilon=0.0), "epsilon"),
        (lambda: A.REINFORCEPlusPlusBaseline(scale="batch"), "scale"),
        (lambda: A.REINFORCEPlusPlusBaseline(epsilon=-1.0), "epsilon"),
    ],
)
def test_a_wrong_scale_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_grpo_is_the_function_of_the_staged_correction():
    x = inputs()

    for scale in ("group", "batch", "none"):
        expected = group_advantages(x.rewards, x.group_ids, x.present, scale_rewards=scale)
        assert torch.equal(A.GRPO(scale=scale)(x), expected)


def test_reinforce_plus_plus_has_mean_0_and_variance_1_over_tokens():
    x = simple([1.0, 0.0, 5.0, 2.0], [0, 0, 1, 1], mask=lengths(1, 3, 2, 4))

    out = A.REINFORCEPlusPlusBaseline()(x)
    by_token = out.repeat_interleave(torch.tensor([1, 3, 2, 4]))

    assert by_token.mean().item() == close(0.0, abs=1e-6)
    assert by_token.var().item() == close(1.0, abs=1e-5)
    assert (out[2] - out[3]).item() == close(3 * (out[0] - out[1]).item())  # one scale for all prompts


def trl_gdpo(rewards, weights):
    """TRL's ``normalize_then_sum`` in groups of two."""
    grouped = rewards.view(-1, 2, rewards.shape[1])
    normal = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten(0, 1)
    total = (normal * weights).sum(1)
    return (total - total.mean()) / (total.std() + 1e-4)


def test_gdpo_is_trls():
    rewards = torch.tensor([[1.0, 10.0], [0.0, 300.0], [0.5, 7.0], [0.25, 20.0]])
    weights = torch.tensor([2.0, 0.5])
    x = simple(rewards.tolist(), [0, 0, 1, 1], reward_weights=weights)

    out = A.GDPO()(x)

    torch.testing.assert_close(out, trl_gdpo(rewards, weights), rtol=1e-5, atol=1e-6)
    assert out.tolist() == close(A.GDPO()(replace(x, rewards=rewards * torch.tensor([1.0, 1e3]))).tolist(), abs=1e-3)


def test_functions_are_summed_with_their_weights_and_a_missing_one_is_left_out():
    x = simple([[1.0, 2.0], [NAN, 4.0], [NAN, NAN]], reward_weights=torch.tensor([10.0, 1.0]))

    assert x.outcome.tolist()[:2] == [12.0, 4.0]
    assert A.DrGRPO()(x).tolist() == [4.0, -4.0, 0.0]


def test_opob_takes_exact_gradient_norms():
    x = simple([1.0, 0.0], weights=torch.tensor([[2.0], [1.0]]), squared_grad_norms=torch.tensor([1.0, 4.0]))

    assert A.OPOB()(x).tolist() == close([0.5, -0.5])  # 4 * 1 and 1 * 4
    assert A.OPOB()(replace(x, weights=torch.ones(2, 1))).tolist() == close([0.8, -0.2])


def test_opob_of_a_weight_for_the_response_is_that_of_its_tokens():
    x = inputs()
    weights = 2 * torch.rand(10, 1, generator=torch.Generator().manual_seed(1))
    norms = score_energy(x.per_token_logps, x.sum_sq_probs, x.mask).sum(-1)

    by_row = A.OPOB()(replace(x, weights=weights, squared_grad_norms=norms))

    torch.testing.assert_close(A.OPOB()(replace(x, weights=weights)), by_row)
    torch.testing.assert_close(A.OPOB()(replace(x, weights=weights.expand(10, 8))), by_row)


# ---------------------------------------------------------------------------------------------- what they minimise


def test_rloo_is_unbiased_and_grpo_is_not():
    """Two-armed bandit, two samples, enumerated: E[A grad log pi] against the gradient of the expected reward."""
    theta = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 3.0], dtype=torch.float64)
    logps = theta.log_softmax(-1)
    (exact,) = torch.autograd.grad((logps.exp() * reward).sum(), theta, retain_graph=True)

    def gradient(estimator):
        total = torch.zeros(2, dtype=torch.float64)
        for arms in torch.cartesian_prod(torch.arange(2), torch.arange(2)):
            advantages = estimator(simple(reward[arms].tolist())).double()
            surrogate = (advantages * logps[arms]).mean()
            (part,) = torch.autograd.grad(surrogate, theta, retain_graph=True)
            total += logps.exp()[arms].prod().detach() * part
        return total

    torch.testing.assert_close(gradient(A.RLOO()), exact, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient(A.DrGRPO()), exact / 2, rtol=1e-5, atol=1e-7)  # (n - 1) / n
    assert (gradient(A.GRPO()) - exact).abs().max() > 0.01


# ------------------------------------------------------------------------------------------------- rewards by token


def test_kl_in_the_reward_reaches_every_estimator():
    x = inputs()
    reference = x.per_token_logps.nan_to_num() - 0.3 * torch.rand(10, 8, generator=torch.Generator().manual_seed(4))
    kl = op.KLPenalty(coef=0.1, estimator="k1", place="reward")
    cost = kl.token_rewards(x.per_token_logps, reference, x.mask)
    shaped = replace(x, rewards=x.rewards + cost.sum(-1))

    with_tokens = replace(x, token_rewards=cost)

    for estimator in (A.GRPO(), A.RLOO(), A.OPO(), A.OPOB(), A.REINFORCEPlusPlusBaseline()):
        torch.testing.assert_close(estimator(with_tokens), estimator(shaped), rtol=1e-5, atol=1e-6)
    first = x.mask.long().argmax(-1, keepdim=True)
    by_token = A.OptimalTokenBaseline(multi_turn=True)
    torch.testing.assert_close(
        by_token(with_tokens).gather(1, first), by_token(shaped).gather(1, first), rtol=1e-5, atol=1e-6
    )


# ------------------------------------------------------------------------------------------------------ properties


@every_estimator
def test_what_does_not_count_gets_nothing_and_moves_nobody(name):
    x = inputs()
    out = ESTIMATORS[name](x)
    moved = x.rewards.clone()
    moved[7] = 1e6

    again = ESTIMATORS[name](replace(x, rewards=moved))

    assert out[[4, 7]].abs().sum().item() == 0.0
    assert torch.equal(out, again)
    assert out.isfinite().all()
    assert out.dtype == torch.float32


@every_estimator
def test_rows_may_come_in_any_order(name):
    x = inputs()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))

    out = ESTIMATORS[name](replace(x, **{k: v[order] for k, v in vars(x).items() if v is not None}))

    torch.testing.assert_close(out, ESTIMATORS[name](x)[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "otb, return"])
def test_a_constant_reward_says_nothing(name):
    """But where a response that is alone is handed its return."""
    x = replace(inputs(), rewards=torch.full((10,), 3.0))

    torch.testing.assert_close(ESTIMATORS[name](x), torch.zeros(()).expand_as(ESTIMATORS[name](x)), rtol=0, atol=1e-5)


@every_estimator
def test_more_reward_means_more_advantage(name):
    x = inputs()
    best = x.rewards.clone()
    best[0] = 50.0

    assert (ESTIMATORS[name](replace(x, rewards=best))[0] >= 0).all()
    assert (ESTIMATORS[name](replace(x, rewards=-best))[0] <= 0).all()
    assert ESTIMATORS[name](replace(x, rewards=best))[0].abs().max() > 0


ALONE = {name: (False, False) for name in ESTIMATORS} | {
    "grpo batch": (True, True),
    "gdpo": (False, True),
    "reinforce++ baseline": (False, True),
    "reinforce++ baseline, by group": (False, True),
    "reinforce++": (True, True),
    "gpg": (False, True),
}
"""Estimator -> whether a group of one moves the others by its reward, and by being there."""


@every_estimator
def test_what_a_group_of_one_gets_and_whom_it_moves(name):
    """Three responses to one prompt, of unequal length, and a response that is alone."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()

    def advantages(reward, rows=4):
        return ESTIMATORS[name](
            A.AdvantageInputs(
                rewards=torch.tensor([1.0, 0.0, 0.5, reward])[:rows],
                group_ids=torch.tensor([0, 0, 0, 1])[:rows],
                mask=mask[:rows],
                per_token_logps=torch.full((rows, 4), -1.0),
                sum_sq_probs=torch.full((rows, 4), 0.4),
                weights=torch.ones(rows, 4),
            )
        )

    out, richer, without = advantages(3.0), advantages(30.0), advantages(0.0, rows=3)
    by_reward, by_presence = ALONE[name]

    # what it gets
    if name == "otb, return":
        assert out[3].tolist() == [3.0, 3.0, 3.0, 0.0] and richer[3].tolist() == [30.0, 30.0, 30.0, 0.0]
    elif name == "reinforce++":  # no groups: 3 among 1 x 4 tokens, 0 x 1, 0.5 x 2 and itself x 3: mean 1.4
        assert out[3][:3].tolist() == close([1.6 / math.sqrt(11.9 / 9)] * 3, abs=1e-4)
    elif name == "reinforce++ baseline":  # its 0 among 0.5 x 4 tokens, -0.5 x 1 and 0 x 5: mean 0.15
        assert out[3].item() == richer[3].item() == close(-0.15 / math.sqrt(1.025 / 9), abs=1e-4)
    elif name == "reinforce++ baseline, by group":  # the same with 1, -1 and 0, for the group's deviation is 0.5
        assert out[3].item() == richer[3].item() == close(-0.3 / math.sqrt(4.1 / 9), abs=1e-3)
    else:
        assert out[3].abs().max().item() == close(0.0, abs=1e-6)
        assert richer[3].abs().max().item() == close(0.0, abs=1e-6)
    # whom it moves
    assert ((richer[:3] - out[:3]).abs().max().item() > 1e-2) is by_reward
    assert ((without - out[:3]).abs().max().item() > 1e-2) is by_presence


@every_estimator
def test_single_groups_and_empty_rows(name):
    """A group of one has nothing to compare; a row without tokens says nothing about others' tokens."""
    x = inputs()
    mask = x.mask.clone()
    mask[0] = False
    out = ESTIMATORS[name](replace(x, mask=mask))

    assert out.isfinite().all()
    # those of REINFORCE++ subtract the batch's mean
    if not name.startswith("reinforce++") and name != "otb, return":
        assert out[8].abs().sum().item() == close(0.0, abs=1e-6)
    if out.dim() == 2:
        assert out[0].abs().sum().item() == 0.0


@every_estimator
def test_nothing_carries_gradient_and_nothing_is_changed(name):
    x = inputs()
    by_token = None if name == "gdpo" else torch.ones_like(x.per_token_logps).requires_grad_()
    names = ("rewards", "per_token_logps", "sum_sq_probs", "weights")
    x = replace(x, **{field: getattr(x, field).requires_grad_() for field in names}, token_rewards=by_token)
    before = {k: v.detach().clone() for k, v in vars(x).items() if v is not None}

    assert not ESTIMATORS[name](x).requires_grad
    for k, v in before.items():
        assert torch.equal(v.nan_to_num(), getattr(x, k).nan_to_num()), k


def test_log_probs_that_are_not_finite_have_no_energy():
    logps = torch.tensor([[NAN, -1.0, float("-inf")]])

    energy = score_energy(logps, torch.tensor([[0.5, 0.5, 0.5]]), torch.ones(1, 3).bool())

    assert energy[0].tolist() == close([0.0, 1.5 - 2 / math.e, 1.5])


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 0, 1], [1, 0, 1, 1]],  # as many tokens, in other places
        [[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0]],  # a gap behind the second-longest count
        [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        [[1, 1, 1, 0], [0, 0, 0, 0]],
    ],
)
def test_the_tail_of_the_longest_is_verls(mask):
    """verl's ``handle_zero_tail`` counts tokens and cuts by position, also where a mask has gaps."""
    mask = torch.tensor(mask).bool()
    generator = torch.Generator().manual_seed(0)
    energy, rewards = torch.rand(mask.shape, generator=generator), torch.rand(len(mask), generator=generator)
    returns = rewards[:, None] * mask

    path = (energy * mask).cumsum(-1) * mask
    baselines = ((returns * path).sum(0) / path.sum(0).clamp(min=1e-8)).expand(mask.shape).clone()
    lengths = mask.sum(-1)
    second, longest = lengths.sort().values[-2:].tolist()
    if longest > second:
        baselines[lengths.argmax(), second:] = 0.0
    expected = (returns - baselines) * mask

    everyone, group = torch.ones(len(mask)).bool(), torch.zeros(len(mask)).long()
    out = optimal_token_baseline(returns, energy, mask, group, everyone, alone="return")
    assert out.flatten().tolist() == close(expected.flatten().tolist(), abs=1e-5)


def test_without_energy_the_mean_takes_over():
    returns, nothing = torch.tensor([[1.0], [0.0], [5.0]]), torch.zeros(3, 1)

    out = optimal_token_baseline(returns, nothing, torch.ones(3, 1).bool(), torch.zeros(3).long(), torch.ones(3).bool())

    assert out.flatten().tolist() == [-1.0, -2.0, 3.0]
    assert weighted_baseline(
        returns.flatten(), torch.zeros(3).long(), torch.ones(3).bool(), torch.zeros(3)
    ).tolist() == [-1.0, -2.0, 3.0]


def test_gaps_between_turns_do_not_matter_with_multi_turn():
    x = inputs()
    wide = {name: torch.full((10, 16), NAN) for name in ("per_token_logps", "sum_sq_probs", "weights")}
    mask = torch.zeros(10, 16).bool()
    for row in range(10):  # the same tokens, spread out
        places = torch.randperm(16, generator=torch.Generator().manual_seed(row))[: int(x.mask[row].sum())].sort()[0]
        mask[row, places] = True
        for name, values in wide.items():
            values[row, places] = getattr(x, name)[row][x.mask[row]]
    spread = replace(x, mask=mask, **wide)
    estimator = A.OptimalTokenBaseline(multi_turn=True, is_aware=True)

    out, expected = estimator(spread), estimator(x)

    for row in range(10):
        torch.testing.assert_close(out[row][mask[row]], expected[row][x.mask[row]], rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("opo", "mask", r"^mask must be given for OPO, but got None"),
        ("reinforce++", "mask", r"^mask must be given for REINFORCEPlusPlus,"),
        ("reinforce++ baseline", "mask", r"^mask must be given for REINFORCEPlusPlusBaseline, but got None"),
        ("otb", "sum_sq_probs", r"^sum_sq_probs must be given for OptimalTokenBaseline, but got None\. Ask the fused"),
        ("otb", "per_token_logps", r"^per_token_logps must be given for OptimalTokenBaseline"),
        (
            "otb, is-aware",
            "weights",
            r"^weights must be given for OptimalTokenBaseline\(is_aware=True\), but",
        ),
        ("opob", "weights", r"^weights must be given for OPOB, but got None\. Take them from a Correction"),
        ("opob", "sum_sq_probs", r"^sum_sq_probs must be given for OPOB"),
    ],
)
def test_missing_fields_are_named(name, missing, message):
    with pytest.raises(ValueError, match=message):
        ESTIMATORS[name](replace(inputs(), **{missing: None}))


@every_estimator
def test_what_is_not_required_is_not_read(name):
    x, estimator = inputs(), ESTIMATORS[name]
    needed = {"rewards", "group_ids", "counted", *estimator.requires}
    needed |= {"mask", "per_token_logps", "sum_sq_probs"} if name == "opob" else set()
    needed |= {"weights"} if getattr(estimator, "is_aware", False) else set()

    bare = A.AdvantageInputs(**{k: v for k, v in vars(x).items() if k in needed})

    assert torch.equal(estimator(bare), estimator(x))
    assert estimator(x).dim() == (2 if estimator.by_token else 1)
    assert estimator.scope in WIDE_SCOPES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": torch.zeros(2, 2, 2)}, r"^rewards must have shape \(B,\) or \(B, K\), but got \(2, 2, 2\)"),
        ({"group_ids": torch.zeros(3)}, r"^group_ids must have shape \(10,\), but got \(3,\)"),
        ({"weights": torch.zeros(10, 3)}, r"^weights must have shape \(10, 1\) or \(10, 8\), but got \(10, 3\)"),
        ({"mask": torch.zeros(9, 8)}, r"^mask must have shape \(10, 8\), but got \(9, 8\)"),
        ({"reward_weights": torch.ones(2)}, r"^reward_weights must have shape \(1,\), but got \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(inputs(), **fields)


def test_settings_that_mean_nothing():
    with pytest.raises(ValueError, match=r"^scale must be one of \['group', 'batch', 'none'\], but got 'token'"):
        A.GRPO(scale="token")
    with pytest.raises(ValueError, match=r"^alone must be one of \['zero', 'return'\], but got 'mean'"):
        A.OptimalTokenBaseline(alone="mean")
    with pytest.raises(NotImplementedError, match=r"^token_rewards must be None with GDPO"):
        A.GDPO()(replace(inputs(), token_rewards=torch.zeros(10, 8)))
    with pytest.raises(ValueError, match=r"^weights must have shape \(10, 1\) with squared_grad_norms, but got"):
        A.OPOB()(replace(inputs(), squared_grad_norms=torch.ones(10)))


# -------------------------------------------------------------------------------------------------------- two ranks

ROWS = {0: slice(0, 5), 1: slice(5, 10)}


def on_ranks():
    """Rank 1 is padded to fewer tokens; groups are spread over both."""
    x = inputs(3)
    mask = x.mask.clone()
    mask[5:, 6:] = False
    return replace(x, mask=mask, counted=torch.arange(10) != 7)


def shard(rank):
    width = {0: 8, 1: 6}[rank]
    values = {k: v for k, v in vars(on_ranks()).items() if v is not None}
    return A.AdvantageInputs(**{k: v[ROWS[rank]] if v.dim() == 1 else v[ROWS[rank], :width] for k, v in values.items()})


def run(rank):
    return {name: estimator(shard(rank)) for name, estimator in ESTIMATORS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.launch(__file__, run, tmp_path_factory.mktemp("ranks"))


@pytest.mark.integration
@pytest.mark.parametrize("rank", [0, 1])
@every_estimator
def test_two_ranks_agree_with_one(ranks, name, rank):
    whole = ESTIMATORS[name](on_ranks())[ROWS[rank]]
    got = ranks[rank][name]

    expected = whole[:, : got.shape[1]] if whole.dim() == 2 else whole
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    alone = ESTIMATORS[name](shard(rank))
    assert not torch.allclose(alone, expected, rtol=1e-3), "a rank by itself would say the same"


@pytest.mark.parametrize("name", [item.name for item in fields(A.AdvantageInputs)])
def test_inputs_are_tensors(name):
    given = {"rewards": torch.ones(2), "group_ids": torch.zeros(2).long(), name: [1.0, 0.0]}
    with pytest.raises(TypeError, match=rf"^{name} must be a tensor, but got list\.$"):
        A.AdvantageInputs(**given)


if __name__ == "__main__":
    two_ranks.join(run)
