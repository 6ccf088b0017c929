"""Runs that are made to collapse, and runs that are not: real GRPO at laptop scale with the kit's own objective.

    python benchmarks/collapse/train.py OUT [--only NAME ...] [--seeds 0 1 2] [--steps 100] [--control YAML]

Each run writes ``OUT/<name>-<seed>/metrics.jsonl`` with the keys that the trainers log, one row a generation (two
optimizer steps), and ``learner_reward``: that of the learner itself on held-out prompts, which is what collapses. One
thread; half a minute a run. What becomes of a run is decided by ``evaluate.py``, not by its name. ``--control`` is the
option of that name of both trainers (docs/control.md), e.g. ``'{controllers: [ess_step]}'``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

import trl_offpolicy as op
from trl_offpolicy.control import parse_control
from trl_offpolicy.control.session import ControlSession, admitted_by
from trl_offpolicy.objective.measure import gradient_variance
from trl_offpolicy.rollouts.duplicates import duplicate_stats
from trl_offpolicy.run_folder.layout import ACTIONS_FILE, METRICS_FILE
from trl_offpolicy.run_folder.writer import append_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lab.loop import Rollouts, group_advantages, learn, rounded
from benchmarks.lab.sorting import COUNT, Sorter, Task, prompts, reward, sample, token_logps, warm_start

GROUPS, GENERATIONS, MINIBATCHES = 16, 8, 2
WARM_UP_STEPS = 45
QUESTIONS = prompts(128, torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Setting:
    """What a run does.

    Args:
        objective: the loss.
        bits: to which the sampler's weights are rounded at every sync; None = not at all.
        learning_rate: of Adam.
        lag: generations by which the sampler's weights are behind; -1 = it is never synced.
        noticed: whether the trainer knows the weights that sampled. If not, it takes its own for them, as where a sync
            fails unseen: old log-probs are those of the learner as the generation begins.
        onset: generation from which on ``bits`` and ``lag`` hold; before it the sampler has the learner's weights.
        warm_up: generations over which the learning rate rises from 0.
        length_bonus: reward a token beside the task's: the reward that is hacked.
    """

    objective: op.Objective
    bits: int | None = None
    learning_rate: float = 1e-4
    lag: int = 0
    noticed: bool = True
    onset: int = 0
    warm_up: int = 0
    length_bonus: float = 0.0


PLAIN = op.Objective(policy_loss=op.losses.PPOClip(), correction=op.Correction())
TIS = op.Objective(policy_loss=op.losses.PPOClip(), correction=op.Correction(weight=op.TruncateWeight(max_weight=2.0)))
PPO_IS = op.Objective(policy_loss=op.losses.PPOIS(), correction=op.Correction())
NO_CLIP = op.Objective(policy_loss=op.losses.GPG(), correction=op.Correction())

SETTINGS = {
    "float": Setting(PLAIN, learning_rate=5e-4),
    "int4": Setting(PLAIN, bits=4),
    "int4_tis": Setting(TIS, bits=4),
    "lag2_tis": Setting(TIS, bits=8, lag=2),
    "int3_tis": Setting(TIS, bits=3),
    "int3_ppo_is": Setting(PPO_IS, bits=3),
    "warming_up": Setting(NO_CLIP, learning_rate=3e-3, warm_up=100),
    "never_synced": Setting(NO_CLIP, bits=8, lag=-1, learning_rate=5e-4),
    "lag8_fast": Setting(NO_CLIP, bits=8, lag=8, learning_rate=1e-3),
    "length_hack": Setting(PLAIN, learning_rate=3e-4, length_bonus=0.15),
    "gpg": Setting(NO_CLIP, bits=8, learning_rate=3e-4),
    # healthy until the fault begins, at generation 10: a queue that grows, weights that arrive later and later without
    # the trainer knowing, and rounding
    "queue_grows": Setting(NO_CLIP, bits=8, lag=8, learning_rate=3e-4, onset=10),
    "late_weights": Setting(NO_CLIP, bits=8, lag=8, learning_rate=3e-4, noticed=False, onset=10),
    "int3_later": Setting(PPO_IS, bits=3, onset=10),
}


class Controlled:
    """What a trainer lends to a control session: the objective whose correction it may swap, and the optimizer.

    Args:
        control: the ``control`` option; None = nobody watches.
        objective: the configured one.
        optimizer: whose learning rate may be scaled.
        folder: where actions are listed.
    """

    def __init__(self, control: Any, objective: op.Objective, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.objective = objective
        spec = parse_control(control)
        self._session = None
        if spec is not None:
            self._session = ControlSession(
                spec,
                say=lambda line: None,
                broadcast=lambda row: row,
                base=objective.correction,
                correct=self._correct,
                admits=admitted_by(objective),
            )
            self._session.begin(folder, 0, optimizer=optimizer)

    def _correct(self, correction: op.Correction) -> None:
        self.objective = replace(self.objective, correction=correction)

    def observe(self, step: int, logs: dict[str, float], *, responses: int) -> tuple[dict[str, float], str]:
        """The row with what control adds, and why the run should end (empty = it should not)."""
        if self._session is None:
            return logs, ""
        added = self._session.observe(step, logs, responses=responses, world_size=1, is_main=True)
        return logs | added, self._session.stop


def generation(
    model: Sorter,
    behind: Sorter,
    setting: Setting,
    objective: op.Objective,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    *,
    bits: int | None,
    task: Task = "sorting",
) -> dict[str, float]:
    """Sample from ``behind`` (rounded to ``bits``), learn in two optimizer steps; what the trainers would log."""
    questions = prompts(GROUPS, generator).repeat_interleave(GENERATIONS, dim=0)
    answers = sample(rounded(behind, bits), questions, generator)
    earned = reward(answers, task)
    rewards = earned + setting.length_bonus * answers.mask.sum(1)
    with torch.no_grad():
        old = token_logps(behind if setting.noticed else model, answers.ids)
    advantages = group_advantages(rewards, GENERATIONS)
    rollouts = Rollouts(answers, old, rewards, advantages, group_size=GENERATIONS)
    stats, norm = learn(model, optimizer, objective, rollouts, MINIBATCHES, generator)
    drawn = answers.ids[:, COUNT + 1 :]
    stats = stats.union(duplicate_stats(drawn, answers.mask, answers.logps, group_size=GENERATIONS))
    held_out = reward(sample(model, QUESTIONS, torch.Generator().manual_seed(0)), task)
    logs = {"reward": float(earned.mean()), "learner_reward": float(held_out.mean())}
    logs |= {"grad_norm": norm, **stats.compute()}
    return logs | gradient_variance(logs, responses=len(rewards) // MINIBATCHES)


def train(
    setting: Setting,
    seed: int,
    *,
    steps: int,
    start: Sorter,
    folder: Path,
    control: Any = None,
    task: Task = "sorting",
) -> list[dict[str, float]]:
    """A run of so many generations, or of fewer if control ends it; its logged rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (METRICS_FILE, ACTIONS_FILE):
        (folder / name).unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(seed)
    model = deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95))
    controlled = Controlled(control, setting.objective, optimizer, folder)
    past: deque[Sorter] = deque(maxlen=max(setting.lag, 0) + 1)
    rows: list[dict[str, float]] = []
    for step in range(steps):
        since = max(step - setting.onset, 0)  # generations since the fault began
        if setting.lag >= 0 or step <= setting.onset:
            past.append(deepcopy(model).requires_grad_(False))
        behind = past[-1 - min(since, max(setting.lag, 0), len(past) - 1)]
        bits = setting.bits if step >= setting.onset else None
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * min(1.0, (step + 1) / max(setting.warm_up, 1))
        try:
            objective = controlled.objective
            logs = generation(model, behind, setting, objective, optimizer, generator, bits=bits, task=task)
        except (ValueError, RuntimeError) as error:  # weights that are no longer finite
            print(f"{folder.name}: ended after {step} generations: {str(error)[:80]}", flush=True)
            break
        responses = GROUPS * GENERATIONS // MINIBATCHES
        logs, stop = controlled.observe(MINIBATCHES * (step + 1), logs, responses=responses)
        append_metrics(folder / METRICS_FILE, MINIBATCHES * (step + 1), logs)
        rows.append({"step": MINIBATCHES * (step + 1), **logs})
        if stop:
            break
    return rows


def warmed_up() -> Sorter:
    """The model that every run starts from."""
    torch.manual_seed(0)
    start = Sorter()
    warm_start(start, steps=WARM_UP_STEPS, generator=torch.Generator().manual_seed(0))
    return start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--control", type=yaml.safe_load)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = warmed_up()
    for seed in args.seeds:
        for name in args.only:
            began = time.monotonic()
            folder = args.out / f"{name}-{seed}"
            train(SETTINGS[name], seed, steps=args.steps, start=start, folder=folder, control=args.control)
            print(f"{folder.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
