"""Advantages from rewards (B,) and prompt groups that may be spread over ranks.

The first half works by response: GRPO's baseline and others. The second half works by token: the optimal token baseline
and its ingredients.

The baselines take ``counted`` (B,) bool: the responses that belong to the baseline. The others get 0, and so do groups
of one, which have nothing to compare (:func:`reward_if_alone` leaves them their whole reward, as verl does). A function
that normalises over the batch says what a group of one gets. A reward that is NaN or infinite is not counted. Nothing
carries gradient. Each rank makes the same calls and has the same number of rows.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_choice
from trl_offpolicy.functional._shapes import check_mask, check_matrix, check_rows, check_tokens, check_tokens_or_rows
from trl_offpolicy.functional.collective import gather_padded, gather_rows, sum_ranks
from trl_offpolicy.functional.groups import group_members, member_sums

ScaleRewards = Literal["group", "batch", "none"]
Alone = Literal["zero", "return"]
STD_EPSILON = 1e-4
"""TRL adds this to a standard deviation before it divides by it."""
OTHERS_EPSILON = 1e-6
"""NeMo-RL adds this to the standard deviation of the other responses."""
_VARIANCE_EPSILON = 1e-8  # as verl and slime add to the variance
_EQUAL = 1e-9  # share of a group's sum of squares below which the others count as equal: float64 leaves 1e-16


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    counted: Tensor,
    *,
    scale_rewards: ScaleRewards = "group",
    epsilon: float = STD_EPSILON,
) -> Tensor:
    """GRPO's advantage with a baseline of the counted responses only.

        A_i = (r_i - mean) / (std + epsilon)

    where mean and std (n - 1) are over the counted responses of i's group. A response that rejection took out of the
    loss tells about the engine, not about the policy. If it stayed in the group's mean and spread, it would still move
    the others. With all responses counted this is TRL's advantage.

    Args:
        rewards: (B,) float; not finite = no reward, not counted.
        group_ids: (B,) integer; a group may be spread over ranks, so every rank makes this call.
        counted: (B,) bool, responses that belong to the baseline.
        scale_rewards: divide by the standard deviation (n - 1) of the "group" or of the whole "batch"; "none": do not.
        epsilon: added to the standard deviation.

    Returns:
        (B,) float32, no gradient; 0 for responses that are not counted and for groups of one. With "batch" a group of
        one still counts in the standard deviation, by its reward.

    Reference: Shao et al. 2024, GRPO (arXiv:2402.03300), Section 4.1.2; TRL ``scale_rewards``.

    Example:
        >>> rewards, ids = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 0])
        >>> group_advantages(rewards, ids, torch.tensor([True, True, False]), scale_rewards="none")
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    check_choice("scale_rewards", scale_rewards, get_args(ScaleRewards))
    here = _rewarded(rewards, counted, group_ids=group_ids)
    values = torch.where(here, rewards.float(), 0.0).double()  # so that equal rewards are equal to their mean
    everyone = gather_rows(values)
    member = group_members(group_ids, here, across_ranks=True)
    mean, std = _mean_and_std(everyone, member)
    advantages = torch.where(here & (member.sum(-1) > 1), values - mean, 0.0)
    if scale_rewards == "none":
        return advantages.float()
    if scale_rewards == "batch":
        # The spread is that of all counted responses, as if they were one group.
        _, std = _mean_and_std(everyone, gather_rows(here).expand(len(rewards), -1))
    return (advantages / (std + epsilon)).float()


@torch.no_grad()
def leave_one_out(rewards: Tensor, group_ids: Tensor, counted: Tensor) -> Tensor:
    """RLOO: the reward minus the mean of the *other* responses.

        A_i = r_i - 1 / (n - 1) sum_{j != i} r_j = n / (n - 1) (r_i - mean)

    where n counts the counted responses of i's group and mean is theirs. Unbiased: the baseline does not depend on the
    response that it is subtracted from.

    Args:
        rewards: (B,) float.
        group_ids: (B,) integer.
        counted: (B,) bool.

    Returns:
        (B,) float32.

    Reference: Ahmadian et al. 2024 (arXiv:2402.14740).

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 0]), torch.ones(3).bool())
        tensor([-1.5000, -3.0000,  4.5000])
    """
    centred = group_advantages(rewards, group_ids, counted, scale_rewards="none")
    count = group_members(group_ids, counted & rewards.isfinite(), across_ranks=True).sum(-1)
    return centred * count / (count - 1).clamp(min=1)


