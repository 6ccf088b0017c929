"""An engine for rollouts in flight: what it samples is requested as a sync allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.rollouts.agents.recorded import WrappedEngine
from trl_offpolicy.rollouts.ahead.flight import Submit
from trl_offpolicy.rollouts.ahead.parts import as_rollouts


class InFlight(WrappedEngine):
    """A server that is asked through a :class:`~trl_offpolicy.rollouts.ahead.flight.Flight`.

    Args:
        server: the server.
        submit: requests responses, as the flight gives it to a rollout that it runs.
    """

    def __init__(self, server: Any, submit: Submit) -> None:
        super().__init__(server)
        self._submit = submit

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, one after the other; each token has the version that sampled it."""
        prompts = [list(ids) for ids in prompt_ids]
        asked = [self._submit(ids, sampling.vllm_options(), n) for ids in prompts]
        responses = [response for future in asked for response in future.result()]
        return as_rollouts(responses, [ids for ids in prompts for _ in range(n)])
