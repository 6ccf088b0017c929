"""Log-probs of the proximal policy, the centre of the trust region, without another forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional._shapes import check_tokens, check_tokens_or_rows


@torch.no_grad()
def interpolated_logps(
    behaviour: Tensor, current: Tensor, versions: Tensor, *, proximal_version: int, current_version: int
) -> Tensor:
    """A-3PO: log-probs on the line between the policy that sampled and the current one.

        lp_b + alpha (lp - lp_b), alpha = clip((v_prox - v_b) / (v - v_b), 0, 1)

    where lp_b is ``behaviour`` of version v_b, lp is ``current`` of version v, and v_prox the centre's version. The
    older a token, the nearer the centre to the current policy: its ratio to the centre is (pi / pi_b)^(1 - alpha). A
    heuristic: exact if log-probs move at a constant rate from version to version.

    Args:
        behaviour: (B, T) log-probs of the policy that sampled, nats.
        current: (B, T) log pi, nats; detached here.
        versions: (B,), (B, 1) or (B, T) integer, weight version that sampled.
        proximal_version: v_prox, the version that the centre approximates.
        current_version: v, the version of ``current``.

    Returns:
        (B, T) float32, no gradient; not finite where ``behaviour`` is not. A token that is not older than
        ``proximal_version`` gets ``behaviour`` itself (alpha = 0). So, as in AReaL, several steps on a fresh batch keep
        a fixed centre.

    Reference: Li et al. 2025, A-3PO (arXiv:2512.06547); AReaL's ``prox_logp_method="loglinear"``, where v_prox = v - 1.

    Example:
        >>> interpolated_logps(torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), torch.tensor([[6]]),
        ...                    proximal_version=9, current_version=10)
        tensor([[-1.5000]])
    """
    if proximal_version > current_version:
        raise ValueError(
            f"proximal_version must be at most current_version = {current_version}, but got {proximal_version}."
        )
    by_token = versions.unsqueeze(1) if versions.dim() == 1 else versions
    check_tokens(current.shape, behaviour=behaviour)
    check_tokens_or_rows(current.shape, versions=by_token)
    age = (current_version - by_token).float()
    gap = (proximal_version - by_token).float()
    alpha = (gap / age.clamp(min=1.0)).clamp(0.0, 1.0)
    start = behaviour.float()
    return start + alpha * (current.float() - start)


@torch.no_grad()
def averaged_logps(previous: Tensor, current: Tensor, *, decay: float, count: int | Tensor) -> Tensor:
    """Exponentially weighted moving average of log-probs.

        (decay n prev + current) / (decay n + 1), n = 1 + decay + ... + decay^(count - 1)

    where n is the weight that ``previous`` already carries, so that the first policies are not over-counted. PPO-EWMA
    averages the weights of the network. Averaging log-probs needs no second copy and is the same to first order in the
    change of the weights. It is a heuristic: the average is not normalised over tokens.

    Args:
        previous: (B, T) average so far, nats; at first the log-probs of pi_old.
        current: (B, T) log pi, nats; detached here.
        decay: in [0, 1]; 0 = the current policy, 1 = the plain mean.
        count: policies averaged in ``previous``, at least 1; a number, or integer (B, 1) or (B, T).

    Returns:
        (B, T) float32, no gradient.

    Reference: Hilton et al. 2021, "Batch size-invariance for policy optimization" (arXiv:2110.00641); in the place of
    missing old log-probs in Guan et al. 2026 (arXiv:2605.12070).

    Example:
        >>> averaged_logps(torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), decay=0.5, count=1)
        tensor([[-1.6667]])
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be in [0, 1], but got {decay}.")
    if not isinstance(count, Tensor) and count < 1:
        raise ValueError(f"count must be at least 1, but got {count}.")
    check_tokens(current.shape, previous=previous)
    carried = count if decay == 1.0 else decay * (1 - decay**count) / (1 - decay)  # decay n, a geometric sum
    return (carried * previous.float() + current.float()) / (carried + 1)
