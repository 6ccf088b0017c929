"""One run of the experiment: a warm start, GRPO with rounded rollouts under one correction, a true evaluation."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import trl_offpolicy as op
from benchmarks.lab.jobs import outcome_of, write_outcome
from benchmarks.lab.loop import Rollouts, group_advantages, learn, rounded
from benchmarks.lab.measure import evaluate, raw_ess, warm_model
from benchmarks.lab.sorting import Answers, Sorter, prompts, reward, sample, token_logps
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.stats import Stats

VARIANTS = {
    "none": "no fix",
    "tis": "token TIS, cap 2",
    "mis": "token MIS, [0.5, 2]",
    "ppo_is": "PPO-IS",
    "vanilla_is": "vanilla IS",
    "geometric": "geometric mask",
}
_MEASURE = ("mismatch", "staleness")


@dataclass(frozen=True)
class Settings:
    """What all runs of a table share.

    Args:
        start_accuracy: sampled accuracy at which the supervised warm start ends (looked at every ten steps).
        warm_up_steps: its steps at most, 256 solved prompts each.
        generations: rollout batches, each from newly rounded weights.
        groups: prompts a generation.
        group_size: answers a prompt.
        minibatches: optimizer steps a generation.
        learning_rate: of Adam.
        log_every: generations a logging window.
        questions: held-out prompts, the same for every run.
        answers: sampled answers to each of them before and after training (one on the way).
        mask_drops: share of the sequences that the geometric mask drops at the warm start; sets its band.
    """

    start_accuracy: float = 0.25
    warm_up_steps: int = 400
    generations: int = 120
    groups: int = 16
    group_size: int = 8
    minibatches: int = 2
    learning_rate: float = 1e-4
    log_every: int = 12
    questions: int = 512
    answers: int = 4
    mask_drops: float = 0.05


@dataclass(frozen=True)
class Job:
    """One run: the variant, to how many bits the sampler's weights are rounded (None = not at all), and the seed.

    The seed decides the warm start, the training prompts and the sampling: runs of one seed share the first two.
    """

    variant: str
    bits: int | None
    seed: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.variant}-{'float' if self.bits is None else f'int{self.bits}'}-{self.seed}"


def objective_of(variant: str, band: tuple[float, float] | None = None) -> op.Objective:
    """The kit's objective of a variant; PPO's clip at 0.2 in all of them.

    Args:
        variant: a key of ``VARIANTS``.
        band: bounds of the geometric mask.

    Raises:
        ValueError: an unknown variant, or a geometric mask without a band.
    """
    weights: dict[str, Any] = {
        "tis": op.TruncateWeight(level="token", max_weight=2.0),
        "mis": op.BandWeight(level="token", low=0.5, high=2.0),
        "vanilla_is": op.RawWeight(level="token"),
    }
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {list(VARIANTS)}, but got {variant!r}.")
    loss = op.losses.PPOIS(low=0.2, high=0.2) if variant == "ppo_is" else op.losses.PPOClip(low=0.2, high=0.2)
    keep: tuple[op.RatioBand, ...] = ()
    if variant == "geometric":
        if band is None:
            raise ValueError("band must be given with the variant 'geometric', but got None.")
        keep = (op.RatioBand(level="sequence_mean", low=band[0], high=band[1]),)
    return op.Objective(
        policy_loss=loss, correction=Correction(weight=weights.get(variant), keep=keep, measure=_MEASURE)
    )


def calibrated_band(model: Sorter, settings: Settings, bits: int | None, seed: int) -> tuple[float, float]:
    """Band of the geometric mask, from the mismatch that the warm start itself has.

    The quantiles of the geometric mean ratio pi_old / mu over sampled answers that leave ``mask_drops`` outside, half
    on each side. Fixed from then on, as a user would fix it.
    """
    questions = prompts(settings.questions, torch.Generator().manual_seed(seed)).repeat_interleave(settings.answers, 0)
    answers = sample(rounded(model, bits), questions, torch.Generator().manual_seed(seed))
    log_ratio = _log_ratio(model, answers).sum(1) / answers.mask.sum(1)
    low, high = torch.quantile(log_ratio, torch.tensor([settings.mask_drops / 2, 1 - settings.mask_drops / 2])).exp()
    return float(low), float(high)


@torch.no_grad()
def _log_ratio(model: Sorter, answers: Answers) -> Tensor:
    """(B, T) log pi_old / mu in nats, 0 on padding."""
    return torch.where(answers.mask, token_logps(model, answers.ids) - answers.logps, 0.0)


@dataclass
class Window:
    """What a logging window adds up: diagnostics as moments, rewards and ESS as one value a generation."""

    stats: Stats
    rewards: list[float]
    ess_token: list[float]
    ess_sequence: list[float]

    def row(self) -> dict[str, float]:
        """Its numbers. k1 of ``staleness`` is the source's: E[log pi_old - log pi] over what the sampler said."""
        values = self.stats.compute()
        wanted = {
            "staleness_k1": "staleness/kl_k1",
            "mismatch_k1": "mismatch/kl_k1",
            "mismatch_k3": "mismatch/kl_k3",
            "clip_fraction": "loss/clip_region_fraction",
            "dropped_sequences": "keep/dropped_sequence_fraction",
            "ess_applied": "weight_applied/ess_token",
        }
        row = {name: values[f"offpolicy/{key}"] for name, key in wanted.items() if f"offpolicy/{key}" in values}
        row |= {"sampler_reward": statistics.mean(self.rewards)}
        return row | {"ess_token": statistics.mean(self.ess_token), "ess_sequence": statistics.mean(self.ess_sequence)}


