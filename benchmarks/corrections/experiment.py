"""One run of the benchmark: a warm start, GRPO with a mismatch under a correction, a true evaluation of the learner."""

from __future__ import annotations

import statistics
import time
from collections import deque
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trl_offpolicy as op
from benchmarks.corrections.mismatches import MISMATCHES, Mismatch
from benchmarks.corrections.rows import MEASURE, ROWS, Band
from benchmarks.lab.experts import ExpertSorter, flipped
from benchmarks.lab.jobs import outcome_of, write_outcome
from benchmarks.lab.loop import Rollouts, group_advantages, learn, rounded
from benchmarks.lab.measure import evaluate, raw_ess, warm_model
from benchmarks.lab.provenance import made_here
from benchmarks.lab.sorting import Answers, Sorter, Task, prompts, reward, token_logps
from trl_offpolicy.control.auto import AutoSession, starting_preset
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.stats import Stats

NO_MISMATCH = 1e-4
"""Mean |log pi_old / mu| (nats) that is rounding of float32 and no mismatch: that is 1e-6, INT8's is 5e-3."""


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Args:
        start_accuracy: sampled accuracy at which the supervised warm start ends (looked at every ten steps).
        warm_up_steps: its steps at most, 256 solved prompts each.
        generations: rollout batches.
        groups: prompts a generation.
        group_size: answers a prompt.
        minibatches: optimizer steps a generation.
        learning_rate: of Adam.
        log_every: generations a logging window.
        questions: held-out prompts, the same for every run.
        answers: sampled answers to each of them before and after training (one on the way).
        mask_drops: share of the answers that the geometric mask drops at the warm start; sets its band.
    """

    start_accuracy: float = 0.25
    warm_up_steps: int = 400
    generations: int = 80
    groups: int = 16
    group_size: int = 8
    minibatches: int = 2
    learning_rate: float = 3e-4
    log_every: int = 10
    questions: int = 512
    answers: int = 4
    mask_drops: float = 0.05


@dataclass(frozen=True)
class Job:
    """One run. The seed decides warm start, training prompts and the sampling; runs of one seed share the first two."""

    mismatch: str
    row: str
    seed: int
    task: Task = "sorting"

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.task}-{self.mismatch}-{self.row}-{self.seed}"

    @property
    def experts(self) -> bool:
        """Whether its model has experts."""
        return MISMATCHES[self.mismatch].experts


def start_of(settings: Settings, seed: int, folder: Path, *, task: Task, experts: bool) -> Sorter:
    """The warm start of the runs of a seed, made once in ``folder``."""
    return warm_model(settings, seed, folder, task=task, build=ExpertSorter if experts else Sorter)


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and evaluate; the outcome, as written to ``folder/runs``. A finished run is read, not repeated."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    model = start_of(settings, job.seed, folder / "warm_starts", task=job.task, experts=job.experts)
    began = time.process_time()
    mismatch = MISMATCHES[job.mismatch]
    start = evaluate(model, settings, answers=settings.answers, task=job.task)
    at_start = at_the_start(model, mismatch, settings, job.seed)
    band = band_of(at_start["log_ratio"], settings.mask_drops)
    curve = train(model, ROWS[job.row].preset(band), job, settings)
    end = evaluate(model, settings, answers=settings.answers, task=job.task)
    measured = {"band": band, "flipped": at_start["flipped"], "start": start, "end": end, "curve": curve}
    outcome = {**asdict(job), "settings": asdict(settings), **measured, "cpu_seconds": time.process_time() - began}
    outcome["made"] = made_here()
    write_outcome(job, outcome, folder)
    return outcome


def at_the_start(model: Sorter, mismatch: Mismatch, settings: Settings, seed: int) -> dict[str, Any]:
    """What a user would measure before training, to set the band of the geometric mask.

    Where the mismatch is staleness, or none, there is nothing to measure yet: then it is that of INT4.

    Returns:
        ``log_ratio`` (B,), the log of the geometric mean ratio pi_old / mu of each answer, and ``flipped``, the share
        of routings that differ (0 without experts).
    """
    chance = torch.Generator().manual_seed(seed)
    asked = prompts(settings.questions, chance).repeat_interleave(settings.answers, 0)
    answers = mismatch.sample(mismatch.sampler([model], chance), asked, chance)
    if _log_ratio(model, answers).abs().mean() < NO_MISMATCH:
        answers = mismatch.sample(rounded(model, 4), asked, chance)
    share = 0.0
    if mismatch.experts:
        sampler = mismatch.sampler([model], torch.Generator().manual_seed(seed))
        share = flipped(model, sampler, answers.ids, answers.mask)
    return {"log_ratio": _log_ratio(model, answers).sum(1) / answers.mask.sum(1), "flipped": share}


def band_of(log_ratio: Tensor, drops: float) -> Band:
    """Quantiles of the geometric mean ratio that leave ``drops`` outside, half on each side."""
    low, high = torch.quantile(log_ratio, torch.tensor([drops / 2, 1 - drops / 2])).exp()
    return float(low), float(high)


@torch.no_grad()
def _log_ratio(model: Sorter, answers: Answers) -> Tensor:
    """(B, T) log pi_old / mu in nats, 0 on padding."""
    return torch.where(answers.mask, token_logps(model, answers.ids) - answers.logps, 0.0)


class Corrected:
    """The objective of a run, which ``auto`` changes between generations."""

    def __init__(self, preset: Preset) -> None:
        started = starting_preset(preset)
        self._base = started.objective
        self._session = AutoSession(preset) if preset.auto is not None else None

    def for_generation(self, step: int, rollouts: Rollouts) -> op.Objective:
        """What the generation is trained with; ``auto`` judges the first one before its loss, the others after."""
        if self._session is None:
            return self._measuring(self._base)
        if step > 1:
            self._session.end_generation(step)
        seen = op.PolicyBatch(
            per_token_logps=rollouts.old,
            old_per_token_logps=rollouts.old,
            sampling_per_token_logps=rollouts.answers.logps,
            completion_mask=rollouts.answers.mask,
            advantages=rollouts.advantages,
            group_ids=torch.arange(len(rollouts.rewards)) // rollouts.group_size,
        )
        if self._session.undecided:
            self._session.decide_first(seen, step)
        else:
            self._session.observe(seen)
        return self._measuring(replace(self._base, correction=self._session.correction))

    @staticmethod
    def _measuring(objective: op.Objective) -> op.Objective:
        assert objective.correction is not None
        return replace(objective, correction=replace(objective.correction, measure=MEASURE))

    @property
    def choice(self) -> str:
        """The candidate of ``auto`` in use; empty without it."""
        session = self._session
        if session is None or session.state.choice is None:
            return ""
        return session.candidates[session.state.choice].name


def train(model: Sorter, preset: Preset, job: Job, settings: Settings) -> list[dict[str, Any]]:
    """GRPO; one row a logging window, with the learner's own accuracy after it.

    ``old`` holds the learner's log-probs as it gets the rollouts: where they are stale, pi_old / mu holds staleness and
    rounding together, as in a trainer that recomputes them.
    """
    mismatch, corrected = MISMATCHES[job.mismatch], Corrected(preset)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    questions, chance = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    versions: deque[Sorter] = deque(maxlen=mismatch.lag + 1)
    window, rows = Window(Stats({}), [], [], []), []
    for step in range(1, settings.generations + 1):
        versions.append(deepcopy(model))
        asked = prompts(settings.groups, questions).repeat_interleave(settings.group_size, 0)
        answers = mismatch.sample(mismatch.sampler(versions, chance), asked, chance)
        with torch.no_grad():
            old = token_logps(model, answers.ids)
        rewards = reward(answers, job.task)
        advantages = group_advantages(rewards, settings.group_size)
        rollouts = Rollouts(answers, old, rewards, advantages, settings.group_size)
        objective = corrected.for_generation(step, rollouts)
        stats, _ = learn(model, optimizer, objective, rollouts, settings.minibatches, chance)
        window = window.after(stats, rollouts)
        if step % settings.log_every == 0 or step == settings.generations:
            seen = evaluate(model, settings, answers=1, greedy=False, task=job.task)
            rows.append(
                {"generation": step, **window.row(), "learner_reward": seen["reward"], "choice": corrected.choice}
            )
            window = Window(Stats({}), [], [], [])
    return rows


@dataclass(frozen=True)
class Window:
    """What a logging window adds up: diagnostics as moments, rewards and ESS as one value a generation."""

    stats: Stats
    rewards: list[float]
    ess_token: list[float]
    ess_sequence: list[float]

    def after(self, stats: Stats, rollouts: Rollouts) -> Window:
        """The window with one more generation."""
        token, sequence = raw_ess(rollouts)
        rewards = [*self.rewards, float(rollouts.rewards.mean())]
        return Window(self.stats.merge(stats), rewards, [*self.ess_token, token], [*self.ess_sequence, sequence])

    def row(self) -> dict[str, float]:
        """Its numbers; the fractions of weights and answers only where the correction has such a term."""
        values = self.stats.compute()
        wanted = {
            "mismatch_k3": "mismatch/kl_k3",
            "truncated": "weight/truncated_fraction",
            "dropped_sequences": "keep/dropped_sequence_fraction",
            "dropped_tokens": "keep/dropped_token_fraction",
            "clip_fraction": "loss/clip_region_fraction",
        }
        row = {name: values[f"offpolicy/{key}"] for name, key in wanted.items() if f"offpolicy/{key}" in values}
        means = {"sampler_reward": self.rewards, "ess_token": self.ess_token, "ess_sequence": self.ess_sequence}
        return row | {name: statistics.mean(several) for name, several in means.items()}
