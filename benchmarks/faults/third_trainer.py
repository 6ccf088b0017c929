"""Faults of the third round that are the trainer's, of the book-keeping, and over time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import contexts
import engine_faults as e
import numpy as np
import third_contexts as x
import torch
from engine_faults import Inject
from sampler import Drawing, left_padded, plain
from third_engine import cut_to_own_lengths, generation_config
from time_faults import version_at
from trainer_faults import Floats
from worlds import COMPLETIONS, Batch, Made, Rows, World, one_pass, scores_of_logits

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.hf import Head, TokenScores

TURN = 10
"""Tokens of the first turn."""
FIELDS = ("logps", "entropies", "top_logps", "ranks")

# ------------------------------------------------------------------------------------------------------------ trainer


def logits_of(model: Any, prompts: Rows, ids: Rows) -> torch.Tensor:
    """(B, T, V) logits of completions, in one forward."""
    before, mask = left_padded(prompts)
    width = max(map(len, ids))
    after = torch.tensor([list(row) + [0] * (width - len(row)) for row in ids])
    whole = torch.cat([mask, torch.ones_like(after)], 1)
    found: torch.Tensor = model(
        input_ids=torch.cat([before, after], 1), attention_mask=whole, logits_to_keep=width + 1,
        position_ids=(whole.cumsum(1) - 1).clamp(min=0),
    ).logits[:, :-1]  # fmt: skip
    return found


def rescored(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """A scorer whose log-probs are ``change(logits (n, V), tokens (n,))``; the rest is right."""

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        logits = logits_of(model, prompts, ids)
        found = scores_of_logits(head, logits, ids)
        for row, tokens in enumerate(ids):
            found.logps[row, : len(tokens)] = change(logits[row, : len(tokens)], torch.tensor(tokens)).double().numpy()
        return found

    return scorer


def of_half_the_vocabulary(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The normaliser of the rank that holds the token; the other rank's part was never added."""
    half = logits.shape[-1] // 2
    sums = torch.stack([logits[:, :half].logsumexp(-1), logits[:, half:].logsumexp(-1)], -1)
    mine = (tokens >= half).long()[:, None]
    return logits.gather(1, tokens[:, None])[:, 0] - sums.gather(1, mine)[:, 0]


