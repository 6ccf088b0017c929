"""Scores completions as a faulty trainer lays them out: padding attended or counted, a window, rows packed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.engines.hf import Head, Ids


@dataclass(frozen=True)
class Layout:
    """How a row is laid out.

    Args:
        attended: tokens attend the left padding.
        counted: positions count the left padding, as without ``position_ids``.
        window: a token sees this many tokens, itself included; None = all before it.
        pad: id of the padding.
        gap: the completion's positions do not count the left padding, the prompt's do: they overlap.
        reset: the completion's positions begin at 0 again.
        both_ways: tokens of the prompt see later ones of the prompt, too.
        between: the padding is between prompt and completion, as after prompts that are padded on the right.
        chunk: a token sees those of its chunk of this many tokens (chunked attention); None = all before it.
        moved: the completion's positions are that many too high.
    """

    attended: bool = False
    counted: bool = False
    window: int | None = None
    pad: int = 0
    gap: bool = False
    reset: bool = False
    both_ways: bool = False
    between: bool = False
    chunk: int | None = None
    moved: int = 0


@torch.no_grad()
def score_in_layout(
    model: Any, prompt_ids: Ids, completion_ids: Ids, layout: Layout, *, prompt_width: int, head: Head | None = None
) -> Floats:
    """Log-probs (B, T) in nats, NaN beyond the end of a completion.

    Args:
        model: a causal LM.
        prompt_ids: B prompts, padded on the left to ``prompt_width``.
        completion_ids: B completions, padded on the right.
        layout: what differs from the plain layout.
        prompt_width: length of the longest prompt of the batch that the trainer saw.
        head: temperature and truncation; None = none.
    """
    width = max(len(ids) for ids in completion_ids)
    out = np.full((len(completion_ids), width), np.nan)
    device = next(model.parameters()).device
    for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        padding = max(prompt_width - len(prompt), 0)
        pads = [layout.pad] * padding
        ids = torch.tensor([[*prompt, *pads, *completion] if layout.between else [*pads, *prompt, *completion]])
        positions = _positions(len(prompt), len(completion), padding, layout)
        _check_positions(model, int(positions.max()))
        logits = model(
            input_ids=ids.to(device),
            attention_mask=_mask(_allowed(ids.shape[1], padding, len(prompt), layout), model.dtype).to(device),
            position_ids=positions[None].to(device),
            use_cache=False,
        ).logits[0]
        first = padding + len(prompt)  # the first token is predicted by the prompt's last one, wherever it stands
        told = (
            torch.cat([logits[len(prompt) - 1 : len(prompt)], logits[first:-1]])
            if layout.between
            else logits[first - 1 : -1]
        )
        out[row, : len(completion)] = _chosen(head or Head(), told, completion)
    return out


def _check_positions(model: Any, last: int) -> None:
    """A model with a table of positions reads beyond its end, which on a GPU ends the process."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and last >= limit:
        raise IndexError(f"positions go up to {last}, and the model has {limit}")


def _chosen(head: Head, logits: Tensor, completion: Sequence[int]) -> Floats:
    """(T,) log-probs of the tokens of a completion under the logits (T, V) that predict them."""
    return head.logps(logits.cpu()).gather(1, torch.tensor(completion)[:, None])[:, 0].double().numpy()


@torch.no_grad()
def score_packed(
    model: Any, prompt_ids: Ids, completion_ids: Ids, rows: Sequence[int], *, width: int, head: Head
) -> Floats:
    """Log-probs (B, ``width``) in nats of rows that attend the batch's row before them; NaN in the other rows.

    Both stand in one sequence, as packed rows do, and positions begin again with the second. Attention that takes no
    notice of the border makes that of it.
    """
    out = np.full((len(completion_ids), width), np.nan)
    device = next(model.parameters()).device
    for row in rows:
        before = [*prompt_ids[row - 1], *completion_ids[row - 1]] if row else []
        own = [*prompt_ids[row], *completion_ids[row]]
        places = torch.cat([torch.arange(len(before)), torch.arange(len(own))])
        everything = torch.ones(len(places), len(places), dtype=torch.bool).tril()
        logits = model(
            input_ids=torch.tensor([[*before, *own]], device=device),
            attention_mask=_mask(everything, model.dtype).to(device),
            position_ids=places[None].to(device),
            use_cache=False,
        ).logits[0, len(before) + len(prompt_ids[row]) - 1 : -1]
        logps = _chosen(head, logits, completion_ids[row])[:width]
        out[row, : len(logps)] = logps
    return out


