"""Keep masks: veto, off-policy sequence mask, second-moment budget, divergence statistics."""

import math
from functools import partial

import plain
import pytest
import torch

from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.log_ratios import log_ratio
from trl_offpolicy.functional.masks import (
    PROBABILITY_STATISTICS,
    STATISTICS,
    divergence,
    high_entropy_mask,
    off_policy_sequence_mask,
    outlier_veto,
    prefix_budget,
    second_moment_budget,
    suffix_veto,
)

NAN, INF = float("nan"), float("inf")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0.5, 4.0, [True, False, False, True]),
        (None, 4.0, [True, True, False, True]),
        (0.5, None, [True, False, True, True]),
    ],
)
def test_one_token_outside_vetoes_its_sequence(low, high, kept):
    ratios = torch.tensor([[1.0, 2.0], [1.0, 0.25], [8.0, 1.0], [1.0, 1.0]])
    mask = torch.ones(4, 2).bool()

    assert outlier_veto(ratios.log(), mask, low=low, high=high).flatten().tolist() == kept


def test_veto_bounds_are_inclusive():
    log_ratios = torch.tensor([[0.5], [-0.5], [0.5001], [-0.5001]])
    low, high = math.exp(-0.5), math.exp(0.5)

    keep = outlier_veto(log_ratios, torch.ones(4, 1).bool(), low=low, high=high)

    assert keep.flatten().tolist() == [True, True, False, False]


def test_veto_reads_trainable_tokens_only_and_keeps_an_empty_row():
    log_ratios = torch.tensor([[0.0, 9.0], [NAN, -9.0], [0.0, NAN]])
    mask = torch.tensor([[True, False], [False, False], [True, False]])

    assert outlier_veto(log_ratios, mask, low=0.5, high=2.0).tolist() == [[True], [True], [True]]


@pytest.mark.parametrize("zero_outside", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "ratio"), [(1.5, None, 2.0), (None, 0.7, 0.5), (1.5, 4.0, 2.0), (0.2, 0.7, 0.5)]
)
def test_veto_of_a_band_without_one_does_not_read_the_padding(low, high, ratio, zero_outside):
    log_ratios = torch.tensor([[math.log(ratio), 0.0], [math.log(ratio), 0.0]])
    mask = torch.tensor([[True, False], [True, True]])

    keep = outlier_veto(log_ratios, mask, low=low, high=high, zero_outside=zero_outside)

    assert keep.tolist() == [[True], [False]]


def test_sequence_mask_drops_negative_advantages_that_drifted_too_far():
    # rows: drifted (log mu/pi = 0.5), at the threshold (0.25), far the other way (-3)
    mean_log_ratio = torch.tensor([[-0.5], [-0.25], [3.0]])

    def keep(advantage):
        advantages = torch.full((3, 1), advantage)
        return off_policy_sequence_mask(mean_log_ratio, advantages, max_divergence=0.25).flatten().tolist()

    assert keep(-1.0) == [False, True, True]  # equality is kept
    assert keep(0.0) == [True, True, True]
    assert keep(1.0) == [True, True, True]


def test_sequence_mask_decides_by_token_where_advantages_do():
    advantages = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])

    keep = off_policy_sequence_mask(torch.tensor([[-1.0], [-0.1]]), advantages, max_divergence=0.5)

    assert keep.tolist() == [[True, False], [True, True]]


# ------------------------------------------------------------------------------------------------------ budget


def affordable(rows, budget):
    log_ratios = torch.tensor(rows)
    return second_moment_budget(log_ratios, ~log_ratios.isnan(), budget=budget, across_ranks=False).tolist()


@pytest.mark.parametrize(
    ("budget", "kept"),
    [  # squares 0.01, 0.04, 0.09, 1, 4; means of the sorted prefix 0.01, 0.025, 0.0467, 0.285, 1.028
        (2.0, [True] * 5),
        (1.0, [True, True, False, True, True]),
        (0.1, [True, True, False, True, False]),
        (0.03, [True, False, False, True, False]),
        (0.02, [True, False, False, False, False]),
        (0.005, [False] * 5),  # even the best token costs more than the budget
    ],
)
def test_budget_drops_the_worst_first(budget, kept):
    assert affordable([[0.1, -0.3, 2.0, -0.2, 1.0]], budget) == [kept]


