"""Faults of the fifth round that are the trainer's, of the book-keeping, and over time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine_faults as e
import fifth_contexts as w
import numpy as np
import torch
import trainer_faults as t
from engine_faults import Inject
from sampler import Drawing, plain
from second_contexts import routed
from third_engine import cut_to_own_lengths
from third_trainer import FIELDS, Recorded
from time_faults import version_at
from trainer_faults import Floats
from worlds import COMPLETIONS, LENGTH, Batch, Made, Rows, Scorer, World, padded_pass, scores_of_logits

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.hf import Head, TokenScores

PAGE = 8
"""Prompts are padded to a multiple of so many tokens."""
LATER = 8
"""Step in which a fault begins."""

# ------------------------------------------------------------------------------------------------------------ trainer


def from_row_by(first: int, fault: str, scorer: Scorer) -> Inject:
    """The rows from ``first`` on are scored in another way, as one micro-batch of several."""

    def inject(world: World) -> Made:
        batch, scored = world.clean
        other = world.score(batch, scorer=scorer)
        late = np.arange(len(batch.ids))[:, None] >= first
        mixed = {name: np.where(late, other[name], scored[name]) for name in ("old_per_token_logps", "entropies")}
        return Made(fault, batch, {**scored, **mixed})

    return inject


def never_filled(rows: int) -> Inject:
    """The buffer of the last ``rows`` rows kept the zeros that it was made with."""

    def inject(world: World) -> Made:
        batch, scored = world.clean
        empty = {name: scored[name].copy() for name in ("old_per_token_logps", "entropies")}
        for values in empty.values():
            values[-rows:] = np.where(np.isfinite(values[-rows:]), 0.0, np.nan)
        return Made("the trainer's last rows are 0", batch, {**scored, **empty})

    return inject


def joined(model: Any, texts: Rows, starts: list[int], seen: list[tuple[int, int]]) -> torch.Tensor:
    """(L, V) logits of texts in one sequence.

    Args:
        model: a causal LM.
        texts: N lists of ids, L in all.
        starts: the first position of each.
        seen: of each text the first and the last place (exclusive) of the sequence that it sees beside itself.
    """
    whole = torch.tensor([token for text in texts for token in text])
    owner = torch.cat([torch.full((len(text),), number) for number, text in enumerate(texts)])
    places = torch.cat([torch.arange(len(text)) + start for text, start in zip(texts, starts, strict=True)])
    here = torch.arange(len(whole))
    first, last = (torch.tensor([pair[side] for pair in seen])[owner][:, None] for side in (0, 1))
    allowed = (here >= first) & (here < last) | (owner[:, None] == owner)
    allowed &= here <= here[:, None]
    found: torch.Tensor = model(
        input_ids=whole[None], attention_mask=allowed[None, None], position_ids=places[None]
    ).logits[0]
    return found


def empty_scores(ids: Rows) -> dict[str, Floats]:
    return {name: np.full((len(ids), max(map(len, ids))), np.nan) for name in FIELDS}


def packed_and_restarted(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Two rows in one sequence; positions begin again with the second, which sees the first nevertheless."""
    out = empty_scores(ids)
    texts = [[*prompt, *row] for prompt, row in zip(prompts, ids, strict=True)]
    for first in range(0, len(texts), 2):
        pair = texts[first : first + 2]
        begins = [0, len(pair[0])][: len(pair)]
        logits = joined(model, pair, [0] * len(pair), [(0, begin) for begin in begins])
        for row, begin in enumerate(begins, start=first):
            start = begin + len(prompts[row]) - 1
            found = scores_of_logits(head, logits[None, start : start + len(ids[row])], [ids[row]])
            for name in FIELDS:
                out[name][row, : len(ids[row])] = getattr(found, name)[0]
    return TokenScores(**out)


def shared_prompt(*, counted: bool) -> Scorer:
    """Each prompt once, and behind it all of its responses, which see it and not each other.

    ``counted`` = positions run on from one response to the next; otherwise each begins behind the prompt (right).
    """

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        out = empty_scores(ids)
        for first in range(0, len(ids), COMPLETIONS):
            rows = ids[first : first + COMPLETIONS]
            prompt = prompts[first]
            begins = (len(prompt) + np.cumsum([0, *map(len, rows)])[:-1]).tolist()
            starts = begins if counted else [len(prompt)] * len(rows)
            seen = [(0, 0)] + [(0, len(prompt))] * len(rows)
            logits = joined(model, [prompt, *rows], [0, *starts], seen)
            for row, (begin, text) in enumerate(zip(begins, rows, strict=True), start=first):
                before = torch.tensor([len(prompt) - 1, *range(begin, begin + len(text) - 1)])
                found = scores_of_logits(head, logits[None, before], [text])
                for name in FIELDS:
                    out[name][row, : len(text)] = getattr(found, name)[0]
        return TokenScores(**out)

    return scorer


