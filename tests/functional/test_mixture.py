"""The mixture of several policies against every response of a small vocabulary, in float64 sums."""

from __future__ import annotations

import itertools

import pytest
import torch

from trl_offpolicy.functional.mixture import mixture_logps

VOCABULARY, LENGTH, VERSIONS = 3, 3, 3
SHARES = [0.5, 0.3, 0.2]
RESPONSES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))


def policy(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """{prefix: next-token probabilities}, float64."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for n in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=n)]
    return {
        prefix: torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).softmax(-1) for prefix in prefixes
    }


SAMPLERS, TARGET = [policy(seed) for seed in range(VERSIONS)], policy(9)


def by_token(one: dict[tuple[int, ...], torch.Tensor], response: tuple[int, ...]) -> list[float]:
    return [one[response[:t]][token].item() for t, token in enumerate(response)]


def product(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).prod())


def everything() -> tuple[torch.Tensor, torch.Tensor]:
    logps = torch.tensor([[by_token(one, response) for response in RESPONSES] for one in SAMPLERS]).log()
    return logps, torch.ones(len(RESPONSES), LENGTH).bool()


def mixed(level: str) -> torch.Tensor:
    logps, mask = everything()
    return mixture_logps(logps, torch.tensor(SHARES), mask, level=level).double()  # type: ignore[arg-type]


def test_once_for_a_response_the_products_are_those_of_the_mixture_of_responses() -> None:
    found = mixed("sequence").sum(-1).exp()
    for value, response in zip(found.tolist(), RESPONSES, strict=True):
        wanted = sum(c * product(by_token(one, response)) for c, one in zip(SHARES, SAMPLERS, strict=True))
        assert value == pytest.approx(wanted, rel=1e-5)
    assert found.sum().item() == pytest.approx(1.0, rel=1e-5)  # it is a policy


def test_anew_for_each_token_it_is_the_mean_of_the_next_token_probabilities() -> None:
    for row, response in zip(mixed("token").exp().tolist(), RESPONSES, strict=True):
        each = [by_token(one, response) for one in SAMPLERS]
        wanted = [sum(c * p[t] for c, p in zip(SHARES, each, strict=True)) for t in range(LENGTH)]
        assert row == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_balance_heuristic_is_unbiased_and_varies_less_than_each_samples_own_ratio(seed: int) -> None:
    """E over all versions and responses of f pi / m, and its second moment; f is any function of the response."""
    f = torch.rand(len(RESPONSES), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    mixture = mixed("sequence").sum(-1).exp().tolist()
    wanted = sum(value * product(by_token(TARGET, y)) for value, y in zip(f, RESPONSES, strict=True))
    first = {"balance": 0.0, "own": 0.0}
    second = {"balance": 0.0, "own": 0.0}
    for c, one in zip(SHARES, SAMPLERS, strict=True):
        for value, m, y in zip(f, mixture, RESPONSES, strict=True):
            mu, pi = product(by_token(one, y)), product(by_token(TARGET, y))
            for name, denominator in (("balance", m), ("own", mu)):
                first[name] += c * mu * value * pi / denominator
                second[name] += c * mu * (value * pi / denominator) ** 2
    assert first["balance"] == pytest.approx(wanted, rel=1e-5)
    assert first["own"] == pytest.approx(wanted, rel=1e-9)
    assert second["balance"] < 0.9 * second["own"]


def test_by_token_each_next_token_is_unbiased_given_its_prefix() -> None:
    f = [0.3, -1.0, 2.0]
    for prefix in ((), (1,), (2, 0)):
        nexts = [one[prefix] for one in SAMPLERS]
        padded = [(*prefix, token) for token in range(VOCABULARY)]
        logps = torch.stack([p.log().float() for p in nexts]).unsqueeze(-1)  # (K, tokens, 1)
        m = mixture_logps(logps, torch.tensor(SHARES), torch.ones(len(padded), 1).bool()).exp().squeeze(-1).tolist()
        pi = TARGET[prefix].tolist()
        found = sum(
            c * p[token].item() * f[token] * pi[token] / m[token]
            for c, p in zip(SHARES, nexts, strict=True)
            for token in range(VOCABULARY)
        )
        assert found == pytest.approx(sum(a * b for a, b in zip(f, pi, strict=True)), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_padding_and_holes_are_left_out(level: str) -> None:
    logps = torch.tensor([[[0.2, float("nan"), 0.5]], [[0.6, 0.1, 0.1]]]).log()
    mask = torch.tensor([[True, False, True]])
    shares = torch.tensor([0.5, 0.5])
    found = mixture_logps(logps, shares, mask, level=level)  # type: ignore[arg-type]
    whole = mixture_logps(logps[..., [0, 2]], shares, mask[:, [0, 2]], level=level)  # type: ignore[arg-type]
    assert found[0, 1] == 0.0
    torch.testing.assert_close(found[:, [0, 2]], whole)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_policy_and_a_share_of_nothing_are_that_policy(level: str) -> None:
    logps, mask = everything()
    for shares, kept in (([1.0], logps[:1]), ([0.0, 1.0, 0.0], logps)):
        found = mixture_logps(kept, torch.tensor(shares), mask, level=level)  # type: ignore[arg-type]
        torch.testing.assert_close(found, kept[len(shares) // 2], rtol=1e-5, atol=1e-6)
    long = torch.full((2, 1, 400), -50.0)  # products of e^-20000
    long[1] = -51.0
    found = mixture_logps(long, torch.tensor([0.5, 0.5]), torch.ones(1, 400).bool(), level=level)  # type: ignore[arg-type]
    assert found.isfinite().all() and found[0, 0].exp() * 2 > torch.tensor(-50.0).exp()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^shares must have shape \(K,\) for logps of \(K, B, T\), but got \(3,\)"):
        mixture_logps(torch.zeros(2, 1, 4), torch.ones(3) / 3, torch.ones(1, 4).bool())


def test_an_unknown_or_impossible_token_does_not_spoil_the_tokens_around_it() -> None:
    """At level "sequence", whose sums run over the response."""
    mask, halves = torch.ones(1, 3).bool(), torch.tensor([0.5, 0.5])
    known = torch.tensor([[[-1.0, -1.0, -2.0]], [[-2.0, -1.0, -1.0]]])
    expected = mixture_logps(known, halves, mask, level="sequence")
    unknown = known.clone()
    unknown[0, 0, 1] = torch.nan
    without = mixture_logps(known[..., [0, 2]], halves, mask[:, :2], level="sequence")
    found = mixture_logps(unknown, halves, mask, level="sequence")
    assert found[0, 1].isnan()
    torch.testing.assert_close(found[:, [0, 2]], without)
    never = known.clone()
    never[0, 0, 0] = -torch.inf  # one policy cannot draw it: the other wrote the response
    found = mixture_logps(never, halves, mask, level="sequence")
    torch.testing.assert_close(found, torch.tensor([[-2.0 + torch.tensor(0.5).log().item(), -1.0, -1.0]]))
    torch.testing.assert_close(mixture_logps(never, torch.tensor([0.0, 1.0]), mask, level="sequence"), known[1])
    never[1, 0, 0] = -torch.inf  # none can
    assert mixture_logps(never, halves, mask, level="sequence")[0, 0] == -torch.inf
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("shares", [[1.0, 1.0], [-0.5, 1.5]])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ValueError, match="shares must be at least 0 and of sum 1, but got"):
        mixture_logps(torch.zeros(2, 1, 1), torch.tensor(shares), torch.ones(1, 1).bool())
