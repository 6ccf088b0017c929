"""Collects the numbers of a run between two logging steps."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_module.metrics import CompletionMetric, FractionMetric, tool_counts
from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.functional.collective import gather_objects, gather_rows
from trl_offpolicy.metrics.trl_names import trl_names
from trl_offpolicy.objective.coefficients import StepSums, StepWindow
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.rollouts.agents import Completions
from trl_offpolicy.rollouts.clock import StepClock
from trl_offpolicy.stats import PREFIX, Stats
from trl_offpolicy.types import PolicyBatch


class Measuring:
    """Stats and torchmetrics of the training steps since the last logging step.

    The metrics are not submodules, for two reasons: casting the module to another dtype must not round their counts,
    and they do not belong into a checkpoint.

    Args:
        reward_names: names of the reward functions.
    """

    def __init__(self, reward_names: list[str]) -> None:
        self.stats = Stats({})
        self.completions = CompletionMetric(reward_names)
        self.loss = MeanMetric()
        self.means: dict[str, MeanMetric] = {}
        self.of_rewards: dict[str, list[float]] = {}  # by the name that a reward function gave, on this rank
        self.fractions: dict[str, FractionMetric] = {}
        self.syncs: deque[SyncReport] = deque(maxlen=256)  # those that no run folder has taken
        self._step_loss: Tensor | None = None
        self._window = StepWindow()
        self.responses = 0
        """Responses of the last optimizer step on this rank."""
        self.clock = StepClock()
        self._since = time.monotonic()
        self._steps = 0

    def start(self) -> None:
        """Start the clock of the first step."""
        self._since = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        """Leave a time that is over, such as a validation's, out of the time of the steps."""
        self._since += seconds

    def add_loss(self, loss: Tensor, stats: Stats, batch: PolicyBatch) -> None:
        """Add a micro-batch. Its loss is scaled so that the losses of an optimizer step add up."""
        loss = loss.detach().float()
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        self._window.add(batch, stats)
        self.add_stats(stats)

    def add_stats(self, stats: Stats) -> None:
        """Add the diagnostics of a micro-batch. All ranks add the same groups between two logging steps."""
        self.stats = self.stats.merge(stats)

    def add_sync(self, report: SyncReport) -> None:
        """Add one weight sync. On all ranks the same numbers are known."""
        self.syncs.append(report)
        for name, value in report.metrics().items():
            self.add_rollout_number(name, value)

    def add_rollout_number(self, name: str, value: float) -> None:
        """Add a number of a generation, whose mean is logged as ``offpolicy/rollout/<name>``. All ranks call it."""
        self.add_mean(f"{PREFIX}rollout/{name}", value)

    def add_reward_metric(self, name: str, value: float) -> None:
        """TRL's ``log_metric`` for reward functions: logs the mean under ``name``; a rank may have nothing to log."""
        self.of_rewards.setdefault(name, []).append(float(value))

    def add_tools(self, completions: Completions) -> None:
        """Add the tool calls of a generation batch, if there are tools. All ranks call it."""
        if completions.tool_calls is None or completions.tool_failures is None:
            return
        for name, counts in tool_counts(completions.tool_calls, completions.tool_failures).items():
            self.fractions.setdefault(name, FractionMetric()).update(*counts)

    def add_mean(self, name: str, value: float | Tensor) -> None:
        """Add one value of a number that is logged as its mean over calls and ranks. All ranks call it, or none does.

        A tensor (0-d, no gradient) stays on its device.
        """
        if name not in self.means:
            self.means[name] = MeanMetric()
            self.means[name].set_dtype(torch.float64)
        metric = self.means[name]
        (metric.to(value.device) if isinstance(value, Tensor) else metric).update(value)

    def end_step(self, reduce: Callable[[Tensor], Tensor] | None = None) -> StepSums:
        """What one optimizer step measured, of this rank or, with ``reduce``, of all. The only wait for the device."""
        assert self._step_loss is not None
        self.loss.to(self._step_loss.device).update(self._step_loss)
        self._step_loss = None
        step = self._window.close(reduce)
        self.responses = step.responses
        self._steps += 1
        return step

    def close(self, objective: Objective, device: torch.device) -> dict[str, float]:
        """All numbers since the last call, over all ranks. All ranks call it; the next window then begins.

        Args:
            objective: the loss, whose numbers also get TRL's names.
            device: of the metrics.
        """
        values = self.stats.logged(gather_rows)
        named: dict[str, float] = {"loss": float(self.loss.compute()), **self._times()}
        named |= self.completions.compute() if self.completions.update_called else {}
        named |= {**values, **trl_names(objective, values)} if values else {}
        for name, metric in sorted(self.means.items()):
            named[name] = float(metric.to(device).compute())
        named |= _means_of_all_ranks(self.of_rewards)
        for name, fraction in self.fractions.items():
            named[name] = float(fraction.to(device).compute())
        self.stats = Stats({})
        self.completions.reset()
        self.loss.reset()
        self.fractions.clear()
        self.means.clear()
        self.of_rewards.clear()
        return named

    def _times(self) -> dict[str, float]:
        """Mean seconds per optimizer step since the last logging step, whole and by part, of this rank."""
        now, steps = time.monotonic(), self._steps
        seconds, self._since, self._steps = now - self._since, now, 0
        parts = self.clock.close(seconds, steps=steps)
        return {"step_time": seconds / max(steps, 1), **{f"{PREFIX}time/{name}": parts[name] for name in parts}}


def _means_of_all_ranks(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean over all ranks' values of each name, whichever ranks have it. All ranks call it."""
    everyone: defaultdict[str, list[float]] = defaultdict(list)
    for of_rank in gather_objects({name: list(own) for name, own in values.items()}):
        for name, own in of_rank.items():
            everyone[name] += own
    return {name: fmean(everyone[name]) for name in sorted(everyone)}