def padded_on_the_right(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Prompt and response together, padded on the right: changes nothing."""
    texts = [[*prompt, *row] for prompt, row in zip(prompts, ids, strict=True)]
    width = max(map(len, texts))
    whole = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    mask = torch.arange(width) < torch.tensor([len(text) for text in texts])[:, None]
    logits = model(input_ids=whole, attention_mask=mask.long(), position_ids=torch.arange(width)[None]).logits
    starts = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
    places = (starts + torch.arange(max(map(len, ids)))).clamp(max=width - 1)
    return scores_of_logits(head, logits[torch.arange(len(ids))[:, None], places], ids)


def replayed_in_other_order(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    with routed(model, w.replayed_batch_first(len(ids))):
        return padded_pass(attended=False, positions="text")(model, prompts, ids, head)


# ------------------------------------------------------------------------------------------------------- book-keeping


def end_written_over(world: World) -> Made:
    """Where a response reached the limit, the trainer writes the end over its last token."""
    batch, _ = world.clean
    ids = [[*row[:-1], world.stop[0]] if len(row) == LENGTH else row for row in batch.ids]
    return Made("the end in place of the last token", batch, world.score(batch, ids=ids))


def of_own_tokens(world: World, made: Made) -> Made:
    """The list lacks the tool's tokens: behind them every token has the log-prob of one further on."""
    batch, logps = made.batch, made.batch.logps.copy()
    for row, ids in enumerate(batch.ids):
        values = logps[row, : len(ids)]
        own = np.concatenate([values[: t.TOOL_AFTER], values[t.TOOL_AFTER :][values[t.TOOL_AFTER :] != 0]])
        logps[row, : len(ids)] = np.pad(own, (0, len(ids) - len(own)))
    return replace(made, fault="the tool's tokens missing in the list of log-probs", batch=replace(batch, logps=logps))


def early_behind_a_tool(world: World) -> Made:
    return of_own_tokens(world, t.tool_tokens(1)(world))


def with_own_logps(world: World) -> Made:
    """A tool's output counts as sampled in every second row, and the engine scored it when it read it."""
    made = t.tool_tokens(2)(world)
    scored = world.score(made.batch)
    old, logps = scored["old_per_token_logps"], made.batch.logps
    return replace(made, fault="a tool's output with log-probs of the model",
                   batch=replace(made.batch, logps=np.where(logps == 0, old, logps)), scored=scored)  # fmt: skip


def as_they_finished(world: World) -> Made:
    """Log-probs are in the order in which requests ended, short ones first; tokens in that in which they went out."""
    batch = cut_to_own_lengths(world.clean[0])
    order = sorted(range(len(batch.ids)), key=lambda row: len(batch.ids[row]))
    rows = []
    for ids, other in zip(batch.ids, order, strict=True):
        values = batch.logps[other, : len(batch.ids[other])].tolist()
        rows.append([*values, *[0.0] * len(ids)][: len(ids)])
    return Made("log-probs in the order of finishing", replace(batch, logps=padded(rows)), world.score(batch))


def outside_the_top(world: World, logps: Floats) -> Floats:
    """Tokens beyond the twenty likeliest have -inf."""
    ranks = world.clean_scores.ranks[:, : logps.shape[1]]
    return np.where(np.isfinite(logps) & (ranks >= 20), -np.inf, logps)


def behind_a_padded_prompt(world: World, logps: Floats) -> Floats:
    """Log-probs are cut from a list that has the prompt in front, at the length to which prompts are padded."""
    moved = np.full_like(logps, np.nan)
    for row, prompt in enumerate(world.clean[0].prompt_ids):
        late = -len(prompt) % PAGE
        moved[row, : logps.shape[1] - late] = logps[row, late:]
    return moved


def next_turn_in_the_loss(world: World) -> Made:
    """Every third response ends with the first tokens of the next question; their log-prob is 0."""
    batch = cut_to_own_lengths(world.clean[0])
    ids, rows = [], []
    for row, said in enumerate(batch.ids):
        more = batch.prompt_ids[(row + COMPLETIONS) % len(batch.ids)][:6] if row % 3 == 0 else []
        ids.append([*said, *more])
        rows.append([*batch.logps[row, : len(said)].tolist(), *[0.0] * len(more)])
    said = {"tools": True}
    return Made("the next turn in the loss", Batch(batch.prompt_ids, ids, padded(rows)), None, said, said)


# ----------------------------------------------------------------------------------------------------------- mixtures


def lagging_and_tools(back: float) -> Inject:
    """Weights are behind, and a tool's output is in the loss."""

    def inject(world: World) -> Made:
        old = world.weights.at(e.version_of(world, back))
        clean, begun = world.clean, world.sample(inside=lambda: world.weights.at(e.version_of(world, back)))
        world.__dict__["clean"] = (begun, clean[1])  # what tool_tokens goes on from
        try:
            with old:
                made = t.tool_tokens(1)(world)
        finally:
            world.__dict__["clean"] = clean
        return replace(made, fault=f"lag {back}, a tool's output in the loss")

    return inject


# ----------------------------------------------------------------------------------------------------------- the runs


def narrow_at_times(step: int) -> Drawing:
    """The top-p of an evaluation, in every fourth step, holds for the rollouts of that step."""
    return plain(e.head(top_p=0.8)) if step % 4 == 3 else plain()


def penalty_late(step: int) -> Drawing:
    return e.repetition(1.1) if step >= LATER else plain()


def padding_attended_later(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
    """From step 8 on the trainer attends to padding."""
    if step < LATER:
        return batch, scored
    with world.weights.at(version_at(world, step)):
        return batch, world.score(batch, scorer=padded_pass(attended=True, positions="all"))
