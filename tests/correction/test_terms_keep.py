"""Keep terms that judge a response by itself: what they measure at which level, by hand."""

import math
from functools import partial

import plain
import pytest
import torch

from trl_offpolicy import (
    DivergenceBand,
    EqualRewards,
    OffPolicySequenceMask,
    OutlierVeto,
    PolicyBatch,
    PrefixBudget,
    ProbabilityDifferenceMask,
    RatioBand,
    StalenessBound,
    SuffixVeto,
    presets,
)
from trl_offpolicy.correction.terms import TermInputs
from trl_offpolicy.correction.terms.keep import STATISTIC_LEVELS
from trl_offpolicy.functional.levels import LEVELS

NAN, INF = float("nan"), float("inf")
L = math.log(2)
NONE = [False, False]
POSITIVE = torch.ones(3, 1)
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

# Row 0: ratios (4, 1); row 1: (1/2, 1/2); row 2: (1, padding).
LOG_RATIOS = torch.tensor([[2 * L, 0.0], [-L, -L], [0.0, NAN]])
MASK = torch.tensor([[True, True], [True, True], [True, False]])
SEEN = TermInputs(LOG_RATIOS, MASK, POSITIVE)
PAIRS = [(statistic, level) for statistic, levels in STATISTIC_LEVELS.items() for level in levels]


def flags(violations, side):
    value = getattr(violations, side)
    return None if value is None else value.tolist()


# -------------------------------------------------------------------------------------------------- ratio band


@pytest.mark.parametrize(
    ("level", "above", "below"),
    [  # band [0.6, 1.5], above and below
        ("token", [[True, False], NONE, NONE], [NONE, [True, True], NONE]),
        ("sequence", [[True], [False], [False]], [[False], [True], [False]]),  # products 4, 1/4, 1
        ("sequence_mean", [[True], [False], [False]], [[False], [True], [False]]),  # 2, 1/2, 1
    ],
)
def test_ratio_band(level, above, below):
    violations = RatioBand(low=0.6, high=1.5, level=level).violations(SEEN)

    assert flags(violations, "above") == above
    assert flags(violations, "below") == below


def test_ratio_band_levels_differ():
    def above(level):
        band = RatioBand(low=None, high=3.0, level=level)
        return flags(band.violations(SEEN), "above")

    assert above("sequence") == [[True], [False], [False]]  # product 4
    assert above("sequence_mean") == [[False], [False], [False]]  # geometric mean 2


def test_ratio_band_bounds_are_inclusive():
    on_policy = torch.zeros(1, 2), torch.ones(1, 2).bool(), torch.ones(1, 1)

    for level in ("token", "sequence", "sequence_mean"):
        violations = RatioBand(low=1.0, high=1.0, level=level).violations(TermInputs(*on_policy))
        assert not violations.above.any()
        assert not violations.below.any()


def test_open_sides_cannot_be_violated():
    open_low = RatioBand(low=None, high=1.5).violations(SEEN)
    open_high = RatioBand(low=0.6, high=None).violations(SEEN)

    assert (open_low.below, flags(open_low, "above")) == (None, [[True], [False], [False]])
    assert (open_high.above, flags(open_high, "below")) == (None, [[False], [True], [False]])


@pytest.mark.parametrize(
    ("statistic", "level", "values"),
    [
        ("k1", "token", [[-2 * L, 0.0], [L, L], [0.0, 0.0]]),
        ("k1", "sequence", [[-2 * L], [2 * L], [0.0]]),
        ("k1", "sequence_mean", [[-L], [L], [0.0]]),
        ("k2", "sequence", [[2 * L * L], [L * L], [0.0]]),  # (2L)^2 / 2; 2 L^2 / 2
        ("k2", "sequence_mean", [[L * L], [L * L / 2], [0.0]]),
        ("k3", "sequence", [[3 - 2 * L], [2 * L - 1], [0.0]]),  # 4 - 1 - 2L; 2 (1/2 - 1 + L)
        ("k3", "sequence_mean", [[1.5 - L], [L - 0.5], [0.0]]),
    ],
)
def test_divergence_band_measures(statistic, level, values):
    """The bounds just below and just above each value decide, so the value is what is claimed."""
    values = torch.tensor(values)
    for value in values.unique().tolist():
        for edge in (value - 1e-5, value + 1e-5):
            if statistic != "k1" and edge <= 0:
                continue
            high = DivergenceBand(statistic=statistic, level=level, high=edge)
            low = DivergenceBand(statistic=statistic, level=level, low=edge, high=None)
            assert torch.equal(high.violations(SEEN).above, values > edge)
            assert torch.equal(low.violations(SEEN).below, values < edge)