@torch.no_grad()
def scaled_by_the_others(
    rewards: Tensor, group_ids: Tensor, counted: Tensor, *, epsilon: float = OTHERS_EPSILON
) -> Tensor:
    """RLOO over the spread of the *other* responses, which is NeMo-RL's default.

        A_i = (r_i - m_i) / (s_i + epsilon)

    where m_i and s_i (n - 2) are mean and standard deviation of the group's other counted responses. Where the others
    are equal, or there is one alone, the advantage is r_i - m_i. Biased towards prompts of small spread, as GRPO; and a
    response that differs from equal others is not divided at all.

    Args:
        rewards: (B,) float.
        group_ids: (B,) integer.
        counted: (B,) bool.
        epsilon: added to the standard deviation.

    Returns:
        (B,) float32.

    Reference: NeMo-RL 7ea279abf, ``calculate_baseline_and_std_per_prompt``.

    Example:
        >>> scaled_by_the_others(torch.tensor([1.0, 0.0, 4.0]), torch.tensor([0, 0, 0]), torch.ones(3).bool())
        tensor([-0.3536, -1.1785,  4.9497])
    """
    here = _rewarded(rewards, counted, group_ids=group_ids)
    values = torch.where(here, rewards.float(), 0.0).double()
    member = group_members(group_ids, here, across_ranks=True)
    mean, std = _mean_and_std(gather_rows(values), member)
    count = member.sum(-1)
    centred = torch.where(here & (count > 1), values - mean, 0.0)
    # Without response i the sum of squares about the mean is smaller by n / (n - 1) of its own square.
    squares = (count - 1) * std.square()
    of_others = squares - centred.square() * count / (count - 1).clamp(min=1)
    others_differ = (count > 2) & (of_others > _EQUAL * squares)
    std_of_others = (of_others.clamp(min=0.0) / (count - 2).clamp(min=1)).sqrt()
    advantages = centred * count / (count - 1).clamp(min=1)
    return torch.where(others_differ, advantages / (std_of_others + epsilon), advantages).float()


@torch.no_grad()
def in_company(group_ids: Tensor, counted: Tensor) -> Tensor:
    """(B,) bool: the counted responses whose group, over all ranks, has another one.

    Args:
        group_ids: (B,) integer.
        counted: (B,) bool.

    Example:
        >>> in_company(torch.tensor([0, 0, 1]), torch.ones(3).bool()).tolist()
        [True, True, False]
    """
    return counted & (group_members(group_ids, counted, across_ranks=True).sum(-1) > 1)


@torch.no_grad()
def reward_if_alone(advantages: Tensor, rewards: Tensor, group_ids: Tensor, counted: Tensor) -> Tensor:
    """The advantages, and the whole reward for a counted response whose group has no other one.

    As if the baseline of a group of one were 0. Biased towards prompts with high rewards if groups differ in size.

    Args:
        advantages: (B,) float32.
        rewards: (B,) float.
        group_ids: (B,) integer.
        counted: (B,) bool.

    Returns:
        (B,) float32.

    Reference: verl's outcome estimators (grpo, rloo, opo, reinforce_plus_plus_baseline, gpg).

    Example:
        >>> reward_if_alone(torch.zeros(2), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), torch.ones(2).bool())
        tensor([0.5000, 0.2500])
    """
    here = _rewarded(rewards, counted, advantages=advantages, group_ids=group_ids)
    return torch.where(here & ~in_company(group_ids, here), rewards.float(), advantages)


