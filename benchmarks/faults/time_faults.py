"""Faults that begin, come and go, or grow: recorded runs of several steps, as a trainer writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import contexts
import numpy as np
from sampler import Drawing, plain
from torch import Tensor
from trainer_faults import split_token
from worlds import COMPLETIONS, SAME, Batch, World

from trl_offpolicy.engines.hf import Head
from trl_offpolicy.run_folder.layout import METRICS_FILE, ROLLOUTS_FILE, RUN_FILE, rollout_part

STEPS = 16
"""Recorded steps; the trainer's weights go from version 0 to the last one."""
GROUPS, LENGTH = 3, 20
"""Prompts a step, and tokens of a completion."""


@dataclass(frozen=True)
class RunFault:
    """A fault over time.

    Args:
        fault: in words.
        engine_step: step of the run -> step whose weights the engine holds.
        known: the versions that are recorded are those that sampled; otherwise the engine believes to be up to date.
        drawing: step -> how tokens are drawn.
        inside: (world, step) -> what the engine computes in, beside its weights.
        change: (world, step, batch, scored) -> what is recorded of them.
        engine: what the engine declares beside what both do.
    """

    fault: str
    engine_step: Callable[[int], int] = lambda step: step
    known: bool = False
    drawing: Callable[[int], Drawing] | None = None
    inside: Callable[[World, int], AbstractContextManager[Any]] | None = None
    change: Callable[[World, int, Batch, dict[str, Any]], tuple[Batch, dict[str, Any]]] | None = None
    engine: dict[str, Any] = field(default_factory=dict)


def late(step: int) -> bool:
    """In the second half of the run."""
    return step >= STEPS // 2


def version_at(world: World, step: int) -> float:
    """Version of the trainer's weights at a step."""
    return len(world.weights.updates.versions) * step / (STEPS - 1)


def record(world: World, kind: str, run: RunFault, folder: Path) -> None:
    """Make the run and write its folder: rollouts, metrics, ``run.json``. A finished folder is left alone."""
    whole = folder / f"{world.name}-{world.seed:03d}-{kind}.run"
    part = whole.with_suffix(".part")
    (part / ROLLOUTS_FILE).mkdir(parents=True, exist_ok=True)
    engine = _Engine(world, run)
    for step in range(STEPS):
        batch, scored = engine.step(step)
        _write_part(part, run, step, batch, scored)
    same = {**SAME, **world.declared, "weight_version": 0}  # declared at the start, as the trainers do
    declared = {"engine": {**same, **run.engine}, "trainer": same}
    about = {"world": world.name, "seed": world.seed, "kind": kind, "fault": run.fault}
    (part / RUN_FILE).write_text(json.dumps({"declared": declared, "case": about}, indent=1))
    lines = [json.dumps({"step": step + 1, "loss": 0.0}) for step in range(STEPS)]
    (part / METRICS_FILE).write_text("\n".join(lines) + "\n")
    part.rename(whole)


class _Engine:
    """Samples and scores one step after the other."""

    def __init__(self, world: World, run: RunFault) -> None:
        self.world, self.run = world, run
        self.prompts = list(world.prompts)

    def step(self, step: int) -> tuple[Batch, dict[str, Any]]:
        world, run = self.world, self.run
        world.prompts = [self.prompts[(step + n) % len(self.prompts)] for n in range(GROUPS)]
        world.salt = 17 * step + 1
        try:
            batch = world.sample(
                run.drawing(step) if run.drawing else plain(), inside=lambda: self._weights(step), length=LENGTH
            )
            with world.weights.at(version_at(world, step)):
                scored = world.score(batch)
        finally:
            world.prompts = self.prompts
        return run.change(world, step, batch, scored) if run.change else (batch, scored)

    def _weights(self, step: int) -> Any:
        stack = ExitStack()
        stack.enter_context(self.world.weights.at(version_at(self.world, self.run.engine_step(step))))
        if self.run.inside is not None:
            stack.enter_context(self.run.inside(self.world, step))
        return stack


def _write_part(folder: Path, run: RunFault, step: int, batch: Batch, scored: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sampled = run.engine_step(step) if run.known else step
    rows = []
    for row, ids in enumerate(batch.ids):
        cut = slice(0, len(ids))
        rows.append({
            "step": step, "policy_version": sampled, "prompt": str(batch.prompt_ids[row][:4]), "completion": str(ids),
            "reward": float(len(set(ids))), "advantage": 0.0, "group_id": GROUPS * step + row // COMPLETIONS,
            "prompt_ids": batch.prompt_ids[row],
            "completion_ids": ids, "completion_mask": [True] * len(ids), "keep_mask": [True] * len(ids),
            "sampling_per_token_logps": batch.logps[row, cut].tolist(),
            "old_per_token_logps": scored["old_per_token_logps"][row, cut].tolist(),
            "entropies": scored["entropies"][row, cut].tolist(), "policy_versions": [sampled] * len(ids),
        })  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / ROLLOUTS_FILE / rollout_part(step, 0))


# ----------------------------------------------------------------------------------------------------------- the runs


def retokenised_row(world: World, step: int, batch: Batch, scored: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """From half-way on the text of one row in twelve is tokenised again."""
    if not late(step) or world.task is None:
        return batch, scored
    row = step % len(batch.ids)
    ids = [split_token(world.task.tokenizer, ids, n) if n == row else ids for n, ids in enumerate(batch.ids)]
    with world.weights.at(version_at(world, step)):
        bad = world.score(batch, ids=ids)
    return batch, bad


def shifted_late(_world: World, step: int, batch: Batch, scored: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """From half-way on log-probs are a token late."""
    if not late(step):
        return batch, scored
    logps = np.roll(batch.logps, 1, axis=1)
    logps[:, 0] = np.nan
    return Batch(batch.prompt_ids, batch.ids, logps), scored


def cooler_late(step: int) -> Drawing:
    return plain(Head(0.8 if late(step) else 1.0))


def int4_late(world: World, step: int) -> AbstractContextManager[Any]:
    return contexts.weights_rounded(world.model, contexts.int4_groups) if late(step) else ExitStack()


def fp8_grid(weight: Tensor) -> Tensor:
    """Rounded to e4m3 with a fixed scale, so that a weight which did not move is not rounded differently."""
    return contexts.fp8_unscaled(64 * weight) / 64


def sub_ulp(world: World, _step: int) -> AbstractContextManager[Any]:
    """An engine in fp8 that gets the trainer's weights rounded: updates below half an ulp do not arrive."""
    return contexts.weights_rounded(world.model, fp8_grid, head=True)
