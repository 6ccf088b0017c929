"""The correction of slime and miles: ``--use-tis --custom-tis-function-path trl_offpolicy.integrations.slime.correct``.

The method comes from the file of ``--custom-config-path``, whose entries slime makes its arguments:

.. code-block:: yaml

    offpolicy: {preset: paper/tis, run_dir: runs/slime}

The policy loss, its clip and its denominators stay slime's; rejected tokens leave the loss and the KL term, not the
denominators. With ``--get-mismatch-metrics`` in the place of ``--use-tis`` nothing is corrected, only measured. Read in
slime 624b824a8 and miles 31f1ca961.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy import presets
from trl_offpolicy.integrations._common import Method, logged, padded, read_method, record
from trl_offpolicy.types import PolicyBatch

_Rows = Callable[[list[Tensor]], list[Tensor]]


def correct(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int] | None = None,
    response_lengths: list[int] | None = None,
    **layout: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Weighted loss of each token, masks without the rejected tokens, and numbers for the log, as slime asks for them.

    Args:
        args: slime's arguments; ``offpolicy`` names the method. Without ``use_tis`` losses and masks stay as they are.
        pg_loss: (N,) the loss of each token of this context-parallel rank, all responses after one another.
        train_log_probs: log pi_old of each response; a part of it under context parallelism.
        rollout_log_probs: log mu, in the same layout.
        loss_masks: 0/1 of each response, always whole.
        total_lengths: tokens of prompt and response.
        response_lengths: tokens of each response.
        **layout: what miles gives beside these; its ``parallel_state`` is read.

    Raises:
        ValueError: no method, log-probs are missing, or the method has a loss of its own or reads advantages.
        NotImplementedError: the method needs more than a micro-batch, or miles splits responses over ranks.
    """
    method = _method(args)
    if not args.use_tis:  # slime asks for the numbers alone (--get-mismatch-metrics): nothing is weighted or dropped
        method = replace(method, preset=presets.get("measure"))
    if not train_log_probs or not rollout_log_probs:
        raise ValueError("train_log_probs and rollout_log_probs must be given for a correction, but got none.")
    lengths = [len(mask) for mask in loss_masks]
    old, sampling = train_log_probs, rollout_log_probs
    split = _is_split([len(row) for row in old] != lengths, layout.get("parallel_state"))
    if split:
        gather, _ = _context_parallel(total_lengths, response_lengths)
        old, sampling = gather(old), gather(sampling)
    current = padded(row.detach() for row in old)
    batch = PolicyBatch(  # the correction alone reads it: no loss, no advantages
        per_token_logps=current,
        old_per_token_logps=current,
        sampling_per_token_logps=padded(row.detach() for row in sampling),
        completion_mask=padded(loss_masks) > 0,
        advantages=torch.zeros(len(lengths), device=current.device),
    )
    out = replace(method.correction, measure=("mismatch", "kept"))(batch)
    if pg_loss.requires_grad and not _is_recomputed():
        # miles gives its parallel state beside what slime gives
        record(method, out.stats, framework="slime" if layout.get("parallel_state") is None else "miles")
    # slime takes a mean over tokens of what it logs: the number of the micro-batch, at each token of it
    numbers = {name: pg_loss.detach().new_tensor(value).expand_as(pg_loss) for name, value in logged(out.stats).items()}
    if not args.use_tis:
        return pg_loss, loss_masks, numbers
    weights = [row[:length] for row, length in zip(out.weights, lengths, strict=True)]
    keep = [row[:length].to(mask.dtype) for row, length, mask in zip(out.keep_mask, lengths, loss_masks, strict=True)]
    if split:
        weights = _context_parallel(total_lengths, response_lengths)[1](weights)
    flat = torch.cat(weights) if weights else pg_loss.new_zeros(0)
    return pg_loss * flat.to(pg_loss.dtype), keep, numbers


def _is_recomputed() -> bool:
    """True inside a backward pass: ``--recompute-loss-function`` calls the whole loss there once more.

    That call has a graph like the first one, as slime's checkpoint is not reentrant. Torch's checkpoint asks the same.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def _method(args: Any) -> Method:
    method = read_method(getattr(args, "offpolicy", None), where="offpolicy", framework="slime")
    own = set(method.preset.objective_changes) - {"aggregation", "kl_on", "max_length", "denominator"}
    if own or any(ratio != "old/sampling" for ratio in method.correction.required_ratios):
        raise ValueError(
            f"offpolicy must name weights and masks on old/sampling: the loss is slime's own, but got "
            f"{', '.join(sorted(own | method.correction.required_ratios))}."
        )
    if by_sign := [term.name for term in method.correction.keep if term.reads_advantages]:
        raise ValueError(
            f"offpolicy must not name {', '.join(by_sign)}: these masks read the sign of the advantage, and slime "
            "hands its hook no advantages. On zeros they would drop nothing."
        )
    return method


def _is_split(shorter: bool, state: Any) -> bool:
    """True if responses lie in parts on context-parallel ranks: the same answer on all of them, as each must gather.

    Args:
        shorter: whether a row of this rank is not as long as its mask. Of a short response after a long prompt one rank
            may hold everything and another nothing, so this decides only where there is no such group.
        state: miles' ``ParallelState``; None in slime, whose groups are Megatron's. miles has trainers without those.
    """
    if state is not None:
        return bool(state.cp.size > 1) or shorter
    core = sys.modules.get("megatron.core")
    ranks = 1 if core is None else core.mpu.get_context_parallel_world_size()
    return ranks > 1 or shorter


def _context_parallel(total: list[int] | None, response: list[int] | None) -> tuple[_Rows, _Rows]:
    """The functions that make responses whole over slime's context-parallel ranks, and cut out this rank's parts."""
    if total is None or response is None or "slime" not in sys.modules:
        raise NotImplementedError(
            "train_log_probs must be as long as loss_masks, but are parts: how a context-parallel rank holds one is "
            "known for slime alone."
        )
    utils = import_module("slime.backends.megatron_utils.cp_utils")

    def each(function: Callable[[Tensor, int, int], Tensor]) -> _Rows:
        return lambda rows: [function(*row) for row in zip(rows, total, response, strict=True)]

    return each(utils.all_gather_with_cp), each(utils.slice_log_prob_with_cp)
