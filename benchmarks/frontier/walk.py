"""A task of the same difficulty at every length: walk on a ring of 16 symbols, end up wound one way.

A prompt is that of ``benchmarks/lab/sorting.py``: 10 symbols and a separator. An answer is T symbols, always exactly T.
The model is first taught walks: a step of +1 or -1 on the ring, mostly in the direction of the step before, at times a
turn or a jump. The reward is 1 if the answer has wound upwards further than the policy's own median, else 0. So about
half of the answers are right at every T, an early turn changes many later tokens, and the gradient does not vanish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lab.sorting import COUNT, SYMBOLS, Answers, Block, Sorter, prompts

TURN, JUMP = 0.06, 0.04
"""Of the taught walks: a step turns round, or goes to any symbol."""


class Walker(Sorter):
    """The lab's transformer (2 layers, width 64, 4 heads) for answers of up to ``longest`` tokens."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        width = self.tokens.embedding_dim
        self.longest = longest
        self.places = nn.Embedding(COUNT + 1 + longest, width)
        nn.init.normal_(self.places.weight, std=1 / math.sqrt(width))

    def embed(self, ids: Tensor, shift: int = 0) -> Tensor:
        """(B, L, width): tokens and places; ``shift`` moves the answer's places on, as if it had begun later."""
        places = torch.arange(ids.shape[1])
        return self.tokens(ids) + self.places(places + shift * (places > COUNT))

    def logits(self, ids: Tensor, shift: int = 0) -> Tensor:
        """(B, L, V), as :meth:`forward` without a cache gives for ``shift`` 0."""
        x = self.embed(ids, shift)
        for block in self.blocks:
            x = block(x, [])
        return self.head(self.norm(x))


def walks(questions: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """(B, length) symbols of taught walks: begun at the prompt's last symbol, in a random direction."""
    rows = len(questions)
    turned = torch.rand(rows, length, generator=generator) < TURN
    jumped = torch.rand(rows, length, generator=generator) < JUMP
    anywhere = torch.randint(SYMBOLS, (rows, length), generator=generator)
    first = 2 * torch.randint(2, (rows, 1), generator=generator) - 1
    direction = first * (1 - 2 * (turned.cumsum(1) % 2))  # the sign changes at every turn
    steps = torch.where(jumped, anywhere, direction)
    return (questions[:, COUNT - 1 : COUNT] + steps.cumsum(1)) % SYMBOLS


def winding(answers: Answers) -> Tensor:
    """(B,) steps of +1 minus steps of -1 along the answer, from the prompt's last symbol on.

    Example:
        >>> ids = torch.tensor([[0] * 9 + [15, 17, 0, 1, 0, 5]])  # up, up, down, a jump
        >>> winding(Answers(ids, torch.ones(1, 4).bool(), torch.zeros(1, 4)))
        tensor([1])
    """
    said = answers.ids[:, COUNT + 1 :]
    before = torch.cat([answers.ids[:, COUNT - 1 : COUNT], said[:, :-1]], dim=1)
    symbols = (said < SYMBOLS) & (before < SYMBOLS)
    step = (said - before) % SYMBOLS
    return (symbols & (step == 1)).sum(1) - (symbols & (step == SYMBOLS - 1)).sum(1)


def reward(answers: Answers, threshold: float) -> Tensor:
    """(B,): 1 if the answer has wound further than ``threshold``, half at exactly it, else 0."""
    wound = winding(answers).float()
    return torch.where(wound == threshold, 0.5, (wound > threshold).float())


class Stage(NamedTuple):
    """A part of the warm start: its steps, and how many walks of which length each of them has."""

    steps: int
    rows: int
    length: int


def warm_start(
    model: Walker, *, stages: Sequence[Stage], generator: torch.Generator, learning_rate: float = 3e-3
) -> None:
    """Supervised steps on taught walks; the learning rate falls to 0 along a cosine.

    A stage of walks that are shorter than the longest answer puts them at random places, so that all are learned.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sum(stage.steps for stage in stages))
    for stage in stages:
        for _ in range(stage.steps):
            questions = prompts(stage.rows, generator)
            said = walks(questions, stage.length, generator)
            shift = int(torch.randint(model.longest - stage.length + 1, (), generator=generator))
            logits = model.logits(torch.cat([questions, said], dim=1)[:, :-1], shift)[:, COUNT:]
            loss = functional.cross_entropy(logits.flatten(0, 1), said.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def sample(model: Walker, questions: Tensor, length: int, uniforms: Tensor) -> Answers:
    """One answer of exactly ``length`` tokens a row, at temperature 1.

    Args:
        model: the sampler.
        questions: (B, 11).
        length: T.
        uniforms: (B, T) numbers in [0, 1), one for each token: the token at which the cumulated probability exceeds it.
            Two samplers that share them say the same until their probabilities differ enough.
    """
    if length > model.longest:
        raise ValueError(f"length must be at most {model.longest}, the longest answer of the model, but got {length}.")
    memory = [_Memory(block, len(questions), questions.shape[1] + length) for block in model.blocks]
    new, said, logps = questions, [], []
    for place in range(length):
        start = 0 if place == 0 else questions.shape[1] + place - 1
        x = model.tokens(new) + model.places.weight[start : start + new.shape[1]]
        for block, past in zip(model.blocks, memory, strict=True):
            x = past.extend(block, x)
        now = model.head(model.norm(x[:, -1])).log_softmax(-1)
        cumulated = now.exp().cumsum(1)
        drawn = (cumulated <= uniforms[:, place : place + 1] * cumulated[:, -1:]).sum(1, keepdim=True)
        drawn = drawn.clamp(max=now.shape[1] - 1)
        said.append(drawn)
        logps.append(now.gather(1, drawn))
        new = drawn
    ids = torch.cat([questions, *said], dim=1)
    return Answers(ids, torch.ones(len(ids), length, dtype=torch.bool), torch.cat(logps, dim=1))


class _Memory:
    """Keys and values of one block, written in place (the lab's cache copies them at every token)."""

    def __init__(self, block: Block, rows: int, length: int) -> None:
        width = block.out.in_features
        self.keys = torch.empty(rows, block.heads, length, width // block.heads)
        self.values = torch.empty_like(self.keys)
        self.used = 0

    def extend(self, block: Block, x: Tensor) -> Tensor:
        """What ``Block.forward`` gives for the next tokens, (B, L, width): the whole prompt, then one at a time."""
        rows, length, width = x.shape
        parts = block.qkv(block.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(rows, length, block.heads, -1).transpose(1, 2) for part in parts)
        end = self.used + length
        self.keys[:, :, self.used : end], self.values[:, :, self.used : end] = k, v
        self.used = end
        seen = (self.keys[:, :, :end], self.values[:, :, :end])
        mixed = functional.scaled_dot_product_attention(q, *seen, is_causal=length == end)
        x = x + block.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + block.feed_forward(block.norms[1](x))
