"""The mixture of several policies as one policy: the denominator of the balance heuristic."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_mask, check_tokens

MixtureLevel = Literal["token", "sequence"]


@torch.no_grad()
def mixture_logps(logps: Tensor, shares: Tensor, mask: Tensor, *, level: MixtureLevel = "token") -> Tensor:
    """Log-probs of the policy that is drawn anew from K policies, for each token or once for the response.

        token:     log m_t = log sum_k c_k mu_k(y_t | y_<t)
        sequence:  log m_t = log sum_k c_k mu_k(y_<=t) - log sum_k c_k mu_k(y_<t)

    where c_k is the share of policy k. With m in the denominator, pi / m over the samples of all policies is the
    balance heuristic of multiple importance sampling. It is unbiased, as with each sample's own policy. A ratio is at
    most 1 / c_k times that of any policy k, so that a sample which one of them would seldom draw does not dominate. At
    level "sequence" the products over a response are those of the mixture of whole responses. At level "token" the
    mixture is that of each next token, given its prefix; it also covers responses that several policies wrote in turn.

    Args:
        logps: (K, B, T) log-probs of the sampled tokens under each policy, nats.
        shares: (K,) non-negative, of sum 1: the share of each policy in what was sampled.
        mask: (B, T) bool, trainable tokens.
        level: whether the policy is drawn for each token or once for the response.

    Returns:
        (B, T) float32, 0 outside ``mask``; carries no gradient. NaN where a policy's log-prob is NaN, and at level
        "sequence" behind a token that no policy can draw.

    Reference: Veach and Guibas 1995, "Optimally combining sampling techniques for Monte Carlo rendering", balance
    heuristic (Eq. 8); within a factor of the best weights, by their theorem 1.

    Example:
        >>> two = torch.tensor([[[0.2, 0.5]], [[0.6, 0.1]]]).log()
        >>> mixture_logps(two, torch.tensor([0.5, 0.5]), torch.ones(1, 2).bool()).exp()
        tensor([[0.4000, 0.3000]])
        >>> mixture_logps(two, torch.tensor([0.5, 0.5]), torch.ones(1, 2).bool(), level="sequence").exp()
        tensor([[0.4000, 0.2000]])
    """
    check_mask(mask=mask)
    if logps.dim() != 3 or tuple(shares.shape) != logps.shape[:1]:
        raise ValueError(
            "shares must have shape (K,) for logps of (K, B, T), but got "
            f"{tuple(shares.shape)} and {tuple(logps.shape)}."
        )
    check_tokens(mask.shape, logps=logps[0])
    if shares.device.type == "cpu" and not (bool((shares >= 0).all()) and abs(float(shares.double().sum()) - 1) < 1e-3):
        raise ValueError(f"shares must be at least 0 and of sum 1, but got {shares.tolist()}.")
    log_shares = shares.to(logps.device).double().log().view(-1, 1, 1)
    inside = torch.where(mask, logps.double(), 0.0)
    mixed = torch.logsumexp(inside + log_shares, dim=0) if level == "token" else _of_responses(inside, log_shares)
    return torch.where(mask, mixed, 0.0).float()


def _of_responses(logps: Tensor, log_shares: Tensor) -> Tensor:
    """(B, T) log-probs of each token given its prefix, where one policy writes the whole response.

    A token of which a policy's log-prob is not known (NaN) is NaN, and leaves the others as if it were not there. After
    a token that no policy can draw, all others are NaN: nothing is known behind a prefix of probability 0.
    """
    unknown = logps.isnan().any(0)
    logps = torch.where(unknown, 0.0, logps)
    upto = logps.cumsum(-1)
    before = torch.nn.functional.pad(upto, (1, 0))[..., :-1]  # upto - logps would be inf - inf
    mixed = torch.logsumexp(upto + log_shares, dim=0) - torch.logsumexp(before + log_shares, dim=0)
    return torch.where(unknown, torch.nan, mixed)
