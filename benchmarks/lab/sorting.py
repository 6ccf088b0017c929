"""Tasks and model of the small experiments: sort, rank or reverse symbols, on one CPU thread.

A prompt is 10 symbols out of 16 and a separator; the answer is the same symbols in order (or how many of them each one
exceeds, or from the last to the first), then the end symbol. The reward is half the share of right positions plus
half for an exact answer, and 0 without an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

SYMBOLS, COUNT, LONGEST = 16, 10, 16
END, SEPARATOR, PAD = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2
VOCABULARY = SYMBOLS + 3


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
        """``past`` holds keys and values of earlier tokens, and then of these too."""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        if past:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        past[:] = [k, v]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=length == k.shape[2])
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed_forward(self.norms[1](x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, L, width) of (B, L, width)."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Sorter(nn.Module):
    """A causal transformer: 2 layers, width 64, 4 heads."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(COUNT + 1 + LONGEST, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=1 / math.sqrt(width))

    def forward(self, ids: Tensor, cache: list[list[Tensor]] | None = None) -> Tensor:
        """(B, L, V) logits; with a cache ``ids`` are all of the prompt, then one token a call."""
        cache = [[] for _ in self.blocks] if cache is None else cache
        start = cache[0][0].shape[2] if cache[0] else 0
        x = self.tokens(ids) + self.places.weight[start : start + ids.shape[1]]
        for block, past in zip(self.blocks, cache, strict=True):
            x = block(x, past)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Answers:
    """Sampled answers: ids (B, L) of prompt and answer, mask (B, T) of the answer's tokens, their log-probs (B, T)."""

    ids: Tensor
    mask: Tensor
    logps: Tensor


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """(count, 11) ids."""
    symbols = torch.randint(SYMBOLS, (count, COUNT), generator=generator)
    return torch.cat([symbols, torch.full((count, 1), SEPARATOR)], dim=1)


Task = Literal["sorting", "ranking", "reversing"]


def solutions(questions: Tensor, task: Task = "sorting") -> Tensor:
    """(B, 11): the sorted symbols, each symbol's rank (how many are smaller), or the reversed symbols; and the end."""
    symbols = questions[:, :COUNT]
    if task == "sorting":
        answer = symbols.sort(dim=1).values
    elif task == "ranking":
        answer = (symbols.unsqueeze(1) < symbols.unsqueeze(2)).sum(2)
    else:
        answer = symbols.flip(1)
    return torch.cat([answer, torch.full((len(questions), 1), END)], dim=1)


def token_logps(model: nn.Module, ids: Tensor) -> Tensor:
    """(B, T) log-probs of the answer's tokens."""
    logits = model(ids[:, :-1])[:, COUNT:]
    return logits.log_softmax(-1).gather(-1, ids[:, COUNT + 1 :].unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def sample(
    model: Sorter,
    questions: Tensor,
    generator: torch.Generator,
    *,
    greedy: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Answers:
    """One answer a row, at most 16 tokens, with its log-probs at temperature 1 over the whole vocabulary.

    Args:
        model: the sampler.
        questions: (B, 11).
        generator: of the draws.
        greedy: take the likeliest token each time.
        temperature: of the draws alone; the log-probs do not know of it, as those of an engine that reports raw ones.
        top_p: draw from the likeliest tokens that hold this much probability; the log-probs do not know of it either.
    """
    ids, new, logps = questions, questions, []
    cache: list[list[Tensor]] = [[] for _ in model.blocks]
    running = torch.ones(len(questions), dtype=torch.bool)
    masks = []
    for _ in range(LONGEST):
        now = model(new, cache)[:, -1].log_softmax(-1)
        if greedy:
            drawn = now.argmax(1)
        else:
            probs = now.exp() if temperature == 1.0 else (now / temperature).softmax(-1)
            drawn = torch.multinomial(nucleus(probs, top_p), 1, generator=generator).squeeze(1)
        masks.append(running)
        logps.append(now.gather(1, drawn.unsqueeze(1)).squeeze(1))
        new = torch.where(running, drawn, PAD).unsqueeze(1)
        ids = torch.cat([ids, new], dim=1)
        running = running & (drawn != END)
        if not running.any():
            break
    mask = torch.stack(masks, dim=1)
    return Answers(ids, mask, torch.where(mask, torch.stack(logps, dim=1), 0.0))


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens of each row that together hold at least ``top_p``, not renormalised; the others 0.

    Example:
        >>> nucleus(torch.tensor([[0.5, 0.3, 0.2]]), 0.7)
        tensor([[0.5000, 0.3000, 0.0000]])
    """
    if top_p >= 1.0:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probs).scatter(-1, order, torch.where(before < top_p, ordered, 0.0))


def reward(answers: Answers, task: Task = "sorting") -> Tensor:
    """(B,) in [0, 1]."""
    target = solutions(answers.ids[:, : COUNT + 1], task)
    said = functional.pad(answers.ids[:, COUNT + 1 :], (0, LONGEST), value=PAD)
    right = (said[:, : COUNT + 1] == target).float()
    ended = (said == END).any(1)
    return torch.where(ended, 0.5 * right.mean(1) + 0.5 * right.prod(1), 0.0)


def warm_start(
    model: nn.Module,
    *,
    steps: int,
    generator: torch.Generator,
    learning_rate: float = 3e-3,
    enough: Callable[[], bool] | None = None,
    task: Task = "sorting",
) -> None:
    """Supervised steps until the model has an idea of the task; ``enough`` is asked every tenth and may end it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for step in range(1, steps + 1):
        questions = prompts(256, generator)
        ids = torch.cat([questions, solutions(questions, task)], dim=1)
        loss = -token_logps(model, ids).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if enough is not None and step % 10 == 0 and enough():
            return