@torch.no_grad()
def weighted_baseline(rewards: Tensor, group_ids: Tensor, counted: Tensor, importance: Tensor) -> Tensor:
    """The baseline of least variance for responses whose gradients differ in size.

        A_i = r_i - sum_j e_j r_j / sum_j e_j

    where j runs over the counted responses of i's group and e is the energy, the squared norm of the response's
    gradient. OPO takes the length of the response for e, which is right if all tokens have the same energy and do not
    correlate. OPOB takes w^2 ||g||^2, which includes the importance weight w. This is a heuristic with a bias of order
    1 / n, because the response's own reward is in the baseline.

    Args:
        rewards: (B,) float.
        group_ids: (B,) integer.
        counted: (B,) bool.
        importance: (B,) float, e >= 0; not finite = 0. In a group where all are 0 the plain mean takes over.

    Returns:
        (B,) float32.

    Reference: Hao et al. 2025, OPO (arXiv:2505.23585); Huang et al. 2026, VCPO (arXiv:2602.17616).

    Example:
        >>> weighted_baseline(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2).bool(),
        ...                   torch.tensor([3.0, 1.0]))
        tensor([ 0.2500, -0.7500])
    """
    here = _rewarded(rewards, counted, group_ids=group_ids, importance=importance)
    values = torch.where(here, rewards.float(), 0.0)
    energy = torch.where(here & importance.isfinite(), importance.float(), 0.0)
    member = group_members(group_ids, here, across_ranks=True)
    everyone, energies = gather_rows(values).double(), gather_rows(energy).double()
    total, count = member_sums(energies, member), member.sum(-1)
    plain = member_sums(everyone, member) / count.clamp(min=1)
    weighted = member_sums(energies * everyone, member) / torch.where(total > 0, total, 1.0)
    baseline = torch.where(total > 0, weighted, plain)
    return torch.where(here & (count > 1), values - baseline, 0.0).float()


@torch.no_grad()
def normalised_by_function(
    rewards: Tensor, group_ids: Tensor, counted: Tensor, weights: Tensor | None = None
) -> Tensor:
    """GDPO: each reward function normalised in its group, then the weighted sum normalised over the batch.

        A_k = (r_k - mean_k) / (std_k + 1e-4)
        A = (S - mean S) / (std S + 1e-4), S = sum_k w_k A_k

    where mean_k and std_k are over the counted responses of the group, mean S and std S over those of the batch. A
    reward function with a large spread cannot drown one with a small spread. Biased, as is every division by the
    batch's own spread.

    Args:
        rewards: (B, K) float, a column for each function; NaN = this function does not apply.
        group_ids: (B,) integer.
        counted: (B,) bool.
        weights: (K,) float; None = ones.

    Returns:
        (B,) float32; 0 for a response without any reward. Every group adds up to 0, so the mean over the batch is 0 up
        to rounding, and a group of one gets 0. That 0 counts in the batch's standard deviation.

    Reference: Liu et al. 2026, GDPO (arXiv:2601.05242); TRL's ``normalize_then_sum``. verl's batch normalisation counts
    each response once for every token.

    Example:
        >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0]])
        >>> normalised_by_function(rewards, torch.zeros(3).long(), torch.ones(3).bool())
        tensor([-0.5774, -0.5771,  1.1546])
    """
    check_mask(counted=counted)
    check_matrix(rewards=rewards)
    check_rows(len(rewards), group_ids=group_ids, counted=counted)
    check_rows(rewards.shape[1], weights=weights)
    here = counted & rewards.isfinite().any(-1)
    columns = [group_advantages(column, group_ids, here) for column in rewards.unbind(-1)]
    by_function = torch.stack(columns, dim=-1)
    if weights is not None:  # not as a matrix product, which autocast would round to bfloat16
        by_function = by_function * weights.to(by_function)
    total = by_function.sum(-1)
    mean, variance = _batch_moments(total, here)
    return torch.where(here, (total - mean) / (variance.sqrt() + STD_EPSILON), 0.0)


