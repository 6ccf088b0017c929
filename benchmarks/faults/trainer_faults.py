"""Faults of the trainer and of the book-keeping between the two sides; the samples are the clean ones, mostly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from engine_faults import Context, Inject
from sampler import sample
from torch import Tensor, nn
from worlds import Batch, Made, Rows, Scorer, World, one_pass

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.hf import Head, TokenScores

Floats = Any
TOOL_AFTER = 8
"""Tokens before a tool's output."""


def scores_in(fault: str, inside: Context, **declared: Any) -> Inject:
    """The trainer scores in a context."""

    def inject(world: World) -> Made:
        batch, _ = world.clean
        return Made(fault, batch, world.score(batch, inside=partial(inside, world)), trainer=declared)

    return inject


def scores_by(fault: str, scorer: Scorer) -> Inject:
    """The trainer computes the log-probs in another way."""

    def inject(world: World) -> Made:
        batch, _ = world.clean
        return Made(fault, batch, world.score(batch, scorer=scorer))

    return inject


def sees(fault: str, render: Callable[[World], Rows]) -> Inject:
    """The trainer gets other prompts than were meant."""

    def inject(world: World) -> Made:
        batch, _ = world.clean
        return Made(fault, batch, world.score(batch, seen=render(world)))

    return inject


def scores_at(temperature: float) -> Inject:
    def inject(world: World) -> Made:
        batch, _ = world.clean
        scored = world.score(batch, head=Head(temperature))
        return Made(f"trainer at temperature {temperature}", batch, scored, trainer={"temperature": temperature})

    return inject


