"""One piece of the benchmark: a batch of answers of three samplers, every estimator's gradient at every length."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.frontier.families import FAMILIES, ON_POLICY, advantages, coefficients
from benchmarks.frontier.gradients import Factors, Sketch, beginnings, factors, weighted_sum, whole_sums
from benchmarks.frontier.walk import Stage, Walker, reward, sample, warm_start, winding
from benchmarks.lab.jobs import outcome_of, write_outcome
from benchmarks.lab.loop import rounded
from benchmarks.lab.sorting import COUNT, Answers, prompts, token_logps

SAMPLERS = {"int4": "weights rounded to 4 bits", "lag": "weights of 4 optimizer steps ago"}
TOKENS_AT_ONCE = 16_384
"""Whose factors are made in one pass: about 80 MB."""
FIRST_CHEAP = 500
"""Part number of the first cheap batch."""


@dataclass(frozen=True)
class Settings:
    """What all pieces share.

    Args:
        longest: tokens of the longest answers. Lengths are 16, 32, ... up to it; shorter answers are their beginnings.
        cheap: tokens of the answers of the cheap batches, which stop there.
        groups: prompts of a batch.
        group_size: answers a prompt.
        turn: tokens of a turn.
        bits: of the rounded sampler.
        lag: optimizer steps by which the old sampler is behind.
        lag_rate: learning rate of those steps (Adam).
        lag_length: tokens of their answers.
        warm_steps: supervised steps on 32 walks of 64 tokens, at random places.
        settle_steps: supervised steps on 8 walks of the longest length.
        numbers: of the random projection in which gradients are kept.
        parameters: "last": those of the last block and the head that act at a token's own position (cheap); "all".
    """

    longest: int = 1024
    cheap: int = 256
    groups: int = 16
    group_size: int = 4
    turn: int = 32
    bits: int = 4
    lag: int = 4
    lag_rate: float = 5e-5
    lag_length: int = 64
    warm_steps: int = 400
    settle_steps: int = 60
    numbers: int = 2048
    parameters: str = "last"

    def __post_init__(self) -> None:
        if self.parameters not in ("last", "all"):
            raise ValueError(f"parameters must be 'last' or 'all', but got {self.parameters!r}.")

    @property
    def lengths(self) -> tuple[int, ...]:
        """16, 32, 64 and so on."""
        return tuple(16 * 2**k for k in range(20) if 16 * 2**k <= self.longest)


@dataclass(frozen=True)
class Job:
    """A batch of answers of up to ``length`` tokens; ``part`` tells batches of a seed apart."""

    seed: int
    part: int
    length: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.seed}-{self.part:03d}-{self.length}"


@dataclass(frozen=True)
class Start:
    """What the pieces of a seed begin with.

    Args:
        policy: whose gradient is wanted.
        behind: the policy some optimizer steps before.
        thresholds: {length: the policy's median winding}.
    """

    policy: Walker
    behind: Walker
    thresholds: Mapping[int, float]

    def sampler(self, name: str, bits: int) -> Walker:
        """One of :data:`SAMPLERS`."""
        return rounded(self.policy, bits) if name == "int4" else self.behind


def prepare(settings: Settings, seed: int, folder: Path) -> Start:
    """Warm start, then the optimizer steps of the lag; read from ``folder`` if it was made there."""
    key = [
        getattr(settings, name) for name in ("longest", "lag", "lag_rate", "lag_length", "warm_steps", "settle_steps")
    ]
    path = folder / f"{'-'.join(map(str, key))}-{seed}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy, behind = Walker(settings.longest), Walker(settings.longest)
    if not path.exists():
        stages = [
            Stage(settings.warm_steps, 32, min(64, settings.longest)),
            Stage(settings.settle_steps, 8, settings.longest),
        ]
        warm_start(policy, stages=stages, generator=torch.Generator().manual_seed(seed))
        behind.load_state_dict(policy.state_dict())
        learn(policy, settings, seed)
        made = {
            "policy": policy.state_dict(),
            "behind": behind.state_dict(),
            "thresholds": medians(policy, settings, seed),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, path)
    found = torch.load(path, weights_only=True)
    policy.load_state_dict(found["policy"])
    behind.load_state_dict(found["behind"])
    return Start(policy.requires_grad_(False), behind.requires_grad_(False), found["thresholds"])


def learn(policy: Walker, settings: Settings, seed: int) -> None:
    """``settings.lag`` on-policy steps on 256 answers of ``lag_length`` tokens each, all parameters."""
    chance = torch.Generator().manual_seed(10**6 + seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=settings.lag_rate)
    length = min(settings.lag_length, settings.longest)
    for _ in range(settings.lag):
        questions = prompts(64, chance).repeat_interleave(4, 0)
        answers = sample(policy, questions, length, torch.rand(256, length, generator=chance))
        rewards = reward(answers, float(winding(answers).float().median()))
        loss = -(advantages(rewards, 4).unsqueeze(1) * token_logps(policy, answers.ids)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def medians(policy: Walker, settings: Settings, seed: int) -> dict[int, float]:
    """{length: median winding of 256 answers}, so that half of the answers are right at every length."""
    chance = torch.Generator().manual_seed(2 * 10**6 + seed)
    answers = sample(
        policy, prompts(256, chance), settings.longest, torch.rand(256, settings.longest, generator=chance)
    )
    return {length: float(winding(beginning(answers, length)).float().median()) for length in settings.lengths}


def beginning(answers: Answers, length: int) -> Answers:
    """The first ``length`` tokens of every answer: what an answer of that length would have been."""
    return Answers(answers.ids[:, : COUNT + 1 + length], answers.mask[:, :length], answers.logps[:, :length])


def plan(settings: Settings, seeds: Sequence[int], long: int, cheap: int) -> list[Job]:
    """For each seed ``long`` batches of the longest answers and then ``cheap`` ones, seeds in turn.

    More batches leave the names of the others, so they can be added later.
    """
    jobs = [Job(seed, part, settings.longest) for part in range(long) for seed in seeds]
    if settings.cheap >= settings.longest:
        return jobs
    return jobs + [Job(seed, FIRST_CHEAP + part, settings.cheap) for part in range(cheap) for seed in seeds]


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Sample, and write the gradients of all estimators; the outcome says where. A finished piece is read."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    began = time.process_time()
    start = prepare(settings, job.seed, folder / "warm_starts")
    chance = torch.Generator().manual_seed(3 * 10**6 + 1000 * job.seed + job.part)
    questions = prompts(settings.groups, chance).repeat_interleave(settings.group_size, 0)
    uniforms = torch.rand(len(questions), job.length, generator=chance)
    lengths = [length for length in settings.lengths if length <= job.length]
    gradients: dict[str, dict[int, Tensor]] = {}
    measured = []
    for name in ("oracle", *SAMPLERS):
        sampler = start.policy if name == "oracle" else start.sampler(name, settings.bits)
        answers = sample(sampler, questions, job.length, uniforms)
        parts = [factors(start.policy, ids) for ids in answers.ids.split(max(1, TOKENS_AT_ONCE // job.length))]
        logps = torch.cat([part.logps for part in parts])
        gradients[name] = {}
        for length in lengths:
            said = beginning(answers, length)
            rewards = reward(said, start.thresholds[length])
            measured.append({"sampler": name, "length": length, **mismatch(logps[:, :length], said, rewards)})
            gradients[name][length] = all_gradients(start, name, parts, logps[:, :length], said, rewards, settings)
    path = folder / "gradients" / f"{job.name}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(gradients, path)
    outcome = {
        **asdict(job),
        "settings": asdict(settings),
        "measured": measured,
        "gradients": str(path.relative_to(folder)),
    }
    outcome["cpu_seconds"] = time.process_time() - began
    write_outcome(job, outcome, folder)
    return outcome


def mismatch(logps: Tensor, said: Answers, rewards: Tensor) -> dict[str, Any]:
    """KL(mu || pi) in nats a token (k3), log-ratios of whole answers (nats), and the mean reward, of one batch."""
    log_ratio = logps - said.logps
    return {
        "kl_k3": float((log_ratio.exp() - 1 - log_ratio).mean()),
        "sequence_log_ratio": [round(float(value), 5) for value in log_ratio.sum(1)],
        "reward": float(rewards.mean()),
    }


def all_gradients(
    start: Start, name: str, parts: list[Factors], logps: Tensor, said: Answers, rewards: Tensor, settings: Settings
) -> Tensor:
    """(F, numbers): the projected gradient of every family, or (1, numbers) of the oracle's estimator."""
    families = [ON_POLICY] if name == "oracle" else [family.objective for family in FAMILIES.values()]
    sampling = logps if name == "oracle" else said.logps
    shape = {"group_size": settings.group_size, "turn": settings.turn}
    scales = [coefficients(objective, logps, sampling, rewards, **shape) for objective in families]
    rows = len(parts[0].logps)
    if settings.parameters == "all":
        return Sketch(settings.numbers)(whole_sums(start.policy, said.ids, torch.stack(scales), rows))
    parts = [beginnings(part, logps.shape[1]) for part in parts]
    found = []
    for scale in scales:
        pieces = zip(parts, scale.split(rows), strict=True)
        found.append(torch.stack([weighted_sum(part, piece) for part, piece in pieces]).sum(0))
    return Sketch(settings.numbers)(torch.stack(found))
