"""The certificates: sums over every response against loops, draws and known theorems."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.certificates import certificates, claims, table, terms
from benchmarks.certificates.certificates import BATCH, GROUP, case_of, certificate, coefficients, moments
from benchmarks.certificates.mdp import in_float64, space
from benchmarks.certificates.mismatch import KINDS, REPORTED, case, expected_gradient, graded, nucleus, world
from benchmarks.certificates.terms import Row, objective, rows
from trl_offpolicy import TruncateWeight
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES, KEEP_TYPES, LOSS_TYPES, WEIGHT_TYPES

ROOT = Path(__file__).resolve().parents[2]
SMALL = (3, 4)
LAGS = ("lag 1", "lag 4", "mixed lags")


@pytest.fixture(scope="module")
def made():
    return world(0, SMALL)


# ------------------------------------------------------------------------------------------------- the enumeration


def test_every_response_is_listed_once():
    over = space(3, 4)
    rows_of = zip(over.token.tolist(), over.mask.tolist(), strict=True)
    listed = {tuple(t for t, inside in zip(*row, strict=True) if inside) for row in rows_of}
    expected = {y[: y.index(0) + 1] if 0 in y else y for y in itertools.product(range(3), repeat=4)}
    assert listed == expected and len(over.mask) == len(expected)
    assert over.prefixes == sum(2**t for t in range(4))


def test_gradients_and_norms_are_those_of_autograd():
    over = space(3, 4)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(over.prefixes, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(over.mask.shape, generator=generator, dtype=torch.float64)
    probability = torch.rand(len(over.mask), generator=generator, dtype=torch.float64)
    by_response = (weights * over.logps(logits)).sum(-1)

    (mean,) = torch.autograd.grad(probability @ by_response, logits, retain_graph=True)
    torch.testing.assert_close(over.gradient(weights, probability, logits.detach()), mean)
    norms = [torch.autograd.grad(one, logits, retain_graph=True)[0].square().sum() for one in by_response]
    torch.testing.assert_close(over.square_norms(weights, logits.detach()), torch.stack(norms))


def test_the_true_gradient_is_the_derivative_of_the_expected_reward(made):
    _, gradient = expected_gradient(made.space, made.target, made.rewards)
    step = 1e-5
    for place in ((0, 1), (2, 0)):
        moved = [made.target.clone(), made.target.clone()]
        moved[0][place] += step
        moved[1][place] -= step
        up, down = (expected_gradient(made.space, logits, made.rewards)[0] for logits in moved)
        assert float(gradient[place]) == pytest.approx((up - down) / (2 * step), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_a_distribution_over_what_can_be_sampled(kind, made):
    of = case(kind, made)

    assert float(of.probability.sum()) == pytest.approx(1.0, abs=1e-12)
    assert bool((of.probability > 0).all()) and bool(of.sampling.isfinite().all())
    honest = torch.allclose(of.sampling.sum(-1).exp() * (0.2 if kind == "mixed lags" else 1.0), of.probability)
    assert honest == (kind in (*REPORTED, "top-p"))  # the log-probs are those that were sampled from
    assert torch.equal(of.gradient, case("none", made).gradient)


def test_a_nucleus_is_the_smallest_set():
    kept = nucleus(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), 0.75).isfinite()

    assert kept.tolist() == [[True, True, False, False]]


def test_float64_is_only_inside():
    with in_float64():
        assert torch.ones(1, dtype=torch.float16).float().dtype == torch.zeros(1).dtype == torch.float64
        assert torch.empty(1, dtype=torch.float32).dtype == torch.ones(1).to(torch.float32).dtype == torch.float64
    assert torch.ones(1).double().float().dtype == torch.zeros(1).dtype == torch.float32


# ------------------------------------------------------------------------------------------------- the certificates


@pytest.mark.parametrize("seed", range(3))
def test_sequence_weights_are_unbiased_at_every_lag(seed):
    for kind in REPORTED:
        one = certificate(rows()["raw sequence"], case(kind, world(seed, SMALL)))
        assert one.exact and one.bias < 1e-12, kind
        assert one.length == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_token_weights_are_biased_from_lag_1_on(seed):
    for kind in LAGS:
        of = case(kind, world(seed, SMALL))
        one = certificate(rows()["raw token"], of)
        assert one.bias > 1e-3 and not one.unbiased, kind
        assert certificate(rows()["truncate token"], of).bias > 1e-3, kind
    assert certificate(rows()["raw token"], case("none", world(seed, SMALL))).bias < 1e-12


def test_a_flipped_sign_is_noticed(made, monkeypatch):
    of, row = case("lag 1", made), rows()["raw sequence"]
    assert certificate(row, of).unbiased
    right = certificates.coefficients
    monkeypatch.setattr(certificates, "coefficients", lambda *args, **options: -right(*args, **options))

    wrong = certificate(row, of)

    assert not wrong.unbiased
    assert (wrong.bias, wrong.angle, wrong.length) == pytest.approx((2.0, 180.0, -1.0), abs=1e-5)
    inverted = replace(of, sampling=2 * of.space.logps(of.target) - of.sampling)  # mu / pi in place of pi / mu
    monkeypatch.undo()
    assert certificate(row, inverted).bias > 1e-2


@pytest.mark.parametrize(
    "name", ["no correction", "truncate token", "band sequence", "ratio_band token", "cispo, bypass"]
)
def test_expectation_and_variance_are_those_of_draws(name, made):
    of, row = case("large", made), rows()[name]
    draws = 20_000
    index = torch.multinomial(of.probability, draws, replacement=True, generator=torch.Generator().manual_seed(0))
    exact = moments(of.space, certificates.terms(row, of), of)

    # one call of the kit with all draws as rows: its loss is their mean
    over = of.space.take(index)
    by_token = coefficients(row.objective, of, index).double() * draws
    drawn = over.gradient(by_token, torch.ones(draws, dtype=torch.float64) / draws, of.target)

    spread = math.sqrt(exact.variance / draws)
    assert 0.2 * spread < float((drawn - exact.mean).norm()) < 2 * spread
    second = float(over.square_norms(by_token, of.target).mean())
    assert second - float(exact.mean.square().sum()) == pytest.approx(exact.variance, rel=0.05)


def test_a_loop_over_responses_in_plain_floats(made):
    """Expectation and variance of token TIS with cap 1.2, response by response, by the definition."""
    of = case("lag 4", made)
    probs, total, square = of.target.softmax(-1), torch.zeros_like(of.target), 0.0
    for i, probability in enumerate(of.probability.tolist()):
        term = torch.zeros_like(of.target)
        for t in range(int(of.space.lengths[i])):
            state, token = int(of.space.state[i, t]), int(of.space.token[i, t])
            weight = min(float(probs[state, token]) / math.exp(float(of.sampling[i, t])), 1.2)
            score = -probs[state]
            score[token] += 1
            term[state] += weight * (float(of.rewards[i]) - of.baseline) * score
        total += probability * term
        square += probability * float(term.square().sum())
    unit = float(of.gradient.norm())

    one = certificate(Row("", "", "", objective(TruncateWeight(max_weight=1.2))), of)

    assert one.bias == pytest.approx(float((total - of.gradient).norm()) / unit, rel=1e-9)
    assert one.variance == pytest.approx((square - float(total.square().sum())) / BATCH / unit**2, rel=1e-9)
    assert one.mse == pytest.approx(one.bias**2 + one.variance, rel=1e-9)


@pytest.mark.parametrize("name", ["truncate sequence", "raw token"])
def test_drawn_batches_find_what_the_sum_finds(name, made):
    """An exact row treated as if it depended on the batch, with another row as its control."""
    of, row = case("large", made), rows()[name]
    exact = certificate(row, of)
    mean, variance, spread = certificates._from_batches(replace(row, control="no correction"), of, 100, 1)

    unit = float(of.gradient.norm())
    with in_float64():
        known = moments(of.space, certificates.terms(row, of), of).mean
    assert float((mean - known).norm()) < 2 * math.sqrt(spread)
    assert math.sqrt(spread) < 0.2 * unit
    assert variance / unit**2 == pytest.approx(exact.variance, rel=0.3)


def test_groups_in_one_call_are_those_of_one_batch_at_a_time(made, monkeypatch):
    of = case("large", made)
    for row in (rows()["group_rejection"], rows()["quatro, times the product"]):
        together = certificates._from_batches(row, of, 3, 0)
        monkeypatch.setattr(Row, "by_group", property(lambda self: False))
        apart = certificates._from_batches(row, of, 3, 0)
        monkeypatch.undo()
        torch.testing.assert_close(together[0], apart[0], rtol=1e-5, atol=1e-7)
        assert together[1:] == pytest.approx(apart[1:], rel=1e-4)


def test_the_mixture_of_responses_is_unbiased_and_that_of_tokens_is_not(made):
    """By hand: the mixture's probability of a response is a mean over versions; its weight is pi over that."""
    of = case("mixed lags", made)
    count = len(made.rewards)
    own = [made.space.logps(version).sum(-1).exp().tolist() for version in made.versions]
    target = made.space.logps(made.target).sum(-1).exp().tolist()
    total = torch.zeros_like(of.target)
    for i in range(count):
        mixed = sum(one[i] for one in own) / len(own)
        score = torch.where(made.space.mask[i], 1.0, 0.0).double()[None]
        alone = made.space.take(torch.tensor([i]))
        advantage = (float(made.rewards[i]) - of.baseline) * target[i] / mixed
        total += alone.gradient(advantage * score, torch.tensor([mixed], dtype=torch.float64), of.target)

    torch.testing.assert_close(total, of.gradient, rtol=1e-10, atol=1e-12)
    responses, tokens = (rows()[name] for name in ("mixture of responses, raw sequence", "mixture, raw sequence"))
    with in_float64():
        found = moments(of.space, certificates.terms(responses, of), of)
    torch.testing.assert_close(found.mean, total, rtol=1e-9, atol=1e-11)
    # two extreme versions count less than with each response's own sampler (Veach and Guibas)
    one, own_sampler = certificate(responses, of), certificate(rows()["raw sequence"], of)
    assert one.unbiased and own_sampler.unbiased and one.variance < 0.9 * own_sampler.variance
    assert 1e-3 < certificate(tokens, of).bias < 0.3
    lag = case("lag 4", made)  # one version: its mixture is itself
    assert certificate(tokens, lag) == certificate(rows()["raw sequence"], lag)


