"""Log-probs of a whole or a truncated distribution, from hidden states and the LM head, without the (N, V) logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_offpolicy.functional.truncated_sampling import KeptIds, Support, Truncation, listed_weights, truncated_support

TILE = 128
"""Tokens per tile, by default. With a vocabulary of 150,000 a tile and its exponentials are 154 MB."""
_BLOCK = 2048
"""Rows of a head in 16 bits that a CPU converts at a time."""


class TruncatedLogProbs(NamedTuple):
    """What the head says about each target; float32 (float64 for float64 input)."""

    log_probs: Tensor
    """(N,) log-prob of each target, nats, with gradient."""
    entropies: Tensor
    """(N,) entropy of the truncated distribution, from which the log-probs are, nats, with gradient."""
    sum_sq_probs: Tensor
    """(N,) sum of squared probabilities of the truncated distribution; no gradient."""
    outside: Tensor
    """(N,) bool: the kept set lacked this target, and it was added."""


Gather = Callable[[Tensor, Tensor | None], AbstractContextManager[Any]]
"""``gather(weight, bias)``: a context in which a sharded head can be read."""


def _whole(weight: Tensor, bias: Tensor | None) -> AbstractContextManager[Any]:
    return nullcontext()


class _Options(NamedTuple):
    temperature: float
    truncation: Truncation
    logit_scale: float
    softcap: float | None
    tile: int
    gather: Gather


def truncated_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    truncation: Truncation = Truncation(),  # noqa: B008 - frozen
    kept_ids: KeptIds | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile: int = TILE,
    gather: Gather = _whole,
) -> TruncatedLogProbs:
    """Log-probs, entropies and sum p^2 of ``targets`` under the softmax of the logits, cut to the kept set S.

        log p(y) = z_y - log sum_{j in S + {y}} exp(z_j)

    where z are the logits over the temperature. S is what vLLM would keep (:func:`truncated_support`), or ``kept_ids``.
    A target outside of S is added to it: the engine did sample it. S carries no gradient (it is piecewise constant), so
    tokens outside of it get none.

    Memory: nothing has the size N x V. In float32 forward and backward hold at most ``8 bytes x tile x V`` above their
    inputs if nothing is cut; with a cut the forward holds 28 (top-p sorts, with positions in int64), the backward 20. A
    softcap adds 4 to the backward, which also holds float32 gradients of hidden and weight. In 16 bits a tile's
    projection and its gradient are held in these as well (2 bytes x tile x V each), and on a CPU blocks of the operands
    in float32. Under autocast each of the two passes makes a copy of the weight in that dtype. The inputs and four
    numbers per token are kept for the backward. Time: the backward projects again, as TRL's head does, and top-p sorts
    the vocabulary at each token.

    Args:
        hidden: (N, H) last hidden states.
        weight: (V, H) LM head.
        targets: (N,) int64 token ids.
        bias: (V,) or None.
        temperature: the engine's, > 0.
        truncation: the engine's top_p, top_k, min_p; for the positions of which it is not known what the engine kept.
        kept_ids: what the engine kept at the N positions; None = it is known of none.
        logit_scale: the model's factor on the logits.
        softcap: the model's ``c * tanh(logits / c)``, or None.
        tile: tokens computed at a time.
        gather: a context for the backward, which reads the head again; the caller enters its own around the forward.

    Raises:
        ValueError: a shape or option that does not fit.

    Example:
        >>> head = torch.tensor([[0.5], [0.3], [0.2]]).log()
        >>> out = truncated_log_probs(torch.ones(1, 1), head, torch.tensor([0]), truncation=Truncation(top_p=0.75))
        >>> out.log_probs.exp()  # 0.5 / (0.5 + 0.3)
        tensor([0.6250])
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden and weight must be (N, H) and (V, H), but got {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be ({len(hidden)},) as hidden, but got {tuple(targets.shape)}.")
    if kept_ids is not None and len(kept_ids) != len(hidden):
        raise ValueError(f"kept_ids must have {len(hidden)} positions as hidden, but got {len(kept_ids)}.")
    if temperature <= 0.0 or tile < 1:
        raise ValueError(f"temperature and tile must be positive, but got {temperature} and {tile}.")
    options = _Options(temperature, truncation, logit_scale, softcap, tile, gather)
    columns = _TiledHead.apply(hidden, weight, bias, targets, kept_ids, options)  # type: ignore[no-untyped-call]
    return TruncatedLogProbs(*columns)


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        kept_ids: KeptIds | None,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.options, ctx.dtype, ctx.kept_ids = options, _compute_dtype(hidden), kept_ids
        head, shift = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        columns = [_forward_tile(hidden[rows].to(ctx.dtype), head, shift, targets[rows],
                                 None if kept_ids is None else kept_ids[rows], options)
                   for rows in _tiles(len(hidden), options.tile)]  # fmt: skip
        log_probs, log_z, entropy, sum_sq, lowest, share, outside = (
            torch.cat(parts) for parts in zip(*columns, strict=True)
        )
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy, lowest, share)
        ctx.mark_non_differentiable(sum_sq, outside)
        return log_probs, entropy, sum_sq, outside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: object) -> Any:
        hidden, weight, bias, targets, log_z, entropy, lowest, share = ctx.saved_tensors
        kept_ids = ctx.kept_ids
        with ctx.options.gather(weight, bias):
            sums = [torch.zeros_like(value, dtype=_wide(value.dtype)) if value is not None and needed else None
                    for value, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)]  # fmt: skip
            head, shift = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            for rows in _tiles(len(hidden), ctx.options.tile):
                states = hidden[rows].to(ctx.dtype)
                grad = _backward_tile(
                    states, head, shift, targets[rows], None if kept_ids is None else kept_ids[rows], ctx.options,
                    Support(lowest[rows], share[rows]), log_z[rows], entropy[rows],
                    _rows(grad_logp, rows), _rows(grad_entropy, rows),
                )  # fmt: skip
                _accumulate(sums, rows, grad, states, head)
                del grad  # before the next tile is made
        dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        grads = (None if total is None else total.to(dtype) for total, dtype in zip(sums, dtypes, strict=True))
        return *grads, None, None, None


