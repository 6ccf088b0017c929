"""Faults of the fifth round that are the engine's: prompts it renders, how it draws, and both sides at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

import fifth_contexts as w
import numpy as np
import torch
from engine_faults import Context, Inject, counts
from sampler import Drawing, Said, plain, processed
from tasks import SYSTEM
from third_engine import Messages
from torch import Tensor
from worlds import Batch, Made, Rows, World

from trl_offpolicy.engines.hf import Head

RESULT = '{"result": 42.0}'
OPENING = "My answer:"
END, HEADER = "<|im_end|>\n", "<|im_start|>assistant\n"

# ------------------------------------------------------------------------------------------------------------ prompts


def asked_by_default(question: str) -> Messages:
    """What a template adds by itself where no system prompt is given."""
    return [("system", "You are a helpful assistant."), ("user", question)]


def tool_answered(question: str, role: str) -> Messages:
    return [("user", question), ("assistant", "I look it up."), (role, RESULT)]


def opened(text: str, _world: World) -> str:
    """The response is begun for the policy."""
    return text + OPENING


def opened_and_closed(text: str, _world: World) -> str:
    """What was begun is taken for a whole turn, and another one follows."""
    return text + OPENING + END + HEADER


def template_twice(world: World) -> Rows:
    """The text of the rendered prompt is rendered again, as a question."""
    assert world.task is not None
    rows = []
    for question in world.questions:
        said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = world.task.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        rows.append(world.task.render(text))
    return world.repeated(rows)


def escaped(world: World) -> Rows:
    """Quotes and angle brackets of the questions written for a web page."""
    assert world.task is not None
    return world.repeated([world.task.render(escape(question)) for question in world.questions])


def with_end(world: World) -> Rows:
    """The end token behind the prompt, as a tokenizer appends it that adds one to every text."""
    return world.repeated([[*ids, world.stop[0]] for ids in world.prompts])


# ----------------------------------------------------------------------------------------------------------- sampling


def recent_repetition(penalty: float, window: int) -> Drawing:
    """A repetition penalty on what stands among the last ``window`` tokens."""

    def change(logits: Tensor, prompts: Said, said: Said) -> Tensor:
        recent = [[*p, *c][-window:] for p, c in zip(prompts, said, strict=True)]
        seen = counts(logits, recent) > 0
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return processed(change)


def tempered_by_entropy(low: float, high: float) -> Drawing:
    """The temperature goes from ``low`` for a certain token to ``high`` for a uniform distribution."""

    def change(logits: Tensor, _prompts: Said, _said: Said) -> Tensor:
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)
        share = entropy / torch.log(torch.tensor(float(logits.shape[1])))
        return logits / (low + (high - low) * share)

    return processed(change)


def top_excluded(threshold: float, chance: float) -> Drawing:
    """At some tokens all choices likelier than ``threshold`` but the last of them are left out (XTC)."""

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shares = logits.softmax(-1)
        likely = shares >= threshold
        least = torch.where(likely, shares, 2.0).argmin(-1, keepdim=True)
        out = likely.scatter(1, least, False) & (torch.rand(len(logits), 1, generator=generator) < chance)
        logps = logits.masked_fill(out, -torch.inf).log_softmax(-1)
        return torch.multinomial(logps.exp(), 1, generator=generator)[:, 0], logps

    return drawing


def answered_from_a_cache(world: World) -> Made:
    """The third and fourth response of a group are the first and second again: equal requests, answered once."""
    batch = world.sample()
    order = [row - row % 4 + row % 2 for row in range(len(batch.ids))]
    return Made(
        "half of each group copied", Batch(batch.prompt_ids, [batch.ids[row] for row in order], batch.logps[order])
    )


def forgotten_by_the_trainer(temperature: float) -> Inject:
    """Both sides declare a temperature, and the trainer scores without it."""

    def inject(world: World) -> Made:
        batch, said = world.sample(plain(Head(temperature))), {"temperature": temperature}
        return Made(f"temperature {temperature}, which the trainer forgets", batch, world.score(batch), said, said)

    return inject


# --------------------------------------------------------------------------------------------------- both sides at once


def on_both(fault: str, engine: Context, trainer: Context, said: dict[str, Any] | None = None,
            trainer_said: dict[str, Any] | None = None) -> Inject:  # fmt: skip
    """Each side computes in a context of its own; ``trainer_said`` is as ``said`` where it is not given."""

    def inject(world: World) -> Made:
        batch = world.sample(inside=partial(engine, world))
        scored = world.score(batch, inside=partial(trainer, world))
        return Made(fault, batch, scored, said or {}, said or {} if trainer_said is None else trainer_said)

    return inject


def drawn_and_scored(fault: str, drawing: Drawing, scoring: Context) -> Inject:
    """The engine draws in another way, and the trainer scores in a context."""

    def inject(world: World) -> Made:
        batch = world.sample(drawing)
        return Made(fault, batch, world.score(batch, inside=partial(scoring, world)))

    return inject


def tempered_and_seen(temperature: float, seen: Callable[[World], Rows]) -> Inject:
    """Both sides have a temperature and say so; the engine gets other prompts."""

    def inject(world: World) -> Made:
        batch, said = world.sample(plain(Head(temperature)), seen=seen(world)), {"temperature": temperature}
        scored = world.score(batch, head=Head(temperature))
        return Made(f"other prompts at a declared temperature {temperature}", batch, scored, said, said)

    return inject


def table_too_short(world: World) -> AbstractContextManager[Any]:
    """The engine's positions end four tokens behind the longest prompt."""
    found: AbstractContextManager[Any] = w.positions_clamped(world.model, max(map(len, world.prompts)) + 3)
    return found


# ---------------------------------------------------------------------------------------------------- clean variants


def behind_the_end(world: World) -> Made:
    """The engine ignores the end (ignore_eos): responses go on behind it, and both sides score all of them."""
    stop, world.stop = world.stop, ()
    try:
        batch = world.sample()
    finally:
        world.stop = stop
    return Made("responses that go on behind the end", batch)


def one_long(world: World) -> Made:
    """One response of all tokens, and the others of one to three."""
    batch = world.sample()
    sizes = [len(ids) if row == 5 else 1 + row % 3 for row, ids in enumerate(batch.ids)]
    kept = np.arange(batch.logps.shape[1]) < np.array(sizes)[:, None]
    ids = [row[:size] for row, size in zip(batch.ids, sizes, strict=True)]
    return Made(
        "one long response among short ones", replace(batch, ids=ids, logps=np.where(kept, batch.logps, np.nan))
    )