def generation(
    model: Sorter, settings: Settings, bits: int | None, questions: Tensor, chance: torch.Generator
) -> Rollouts:
    """Sample from the rounded copy, score with the learner, compare in groups."""
    answers = sample(rounded(model, bits), questions.repeat_interleave(settings.group_size, 0), chance)
    with torch.no_grad():
        old = token_logps(model, answers.ids)
    rewards = reward(answers)
    return Rollouts(answers, old, rewards, group_advantages(rewards, settings.group_size), settings.group_size)


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and evaluate; the outcome, as written to ``folder/runs``. A finished run is read, not repeated."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    began = time.process_time()
    model = warm_model(settings, job.seed, folder / "warm_starts")
    band = calibrated_band(model, settings, job.bits, job.seed) if job.variant == "geometric" else None
    start = evaluate(model, settings, answers=settings.answers)
    curve = train(model, objective_of(job.variant, band), job, settings)
    end = evaluate(model, settings, answers=settings.answers)
    outcome = {**asdict(job), "settings": asdict(settings), "band": band, "start": start, "end": end, "curve": curve}
    outcome["cpu_seconds"] = time.process_time() - began
    write_outcome(job, outcome, folder)
    return outcome


def train(model: Sorter, objective: op.Objective, job: Job, settings: Settings) -> list[dict[str, float]]:
    """GRPO; one row a logging window, with the learner's own accuracy after it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    questions, chance = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    window, rows = Window(Stats({}), [], [], []), []
    for step in range(1, settings.generations + 1):
        rollouts = generation(model, settings, job.bits, prompts(settings.groups, questions), chance)
        stats, _ = learn(model, optimizer, objective, rollouts, settings.minibatches, chance)
        token, sequence = raw_ess(rollouts)
        window.stats = window.stats.merge(stats)
        window.rewards.append(float(rollouts.rewards.mean()))
        window.ess_token.append(token)
        window.ess_sequence.append(sequence)
        if step % settings.log_every == 0 or step == settings.generations:
            after = evaluate(model, settings, answers=1, greedy=False)
            rows.append({"generation": step, **window.row(), **{f"learner_{k}": v for k, v in after.items()}})
            window = Window(Stats({}), [], [], [])
    return rows