def test_divergence_band_bounds_are_inclusive():
    measured = torch.tensor([[-0.5, 0.5]]), torch.ones(1, 2).bool(), torch.ones(1, 1)

    for statistic, low, high in (("k1", -0.5, 0.5), ("k2", 0.125, 0.125)):  # k2 = 0.5^2 / 2
        band = DivergenceBand(statistic=statistic, level="token", low=low, high=high).violations(TermInputs(*measured))
        assert not (band.above | band.below).any()


def test_kpop_drops_by_either_direction():
    """D(p, q) of (0.5, 0.25) is 0.1438 nats and D(q, p) 0.1308; the bound between them needs both directions."""
    p, q = torch.tensor([[0.5, 0.25, 0.3, 1.0]]), torch.tensor([[0.25, 0.5, 0.25, 0.999]])

    def bernoulli(a, b):  # float64, with the published clamp
        a, b = (min(max(float(x), 1e-6), 1 - 1e-6) for x in (a, b))
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    inputs = TermInputs((p / q).log(), torch.ones(1, 4).bool(), torch.ones(1, 1), denominator_logps=q.log())
    for high in (0.137, 0.1, 0.005):
        pairs = zip(p[0].tolist(), q[0].tolist(), strict=True)
        expected = [bernoulli(a, b) > high or bernoulli(b, a) > high for a, b in pairs]
        kpop = DivergenceBand(statistic="binary_kl_both", level="token", high=high).violations(inputs)
        assert flags(kpop, "above") == [expected], high
        assert kpop.below is None
    one_way = DivergenceBand(statistic="binary_kl", level="token", high=0.137).violations(inputs)
    assert flags(one_way, "above") == [[False, True, False, False]]


def test_kpop_gives_no_gradient_through_the_mask():
    """The kept tokens have the gradient -A rho / n of a ratio loss, the dropped one has 0."""
    logps = torch.tensor([[0.5, 0.3]]).log().requires_grad_()
    sampled = torch.tensor([[0.25, 0.29]]).log()
    objective = presets.get("paper/kpop").objective
    batch = PolicyBatch(
        per_token_logps=logps,
        old_per_token_logps=logps.detach(),
        sampling_per_token_logps=sampled,
        completion_mask=torch.ones(1, 2).bool(),
        advantages=torch.ones(1),
    )

    objective(batch).loss.backward()

    close(logps.grad, torch.tensor([[0.0, -0.3 / 0.29 / 2]]))


def test_divergence_k1_and_ratio_band_agree_in_direction():
    """k1 = -log rho: rho <= 1.5 is k1 >= -log 1.5 (verl's k1 band keeps the reciprocal)."""
    ratio = RatioBand(level="sequence_mean", low=0.6, high=1.5).violations(SEEN)
    k1 = DivergenceBand(statistic="k1", level="sequence_mean", low=-math.log(1.5), high=-math.log(0.6)).violations(SEEN)

    assert torch.equal(ratio.above, k1.below)
    assert torch.equal(ratio.below, k1.above)


def test_outlier_veto_takes_the_whole_sequence():
    veto = OutlierVeto(low=0.6, high=3.0).violations(SEEN)

    assert flags(veto, "above") == [[True], [False], [False]]  # the token with ratio 4
    assert flags(veto, "below") == [[False], [True], [False]]
    assert OutlierVeto(low=None, high=3.0).violations(SEEN).below is None
    assert OutlierVeto(low=0.6, high=None).violations(SEEN).above is None


