"""How far a weighted policy gradient is from the unbiased one, and how noisy it is: bounds from one batch.

The gradient wanted is g = E_pi[A (1/n) sum_t s_t], where A is the advantage of a response y of n tokens, s_t the score
grad log pi(y_t | y_<t), and pi the target. The responses come from mu. The estimator is

    g_w = mean_i A_i (1/n_i) sum_t w_it s_it

with a weight w_it >= 0 for each token (0 = dropped). A depends on the whole response, so the only weight without a bias
for every A is the product of the response's ratios W = prod_t pi/mu. Hence, with |s_t| <= G,

    bias      E g_w - g = E_mu[A (1/n) sum_t (w_t - W) s_t]
              |bias| <= G max|A| D,  D = E_mu mean_t |w_t - W|
    variance  tr Cov(g_w) <= (1/N) E_mu[A^2 |(1/n) sum_t w_t s_t|^2] <= (G^2/N) E_mu[A^2 mean_t w_t^2]

(the last step is Jensen's inequality). At the logits of a softmax |s_t|^2 = 1 - 2 pi(y_t) + sum_v pi(v)^2 <= 2, so
G = sqrt(2); in the parameters G is sqrt(2) times the largest norm of the logits' Jacobian, the same for every w.

A plain mean of |w - W| would be small just where W is wild: a batch rarely holds the responses that carry its mass. But
E_mu W = 1 is known, so that only a bounded quantity must be averaged (min(w, W) <= w):

    |w - W| = w + W - 2 min(w, W),  hence  D = E w + 1 - 2 O  with the overlap O = E_mu mean_t min(w_t, W)

A constant factor of all weights is a matter of the learning rate, so corrections are compared by the *missed mass*

    M = max(1, E w) - O,  D <= 2 M and E mean_t |w_t / E w - W| <= 2 M

that is, the share of the target's mass that the weighted samples do not stand for. Without a correction (w = 1) M is
the total variation distance of whole responses, TV(mu, pi). With w = min(W, C) it is the cut mass E (W - C)+. With
w = W it is 0 in expectation, and in a batch the mass that the batch has not seen. A dropped response is missed.

Where all products are lost M is near 1 for every weight on tokens. The *missed mass of tokens* then tells them apart:
the same with the token's own ratio rho_t in the place of W. It is the bias that is left with the prefixes as given.

In a batch O is at most 1, and 1 is replaced by O + E mean_t min((W - w_t)+, 1) if that is more. Of log-probs that are
really the sampler's it is not, but for noise. Products far above 1 throughout show that something else is wrong.

Every response counts once, however long it is: only then is the mean of W known. What is assumed: A is a function of
the response (a group's baseline moves with the other responses of the group, which is ignored), and mu can sample what
pi can (else E W < 1, and the mass that mu cannot sample counts as missed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import as_float, row_blocks
from trl_offpolicy.functional._shapes import check_mask, check_tokens_or_rows
from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.log_ratios import ratio_of
from trl_offpolicy.functional.moments import PRODUCT_RANGE, Layout, Moments
from trl_offpolicy.functional.weights import ess_fraction

SCORE_NORM = math.sqrt(2)
"""G: no score at the logits of a softmax is longer."""

ESTIMATOR_LAYOUT = Layout(
    sums=(
        "tokens",  # trainable tokens
        "rows",  # responses with one; all that follows is a mean over the tokens of each response
        "weight",  # w, 0 where dropped
        "weight_sq",
        "overlap",  # min(w, W)
        "excess",  # min((W - w)+, 1)
        "power",  # A^2 w^2
        "ratio",  # rho_t
        "token_overlap",  # min(w, rho_t)
    ),
    maxima=("advantage_max",),  # |A|
)


def estimator_rows(log_ratios: Tensor, weights: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of every response, from which the bounds follow.

    Args:
        log_ratios: (B, T) float32, log(target / sampler) of the sampled tokens in nats, 0 where not observed.
        weights: (B, T) or (B, 1) float32 weight of the token's score, 0 where the token is dropped.
        mask: (B, T) bool, trainable tokens.
        advantages: (B, T) or (B, 1).

    Returns:
        Sums (B, 9) float64 in the order of :data:`ESTIMATOR_LAYOUT`, and (B, 1) the largest |A|. 0 for an empty row.

    Example:
        >>> rho = torch.tensor([[0.5, 1.0]])
        >>> sums, _ = estimator_rows(rho.log(), torch.ones(1, 1), torch.ones(1, 2).bool(), torch.ones(1, 1))
        >>> moments = Moments(ESTIMATOR_LAYOUT, sums.sum(0), torch.ones(1))
        >>> missed(moments), missed_token(moments)  # W = 0.5: half of the mass of the one response is not pi's
        (tensor(0.5000, dtype=torch.float64), tensor(0.2500, dtype=torch.float64))
    """
    check_mask(mask=mask)
    for name, value in {"weights": weights, "advantages": advantages}.items():
        check_tokens_or_rows(mask.shape, **{name: value})
    blocks = [
        _block(log_ratios[block], weights[block], mask[block], advantages[block])
        for block in row_blocks(mask.shape, mask.device)
    ]
    return torch.cat([sums for sums, _ in blocks]), torch.cat([tops for _, tops in blocks])