def test_budget_is_inclusive():
    assert affordable([[0.5, -0.5]], 0.25) == [[True, True]]
    assert affordable([[1.0, 0.0]], 0.5) == [[True, True]]
    assert affordable([[1.0, 0.0]], math.nextafter(0.5, 0)) == [[False, True]]


def test_equal_tokens_fall_together():
    # one token of +-1 would be affordable, but nothing says which
    assert affordable([[0.0, 1.0], [-1.0, 0.0]], 0.4) == [[True, False], [False, True]]


def test_budget_is_one_for_all_rows_and_reads_trainable_tokens_only():
    assert affordable([[0.0, 0.0, 0.0], [1.0, NAN, NAN]], 0.25) == [[True] * 3, [True] * 3]
    assert affordable([[0.0, 0.0, NAN], [1.0, NAN, NAN]], 0.25) == [[True] * 3, [False, True, True]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 1), (3, 4)])
def test_budget_of_nothing_keeps_everything(shape):
    keep = second_moment_budget(torch.full(shape, NAN), torch.zeros(shape).bool(), budget=0.1, across_ranks=True)

    assert torch.equal(keep, torch.ones(shape).bool())


@pytest.mark.parametrize("budget", [0.01, 0.04, 0.3, 1.0])
def test_budget_by_dropping_one_at_a_time(budget):
    for seed in range(20):
        log_ratios, mask, _, _ = plain.random_case(seed)
        if seed % 2:
            log_ratios = (2 * log_ratios).round() / 2  # many ties

        keep = second_moment_budget(log_ratios, mask, budget=budget, across_ranks=False)

        assert keep[mask].tolist() == plain.affordable(log_ratios[mask].tolist(), budget)
        assert keep[~mask].all()
        left = log_ratios[mask & keep].square()
        assert not len(left) or left.mean() <= budget


# -------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("k1", [-math.log(2), math.log(2), 0.0]),  # -l, signed
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0]),
        ("k3", [2 - 1 - math.log(2), 0.5 - 1 + math.log(2), 0.0]),  # rho - 1 - l
        ("abs", [math.log(2), math.log(2), 0.0]),
        ("prob_diff", [0.5 - 0.25, 0.4 - 0.8, 0.0]),  # p - q
        ("binary_tv", [0.25, 0.4, 0.0]),
        (
            "binary_kl",
            [0.25 * math.log(0.5) + 0.75 * math.log(0.75 / 0.5), 0.8 * math.log(2) + 0.2 * math.log(0.2 / 0.6), 0.0],
        ),
        (  # the KL from p is the larger one of both tokens
            "binary_kl_both",
            [0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75), 0.4 * math.log(0.5) + 0.6 * math.log(0.6 / 0.2), 0.0],
        ),
    ],
)
def test_divergence_statistics(statistic, expected):
    """p = 0.5, 0.4, 0.7 against q = 0.25, 0.8, 0.7."""
    log_ratios = torch.tensor([math.log(2), -math.log(2), 0.0])

    close(divergence(log_ratios, statistic, torch.tensor([0.25, 0.8, 0.7]).log()), torch.tensor(expected))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_divergence_by_plain_floats(statistic):
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(500, generator=generator).double() * 0.9 + 0.05
    p = torch.rand(500, generator=generator).double() * 0.9 + 0.05

    got = divergence((p.log() - q.log()).float(), statistic, q.log().float())

    expected = [plain.divergence(statistic, a.log().item(), b.log().item()) for a, b in zip(p, q, strict=True)]
    torch.testing.assert_close(got.double(), torch.tensor(expected).double(), rtol=2e-5, atol=2e-6)


