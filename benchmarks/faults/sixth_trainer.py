"""Faults of the sixth round that are the trainer's, of the book-keeping, and over time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine_faults as e
import numpy as np
import sixth_contexts as u
import sixth_engine as j
import torch
from engine_faults import Inject
from sampler import Drawing, left_padded, plain, prefill
from second_contexts import routed
from third_engine import own_length
from third_trainer import Recorded, logits_of
from time_faults import version_at
from trainer_faults import Floats
from worlds import COMPLETIONS, RESCORED, Batch, Made, Rows, World, padded_pass, scores_of_logits

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.hf import Head, TokenScores

HEADER = 3
"""Tokens of the assistant's header."""
THOUGHTS = 10
"""Tokens in front of the answer."""
FAILED = 13
"""Row whose request failed."""
EVALUATED = 10
"""Step in which an evaluation leaves its settings behind."""

# ------------------------------------------------------------------------------------------------------------ trainer


def labels_shifted_twice(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """The log-prob of a token under the logits that predict the token before it."""
    before = [prompt[:-1] for prompt in prompts]
    texts = [[prompt[-1], *row] for prompt, row in zip(prompts, ids, strict=True)]
    return scores_of_logits(head, logits_of(model, before, texts), ids)  # one place early


def first_token_masked(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """A mask made from lengths that are one too small hides the first token of every prompt, which is not padding."""
    before, real = left_padded(prompts)
    width = max(map(len, ids))
    after = torch.tensor([list(row) + [0] * (width - len(row)) for row in ids])
    mask = torch.cat([real * (real.cumsum(1) > 1), torch.ones_like(after)], 1)
    logits = model(
        input_ids=torch.cat([before, after], 1), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=width + 1,
    ).logits[:, :-1]  # fmt: skip
    return scores_of_logits(head, logits, ids)


def of_a_padded_vocabulary(share: float) -> Any:
    """Rows that pad the trainer's head have logit 0 and count in its softmax."""

    def change(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        extra = torch.zeros(len(logits), int(share * logits.shape[1]))
        whole = torch.cat([logits, extra], -1).log_softmax(-1)
        return whole.gather(1, tokens[:, None])[:, 0]

    return change


def multiplied_by_the_temperature(temperature: float) -> Inject:
    """Both sides declare a temperature; the trainer multiplies by it in place of dividing."""

    def inject(world: World) -> Made:
        batch, said = world.sample(plain(Head(temperature))), {"temperature": temperature}
        scored = world.score(batch, head=Head(1 / temperature))
        return Made(f"logits times the temperature {temperature} in the trainer", batch, scored, said, said)

    return inject


def cut_on_the_left(world: World) -> Made:
    """A limit on prompt and response together; the trainer drops the beginning of what is longer, half of the rows."""
    batch, _ = world.clean
    sizes = [len(prompt) + len(ids) for prompt, ids in zip(batch.prompt_ids, batch.ids, strict=True)]
    limit = sorted(sizes)[len(sizes) // 2 - 1] - 1
    over = [max(0, size - limit) for size in sizes]
    seen = [prompt[min(cut, len(prompt) - 1) :] for prompt, cut in zip(batch.prompt_ids, over, strict=True)]
    return Made(f"texts beyond {limit} tokens cut on the left", batch, world.score(batch, seen=seen))


def replayed_of_the_next_request(world: World) -> Made:
    """Every text is scored with the experts that were recorded for the next one, in both scorings alike."""

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        with routed(model, u.of_the_next_request(len(ids))):
            return padded_pass(attended=False, positions="text")(model, prompts, ids, head)

    batch, _ = world.clean
    scored = world.score(batch, scorer=scorer)
    scored["rescored_per_token_logps"][:RESCORED] = scored["old_per_token_logps"][:RESCORED]  # the same records again
    return Made("experts of the next request replayed", batch, scored)


def with_a_cache(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """A trainer that reads the prompts into a cache first, and the responses then: changes nothing."""
    cache, mask, first = prefill(model, prompts)
    width = max(map(len, ids))
    after = torch.tensor([list(row) + [0] * (width - len(row)) for row in ids])
    whole = torch.cat([mask, torch.ones_like(after)], 1)
    places = mask.sum(1, keepdim=True) + torch.arange(width)
    logits = model(input_ids=after, attention_mask=whole, position_ids=places, past_key_values=cache).logits
    return scores_of_logits(head, torch.cat([first[:, None], logits[:, :-1]], 1), ids)


# ------------------------------------------------------------------------------------------------------- book-keeping


def header_in_the_loss(world: World) -> Made:
    """The assistant's header counts as the beginning of every response; its log-probs are 0."""
    batch, _ = world.clean
    prompts = [prompt[:-HEADER] or prompt[:1] for prompt in batch.prompt_ids]
    heads = [prompt[len(left) :] for prompt, left in zip(batch.prompt_ids, prompts, strict=True)]
    ids = [[*said, *row] for said, row in zip(heads, batch.ids, strict=True)]
    logps = [[*[0.0] * len(said), *batch.logps[row, : len(batch.ids[row])].tolist()] for row, said in enumerate(heads)]
    return Made("the assistant's header in the loss", Batch(prompts, ids, padded(logps)))


def without_the_thoughts(world: World) -> Made:
    """What is trained is the answer behind the thoughts, as if it stood right behind the prompt."""
    batch, _ = world.clean
    begins = [THOUGHTS if len(ids) > THOUGHTS + 1 else 0 for ids in batch.ids]
    ids = [row[begin:] for row, begin in zip(batch.ids, begins, strict=True)]
    logps = [batch.logps[row, begin : len(batch.ids[row])].tolist() for row, begin in enumerate(begins)]
    return Made("thoughts cut from the trained text", Batch(batch.prompt_ids, ids, padded(logps)))


def filled(values: Floats, like: Floats) -> Floats:
    """``values`` where ``like`` has any, and 0 where they are missing."""
    return np.where(np.isfinite(like), np.nan_to_num(values, nan=0.0), np.nan)


def one_request_failed(_world: World, logps: Floats) -> Floats:
    """A request failed and its log-probs were dropped: the rows from there on have those of the next row."""
    moved = logps.copy()
    moved[FAILED:-1], moved[-1] = logps[FAILED + 1 :], 0.0
    return filled(moved, logps)


def first_missing(_world: World, logps: Floats) -> Floats:
    """The first token of every response has no log-prob (NaN), as the first of a prompt has none."""
    logps[:, 0] = np.nan
    return logps


def rejected_drafts_kept(world: World, logps: Floats) -> Floats:
    """In front of one token in eight stands the log-prob of a draft that was rejected; the end of the list is cut."""
    chance = np.random.default_rng(world.seed)
    for row in logps:
        size = int(np.isfinite(row).sum())
        values: list[float] = []
        for value in row[:size]:
            values += [-2.0 - chance.exponential(), value] if chance.random() < 1 / 8 else [value]
        row[:size] = values[:size]
    return logps


def prefix_twice(_world: World, logps: Floats) -> Floats:
    """Every third request was stopped and resumed, and lists what it had said before a second time."""
    for row in logps[::3]:
        size = int(np.isfinite(row).sum())
        row[:size] = [*row[: j.RESUMED], *row[:size]][:size] if size > j.RESUMED else row[:size]
    return logps


def stop_not_listed(world: World) -> Made:
    """Two of three responses stopped at a string. Their ids come without its token, their log-probs with it.

    Both lists are aligned at the end, so that log-probs are a token early.
    """
    batch, _ = world.clean
    ids, rows = [], []
    for row, said in enumerate(batch.ids):
        stopped = row % 3 < 2 and len(said) > 1
        size = min(len(said), own_length(row)) if stopped else len(said)
        ids.append(said[: size - 1] if stopped else said)
        rows.append(batch.logps[row, int(stopped) : size].tolist())
    return Made("log-probs a token early where a response stopped", Batch(batch.prompt_ids, ids, padded(rows)))


def lagging_after_a_failure(back: float) -> Inject:
    """Weights are behind, and a request failed."""

    def inject(world: World) -> Made:
        batch = world.sample(inside=lambda: world.weights.at(e.version_of(world, back)))
        scored = world.score(batch)
        moved = replace(batch, logps=one_request_failed(world, batch.logps.copy()))
        return Made(f"lag {back}, log-probs of the next row from row {FAILED} on", moved, scored)

    return inject


# ----------------------------------------------------------------------------------------------------------- the runs


def next_turn_later(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
    """From step 6 on every response ends with the first tokens of another prompt, whose log-probs are 0."""
    if step < u.UPGRADED:
        return batch, scored
    more = [batch.prompt_ids[(row + COMPLETIONS) % len(batch.ids)][:5] for row in range(len(batch.ids))]
    ids = [[*said, *turn] for said, turn in zip(batch.ids, more, strict=True)]
    rows = [[*batch.logps[row, : len(said)].tolist(), *[0.0] * len(more[row])] for row, said in enumerate(batch.ids)]
    mixed = Batch(batch.prompt_ids, ids, padded(rows))
    with world.weights.at(version_at(world, step)):
        return mixed, world.score(mixed)


def greedy_later(step: int) -> Drawing:
    """From step 10 on the engine takes the likeliest token, as in the evaluation before."""
    return j.greedy if step >= EVALUATED else plain()


def first_group_prefetched(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
    """The first group of every step was sampled ahead, with the weights of three steps before."""
    if step == 0:
        return batch, scored
    world.salt += 5000
    with world.weights.at(version_at(world, max(0, step - 3))):
        old = world.sample(seen=batch.prompt_ids, length=batch.logps.shape[1])
    sources = [old if row < COMPLETIONS else batch for row in range(len(batch.ids))]
    ids = [source.ids[row] for row, source in enumerate(sources)]
    rows = [source.logps[row, : len(ids[row])].tolist() for row, source in enumerate(sources)]
    mixed = Batch(batch.prompt_ids, ids, padded(rows))
    with world.weights.at(version_at(world, step)):
        return mixed, world.score(mixed)
