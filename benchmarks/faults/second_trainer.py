"""Faults of the second round that are the trainer's, of the book-keeping, and over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import contexts
import numpy as np
import torch
from engine_faults import Context, Inject, repetition, version_of
from sampler import Drawing, left_padded, plain
from time_faults import late, version_at
from trainer_faults import Floats
from worlds import COMPLETIONS, Batch, Made, Rows, World, one_pass, scores_of_logits

from trl_offpolicy.engines.hf import Head, TokenScores

# ------------------------------------------------------------------------------------------------------------ trainer


def embedding_dropout(share: float) -> Context:
    """Dropout behind the embedding."""

    def inside(world: World) -> Any:
        parts = [world.model.get_input_embeddings()]
        return contexts.hooked(parts, lambda values: torch.nn.functional.dropout(values, share))

    return inside


def unshifted(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """The log-prob of a token under the logits of its own place, which have seen it."""
    before, mask = left_padded(prompts)
    width = max(map(len, ids))
    after = torch.tensor([list(row) + [0] * (width - len(row)) for row in ids])
    whole = torch.cat([mask, torch.ones_like(after)], 1)
    logits = model(
        input_ids=torch.cat([before, after], 1), attention_mask=whole, logits_to_keep=width,
        position_ids=(whole.cumsum(1) - 1).clamp(min=0),
    ).logits  # fmt: skip
    return scores_of_logits(head, logits, ids)


def split_in(parts: int, model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Sequences cut into parts that do not see each other, as sequence parallelism without its exchange does it.

    The token behind a cut is scored by the last place before it.
    """
    found = one_pass(model, prompts, ids, head)
    for row, (prompt, completion) in enumerate(zip(prompts, ids, strict=True)):
        text = [*prompt, *completion]
        cuts = [len(text) * number // parts for number in range(1, parts)]
        for begin, end in zip(cuts, [*cuts[1:], len(text) - 1], strict=True):
            first = max(begin + 1, len(prompt))
            if first > end:
                continue
            part = one_pass(model, [text[begin:first]], [text[first : end + 1]], head)
            place = slice(first - len(prompt), end + 1 - len(prompt))
            for name in ("logps", "entropies", "top_logps", "ranks"):
                getattr(found, name)[row, place] = getattr(part, name)[0]
    return found


def tempered_twice(temperature: float) -> Inject:
    """Both sides declare a temperature; the trainer divides by it twice."""

    def inject(world: World) -> Made:
        batch, said = world.sample(plain(Head(temperature))), {"temperature": temperature}
        scored = world.score(batch, head=Head(temperature**2))
        return Made(f"temperature {temperature} applied twice", batch, scored, said, said)

    return inject


def lagging_engine_and(back: float, fault: str, inside: Context) -> Inject:
    """The engine is behind, and the trainer scores in a context."""

    def inject(world: World) -> Made:
        batch = world.sample(inside=lambda: world.weights.at(version_of(world, back)))
        return Made(fault, batch, world.score(batch, inside=partial(inside, world)))

    return inject


# ------------------------------------------------------------------------------------------------------- book-keeping


def rounded_bf16(_world: World, logps: Floats) -> Floats:
    return torch.tensor(logps).to(torch.bfloat16).double().numpy()


def zero_outside_top(world: World, logps: Floats) -> Floats:
    """Tokens that are not among the five likeliest are not in the answer, and read 0."""
    ranks = world.clean_scores.ranks[:, : logps.shape[1]]
    return np.where(np.isfinite(logps) & (ranks >= 5), 0.0, logps)


def drifting(_world: World, logps: Floats) -> Floats:
    """One flat list cut by lengths that lack a token each: row r begins r tokens too early."""
    lengths = np.isfinite(logps).sum(1)
    flat, moved = logps[np.isfinite(logps)], np.full_like(logps, np.nan)
    start = 0
    for row, length in enumerate(lengths):
        values = flat[start : start + length]
        moved[row, : len(values)] = values
        start += max(1, length - 1)
    return moved


def prompts_first(world: World, logps: Floats) -> Floats:
    """The log-probs of the prompt come first (echo)."""
    batch, _ = world.clean
    for row, prompt in enumerate(batch.prompt_ids):
        length = int(np.isfinite(logps[row]).sum())
        echoed = one_pass(world.model, [prompt[:1]], [prompt[1:]], Head()).logps[0]
        logps[row, :length] = [*echoed, *logps[row, :length]][:length]
    return logps


def chunks_cut(_world: World, logps: Floats) -> Floats:
    """A stream in pieces of eight tokens loses the first log-prob of every piece but the first."""
    keep = [place for place in range(logps.shape[1]) if place % 8 or place == 0]
    moved = np.full_like(logps, np.nan)
    moved[:, : len(keep)] = logps[:, keep]
    return moved


def tiled(_world: World, logps: Floats) -> Floats:
    """Rows in the order of completions first, prompts second."""
    groups = logps.reshape(-1, COMPLETIONS, logps.shape[1])
    return groups.transpose(1, 0, 2).reshape(logps.shape)


def first_of_group(_world: World, logps: Floats) -> Floats:
    """All completions of a group have the first one's log-probs."""
    return logps[np.arange(len(logps)) // COMPLETIONS * COMPLETIONS]


def last_zero(_world: World, logps: Floats) -> Floats:
    """The last token of a completion has no log-prob, and 0 in its place."""
    lengths = np.isfinite(logps).sum(1)
    logps[np.arange(len(logps)), lengths - 1] = 0.0
    return logps


def tiled_in_bf16(world: World) -> Made:
    """An engine in bf16 whose rows come back in another order."""
    batch = world.sample(inside=lambda: contexts.cast(world.model, torch.bfloat16))
    scored = world.score(batch)
    moved = replace(batch, logps=tiled(world, batch.logps))
    return Made("bf16, rows in another order", moved, scored, {"dtype": "bfloat16"})


# ---------------------------------------------------------------------------------------------------- clean variants


def positions_go_on(start: int) -> Callable[[Any, Rows, Rows, Head], TokenScores]:
    """Positions of a packed row that begin at ``start``; a rotary embedding does not feel it."""

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        rotary = model.model.rotary_emb
        original = rotary.forward
        rotary.forward = lambda x, position_ids: original(x, position_ids + start)
        try:
            return one_pass(model, prompts, ids, head)
        finally:
            del rotary.forward

    return scorer


def same_head(head: Head, **said: Any) -> Inject:
    """Both sides have the same head and say so."""

    def inject(world: World) -> Made:
        batch = world.sample(plain(head))
        return Made(f"{said} on both sides", batch, world.score(batch, head=head), said, said)

    return inject


def same_int8(world: World) -> Made:
    """Both sides hold the same int8 weights and say so."""
    inside, said = partial(contexts.weights_rounded, world.model, contexts.int8), {"quantization": "int8"}
    batch = world.sample(inside=inside)
    return Made("int8 on both sides", batch, world.score(batch, inside=inside), said, said)


# ----------------------------------------------------------------------------------------------------------- the runs


def second_replica(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """From half-way on every second row is of a replica that kept the weights of the start."""
    if not late(step):
        return batch, scored
    world.salt += 5000
    other = world.sample(inside=lambda: world.weights.at(0), seen=batch.prompt_ids, length=batch.logps.shape[1])
    odd = np.arange(len(batch.ids)) % 2 == 1
    ids = [other.ids[row] if odd[row] else batch.ids[row] for row in range(len(batch.ids))]
    width = max(other.logps.shape[1], batch.logps.shape[1])
    logps = np.where(odd[:, None], _wide(other.logps, width), _wide(batch.logps, width))
    mixed = Batch(batch.prompt_ids, ids, logps)
    with world.weights.at(version_at(world, step)):
        return mixed, world.score(mixed)


def _wide(values: Floats, width: int) -> Floats:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=np.nan)


def tiled_at_times(_world: World, step: int, batch: Batch, scored: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """In every third step the engine's rows come back in another order."""
    if step % 3:
        return batch, scored
    return replace(batch, logps=tiled(_world, batch.logps)), scored


def left_in_training(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """After an evaluation in step 5 the trainer scores in training mode."""
    if step < 5:
        return batch, scored
    with world.weights.at(version_at(world, step)):
        return batch, world.score(batch, inside=lambda: contexts.attention_dropout(world.model, 0.1))


def penalty_later(step: int) -> Drawing:
    """A restart in step 10 reads the penalty of generation_config.json."""
    return repetition(1.1) if step >= 10 else plain()


def restarted(step: int) -> int:
    """A restart in step 6 loads the first weights, and the next sync that arrives is that of step 11."""
    return 0 if 6 <= step < 11 else step


def sawtooth(step: int) -> int:
    """A queue that grows to three steps and is emptied."""
    return step - step % 4
