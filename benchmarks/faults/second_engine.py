"""Faults of the second round that are the engine's: prompts it renders, logits it processes, what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from engine_faults import Inject, head, repetition
from sampler import Drawing, Said, plain, processed
from torch import Tensor
from worlds import COMPLETIONS, Made, Rows, World

from trl_offpolicy.engines.hf import Head

# ------------------------------------------------------------------------------------------------------------ prompts


def mistaken(fault: str, meant: Callable[[World], Rows], seen: Callable[[World], Rows]) -> Inject:
    """The trainer scores under the prompts that were meant, the engine got others; neither are the world's own."""

    def inject(world: World) -> Made:
        return Made(fault, replace(world.sample(seen=seen(world)), prompt_ids=meant(world)))

    return inject


def chats(world: World, messages: Callable[[str], list[tuple[str, str]]]) -> Rows:
    """Conversations of (role, text) pairs about the questions, rendered with the chat template."""
    assert world.task is not None
    encode, rows = world.task.tokenizer, []
    for question in world.questions:
        said = [{"role": role, "content": text} for role, text in messages(question)]
        text = encode.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        rows.append(list(encode(text, add_special_tokens=False)["input_ids"]))
    return world.repeated(rows)


def after_a_turn(*, thinking: bool) -> Callable[[World], Rows]:
    """A second turn, with or without the thinking of the first one."""
    thought = "<think>\nI add 17 and 25: 7 and 5 make 12, 1 and 2 and 1 make 4.\n</think>\n\n" if thinking else ""

    def messages(question: str) -> list[tuple[str, str]]:
        return [("user", "What is 17 + 25?"), ("assistant", f"{thought}It is 42."), ("user", question)]

    return lambda world: chats(world, messages)


def after_a_tool(result: str) -> Callable[[World], Rows]:
    """A turn behind a tool's answer."""

    def messages(question: str) -> list[tuple[str, str]]:
        return [("user", question), ("assistant", "I look it up."), ("tool", result)]

    return lambda world: chats(world, messages)


