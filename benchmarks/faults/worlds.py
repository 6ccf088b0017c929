"""A model that plays both sides: it samples as a faulty engine and scores as a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np
import torch
from cases import Case
from sampler import Drawing, Order, left_padded, plain, sample
from tasks import Task
from weights import VERSIONS, Weights

from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence, padded
from trl_offpolicy.engines.hf import Head, TokenScores, score_completions

PROMPTS, COMPLETIONS, LENGTH = 6, 4, 24
RESCORED = 6
"""Completions that the trainer scores a second time, in another batch layout."""
SAME = {"dtype": "float32", "quantization": "none", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "dropout": 0.0, "tools": False, "prompt_hash": "p", "experts": 0, "adapter": "policy", "kv_cache": "auto",
        "weight_version": VERSIONS}  # fmt: skip
"""What both sides declare where nothing is wrong, or nobody knows that it is."""

Inside = Callable[[], AbstractContextManager[Any]]
Rows = list[list[int]]
Scorer = Callable[[Any, Rows, Rows, Head], TokenScores]


def one_pass(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
    """The scores that the kit's own function gives."""
    return score_completions(model, prompts, ids, heads=[head], rows=12)[0]


@dataclass(frozen=True)
class Batch:
    """What an engine sampled: B prompts as they were meant, B completions, log-probs (B, T) nats."""

    prompt_ids: Rows
    ids: Rows
    logps: Any


@dataclass(frozen=True)
class Made:
    """What came of a fault.

    Args:
        fault: what was done, with its numbers.
        batch: from the engine.
        scored: from the trainer, as :meth:`World.score` returns it; None = the trainer scores as it should.
        engine: what the engine declares beside :data:`SAME`; true statements.
        trainer: the same of the trainer.
    """

    fault: str
    batch: Batch
    scored: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass
class World:
    """Makes cases of one model and one seed.

    Args:
        name: of the model.
        seed: of prompts and sampling.
        weights: the model, in eval mode and holding the trainer's weights, and its other versions.
        prompts: distinct prompts.
        stop: ids that end a completion.
        bos: id of the first token of a prompt, or one that stands for it.
        task: renders the questions of the prompts; None = prompts are random ids.
        questions: of the prompts.
        declared: what both sides say in this world.
        salt: of the random numbers; the runner sets it for each kind.
    """

    name: str
    seed: int
    weights: Weights
    prompts: Rows
    stop: Sequence[int]
    bos: int
    task: Task | None = None
    questions: Sequence[str] = ()
    declared: dict[str, Any] = field(default_factory=dict)
    salt: int = 0

    @property
    def model(self) -> Any:
        return self.weights.model

    def begin(self, kind: str) -> None:
        """Other random numbers for every kind, the same in every run."""
        self.salt = crc32(kind.encode()) % 1000
        torch.manual_seed(1000 * self.seed + self.salt)  # of dropout

    def repeated(self, prompts: Sequence[Sequence[int]] | None = None) -> Rows:
        """B prompts, prompt-major."""
        return [list(ids) for ids in (prompts or self.prompts) for _ in range(COMPLETIONS)]

    def rendered(self, **how: Any) -> Rows:
        """The B prompts rendered in another way."""
        assert self.task is not None
        return self.repeated([self.task.render(question, **how) for question in self.questions])

    def sample(self, drawing: Drawing | None = None, *, inside: Inside = nullcontext, seen: Rows | None = None,
               order: Order | None = None, length: int = LENGTH) -> Batch:  # fmt: skip
        """A batch of the engine.

        Args:
            drawing: how tokens are drawn and what is reported; None = from the model's distribution.
            inside: makes the context in which the engine computes.
            seen: B prompts that the engine gets instead of those that were meant.
            order: in which pieces it computes.
            length: of the longest completion.
        """
        meant = self.repeated()
        with inside():
            ids, logps = sample(
                self.model, seen or meant, drawing or plain(), max_tokens=length, stop=self.stop, order=order,
                generator=torch.Generator().manual_seed(1000 * self.seed + self.salt),
            )  # fmt: skip
        return Batch(meant, ids, padded(logps))

    @cached_property
    def clean(self) -> tuple[Batch, dict[str, Any]]:
        """A batch without a fault, and its scores."""
        salt, self.salt = self.salt, 0
        batch = self.sample()
        self.salt = salt
        return batch, self.score(batch)

    @cached_property
    def clean_scores(self) -> TokenScores:
        """All that the trainer knows of the clean batch."""
        batch, _ = self.clean
        return one_pass(self.model, batch.prompt_ids, batch.ids, Head())

    @torch.no_grad()
    def score(self, batch: Batch, *, seen: Rows | None = None, ids: Rows | None = None, inside: Inside = nullcontext,
              head: Head | None = None, scorer: Scorer = one_pass) -> dict[str, Any]:  # fmt: skip
        """Old log-probs, entropies and the second scoring of some rows, by the trainer.

        Args:
            batch: what was sampled.
            seen: B prompts that the trainer gets instead of those that were meant.
            ids: B completions that it gets instead of those that were sampled.
            inside: makes the context in which it computes.
            head: its temperature.
            scorer: computes the log-probs.
        """
        prompts, tokens = seen or batch.prompt_ids, ids or batch.ids
        with inside():
            scores = scorer(self.model, prompts, tokens, head or Head())
            again = scorer(self.model, prompts[:RESCORED], tokens[:RESCORED], head or Head())
        width = batch.logps.shape[1]
        rescored = np.full(batch.logps.shape, np.nan)
        rescored[:RESCORED] = _fit(again.logps, width)
        return {"old_per_token_logps": _fit(scores.logps, width), "entropies": _fit(scores.entropies, width),
                "rescored_per_token_logps": rescored}  # fmt: skip

    def case(self, kind: str, made: Made) -> Case:
        """The case that a fault makes."""
        batch = made.batch
        base = {**SAME, **self.declared, **_decoys(kind, self.seed)}
        evidence = TokenEvidence(
            sampling_per_token_logps=batch.logps,
            completion_mask=padded([[1] * len(ids) for ids in batch.ids], width=batch.logps.shape[1], fill=0) > 0,
            token_ids=padded(batch.ids, width=batch.logps.shape[1], fill=0).astype(np.int64),
            group_ids=np.repeat(np.arange(len(self.prompts)), COMPLETIONS),
            engine=Declared(**{**base, **made.engine}),
            trainer=Declared(**{**base, **made.trainer}),
            **(made.scored if made.scored is not None else self.score(batch)),
        )
        return Case(f"{self.name}-{self.seed:03d}-{kind}", self.name, self.seed, kind, made.fault, evidence,
                    batch.prompt_ids)  # fmt: skip


