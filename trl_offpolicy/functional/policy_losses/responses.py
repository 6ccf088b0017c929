"""Policy losses that look at a response beyond one ratio: its product of ratios, its entropy groups, its turns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_broadcast, check_mask, check_tokens, check_tokens_or_rows
from trl_offpolicy.functional.levels import aggregate
from trl_offpolicy.functional.log_ratios import ratio_of
from trl_offpolicy.functional.policy_losses.common import LossTerms, unit_ratio
from trl_offpolicy.functional.policy_losses.tokens import ppo_clip


def future_influence(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    half_life: float,
    low: float,
    high: float,
    max_ratio: float | None,
    safe_ratio: float | None,
) -> Tensor:
    """FIPO's factor of the advantage: whether the policy has moved towards the text from this token on.

        f_t = clip(exp(F_t), 1 - low, 1 + high),   F_t = sum_{k >= t} gamma^(k - t) M_k log r_k,   gamma = 2^(-1 / h)

    where r = pi / pi_old, h is ``half_life``, and M_k is 1 on trainable tokens with r_k <= ``max_ratio``, else 0. The
    distance k - t is in positions, so a tool's output counts in it. Above 1, what followed the token has become more
    likely. Where A < 0 and r_t > ``safe_ratio``, f_t is at most 1, so that a token is not punished even more.

    Args:
        log_ratios: (B, T) log(pi / pi_old), nats; its gradient is stopped.
        advantages: (B, 1) or (B, T), no gradient; their sign is read.
        mask: (B, T) bool, trainable tokens.
        half_life: h, positions, after which a token counts half.
        low: at most 1; 0 = the factor never falls below 1.
        high: the factor is at most 1 + high.
        max_ratio: a token above it has no part in the sum; None = all have.
        safe_ratio: None = no such limit.

    Returns:
        (B, T) of the dtype of ``log_ratios``, no gradient; 1 outside ``mask``.

    Reference: Ma et al. 2026, FIPO (arXiv:2603.19835), as in the authors' code for verl and ms-swift 3602360a5.
    ms-swift also keeps the factor of a token beyond ``safe_ratio`` at 0.8 or more, which acts where ``low`` > 0.2.

    Example:
        >>> future_influence(torch.tensor([[2.0, 0.5]]).log(), torch.ones(1, 1), torch.ones(1, 2).bool(), half_life=1.0,
        ...                  low=0.9, high=9.0, max_ratio=None, safe_ratio=None)
        tensor([[1.4142, 0.5000]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    here = log_ratios.detach()
    counted = mask if max_ratio is None else mask & (here <= math.log(max_ratio))
    future = _discounted_rest(torch.where(counted, here, 0.0).double(), half_life)
    influence = ratio_of(future).clamp(1 - low, 1 + high)
    if safe_ratio is not None:
        risky = (advantages < 0) & (here > math.log(safe_ratio))
        influence = torch.where(risky, influence.clamp(max=1.0), influence)
    return torch.where(mask, influence, 1.0).to(log_ratios.dtype)


_HALF_LIVES = 32
"""Half-lives that one block of the discounted sum spans; the smallest weight in it is 2^-32."""


def _discounted_rest(values: Tensor, half_life: float) -> Tensor:
    """sum_{k >= t} 2^(-(k - t) / half_life) v_k for each t; (B, T) float64."""
    length = values.shape[-1]
    size = max(1, min(length, int(_HALF_LIVES * half_life)))
    carry = torch.zeros_like(values[:, :1])
    blocks: list[Tensor] = []
    # From the last block to the first. Within one, divide by gamma^t what a plain sum of gamma^k v_k has too much.
    for end in range(length, 0, -size):
        block = values[:, max(0, end - size) : end]
        steps = torch.arange(block.shape[-1], device=values.device, dtype=values.dtype)
        decay = torch.exp2(-steps / half_life)
        inside = (block * decay).flip(-1).cumsum(-1).flip(-1) / decay
        rest = inside + carry * torch.exp2((steps - len(steps)) / half_life)
        carry = rest[:, :1]
        blocks.append(rest)
    return torch.cat(blocks[::-1], -1)


def topr(
    sampling_log_ratios: Tensor, logps: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float
) -> LossTerms:
    """TOPR: supervised where the advantage is positive, importance-weighted and capped where it is negative.

        -A log pi where A >= 0, -sg[clip(rho, low, high)] A log pi where A < 0

    where rho = pi(y) / mu(y) is the ratio of the whole response and sg stops the gradient. What carries gradient: log
    pi alone; the taper is detached. Biased where A >= 0 (no weight, as in supervised training), and by the cap where A
    < 0.

    Args:
        sampling_log_ratios: (B, T) log(pi / mu); its gradient is stopped.
        logps: (B, T) log pi, carries gradient.
        advantages: no gradient. The paper has the reward less a constant here, so that its sign is the reward's.
        mask: (B, T) bool.
        low: lower end of the taper; 0 in the paper.
        high: its upper end; 1 in the paper.

    Returns:
        ``gate`` is the weight of the response, (B, 1) or (B, T).

    Reference: Le Roux et al. 2025, TOPR (arXiv:2503.14286): the ratio is the product over the trajectory (its log is
    clamped to +-20 nats here), not the geometric mean.
    """
    check_tokens(mask.shape, sampling_log_ratios=sampling_log_ratios, logps=logps)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    taper = ratio_of(aggregate(sampling_log_ratios.detach(), mask, "sequence")).clamp(low, high)
    weight = torch.where(advantages < 0, taper, 1.0)
    return LossTerms(-weight * advantages * logps, gate=weight)


def oapl(sampling_log_ratios: Tensor, rewards: Tensor, value: Tensor, mask: Tensor, *, beta: float) -> LossTerms:
    """OAPL: a regression of the response's log-ratio on its optimal advantage.

        (beta log(pi(y) / mu(y)) - (R - V))^2

    where y is the response, R its reward and V the value of its query. What carries gradient: log pi(y), with weight 2
    beta (beta log(pi / mu) - (R - V)). No importance weight and no clip; the minimiser is the optimum of reward - beta
    KL(pi || mu) whatever the lag, if V is exact. At pi = mu the gradient is 2 beta times the policy gradient of the
    response with the advantage R - V.

    Args:
        sampling_log_ratios: (B, T) log(pi / mu), carries gradient.
        rewards: (B, 1).
        value: (B, 1) V of the row's query, see :func:`soft_value`.
        mask: (B, T) bool.
        beta: strength of the KL term, in reward per nat.

    Returns:
        Loss (B, 1).

    Reference: Ritter et al. 2026, OAPL (arXiv:2602.19362), Eq. 3.
    """
    check_tokens_or_rows((len(mask), 1), rewards=rewards, value=value)
    log_ratio = aggregate(sampling_log_ratios, mask, "sequence")
    return LossTerms((beta * log_ratio - (rewards - value)).square())


def soft_value(rewards: Tensor, counted: Tensor, *, beta: float) -> Tensor:
    """The value of a query from its rewards: for small beta the largest of them, for large beta their mean.

        V = beta log mean_j exp(R_j / beta)

    where j runs over the counted rewards of a row.

    Args:
        rewards: (B, N).
        counted: (B, N) bool.
        beta: temperature, in units of reward.

    Returns:
        (B, 1); 0 for a row without any.

    Example:
        >>> soft_value(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2).bool(), beta=1.0)
        tensor([[0.6201]])
    """
    check_mask(counted=counted)
    check_tokens(counted.shape, rewards=rewards)
    count = counted.sum(-1, keepdim=True)
    scaled = torch.where(counted, rewards / beta, -torch.inf)
    # The largest is taken out of the exponential, so that it cannot overflow.
    top = torch.where(count > 0, scaled.amax(-1, keepdim=True), 0.0)
    total = (scaled - top).exp().sum(-1, keepdim=True)
    return torch.where(count > 0, beta * (top + (total / count.clamp(min=1)).log()), 0.0)


def entropy_groups(entropies: Tensor, mask: Tensor, *, fraction: float) -> Tensor:
    """(B, T) bool: the ``fraction`` (rounded up) of each response's tokens with the highest entropy; ties in order."""
    check_mask(mask=mask)
    check_tokens(mask.shape, entropies=entropies)
    ranked = torch.where(mask, entropies, -torch.inf).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    share = mask.sum(-1, keepdim=True).double() * fraction
    count = (share * (1 - 1e-9)).ceil()  # 0.3 of 100 tokens may be a little more than 30 in floating point
    return mask & (ranked < count)


def espo(
    log_ratios: Tensor,
    advantages: Tensor,
    entropies: Tensor,
    mask: Tensor,
    *,
    high_entropy_fraction: float,
    clip_scale: float,
) -> LossTerms:
    """ESPO: GSPO-token within two entropy groups of a response, each with its own clip range.

        -min(s_t A, clip(s_t, 1 - epsilon_g, 1 + epsilon_g) A), s_t = sg[s_g] pi_t / sg[pi_t]

    where s_g is the geometric mean ratio of the token's group g and epsilon_g = c times its mean entropy. Both groups
    of a response weigh the same (Eq. 5), for the mean over the response's tokens. What carries gradient: pi_t where the
    group is not clipped. Biased, as GSPO.

    Args:
        log_ratios: (B, T) log(pi / pi_old), carries gradient.
        advantages: no gradient.
        entropies: (B, T) nats; no gradient.
        mask: (B, T) bool.
        high_entropy_fraction: share of a response's tokens in the high-entropy group.
        clip_scale: c, alpha / log(vocabulary).

    Reference: Sheng et al. 2025, ESPO (arXiv:2512.00499), Eq. 5-10; used by CompassMax (arXiv:2512.07710). Eq. 9
    prints pi_old in the denominator of the token factor, so that the ratio would count twice. This kit follows the
    paper's words, "the same way as GSPO-token". There are two groups, as in its ablation of the grouping proportion.
    Its entropies are pi_old's.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios, entropies=entropies)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    top = entropy_groups(entropies.detach(), mask, fraction=high_entropy_fraction)
    mean, epsilon, share = (torch.zeros_like(log_ratios.detach()) for _ in range(3))
    groups = (top, mask & ~top)
    filled = sum(group.any(-1, keepdim=True).to(mean.dtype) for group in groups)
    # Each token gets the ratio, the clip range and the share of its group.
    for group in groups:
        mean = torch.where(group, aggregate(log_ratios.detach(), group, "sequence_mean"), mean)
        uncertainty = aggregate(entropies.detach().clamp(min=0.0), group, "sequence_mean").to(mean.dtype)
        epsilon = torch.where(group, clip_scale * uncertainty, epsilon)
        size = (filled * group.sum(-1, keepdim=True)).clamp(min=1)
        share = torch.where(group, mask.sum(-1, keepdim=True) / size, share)
    terms = ppo_clip(mean + (log_ratios - log_ratios.detach()), advantages, low=epsilon, high=epsilon)
    return terms._replace(loss=share * terms.loss)


def ctpo(
    log_ratios: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float, dual_clip: float | None = None
) -> LossTerms:
    """CTPO: PPO's clip on the product of the ratios up to the token, in bounds that widen with its position.

        -min(R_t A, clip(R_t, exp(-low sqrt(t)), exp(high sqrt(t))) A),  R_t = prod_{s <= t} r_s

    where t counts the trainable tokens of the response. For A < 0 the loss is at most -exp(dual_clip sqrt(t)) A.

    Args:
        log_ratios: (B, T) log(pi / pi_old), carries gradient: that of the token itself; its prefix is detached.
        advantages: (B, 1) or (B, T), no gradient.
        mask: (B, T) bool.
        low: nats below 1 at which the first token is clipped.
        high: nats above 1 at which the first token is clipped.
        dual_clip: nats of the first token's dual clip; None = none.

    Reference: Zhang et al. 2026, CTPO (arXiv:2605.07331); authors' code (github.com/horizon-llm/CTPO, acc40211,
    ``cum-token-cumprod-la``). Between the bounds R_t is the unbiased weight of a token given its prefix.
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, log_ratios=log_ratios)
    check_broadcast(log_ratios=log_ratios, advantages=advantages)
    walk = torch.where(mask, log_ratios.detach(), 0.0).cumsum(-1)
    ratio = ratio_of(walk) * unit_ratio(log_ratios)
    growth = mask.cumsum(-1).to(log_ratios.dtype).sqrt()
    least, most = (-low * growth).exp(), (high * growth).exp()
    surrogate = torch.minimum(ratio * advantages, torch.minimum(torch.maximum(ratio, least), most) * advantages)
    if dual_clip is not None:
        bound = (dual_clip * growth).exp() * advantages
        surrogate = torch.where((advantages < 0) & (surrogate < bound), bound, surrogate)
    return LossTerms(-surrogate, (ratio < least) & (advantages < 0), (ratio > most) & (advantages > 0))


