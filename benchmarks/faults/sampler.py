"""An engine that samples as it is told to, and reports what it is told to: penalties, bans, speculation, other orders.

``trl_offpolicy.engines.hf`` samples from what it reports. This one need not, and its next token may depend on what it
has said already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.engines.hf import Head, Ids

Said = Sequence[Sequence[int]]
Drawing = Callable[[Tensor, Said, Said, torch.Generator], tuple[Tensor, Tensor]]
"""(logits (N, V), prompts, completions so far, generator) -> (drawn ids (N,), reported log-probs (N, V))."""


def plain(head: Head | None = None) -> Drawing:
    """Draw from the head's distribution and report it."""
    chosen = head or Head()

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        logps = chosen.logps(logits)
        return _draw(logps, generator), logps

    return drawing


def processed(change: Callable[[Tensor, Said, Said], Tensor]) -> Drawing:
    """Draw from changed logits and report their log-probs, as vLLM does with ``processed_logprobs``."""

    def drawing(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        logps = change(logits.clone(), prompts, said).log_softmax(-1)
        return _draw(logps, generator), logps

    return drawing


def reporting_raw(head: Head) -> Drawing:
    """Draw from the head's distribution, report the model's own: vLLM's ``raw_logprobs``."""

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return _draw(head.logps(logits), generator), logits.log_softmax(-1)

    return drawing


def speculated(*, flatness: float, leniency: float) -> Drawing:
    """A draft proposes, and is accepted with min(1, leniency p / q): above 1 that is lossy. The report is p.

    Args:
        flatness: temperature of the draft's distribution q; p is the model's.
        leniency: 1 = exact speculative sampling.
    """

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        logps, draft = logits.log_softmax(-1), (logits / flatness).log_softmax(-1)
        proposed = _draw(draft, generator)
        ratio = (logps - draft).gather(1, proposed[:, None])[:, 0].exp() * leniency
        accepted = torch.rand(len(ratio), generator=generator) < ratio
        left = (logps.exp() - draft.exp()).clamp(min=0) + 1e-12
        return torch.where(accepted, proposed, _draw(left.log(), generator)), logps

    return drawing


def _draw(logps: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(logps.exp(), 1, generator=generator)[:, 0]


@dataclass(frozen=True)
class Order:
    """In which pieces an engine computes; no order is a fault.

    Args:
        rows: most completions at a time.
        chunk: prompt tokens of one forward; None = all at once.
    """

    rows: int = 64
    chunk: int | None = None


@torch.no_grad()
def sample(
    model: Any, prompts: Said, drawing: Drawing, *, max_tokens: int, stop: Sequence[int], generator: torch.Generator,
    order: Order | None = None,
) -> tuple[list[list[int]], list[list[float]]]:  # fmt: skip
    """One completion of each prompt, and the reported log-prob of each of its tokens.

    Args:
        model: a causal LM in eval mode.
        prompts: B prompts; equal neighbours are computed once.
        drawing: how the next token is drawn and what is reported.
        max_tokens: length of the longest completion.
        stop: ids that end a completion (they are part of it).
        generator: of the random numbers.
        order: in which pieces to compute.
    """
    order = order or Order()
    ids: list[list[int]] = []
    logps: list[list[float]] = []
    for start in range(0, len(prompts), order.rows):
        block = prompts[start : start + order.rows]
        tokens, values = _block(model, block, drawing, max_tokens, set(stop), generator, order.chunk)
        ids += tokens
        logps += values
    return ids, logps


def _block(
    model: Any, prompts: Said, drawing: Drawing, length: int, stop: set[int], generator: torch.Generator,
    chunk: int | None,
) -> tuple[list[list[int]], list[list[float]]]:  # fmt: skip
    cache, mask, logits = prefill(model, prompts, chunk)
    tokens: list[list[int]] = [[] for _ in prompts]
    values: list[list[float]] = [[] for _ in prompts]
    alive = [True] * len(prompts)
    for place in range(length):
        drawn, reported = drawing(logits.float(), prompts, tokens, generator)
        chosen = reported.gather(1, drawn[:, None])[:, 0].tolist()
        for row, token in enumerate(drawn.tolist()):
            if alive[row]:
                tokens[row].append(token)
                values[row].append(chosen[row])
                alive[row] = token not in stop
        if not any(alive) or place + 1 == length:
            break
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
        positions = mask.sum(1, keepdim=True) - 1
        out = model(input_ids=drawn[:, None], attention_mask=mask, position_ids=positions, past_key_values=cache)
        logits = out.logits[:, -1]
    return tokens, values


def prefill(model: Any, prompts: Ids, chunk: int | None = None) -> tuple[Any, Tensor, Tensor]:
    """Cache, attention mask (B, P) and logits (B, V) after the prompts; equal neighbours are computed once."""
    distinct = [list(row) for n, row in enumerate(prompts) if n == 0 or list(row) != list(prompts[n - 1])]
    starts = [int(n == 0 or list(row) != list(prompts[n - 1])) for n, row in enumerate(prompts)]
    index = torch.tensor(starts).cumsum(0) - 1
    ids, mask = left_padded(distinct)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    width = ids.shape[1]
    cache, logits = None, None
    for begin in range(0, width, chunk or width):
        end = min(width, begin + (chunk or width))
        out = model(
            input_ids=ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        cache, logits = out.past_key_values, out.logits[:, -1]
    assert cache is not None and logits is not None
    cache.batch_select_indices(index)
    return cache, mask[index], logits[index]


def left_padded(rows: Said, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, P) of rows that end together."""
    width = max(map(len, rows))
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