def _fit(values: Any, width: int) -> Any:
    """Cut or widen to ``width`` columns."""
    out = np.full((len(values), width), np.nan)
    out[:, : min(width, values.shape[1])] = values[:, :width]
    return out


def _decoys(kind: str, seed: int) -> dict[str, Any]:
    """True statements that have nothing to do with the fault: tools that are masked well, dropout that is off."""
    choice = (crc32(kind.encode()) + seed) % 4
    return {0: {"tools": True}, 1: {"dropout": 0.05}}.get(choice, {})


# ---------------------------------------------------------------------------------- a trainer that pads by itself


def padded_pass(*, attended: bool, positions: str) -> Scorer:
    """A trainer that pads its prompts on the left and computes all in one forward.

    Args:
        attended: the padding is attended as if it were text.
        positions: "text" = padding counts for nothing (right); "all" = it counts, in prompt and completion (harmless
            with a rotary embedding); "prompt" = it counts in the prompt, and the completion begins at the number of
            the prompt's tokens.
    """

    def scorer(model: Any, prompts: Rows, ids: Rows, head: Head) -> TokenScores:
        before, mask = left_padded(prompts)
        width = max(map(len, ids))
        after = torch.tensor([list(row) + [0] * (width - len(row)) for row in ids])
        seen = torch.ones_like(mask) if attended else mask
        everything = torch.cat([seen, torch.ones_like(after)], 1)
        count = torch.arange(everything.shape[1]).expand(everything.shape)
        if positions == "text" and not attended:
            count = (everything.cumsum(1) - 1).clamp(min=0)
        if positions == "prompt":
            real = mask.sum(1, keepdim=True)
            count = torch.cat([count[:, : before.shape[1]], real + torch.arange(width)], 1)
        logits = model(
            input_ids=torch.cat([before, after], 1), attention_mask=everything, position_ids=count,
            logits_to_keep=width + 1,
        ).logits[:, :-1]  # fmt: skip
        return scores_of_logits(head, logits, ids)

    return scorer


def scores_of_logits(head: Head, logits: Any, ids: Rows) -> TokenScores:
    """Scores (B, T) of logits (B, T, V)."""
    found = np.full((4, *logits.shape[:2]), np.nan)
    for row, tokens in enumerate(ids):
        logps = head.logps(logits[row, : len(tokens)])
        chosen = logps.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        values = (chosen, torch.special.entr(logps.exp()).sum(1), logps.amax(1), (logps > chosen[:, None]).sum(1))
        found[:, row, : len(tokens)] = torch.stack([value.double() for value in values]).numpy()
    return TokenScores(*found)
