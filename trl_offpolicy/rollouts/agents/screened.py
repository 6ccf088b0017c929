"""An engine whose replies are checked before anybody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_offpolicy.engines.engine import Engine, Rollouts, Sampling
from trl_offpolicy.rollouts.agents.recorded import WrappedEngine
from trl_offpolicy.rollouts.screening import Screen


class ScreenedEngine(WrappedEngine):
    """An engine whose replies went through a :class:`~trl_offpolicy.rollouts.screening.Screen`.

    Args:
        engine: the engine that samples.
        screen: the check.
        again: the engine that is asked again; None = the same one. One that hands out what was sampled ahead cannot be.
    """

    def __init__(self, engine: Engine, screen: Screen, *, again: Engine | None = None) -> None:
        super().__init__(engine)
        self.screen = screen
        self._again = engine if again is None else again

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1, **images: Any
    ) -> Rollouts:
        """``n`` completions of each prompt; a filler stands where one cannot be used.

        ``images`` (those of each prompt) is only for an engine that takes them.
        """
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]

        def again(rows: list[int]) -> Rollouts:
            theirs = {name: [values[row // n] for row in rows] for name, values in images.items()}
            return self._again.generate([prompts[row] for row in rows], sampling, n=1, **theirs)

        sampled = self.engine.generate(prompt_ids, sampling, n=n, **images)
        return self.screen.rollouts(sampled, prompts, again=again)
