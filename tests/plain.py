"""Levels, statistics, weights and keep terms once more, in plain Python floats and loops over one token at a time.

Rows are lists; ``mask`` is a list of lists of bool. Nothing here is shared with ``trl_offpolicy``.
"""

import math

import torch

SMALLEST_REST = 1e-7  # what binary_kl leaves for the other tokens, at least


def random_case(seed, rows=6, length=9, scale=1.0):
    """Log-ratios (B, T), a mask with holes, empty and full rows, turn ids and negative group ids."""
    generator = torch.Generator().manual_seed(seed)
    log_ratios = scale * torch.randn(rows, length, generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0], mask[-1] = True, False
    turn_ids = torch.randint(-1, 3, (rows, length), generator=generator)
    group_ids = torch.randint(-2, 2, (rows,), generator=generator)
    return log_ratios, mask, turn_ids, group_ids


def turns(mask, ids=None):
    """Positions of each turn, a list of lists for one row."""
    found, before = [], None
    for position, inside in enumerate(mask):
        key = ids[position] if ids is not None else (bool(inside) or None)
        if key is not None and key != before:
            found.append([])
        if key is not None and inside:
            found[-1].append(position)
        before = key
    return [turn for turn in found if turn]


def mean(values):
    return sum(values) / len(values) if values else 0.0


ROW = {
    "sequence": sum,
    "sequence_mean": mean,
    "sequence_max": lambda values: max(values, default=0.0),
    "sequence_min": lambda values: min(values, default=0.0),
}


def aggregate(values, mask, level, turn_ids=None, group_ids=None):
    """Nested list, (B, T) for the token levels and (B, 1) for the others."""
    inside = [[float(v) for v, m in zip(row, keep, strict=True) if m] for row, keep in zip(values, mask, strict=True)]
    if level in ROW:
        return [[float(ROW[level](row))] for row in inside]
    if level == "group":
        means = [
            mean([mean(row) for row, other in zip(inside, group_ids, strict=True) if row and other == group])
            for group in group_ids
        ]
        return [[value] for value in means]
    out = [[0.0] * len(row) for row in mask]
    for b, (row, keep) in enumerate(zip(values, mask, strict=True)):
        if level in ("turn", "turn_mean"):
            for turn in turns(keep, None if turn_ids is None else turn_ids[b]):
                total = sum(float(row[t]) for t in turn)
                for t in turn:
                    out[b][t] = total / (len(turn) if level == "turn_mean" else 1)
        else:
            for t in range(len(row)):
                if keep[t]:
                    out[b][t] = sum(float(row[s]) for s in range(t + 1) if keep[s] and (level == "prefix" or s == t))
    return out


def ratio(log_ratio):
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def divergence(statistic, log_p, log_q):
    """One token, from the two log-probs."""
    log_ratio = log_p - log_q
    p, q = math.exp(log_p), math.exp(log_q)
    if statistic == "binary_kl":
        rest, other = max(1 - q, SMALLEST_REST), max(1 - p, SMALLEST_REST)
        return max(q * math.log(q / p) + rest * math.log(rest / other), 0.0)
    if statistic == "binary_kl_both":
        p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
        return max(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p)))
    return {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": p / q - 1 - log_ratio,
        "abs": abs(log_ratio),
        "prob_diff": p - q,
        "binary_tv": abs(p - q),
    }[statistic]


def ess(weights):
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def ess_cap(ratios, target):
    """Largest cap that reaches the target, by 80 bisections in the logarithm."""
    if ess(ratios) >= target:
        return math.inf
    low, high = math.log(min(ratios)), math.log(max(ratios))
    for _ in range(80):
        middle = (low + high) / 2
        if ess([min(r, math.exp(middle)) for r in ratios]) >= target:
            low = middle
        else:
            high = middle
    return math.exp(low)


def affordable(log_ratios, budget):
    """Which of a flat list stay: drop the worst (equal ones together) until the mean square is within the budget."""
    kept = list(range(len(log_ratios)))
    while kept and mean([log_ratios[i] ** 2 for i in kept]) > budget:
        worst = max(log_ratios[i] ** 2 for i in kept)
        kept = [i for i in kept if log_ratios[i] ** 2 < worst]
    return [i in kept for i in range(len(log_ratios))]


def quantile(values, q):
    """Linear between the two values next to the rank q (n - 1)."""
    ordered, rank = sorted(values), q * (len(values) - 1)
    low = ordered[math.floor(rank)]
    return low + (rank - math.floor(rank)) * (ordered[math.ceil(rank)] - low)


def cppo(divergences, ratios, advantages, *, high, budget, min_weight, adaptive):
    """Which tokens of one response stay: Algorithm 1 of CPPO, line by line."""
    if adaptive and divergences:
        budget = min(max(quantile(divergences, 0.9), budget), 2 * budget)
    s, w, kept = 0.0, 0.0, []
    for t, (d, rho, a) in enumerate(zip(divergences, ratios, advantages, strict=True), start=1):
        weight = 1 - (1 - min_weight) / (len(divergences) - 1) * (t - 1) if len(divergences) > 1 else 1.0
        z = weight * d
        c = min(high, high + budget * w - s)
        kept.append(a * (rho - 1) <= 0 or z <= c)
        s, w = s + z, w + weight
    return kept


def suffix_veto(ratios, advantages, low):
    """Which tokens of one response stay."""
    kept, triggered = [], False
    for rho, a in zip(ratios, advantages, strict=True):
        kept.append(not (triggered and a < 0))
        triggered = triggered or (a < 0 and rho < low)
    return kept
