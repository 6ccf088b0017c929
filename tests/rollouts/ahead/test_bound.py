"""AReaL's bound, and what it does with slow prompts that discarding does not."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from trl_offpolicy.rollouts.ahead.lookahead import generations_admitted


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_bound_is_areals(batch_size: int, lag: int) -> None:
    """Batch k is learned from at version k, so batches up to version + lag may be requested, and no later one."""
    admitted = generations_admitted(lag=lag, every=4, in_step=4, accumulation=4)  # one batch in a step
    for version in range(4):
        for number in range(1, 60):  # of the rollout, counted from 1
            by_batch = (number - 1) // batch_size < version + admitted
            assert by_batch == (math.floor((number - 1) / batch_size) <= version + lag)


# ------------------------------------------------------------------------------------------------------- long tails

BATCH, SLOTS, STEP = 8, 24, 1.0


@dataclass
class Run:
    """What a simulated run learned from: (prompt, lag), in order; and what it threw away."""

    learned: list[tuple[int, int]] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    time: float = 0.0

    @property
    def lags(self) -> list[int]:
        return [lag for _, lag in self.learned]


def times(count: int) -> list[float]:
    """Seconds to sample each prompt: log-normal, every tenth one fifteen times as long."""
    draw = random.Random(0)
    return [draw.lognormvariate(-1.0, 0.5) * (15 if i % 10 == 3 else 1) for i in range(count)]


def paced(seconds: list[float], lag: int) -> Run:
    """Admitted by the bound, learned from in the order of admission; a simulated clock."""
    run = Run()
    admitted = generations_admitted(lag=lag, every=1, in_step=1, accumulation=1)
    free = [0.0] * SLOTS  # when each slot of the server is free again
    submitted, version = 0, 0
    asked: dict[int, tuple[int, float]] = {}  # prompt: (version, when it is there)
    while version * BATCH < len(seconds):
        while submitted < min(len(seconds), (version + admitted) * BATCH):
            start = max(heapq.heappop(free), run.time)
            asked[submitted] = (version, start + seconds[submitted])
            heapq.heappush(free, start + seconds[submitted])
            submitted += 1
        due = range(version * BATCH, min((version + 1) * BATCH, len(seconds)))
        run.time = max([run.time, *(asked[i][1] for i in due)]) + STEP
        run.learned += [(i, version - asked[i][0]) for i in due]
        version += 1
    return run


def discarding(seconds: list[float], lag: int, *, steps: int) -> Run:
    """All slots busy, learned from as it comes; what is older than the lag when it is there is thrown away."""
    run, flying, ready, version = Run(), [], [], 0
    following = iter(list(range(len(seconds))) * 100)
    while version < steps:
        while len(flying) < SLOTS:
            prompt = next(following)
            heapq.heappush(flying, (run.time + seconds[prompt], prompt, version))
        while len(ready) < BATCH:
            when, prompt, sampled = heapq.heappop(flying)
            run.time = max(run.time, when)
            if version - sampled <= lag:
                ready.append((prompt, version - sampled))
            else:
                run.discarded.append(prompt)
            again = next(following)
            heapq.heappush(flying, (run.time + seconds[again], again, version))
        run.learned += ready
        ready, version = [], version + 1
        run.time += STEP
    return run


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_paced_every_prompt_is_learned_from_once_and_none_is_too_old(lag: int) -> None:
    run = paced(times(200), lag)

    assert Counter(prompt for prompt, _ in run.learned) == Counter(range(200))
    assert max(run.lags) == lag
    assert run.lags[-BATCH:] == [lag] * BATCH


def test_pacing_gains_from_the_lag() -> None:
    durations = [paced(times(200), lag).time for lag in (0, 1, 4)]

    assert durations[0] > 1.2 * durations[1] > 1.2 * durations[2] * 1.05


def test_discarding_starves_the_slow_prompts() -> None:
    seconds, lag = times(200), 1
    run = discarding(seconds, lag, steps=200)

    slow = {i for i in range(200) if i % 10 == 3}
    learned = Counter(prompt for prompt, _ in run.learned)
    assert max(run.lags) <= lag
    of_slow = sum(learned[i] for i in slow) / len(slow)
    of_quick = sum(learned[i] for i in range(200) if i not in slow) / (200 - len(slow))
    assert of_slow < 0.2 * of_quick
    assert sum(learned[i] == 0 for i in slow) > len(slow) / 2
