"""Sampling from, and scoring with, a causal LM, with what attribution needs beyond the log-prob of the token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trl_offpolicy.functional.truncated_sampling import Truncation, truncated_support

Floats = NDArray[np.float64]
Ids = Sequence[Sequence[int]]
PAD = 0
"""Fills positions that are masked; any id does."""


@dataclass(frozen=True)
class Head:
    """How logits become a distribution.

    Args:
        temperature: divides the logits.
        truncation: what is cut after that.
    """

    temperature: float = 1.0
    truncation: Truncation = Truncation()  # noqa: RUF009  frozen

    def logps(self, logits: Tensor) -> Tensor:
        """(N, V) float32 log-probs of (N, V) logits; tokens that are cut get ``-inf``."""
        scaled = logits.float() / self.temperature
        if self.truncation:
            scaled = scaled + truncated_support(scaled, self.truncation).weights(scaled).log()
        return scaled.log_softmax(-1)


@dataclass(frozen=True)
class TokenScores:
    """What a model says about given tokens; (B, T), NaN beyond the end of a completion.

    Args:
        logps: log-probs of the tokens, nats.
        entropies: of the distribution at each position, nats.
        top_logps: log-prob of the most likely token, nats.
        ranks: how many tokens are more likely than the given one.
    """

    logps: Floats
    entropies: Floats
    top_logps: Floats
    ranks: Floats


@torch.no_grad()
def score_completions(
    model: Any, prompt_ids: Ids, completion_ids: Ids, *, heads: Sequence[Head] = (Head(),), rows: int = 16
) -> list[TokenScores]:
    """Score completions under one or more heads, with one forward.

    Prompts that stand one after the other and are equal are computed once.

    Args:
        model: a causal LM; it stays in the mode (train or eval) that it is in.
        prompt_ids: B prompts.
        completion_ids: B completions.
        heads: distributions to take from the logits.
        rows: completions a forward, at most.

    Returns:
        One entry a head.
    """
    width = max(len(ids) for ids in completion_ids)
    out = np.full((len(heads), 4, len(completion_ids), width), np.nan)
    for first, logits, ids, mask in _forwards(model, prompt_ids, completion_ids, rows):
        for place, head in enumerate(heads):
            found = _token_scores(head.logps(logits[mask]), ids[mask])
            block = np.full((4, *mask.shape), np.nan)
            block[:, mask.numpy()] = found
            out[place, :, first : first + len(mask), : mask.shape[1]] = block
    return [TokenScores(*scores) for scores in out]


def _token_scores(logps: Tensor, ids: Tensor) -> Floats:
    """(4, N): log-prob, entropy, log-prob of the most likely token, rank."""
    chosen = logps.gather(1, ids.unsqueeze(1)).squeeze(1)
    entropy = torch.special.entr(logps.exp()).sum(1)
    ranks = (logps > chosen.unsqueeze(1)).sum(1)
    scores: Floats = torch.stack([x.double() for x in (chosen, entropy, logps.amax(1), ranks)]).cpu().numpy()
    return scores


def _forwards(
    model: Any, prompt_ids: Ids, completion_ids: Ids, rows: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(first row, logits (b, t, V), ids (b, t), mask (b, t)) of each forward, on the CPU."""
    for start in range(0, len(completion_ids), rows):
        completions = completion_ids[start : start + rows]
        cache, attention, last = _prefill(model, prompt_ids[start : start + rows])
        ids, mask = _right_padded(completions)
        device = last.device
        logits = last.unsqueeze(1)
        if ids.shape[1] > 1:
            attention = torch.cat([attention, mask[:, :-1].long()], 1)
            positions = attention.cumsum(1)[:, -(ids.shape[1] - 1) :] - 1
            out = model(
                input_ids=ids[:, :-1].to(device),
                attention_mask=attention.to(device),
                position_ids=positions.clamp(min=0).to(device),
                past_key_values=cache,
            )
            logits = torch.cat([logits, out.logits.float()], 1)
        yield start, logits.cpu(), ids, mask


def _prefill(model: Any, prompt_ids: Ids) -> tuple[Any, Tensor, Tensor]:
    """Cache, attention mask (b, P) on the CPU, and logits (b, V) of the first token, one row a prompt given."""
    groups = [(list(key), len(list(same))) for key, same in groupby(map(tuple, prompt_ids))]
    width = max(len(key) for key, _ in groups)
    ids = torch.tensor([[PAD] * (width - len(key)) + key for key, _ in groups])
    mask = torch.tensor([[0] * (width - len(key)) + [1] * len(key) for key, _ in groups])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    device = next(model.parameters()).device
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    out = model(**{k: v.to(device) for k, v in inputs.items()}, use_cache=True, logits_to_keep=1)
    index = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([count for _, count in groups]))
    out.past_key_values.batch_select_indices(index.to(device))
    return out.past_key_values, mask[index], out.logits[:, -1].float()[index.to(device)]


def _right_padded(rows: Ids) -> tuple[Tensor, Tensor]:
    width = max(1, max(len(row) for row in rows))
    ids = torch.tensor([list(row) + [PAD] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return ids, mask


@torch.no_grad()
def sample_completions(
    model: Any,
    prompt_ids: Ids,
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    head: Head | None = None,
    generator: torch.Generator | None = None,
    rows: int = 64,
) -> tuple[list[list[int]], list[list[float]]]:
    """One completion of each prompt, with the log-prob of each token under the distribution it was drawn from.

    Args:
        model: a causal LM; it stays in its mode.
        prompt_ids: B prompts; repeat one for several completions.
        max_tokens: longest completion.
        stop_ids: tokens that end a completion (they are part of it).
        head: temperature and truncation.
        generator: of the random numbers, on the CPU.
        rows: completions at a time.

    Returns:
        Completion ids and log-probs (nats), one list a prompt.
    """
    ids: list[list[int]] = []
    logps: list[list[float]] = []
    for start in range(0, len(prompt_ids), rows):
        for tokens, values in _sample_block(
            model, prompt_ids[start : start + rows], max_tokens, set(stop_ids), head or Head(), generator
        ):
            ids.append(tokens)
            logps.append(values)
    return ids, logps


def _sample_block(
    model: Any, prompts: Ids, max_tokens: int, stop: set[int], head: Head, generator: torch.Generator | None
) -> Iterator[tuple[list[int], list[float]]]:
    cache, attention, logits = _prefill(model, prompts)
    device = logits.device
    tokens: list[list[int]] = [[] for _ in prompts]
    values: list[list[float]] = [[] for _ in prompts]
    alive = [True] * len(prompts)
    for place in range(max_tokens):
        logps = head.logps(logits.cpu())
        drawn = torch.multinomial(logps.exp(), 1, generator=generator)
        chosen = logps.gather(1, drawn).squeeze(1).tolist()
        for row, token in enumerate(drawn.squeeze(1).tolist()):
            if alive[row]:
                tokens[row].append(token)
                values[row].append(chosen[row])
                alive[row] = token not in stop
        if not any(alive) or place + 1 == max_tokens:
            break
        attention = torch.cat([attention, torch.ones(len(prompts), 1, dtype=attention.dtype)], 1)
        positions = attention.sum(1, keepdim=True) - 1
        logits = model(
            input_ids=drawn.to(device),
            attention_mask=attention.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
        ).logits[:, -1]
    yield from zip(tokens, values, strict=True)