def test_a_mixture_by_tokens_in_plain_floats(made):
    of, space_ = case("mixed lags", made), made.space
    found = certificates.sampling_of(of, "token")[: len(made.rewards)]
    shares, by_version = [], [space_.logps(version) for version in made.versions]
    for logps in by_version:
        probability = logps.sum(-1).exp()
        shares.append(float((probability * space_.lengths).sum()))
    for i, t in ((0, 0), (5, 1), (20, 2)):
        if not bool(space_.mask[i, t]):
            continue
        weighed = sum(share * math.exp(float(logps[i, t])) for share, logps in zip(shares, by_version, strict=True))
        assert float(found[i, t]) == pytest.approx(math.log(weighed / sum(shares)), rel=1e-5)


def test_rewards_of_0_and_1_have_at_least_the_share_of_right_ones(made):
    probability = made.space.logps(made.target).sum(-1).exp()
    right = graded(made, 0.9).rewards == 1
    mass = float(probability[right].sum())
    least = float(probability[right][made.rewards[right].argmin()])

    assert mass - least < 0.9 <= mass + 1e-12
    assert float(made.rewards[right].min()) > float(made.rewards[~right].max())


def test_zero_variance_moves_only_groups_of_equal_rewards(made):
    """On-policy: the kit's coefficients against alpha H_t and reward minus baseline, token by token."""
    row = rows()["paper/rl-zvp"]
    of = case_of(row, "none", made)
    index = torch.multinomial(of.probability, BATCH, replacement=True, generator=torch.Generator().manual_seed(0))
    found, entropies = coefficients(row.objective, of, index).tolist(), of.space.entropies(of.target)[index].tolist()
    rewards, mask = of.rewards[index].tolist(), of.space.mask[index].tolist()
    unanimous = 0
    for i, reward in enumerate(rewards):
        group = rewards[i // GROUP * GROUP :][:GROUP]
        same = min(group) == max(group)
        unanimous += same
        for t, inside in enumerate(mask[i]):
            largest = max(h for h, there in zip(entropies[i], mask[i], strict=True) if there)
            price = 0.1 * entropies[i][t] if reward == 1 else -0.1 * (largest - entropies[i][t])
            wanted = price if same else reward - of.baseline
            assert found[i][t] == pytest.approx(inside * wanted / BATCH, abs=1e-7)
    assert 0 < unanimous < BATCH


def test_gradients_of_many_batches_are_those_of_each():
    over = space(3, 4).take(torch.arange(30))
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(over.mask.shape, generator=generator, dtype=torch.float64)
    logits = torch.randn(over.prefixes, 3, generator=generator, dtype=torch.float64)
    found = over.gradients(weights, 3, logits)
    for piece, index in enumerate(torch.arange(30).split(10)):
        part = over.take(index)
        alone = part.gradient(weights[index], torch.ones(10, dtype=torch.float64), logits)
        torch.testing.assert_close(found[piece], alone)


@pytest.mark.parametrize(("name", "factor"), [("rloo", 1.0), ("dr_grpo", 7 / 8)])
def test_estimators_that_are_unbiased_up_to_a_factor(name, factor, made):
    """r minus the mean of the others is unbiased, r minus the mean of all of 8 has 7/8 of the gradient."""
    one = certificate(rows()[f"advantages {name}"], case("lag 1", made), batches=200)

    assert one.length == pytest.approx(factor, abs=4 * one.error)
    assert one.bias < 1 - factor + 4 * one.error and one.error < 0.05


def test_an_estimators_coefficients_by_hand(made):
    of, row = case("large", made), rows()["advantages dr_grpo"]
    index = torch.multinomial(of.probability, BATCH, replacement=True, generator=torch.Generator().manual_seed(0))
    found = coefficients(row.objective, of, index, advantages=row.advantages)
    rewards = of.rewards[index].tolist()
    target = of.space.logps(of.target)[index].sum(-1).tolist()
    sampled = of.sampling[index].sum(-1).tolist()
    for i, reward in enumerate(rewards):
        group = rewards[i // GROUP * GROUP :][:GROUP]
        wanted = math.exp(target[i] - sampled[i]) * (reward - sum(group) / GROUP) / BATCH
        assert found[i, 0].item() == pytest.approx(wanted, rel=1e-4, abs=1e-7)


def test_bad_arguments_are_named(made):
    row = rows()["ess token"]
    with pytest.raises(ValueError, match=r"^batches must be at least 2, but got 1"):
        certificate(row, case("none", made), batches=1)
    flat = replace(case("none", made), gradient=torch.zeros_like(made.target))
    with pytest.raises(ValueError, match=r"^case must have a gradient that is not 0, but got 0"):
        certificate(row, flat)
    with pytest.raises(ValueError, match=r"^kind must be one of \['none', .*\], but got 'lag'"):
        case("lag", made)
    with pytest.raises(ValueError, match=r"^vocabulary must be at least 2 and horizon at least 1, but got 1 and 4"):
        space(1, 4)


# ------------------------------------------------------------------------------------------------- rows and tables


def test_every_registered_term_has_a_row(monkeypatch):
    assert terms.missing() == []
    assert {row.part for row in rows().values()} >= {*WEIGHT_TYPES, *KEEP_TYPES, *LOSS_TYPES}
    assert {f"advantages {name}" for name in ADVANTAGE_TYPES} <= set(rows())
    monkeypatch.setattr(terms, "_keeps", lambda: iter(()))
    rows.cache_clear()
    try:
        assert terms.missing() == list(KEEP_TYPES)  # forgotten terms are named
    finally:
        rows.cache_clear()


def test_every_level_of_a_weight_and_statistic_of_a_keep_term_has_a_row():
    names = set(rows())
    assert {f"raw {level}" for level in terms.WEIGHT_LEVELS} <= names
    assert {f"ratio_band {level}" for level in terms.LEVELS} <= names
    assert {f"divergence_band {statistic} token" for statistic in terms.STATISTICS} <= names


def test_what_is_exact_depends_on_no_other_row(made):
    """The coefficient of a response in an exact row is the same whatever else is in the batch."""
    of = case("large", made)
    index = torch.arange(0, len(of.probability), 2)
    for row in rows().values():
        if not row.exact or row.mixture is not None:  # shares of versions are those of the whole distribution
            continue
        factor = (1, 1) if row.objective.aggregation == "token_sum" else (len(index), len(of.probability))
        alone = coefficients(row.objective, replace(
            of, space=of.space.take(index), probability=of.probability[index], sampling=of.sampling[index],
            lag=of.lag[index], rewards=of.rewards[index],
        )) * factor[0]  # fmt: skip
        together = coefficients(row.objective, of)[index] * factor[1]
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5, msg=row.name)


def test_losses_that_are_the_policy_gradient_on_the_first_step_are_unbiased_with_the_product(made):
    of = case("lag 4", made)
    for name in ("ppo_clip", "gpg", "cispo", "gspo", "luspo", "gmpo", "sapo", "dppo", "dro", "tbpo", "aspo"):
        assert certificate(rows()[f"{name}, times the product"], of).bias < 1e-12, name
        assert certificate(rows()[name], of).bias > 1e-2, name


def test_normalisers_on_policy(made):
    of = case("none", made)
    for name in ("seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"):
        assert certificate(rows()[f"{name}, no correction"], of).bias < 1e-12, name
    assert certificate(rows()["seq_mean_token_mean, no correction"], of).angle > 1.0


@pytest.mark.parametrize("name", claims.CLAIMS)
def test_claims_quote_what_the_docs_say(name, made):
    claim = claims.CLAIMS[name]
    text = " ".join((ROOT / claim.page).read_text().split())

    assert " ".join(claim.quote.split()) in text
    finding = claim.check(made)
    assert math.isfinite(finding.value)
    assert finding.holds or name in ("a cap biases the gradient towards the uncorrected one",)


def test_tables_are_those_of_the_results(made):
    """The committed tables are what ``results.json`` gives, and the results have every row, kind and claim of today."""
    folder = ROOT / "benchmarks" / "certificates"
    results = json.loads((folder / "results.json").read_text())

    assert list(results["kinds"]) == list(KINDS)
    assert list(results["rows"]) == list(rows())
    assert list(results["claims"]) == list(claims.CLAIMS)
    assert (folder / "table.md").read_text() == table.full_table(results)
    page = (folder / "README.md").read_text()
    assert page == table.short_tables(results, page)


def test_cells_as_text():
    exact = [20, 1e-16, 2e-16, 0.0, 0.0, 1.0, 0.5, 0.5]
    some = [7, 0.123, 0.5, 0.0, 12.3, 0.9, 0.5, 0.52]
    drawn = [19, 0.01, 0.05, 0.02, 1.0, 1.0, 0.5, 0.5]

    assert table.bias_text(exact, exact=True, seeds=20) == "0"
    assert table.bias_text(some, exact=True, seeds=20) == "0.12 (12°), 0 in 7"
    assert table.bias_text(drawn, exact=False, seeds=20) == "< 0.04"
    assert table.bias_text([3, *drawn[1:]], exact=False, seeds=20) == "≈ 0.01 (1°)"
    assert table.bias_text([0, 1.0, 1.0, 0.0, None, 0.0, 0.0, 1.0], exact=True, seeds=20) == "1"
    assert table.mse_text(some) == "0.5, 0.52"
