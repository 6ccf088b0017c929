"""What every run of a small experiment begins and ends with: a warm start, the raw ESS, a true evaluation."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.lab.jobs import write_atomically
from benchmarks.lab.loop import Rollouts
from benchmarks.lab.sorting import Sorter, Task, prompts, reward, sample, warm_start
from trl_offpolicy.metrics.weight import ESSToken


class Common(Protocol):
    """What the settings of every small experiment have.

    Args:
        start_accuracy: sampled accuracy at which the supervised warm start ends (looked at every ten steps).
        warm_up_steps: its steps at most, 256 solved prompts each.
        questions: held-out prompts, the same for every run.
    """

    @property
    def start_accuracy(self) -> float: ...

    @property
    def warm_up_steps(self) -> int: ...

    @property
    def questions(self) -> int: ...


def evaluate(
    model: Sorter, settings: Common, *, answers: int, greedy: bool = True, task: Task = "sorting"
) -> dict[str, float]:
    """The learner itself, unrounded, on the held-out prompts.

    Returns:
        ``accuracy`` (exact, sampled at temperature 1), ``reward`` (sampled), ``entropy``, the mean of -log pi over the
        tokens of its own samples (nats a token; an unbiased estimate), and with ``greedy`` ``greedy_accuracy``.
    """
    questions = prompts(settings.questions, torch.Generator().manual_seed(10**6))
    drawn = sample(model, questions.repeat_interleave(answers, 0), torch.Generator().manual_seed(10**6 + 1))
    rewards = reward(drawn, task)
    found = {
        "accuracy": float((rewards == 1).float().mean()),
        "reward": float(rewards.mean()),
        "entropy": float(-drawn.logps.sum() / drawn.mask.sum()),
    }
    if greedy:
        best = reward(sample(model, questions, torch.Generator(), greedy=True), task)
        found["greedy_accuracy"] = float((best == 1).float().mean())
    return found


def warm_model(
    settings: Common, seed: int, folder: Path, *, task: Task = "sorting", build: Callable[[], Sorter] = Sorter
) -> Sorter:
    """The supervised model of a seed, from ``folder`` if it was made there with the same settings.

    ``build`` makes the untrained model (its name tells two apart in the folder).
    """
    others = "" if (task, build) == ("sorting", Sorter) else f" {task} {build.__name__}"
    key = f"{settings.warm_up_steps} {settings.start_accuracy} {torch.__version__}{others}"
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:8]}-{seed}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    questions = prompts(256, torch.Generator().manual_seed(10**6 + 2))

    def enough() -> bool:
        drawn = sample(model, questions, torch.Generator().manual_seed(seed))
        return float((reward(drawn, task) == 1).float().mean()) >= settings.start_accuracy

    chance = torch.Generator().manual_seed(seed)
    warm_start(model, steps=settings.warm_up_steps, generator=chance, enough=enough, task=task)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    write_atomically(path, buffer.getvalue())
    return model


def raw_ess(rollouts: Rollouts) -> tuple[float, float]:
    """ESS fractions of the uncorrected ratio pi_old / mu: of the tokens', and of the responses' products."""
    mask = rollouts.answers.mask
    log_ratio = torch.where(mask, rollouts.old - rollouts.answers.logps, 0.0)
    token, sequence = ESSToken(), ESSToken()
    token.update(log_ratio.exp(), mask)
    sequence.update(log_ratio.sum(1, keepdim=True).clamp(-20, 20).exp(), mask[:, :1])
    return float(token.compute()), float(sequence.compute())
