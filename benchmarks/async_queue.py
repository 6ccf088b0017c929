"""Samplers, a queue and a learner as a discrete-event simulation; ``async_sim.py`` feeds it.

Time is in seconds. A request is the number of a response; batch k are the requests k B to (k + 1) B - 1.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the work costs in seconds.

    Args:
        token: of one decode step, in which every slot of a replica makes one token.
        prefill: of a request before its first token.
        train_token: of the learner for one token, all its GPUs together.
        step: of the learner for one step, whatever its size.
        sync: from the end of a training step until the samplers have the weights.
        pause: of the samplers at each sync, with what they hold in flight.
    """

    token: float
    prefill: float = 0.0
    train_token: float
    step: float = 0.0
    sync: float = 0.0
    pause: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a request may start and what the learner takes.

    Args:
        eta: lag that admission allows; 0 = synchronous.
        barrier: one-step off-policy by batches: batch k + 1 starts when the training of batch k starts, not earlier;
            ``eta`` must be 1.
        order: "submitted": the learner takes requests in the order of their start, so that no lag exceeds eta.
            "finished": it takes what is there; a straggler then is overtaken and its lag has no bound.
        queue: finished responses that may wait; more are not admitted. None = no bound.
    """

    eta: float
    barrier: bool = False
    order: str = "submitted"
    queue: int | None = None

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ValueError(f"eta must be at least 0, but got {self.eta}.")
        if self.barrier and self.eta != 1:
            raise ValueError(f"eta must be 1 with barrier=True, but got {self.eta}.")
        if self.order not in ("submitted", "finished"):
            raise ValueError(f"order must be 'submitted' or 'finished', but got {self.order!r}.")


class Outcome(NamedTuple):
    """Of one simulation: tokens a second, lag over responses, idle shares, waiting responses at most.

    ``crossing`` is the share of responses during which the weights changed.
    """

    throughput: float
    lag_mean: float
    lag_max: int
    sampler_idle: float
    learner_idle: float
    waiting_max: int
    crossing: float


@dataclass
class Simulation:
    """The state of one run; see :func:`simulate`."""

    lengths: Floats
    batch: int
    slots: int
    costs: Costs
    schedule: Schedule
    now: float = 0.0
    version: int = 0
    trained: int = 0
    submitted: int = 0
    running: int = 0
    paused: float = 0.0
    resume: float = 0.0
    learning: bool = False
    busy: float = 0.0
    learned: float = 0.0
    crossed: int = 0
    waiting_max: int = 0
    born: dict[int, int] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    waiting: int = 0
    finished: list[int] = field(default_factory=list)
    landed: dict[int, int] = field(default_factory=dict)
    flights: list[tuple[float, int]] = field(default_factory=list)
    learner: list[tuple[float, str]] = field(default_factory=list)

    def run(self) -> float:
        """Until all is trained; returns the time of the last training step's end."""
        steps = len(self.lengths) // self.batch
        self._admit()
        while self.trained < steps:
            at_flight = self.flights[0][0] + self.paused if self.flights else math.inf
            at_learner = self.learner[0][0] if self.learner else math.inf
            self.now = min(at_flight, at_learner)
            if math.isinf(self.now):
                raise RuntimeError(f"nothing is left to happen after {self.trained} of {steps} steps: a queue below B?")
            if at_flight <= at_learner:
                self._land(heapq.heappop(self.flights)[1])
            else:
                self._learner_event(heapq.heappop(self.learner)[1])
            self._start_training()
            self._admit()
        return self.now

    def _admit(self) -> None:
        """Start what fits into free slots, the bound and the queue."""
        while self.running < self.slots and self.submitted < len(self.lengths) and self._admitted(self.submitted):
            number = self.submitted
            seconds = self.costs.prefill + self.costs.token * self.lengths[number]
            start = max(self.now, self.resume)
            heapq.heappush(self.flights, (start + seconds - self.paused, number))
            self.born[number] = self.version
            self.busy += seconds
            self.running += 1
            self.submitted += 1

    def _admitted(self, number: int) -> bool:
        """AReaL's bound, with N = number + 1 and i the version; or the barrier."""
        queue = self.schedule.queue
        if queue is not None and self.waiting >= queue:
            return False
        if self.schedule.barrier:
            started = self.trained + self.learning
            return number // self.batch <= started and self.version >= self.trained
        return number // self.batch <= self.version + self.schedule.eta

    def _land(self, number: int) -> None:
        self.running -= 1
        self.crossed += self.version > self.born[number]
        self.finished.append(number)
        part = number // self.batch
        self.landed[part] = self.landed.get(part, 0) + 1
        self.waiting += 1
        self.waiting_max = max(self.waiting_max, self.waiting)

    def _start_training(self) -> None:
        """If the learner is free, has the newest weights out, and a batch is there."""
        if self.learning or self.version < self.trained or (numbers := self._next_batch()) is None:
            return
        self.lags += [self.version - self.born.pop(number) for number in numbers]
        seconds = self.costs.step + self.costs.train_token * float(self.lengths[numbers].sum())
        self.learned += seconds
        self.learning = True
        heapq.heappush(self.learner, (self.now + seconds, "trained"))

    def _next_batch(self) -> list[int] | None:
        """The requests of the next step, taken out of the queue; None while they are not there."""
        if self.schedule.order == "finished":
            taken = self.finished[self.trained * self.batch : (self.trained + 1) * self.batch]
            there = len(taken) == self.batch
        else:
            there = self.landed.get(self.trained) == self.batch
            taken = list(range(self.trained * self.batch, (self.trained + 1) * self.batch)) if there else []
        self.waiting -= self.batch if there else 0
        return taken if there else None

    def _learner_event(self, kind: str) -> None:
        if kind == "trained":
            self.learning = False
            self.trained += 1
            heapq.heappush(self.learner, (self.now + self.costs.sync, "synced"))
        else:
            self.version += 1
            self.paused += self.costs.pause
            self.resume = self.now + self.costs.pause