def test_binary_divergences_are_those_of_the_two_way_split():
    """Total variation and KL of "this token" against "another", from their definitions over two outcomes."""
    q, p = torch.tensor([0.2, 0.6]).double(), torch.tensor([0.5, 0.1]).double()
    ours, theirs = torch.stack([p, 1 - p]), torch.stack([q, 1 - q])
    log_ratios = (p / q).log().float()

    close(divergence(log_ratios, "binary_tv", q.log()), ((ours - theirs).abs().sum(0) / 2).float())
    close(divergence(log_ratios, "binary_kl", q.log()), (theirs * (theirs / ours).log()).sum(0).float())


@pytest.mark.parametrize("statistic", ["k2", "k3", "abs", "binary_tv", "binary_kl", "binary_kl_both"])
def test_divergences_are_zero_on_policy_and_never_negative(statistic):
    log_q = torch.linspace(-20, 0, 101)
    log_p = log_q.flip(0)

    assert divergence(torch.zeros(101), statistic, log_q).tolist() == [0.0] * 101
    value = divergence(log_p - log_q, statistic, log_q)
    assert (value >= 0).all() and value.isfinite().all()


@pytest.mark.parametrize(("log_p", "log_q"), [(0.0, -0.7), (0.0, -20.0), (-0.7, 0.0), (-20.0, 0.0), (0.0, 0.0)])
def test_certain_tokens_have_finite_divergences(log_p, log_q):
    for statistic in STATISTICS:
        got = divergence(torch.tensor([log_p - log_q]), statistic, torch.tensor([log_q]))

        assert got.item() == pytest.approx(plain.divergence(statistic, log_p, log_q), rel=1e-5, abs=1e-6), statistic


@pytest.mark.parametrize("log_q", [-30.0, -9999.0])  # vLLM writes -9999 for a log-prob of minus infinity
@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("prob_diff", 0.75),
        ("binary_tv", 0.75),
        ("binary_kl", math.log(4)),  # of another token: 1 log(1 / 0.25)
        ("binary_kl_both", 0.75 * math.log(0.75e6) + 0.25 * math.log(0.25)),  # of q clamped to 1e-6
    ],
)
def test_a_token_that_the_denominator_excluded_moved_by_its_whole_probability(statistic, expected, log_q):
    """Its ratio is beyond e^20; held there, it would leave p - q = 0."""
    log_p = torch.tensor([math.log(0.75)])

    got = divergence(log_p - log_q, statistic, torch.tensor([log_q]))

    assert got.item() == pytest.approx(expected, rel=2e-3)  # 9999 nats in float32 hold a thousandth
    assert divergence(torch.tensor([-20.0]), "prob_diff", log_p).item() == pytest.approx(-0.75, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("statistic", PROBABILITY_STATISTICS)
def test_probabilities_of_other_dtypes(statistic, dtype):
    log_ratios, log_q = torch.tensor([0.5, -0.5]), torch.tensor([-1.5, -0.25])  # exact in 8 bits

    got = divergence(log_ratios, statistic, log_q.to(dtype))

    assert torch.equal(got, divergence(log_ratios, statistic, log_q))


@pytest.mark.parametrize("statistic", PROBABILITY_STATISTICS)
def test_probability_statistics_need_the_denominator(statistic):
    with pytest.raises(ValueError, match=f"^denominator_logps must be given for statistic '{statistic}', but got None"):
        divergence(torch.zeros(1), statistic)


def test_k3_is_exact_where_the_policies_nearly_agree():
    value = divergence(torch.tensor([1e-4]), "k3").item()

    # l^2/2 + l^3/6; exp(l) - 1 - l in float32 gives noise of 6e-8, an expm1 that is off by one unit 1.2e-11
    assert value == pytest.approx(5.00017e-9, rel=0.02)


def test_k3_of_the_largest_log_ratio_is_finite():
    assert divergence(torch.tensor([20.0]), "k3").item() == pytest.approx(math.exp(20) - 21, rel=1e-5)


def test_unknown_statistic_is_refused():
    with pytest.raises(ValueError, match=r"^statistic must be one of \['k1', .*'binary_kl_both'\], but got 'k4'"):
        divergence(torch.zeros(1), "k4")


ENTROPIES = torch.tensor([[0.1, 2.0, 0.7, 9.0], [0.4, 0.0, 0.2, NAN]])
TRAINABLE = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]).bool()  # sorted: 0, 0.1, 0.2, 0.4, 0.7, 2


