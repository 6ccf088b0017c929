"""Faults of the third round that are the engine's: conversations it renders, how it draws, what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import third_contexts as x
import torch
from engine_faults import Context, Inject, biased, head
from sampler import Drawing, Order, Said, plain, processed
from torch import Tensor
from trainer_faults import split_token
from weights import VERSIONS
from worlds import LENGTH, Batch, Made, Rows, World

from trl_offpolicy.diagnosis.attribution.evidence import padded

Messages = list[tuple[str, str]]
USER, END = "<|im_start|>user\n", "<|im_end|>\n"
CHUNK = 8
"""Tokens of a block of the prefix cache."""

# ------------------------------------------------------------------------------------------------------------ prompts


def said_before(question: str) -> Messages:
    return [("user", "What is 17 + 25?"), ("assistant", "The answer is 42."), ("user", question)]


def called_a_tool(question: str, call: str) -> Messages:
    return [("user", question), ("assistant", call), ("tool", '{"result": 42.0}')]


def conversations(
    messages: Callable[[str], Messages], change: Callable[[str, World], str] | None = None
) -> Callable[[World], Rows]:
    """Conversations about the questions, rendered with the chat template; ``change`` edits the text."""

    def render(world: World) -> Rows:
        assert world.task is not None
        encode, rows = world.task.tokenizer, []
        for question in world.questions:
            said = [{"role": role, "content": text} for role, text in messages(question)]
            text = encode.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            if change is not None:
                text = change(text, world)
            rows.append(list(encode(text, add_special_tokens=False)["input_ids"]))
        return world.repeated(rows)

    return render


def without_separator(text: str, _world: World) -> str:
    """No newline between the last two turns, as a loop that appends ids leaves it out."""
    before, _, after = text.rpartition(END + USER)
    return before + END.rstrip() + USER + after


def with_bos_again(text: str, world: World) -> str:
    """Another BOS in front of the last question."""
    assert world.task is not None
    before, _, after = text.rpartition(USER)
    return f"{before}{world.task.tokenizer.bos_token}{USER}{after}"


def with_empty_thinking(world: World) -> Rows:
    """The empty block of thoughts that ``enable_thinking=False`` writes behind the prompt."""
    assert world.task is not None
    block = list(world.task.tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"])
    return world.repeated([[*ids, *block] for ids in world.prompts])


def retokenised_prompts(world: World) -> Rows:
    """The prompts' text in other tokens: three of them are written as two."""
    assert world.task is not None
    rows = []
    for ids in world.prompts:
        row = list(ids)
        for start in (len(ids) // 4, len(ids) // 3, len(ids) // 2 - 1):
            row = split_token(world.task.tokenizer, row, start)
        rows.append(row)
    return world.repeated(rows)


def grid_of_an_image(world: World) -> Made:
    """Prompts with an image; engine and trainer see the same ids and count them otherwise."""
    used = {token for ids in world.prompts for token in ids}
    mark = next(n for n in reversed(range(world.model.config.vocab_size)) if n not in used and n not in world.stop)
    prompts = [[*ids[: len(ids) // 3], *[mark] * x.IMAGE, *ids[len(ids) // 3 :]] for ids in world.prompts]
    seen = world.repeated(prompts)
    batch = world.sample(seen=seen, inside=partial(x.grid_positions, world.model, mark))
    return Made("the engine counts an image as a grid", replace(batch, prompt_ids=seen))


# ----------------------------------------------------------------------------------------------------------- sampling


def by_row(concerned: Callable[[int], bool], special: Drawing) -> Drawing:
    """Some rows are drawn, and reported, in another way."""
    usual = plain()

    def drawing(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.tensor([concerned(row) for row in range(len(logits))])
        (drawn, logps), (other, others) = (one(logits, prompts, said, generator) for one in (usual, special))
        return torch.where(rows, other, drawn), torch.where(rows[:, None], others, logps)

    return drawing


def generation_config() -> Drawing:
    """What Qwen3's generation_config.json asks for."""
    return plain(head(0.6, top_k=20, top_p=0.95))


def second_replica_cuts() -> Drawing:
    return by_row(lambda row: row % 2 == 1, plain(head(top_k=20, top_p=0.8)))


def bias_left(world: World) -> Drawing:
    """The rows of one group have the bias of a request that was there before."""
    return by_row(lambda row: 4 <= row < 8, biased(world, 4.0, count=3))


def cooling(first: float, last: float) -> Drawing:
    """The temperature falls with every token."""

    def change(logits: Tensor, _prompts: Said, said: Said) -> Tensor:
        share = max(map(len, said)) / (LENGTH - 1)
        return logits / (first + share * (last - first))

    return processed(change)


def greedy_from(place: int) -> Drawing:
    """The likeliest token from a place on; the report is the model's."""
    usual = plain()

    def drawing(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn, logps = usual(logits, prompts, said, generator)
        return (logps.argmax(-1) if max(map(len, said)) >= place else drawn), logps

    return drawing


def likeliest_alone(logits: Tensor, _prompts: Said, _said: Said) -> Tensor:
    """Temperature 0 as a distribution: all of it is on one token, so its log-prob is 0."""
    best = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.argmax(-1, keepdim=True), True)
    return logits.masked_fill(~best, -torch.inf)


def some_greedy() -> Drawing:
    return by_row(lambda row: row % 4 == 3, processed(likeliest_alone))


def head_in_pieces(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The normaliser from thirds of the vocabulary, as ranks with a part of the head add it: changes nothing."""
    parts = torch.stack([part.logsumexp(-1) for part in logits.chunk(3, -1)], -1)
    logps = logits - parts.logsumexp(-1, keepdim=True)
    return torch.multinomial(logps.exp(), 1, generator=generator)[:, 0], logps


# ------------------------------------------------------------------------------------------------- batches and caches


def own_length(row: int) -> int:
    """Tokens that a request asks for, 6 to 24."""
    return 6 + 7 * row % 19


def cut_to_own_lengths(batch: Batch) -> Batch:
    """Every request had its own limit."""
    ids = [row[: own_length(number)] for number, row in enumerate(batch.ids)]
    rows = [batch.logps[number, : len(row)].tolist() for number, row in enumerate(ids)]
    return Batch(batch.prompt_ids, ids, padded(rows))


def old_prefix(back: float) -> Inject:
    """The cache holds prefixes of older weights; the last block of a prompt is computed anew."""

    def inject(world: World) -> Made:
        width = max(map(len, world.prompts))

        def cached(given: Mapping[str, Any]) -> bool:
            return x.many_at_once(given) and given["attention_mask"].shape[1] < width

        batch = world.sample(
            inside=lambda: x.cache_of_old_weights(world, VERSIONS - back, cached), order=Order(chunk=CHUNK)
        )
        return Made(f"prefixes of lag {back} in the cache", batch)

    return inject


def preempted(world: World) -> Made:
    """Requests were stopped after ten tokens, and what they had said was computed anew as a prompt."""
    begun = world.sample(length=10)
    prompts = [[*prompt, *ids] for prompt, ids in zip(begun.prompt_ids, begun.ids, strict=True)]
    rest = world.sample(seen=prompts, length=LENGTH - 10)
    done = [ids[-1] in world.stop for ids in begun.ids]
    ids = [list(a) if end else [*a, *b] for a, b, end in zip(begun.ids, rest.ids, done, strict=True)]
    logps = [
        np.concatenate([begun.logps[row, : len(begun.ids[row])], rest.logps[row]])[: len(ids[row])].tolist()
        for row in range(len(ids))
    ]
    return Made("recomputed after a preemption", Batch(begun.prompt_ids, ids, padded(logps)))


def swaps_and(fault: str, meant: Callable[[World], Rows], seen: Callable[[World], Rows], scoring: Context) -> Inject:
    """The engine gets other prompts than were meant, and the trainer scores in a context."""

    def inject(world: World) -> Made:
        batch = replace(world.sample(seen=seen(world)), prompt_ids=meant(world))
        return Made(fault, batch, world.score(batch, inside=partial(scoring, world)))

    return inject
