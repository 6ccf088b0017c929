"""What the documentation says about bias, each sentence with the numbers that bear it out or do not.

A claim quotes a page. A test looks the quotation up there, so that a changed page brings its claim back here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.certificates.certificates import Certificate, certificate, moments, terms
from benchmarks.certificates.mdp import in_float64
from benchmarks.certificates.mismatch import REPORTED, Case, World, case
from benchmarks.certificates.terms import Row, objective, rows
from trl_offpolicy import TruncateWeight

MISMATCHED = tuple(kind for kind in REPORTED if kind != "none")


@dataclass(frozen=True)
class Finding:
    """One seed's verdict on a claim.

    Args:
        holds: whether the claim is true there.
        value: the number that the text reports.
    """

    holds: bool
    value: float


@dataclass(frozen=True)
class Claim:
    """A sentence of the docs.

    Args:
        page: path in the repository.
        quote: words of the page, as they are there but for line breaks.
        number: what ``Finding.value`` is.
        check: from the world of a seed to the verdict.
    """

    page: str
    quote: str
    number: str
    check: Callable[[World], Finding]


def found(name: str, kind: str, made: World) -> Certificate:
    """The certificate of a row by its name."""
    return certificate(rows()[name], case(kind, made))


def unbiased(*names: str, kinds: Sequence[str] = REPORTED) -> Callable[[World], Finding]:
    """Every row is unbiased under every kind; the value is the largest relative bias."""

    def check(made: World) -> Finding:
        every = [found(name, kind, made) for name in names for kind in kinds]
        return Finding(all(one.unbiased for one in every), max(one.bias for one in every))

    return check


def biased(*names: str, kinds: Sequence[str] = MISMATCHED) -> Callable[[World], Finding]:
    """Every row is biased under every kind; the value is the median relative bias."""

    def check(made: World) -> Finding:
        every = [found(name, kind, made) for name in names for kind in kinds]
        return Finding(not any(one.unbiased for one in every), statistics.median(one.bias for one in every))

    return check


def more_biased(name: str, than: str, kinds: Sequence[str] = MISMATCHED) -> Callable[[World], Finding]:
    """The first row is at least as biased as the second; the value is the median ratio where the second is biased."""

    def check(made: World) -> Finding:
        pairs = [(found(name, kind, made).bias, found(than, kind, made).bias) for kind in kinds]
        ratios = [one / other for one, other in pairs if other > 1e-9]
        holds = all(one >= other - 1e-9 for one, other in pairs)
        return Finding(holds, statistics.median(ratios) if ratios else 1.0)

    return check


def expectation(row: Row, of: Case) -> Tensor:
    """(S, vocabulary) exact expectation of a row's estimate."""
    with in_float64():
        return moments(of.space, terms(row, of), of).mean


CAPPED = Row("", "", "", objective(TruncateWeight(level="sequence", max_weight=1.2)))
"""A cap on the product that is low enough to act under every kind of mismatch but the smallest."""


def towards_the_sampler(made: World) -> Finding:
    """A capped product weighs responses as a distribution nearer to the sampler; value: mean ratio of the distances.

    The distribution is q = min(pi, 1.2 mu), normalised; the distance is total variation, of q to mu over that of pi.
    """
    ratios = []
    for kind in MISMATCHED:
        of = case(kind, made)
        mu = of.sampling.sum(-1).exp()  # of a row with several versions: that of its own
        share = of.probability / mu
        target = of.space.logps(of.target).sum(-1).exp()
        capped = torch.minimum(target, 1.2 * mu) * share
        far = float((target * share - of.probability).abs().sum())
        ratios.append(float((capped / capped.sum() - of.probability).abs().sum()) / far)
    return Finding(max(ratios) < 1 + 1e-9, statistics.mean(ratios))


def towards_the_uncorrected_gradient(made: World) -> Finding:
    """The bias of a capped product has a positive component along that of no correction; value: mean cosine."""
    cosines = []
    for kind in MISMATCHED:
        of = case(kind, made)
        bias, whole = (expectation(row, of) - of.gradient for row in (CAPPED, rows()["no correction"]))
        if float(bias.norm()) > 1e-9 * float(of.gradient.norm()):
            cosines.append(float((bias * whole).sum() / (bias.norm() * whole.norm())))
    return Finding(all(cosine > 0 for cosine in cosines), statistics.mean(cosines) if cosines else 1.0)


def cap_decides(made: World) -> Finding:
    """A sequence cap of 2 is unbiased exactly where no ratio exceeds it; the value is the share of such kinds."""
    agree, free = [], []
    for kind in MISMATCHED:
        of = case(kind, made)
        product = (of.space.logps(of.target) - of.sampling).sum(-1).exp()
        free.append(bool((product <= 2.0).all()))
        agree.append(found("truncate sequence", kind, made).unbiased == free[-1])
    return Finding(all(agree), sum(free) / len(free))