@torch.no_grad()
def best_of_group(
    rewards: Tensor,
    group_ids: Tensor,
    counted: Tensor,
    *,
    scale_rewards: Literal["group", "none"] = "group",
    epsilon: float = STD_EPSILON,
) -> Tensor:
    """Pass@n: only the group's best response counts, by its lead over the second best.

        A_i = (r_i - max_{j != i} r_j)_+ / (std + epsilon)

    where j runs over the other counted responses of i's group and std (n - 1) is the group's. Two best ones lead by 0.
    It estimates the gradient of a group's expected *largest* reward, so a policy is not paid for being right often.

    Args:
        rewards: (B,) float; not finite = no reward, not counted.
        group_ids: (B,) integer; a group may be spread over ranks, so every rank makes this call.
        counted: (B,) bool.
        scale_rewards: "none" leaves the division out.
        epsilon: added to the standard deviation.

    Returns:
        (B,) float32, >= 0, no gradient; 0 for responses that are not counted and for groups of one.

    Reference: Tang et al. 2025 (arXiv:2503.19595); verl's ``grpo_passk``, which raises for a group of one.

    Example:
        >>> rewards, ids = torch.tensor([1.0, 0.0, 0.25]), torch.tensor([0, 0, 0])
        >>> best_of_group(rewards, ids, torch.ones(3).bool(), scale_rewards="none")
        tensor([0.7500, 0.0000, 0.0000])
    """
    here = _rewarded(rewards, counted, group_ids=group_ids)
    values = torch.where(here, rewards.float(), 0.0).double()
    everyone = gather_rows(values)
    member = group_members(group_ids, here, across_ranks=True)
    ranked = torch.where(member, everyone, -torch.inf)
    ranked = torch.nn.functional.pad(ranked, (0, 2), value=-torch.inf)  # so that there are two
    ranked = ranked.topk(2, dim=-1).values
    # The largest of the others is the second largest of all, seen from the largest; all others get 0 anyway.
    lead = torch.where(here & (member.sum(-1) > 1), values - ranked[:, -1], 0.0).clamp(min=0.0)
    if scale_rewards == "none":
        return lead.float()
    _, std = _mean_and_std(everyone, member)
    return (lead / (std + epsilon)).float()


@torch.no_grad()
def scaled_by_rewarded(rewards: Tensor, group_ids: Tensor, counted: Tensor, *, alone: Alone = "zero") -> Tensor:
    """GPG: the reward minus the group's mean, larger where few responses of the batch have a reward other than 0.

        A_i = B / m (r_i - mean)

    where B counts the counted responses of the batch, m those of them whose reward is not 0, and mean is that of i's
    group. The factor makes up for the responses that teach nothing, as if the batch held only the others.

    Args:
        rewards: (B,) float; not finite = no reward, not counted.
        group_ids: (B,) integer.
        counted: (B,) bool.
        alone: what a group of one has before the factor: "zero", or its reward ("return", as in verl).

    Returns:
        (B,) float32, no gradient; 0 for responses that are not counted.

    Reference: Chu et al. 2025, GPG (arXiv:2504.02546), as verl computes it. The paper counts the groups whose rewards
    are not all equal.

    Example:
        >>> scaled_by_rewarded(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2).bool())
        tensor([ 1., -1.])
    """
    centred = group_advantages(rewards, group_ids, counted, scale_rewards="none")
    if alone == "return":
        centred = reward_if_alone(centred, rewards, group_ids, counted)
    here = counted & rewards.isfinite()
    counts = sum_ranks(torch.stack([here.sum(), (here & (rewards != 0)).sum()]))
    return centred * (counts[0] / counts[1].clamp(min=1))


@torch.no_grad()
def whitened_by_token(advantages: Tensor, lengths: Tensor) -> Tensor:
    """Advantages of mean 0 and variance 1 over the tokens of the batch.

        A'_i = (A_i - mean) / sqrt(var + 1e-8)

    where mean and var (n - 1) count each response once for every token.

    Args:
        advantages: (B,) float32.
        lengths: (B,) trainable tokens; 0 = the response does not count.

    Returns:
        (B,) float32; 0 where the length is 0 or the advantage is not finite, which does not count either. An advantage
        of 0 (a group of one) becomes - mean / std.

    Reference: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), as verl and slime compute it. OpenRLHF and NeMo-RL have
    the variance of n, which is smaller by (n - 1) / n, and clamp it at 1e-8 instead of adding that.

    Example:
        >>> whitened_by_token(torch.tensor([1.0, -1.0]), torch.tensor([1, 3]))
        tensor([ 1.5000, -0.5000])
    """
    check_rows(len(advantages), advantages=advantages, lengths=lengths)
    here = (lengths > 0) & advantages.isfinite()
    mean, variance = _batch_moments(advantages, torch.where(here, lengths, 0))
    return torch.where(here, (advantages - mean) * torch.rsqrt(variance + _VARIANCE_EPSILON), 0.0)


