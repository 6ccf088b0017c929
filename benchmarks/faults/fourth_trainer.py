"""Faults of the fourth round that are the trainer's, of the book-keeping, and over time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import engine_faults as e
import fourth_contexts as v
import numpy as np
import torch
from engine_faults import Context, Inject
from sampler import Drawing, left_padded, plain
from tasks import SYSTEM
from third_engine import cut_to_own_lengths
from third_trainer import FIELDS, Recorded, logits_of
from time_faults import STEPS, version_at
from trainer_faults import Floats
from worlds import COMPLETIONS, Batch, Made, Rows, Scorer, World, one_pass, padded_pass, scores_of_logits

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.hf import Head, TokenScores

ABORTED = 9
"""Tokens that a request had said before it was stopped."""
LIMIT = 16
"""Tokens that a trainer keeps of a response."""
ROWS = 6
"""Rows of a micro-batch."""

# ------------------------------------------------------------------------------------------------------------ trainer


def scored_in_parts(rows: int, scorer: Scorer) -> Scorer:
    """Rows scored ``rows`` at a time, and put together."""

    def whole(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        out = {name: np.full((len(ids), max(map(len, ids))), np.nan) for name in FIELDS}
        for begin in range(0, len(ids), rows):
            part = slice(begin, begin + rows)
            found = scorer(model, prompts[part], ids[part], head)
            for name in FIELDS:
                values = getattr(found, name)
                out[name][part, : values.shape[1]] = values
        return TokenScores(**out)

    return whole


def padded_in_the_middle(*, counted: bool) -> Scorer:
    """A trainer that pads prompts on the right, in front of the completion; ``counted`` = positions count it."""

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        start, width = max(map(len, prompts)), max(map(len, ids))
        texts = torch.tensor([[*prompt, *[0] * (start - len(prompt)), *row, *[0] * (width - len(row))]
                              for prompt, row in zip(prompts, ids, strict=True)])  # fmt: skip
        lengths = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        place = torch.arange(start + width)
        mask = ((place < lengths) | (place >= start)).long()
        positions = place.expand(mask.shape) if counted else (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=texts, attention_mask=mask, position_ids=positions).logits
        before = torch.cat([lengths - 1, torch.arange(start, start + width - 1).expand(len(ids), -1)], 1)
        return scores_of_logits(head, logits[torch.arange(len(ids))[:, None], before], ids)

    return scored_in_parts(ROWS, scorer)


def pad_id_masked(world: World) -> Made:
    """The mask is where ids are not that of the padding, which stands in the text as well."""
    assert world.task is not None
    pad = world.task.tokenizer.pad_token_id
    batch, _ = world.clean

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        before, real = left_padded(prompts)
        width = max(map(len, ids))
        after = torch.tensor([list(row) + [pad] * (width - len(row)) for row in ids])
        texts = torch.cat([before.masked_fill(real == 0, pad), after], 1)
        mask = (texts != pad).long()
        logits = model(
            input_ids=texts, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=width + 1,
        ).logits[:, :-1]  # fmt: skip
        return scores_of_logits(head, logits, ids)

    return Made("the padding's id masked in the text", batch, world.score(batch, scorer=scorer))


def by_length(prompts: Rows, ids: Rows) -> list[int]:
    """Rows with the longest text first."""
    return sorted(range(len(ids)), key=lambda row: -len(prompts[row]) - len(ids[row]))


def sorted_by_length(*, put_back: bool) -> Scorer:
    """Micro-batches of rows of like length; their log-probs are put back to their rows, or not."""

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        order = by_length(prompts, ids)
        part = scored_in_parts(ROWS, one_pass)
        found = part(model, [prompts[row] for row in order], [ids[row] for row in order], head)
        out = {name: np.full((len(ids), max(map(len, ids))), np.nan) for name in FIELDS}
        for place, row in enumerate(order):
            here = row if put_back else place
            for name in FIELDS:
                values = np.nan_to_num(getattr(found, name)[place], nan=0.0)  # the padding of a tensor
                out[name][here, : len(ids[here])] = values[: len(ids[here])]
        return TokenScores(**out)

    return scorer


def labels_within_shards(parts: int) -> Scorer:
    """Each of several ranks rolls the labels of its own part: its last place is scored on the part's first token."""

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        logits = logits_of(model, prompts, ids)
        found = scores_of_logits(head, logits, ids)
        for row, (prompt, completion) in enumerate(zip(prompts, ids, strict=True)):
            text = [*prompt, *completion]
            cuts = [len(text) * number // parts for number in range(parts)]
            for begin, end in pairwise(cuts):
                place = end - len(prompt)
                if place >= 0:
                    found.logps[row, place] = head.logps(logits[row, place])[text[begin]].item()
        return found

    return scorer


def from_row(first: int, fault: str, inside: Context) -> Inject:
    """The trainer scores the rows from ``first`` on in a context, as one micro-batch of several."""

    def inject(world: World) -> Made:
        batch, scored = world.clean
        other = world.score(batch, inside=partial(inside, world))
        late = np.arange(len(batch.ids))[:, None] >= first
        names = ("old_per_token_logps", "entropies")
        mixed = {name: np.where(late, other[name], scored[name]) for name in names}
        return Made(fault, batch, {**scored, **mixed})

    return inject


def untempered_from_row(first: int, temperature: float) -> Inject:
    """Both sides declare a temperature; the trainer's last micro-batch lacks it."""

    def inject(world: World) -> Made:
        batch, said = world.sample(plain(Head(temperature))), {"temperature": temperature}
        scored, raw = world.score(batch, head=Head(temperature)), world.score(batch)
        late = np.arange(len(batch.ids))[:, None] >= first
        mixed = {name: np.where(late, raw[name], value) for name, value in scored.items()}
        return Made(f"no temperature from row {first} on", batch, mixed, said, said)

    return inject


def cached_prompts_not_replayed(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    with v.replay_lacks_the_cached(model):
        return padded_pass(attended=False, positions="text")(model, prompts, ids, head)


def on_the_same_nf4(world: World) -> Made:
    """Trainer and engine have the base in NF4; the engine's has the adapter merged into it."""
    batch = world.sample(inside=lambda: v.on_nf4(world, merged=True))
    scored = world.score(batch, inside=lambda: v.on_nf4(world, merged=False))
    return Made("an adapter merged into NF4", batch, scored)


# ------------------------------------------------------------------------------------------------------- book-keeping


def of_steps(world: World, logps: Floats) -> Floats:
    """An engine that accepts one to three tokens in a step reports the log-prob of the first for all of them."""
    chance = np.random.default_rng(world.seed)
    for row in logps:
        begin = 0
        while begin < len(row):
            size = int(chance.integers(1, 4))
            row[begin : begin + size] = np.where(np.isfinite(row[begin : begin + size]), row[begin], np.nan)
            begin += size
    return logps


def lost_at_an_abort(_world: World, logps: Floats) -> Floats:
    """Every third request was stopped and resumed; what it had said before has 0 in place of log-probs."""
    logps[::3, :ABORTED] = np.where(np.isfinite(logps[::3, :ABORTED]), 0.0, np.nan)
    return logps


def zeros(_world: World, logps: Floats) -> Floats:
    return np.where(np.isfinite(logps), 0.0, np.nan)


def some_rows_nan(_world: World, logps: Floats) -> Floats:
    """Three requests overflowed: all of their log-probs are NaN."""
    logps[[2, 9, 17]] = np.nan
    return logps


def padding_in_the_loss(world: World) -> Made:
    """Responses are padded to one length, and the mask covers the padding, whose log-prob is 0."""
    batch = cut_to_own_lengths(world.clean[0])
    width = max(map(len, batch.ids))
    pad = (world.task.tokenizer.pad_token_id if world.task else None) or 0
    ids = [[*row, *[pad] * (width - len(row))] for row in batch.ids]
    logps = np.nan_to_num(batch.logps[:, :width], nan=0.0)
    mixed = Batch(batch.prompt_ids, ids, logps)
    return Made("padding in the loss", mixed, world.score(mixed))


def copied_from_the_trainer(world: World) -> Made:
    """The engine has another adapter, and the trainer's log-probs overwrite those that it reported."""
    batch = world.sample(inside=lambda: world.weights.at("other"))
    scored = world.score(batch)
    return Made("the trainer's log-probs twice", replace(batch, logps=scored["old_per_token_logps"].copy()), scored)


def cut_on_two_sides(world: World) -> Made:
    """Of long responses the end of the tokens is kept, and the beginning of the log-probs."""
    batch, _ = world.clean
    ids = [row[-LIMIT:] for row in batch.ids]
    rows = [batch.logps[number, : len(row)].tolist() for number, row in enumerate(ids)]
    mixed = Batch(batch.prompt_ids, ids, padded(rows))
    return Made("cut on two sides", mixed, world.score(mixed))


# ---------------------------------------------------------------------------------------------------- clean variants


def packed_apart(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Two rows in one sequence that do not see each other, each with its own positions: changes nothing."""
    texts = [[*prompt, *row] for prompt, row in zip(prompts, ids, strict=True)]
    out = {name: np.full((len(ids), max(map(len, ids))), np.nan) for name in FIELDS}
    for first in range(0, len(texts), 2):
        rows = range(first, min(first + 2, len(texts)))
        whole = torch.tensor([[token for row in rows for token in texts[row]]])
        owner = torch.cat([torch.full((len(texts[row]),), row) for row in rows])
        place = torch.cat([torch.arange(len(texts[row])) for row in rows])
        seen = (owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
        logits = model(input_ids=whole, attention_mask=seen[None, None], position_ids=place[None]).logits[0]
        for row in rows:
            begin = int((owner == row).nonzero()[0]) + len(prompts[row]) - 1
            found = scores_of_logits(head, logits[None, begin : begin + len(ids[row])], [ids[row]])
            for name in FIELDS:
                out[name][row, : len(ids[row])] = getattr(found, name)[0]
    return TokenScores(**out)


def in_training_mode(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Training mode, with gradients; every dropout is 0."""
    model.train()
    try:
        with torch.enable_grad():
            logits = logits_of(model, prompts, ids)
    finally:
        model.eval()
    return scores_of_logits(head, logits.detach(), ids)


# ----------------------------------------------------------------------------------------------------------- the runs


def cooling_run(step: int) -> Drawing:
    """A schedule from 1.25 to 0.85, which the engine alone follows."""
    return plain(Head(1.25 - 0.4 * step / (STEPS - 1)))


def evaluated_adapter(world: World, step: int) -> AbstractContextManager[Any]:
    """The adapter of an evaluation in every fourth step stays loaded for the rollouts of that step."""
    found: AbstractContextManager[Any] = world.weights.at("other") if step % 4 == 3 else nullcontext()
    return found


def layers_in_turn(world: World, step: int) -> AbstractContextManager[Any]:
    """Each sync sends one layer in four; what is in no layer arrives always."""

    def choice(name: str) -> tuple[float, float]:
        number = e.layer_of(name)
        back = (step - number) % 4 if number >= 0 else 0
        return version_at(world, max(0, step - back)), 1.0

    found: AbstractContextManager[Any] = world.weights.holding(choice)
    return found


def template_updated(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
    """From step 7 on the engine's prompts begin with another system prompt; the trainer's were rendered before."""
    if step < 7:
        return batch, scored
    new = f"{SYSTEM} Put the answer into a box."
    rendered = dict(zip(map(tuple, world.prompts), world.rendered(system=new)[::COMPLETIONS], strict=True))
    world.salt += 5000
    with world.weights.at(version_at(world, step)):
        seen = [rendered[tuple(ids)] for ids in batch.prompt_ids]
        drawn = world.sample(seen=seen, length=batch.logps.shape[1])
        mixed = Batch(batch.prompt_ids, drawn.ids, drawn.logps)
        return mixed, world.score(mixed)


def logps_lost(_world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
    """A restart forgets to ask for log-probs; in three steps they are 0."""
    return (replace(batch, logps=zeros(_world, batch.logps)), scored) if 6 <= step < 9 else (batch, scored)
