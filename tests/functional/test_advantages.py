"""Advantages with a baseline of the counted responses, against TRL's formula and by hand."""

import pytest
import torch

from trl_offpolicy.functional.advantages import (
    best_of_group,
    group_advantages,
    returns_to_go,
    score_energy,
    weighted_baseline,
)
from trl_offpolicy.objective.advantages import AdvantageInputs

NAN = float("nan")
IDS = torch.tensor([3, 3, 3, 8, 8, 8])
REWARDS = torch.tensor([1.0, 0.0, 5.0, 2.0, 2.5, 4.0])
ALL = torch.ones(6).bool()


def trl_advantages(rewards, scale):
    """TRL's: mean and n - 1 standard deviation over groups of three."""
    grouped = rewards.view(-1, 3)
    centred = (grouped - grouped.mean(1, keepdim=True)).flatten()
    spread = {"group": grouped.std(1).repeat_interleave(3), "batch": rewards.std().expand(6)}
    return centred if scale == "none" else centred / (spread[scale] + 1e-4)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_with_all_counted_it_is_trls(scale):
    out = group_advantages(REWARDS, IDS, ALL, scale_rewards=scale)

    torch.testing.assert_close(out, trl_advantages(REWARDS, scale), rtol=1e-5, atol=1e-6)


def test_rejected_responses_do_not_move_the_others():
    counted = torch.tensor([True, True, False, True, True, True])

    out = group_advantages(REWARDS, IDS, counted)
    moved = group_advantages(REWARDS + 100 * (~counted).float(), IDS, counted)

    spread = 0.5**0.5  # of (1, 0)
    assert out[:3].tolist() == pytest.approx([0.5 / (spread + 1e-4), -0.5 / (spread + 1e-4), 0.0], rel=1e-5)
    assert torch.equal(out, moved)
    torch.testing.assert_close(out[3:], trl_advantages(REWARDS, "group")[3:], rtol=1e-5, atol=1e-6)


def test_batch_scale_is_that_of_the_counted():
    counted = torch.tensor([True, True, False, True, True, True])

    out = group_advantages(REWARDS, IDS, counted, scale_rewards="batch")

    spread = REWARDS[counted].std().item() + 1e-4
    assert out[:2].tolist() == pytest.approx([0.5 / spread, -0.5 / spread], rel=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nothing_to_compare_gives_zero(scale):
    alone = torch.tensor([True, False, False, False, False, False])

    assert group_advantages(REWARDS, IDS, alone, scale_rewards=scale).tolist() == [0.0] * 6
    assert group_advantages(REWARDS, IDS, ~ALL, scale_rewards=scale).tolist() == [0.0] * 6
    assert group_advantages(torch.full((6,), NAN), IDS, ALL, scale_rewards=scale).tolist() == [0.0] * 6


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_say_nothing_whatever_their_size(scale):
    """A float32 mean of equal numbers is not always that number; over a spread that is rounding it gave 0.07."""
    for size in range(2, 17):
        for reward in (0.1, 0.7, 1.3, 100.1, -37.3):
            rewards, ids = torch.full((size,), reward), torch.zeros(size).long()
            out = group_advantages(rewards, ids, torch.ones(size).bool(), scale_rewards=scale)

            assert out.dtype == torch.float32
            assert out.tolist() == pytest.approx([0.0] * size, abs=1e-8), (size, reward)


def test_a_missing_reward_is_not_counted():
    rewards = torch.tensor([1.0, 0.0, NAN, 2.0, 2.5, 4.0])

    out = group_advantages(rewards, IDS, ALL, scale_rewards="none")

    assert out[:3].tolist() == [0.5, -0.5, 0.0]


def test_order_of_rows_does_not_matter():
    order = torch.tensor([4, 0, 3, 5, 2, 1])

    torch.testing.assert_close(
        group_advantages(REWARDS[order], IDS[order], ALL), group_advantages(REWARDS, IDS, ALL)[order]
    )


@pytest.mark.parametrize("shift", [-0.05, 0.05])
def test_the_weighted_baseline_has_the_least_second_moment(shift):
    """sum_i e_i (r_i - b)^2, in every group."""
    generator = torch.Generator().manual_seed(2)
    rewards, energy = torch.randn(8, generator=generator), torch.rand(8, generator=generator)
    ids = torch.tensor([0, 1] * 4)

    best = weighted_baseline(rewards, ids, torch.ones(8).bool(), energy)

    for group in (0, 1):
        rows = ids == group
        assert (energy * (best + shift).square())[rows].sum() > (energy * best.square())[rows].sum()
        plain = group_advantages(rewards, ids, torch.ones(8).bool(), scale_rewards="none")
        assert (energy * plain.square())[rows].sum() > (energy * best.square())[rows].sum()


def test_score_energy_is_the_squared_norm_of_the_gradient_at_the_logits():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens = torch.tensor([0, 3, 6])
    logps = logits.log_softmax(-1)
    chosen = logps.gather(1, tokens[:, None])
    (gradient,) = torch.autograd.grad(chosen.sum(), logits)

    energy = score_energy(chosen, logps.exp().square().sum(-1, keepdim=True), torch.ones(3, 1).bool())
    weighted = score_energy(
        chosen, logps.exp().square().sum(-1, keepdim=True), torch.ones(3, 1).bool(), torch.tensor([[3.0]])
    )

    torch.testing.assert_close(energy.squeeze(1), gradient.square().sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weighted, 9 * energy)


def test_returns_to_go():
    mask = torch.tensor([[True, False, True, False]])

    out = returns_to_go(torch.tensor([2.0]), mask, torch.tensor([[0.5, NAN, -1.0, NAN]]))

    assert out.tolist() == [[1.5, 0.0, 1.0, 0.0]]
    assert returns_to_go(torch.tensor([2.0]), mask).tolist() == [[2.0, 0.0, 2.0, 0.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_no_reward(bad):
    rewards, ids, counted = torch.tensor([1.0, bad, 0.0]), torch.zeros(3).long(), torch.ones(3).bool()

    advantages = group_advantages(rewards, ids, counted, scale_rewards="none")

    assert advantages.tolist() == [0.5, 0.0, -0.5]
    assert best_of_group(rewards, ids, counted, scale_rewards="none").tolist() == [1.0, 0.0, 0.0]
    outcome = AdvantageInputs(rewards=torch.tensor([[1.0, bad], [bad, bad]]), group_ids=ids[:2]).outcome
    assert outcome[0] == 1.0
    assert outcome[1].isnan()


def test_the_best_of_no_response():
    assert best_of_group(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).bool()).shape == (0,)


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match=r"scale_rewards must be one of \[.*\], but got 'std'"):
        group_advantages(torch.ones(2), torch.zeros(2).long(), torch.ones(2).bool(), scale_rewards="std")
