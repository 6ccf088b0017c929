"""Keep masks (True = the token or sequence stays in the policy loss) and the statistics they decide on."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_mask, check_tokens, check_tokens_or_rows
from trl_offpolicy.functional.collective import gather_flat
from trl_offpolicy.functional.kl import k3
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP, expm1_of, probability_difference
from trl_offpolicy.functional.quantiles import quantile

Statistic = Literal["k1", "k2", "k3", "abs", "prob_diff", "binary_tv", "binary_kl", "binary_kl_both"]


def outlier_veto(
    log_ratios: Tensor, mask: Tensor, *, low: float | None, high: float | None, zero_outside: bool = False
) -> Tensor:
    """Drop a whole sequence if the ratio of any trainable token leaves [low, high].

        keep where log low <= min_t l_t and max_t l_t <= log high

    where l_t is the log-ratio of a trainable token.

    Args:
        log_ratios: (B, T) float32, nats.
        mask: (B, T) bool.
        low: smallest tolerated token ratio (e.g. 1e-4); None = open.
        high: largest tolerated token ratio (e.g. 100); None = open.
        zero_outside: ``log_ratios`` are already 0 outside ``mask``. This saves passes where a ratio of 1 is tolerated.

    Returns:
        (B, 1) bool; an empty row is kept.

    Reference: Liu, Li et al. 2025, "When speed kills stability" (veto); SkyRL ``outlier_token_is_threshold_*``.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    keep = torch.ones_like(mask[:, :1])
    if high is not None:
        inside = log_ratios if zero_outside and high >= 1 else torch.where(mask, log_ratios, -torch.inf)
        keep = keep & (inside.amax(-1, keepdim=True) <= math.log(high))
    if low is not None:
        inside = log_ratios if zero_outside and low <= 1 else torch.where(mask, log_ratios, torch.inf)
        keep = keep & (inside.amin(-1, keepdim=True) >= math.log(low))
    return keep


def off_policy_sequence_mask(mean_log_ratio: Tensor, advantages: Tensor, *, max_divergence: float) -> Tensor:
    """DeepSeek's off-policy sequence mask: drop negative-advantage tokens of sequences that drifted too far.

        drop where A < 0 and -mean_t log(pi / mu) > delta

    where the mean is over the trainable tokens of the response: a one-sided mask on the geometric mean ratio,
    rho_geo >= exp(-delta), for the sequences that would be pushed down.

    Args:
        mean_log_ratio: (B, 1) mean over trainable tokens of log(pi / mu), nats.
        advantages: (B, 1) or (B, T).
        max_divergence: delta, nats per token.

    Returns:
        bool of the shape of ``advantages``.

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv:2512.02556), Eq. 8-9.
    """
    check_tokens_or_rows((len(advantages), 1), mean_log_ratio=mean_log_ratio)
    return (advantages >= 0) | (-mean_log_ratio <= max_divergence)