@torch.no_grad()
def normalised_by_response(advantages: Tensor, counted: Tensor) -> Tensor:
    """Advantages of mean 0 and standard deviation 1 over the counted responses of all ranks.

        A'_i = (A_i - mean) / (std + 1e-4)

    where std is that of a sample (n - 1).

    Args:
        advantages: (B,) float32.
        counted: (B,) bool; the others get 0, and so does an advantage that is not finite.

    Returns:
        (B,) float32.

    Reference: TRL's RLOOTrainer with ``normalize_advantages``.

    Example:
        >>> normalised_by_response(torch.tensor([1.0, -1.0, 7.0]), torch.tensor([True, True, False]))
        tensor([ 0.7071, -0.7071,  0.0000])
    """
    check_mask(counted=counted)
    check_rows(len(advantages), advantages=advantages, counted=counted)
    here = counted & advantages.isfinite()
    mean, variance = _batch_moments(advantages, here)
    return torch.where(here, (advantages - mean) / (variance.sqrt() + STD_EPSILON), 0.0)


def _rewarded(rewards: Tensor, counted: Tensor, **others: Tensor) -> Tensor:
    """(B,) bool: the counted rows whose reward is finite; checks that everything else is (B,) as well."""
    check_mask(counted=counted)
    check_rows(len(rewards), rewards=rewards, counted=counted, **others)
    return counted & rewards.isfinite()