def _positions(prompt: int, completion: int, padding: int, layout: Layout) -> Tensor:
    """(L,) positions of padding, prompt and completion."""
    positions = torch.arange(padding + prompt + completion)
    if layout.between:
        if not layout.counted:
            positions[prompt:] = (positions[prompt:] - padding).clamp(min=prompt - 1)
        return positions
    if not layout.counted and not layout.gap:
        positions = (positions - padding).clamp(min=0)
    if layout.gap:
        positions[padding + prompt :] -= padding
    if layout.reset:
        positions[padding + prompt :] = torch.arange(completion)
    positions[padding + prompt :] += layout.moved
    return positions


def _mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """(1, 1, L, L): what is added to the scores. Eager attention would add a bool mask as it is."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def _allowed(length: int, padding: int, prompt: int, layout: Layout) -> Tensor:
    """(L, L) bool: which positions (columns) each position (rows) sees."""
    place = torch.arange(length)
    seen = place[None] <= place[:, None]
    if layout.both_ways:
        seen |= (place < padding + prompt)[None] & (place < padding + prompt)[:, None]
    if layout.window is not None:
        seen &= place[None] > place[:, None] - layout.window
    if layout.chunk is not None:
        seen &= place[None] // layout.chunk == place[:, None] // layout.chunk
    if not layout.attended and layout.between:
        pads = (place >= prompt) & (place < prompt + padding)
        seen &= ~pads[None] | (place[None] == place[:, None])
    elif not layout.attended:
        seen &= (place[None] >= padding) | (place[None] == place[:, None])  # a padding token sees itself: no empty row
    return seen


def layouts(prompt_ids: Ids, rows: Sequence[int], *, pad_ids: Sequence[int]) -> dict[str, tuple[Layout, int]]:
    """What may be tested on these rows, by ``cause:detail``: the layout, and the width of the prompts."""
    widest = max(len(ids) for ids in prompt_ids)
    found: dict[str, tuple[Layout, int]] = {}
    if any(len(prompt_ids[row]) < widest for row in rows):
        found["padding:left padding counted in the positions of the prompt alone"] = (Layout(gap=True), widest)
        found["padding:padding between prompt and completion counted in the positions"] = (
            Layout(between=True, counted=True), widest
        )  # fmt: skip
        for pad in dict.fromkeys(pad_ids):
            found[f"padding:padding (id {pad}) between prompt and completion attended"] = (
                Layout(between=True, attended=True, pad=pad), widest
            )  # fmt: skip
            found[f"padding:padding (id {pad}) between prompt and completion attended and counted"] = (
                Layout(between=True, attended=True, counted=True, pad=pad), widest
            )  # fmt: skip
            found[f"padding:left padding (id {pad}) attended"] = (Layout(attended=True, pad=pad), widest)
            found[f"padding:left padding (id {pad}) attended and counted in the positions"] = (
                Layout(attended=True, counted=True, pad=pad), widest
            )  # fmt: skip
    found["padding:positions that begin again at the completion"] = (Layout(reset=True), widest)
    for moved, where in ((1, "too high"), (-1, "too low")):
        found[f"padding:positions one {where} from the completion on"] = (Layout(moved=moved), widest)
    found["model_config:prompt attended both ways (no causal mask)"] = (Layout(both_ways=True), widest)
    return found


def windows(prompt_ids: Ids, completion_ids: Ids, rows: Sequence[int]) -> tuple[float, ...]:
    """Sizes of an attention window that these rows would feel."""
    longest = max(len(prompt_ids[row]) + len(completion_ids[row]) for row in rows)
    return tuple(float(size) for size in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if size < longest)[-5:]
