"""Generation batches of agents, several of which may be in flight: each has its own environments and its own screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trl_offpolicy.engines.engine import Engine, Sampling
from trl_offpolicy.rollouts.agents.sampler import Completions, Request, RolloutSampler
from trl_offpolicy.rollouts.agents.screened import ScreenedEngine
from trl_offpolicy.rollouts.screening import Screen


class Lane:
    """What a generation batch needs from its prompts to its rewards.

    Args:
        sampler: with environments that no other lane has; their ``reset`` and ``get_reward`` are bounded here.
        screen: checks the replies, and hears of the environments.
    """

    def __init__(self, sampler: RolloutSampler, screen: Screen) -> None:
        self.sampler, self.screen = sampler, screen
        if sampler.environments is not None and sampler.guard is not None:
            sampler.environments.bound(sampler.guard, screen)


class AgentBatch(NamedTuple):
    """A generation batch from its prompts to its rewards: what is asked for, and the lane that it has until then."""

    request: Request
    lane: Lane

    def sample(
        self, engine: Engine, sampling: Sampling, *, context_length: int | None, again: Engine | None = None
    ) -> Completions:
        """The completions. Those that cannot be used hold fillers, on which the ranks agree by the screen.

        Args:
            engine: what samples.
            sampling: how a turn is sampled.
            context_length: tokens that the engine can take; None = any.
            again: the engine that is asked again for replies that cannot be used; None = the same one.
        """
        sampler, screen = self.lane.sampler, self.lane.screen
        screened = ScreenedEngine(engine, screen, again=again)
        return sampler.sample(screened, self.request, sampling, context_length=context_length, screen=screen)


class Lanes:
    """The lanes of one trainer. A lane that was given back is used again, so environments are built once.

    Args:
        first: a lane.
        more: makes another one, if more batches are in flight. Threads of batches in flight may call it.
    """

    def __init__(self, first: Lane, more: Callable[[], Lane]) -> None:
        self._free, self._more = [first], more

    def batch(self, rows: Sequence[Mapping[str, Any]], count: int) -> AgentBatch:
        """Ask for ``count`` completions of each row; environments are reset."""
        try:
            lane = self._free.pop()
        except IndexError:
            lane = self._more()
        lane.screen.begin()
        request = lane.sampler.request(rows, count)
        lane.screen.end_of_resets()
        return AgentBatch(request, lane)

    def give_back(self, batch: AgentBatch) -> None:
        """The rewards of a batch are given: nothing reads its environments any more."""
        self._free.append(batch.lane)
