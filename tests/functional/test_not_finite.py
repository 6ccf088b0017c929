"""A number that is not finite stays where it is: it moves no other group, row or token."""

import math

import pytest
import torch

from trl_offpolicy.functional.advantages import (
    group_advantages,
    normalised_by_function,
    normalised_by_response,
    optimal_token_baseline,
    weighted_baseline,
    whitened_by_token,
    whitened_tokens,
)
from trl_offpolicy.functional.levels import aggregate, group_mean
from trl_offpolicy.functional.moments import RATIO_LAYOUT, ratio_row_moments, ratio_rows
from trl_offpolicy.functional.policy_losses import group_ratio_variance

NAN, INF = float("nan"), float("inf")
IDS, ALL, REWARDS = torch.tensor([0, 0, 1, 1]), torch.ones(4).bool(), torch.tensor([1.0, 0.0, 1.0, 0.0])
every_bad = pytest.mark.parametrize("bad", [NAN, INF, -INF])


@every_bad
def test_an_energy_counts_as_none(bad):
    out = weighted_baseline(REWARDS, IDS, ALL, torch.tensor([bad, 1.0, 3.0, 1.0]))

    assert out.tolist() == [1.0, 0.0, 0.25, -0.75]


@every_bad
@pytest.mark.parametrize("multi_turn", [False, True])
@pytest.mark.parametrize("what", ["returns", "energy", "path_weights", "path_weights by token"])
def test_an_optimal_token_baseline_is_that_of_the_group(what, multi_turn, bad):
    mask = torch.tensor([[True, False, True], [True, True, True]]).repeat(2, 1)
    generator = torch.Generator().manual_seed(0)
    fields = {"returns": torch.randn(4, 3, generator=generator), "energy": torch.rand(4, 3, generator=generator)}
    fields["path_weights"] = torch.rand(4, 3 if what.endswith("token") else 1, generator=generator)
    name = what.split()[0]

    def baseline():
        return optimal_token_baseline(**fields, mask=mask, group_ids=IDS, counted=ALL, multi_turn=multi_turn)

    clean = baseline()
    fields[name] = fields[name].clone()
    fields[name][0, 0] = bad
    out = baseline()
    # The others of the group go on as if its path had no energy, or no return, at this token.
    assert torch.equal(out[2:], clean[2:])
    assert out.isfinite().all()
    if name == "returns":
        assert out[0, 0] == 0.0
        torch.testing.assert_close(out[0, 2], clean[0, 2])
    else:
        fields[name][0, 0] = 0.0
        assert torch.equal(out, baseline())


def test_a_large_path_does_not_overflow_into_other_groups():
    energy, returns = torch.tensor([[3e38], [1.0], [3.0], [1.0]]), torch.tensor([[9.0], [0.0], [1.0], [0.0]])

    out = optimal_token_baseline(returns, energy, torch.ones(4, 1).bool(), IDS, ALL)

    torch.testing.assert_close(out, torch.tensor([[0.0], [-9.0], [0.25], [-0.75]]))


@every_bad
def test_what_is_whitened(bad):
    by_token = whitened_by_token(torch.tensor([1.0, -1.0, bad]), torch.tensor([1, 3, 0]))
    long = whitened_by_token(torch.tensor([1.0, -1.0, bad]), torch.tensor([1, 3, 2]))
    by_response = normalised_by_response(torch.tensor([1.0, -1.0, bad]), torch.ones(3).bool())
    tokens = whitened_tokens(torch.tensor([[1.0, 3.0, bad]]), torch.ones(1, 3).bool())

    torch.testing.assert_close(by_token, torch.tensor([1.5, -0.5, 0.0]))
    torch.testing.assert_close(long, by_token)
    torch.testing.assert_close(by_response, torch.tensor([0.7071, -0.7071, 0.0]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tokens, torch.tensor([[-0.7071, 0.7071, 0.0]]), rtol=1e-4, atol=1e-4)


def test_autocast_rounds_no_advantage():
    generator = torch.Generator().manual_seed(0)
    rewards, weights = torch.randn(4, 3, generator=generator), torch.tensor([0.3, 1.7, 0.9])
    plain = normalised_by_function(rewards, IDS, ALL, weights)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = normalised_by_function(rewards, IDS, ALL, weights)

    assert out.dtype == torch.float32
    assert torch.equal(out, plain)


@every_bad
def test_the_mean_of_a_group(bad):
    values = torch.tensor([bad, 1.0, 2.0, 4.0])

    assert group_mean(values, ALL, IDS)[2:].tolist() == [3.0, 3.0]
    assert not group_mean(values, ALL, IDS)[:2].isfinite().any()
    out = aggregate(values.unsqueeze(1), torch.ones(4, 1).bool(), "group", group_ids=IDS)
    assert out[2:].tolist() == [[3.0], [3.0]]


def test_the_variance_of_a_groups_ratios():
    ratios = torch.tensor([[NAN, 1.0], [1.0, 1.0], [1.0, 3.0], [1.0, 3.0]])

    out = group_ratio_variance(ratios.log(), torch.ones(4, 2).bool(), IDS)

    torch.testing.assert_close(out[2:], torch.ones(2, 1))


@pytest.mark.parametrize("above", [1e-3, 100.0, 1000.0])
def test_log_probs_above_0_leave_probabilities_finite(above):
    numerator, mask = torch.tensor([[-1.0, above - 1.0]]), torch.ones(1, 2).bool()

    rows = ratio_rows(numerator, torch.tensor([[-1.5, above]]), mask)

    sums = dict(zip(RATIO_LAYOUT.sums, ratio_row_moments(rows)[0].tolist(), strict=False))
    assert all(abs(value) < INF for value in sums.values()), sums
    assert sums["prob"] == pytest.approx(math.exp(-1.5) + min(math.exp(min(above, 99.0)), 1e4))


@every_bad
def test_a_reward_moves_only_what_it_is_in(bad):
    clean = group_advantages(REWARDS, IDS, ALL)

    out = group_advantages(torch.tensor([bad, 0.0, 1.0, 0.0]), IDS, ALL)

    assert torch.equal(out[2:], clean[2:])