def _tiles(count: int, size: int) -> Iterator[slice]:
    """Slices of ``tile`` rows; at least one, so that an empty batch keeps its place in the graph."""
    for start in range(0, max(count, 1), size):
        yield slice(start, min(start + size, count))


def _rows(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows].unsqueeze(1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of the projection: autocast's if it is on, as in TRL's head and the engine's."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _logits(
    states: Tensor, head: Tensor, shift: Tensor | None, options: _Options, *, with_slope: bool = False
) -> tuple[Tensor, Tensor | float]:
    """(n, V) logits over temperature, and their derivative by the projection."""
    projected = states @ head.t() if shift is None else torch.addmm(shift, states, head.t())
    scaled = _times(projected.to(_wide(projected.dtype)), options.logit_scale)
    slope: Tensor | float = options.logit_scale / options.temperature
    if options.softcap is not None:
        bent = scaled.div_(options.softcap).tanh_()
        slope = bent.square().neg_().add_(1.0).mul_(slope) if with_slope else slope
        scaled = bent.mul_(options.softcap)
    return scaled if options.temperature == 1.0 else scaled.div_(options.temperature), slope


def _times(values: Tensor, factor: Tensor | float) -> Tensor:
    """``values * factor`` in place; no pass over them if the factor is 1."""
    return values if isinstance(factor, float) and factor == 1.0 else values.mul_(factor)


def _support(logits: Tensor, listed: KeptIds | None, truncation: Truncation) -> Support:
    """What the truncation keeps; where it is known what the engine kept, the rule is not applied."""
    if listed is None:
        return truncated_support(logits, truncation)
    lowest = torch.full_like(logits[:, 0], -torch.inf)
    share = torch.ones_like(lowest)
    if truncation and len(listed.unknown):
        places = listed.unknown.to(logits.device)
        found = truncated_support(logits[places], truncation)
        lowest, share = lowest.index_copy(0, places, found.lowest), share.index_copy(0, places, found.share)
    return Support(lowest, share)