def packed(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Two rows in one sequence, and the second sees the first."""
    before = [[] if row % 2 == 0 else [*prompts[row - 1], *ids[row - 1]] for row in range(len(prompts))]
    return one_pass(model, [[*b, *p] for b, p in zip(before, prompts, strict=True)], ids, head)


def noisy(amount: float) -> Context:
    """Every linear layer's output has a relative error that differs from one call to the next."""

    def inside(world: World) -> Any:
        import contexts

        linears = [m for name, m in world.model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name]
        return contexts.hooked(linears, lambda values: values * (1 + amount * torch.randn_like(values)))

    return inside


# ------------------------------------------------------------------------------------------------------- book-keeping


def reports(fault: str, change: Callable[[World, Floats], Floats]) -> Inject:
    """The engine's log-probs (B, T) are changed on their way."""

    def inject(world: World) -> Made:
        batch, scored = world.clean
        return Made(fault, replace(batch, logps=change(world, batch.logps.copy())), scored)

    return inject


def shifted(step: int, every: int = 1) -> Inject:
    """Log-probs ``step`` tokens late, in every ``every``-th row."""

    def change(_world: World, logps: Floats) -> Floats:
        moved = np.roll(logps, step, axis=1)
        moved[:, slice(0, step) if step > 0 else slice(step, None)] = np.nan
        logps[::every] = moved[::every]
        return logps

    return reports(f"log-probs off by {step:+d} in one of {every} rows", change)


def rotated_rows(by: int) -> Callable[[World, Floats], Floats]:
    """Row r gets the log-probs of the row ``by`` later in its block of 4: a group; or of another group."""

    def change(_world: World, logps: Floats) -> Floats:
        if by >= 4:
            return np.roll(logps, -by, axis=0)
        return np.roll(logps.reshape(-1, 4, logps.shape[1]), -by, axis=1).reshape(logps.shape)

    return change


def two_rows_swapped(_world: World, logps: Floats) -> Floats:
    logps[[2, 9]] = logps[[9, 2]]
    return logps


def cumulative(_world: World, logps: Floats) -> Floats:
    return np.where(np.isfinite(logps), np.nancumsum(logps, axis=1), np.nan)


def averaged(_world: World, logps: Floats) -> Floats:
    """Every token has the mean of its row."""
    return np.where(np.isfinite(logps), np.nanmean(logps, axis=1, keepdims=True), np.nan)


def top_tokens(world: World, logps: Floats) -> Floats:
    """The most likely token's log-prob instead of the sampled one's."""
    return np.where(np.isfinite(logps), world.clean_scores.top_logps[:, : logps.shape[1]], np.nan)


def split_token(tokenizer: Any, ids: list[int], row: int) -> list[int]:
    """The same text in other tokens: one token of the first half is written as two."""
    start = row % max(1, len(ids) // 2)
    for place in [*range(start, len(ids)), *range(start)]:
        text = tokenizer.convert_ids_to_tokens(ids[place])
        for cut in range(1, len(text)):
            pieces = [tokenizer.get_vocab().get(part) for part in (text[:cut], text[cut:])]
            if None not in pieces:
                return [*ids[:place], *pieces, *ids[place + 1 :]]
    return ids


def retokenised(every: int, first: int = 0) -> Inject:
    """The trainer scores the text tokenised again, in every ``every``-th row."""

    def inject(world: World) -> Made:
        assert world.task is not None
        batch, scored = world.clean
        split = [split_token(world.task.tokenizer, ids, n) for n, ids in enumerate(batch.ids)]
        bad = world.score(batch, ids=split)
        mixed = {name: value.copy() for name, value in scored.items()}
        for name, value in bad.items():
            mixed[name][first::every] = value[first::every]
        return Made(f"retokenised, one of {every} rows", batch, mixed)

    return inject


def dropped_first(world: World) -> Made:
    """The trainer's completions lack their first token, which it takes for a part of the prompt."""
    batch, _ = world.clean
    return Made("the trainer's tokens are one later", batch, world.score(batch, ids=[i[1:] or i for i in batch.ids]))


def tool_tokens(every: int) -> Inject:
    """Output of a tool in the middle of completions, trained on as if it had been sampled; its log-prob reads 0."""

    def inject(world: World) -> Made:
        batch, _ = world.clean
        text = " [calculator: 42.0] "
        tool = list(world.task.tokenizer(text)["input_ids"]) if world.task else [ord(letter) for letter in text[:8]]
        prefixes = [ids[:TOOL_AFTER] for ids in batch.ids]
        prompts = [p + c + tool for p, c in zip(batch.prompt_ids, prefixes, strict=True)]
        width = batch.logps.shape[1]
        rest = _continued(world, prompts, max(1, width - TOOL_AFTER - len(tool)))
        ids, logps = [list(row) for row in batch.ids], batch.logps.copy()
        for row in range(0, len(ids), every):
            if len(batch.ids[row]) < TOOL_AFTER:
                continue
            ids[row] = (prefixes[row] + tool + rest.ids[row])[:width]
            after = rest.logps[row][: len(rest.ids[row])]
            values = [*batch.logps[row, :TOOL_AFTER], *[0.0] * len(tool), *after][:width]
            logps[row] = np.nan
            logps[row, : len(values)] = values
        mixed = Batch(batch.prompt_ids, ids, logps)
        return Made(f"tool output, one of {every} rows", mixed, engine={"tools": True}, trainer={"tools": True})

    return inject


def _continued(world: World, prompts: Rows, length: int) -> Batch:
    """A clean batch that goes on from other prompts, one completion each."""
    from sampler import plain

    generator = torch.Generator().manual_seed(1000 * world.seed + world.salt)
    ids, logps = sample(world.model, prompts, plain(), max_tokens=length, stop=world.stop, generator=generator)
    return Batch(prompts, ids, padded(logps))


def base_scores(world: World) -> Made:
    """The trainer's old log-probs are those of the reference model."""
    batch, _ = world.clean
    return Made(
        "reference log-probs in place of old ones", batch, world.score(batch, inside=lambda: world.weights.at(0))
    )


def bf16_logits(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Logits in bf16 before the softmax, as a trainer under autocast has them."""
    import contexts

    def change(logits: Tensor) -> Tensor:
        return contexts.bf16(logits)

    with contexts.logits_changed(model, change):
        return one_pass(model, prompts, ids, head)