def _mean_and_std(everyone: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (n - 1), (B,) each, of the values (N,) of all ranks that ``member`` (B, N) picks."""
    count = member.sum(-1)
    mean = torch.where(member, everyone, 0.0).sum(-1) / count.clamp(min=1)
    squares = torch.where(member, everyone - mean.unsqueeze(1), 0.0).square().sum(-1)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def _batch_moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (n - 1) of the values of all ranks, each counted ``weights`` times; 0-d float32.

    Where the weight is 0 the values may hold anything, NaN included.
    """
    values, weights = torch.where(weights > 0, values, 0.0).double(), weights.double()
    totals = sum_ranks(torch.stack([weights.sum(), (weights * values).sum()]))
    mean = totals[1] / totals[0].clamp(min=1.0)
    squares = sum_ranks((weights * (values - mean).square()).sum())
    return mean.float(), (squares / (totals[0] - 1).clamp(min=1.0)).float()


# ------------------------------------------------------------------------------------------------------- by token


@torch.no_grad()
def score_energy(logps: Tensor, sum_sq_probs: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Squared norm of the token's score with respect to the logits, a proxy of its squared gradient norm.

        e_t = rho_t^2 (1 - 2 pi(y_t) + sum_v pi(v)^2)

    where rho is the importance weight of the token, squared because it multiplies the gradient, and v runs over the
    vocabulary. It needs only the forward pass.

    Args:
        logps: (B, T) log pi of the sampled token, nats; where it is not finite the energy is 0.
        sum_sq_probs: (B, T) sum over the vocabulary of pi squared.
        mask: (B, T) bool, True = trainable token.
        weights: (B, 1) or (B, T) importance weights; None = 1.

    Returns:
        (B, T) float32, >= 0; 0 outside ``mask``; no gradient.

    Reference: Li et al. 2026, OTB (arXiv:2602.07078).

    Example:
        >>> score_energy(torch.tensor([[0.5]]).log(), torch.tensor([[0.5]]), torch.tensor([[True]]))
        tensor([[0.5000]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, logps=logps, sum_sq_probs=sum_sq_probs)
    check_tokens_or_rows(mask.shape, weights=weights)
    energy = (1 - 2 * logps.float().exp() + sum_sq_probs.float()).clamp(min=0.0)
    if weights is not None:
        energy = energy * weights.float().square()
    return torch.where(mask & (energy < torch.inf), energy, 0.0)


@torch.no_grad()
def returns_to_go(outcome: Tensor, mask: Tensor, token_rewards: Tensor | None = None) -> Tensor:
    """The outcome plus the rewards of this and all later trainable tokens.

        G_t = R + sum_{s >= t} r_s

    where R is the reward of the whole response, paid at its last token.

    Args:
        outcome: (B,) float, R.
        mask: (B, T) bool.
        token_rewards: (B, T) float, r, e.g. -coef * KL; None = 0.

    Returns:
        (B, T) float32, 0 outside ``mask``.

    Example:
        >>> returns_to_go(torch.ones(1), torch.tensor([[True, False, True]]), torch.tensor([[0.1, 9.0, 0.2]]))
        tensor([[1.3000, 0.0000, 1.2000]])
    """
    check_mask(mask=mask)
    check_rows(len(mask), outcome=outcome)
    check_tokens(mask.shape, token_rewards=token_rewards)
    later = torch.zeros_like(mask, dtype=torch.float32)
    if token_rewards is not None:
        # A cumulative sum from the right.
        later = torch.where(mask, token_rewards.float(), 0.0).flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask, outcome.float().unsqueeze(1) + later, 0.0)


@torch.no_grad()
def discounted_returns(
    outcome: Tensor, mask: Tensor, token_rewards: Tensor | None = None, *, discount: float = 1.0
) -> Tensor:
    """The rewards of this and all later trainable tokens, each discounted by the trainable tokens in between.

        G_t = sum_{s >= t} discount^(n_s - n_t) r_s

    where n_t counts the trainable tokens up to t and the outcome is part of r at the last of them. With a discount of 1
    this is :func:`returns_to_go`.

    Args:
        outcome: (B,) float, the reward of the whole response.
        mask: (B, T) bool.
        token_rewards: (B, T) float; None = 0.
        discount: gamma, in (0, 1].

    Returns:
        (B, T) float32, 0 outside ``mask``.

    Example:
        >>> discounted_returns(torch.ones(1), torch.tensor([[True, False, True]]), discount=0.5)
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    check_mask(mask=mask)
    check_rows(len(mask), outcome=outcome)
    check_tokens(mask.shape, token_rewards=token_rewards)
    places = mask.cumsum(-1)
    last = mask & (places == places[:, -1:])
    returns = torch.where(last, outcome.float().unsqueeze(1), 0.0)
    if token_rewards is not None:
        returns = returns + torch.where(mask, token_rewards.float(), 0.0)
    # G_t = r_t + factor_t G_{t+1}, solved for all t in log2(T) passes: each pass doubles how far a token looks ahead.
    factor = torch.where(mask, discount, 1.0).to(returns)
    reach = 1
    while reach < mask.shape[1]:
        later = torch.nn.functional.pad(returns[:, reach:], (0, reach))
        returns = returns + factor * later
        factor = factor * torch.nn.functional.pad(factor[:, reach:], (0, reach), value=1.0)
        reach *= 2
    return torch.where(mask, returns, 0.0)


@torch.no_grad()
def whitened_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Values of mean 0 and variance 1 (n - 1) over the trainable tokens of all ranks.

        (v - mean) / sqrt(var + 1e-8)

    Args:
        values: (B, T) float.
        mask: (B, T) bool.

    Returns:
        (B, T) float32, 0 outside ``mask`` and where the value is not finite, which does not count.

    Example:
        >>> whitened_tokens(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
        tensor([[-0.7071,  0.7071,  0.0000]])
    """
    check_mask(mask=mask)
    check_tokens(mask.shape, values=values)
    here = mask & values.isfinite()
    mean, variance = _batch_moments(values, here)
    return torch.where(here, (values - mean) * torch.rsqrt(variance + _VARIANCE_EPSILON), 0.0).float()


@torch.no_grad()
def optimal_token_baseline(
    returns: Tensor,
    energy: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    counted: Tensor,
    *,
    multi_turn: bool = False,
    alone: Alone = "zero",
    path_weights: Tensor | None = None,
) -> Tensor:
    """OTB: a baseline for each token that weighs the paths of the group by their accumulated energy.

        A_t = G_t - B_t, B_t = sum_i W_it G_it / sum_i W_it, W_it = w_it^2 sum_{s <= t} e_is

    where i runs over the group's counted responses that have a token t. A path with much accumulated energy adds most
    to the variance, so the baseline follows its return most. The variance is least if scores of different tokens do not
    correlate. The bias is of order 1 / n, because the response's own return is in B_t.

    Args:
        returns: (B, T) float32, G; a token whose return is not finite does not count and gets 0.
        energy: (B, T) float32, e, from :func:`score_energy`; with importance weights in it the baseline is IS-aware.
            Not finite = 0.
        mask: (B, T) bool, True = trainable token.
        group_ids: (B,) integer; a group may be spread over ranks, T may differ between them.
        counted: (B,) bool, responses that belong to the baseline; the others get 0.
        multi_turn: count trainable tokens only, so that t is the t-th token that the policy wrote. The gaps between
            turns (tool output) differ from response to response. False: t is the position.
        alone: what a token gets that no other response of the group reaches: "zero" (the formula, B_t = G_t) or
            "return" (B_t = 0 in the one longest response of a group, from the position on that is the second largest
            number of tokens; this is verl's ``handle_zero_tail`` and its default).
        path_weights: (B, 1) or (B, T), w; None = 1, and where w^2 is not finite W is 0. Importance weights go either
            here or into the energy.

    Returns:
        (B, T) float32, 0 outside ``mask``. Where all W are 0 the plain mean takes over.

    Reference: Li et al. 2026 (arXiv:2602.07078) and verl's ``optimal_token_baseline``, ``tir_optimal_token_baseline``.
    Liu 2026 ("Off-Policy Drift in LLM RL") and verl's documentation scale W_t by the squared weight of t, which
    ``path_weights`` does. verl's code scales each token's energy by its own before the sum, which weights in the energy
    do. Both are the same for weights that are constant over a response.

    Example:
        >>> optimal_token_baseline(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        ...                        torch.ones(2, 2).bool(), torch.zeros(2).long(), torch.ones(2).bool())
        tensor([[ 0.5000,  0.3333],
                [-0.5000, -0.6667]])
    """
    check_mask(mask=mask, counted=counted)
    check_tokens(mask.shape, returns=returns, energy=energy)
    check_rows(len(mask), group_ids=group_ids, counted=counted)
    if multi_turn:
        # Move the trainable tokens to the front, in their order, and the result back to where they were.
        order = (~mask).long().argsort(dim=-1, stable=True)
        if path_weights is not None:
            path_weights = path_weights.expand_as(energy).gather(1, order)
        returns, energy, mask = (values.gather(1, order) for values in (returns, energy, mask))
        advantages = optimal_token_baseline(
            returns, energy, mask, group_ids, counted, alone=alone, path_weights=path_weights
        )
        return torch.zeros_like(advantages).scatter_(1, order, advantages)
    check_tokens_or_rows(mask.shape, path_weights=path_weights)
    here = mask & counted.unsqueeze(1) & returns.isfinite()
    path = torch.where(mask & energy.isfinite(), energy, 0.0).cumsum(-1)
    if path_weights is not None:
        path = path * path_weights.float().square()
    path = torch.where(here & path.isfinite(), path, 0.0)  # W
    present = torch.where(here, returns, 0.0)
    member = (group_ids.unsqueeze(1) == gather_rows(group_ids).unsqueeze(0)).double()
    paths, everyone, seen = (gather_padded(one.float(), padding=0.0).double() for one in (path, present, here))

    def over_group(values: Tensor) -> Tensor:
        """Sum over the group's responses on all ranks at each position, cut to this rank's T."""
        return (member @ values)[:, : mask.shape[1]]

    total, count = over_group(paths), over_group(seen)
    weighted = over_group(paths * everyone) / torch.where(total > 0, total, 1.0)
    baseline = torch.where(total > 0, weighted, over_group(everyone) / count.clamp(min=1.0))
    advantages = torch.where(count > 1, returns - baseline.float(), torch.zeros_like(present))
    if alone == "return":
        advantages = torch.where(_beyond_the_others(here, member.bool()), present, advantages)
    return torch.where(here, advantages, 0.0)


def _beyond_the_others(here: Tensor, member: Tensor) -> Tensor:
    """(B, T) bool: the end of a group's one longest response, behind as many positions as the next one has tokens.

    Args:
        here: (B, T) bool, the tokens that count.
        member: (B, N) bool, which of all ranks' responses belong to the group of each.
    """
    lengths = here.sum(-1)
    of_group = torch.where(member, gather_rows(lengths).unsqueeze(0), -1)
    # as many as the group's longest twice, if two are as long; 0 if there is no other response
    second = torch.nn.functional.pad(of_group, (0, 1), value=0).topk(2, dim=-1).values[:, 1].clamp(min=0)
    positions = torch.arange(here.shape[1], device=here.device)
    return (lengths > second).unsqueeze(-1) & (positions >= second.unsqueeze(-1))
