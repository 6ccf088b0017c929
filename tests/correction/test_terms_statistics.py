"""Ratio bands and divergence bands at every level and statistic, by plain loops over tokens."""

import math
from functools import partial

import plain
import pytest
import torch

from trl_offpolicy import DivergenceBand, RatioBand
from trl_offpolicy.correction.terms import TermInputs
from trl_offpolicy.correction.terms.keep import STATISTIC_LEVELS
from trl_offpolicy.functional.levels import LEVELS
from trl_offpolicy.functional.masks import PROBABILITY_STATISTICS

NAN, INF = float("nan"), float("inf")
L = math.log(2)
POSITIVE = torch.ones(3, 1)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

# Row 0: ratios (4, 1); row 1: (1/2, 1/2); row 2: (1, padding).
LOG_RATIOS = torch.tensor([[2 * L, 0.0], [-L, -L], [0.0, NAN]])
MASK = torch.tensor([[True, True], [True, True], [True, False]])
PAIRS = [(statistic, level) for statistic, levels in STATISTIC_LEVELS.items() for level in levels]


def flags(violations, side):
    value = getattr(violations, side)
    return None if value is None else value.tolist()


def random_inputs(seed, **fields):
    """Random log-ratios with their denominator; NaN outside the mask."""
    log_ratios, mask, turn_ids, group_ids = plain.random_case(seed, scale=0.5)
    denominator = -0.1 - 3 * torch.rand(log_ratios.shape, generator=torch.Generator().manual_seed(seed))
    log_ratios = torch.minimum(log_ratios, -denominator - 0.01)  # the numerator is a probability too
    return TermInputs(
        torch.where(mask, log_ratios, NAN),
        mask,
        torch.ones(len(mask), 1),
        denominator_logps=torch.where(mask, denominator, NAN),
        turn_ids=turn_ids if seed % 2 else None,
        group_ids=group_ids,
        **fields,
    )


def plain_values(seen, level, value=lambda log_ratio, log_q: log_ratio):
    """``value`` of each token, aggregated by plain loops, as a tensor."""
    tokens = [
        [value(*pair) if inside else NAN for *pair, inside in zip(*row, strict=True)]
        for row in zip(seen.log_ratios.tolist(), seen.denominator_logps.tolist(), seen.mask.tolist(), strict=True)
    ]
    turn_ids = None if seen.turn_ids is None else seen.turn_ids.tolist()
    return torch.tensor(plain.aggregate(tokens, seen.mask.tolist(), level, turn_ids, seen.group_ids.tolist()))


@pytest.mark.parametrize("level", LEVELS)
def test_ratio_band_by_plain_loops(level):
    for seed in range(8):
        seen = random_inputs(seed)
        ratios = plain_values(seen, level).clamp(-20, 20).exp()

        violations = RatioBand(low=0.8, high=1.4, level=level).violations(seen)

        assert torch.equal(violations.above, ratios > 1.4)
        assert torch.equal(violations.below, ratios < 0.8)


@pytest.mark.parametrize(("statistic", "level"), PAIRS)
def test_divergence_band_by_plain_loops(statistic, level):
    """Where the bound lies between two values, they are told apart; so the values are what is claimed."""
    for seed in range(6):
        seen = random_inputs(seed)
        values = plain_values(seen, level, lambda change, log_q: plain.divergence(statistic, log_q + change, log_q))
        torch.testing.assert_close(seen.statistic_at(statistic, level), values, rtol=2e-5, atol=2e-6)
        edge = values[values > 0].median().item() * 0.999 if (values > 0).any() else 0.01

        violations = DivergenceBand(statistic=statistic, level=level, high=edge).violations(seen)

        assert torch.equal(violations.above, values > edge)
        assert violations.below is None


@pytest.mark.parametrize(
    ("level", "values"),
    [  # |l| by token: (2L, 0), (L, L), 0
        ("turn", [[2 * L, 2 * L], [2 * L, 2 * L], [0.0, 0.0]]),
        ("turn_mean", [[L, L], [L, L], [0.0, 0.0]]),
        ("sequence", [[2 * L], [2 * L], [0.0]]),
        ("sequence_max", [[2 * L], [L], [0.0]]),
        ("group", [[L], [L / 2], [L / 2]]),  # rows 1 and 2 are one group
    ],
)
def test_absolute_log_ratio_by_level(level, values):
    seen = TermInputs(LOG_RATIOS, MASK, POSITIVE, group_ids=torch.tensor([3, -1, -1]))

    close(seen.statistic_at("abs", level), torch.tensor(values))


def test_trust_region_masking_is_the_largest_divergence_of_a_response():
    log_ratios = torch.zeros(2, 50)
    log_ratios[0, 17] = 1.0  # one bad token: k3 = e - 2
    seen = TermInputs(log_ratios, torch.ones(2, 50).bool(), torch.ones(2, 1))

    trm = DivergenceBand(statistic="k3", level="sequence_max", high=0.5)
    mean = DivergenceBand(statistic="k3", level="sequence_mean", high=0.5)

    assert flags(trm.violations(seen), "above") == [[True], [False]]
    assert not mean.violations(seen).above.any()  # 0.72 / 50


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("statistic", PROBABILITY_STATISTICS)
def test_an_unobserved_token_has_divergence_zero(statistic, bad):
    """Its log-ratio is 0 and its denominator may be anything."""
    log_ratios, mask = torch.tensor([[0.0, -1.0]]), torch.ones(1, 2).bool()
    seen = TermInputs(log_ratios, mask, torch.ones(1, 1), denominator_logps=torch.tensor([[bad, -0.5]]))

    values = seen.statistic_at(statistic, "token")

    assert values[0, 0].item() == 0.0
    assert values[0, 1].item() == pytest.approx(plain.divergence(statistic, -1.5, -0.5), rel=1e-5)


def test_a_denominator_above_probability_one_reads_one():
    seen = TermInputs(torch.tensor([[-L]]), torch.ones(1, 1).bool(), torch.ones(1, 1), torch.tensor([[0.3]]))

    close(seen.statistic_at("prob_diff", "token"), torch.tensor([[-0.5]]))
