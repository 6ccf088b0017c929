"""Scores completions as an engine does whose prefix cache was kept over a sync: old keys and values of the prompt.

Engines keep the keys and values of prompts in blocks. After a sync they are those of the old weights, unless the cache
is emptied. The last block that a prompt does not fill, and the completion, are computed with the new weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_offpolicy.diagnosis.attribution.contexts.precision import Inside
from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.diagnosis.attribution.trials.search import Search
from trl_offpolicy.engines.hf import Head

BLOCKS = (1, 8, 16, 32, 64, 128)
"""Usual numbers of tokens in a block: 1 in SGLang, 16 in vLLM on most GPUs, 128 on CPUs."""


def cached_tokens(prompt: int, block: int) -> int:
    """Tokens of a prompt of this length that come from the cache: full blocks, and never its last token.

    Example:
        >>> cached_tokens(33, 16), cached_tokens(32, 16), cached_tokens(9, 16), cached_tokens(9, 1)
        (32, 16, 0, 8)
    """
    return (prompt - 1) // block * block


def blocks(search: Search) -> tuple[float, ...]:
    """Sizes of a block that divide the prompts in different ways; the larger of two that do not."""
    lengths = [len(search.bench.prompt_ids[row]) for row in search.rows]
    ways = {tuple(cached_tokens(length, block) for length in lengths): block for block in BLOCKS}
    return tuple(sorted(float(block) for way, block in ways.items() if any(way)))


@torch.no_grad()
def score_after(search: Search, inside: Inside, block: int, rows: Sequence[int]) -> Floats:
    """Log-probs (B, T) in nats of the completions ``rows``, NaN elsewhere.

    Args:
        search: the search.
        inside: the context in which the cached keys and values were computed.
        block: tokens of a block.
        rows: completions.
    """
    bench = search.bench
    out = np.full_like(search.plain.logps, np.nan)
    for row in rows:
        prompt, completion = list(bench.prompt_ids[row]), list(bench.completion_ids[row])[: search.width]
        if completion:
            out[row, : len(completion)] = _score_row(bench.model, prompt, completion, inside, block, bench.head)
    return out


def _score_row(
    model: torch.nn.Module, prompt: list[int], completion: list[int], inside: Inside, block: int, head: Head
) -> Floats:
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *completion]], device=device)
    held, cache = cached_tokens(len(prompt), block), None
    if held:
        with inside():
            cache = model(input_ids=ids[:, :held], use_cache=True).past_key_values
    logits = model(input_ids=ids[:, held:], past_key_values=cache, use_cache=True).logits[0]
    logps = head.logps(logits[len(prompt) - 1 - held : -1].float().cpu())
    return logps.gather(1, ids[0, len(prompt) :, None].cpu())[:, 0].double().numpy()