def _weights(logits: Tensor, support: Support, listed: KeptIds | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(n, V) weights of the kept tokens, the target among them; (n,) whether it had to be added."""
    if listed is None:
        weights = support.weights(logits)
    else:
        weights = listed_weights(listed, logits.shape[1], device=logits.device).to(logits.dtype)
        if len(listed.unknown):
            places = listed.unknown.to(logits.device)
            by_rule = Support(support.lowest[places], support.share[places]).weights(logits[places])
            weights.index_copy_(0, places, by_rule)
    at_target = weights.gather(1, targets.unsqueeze(1))
    outside = at_target == 0
    return weights.scatter_(1, targets.unsqueeze(1), torch.where(outside, 1.0, at_target)), outside.squeeze(1)


def _forward_tile(
    states: Tensor, head: Tensor, shift: Tensor | None, targets: Tensor, listed: KeptIds | None, options: _Options
) -> tuple[Tensor, ...]:
    """One tile, as columns (n,): log-prob, log of the normaliser, entropy, sum p^2, lowest, share, outside."""
    logits, _ = _logits(states, head, shift, options)
    support = _support(logits, listed, options.truncation)
    weights, outside = None, torch.zeros_like(targets, dtype=torch.bool)
    if options.truncation or listed is not None:
        weights, outside = _weights(logits, support, listed, targets)
    # A reported set may lack the most likely tokens: the largest logit is that of the set, and nothing may overflow.
    top = (logits if weights is None or listed is None else torch.where(weights > 0, logits, -torch.inf)).amax(dim=1)
    exp = logits - top.unsqueeze(1)
    exp = (exp if listed is None else exp.clamp_(max=0.0)).exp_()
    mass = exp if weights is None else weights.mul_(exp)
    total = mass.sum(dim=1)
    log_z = top + total.log()
    log_probs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - log_z
    # Last and in place: nothing reads the logits and the exponentials any more.
    entropy = log_z - logits.mul_(mass).sum(dim=1) / total
    sum_sq = exp.mul_(mass).sum(dim=1) / total.square()
    return log_probs, log_z, entropy, sum_sq, support.lowest, support.share, outside


def _backward_tile(
    states: Tensor,
    head: Tensor,
    shift: Tensor | None,
    targets: Tensor,
    listed: KeptIds | None,
    options: _Options,
    support: Support,
    log_z: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """One tile's gradient of the projection, (n, V): ``g (1[j = y] - p_j) - h p_j (log p_j + H)`` times the slope."""
    logits, slope = _logits(states, head, shift, options, with_slope=True)
    weights = None
    if options.truncation or listed is not None:
        weights = _weights(logits, support, listed, targets)[0]
    log_p = logits.sub_(log_z.unsqueeze(1))
    if listed is not None:
        log_p.clamp_(max=0.0)  # outside a reported set it may be anything
    if grad_entropy is None:
        grad = log_p.zero_() if grad_logp is None else log_p.exp_().mul_(-grad_logp)
    else:
        probs = log_p.exp()
        factor = log_p.add_(entropy.unsqueeze(1)).mul_(-grad_entropy)
        grad = probs.mul_(factor if grad_logp is None else factor.sub_(grad_logp))
    if weights is not None:
        grad.mul_(weights)
    if grad_logp is not None:
        grad.scatter_add_(1, targets.unsqueeze(1), grad_logp.to(grad.dtype))
    return _times(grad, slope)


def _accumulate(sums: list[Tensor | None], rows: slice, grad: Tensor, states: Tensor, head: Tensor) -> None:
    """Add a tile's part to those gradients of hidden, weight and bias that are wanted."""
    grad = grad.to(states.dtype)
    if sums[0] is not None:
        _add_product(sums[0][rows], grad, head)
    if sums[1] is not None:
        _add_product(sums[1], grad.t(), states)
    if sums[2] is not None:
        sums[2].add_(grad.sum(dim=0, dtype=sums[2].dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, not rounded to 16 bits before it is added (as TRL's head does)."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:  # the CPU has no such product: a copy in float32, a block of the vocabulary at a time
        for rows in _tiles(len(total), _BLOCK):
            for inner in _tiles(len(right), _BLOCK):
                total[rows].addmm_(left[rows, inner].to(total.dtype), right[inner].to(total.dtype))