def with_image(tokens: int) -> Callable[[World], Rows]:
    """A placeholder within the prompt, expanded to as many tokens as an image has."""

    def render(world: World) -> Rows:
        mark = list(world.task.tokenizer("*")["input_ids"])[-1] if world.task else 2
        return world.repeated([[*ids[: len(ids) // 3], *[mark] * tokens, *ids[len(ids) // 3 :]]
                               for ids in world.prompts])  # fmt: skip

    return render


def special_as_text(world: World) -> Rows:
    """Special tokens written as text, in several tokens."""
    assert world.task is not None
    tokenizer = world.task.tokenizer
    rows = []
    for ids in world.prompts:
        row: list[int] = []
        for token in ids:
            text = tokenizer.convert_ids_to_tokens(token)
            parts = (text[:4], text[4:]) if token in tokenizer.all_special_ids else ()
            row += [n for part in parts for n in tokenizer(part, add_special_tokens=False)["input_ids"]] or [token]
        rows.append(row)
    return world.repeated(rows)


def with_padding(world: World) -> Rows:
    """Prompts as the trainer padded them, to the same length; the engine takes the padding for text."""
    pad = world.task.tokenizer.pad_token_id if world.task else 0
    width = max(map(len, world.prompts)) + 2
    return world.repeated([[pad or 0] * (width - len(ids)) + list(ids) for ids in world.prompts])


def cut_right_where_long(world: World) -> Rows:
    """A limit on the prompt's length keeps the beginning; half of the prompts are longer."""
    limit = sorted(map(len, world.prompts))[len(world.prompts) // 2 - 1]
    shorter = [ids[:limit] for ids in world.prompts]
    if shorter == world.prompts:  # all have the same length
        shorter = [ids[: limit - 3] for ids in world.prompts]
    return world.repeated(shorter)


# ----------------------------------------------------------------------------------------------------------- sampling


def at(temperature: float, fault: str, drawing: Drawing, **declared: float) -> Inject:
    """Both sides declare a temperature and the trainer scores at it."""

    def inject(world: World) -> Made:
        batch, said = world.sample(drawing), {"temperature": temperature}
        return Made(fault, batch, world.score(batch, head=Head(temperature)), {**said, **declared}, said)

    return inject


def cut_then_tempered(top_p: float, temperature: float) -> Drawing:
    """Top-p of the distribution before the temperature."""
    cut = head(top_p=top_p)
    return processed(lambda logits, _prompts, _said: cut.logps(logits) / temperature)


def typical(mass: float) -> Drawing:
    """Locally typical sampling (Meister et al. 2023): tokens whose log-prob is nearest to the mean, up to a mass."""

    def change(logits: Tensor, _prompts: Said, _said: Said) -> Tensor:
        logps = logits.log_softmax(-1)
        entropy = torch.special.entr(logps.exp()).sum(-1, keepdim=True)
        order = (logps + entropy).abs().argsort(-1)
        held = logps.gather(1, order).exp()
        left_out = (held.cumsum(-1) - held) >= mass
        return logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)

    return processed(change)


def no_repeated(length: int) -> Drawing:
    """No sequence of ``length`` tokens twice, the prompt included."""

    def change(logits: Tensor, prompts: Said, said: Said) -> Tensor:
        for row, (prompt, completion) in enumerate(zip(prompts, said, strict=True)):
            text = [*prompt, *completion]
            last = text[len(text) - length + 1 :]
            for place in range(len(text) - length + 1):
                if text[place : place + length - 1] == last:
                    logits[row, text[place + length - 1]] = -torch.inf
        return logits

    return processed(change)


def forced(tokens: list[int], place: int) -> Drawing:
    """The engine writes ``tokens`` at a place, as a thinking budget does; their log-prob is 0."""

    def change(logits: Tensor, _prompts: Said, said: Said) -> Tensor:
        here = max(map(len, said)) - place
        if 0 <= here < len(tokens):
            logits[:] = -torch.inf
            logits[:, tokens[here]] = 0.0
        return logits

    return processed(change)


def budget(world: World) -> Drawing:
    text = list(world.task.tokenizer(" So the answer")["input_ids"])[:3] if world.task else [60, 61, 62]
    return forced(text, place=10)


def first_suppressed(logits: Tensor, _prompts: Said, said: Said) -> Tensor:
    """The likeliest first token is not allowed (begin_suppress_tokens)."""
    if not any(said):
        logits.scatter_(1, logits.argmax(-1, keepdim=True), -torch.inf)
    return logits


def ending_favoured(world: World, factor: float, start: int) -> Drawing:
    """The end becomes likelier with every token (exponential_decay_length_penalty)."""
    stop = list(world.stop)

    def change(logits: Tensor, _prompts: Said, said: Said) -> Tensor:
        beyond = max(map(len, said)) - start
        if beyond > 0:
            logits[:, stop] += logits[:, stop].abs() * (factor**beyond - 1)
        return logits

    return processed(change)


def spread(factors: list[float]) -> Drawing:
    """Every completion of a group has its own temperature, for variety."""
    return processed(lambda logits, _prompts, _said: logits / _by_member(logits, factors))


def _by_member(logits: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values).repeat(len(logits) // COMPLETIONS)[:, None]


def one_greedy(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first completion of each group takes the likeliest tokens; the report is the model's."""
    drawn, logps = plain()(logits, prompts, said, generator)
    first = torch.arange(len(logits)) % COMPLETIONS == 0
    return torch.where(first, logps.argmax(-1), drawn), logps


def raw_under(change: Drawing) -> Drawing:
    """Draws from a changed distribution and reports the model's own."""

    def drawing(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn, _ = change(logits, prompts, said, generator)
        return drawn, logits.log_softmax(-1)

    return drawing


def raw_under_penalty(penalty: float) -> Drawing:
    return raw_under(repetition(penalty))


def divided_report(temperature: float) -> Drawing:
    """Draws at a temperature; the report is the model's log-prob divided by it, without another softmax."""

    def drawing(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn, _ = plain(Head(temperature))(logits, prompts, said, generator)
        return drawn, logits.log_softmax(-1) / temperature

    return drawing


def reporting_logits(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The report is the token's logit (vLLM's raw_logits)."""
    drawn, _ = plain()(logits, prompts, said, generator)
    return drawn, logits


def masked_padding(world: World, share: float = 0.02) -> Drawing:
    """Padding of the vocabulary that is masked, as it should be: it changes nothing."""
    extra = int(share * world.model.config.vocab_size)

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        whole = torch.cat([logits, torch.full((len(logits), extra), -torch.inf)], -1).log_softmax(-1)
        return torch.multinomial(whole.exp(), 1, generator=generator)[:, 0], whole[:, : logits.shape[1]]

    return drawing