def st_ppo(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    turn_ids: Tensor | None,
    *,
    low: float,
    high: float,
    normalize: bool,
) -> LossTerms:
    """ST-PPO: PPO's clipped surrogate on the turn's ratio, damped for turns with tokens beyond the clip.

        -min(s_t A, clip(s_t, 1 - low, 1 + high) A) / (1 + c_k), s_t = sg[s_k] pi_t / sg[pi_t]

    where s_k is the geometric mean ratio of turn k (Turn-PPO stops there, c_k = 0) and c_k is the mean over the turn of
    r_t on the tokens that PPO's token clip would take out, 0 elsewhere: a turn without such tokens is not touched, one
    that is far off-policy is damped. What carries gradient: pi_t of the turns that are not clipped; the normaliser is
    detached. Biased by the clip.

    Args:
        log_ratios: (B, T) log(pi / pi_old), carries gradient.
        advantages: no gradient.
        mask: (B, T) bool.
        turn_ids: (B, T) integer; None = every run of trainable tokens is a turn.
        low: the clip is at 1 - low, of turns and of tokens.
        high: the clip is at 1 + high.
        normalize: False = Turn-PPO.

    Returns:
        ``gate`` is 1 / (1 + c_k).

    Reference: Li et al. 2025, ST-PPO (arXiv:2511.20718). The paper divides the whole batch's gradient by the norm of
    its clipping-bias term C = mean of 1[clipped] r A grad log pi, which needs a second backward. This kit normalises
    each turn by itself instead: c_k is C's weight in the turn.
    """
    check_tokens(mask.shape, log_ratios=log_ratios)
    check_tokens_or_rows(mask.shape, advantages=advantages)
    here = log_ratios.detach()
    mean = aggregate(here, mask, "turn_mean", turn_ids=turn_ids)
    terms = ppo_clip(mean + (log_ratios - here), advantages, low=low, high=high)
    if not normalize:
        return terms
    token = ppo_clip(here, advantages, low=low, high=high)
    assert token.clipped_low is not None and token.clipped_high is not None
    taken = torch.where(token.clipped_low | token.clipped_high, ratio_of(here), 0.0)
    gate = 1 / (1 + aggregate(taken, mask, "turn_mean", turn_ids=turn_ids))
    return terms._replace(loss=terms.loss * gate, gate=gate)
