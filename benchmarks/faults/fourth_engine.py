"""Faults of the fourth round that are the engine's: turns it renders, how it draws, which server answers a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from engine_faults import Context, Inject, head
from sampler import Drawing, Said, plain, prefill, processed
from tasks import SYSTEM
from third_contexts import seeded
from third_engine import Messages
from torch import Tensor
from worlds import COMPLETIONS, LENGTH, Batch, Made, Rows, World

from trl_offpolicy.diagnosis.attribution.evidence import padded

END = "<|im_end|>"
TOOL = '{"name": "add", "parameters": {"a": "number", "b": "number"}}'

# ------------------------------------------------------------------------------------------------------------ prompts


def without_first(world: World) -> Rows:
    """The first token, which is the BOS where there is one, is missing."""
    return world.repeated([ids[1:] for ids in world.prompts])


def assistant_twice(world: World) -> Rows:
    """The header of the assistant's turn stands twice: the template wrote it, and the loop again."""
    assert world.task is not None
    header = list(world.task.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"])
    return world.repeated([[*ids, *header] for ids in world.prompts])


def asked(question: str) -> Messages:
    return [("user", question)]


def asked_with_tools(question: str) -> Messages:
    """A turn of its own lists the tools."""
    return [("system", SYSTEM), ("tool", f"You may call: {TOOL}"), ("user", question)]


def asked_with_system(question: str) -> Messages:
    return [("system", SYSTEM), ("user", question)]


def system_in_the_user_turn(question: str) -> Messages:
    """A template without a system role puts its text in front of the question."""
    return [("user", f"{SYSTEM}\n\n{question}")]


def asked_with_blanks(question: str) -> Messages:
    """The question as the data set holds it, with blanks at its end."""
    return [("user", f"{question} \n\n")]


def end_of_turn_twice(text: str, _world: World) -> str:
    """The token that ended the first response, and the template's."""
    before, end, after = text.rpartition(f"{END}\n<|im_start|>user")
    return f"{before}{END}{end}{after}"


# ----------------------------------------------------------------------------------------------------------- sampling


def at_places(special: Drawing, concerned: Callable[[int], bool]) -> Drawing:
    """Tokens at some places are drawn, and reported, in another way."""
    usual = plain()

    def drawing(logits: Tensor, prompts: Said, said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = special if concerned(max(map(len, said))) else usual
        return chosen(logits, prompts, said, generator)

    return drawing


def top_p_late() -> Drawing:
    """Top-p 0.8 in the second half of a response, which is the answer behind the thoughts."""
    return at_places(plain(head(top_p=0.8)), lambda place: place >= LENGTH // 2)


def first_token_cool() -> Drawing:
    """The first token comes from the node that computes prompts, which has a temperature of its own."""
    return at_places(plain(head(0.5)), lambda place: place == 0)


def narrow_top_p(mass: float) -> Drawing:
    """Top-p without the token that crosses the mass, as some kernels cut it; the likeliest always stays."""

    def change(logits: Tensor, _prompts: Said, _said: Said) -> Tensor:
        order = logits.argsort(-1, descending=True)
        held = logits.softmax(-1).gather(1, order).cumsum(-1)
        left_out = held > mass
        left_out[:, 0] = False
        return logits.masked_fill(torch.zeros_like(left_out).scatter(1, order, left_out), -torch.inf)

    return processed(change)


def same_head_narrow(mass: float) -> Inject:
    """Both sides declare the same top-p; the engine's kernel cuts one token more."""

    def inject(world: World) -> Made:
        batch, said = world.sample(narrow_top_p(mass)), {"top_p": mass}
        scored = world.score(batch, head=head(top_p=mass))
        return Made(f"top-p {mass} on both sides, the engine's without the last token", batch, scored, said, said)

    return inject


def one_seed(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All completions of a group use the same random numbers."""
    logps = logits.log_softmax(-1)
    chance = torch.rand(len(logits) // COMPLETIONS, generator=generator).repeat_interleave(COMPLETIONS)
    drawn = (logps.exp().cumsum(-1) < chance[:, None]).sum(-1)
    return drawn.clamp(max=logits.shape[1] - 1), logps


def watermarked(amount: float) -> Drawing:
    """Half of the vocabulary is favoured; the token before says which half (Kirchenbauer et al. 2023)."""

    def change(logits: Tensor, prompts: Said, said: Said) -> Tensor:
        for row, (prompt, completion) in enumerate(zip(prompts, said, strict=True)):
            last = [*prompt, *completion][-1]
            logits[row] += amount * (seeded(f"after {last}", logits.shape[1]) > 0)
        return logits

    return processed(change)


# ---------------------------------------------------------------------------------------------------- several servers


def rows_of(batches: Sequence[Batch], serves: Callable[[int], int]) -> Batch:
    """Row r of the batch with number ``serves(r)``."""
    chosen = [batches[serves(row)] for row in range(len(batches[0].ids))]
    ids = [batch.ids[row] for row, batch in enumerate(chosen)]
    logps = [batch.logps[row, : len(batch.ids[row])].tolist() for row, batch in enumerate(chosen)]
    return Batch(batches[0].prompt_ids, ids, padded(logps))


def servers(world: World, insides: Sequence[Context | None], serves: Callable[[int], int]) -> Batch:
    """Each row is answered by one of several servers; None = one without a fault."""
    batches = []
    for number, inside in enumerate(insides):
        world.salt += 1000 * number
        batches.append(world.sample() if inside is None else world.sample(inside=partial(inside, world)))
        world.salt -= 1000 * number
    return rows_of(batches, serves)


def of_servers(fault: str, insides: Sequence[Context | None], serves: Callable[[int], int]) -> Inject:
    return lambda world: Made(fault, servers(world, insides, serves))


# ---------------------------------------------------------------------------------------------------- clean variants


def requests_shuffled(world: World) -> Made:
    """Requests go out in another order, and what they return is put back."""
    meant = world.repeated()
    order = torch.randperm(len(meant), generator=torch.Generator().manual_seed(world.seed)).tolist()
    found = world.sample(seen=[meant[row] for row in order])
    back = [order.index(row) for row in range(len(meant))]
    logps = [found.logps[place, : len(found.ids[place])].tolist() for place in back]
    return Made("requests in another order", Batch(meant, [found.ids[place] for place in back], padded(logps)))


@torch.no_grad()
def without_cache(world: World) -> Made:
    """Every token is computed from the whole text, without a cache."""
    meant, drawing = world.repeated(), plain()
    generator = torch.Generator().manual_seed(1000 * world.seed + world.salt)
    ids: Rows = [[] for _ in meant]
    logps: list[list[float]] = [[] for _ in meant]
    for _ in range(LENGTH):
        texts = [[*prompt, *row] for prompt, row in zip(meant, ids, strict=True)]
        _, _, logits = prefill(world.model, texts)
        drawn, reported = drawing(logits.float(), meant, ids, generator)
        for row, token in enumerate(drawn.tolist()):
            if not ids[row] or ids[row][-1] not in world.stop:
                ids[row].append(token)
                logps[row].append(reported[row, token].item())
    return Made("no cache", Batch(meant, ids, padded(logps)))
