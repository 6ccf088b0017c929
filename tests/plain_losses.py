"""The published formula of every policy loss, one token at a time in float64. Nothing is shared with the package.

A formula gets :class:`Case`, whose rows hold only trainable tokens as 0-d tensors, and returns ``{(row, position):
loss}``; autograd differentiates it. ``sg`` is the stop-gradient of the papers.
"""

import math
import statistics
from dataclasses import dataclass

import torch

from trl_offpolicy import losses


@dataclass
class Row:
    """The trainable tokens of one response."""

    at: list[int]
    current: list
    centre: list
    sampling: list
    entropy: list[float]
    advantage: float
    reward: float
    group: int

    @property
    def ratios(self):
        return [torch.exp(p - q) for p, q in zip(self.current, self.centre, strict=True)]

    @property
    def geometric(self):
        """(pi(y) / pi_old(y)) ^ (1 / |y|)."""
        return torch.exp(sum(p - q for p, q in zip(self.current, self.centre, strict=True)) / len(self.at))


@dataclass
class Case:
    """All rows that have a trainable token, by their index."""

    rows: dict[int, Row]

    def tokens(self):
        for index, row in self.rows.items():
            for k, position in enumerate(row.at):
                yield (index, position), row, k

    def group(self, row):
        return [other for other in self.rows.values() if other.group == row.group]


def sg(value):
    return value.detach()


def clip(value, low, high):
    return torch.clamp(value, low, high)