@pytest.mark.parametrize(
    ("top", "kept"),
    [
        (1.0, [[1, 1, 1, 0], [1, 1, 1, 0]]),
        (0.5, [[0, 1, 1, 0], [1, 0, 0, 0]]),  # the quantile 0.3 lies between two values
        (0.4, [[0, 1, 1, 0], [1, 0, 0, 0]]),  # it is 0.4 itself, which stays
        (0.3, [[0, 1, 1, 0], [0, 0, 0, 0]]),
        (0.0, [[0, 1, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_tokens_of_high_entropy(top, kept):
    """Padding, with whatever entropy, is neither counted nor kept."""
    assert high_entropy_mask(ENTROPIES, TRAINABLE, top=top).int().tolist() == kept


def test_without_a_trainable_token_no_entropy_is_high():
    assert not high_entropy_mask(ENTROPIES, torch.zeros_like(TRAINABLE), top=0.5).any()


def test_high_entropy_among_more_tokens_than_torch_ranks():
    """torch.quantile refuses more than 2^24 values."""
    entropies = torch.arange(17_000_000, dtype=torch.float32).mul_(1e-6).view(1000, 17_000)
    kept = high_entropy_mask(entropies, torch.ones_like(entropies, dtype=torch.bool), top=0.25)
    assert kept.sum().item() == pytest.approx(17_000_000 / 4, abs=10)  # neighbours may be equal in float32
    assert kept[751:].all()


@pytest.mark.parametrize("budget", [0.2, 0.1, 0.9])
def test_the_adaptive_prefix_budget_is_a_quantile_between_two_values_within_its_bounds(budget):
    """The first token spends the most; whether the second one fits depends on what the budget gives for the first."""
    spent = torch.tensor([0.4, 0.01, *torch.linspace(0.2, 0.38, 10).tolist()], dtype=torch.float64)
    given = spent.quantile(0.9).clamp(budget, 2 * budget).item()  # between the 10th and the 11th of 12
    for slack, fits in ((1e-6, True), (-1e-6, False)):
        high = max(0.01, 0.01 + 0.4 - given) + slack
        found = prefix_budget(spent[None], spent[None] > 0, high=high, budget=budget, min_weight=1.0, adaptive=True)
        assert found[0, 1].item() is fits


def test_the_second_of_two_tokens_has_the_smallest_weight():
    spent, mask = torch.tensor([[0.0, 0.3]]), torch.ones(1, 2).bool()
    for high, fits in ((0.16, True), (0.14, False)):  # 0.5 * 0.3
        found = prefix_budget(spent, mask, high=high, budget=0.0, min_weight=0.5, adaptive=False)
        assert found.tolist() == [[True, fits]]


def test_the_suffix_veto_needs_a_negative_advantage_and_a_ratio_below_its_bound():
    ratios = torch.tensor([[0.25, 1.0, 0.125, 1.0]])  # the first is at the bound
    mask = torch.ones(1, 4).bool()
    for advantages, kept in ((-1.0, [True, True, True, False]), (0.0, [True] * 4)):
        given = torch.full((1, 1), advantages)
        assert suffix_veto(ratios.log(), mask, given, low=0.25).tolist() == [kept]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_a_mask_of_another_type_than_bool_is_refused(dtype):
    values, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=dtype)

    for call in (
        lambda: second_moment_budget(values, mask, budget=0.1, across_ranks=False),
        lambda: suffix_veto(values, mask, -torch.ones(1, 1), low=1e-4),
        lambda: prefix_budget(values, mask, high=0.1, budget=0.1, min_weight=1.0, adaptive=False),
        lambda: log_ratio(values, values, mask),
        lambda: aggregate(values, mask, "sequence"),
    ):
        with pytest.raises(TypeError, match=f"mask must be a bool tensor, but got {dtype}"):
            call()