def suffix_veto(log_ratios: Tensor, mask: Tensor, advantages: Tensor, *, low: float) -> Tensor:
    """mu-GRPO's negative-advantage veto: after a token that the policy finds impossible, nothing is pushed down.

        drop t where A_t < 0 and some k < t has A_k < 0 and l_k < log low

    where l is the log-ratio. The first such token k stays: its own ratio is nearly 0. What follows has ordinary ratios
    of its own, but a prefix that the policy would hardly write.

    Args:
        log_ratios: (B, T) float32, nats.
        mask: (B, T) bool.
        advantages: (B, 1) or (B, T).
        low: smallest token ratio that triggers nothing.

    Returns:
        (B, T) bool, True outside ``mask``.

    Reference: Tian et al. 2026, mu-GRPO (arXiv:2605.17570), the suffix mask after the trigger, exclusive.

    Example:
        >>> suffix_veto(torch.tensor([[1.0, 1e-5, 0.8, 1.2]]).log(), torch.ones(1, 4).bool(), -torch.ones(1, 1),
        ...             low=1e-4)
        tensor([[ True,  True, False, False]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    pushed_down = mask & (advantages < 0)
    trigger = pushed_down & (log_ratios < math.log(low))
    return ~(pushed_down & (trigger.cumsum(-1) > trigger.long()))


def second_moment_budget(log_ratios: Tensor, mask: Tensor, *, budget: float, across_ranks: bool) -> Tensor:
    r"""M2PO's trust region: drop the worst tokens until the rest is within the budget.

        mean over the kept tokens of l^2 <= budget

    where l is the log-ratio. The mean is over the whole call (and over all ranks). The worst tokens are those with the
    largest \|l\|; equal ones are dropped together. This bounds the chi-square divergence of the two policies.

    Args:
        log_ratios: (B, T) float32, nats.
        mask: (B, T) bool.
        budget: nats squared.
        across_ranks: one budget for all ranks; every rank must then make this call.

    Returns:
        (B, T) bool, True outside ``mask``.

    Reference: Zheng et al. 2025, M2PO (arXiv:2510.01161).

    Example:
        >>> second_moment_budget(torch.tensor([[0.1, -0.1, 2.0]]), torch.ones(1, 3).bool(), budget=0.04,
        ...                      across_ranks=False)
        tensor([[ True,  True, False]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    squares = log_ratios.square()
    everyone = torch.where(mask, squares, torch.inf)
    everyone = gather_flat(everyone, padding=torch.inf) if across_ranks else everyone.flatten()
    ordered = torch.nn.functional.pad(everyone.double(), (0, 1), value=torch.inf).sort().values  # at least one entry
    real = ordered < torch.inf
    mean = torch.where(real, ordered, 0.0).cumsum(0) / real.cumsum(0).clamp(min=1)
    # The mean over a growing sorted prefix never falls, so what cannot be afforded is one tail.
    limit = torch.where(real & (mean > budget), ordered, torch.inf).amin()
    return ~mask | (squares.double() < limit)


PREFIX_BUDGET_QUANTILE = 0.9
"""CPPO's adaptive budget starts from this quantile of the response's own divergences."""


def prefix_budget(
    divergences: Tensor, mask: Tensor, *, high: float, budget: float, min_weight: float, adaptive: bool
) -> Tensor:
    r"""CPPO's trust region: a threshold that is tighter early in the response, and a budget for each prefix.

        keep where w_t D_t <= min(delta, delta + delta_b W_{t-1} - S_{t-1})
        w_t = 1 - (1 - w_min) (t - 1) / (T - 1),   S_t = sum_{j<=t} w_j D_j,   W_t = sum_{j<=t} w_j

    where t = 1 ... T counts the tokens of ``mask``, D is ``divergences``, delta is ``high``, delta_b the budget and
    w_min ``min_weight``. A single token has weight 1. While the weighted mean S / W of the prefix is below delta_b, the
    threshold is delta / w_t, from delta at the first token to delta / w_min at the last. What the prefix spent above
    delta_b is taken off it. Tokens that do not fit stay in S and W. Heuristic: it bounds a sum that bounds the error of
    the token-level surrogate, but by the sampled tokens alone.

    Args:
        divergences: (B, T) float32, never negative; nats, or a probability.
        mask: (B, T) bool.
        high: delta, in the unit of ``divergences``.
        budget: delta_b, likewise.
        min_weight: w_min, in (0, 1]; 1 = the same threshold at every position.
        adaptive: delta_b of a response is the 90 % quantile of its own divergences, between ``budget`` and twice that.

    Returns:
        (B, T) bool, True outside ``mask``.

    Reference: Mao et al. 2026, CPPO (arXiv:2606.10968), Eq. 8 and 9 and Algorithm 1; ``adaptive``: Section 4.1, as in
    the authors' code for verl.

    Example:
        >>> prefix_budget(torch.tensor([[0.1, 0.1, 0.1, 0.1]]), torch.ones(1, 4).bool(), high=0.15, budget=0.02,
        ...               min_weight=1.0, adaptive=False)
        tensor([[ True, False, False, False]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, divergences=divergences)
    spent = torch.where(mask, divergences, 0.0).double()
    place = (mask.cumsum(-1) - 1).double()  # of a token on the mask, from 0
    last = (mask.sum(-1, keepdim=True) - 1).clamp(min=1)
    weights = torch.where(mask, 1 - (1 - min_weight) * place / last, 0.0)
    allowed: Tensor | float = budget
    if adaptive:
        allowed = _row_quantile(spent, mask, PREFIX_BUDGET_QUANTILE).clamp(budget, 2 * budget)
    weighted = weights * spent
    # The sums up to the token before: a token is judged by its prefix.
    before, places = weighted.cumsum(-1) - weighted, weights.cumsum(-1) - weights
    threshold = (high + allowed * places - before).clamp(max=high)
    return ~mask | (weighted <= threshold)


def _row_quantile(values: Tensor, mask: Tensor, q: float) -> Tensor:
    """(B, 1) quantile of each row's values on ``mask``, linear between two of them; very large for an empty row."""
    ordered = torch.where(mask, values, torch.finfo(values.dtype).max).sort(-1).values
    last = (mask.sum(-1, keepdim=True) - 1).clamp(min=0)
    rank = q * last.double()
    below = rank.floor().long()
    low, high = ordered.gather(-1, below), ordered.gather(-1, torch.minimum(below + 1, last))
    return low + (rank - below) * (high - low)


STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
PROBABILITY_STATISTICS: tuple[Statistic, ...] = ("prob_diff", "binary_tv", "binary_kl", "binary_kl_both")
"""Statistics that need the probabilities, not only their ratio."""


def divergence(log_ratios: Tensor, statistic: str, denominator_logps: Tensor | None = None) -> Tensor:
    r"""Per-token divergence statistic of two policies.

    With l = log(p / q) clamped to +-20 nats (as verl does), q the denominator (the policy that sampled). p itself is
    taken from the unclamped l, so that a token that q finds impossible has p - q = p, not 0:

    - k1 = -l (unbiased, signed), k2 = l^2 / 2 (biased, never negative), k3 = exp(l) - 1 - l (unbiased, never negative,
      :func:`~.kl.k3`); all estimate KL(q || p), nats.
    - abs = \|l\|, nats.
    - prob_diff = p - q of the sampled token, in [-1, 1]; binary_tv = \|p - q\|, the total variation of
      "this token or another".
    - binary_kl = KL of the same two-way split, q log(q / p) + (1 - q) log((1 - q) / (1 - p)), nats.
    - binary_kl_both = the larger of that KL and the one from p to q, with p and q clamped to [1e-6, 1 - 1e-6], nats.

    The binary divergences are lower bounds of the full ones: merging all other tokens loses information.

    Args:
        log_ratios: (B, T) float32.
        statistic: one of :data:`STATISTICS`.
        denominator_logps: (B, T) log q, needed by the last four; where it is not finite the result is not usable.

    Raises:
        ValueError: unknown statistic, or ``denominator_logps`` missing.

    Reference: Schulman 2020, "Approximating KL divergence"; Qi et al. 2026, DPPO (arXiv:2602.04879), binary TV and KL;
    Guo et al. 2026, KPop (ringtech.notion.site/kpop), both directions, clamped as in prime-rl pull request 3283.
    """
    unclamped, log_ratios = log_ratios, log_ratios.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    if statistic == "k1":
        return -log_ratios
    if statistic == "k2":
        return log_ratios.square() / 2
    if statistic == "k3":
        return k3(log_ratios)
    if statistic == "abs":
        return log_ratios.abs()
    if statistic not in STATISTICS:
        raise ValueError(f"statistic must be one of {list(STATISTICS)}, but got {statistic!r}.")
    if denominator_logps is None:
        raise ValueError(f"denominator_logps must be given for statistic {statistic!r}, but got None.")
    check_tokens(log_ratios.shape, denominator_logps=denominator_logps)
    q = denominator_logps.float().exp()
    difference = probability_difference(denominator_logps.float(), q, unclamped, expm1_of(log_ratios))
    if statistic == "prob_diff":
        return difference
    if statistic == "binary_kl_both":
        return _binary_kl_both(q, q + difference)
    return difference.abs() if statistic == "binary_tv" else _binary_kl(q, difference, log_ratios)


_SMALLEST = 1e-7
"""Least probability mass of the other tokens: below it float32 cannot tell 1 - p from 0."""


def _binary_kl(q: Tensor, difference: Tensor, log_ratios: Tensor) -> Tensor:
    """KL of "this token or another", never negative: of Bernoulli(q) from Bernoulli(p), p = q + ``difference``."""
    rest = (1 - q).clamp(min=_SMALLEST)
    other = (1 - q - difference).clamp(min=_SMALLEST)
    return (-q * log_ratios + rest * (rest.log() - other.log())).clamp(min=0.0)


_KPOP_FLOOR = 1e-6
"""KPop's least probability of the token and of all other tokens together."""


def _binary_kl_both(q: Tensor, p: Tensor) -> Tensor:
    """The larger of the KL from Bernoulli(q) to Bernoulli(p) and the one from p to q, never negative."""
    # "Another token" is clamped by itself: 1 - 1e-6 in float32 would leave 1.01e-6 for it.
    token_p, other_p, token_q, other_q = (x.clamp(_KPOP_FLOOR, 1 - _KPOP_FLOOR) for x in (p, 1 - p, q, 1 - q))
    token, other = token_p.log() - token_q.log(), other_p.log() - other_q.log()
    from_p = token_p * token + other_p * other
    from_q = -(token_q * token + other_q * other)
    return torch.maximum(from_p, from_q).clamp(min=0.0)


def high_entropy_mask(entropies: Tensor, mask: Tensor, *, top: float) -> Tensor:
    """Keep the tokens with the highest entropies of all ranks' micro-batches. All ranks call it.

        keep where H_t >= quantile_{1 - top}(H)

    where H holds the entropies of the trainable tokens of all ranks, and the quantile interpolates linearly.

    Args:
        entropies: (B, T), nats.
        mask: (B, T) bool, trainable tokens.
        top: share to keep, in [0, 1]; 0 keeps the highest alone.

    Returns:
        (B, T) bool, no grad; False outside ``mask``.

    Example:
        >>> high_entropy_mask(torch.tensor([[0.1, 2.0, 0.7]]), torch.tensor([[True, True, True]]), top=0.5)
        tensor([[False,  True,  True]])

    Reference: Wang et al. 2025, "Beyond the 80/20 rule" (arXiv:2506.01939); TRL's ``get_high_entropy_mask``.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, entropies=entropies)
    own = entropies.detach().float()
    everyone = gather_flat(torch.where(mask, own, -torch.inf), padding=-torch.inf)
    everyone = everyone[everyone > -torch.inf]
    if not len(everyone):
        return torch.zeros_like(mask)
    return mask & (own >= quantile(everyone, 1 - top))