def test_outlier_veto_bounds_are_inclusive():
    log_ratios, mask, advantages = torch.tensor([[0.5, -0.25]]), torch.ones(1, 2).bool(), torch.ones(1, 1)
    veto = OutlierVeto(low=math.exp(-0.25), high=math.exp(0.5)).violations(TermInputs(log_ratios, mask, advantages))

    assert not (veto.above | veto.below).any()


def test_off_policy_sequence_mask_of_row_advantages():
    # mean log(mu / pi) = -mean l: -L, L, 0
    advantages = torch.tensor([[-1.0], [-1.0], [-1.0]])

    def dropped(max_divergence, a=advantages):
        term = OffPolicySequenceMask(max_divergence=max_divergence)
        return term.violations(TermInputs(LOG_RATIOS, MASK, a)).below.tolist()

    assert dropped(0.5) == [[False], [True], [False]]
    assert dropped(0.7) == [[False], [False], [False]]  # L = 0.693
    assert dropped(0.5, -advantages) == [[False], [False], [False]]
    assert dropped(0.5, 0 * advantages) == [[False], [False], [False]]
    assert OffPolicySequenceMask(max_divergence=0.5).violations(TermInputs(LOG_RATIOS, MASK, advantages)).above is None


def test_off_policy_sequence_mask_equality_is_kept():
    log_ratios, mask = torch.tensor([[-0.25, -0.75]]), torch.ones(1, 2).bool()  # mean 0.5, exact in binary

    def dropped(max_divergence, values=log_ratios):
        term = OffPolicySequenceMask(max_divergence=max_divergence)
        return term.violations(TermInputs(values, mask, -torch.ones(1, 1))).below.item()

    assert not dropped(0.5)
    assert dropped(0.4999)
    assert not dropped(0, 0 * log_ratios)


def test_off_policy_sequence_mask_of_token_advantages():
    advantages = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])

    below = OffPolicySequenceMask(max_divergence=0.5).violations(TermInputs(LOG_RATIOS, MASK, advantages)).below

    assert below.tolist() == [[False, False], [True, False], [False, False]]


# ----------------------------------------------------------------------------------- probability difference mask


@pytest.mark.parametrize(
    ("advantage", "above", "below"),
    [  # p - q = 0.25, -0.4, 0.1, -0.1
        (1.0, [True, False, False, False], [False] * 4),
        (-1.0, [False] * 4, [False, True, False, False]),
        (0.0, [False] * 4, [False] * 4),
        ([-1.0, 1.0, 1.0, -1.0], [False] * 4, [False] * 4),  # moved against its advantage: may go on
        ([1.0, -1.0, NAN, NAN], [True, False, False, False], [False, True, False, False]),
    ],
)
def test_probability_difference_is_judged_by_the_sign_of_the_advantage(advantage, above, below):
    q, p = torch.tensor([[0.25, 0.8, 0.5, 0.5]]), torch.tensor([[0.5, 0.4, 0.6, 0.4]])
    advantages = torch.tensor(advantage).view(1, -1)
    seen = TermInputs((p / q).log(), torch.ones(1, 4).bool(), advantages, denominator_logps=q.log())

    violations = ProbabilityDifferenceMask().violations(seen)

    assert flags(violations, "above") == [above]
    assert flags(violations, "below") == [below]


def test_probability_difference_bounds_are_inclusive_and_rare_tokens_move_freely():
    log_q = torch.tensor([[0.0, -12.0]])
    seen = TermInputs(torch.tensor([[-L, 6.0]]), torch.ones(1, 2).bool(), torch.tensor([[-1.0, 1.0]]), log_q)

    # p - q = -0.5 exactly; e^-6 - e^-12 = 0.002 for a ratio of 403
    assert not ProbabilityDifferenceMask(low=-0.5, high=0.01).violations(seen).below.any()
    assert not ProbabilityDifferenceMask(low=-0.5, high=0.01).violations(seen).above.any()
    assert ProbabilityDifferenceMask(low=-0.4999, high=0.01).violations(seen).below.tolist() == [[True, False]]