def simulate(lengths: Floats, *, batch: int, slots: int, costs: Costs, schedule: Schedule) -> Outcome:
    """Responses of these lengths, in the order of their requests, through samplers and learner.

    Args:
        lengths: (N,) tokens, N a multiple of ``batch``.
        batch: B, responses a training step.
        slots: responses that are decoded at once, over all replicas.
        costs: seconds.
        schedule: who may start when.

    Raises:
        ValueError: N is not a multiple of B, no slot, or a queue that cannot hold a batch.
    """
    if not len(lengths) or len(lengths) % batch:
        raise ValueError(f"lengths must hold a multiple of batch = {batch} responses, but got {len(lengths)}.")
    if slots < 1:
        raise ValueError(f"slots must be at least 1, but got {slots}.")
    if schedule.queue is not None and schedule.queue < batch:
        raise ValueError(f"queue must be at least batch = {batch}, but got {schedule.queue}.")
    run = Simulation(np.asarray(lengths, np.float64), batch, slots, costs, schedule)
    seconds = run.run()
    return Outcome(
        throughput=float(np.sum(lengths)) / seconds,
        lag_mean=float(np.mean(run.lags)),
        lag_max=max(run.lags),
        sampler_idle=max(0.0, 1.0 - run.busy / (seconds * slots)),
        learner_idle=1.0 - run.learned / seconds,
        waiting_max=run.waiting_max,
        crossing=run.crossed / len(lengths),
    )


def colocated(lengths: Floats, *, batch: int, slots: int, costs: Costs) -> float:
    """Tokens a second where every GPU first samples and then learns: synchronous, nothing waits for the other half.

    ``slots`` and ``costs`` are those of all GPUs. Moving weights between the two phases counts as ``costs.sync``.
    """
    never = replace(costs, train_token=0.0, step=0.0, sync=0.0, pause=0.0)
    once = Schedule(eta=0)
    seconds = 0.0
    for part in np.asarray(lengths, np.float64).reshape(-1, batch):
        sampled = simulate(part, batch=batch, slots=slots, costs=never, schedule=once)
        seconds += part.sum() / sampled.throughput + costs.step + costs.train_token * part.sum() + costs.sync
    return float(np.sum(lengths)) / seconds
