"""Conjecture 5: how far may a sampler lag behind, and does the sequence ESS say so? And staleness against learning rate.

The sampler gets the learner's weights every L optimizer steps, and all runs take the same number of steps on batches of
the same size. Just before a sync the lag is L; there the ESS is measured, on prompts that nobody trains on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import trl_offpolicy as op
from benchmarks.conjectures.common import (
    GROUP,
    Conjecture,
    Finding,
    Outcome,
    exact_accuracy,
    rollouts_of,
    unwarmed,
)
from benchmarks.lab.jobs import Experiment, outcome_of, write_outcome
from benchmarks.lab.loop import Rollouts, policy_batch
from benchmarks.lab.measure import raw_ess, warm_model
from benchmarks.lab.sorting import Sorter, Task, prompts, reward, sample

LAGS = (1, 10, 50, 100, 200, 400, 800)
NOTHING = op.Correction(measure=())
OBJECTIVES = {
    "oapl": op.Objective(
        policy_loss=op.losses.OAPL(beta=0.2, scope="micro_batch"), correction=NOTHING, aggregation="seq_mean_token_mean"
    ),
    "ppo": op.Objective(policy_loss=op.losses.PPOClip(low=0.2, high=0.2), correction=NOTHING),
    "gpg": op.Objective(policy_loss=op.losses.GPG(), correction=NOTHING),
}


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Args:
        start_accuracy: sampled accuracy at which the supervised warm start ends.
        warm_up_steps: its steps at most.
        questions: unused by the runs; the warm start's interface asks for it.
        steps: optimizer steps, each on a batch of its own.
        groups: prompts a step, 8 answers each.
        probes: measurements along a run, of the ESS (at syncs) and of the learner's reward.
        probe_groups: prompts of the ESS's probe, 8 answers each.
    """

    start_accuracy: float = 0.25
    warm_up_steps: int = 400
    questions: int = 128
    steps: int = 800
    groups: int = 4
    probes: int = 8
    probe_groups: int = 16


@dataclass(frozen=True)
class Job:
    """One run; runs of one task and seed share the warm start and the training prompts."""

    task: Task
    objective: str
    lag: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.task}-{self.objective}-lag{self.lag}-lr{self.learning_rate:g}-{self.seed}"


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and evaluate; the outcome, as written to ``folder/runs``. A finished run is read, not repeated."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    began = time.process_time()
    model = warm_model(settings, job.seed, folder / "warm_starts", task=job.task)
    outcome = {**asdict(job), "settings": asdict(settings), "start": exact_accuracy(model, job.task)}
    outcome |= train(model, job, settings)
    outcome["cpu_seconds"] = time.process_time() - began
    write_outcome(job, outcome, folder)
    return outcome


def train(model: Sorter, job: Job, settings: Settings) -> dict[str, Any]:
    """A curve of the learner's held-out reward, the ESS before syncs, and the exact accuracy at the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate, betas=(0.9, 0.95))
    asking, chance = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    every = max(settings.steps // settings.probes, 1)
    sampler, ahead = model, []
    rewards, shares = [held_out(model, job, settings)], []
    for step in range(settings.steps):
        if step % job.lag == 0:
            sampler, ahead = deepcopy(model).requires_grad_(False), []
        if not ahead:  # answers of one sampler can be drawn for several steps at once
            until_sync = min(job.lag - step % job.lag, settings.steps - step, 8)
            ahead = list(
                split(rollouts_of(sampler, None, settings.groups * until_sync, job.task, asking, chance), until_sync)
            )
        update(model, optimizer, OBJECTIVES[job.objective], ahead.pop())
        if (step + 1) % every == 0:
            rewards.append(held_out(model, job, settings))
        if (step + 1) % job.lag == 0 and len(shares) < (step + 1) / every:
            shares.append(probe(sampler, model, job, settings))
    if not all(math.isfinite(value) for value in rewards):
        rewards = [value if math.isfinite(value) else 0.0 for value in rewards]
    return {"rewards": rewards, "ess": shares, "accuracy": exact_accuracy(model, job.task)}


def split(rollouts: Rollouts, parts: int) -> list[Rollouts]:
    """Whole groups, as many batches as wanted."""
    rows = torch.arange(len(rollouts.rewards)).chunk(parts)
    return [
        Rollouts(
            type(rollouts.answers)(rollouts.answers.ids[i], rollouts.answers.mask[i], rollouts.answers.logps[i]),
            rollouts.old[i], rollouts.rewards[i], rollouts.advantages[i], rollouts.group_size,
        )
        for i in rows
    ]  # fmt: skip


def update(model: Sorter, optimizer: torch.optim.Optimizer, objective: op.Objective, rollouts: Rollouts) -> None:
    """One optimizer step, gradient norm at most 1."""
    loss = objective(policy_batch(model, rollouts, torch.arange(len(rollouts.rewards)))).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def held_out(model: Sorter, job: Job, settings: Settings) -> float:
    """The learner's own mean reward."""
    questions = prompts(settings.questions, torch.Generator().manual_seed(1))
    return float(reward(sample(model, questions, torch.Generator().manual_seed(2)), job.task).mean())


def probe(sampler: Sorter, model: Sorter, job: Job, settings: Settings) -> float:
    """Sequence ESS of learner / sampler as a fraction, on held-out prompts."""
    asking, chance = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    return raw_ess(rollouts_of(sampler, model, settings.probe_groups, job.task, asking, chance))[1]