# -------------------------------------------------------------------------------------------------- prefix budget


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("statistic", ["binary_tv", "binary_kl"])
def test_prefix_budget_is_algorithm_1_of_cppo(statistic, adaptive):
    scale = 1.0 if statistic == "binary_tv" else 0.2
    settings = {"high": 0.15 * scale, "budget": 0.03 * scale, "min_weight": 0.6, "adaptive": adaptive}
    term, seen = PrefixBudget(statistic=statistic, **settings), set()
    for seed in range(8):
        log_ratios, mask, _, _ = plain.random_case(seed, length=12, scale=0.4)
        generator = torch.Generator().manual_seed(seed)
        log_q = (-2 * torch.rand(mask.shape, generator=generator) - 1.3).clamp(max=-log_ratios - 0.01)
        advantages = torch.randn(mask.shape, generator=generator)
        inputs = TermInputs(torch.where(mask, log_ratios, 0.0), mask, advantages, denominator_logps=log_q)

        above, below = term.violations(inputs)

        for row, inside in enumerate(mask.tolist()):
            at = [t for t, one in enumerate(inside) if one]
            logs, q = log_ratios[row, at].tolist(), log_q[row, at].tolist()
            spent = [plain.divergence(statistic, b + x, b) for x, b in zip(logs, q, strict=True)]
            kept = plain.cppo(spent, [math.exp(x) for x in logs], advantages[row, at].tolist(), **settings)
            assert (~(above | below))[row, at].tolist() == kept
            single = [d <= settings["high"] for d in spent]  # what DPPO's threshold would do
            seen |= {(one, other) for one, other in zip(kept, single, strict=True)}
        assert not (above & (log_ratios < 0)).any() and not (below & (log_ratios > 0)).any()
        assert not (above | below)[~mask].any()
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


def test_prefix_budget_by_hand():
    """p - q = 0.1, 0.1, -0.1, 0.1 with high 0.15, budget 0.02: 0.07 is left for the second token, nothing after it."""
    q = torch.tensor([[0.3, 0.3, 0.3, 0.3]])
    p = q + torch.tensor([[0.1, 0.1, -0.1, 0.1]])
    inputs = TermInputs((p / q).log(), q > 0, torch.ones(1, 1), denominator_logps=q.log())

    def dropped(**settings):
        one = PrefixBudget(**{"high": 0.15, "min_weight": 1.0, "adaptive": False, **settings}).violations(inputs)
        assert not one.below.any()  # the third token moves back: A (rho - 1) < 0
        return flags(one, "above")

    assert dropped() == [[False, True, False, True]]
    assert dropped(budget=0.1) == [[False] * 4]  # each may spend what each spends
    assert dropped(budget=0.04, adaptive=True) == dropped(budget=0.08) == [[False, False, False, True]]
    assert dropped(high=0.085, budget=0.1) == [[True, True, False, True]]
    assert dropped(high=0.085, budget=0.1, min_weight=0.8) == [[True, True, False, False]]  # 0.8 * 0.1 at the last


# ---------------------------------------------------------------------------------------------------- suffix veto


@pytest.mark.parametrize("by_token", [False, True])
def test_suffix_veto_in_a_plain_loop(by_token):
    seen = set()
    for seed in range(4):
        log_ratios, mask, _, _ = plain.random_case(seed, rows=8)
        generator = torch.Generator().manual_seed(seed)
        advantages = torch.randn(8, mask.shape[1] if by_token else 1, generator=generator)
        inputs = TermInputs(torch.where(mask, log_ratios, 0.0), mask, advantages)

        violations = SuffixVeto(low=0.4).violations(inputs)

        assert violations.above is None and not violations.below[~mask].any()
        spread = advantages.expand_as(log_ratios)
        for row, inside in enumerate(mask.tolist()):
            at = [t for t, one in enumerate(inside) if one]
            kept = plain.suffix_veto(log_ratios[row, at].exp().tolist(), spread[row, at].tolist(), 0.4)
            assert (~violations.below)[row, at].tolist() == kept
            seen |= set(kept)
    assert seen == {True, False}


