"""A model that plays both sides: it samples as a faulty engine and scores as a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from cases import Case

from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence, padded
from trl_offpolicy.engines.hf import Head, sample_completions, score_completions

PROMPTS, COMPLETIONS, LENGTH = 6, 4, 24
RESCORED = 6
"""Completions that the trainer scores a second time, in another batch layout."""
SAME = {"dtype": "float32", "quantization": "none", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "dropout": 0.0, "tools": False, "prompt_hash": "p", "experts": 0}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """What an engine sampled: B prompts and completions, log-probs (B, T) nats."""

    prompt_ids: list[list[int]]
    ids: list[list[int]]
    logps: Any


@dataclass
class World:
    """Makes cases of one model and one seed.

    Args:
        name: of model and engine.
        seed: of prompts and sampling.
        model: in eval mode, holding the trainer's weights.
        prompts: distinct prompts.
        stop: ids that end a completion.
        declared: what both sides say in this world.
    """

    name: str
    seed: int
    model: Any
    prompts: Sequence[list[int]]
    stop: Sequence[int]
    declared: dict[str, Any] = field(default_factory=dict)

    def sample(
        self, head: Head | None = None, *, inside: AbstractContextManager[Any] | None = None, salt: int = 0
    ) -> Batch:
        """A batch of the engine; ``inside`` is the context that makes it faulty."""
        prompts = [list(ids) for ids in self.prompts for _ in range(COMPLETIONS)]
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        with inside or nullcontext():
            ids, logps = sample_completions(
                self.model, prompts, max_tokens=LENGTH, stop_ids=self.stop, head=head, generator=generator
            )
        return Batch(prompts, ids, padded(logps))

    def case(self, cause: str, fault: str, strength: int, batch: Batch, *, scored: dict[str, Any] | None = None,
             engine: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None) -> Case:  # fmt: skip
        """The case of a batch; ``scored`` is what :meth:`score` gave, None = score now."""
        base = {**SAME, **self.declared}
        tokens = padded(batch.ids, fill=0).astype(np.int64)
        evidence = TokenEvidence(
            sampling_per_token_logps=batch.logps,
            completion_mask=padded([[1] * len(ids) for ids in batch.ids], fill=0).astype(bool),
            token_ids=tokens,
            group_ids=np.repeat(np.arange(len(self.prompts)), COMPLETIONS),
            engine=Declared(**{**base, **_decoys(fault, self.seed), **(engine or {})}),
            trainer=Declared(**{**base, **_decoys(fault, self.seed), **(trainer or {})}),
            **(scored if scored is not None else self.score(batch)),
        )
        name = f"{self.name}-{self.seed:03d}-{cause}-{fault}-{strength}".replace(" ", "_").replace("/", "_")
        return Case(name, self.name, self.seed, cause, fault, strength, evidence, batch.prompt_ids)

    def score(self, batch: Batch, *, prompt_ids: list[list[int]] | None = None, ids: list[list[int]] | None = None,
              inside: AbstractContextManager[Any] | None = None) -> dict[str, Any]:  # fmt: skip
        """Old log-probs, entropies and the second scoring of some rows, by the trainer."""
        prompts, tokens = prompt_ids or batch.prompt_ids, ids or batch.ids
        shape = batch.logps.shape
        with inside or nullcontext():
            (scores,) = score_completions(self.model, prompts, tokens, rows=12)
            (again,) = score_completions(self.model, prompts[:RESCORED], tokens[:RESCORED], rows=3)
        rescored = np.full(shape, np.nan)
        old, entropies, again_logps = (_fit(x, shape[1]) for x in (scores.logps, scores.entropies, again.logps))
        rescored[:RESCORED] = again_logps
        return {"old_per_token_logps": old, "entropies": entropies, "rescored_per_token_logps": rescored}


def _fit(values: Any, width: int) -> Any:
    """Cut or widen to ``width`` columns."""
    out = np.full((len(values), width), np.nan)
    out[:, : min(width, values.shape[1])] = values[:, :width]
    return out


def _decoys(fault: str, seed: int) -> dict[str, Any]:
    """True statements that have nothing to do with the fault: tools that are masked well, dropout that is off."""
    choice = (sum(map(ord, fault)) + seed) % 4
    return {0: {"tools": True}, 1: {"dropout": 0.05}}.get(choice, {})


def sample_from(world: World, prompts: list[list[int]], length: int, *, salt: int) -> Batch:
    """A clean batch that goes on from other prompts, one completion each."""
    generator = torch.Generator().manual_seed(1000 * world.seed + salt)
    ids, logps = sample_completions(world.model, prompts, max_tokens=length, stop_ids=world.stop, generator=generator)
    return Batch(prompts, ids, padded(logps))


def some_rows(good: dict[str, Any], bad: dict[str, Any], rows: Any) -> dict[str, Any]:
    """``good`` with the given rows of ``bad``."""
    mixed = {}
    for name, value in good.items():
        mixed[name] = value.copy()
        mixed[name][rows] = bad[name][rows]
    return mixed


def with_logps(batch: Batch, logps: Any) -> Batch:
    """The same text with other reported log-probs."""
    return replace(batch, logps=logps)
