"""One run: a warm start, GRPO on rollouts of older weights under one objective, a true evaluation."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.jobs import outcome_of, write_outcome
from benchmarks.lab.loop import Rollouts, group_advantages, learn
from benchmarks.lab.measure import evaluate, raw_ess, warm_model
from benchmarks.lab.sorting import Sorter, prompts, reward, sample, token_logps
from recipes.async_lag.lag import History, StaleBatch, objective_of, sampling_version
from trl_offpolicy.stats import Stats

_READ = {
    "clip_fraction": "loss/clip_region_fraction",
    "truncated_fraction": "weight/truncated_fraction",
    "total_k3": "total/kl_k3",
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table share.

    Args:
        start_accuracy: sampled accuracy at which the supervised warm start ends.
        warm_up_steps: its steps at most.
        generations: training steps; each uses one batch of rollouts and is one weight version.
        groups: prompts a batch.
        group_size: answers a prompt.
        minibatches: optimizer steps a training step (AReaL: 4).
        learning_rate: of Adam.
        speed: batches that an unbounded sampler makes in the time of one training step.
        log_every: training steps a logging window.
        questions: held-out prompts, the same for every run.
        answers: sampled answers to each of them before and after training (one on the way).
    """

    start_accuracy: float = 0.25
    warm_up_steps: int = 400
    generations: int = 60
    groups: int = 64
    group_size: int = 8
    minibatches: int = 4
    learning_rate: float = 3e-4
    speed: float = 2.0
    log_every: int = 6
    questions: int = 512
    answers: int = 4


@dataclass(frozen=True)
class Job:
    """One run: the variant, the lag in weight versions (None = unbounded) and the seed.

    The seed decides the warm start, the training prompts and the sampling: runs of one seed share the first two.
    """

    variant: str
    lag: int | None
    seed: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.variant}-lag_{'unbounded' if self.lag is None else self.lag}-{self.seed}"


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and evaluate; the outcome, as written to ``folder/runs``. A finished run is read, not repeated."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    began = time.process_time()
    model = warm_model(settings, job.seed, folder / "warm_starts")
    start = evaluate(model, settings, answers=settings.answers)
    curve = train(model, job, settings)
    end = evaluate(model, settings, answers=settings.answers)
    outcome = {**asdict(job), "settings": asdict(settings), "start": start, "end": end, "curve": curve}
    outcome["cpu_seconds"] = time.process_time() - began
    write_outcome(job, outcome, folder)
    return outcome


def train(model: Sorter, job: Job, settings: Settings) -> list[dict[str, float]]:
    """GRPO on stale rollouts; one row a logging window, with the learner's own accuracy after it."""
    objective, history = objective_of(job.variant), History(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    questions, chance = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    stats, seen, rows = Stats({}), defaultdict[str, list[float]](list), []
    for step in range(1, settings.generations + 1):
        version = step - 1
        sampled_by = sampling_version(step, job.lag, speed=settings.speed)
        asked = prompts(settings.groups, questions).repeat_interleave(settings.group_size, 0)
        rollouts = stale_rollouts(history.sampler(sampled_by), model, asked, settings.group_size, chance)
        batch_of = StaleBatch(sampled_by, version, proximal=job.variant != "a3po")
        more, _ = learn(model, optimizer, objective, rollouts, settings.minibatches, chance, batch_of)
        history.add(step, model)
        stats = stats.merge(more)
        note(seen, rollouts, lag=version - sampled_by)
        if step % settings.log_every == 0 or step == settings.generations:
            after = evaluate(model, settings, answers=1, greedy=False)
            rows.append({"generation": step, **window(stats, seen), **{f"learner_{k}": v for k, v in after.items()}})
            stats = Stats({})
            seen.clear()
    return rows


def stale_rollouts(
    sampler: Sorter, learner: Sorter, asked: torch.Tensor, group_size: int, chance: torch.Generator
) -> Rollouts:
    """Sampled by one model; ``old`` holds the learner's log-probs before the step, the proximal policy's."""
    answers = sample(sampler, asked, chance)
    with torch.no_grad():
        before = token_logps(learner, answers.ids)
    rewards = reward(answers)
    return Rollouts(answers, before, rewards, group_advantages(rewards, group_size), group_size)


def note(seen: dict[str, list[float]], rollouts: Rollouts, *, lag: int) -> None:
    """Add what a logging window takes the mean of: ESS is that of proximal/mu, before any cap."""
    token, sequence = raw_ess(rollouts)
    values = {
        "lag": lag,
        "sampler_reward": float(rollouts.rewards.mean()),
        "ess_token": token,
        "ess_sequence": sequence,
    }
    for name, value in values.items():
        seen[name].append(float(value))


def window(stats: Stats, seen: dict[str, list[float]]) -> dict[str, float]:
    """The numbers of a logging window."""
    values = stats.compute()
    read = {name: values[f"offpolicy/{key}"] for name, key in _READ.items() if f"offpolicy/{key}" in values}
    return {**read, **{name: statistics.mean(several) for name, several in seen.items()}}