def test_suffix_veto_keeps_the_trigger_and_a_looser_bound_keeps_no_less():
    log_ratios = torch.tensor([[0.0, math.log(0.5), math.log(2e-5), 0.0], [0.0, 0.0, 0.0, math.log(2e-5)]])
    inputs = TermInputs(log_ratios, torch.ones(2, 4).bool(), -torch.ones(2, 1))

    def dropped(low):
        return flags(SuffixVeto(low=low).violations(inputs), "below")

    assert dropped(1e-4) == [[False, False, False, True], [False] * 4]
    assert dropped(0.6) == [[False, False, True, True], [False] * 4]
    assert dropped(1e-5) == dropped(2e-5 * (1 - 1e-5)) == [[False] * 4] * 2


# ------------------------------------------------------------------------------------------------ staleness bound


@pytest.mark.parametrize(
    ("lags", "max_lag", "above"),
    [
        ([[3], [0], [9]], 3, [False, False, True]),
        ([[3], [0], [9]], 2, [True, False, True]),
        ([[1], [0], [9]], 0, [True, False, True]),
        ([[0, 4], [1, 2], [1, 99]], 3, [True, False, False]),  # the oldest token decides; padding has no age
        ([[-5], [-1], [0]], 0, [False, False, False]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_staleness_bound_reads_the_oldest_trainable_token(dtype, lags, max_lag, above):
    seen = TermInputs(LOG_RATIOS, MASK, POSITIVE, version_lags=torch.tensor(lags, dtype=dtype))

    violations = StalenessBound(max_lag=max_lag).violations(seen)

    assert violations.above.flatten().tolist() == above
    assert violations.below is None


def test_staleness_bound_needs_versions():
    with pytest.raises(ValueError, match=r"^policy_versions and current_version must be given for a staleness bound"):
        StalenessBound(max_lag=1).violations(SEEN)


@pytest.mark.parametrize(
    ("rewards", "tolerance", "dropped"),
    [
        ([1.0, 1.0, 1.0], 0.0, True),
        ([0.0, 0.0, 0.0], 0.0, True),
        ([1.0, 1.0, 0.0], 0.5, False),
        ([0.1, 0.1 + 2e-7, 0.1], 0.0, False),
        ([0.1, 0.1 + 2e-7, 0.1], 1e-6, True),
        ([-3.0, -3.25, -3.5], 0.5, True),  # inclusive
        ([1.0, NAN, 1.0], 0.0, True),  # two rewards are enough
        ([1.0, NAN, INF], 0.0, False),  # one says nothing of a spread
        ([NAN, NAN, NAN], 0.0, False),
    ],
)
def test_equal_rewards_reads_the_spread_of_the_group(rewards, tolerance, dropped):
    seen = TermInputs(LOG_RATIOS, MASK, POSITIVE, group_rewards=torch.tensor([rewards, [0.0, 1.0, 1.0], rewards]))

    violations = EqualRewards(tolerance=tolerance).violations(seen)

    expected = [dropped, tolerance >= 1, dropped]
    assert violations.above.flatten().tolist() == expected and violations.below is None


def test_equal_rewards_needs_the_rewards_of_the_group():
    with pytest.raises(ValueError, match=r"^group_rewards must be given for equal rewards, but got None"):
        EqualRewards().violations(SEEN)


@pytest.mark.parametrize("shape", [(0, 3), (2, 1), (2, 4)])
def test_nothing_trainable_violates_nothing(shape):
    rows = shape[0]
    ids = torch.zeros(rows, dtype=torch.int64)
    nothing = torch.full(shape, NAN)
    seen = TermInputs(nothing, torch.zeros(shape).bool(), -torch.ones(rows, 1), nothing, None, ids, ids[:, None] + 9)
    terms = [
        *(RatioBand(low=0.9, high=1.1, level=level) for level in LEVELS),
        *(DivergenceBand(statistic=statistic, high=0.1, level=level) for statistic, level in PAIRS),
        ProbabilityDifferenceMask(),
        OutlierVeto(low=0.9, high=1.1),
        OffPolicySequenceMask(max_divergence=0.1),
        PrefixBudget(),
        SuffixVeto(low=0.9),
        StalenessBound(max_lag=1),
    ]

    for term in terms:
        for violated in term.violations(seen):
            assert violated is None or (len(violated) == rows and not violated.any()), term