def only_unbiased_weight(made: World) -> Finding:
    """Under the large perturbation every exact weight but the product is biased; the value is the least bias."""
    of = case("large", made)
    others = [row for row in rows().values() if row.group == "weights" and row.exact and row.name != "raw sequence"]
    biases = [certificate(row, of).bias for row in others]
    exact = certificate(rows()["raw sequence"], of)
    return Finding(exact.unbiased and min(biases) > 1e-9, min(biases))


def shaped_where_the_policies_agree(made: World) -> Finding:
    """Length 1 / (1 + gamma) and no angle; the value is the length with the example's gamma of 0.5."""
    one = found("shaped token", "none", made)
    return Finding(abs(one.length - 1 / 1.5) < 1e-9 and one.angle < 1e-4, one.length)


def action_advantages(made: World, of: Case) -> Case:
    """The case with the target's own advantage of every token given its prefix, Q(prefix, token) - V(prefix)."""
    over, probability = made.space, made.space.logps(made.target).sum(-1).exp()
    size = over.prefixes * over.vocabulary
    place = (over.state * over.vocabulary + over.token).flatten()
    by_token = torch.where(over.mask, probability.unsqueeze(-1), 0.0).flatten()
    rewarded = torch.where(over.mask, (probability * made.rewards).unsqueeze(-1), 0.0).flatten()
    mass = torch.zeros(size, dtype=torch.float64).index_add_(0, place, by_token)
    value = torch.zeros(size, dtype=torch.float64).index_add_(0, place, rewarded) / mass.clamp(min=1e-300)
    action = value.view(over.prefixes, over.vocabulary)
    advantage = action - (made.target.softmax(-1) * action).sum(-1, keepdim=True)
    by_response = advantage[of.space.state, of.space.token]
    return replace(of, token_advantages=torch.where(of.space.mask, by_response, 0.0))


def prefix_given_its_prefix(made: World) -> Finding:
    """With the target's own advantage of every token the raw prefix product is unbiased; value: largest bias."""
    row = rows()["raw prefix"]
    biases = [certificate(row, action_advantages(made, case(kind, made))).bias for kind in REPORTED]
    return Finding(max(biases) < 1e-11, max(biases))


def group_angle(made: World) -> Finding:
    """On-policy the mean over tokens of every response is not along the gradient; the value is the angle, degrees."""
    one = found("seq_mean_token_mean, no correction", "none", made)
    return Finding(one.angle > 0.1, one.angle)


CORRECTIONS, LOSSES = "docs/corrections.md", "trl_offpolicy/objective/losses/tokens.py"

CLAIMS: dict[str, Claim] = {
    "the product is unbiased": Claim(
        CORRECTIONS, "unbiased for a reward of the whole response", "largest bias", unbiased("raw sequence")
    ),
    "no other weight is": Claim(
        "trl_offpolicy/presets/catalog.py",
        "At level 'sequence' the only unbiased weight",
        "smallest bias of another weight, large perturbation",
        only_unbiased_weight,
    ),
    "token ratios are not": Claim(
        CORRECTIONS, "At level `token` it is biased by the uncorrected prefix", "median bias", biased("raw token")
    ),
    "a cap biases towards the sampler": Claim(
        CORRECTIONS,
        "biased towards the sampler where the cap acts",
        "distance to the sampler with cap 1.2 on the product, over that of the target",
        towards_the_sampler,
    ),
    "a cap biases the gradient towards the uncorrected one": Claim(
        CORRECTIONS,
        "biased towards the sampler where the cap acts",
        "mean cosine of both biases, cap 1.2 on the product",
        towards_the_uncorrected_gradient,
    ),
    "unbiased but for the cap": Claim(
        "trl_offpolicy/presets/catalog.py",
        "Unbiased but for the cap",
        "share of the kinds in which no product exceeds 2",
        cap_decides,
    ),
    "a band biases more than a cap": Claim(
        CORRECTIONS,
        "a token outside the band is lost, which biases more than a cap does",
        "bias of the band [0.5, 2] over that of the cap 2, token level",
        more_biased("band token", "truncate token"),
    ),
    "a shaped weight is biased everywhere": Claim(
        CORRECTIONS, "It is biased everywhere", "median bias", biased("shaped token", kinds=REPORTED)
    ),
    "a shaped weight where the policies agree": Claim(
        CORRECTIONS,
        "is 1 / (1 + gamma) instead of 1",
        "length of the expectation, gamma 0.5",
        shaped_where_the_policies_agree,
    ),
    "MinPRO is biased": Claim(
        CORRECTIONS,
        "biased, because the smallest ratio before the token takes the place of the product of the prefix",
        "median bias",
        biased("prefix_min"),
    ),
    "the prefix product, given its prefix": Claim(
        CORRECTIONS,
        "unbiased for a token given its prefix until a bound acts",
        "largest bias with the target's own advantage of every token",
        prefix_given_its_prefix,
    ),
    "plain policy gradient": Claim(
        LOSSES,
        'Unbiased on-policy, and off-policy with ``RawWeight(level="sequence",',
        "largest bias",
        unbiased("gpg, times the product"),
    ),
    "a mean over each response's tokens": Claim(
        "docs/objectives.md",
        "removing GSPO's preference for short responses",
        "angle on-policy, degrees",
        group_angle,
    ),
}
