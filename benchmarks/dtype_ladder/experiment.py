"""One piece: an engine in one format answers, and the float32 model scores the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.dtype_ladder.formats import FORMATS, Where, engine
from benchmarks.frontier.walk import Stage, Walker, sample, warm_start
from benchmarks.lab.jobs import outcome_of, write_outcome
from benchmarks.lab.sorting import COUNT, prompts
from trl_offpolicy.metrics import ratio_metrics
from trl_offpolicy.metrics.weight import ESSToken

SHOWN = ("kl_k3", "chi2_token", "chi2_sequence", "ess_sequence", "logp_diff_mean", "logp_diff_max", "tv")


@dataclass(frozen=True)
class Settings:
    """What all pieces share.

    Args:
        longest: tokens of an answer; shorter lengths are beginnings of the same answers.
        answers: of each format.
        warm_steps: supervised steps on 32 walks of 64 tokens.
        settle_steps: supervised steps on 8 walks of the longest length.
    """

    longest: int = 256
    answers: int = 128
    warm_steps: int = 300
    settle_steps: int = 30

    @property
    def lengths(self) -> tuple[int, ...]:
        """16, 32, 64 and so on."""
        return tuple(16 * 2**k for k in range(20) if 16 * 2**k <= self.longest)


@dataclass(frozen=True)
class Job:
    """A format in one part of the engine."""

    form: str
    where: Where
    seed: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.form.replace(' ', '-')}-{self.where}-{self.seed}"


def warm_model(settings: Settings, seed: int, folder: Path) -> Walker:
    """The supervised model of a seed, read from ``folder`` if it was made there."""
    path = folder / f"{settings.longest}-{settings.warm_steps}-{settings.settle_steps}-{seed}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Walker(settings.longest)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    stages = [
        Stage(settings.warm_steps, 32, min(64, settings.longest)),
        Stage(settings.settle_steps, 8, settings.longest),
    ]
    warm_start(model, stages=stages, generator=torch.Generator().manual_seed(seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Sample, score and compare, at every length; the outcome as written. A finished piece is read."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    began = time.process_time()
    model = warm_model(settings, job.seed, folder / "warm_starts").requires_grad_(False)
    sampler = engine(model, FORMATS[job.form], job.where)
    chance = torch.Generator().manual_seed(10**6 + job.seed)  # the same for every format
    questions = prompts(settings.answers, chance)
    answers = sample(
        sampler, questions, settings.longest, torch.rand(settings.answers, settings.longest, generator=chance)
    )
    scores, same = score(model.logits, sampler.logits, answers.ids)
    rows = [
        {"length": length, **compare(scores[:, :length], answers.logps[:, :length], same[:, :length])}
        for length in settings.lengths
    ]
    outcome = {**asdict(job), "settings": asdict(settings), "rows": rows, "cpu_seconds": time.process_time() - began}
    write_outcome(job, outcome, folder)
    return outcome


@torch.no_grad()
def score(
    policy: Callable[[Tensor], Tensor], sampler: Callable[[Tensor], Tensor], ids: Tensor, rows: int = 32
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probs of the policy in nats, and bool: policy and sampler have the same likeliest token."""
    scores, same = [], []
    for part in ids.split(rows):
        logits, others = (of(part[:, :-1])[:, COUNT:] for of in (policy, sampler))
        scores.append(logits.log_softmax(-1).gather(-1, part[:, COUNT + 1 :].unsqueeze(-1)).squeeze(-1))
        same.append(logits.argmax(-1) == others.argmax(-1))
    return torch.cat(scores), torch.cat(same)


def compare(policy: Tensor, sampling: Tensor, same: Tensor) -> dict[str, float]:
    """Distances of the two policies on the sampler's own answers.

    Args:
        policy: (B, T) log pi, nats.
        sampling: (B, T) log mu.
        same: (B, T) bool, whether both have the same likeliest token.

    Returns:
        ``kl_k3``: KL(mu || pi), nats a token. ``chi2_token``, ``chi2_sequence``: E_mu[(pi / mu)^2] - 1 of tokens and of
        whole answers. ``ess_token``, ``ess_sequence``: effective sample size as a fraction. ``flips``: share of the
        positions with another likeliest token. The kit's metrics make all but the last.
    """
    mask = torch.ones_like(same)
    metrics, ess = ratio_metrics(prefix=""), ESSToken()
    metrics.update(policy, sampling, mask)
    ess.update((policy - sampling).exp(), mask)
    values = {key: float(value) for key, value in metrics.compute().items() if key in SHOWN}
    return {**values, "ess_token": float(ess.compute()), "flips": float((~same).float().mean())}