def smoothed(share: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Log-probs of a loss with label smoothing."""

    def change(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logps = logits.log_softmax(-1)
        return (1 - share) * logps.gather(1, tokens[:, None])[:, 0] + share * logps.mean(-1)

    return change


def in_bf16(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits and their log-softmax in bf16."""
    return logits.to(torch.bfloat16).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def zigzag(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Two ranks computed quarters 1 and 4, and 2 and 3, of each sequence; put together in that order."""
    texts = [[*prompt, *row] for prompt, row in zip(prompts, ids, strict=True)]
    whole = one_pass(model, [text[:1] for text in texts], [text[1:] for text in texts], head)
    width = max(map(len, ids))
    out = {name: np.full((len(ids), width), np.nan) for name in FIELDS}
    for row, text in enumerate(texts):
        parts = np.array_split(np.arange(len(text) - 1), 4)
        order = np.concatenate([parts[part] for part in (0, 3, 1, 2)])[-len(ids[row]) :]
        for name in FIELDS:
            out[name][row, : len(ids[row])] = getattr(whole, name)[row, order]
    return TokenScores(**out)


def one_by_one(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """Rows scored alone, the last first."""
    width = max(map(len, ids))
    out = {name: np.full((len(ids), width), np.nan) for name in FIELDS}
    for row in reversed(range(len(ids))):
        found = one_pass(model, [prompts[row]], [ids[row]], head)
        for name in FIELDS:
            out[name][row, : len(ids[row])] = getattr(found, name)[0]
    return TokenScores(**out)


def adapter_left_on(world: World) -> Made:
    """The second half of the rows is scored while the reference's adapter is still on."""
    batch, scored = world.clean
    other = world.score(batch, inside=lambda: world.weights.at("other"))
    late = np.arange(len(batch.ids))[:, None] >= len(batch.ids) // 2
    return Made(
        "another adapter in the trainer's second half",
        batch,
        {name: np.where(late, other[name], value) for name, value in scored.items()},
    )


def truncated_alone(count: int) -> Inject:
    """Only the trainer cuts its distribution."""

    def inject(world: World) -> Made:
        batch, _ = world.clean
        scored = world.score(batch, head=e.head(top_k=count))
        return Made(f"top-k {count} in the trainer alone", batch, scored, trainer={"top_k": count})

    return inject


def merged_in_bf16(world: World) -> Made:
    """The trainer adds its update to a base in bf16, and the engine holds the sum in bf16."""
    batch = world.sample(inside=lambda: x.merged(world, contexts.bf16))
    scored = world.score(batch, inside=lambda: x.merged(world, lambda values: values))
    return Made("updates merged in bf16", batch, scored)


def lagging_and_scored(back: float, fault: str, scorer: Any) -> Inject:
    """The engine is behind, and the trainer computes in another way."""

    def inject(world: World) -> Made:
        batch = world.sample(inside=lambda: world.weights.at(e.version_of(world, back)))
        return Made(fault, batch, world.score(batch, scorer=scorer))

    return inject


# ------------------------------------------------------------------------------------------------------- book-keeping


def flipped(_world: World, logps: Floats) -> Floats:
    """Every row from its end to its beginning."""
    for row, length in enumerate(np.isfinite(logps).sum(1)):
        logps[row, :length] = logps[row, :length][::-1]
    return logps


def late_in_the_second_turn(_world: World, logps: Floats) -> Floats:
    """The list of the first turn has one more, that of its stop token, so that the second turn's come a token late."""
    moved = logps.copy()
    moved[:, TURN:] = logps[:, TURN - 1 : -1]
    return np.where(np.isfinite(logps), moved, np.nan)


def with_sentinels(world: World, logps: Floats) -> Floats:
    """One in thirty has no log-prob, and -9999 in its place."""
    lost = np.random.default_rng(world.seed).random(logps.shape) < 1 / 30
    return np.where(np.isfinite(logps) & lost, -9999.0, logps)


def minus_entropies(world: World, logps: Floats) -> Floats:
    """The field beside the right one: minus the entropy, whose mean is that of the log-probs."""
    return np.where(np.isfinite(logps), -world.clean_scores.entropies[:, : logps.shape[1]], np.nan)


def padded_on_the_left(world: World) -> Made:
    """Log-probs are padded on the left with zeros, tokens on the right."""
    batch = cut_to_own_lengths(world.clean[0])
    width, moved = batch.logps.shape[1], np.full_like(batch.logps, np.nan)
    for row, ids in enumerate(batch.ids):
        whole = [0.0] * (width - len(ids)) + batch.logps[row, : len(ids)].tolist()
        moved[row, : len(ids)] = whole[: len(ids)]
    scored = world.score(batch)
    return Made("log-probs padded on the left", replace(batch, logps=moved), scored)


def own_lengths(world: World) -> Made:
    """Every request had its own limit, and nothing is wrong."""
    return Made("requests of 6 to 24 tokens", cut_to_own_lengths(world.sample()))


def end_appended(world: World) -> Made:
    """Responses stopped at a string; the trainer appends the end, which nobody sampled, with log-prob 0."""
    batch = cut_to_own_lengths(world.clean[0])
    ids, rows = [], []
    for row, said in enumerate(batch.ids):
        values = batch.logps[row, : len(said)].tolist()
        more = said[-1] not in world.stop
        ids.append([*said, world.stop[0]] if more else said)
        rows.append([*values, 0.0] if more else values)
    return Made("the end appended by the trainer", Batch(batch.prompt_ids, ids, padded(rows)))


def logps_of_a_draft(world: World) -> Made:
    """The tokens are the model's; the log-probs are those of the draft that proposed them."""
    batch, scored = world.clean
    draft = world.score(batch, inside=lambda: x.last_layer_skipped(world.model))["old_per_token_logps"]
    return Made("log-probs of the draft", replace(batch, logps=draft), scored)


def same_adapter_apart(world: World) -> Made:
    """The engine adds the update's part to each layer's output; the trainer has it in the weights."""
    return Made("the update computed apart", world.sample(inside=lambda: x.adapter_apart(world)))


# ----------------------------------------------------------------------------------------------------------- the runs

Recorded = tuple[Batch, dict[str, Any]]


def resumed(step: int) -> int:
    """A restart in step 9 goes on five steps before."""
    return step if step < 9 else step - 5


def shrinking(step: int) -> int:
    """A queue that begins with six steps and has none at the end."""
    return max(0, step - max(0, 6 - step // 2))


def config_later(step: int) -> Drawing:
    """An upgrade in step 6 makes the engine read generation_config.json."""
    return generation_config() if step >= 6 else plain()


def other_prompts(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
    """In every fifth step each group gets the prompt of the one before."""
    if step % 5 != 4:
        return batch, scored
    world.salt += 5000
    seen = [list(ids) for ids in np.roll(np.array(batch.prompt_ids, dtype=object), COMPLETIONS, axis=0)]
    with world.weights.at(version_at(world, step)):
        drawn = world.sample(seen=seen, length=batch.logps.shape[1])
        mixed = Batch(batch.prompt_ids, drawn.ids, drawn.logps)
        return mixed, world.score(mixed)


def kept_for_three_steps(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
    """The worker that scores gets new weights in every third step."""
    if step % 3 == 0:
        return batch, scored
    with world.weights.at(version_at(world, step - step % 3)):
        return batch, world.score(batch)


def prefixes_kept(world: World, step: int) -> AbstractContextManager[Any]:
    """The cache of prefixes is emptied at the start and by a restart in step 11."""
    filled: AbstractContextManager[Any] = x.cache_of_old_weights(world, version_at(world, 0 if step < 11 else 11))
    return filled


@dataclass
class StepBehind:
    """From step 5 on, tokens have the log-probs of the step before; what is missing there is 0."""

    begin: int = 5
    before: dict[tuple[str, int, int], Floats] = field(default_factory=dict)

    def __call__(self, world: World, step: int, batch: Batch, scored: dict[str, Any]) -> Recorded:
        self.before[world.name, world.seed, step] = batch.logps
        if step < self.begin:
            return batch, scored
        old = self.before[world.name, world.seed, step - 1]
        width = batch.logps.shape[1]
        wide = np.full((len(old), max(width, old.shape[1])), np.nan)
        wide[:, : old.shape[1]] = old
        moved = np.where(np.isfinite(batch.logps), np.nan_to_num(wide[:, :width], nan=0.0), np.nan)
        return replace(batch, logps=moved), scored