def clipped(ratio, advantage, low, high):
    return -torch.minimum(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def by_token(function):
    """A formula from ``function(row, k)``."""
    return lambda case: {key: function(row, k) for key, row, k in case.tokens()}


def by_response(function):
    """A formula from ``function(row)``: one loss for all tokens of the response."""

    def formula(case):
        values = {index: function(row) for index, row in case.rows.items()}
        return {key: values[key[0]] for key, _, _ in case.tokens()}

    return formula


def dual_clip(row, k):
    value = clipped(row.ratios[k], row.advantage, 0.2, 0.2)
    return torch.clamp(value, max=-1.2 * row.advantage) if row.advantage < 0 else value


def ppo_is(row, k):
    return clipped(torch.exp(row.current[k] - row.sampling[k]), row.advantage, 0.1, 0.2)


def cispo(row, k):
    return -sg(clip(row.ratios[k], 0.9, 1.1)) * row.advantage * row.current[k]


def sapo(row, k):
    tau = 2.0 if row.advantage > 0 else 3.0
    return -4 / tau / (1 + torch.exp(-tau * (row.ratios[k] - 1))) * row.advantage


def aspo(row, k):
    new, old, a = row.current[k], row.centre[k], row.advantage
    if a > 0:  # pi_old pi / sg(pi)^2
        value = torch.exp(old + new - 2 * sg(new))
    else:
        value = torch.exp(new - old)
        if value < 0.8:
            return -0.8 * a + 0 * new
    return -(1.3 * torch.exp(new - sg(new)) if value > 1.3 else value) * a


def dispo(row, k):
    low, high = (0.5, 0.2) if row.reward >= 0.5 else (0.1, 0.3)
    return -sg(clip(row.ratios[k], 1 - low, 1 + high)) * row.advantage * row.current[k]


def dro(row, k):
    return -(row.current[k] * row.advantage - 0.3 / 2 * (row.current[k] - row.centre[k]) ** 2)


def dppo(divergence, low, high, most):
    def loss(row, k):
        p, q = torch.exp(row.current[k]), torch.exp(row.centre[k])
        kl = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
        distance = abs(p - q) if divergence == "tv" else kl
        out = (row.advantage > 0 and p > q and distance > high) or (row.advantage <= 0 and p < q and distance > low)
        return 0 * row.current[k] if out else -sg(clip(p / q, 0, most)) * row.advantage * row.current[k]

    return by_token(loss)


def m2po(case):
    budget, moved = 0.01, {}
    for key, row, k in case.tokens():
        step = (row.current[k] - row.centre[k]).item()
        if step * row.advantage > 0:
            moved[key] = step**2
    kept, worst_first = dict(moved), sorted(moved, key=moved.get, reverse=True)
    while kept and statistics.fmean(kept.values()) > budget:
        del kept[worst_first.pop(0)]
    out = set(moved) - set(kept)
    return {key: 0 * row.current[k] if key in out else -row.ratios[k] * row.advantage for key, row, k in case.tokens()}


def p3o(case):
    tokens = list(case.tokens())
    ratios = [row.ratios[k].item() for _, row, k in tokens]
    ess = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
    found = {}
    for key, row, k in tokens:
        r = row.ratios[k]
        kl = torch.log(r) + 1 / r - 1
        found[key] = -min(r.item(), ess) * row.current[k] * row.advantage + (1 - ess) * kl
    return found


def covariances(case):
    everyone = list(case.tokens())
    mean_a = statistics.fmean(row.advantage for _, row, _ in everyone)
    mean_logp = statistics.fmean(row.current[k].item() for _, row, k in everyone)
    return {key: (row.advantage - mean_a) * (row.current[k].item() - mean_logp) for key, row, k in everyone}


def clip_cov(case):
    found, covariance = {}, covariances(case)
    for key, row, k in case.tokens():
        ratio, a = row.ratios[k], row.advantage
        at_clip = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
        taken = not at_clip and 0.3 < covariance[key] < 2.0
        found[key] = 0 * ratio if taken else clipped(ratio, a, 0.2, 0.2)
    return found


def kl_cov(case):
    covariance = covariances(case)
    worst = set(sorted(covariance, key=covariance.get, reverse=True)[: int(0.3 * len(covariance))])
    return {
        key: -row.ratios[k] * row.advantage + (key in worst) * 0.7 * abs(row.current[k] - row.centre[k])
        for key, row, k in case.tokens()
    }


def r2vpo(case):
    found = {}
    for key, row, k in case.tokens():
        variance = statistics.pvariance([ratio.item() for other in case.group(row) for ratio in other.ratios])
        narrower = 1 + variance / 0.05
        found[key] = clipped(row.ratios[k], row.advantage, 0.2 / narrower, 0.3 / narrower)
    return found


def quatro(case):
    found = {}
    for key, row, k in case.tokens():
        multiplier = math.sqrt(statistics.pvariance([other.reward for other in case.group(row)]) / (2 * 0.02))
        r = row.ratios[k]
        found[key] = -r * row.advantage + multiplier * (r * torch.log(r) - r + 1)
    return found


def gspo_token(row, k):
    s = sg(row.geometric) * torch.exp(row.current[k]) / sg(torch.exp(row.current[k]))
    return clipped(s, row.advantage, 0.03, 0.04)


def gmpo(row):
    sign = math.copysign(1.0, row.advantage)
    logs = [p - q for p, q in zip(row.current, row.centre, strict=True)]
    least = [sign * torch.minimum(sign * x, sign * clip(x, -0.2, 0.3)) for x in logs]
    return -row.advantage * torch.exp(sum(least) / len(least))


def tbpo(row):
    s = row.geometric
    band = clip(s, 1 - 0.02, 1 + 0.03) if row.advantage < 0 else torch.clamp(s, max=1.01)
    return -band * row.advantage


def vespo(row, k):
    w = math.prod(ratio.item() for ratio in row.ratios)
    shape, rate = (2.0, 3.0) if row.advantage >= 0 else (3.0, 2.0)
    return -math.exp(rate) * w**shape * math.exp(-rate * w) * row.advantage * row.current[k]


def topr(row, k):
    rho = math.prod(math.exp(p.item() - m.item()) for p, m in zip(row.current, row.sampling, strict=True))
    return -(min(rho, 1.0) if row.advantage < 0 else 1.0) * row.advantage * row.current[k]


def oapl(case):
    def loss(row):
        soft = 0.5 * math.log(statistics.fmean(math.exp(other.reward / 0.5) for other in case.group(row)))
        log_ratio = sum(p - m for p, m in zip(row.current, row.sampling, strict=True))
        return (0.2 * log_ratio - (row.reward - soft)) ** 2

    return by_response(loss)(case)


def espo(row, k):
    size = math.ceil(0.4 * len(row.at))
    order = sorted(range(len(row.at)), key=lambda i: -row.entropy[i])
    groups = [group for group in (order[:size], order[size:]) if group]
    mine = next(group for group in groups if k in group)
    s = torch.exp(sum(row.current[i] - row.centre[i] for i in mine) / len(mine))
    s = sg(s) * torch.exp(row.current[k] - sg(row.current[k]))
    epsilon = 0.2 / math.log(50) * statistics.fmean(row.entropy[i] for i in mine)
    return len(row.at) / (len(groups) * len(mine)) * clipped(s, row.advantage, epsilon, epsilon)


def turns(row):
    """Runs of neighbouring positions."""
    found = []
    for k, position in enumerate(row.at):
        if k and position == row.at[k - 1] + 1:
            found[-1].append(k)
        else:
            found.append([k])
    return found


def st_ppo(row, k):
    turn = next(turn for turn in turns(row) if k in turn)
    s = torch.exp(sum(row.current[i] - row.centre[i] for i in turn) / len(turn))
    s = sg(s) * torch.exp(row.current[k] - sg(row.current[k]))
    bound = (lambda r: r > 1.2) if row.advantage > 0 else (lambda r: r < 0.8)
    outside = sum(row.ratios[i].item() for i in turn if bound(row.ratios[i])) / len(turn)
    return clipped(s, row.advantage, 0.2, 0.2) / (1 + outside)


def fipo(row, k):
    gamma, future = 2 ** (-1 / 1.5), 0.0
    for j in range(k, len(row.at)):
        r = row.ratios[j].item()
        future += gamma ** (row.at[j] - row.at[k]) * math.log(r) * (r <= 1.5)
    f = min(max(math.exp(future), 0.85), 1.25)
    if row.advantage < 0 and row.ratios[k] > 1.1:
        f = min(f, 1.0)
    value = clipped(row.ratios[k], row.advantage * f, 0.2, 0.28)
    return torch.clamp(value, max=-1.5 * row.advantage * f) if row.advantage < 0 else value


def qurl(row, k):
    """min(rho, C) = c rho defines c; the upper clip is at (1 + eps) / c."""
    rho = math.exp(row.centre[k].item() - row.sampling[k].item())
    c = min(rho, 1.1) / rho
    a, r = row.advantage, row.ratios[k]
    return -torch.minimum(r * a, clip(r, 1 - 0.2, (1 + 0.1) / c) * a)


def ctpo(row, k):
    """As the authors' code has it: the prefix is stopped, the clip is in log space, the dual clip where A < 0."""
    before = math.prod(ratio.item() for ratio in row.ratios[:k])
    r, a, root = before * row.ratios[k], row.advantage, math.sqrt(k + 1)
    held = torch.exp(clip(torch.log(r), -0.1 * root, 0.15 * root))
    value = torch.maximum(-a * r, -a * held)
    return torch.clamp(value, max=-a * math.exp(0.3 * root)) if a < 0 else value


FORMULAS = {
    "ppo": (
        losses.PPOClip(low=0.2, high=0.3),
        by_token(lambda row, k: clipped(row.ratios[k], row.advantage, 0.2, 0.3)),
    ),
    "ppo, dual clip": (losses.PPOClip(dual_clip=1.2), by_token(dual_clip)),
    "ppo is": (losses.PPOIS(low=0.1, high=0.2), by_token(ppo_is)),
    "cispo": (losses.CISPO(low=0.9, high=1.1), by_token(cispo)),
    "gpg": (losses.GPG(), by_token(lambda row, k: -row.advantage * row.current[k])),
    "sapo": (losses.SAPO(temperature_pos=2.0, temperature_neg=3.0), by_token(sapo)),
    "aspo": (losses.ASPO(low=0.2, max_weight=1.3), by_token(aspo)),
    "dispo": (
        losses.DISPO(correct_threshold=0.5, low_correct=0.5, high_correct=0.2, low_incorrect=0.1, high_incorrect=0.3),
        by_token(dispo),
    ),
    "dro": (losses.DRO(beta=0.3), by_token(dro)),
    "dppo tv": (losses.DPPO(low=0.02, high=0.03, max_ratio=1.1), dppo("tv", 0.02, 0.03, 1.1)),
    "dppo kl": (losses.DPPO(divergence="kl", low=0.004, high=0.003), dppo("kl", 0.004, 0.003, 20.0)),
    "m2po": (losses.M2PO(budget=0.01), m2po),
    "p3o": (losses.P3O(), p3o),
    "clip cov": (losses.ClipCov(fraction=1.0, cov_low=0.3, cov_high=2.0), clip_cov),
    "kl cov": (losses.KLCov(fraction=0.3, coef=0.7), kl_cov),
    "r2vpo": (losses.R2VPO(low=0.2, high=0.3), r2vpo),
    "quatro": (losses.QUATRO(radius=0.02, scope="micro_batch"), quatro),
    "gspo": (
        losses.GSPO(low=0.03, high=0.04),
        by_response(lambda row: clipped(row.geometric, row.advantage, 0.03, 0.04)),
    ),
    "gspo token": (losses.GSPOToken(low=0.03, high=0.04), by_token(gspo_token)),
    "luspo": (
        losses.LUSPO(low=0.05, high=0.05),
        by_response(lambda row: clipped(row.geometric, row.advantage, 0.05, 0.05)),
    ),
    "gmpo": (losses.GMPO(low=0.2, high=0.3), by_response(gmpo)),
    "vespo": (losses.VESPO(), by_token(vespo)),
    "tbpo": (losses.TBPO(high=0.01, negative_low=0.02, negative_high=0.03), by_response(tbpo)),
    "topr": (losses.TOPR(), by_token(topr)),
    "oapl": (losses.OAPL(beta=0.2, value_beta=0.5, scope="micro_batch"), oapl),
    "espo": (losses.ESPO(vocab_size=50, alpha=0.2, high_entropy_fraction=0.4), by_token(espo)),
    "st-ppo": (losses.STPPO(), by_token(st_ppo)),
    "qurl": (losses.QuRL(low=0.2, high=0.1, max_weight=1.1), by_token(qurl)),
    "ctpo": (losses.CTPO(low=0.1, high=0.15, dual_clip=0.3), by_token(ctpo)),
    "fipo": (
        losses.FIPO(half_life=1.5, influence_low=0.15, influence_high=0.25, dual_clip=1.5, safe_ratio=1.1),
        by_token(fipo),
    ),
}
"""Name: the loss, and its formula with the same settings."""
