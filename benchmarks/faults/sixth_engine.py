"""Faults of the sixth round that are the engine's: turns it renders, how it draws, and which settings reach a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import fourth_engine as h
import torch
from engine_faults import Context, Inject, counts, head
from sampler import Drawing, Said, plain, processed, reporting_raw
from tasks import SYSTEM
from third_engine import Messages, by_row
from torch import Tensor
from weights import VERSIONS
from worlds import COMPLETIONS, Made, Rows, World

from trl_offpolicy.engines.hf import Head

TOOL = '{"name": "convert", "description": "Convert if a > 0 & b\'s unit is known", "parameters": {"b": "string"}}'
SORTED_TOOL = (
    '{"description":"Convert if a \\u003e 0 \\u0026 b\\u0027s unit is known","name":"convert",'
    '"parameters":{"b":"string"}}'
)
"""The same tool with its keys in the order of letters, no blanks, and escaped as for a web page."""
THOUGHTS = "<think>\n"
IMAGE = 16
"""Tokens of an image."""
RESUMED = 9
"""Tokens that a request had said before it was resumed."""

# ------------------------------------------------------------------------------------------------------------ prompts


def opened_thoughts(world: World) -> Rows:
    """The template begins the thoughts behind the assistant's header."""
    assert world.task is not None
    block = list(world.task.tokenizer(THOUGHTS, add_special_tokens=False)["input_ids"])
    return world.repeated([[*ids, *block] for ids in world.prompts])


def system_twice(question: str) -> Messages:
    """The data set holds a system turn, and the loop adds its own."""
    return [("system", SYSTEM), ("system", SYSTEM), ("user", question)]


def asked_by_a_human(question: str) -> Messages:
    """Roles as the data set names them."""
    return [("system", SYSTEM), ("human", question)]


def asked_with_tool(question: str, tool: str) -> Messages:
    return [("system", f"{SYSTEM} You may call: {tool}"), ("user", question)]


def answered_before(question: str, ending: str) -> Messages:
    """A second turn; the first response has the string that ended it, or not."""
    return [("user", "What is 17 + 25?"), ("assistant", f"The answer is 42.{ending}"), ("user", question)]


def system_missing_in(groups: tuple[int, ...]) -> Callable[[World], Rows]:
    """One worker renders its groups without the system prompt."""

    def render(world: World) -> Rows:
        usual, without = world.repeated(), world.rendered(system=None)
        return [without[row] if row // COMPLETIONS in groups else ids for row, ids in enumerate(usual)]

    return render


def with_image(world: World, *, front: bool) -> Rows:
    """An image in the middle of the prompt, where it was meant, or behind its first token."""
    mark = list(world.task.tokenizer("*")["input_ids"])[-1] if world.task else 2
    rows = []
    for ids in world.prompts:
        place = 1 if front else 2 * len(ids) // 3
        rows.append([*ids[:place], *[mark] * IMAGE, *ids[place:]])
    return world.repeated(rows)


# ----------------------------------------------------------------------------------------------------------- sampling


def settings_lost_at_a_resume(temperature: float) -> Drawing:
    """Every third request is stopped and resumed, and goes on with the server's own temperature."""
    return by_row(lambda row: row % 3 == 0, h.at_places(plain(head(temperature)), lambda place: place >= RESUMED))


def cut_on_both_sides(engine: int, trainer: int) -> Inject:
    """Both sides truncate and say so, to a different number of tokens."""

    def inject(world: World) -> Made:
        batch = world.sample(plain(head(top_k=engine)))
        scored = world.score(batch, head=head(top_k=trainer))
        return Made(f"top-k {engine} in the engine, {trainer} in the trainer", batch, scored, {"top_k": engine},
                    {"top_k": trainer})  # fmt: skip

    return inject


def penalised_and_tempered(penalty: float, temperature: float) -> Drawing:
    """A presence penalty, then the temperature."""
    return processed(lambda logits, _prompts, said: (logits - penalty * (counts(logits, said) > 0)) / temperature)


def repetition_of_the_prompt(penalty: float) -> Drawing:
    """A repetition penalty that knows the prompt's tokens, and not those that were said."""

    def change(logits: Tensor, prompts: Said, _said: Said) -> Tensor:
        seen = counts(logits, prompts) > 0
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return processed(change)


def greedy(logits: Tensor, _prompts: Said, _said: Said, _generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The likeliest token always; the report is the model's."""
    logps = logits.log_softmax(-1)
    return logps.argmax(-1), logps


def accepted_above(threshold: float, sharpness: float) -> Drawing:
    """A draft proposes, and is accepted where the model gives it ``threshold`` or more; the report is the model's.

    The draft's distribution is the model's at temperature ``sharpness``.
    """

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        logps = logits.log_softmax(-1)
        proposed, own = (torch.multinomial(shares, 1, generator=generator)[:, 0]
                         for shares in ((logits / sharpness).softmax(-1), logps.exp()))  # fmt: skip
        accepted = logps.gather(1, proposed[:, None])[:, 0].exp() >= threshold
        return torch.where(accepted, proposed, own), logps

    return drawing


def raw_in_every_second_row(temperature: float) -> Drawing:
    """All rows are drawn at a temperature; one of two servers reports log-probs from before it."""
    tempered, raw = plain(Head(temperature)), reporting_raw(Head(temperature))

    def drawing(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn, logps = tempered(logits, prompts, said, generator)
        _, others = raw(logits, prompts, said, generator)
        odd = torch.arange(len(logits)) % 2 == 1
        return drawn, torch.where(odd[:, None], others, logps)

    return drawing


# --------------------------------------------------------------------------------------------------- both sides at once


def seen_and_inside(fault: str, seen: Callable[[World], Rows], inside: Context, **declared: object) -> Inject:
    """The engine gets other prompts, and computes in a context."""

    def inject(world: World) -> Made:
        return Made(fault, world.sample(seen=seen(world), inside=partial(inside, world)), engine=dict(declared))

    return inject


def seen_on_both(
    fault: str, meant: Callable[[World], Rows], seen: Callable[[World], Rows], inside: Context, **said: object
) -> Inject:
    """Both sides compute in a context and say so, and the engine gets other prompts than were meant."""

    def inject(world: World) -> Made:
        context = partial(inside, world)
        batch = replace(world.sample(seen=seen(world), inside=context), prompt_ids=meant(world))
        return Made(fault, batch, world.score(batch, inside=context), dict(said), dict(said))

    return inject


# ---------------------------------------------------------------------------------------------------- clean variants


def update_of_zero(world: World) -> Made:
    """The engine says that it is a version behind; the last update had a rate of 0, so nothing moved."""
    return Made("a version behind an update of 0", world.sample(), engine={"weight_version": VERSIONS - 1})


def top_k_of_all(world: World) -> Made:
    """A top-k as large as the vocabulary, declared by the engine alone."""
    size = int(world.model.config.vocab_size)
    return Made("top-k of the whole vocabulary", world.sample(plain(head(top_k=size))), engine={"top_k": size})


def long_responses(world: World) -> Made:
    """Responses of up to 48 tokens."""
    return Made("responses of 48 tokens", world.sample(length=48))