def _block(log_ratios: Tensor, weights: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    here = as_float(mask)
    tokens = here.sum(-1, keepdim=True)
    inside = torch.where(mask, log_ratios, 0.0)
    # W, kept in the range of float32; a larger product is cut by the minimum anyway
    product = inside.sum(-1, keepdim=True).clamp(-_RANGE, _RANGE).exp()
    used = torch.where(mask, weights, 0.0)
    ratio = ratio_of(inside) * here
    size = torch.where(mask, advantages.float(), 0.0)
    excess = (product - used).clamp(0.0, 1.0) * here
    overlap, token_overlap = torch.minimum(used, product), torch.minimum(used, ratio)
    columns = (used, used.square(), overlap, excess, (size * used).square(), ratio, token_overlap)
    means = torch.cat([column.sum(-1, keepdim=True) for column in columns], -1).double() / tokens.clamp(min=1.0)
    sums = torch.cat([tokens, (tokens > 0).float()], -1).double()
    return torch.cat([sums, means], -1), size.abs().amax(-1, keepdim=True).double()


_RANGE = min(PRODUCT_RANGE, 80.0)
"""Nats; e^80 is in the range of float32."""


def _mean(m: Moments, name: str) -> Tensor:
    return m[name] / m["rows"].clamp(min=1.0)


def _overlap_and_mass(m: Moments) -> tuple[Tensor, Tensor]:
    """O, at most 1; and the target's mass E W, which is 1 or, if the batch says so, more."""
    overlap, excess = _mean(m, "overlap"), _mean(m, "excess")
    return overlap.clamp(max=1.0), (overlap + excess).clamp(min=1.0)


def unmatched(m: Moments) -> Tensor:
    """1 - E min(w, W): what :func:`missed` is where weights and products have their expected sums; for its interval."""
    return 1 - _mean(m, "overlap")


def missed(m: Moments) -> Tensor:
    """max(1, E w) - E min(w, W): the share of the target's mass that the weights miss."""
    overlap, mass = _overlap_and_mass(m)
    return torch.where(m["rows"] > 0, torch.maximum(_mean(m, "weight"), mass) - overlap, 0.0)


def missed_token(m: Moments) -> Tensor:
    """max(E rho, E w) - E min(w, rho), by token: the share of the target's choices of a token that the weights miss."""
    return (torch.maximum(_mean(m, "ratio"), _mean(m, "weight")) - _mean(m, "token_overlap")).clamp(min=0.0)


def second_moment(m: Moments) -> Tensor:
    """E w^2, a dropped token counting as 0; 1 on-policy."""
    return _mean(m, "weight_sq")


def ess(m: Moments) -> Tensor:
    """(E w)^2 / E w^2, a dropped token counting as 0; in [0, 1]."""
    return ess_fraction(m["weight"], m["weight_sq"], m["rows"])


def bias_bound(m: Moments) -> Tensor:
    """sqrt(2) max|A| (E w + 1 - 2 E min(w, W)), at least 0: no bias of the gradient at the logits is longer."""
    overlap, mass = _overlap_and_mass(m)
    distance = _mean(m, "weight") + mass - 2 * overlap
    largest = m["advantage_max"].clamp(min=0.0)  # minus infinity without rows
    return torch.where(m["rows"] > 0, SCORE_NORM * largest * distance.clamp(min=0.0), 0.0)


def variance_bound(m: Moments) -> Tensor:
    """2 E A^2 w^2: N responses have a variance of the gradient at the logits (trace) of at most this / N."""
    return SCORE_NORM**2 * _mean(m, "power")


ESTIMATOR_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "missed": missed,
    "missed_token": missed_token,
    "second_moment": second_moment,
    "ess": ess,
    "bias_bound": bias_bound,
    "variance_bound": variance_bound,
}
