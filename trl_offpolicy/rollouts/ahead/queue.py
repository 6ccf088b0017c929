"""The queue of generation batches that were requested from a server before a trainer needs them.

At a generation boundary all ranks do three things: replace the engine's weights (requests in flight are cut, waited
for, or go on under the adapter that they began with), request as many batches as the bound on their lag admits, and
take the oldest batch. Which prompts come next is the trainer's to say.

Batches of one response per prompt are requested on the main rank, and prompts and results travel between ranks here, in
the main thread. Batches of agents are sampled by the rank that learns from them, where their environments are.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from trl_offpolicy.engines.engine import Engine, EngineError, Rollouts
from trl_offpolicy.functional.collective import broadcast_object, gather_objects
from trl_offpolicy.rollouts.ahead.flight import Flight, Server
from trl_offpolicy.rollouts.ahead.in_flight import InFlight
from trl_offpolicy.rollouts.ahead.parts import ResponseInParts, as_rollouts
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings

T = TypeVar("T")

AHEAD_METRICS = ("wait_seconds",)
"""Logged once per generation as ``offpolicy/rollout/<name>``."""

Prompts = list[list[int]]
"""Token ids of this rank's prompts in one generation batch, each prompt repeated for each of its responses."""

Upcoming = Callable[[int, int], Iterable[T]]
"""Called with (first, end): yields what is asked for in these generation batches: the prompts, or a function that
samples the batch. The one that is due has number 0."""


class Landed(NamedTuple):
    """A generation batch that is there.

    Args:
        rollouts: the rows of this rank, each token with its version.
        waited: seconds that the trainer waited for requests since the batch before.
    """

    rollouts: Rollouts
    waited: float


@dataclass(frozen=True)
class _Batch:
    """A generation batch that was requested, all of it or the first of its prompts.

    Args:
        version: version of the weights when the first of it was requested.
        prompts: those of this rank; none in a batch of agents.
        futures: by prompt the responses of all ranks, on the main rank; for agents this rank's whole batch, alone.
        later: prompts of all ranks that are not requested yet, on the main rank, in order.
    """

    version: int
    prompts: Prompts
    futures: list[Future[Any]]
    later: deque[list[int]] = field(default_factory=deque)

    def due(self, share: float) -> int:
        """How many prompts are to be requested so that ``share`` of the batch is, rounded down to whole prompts."""
        asked = len(self.futures)
        total = asked + len(self.later)
        return max(0, math.floor(share * total + 1e-9) - asked)  # 0.7 of 10 prompts are 7, not 6.999...


class RolloutsAhead:
    """The queue between a server and a trainer. All ranks make the same calls.

    Args:
        settings: how far to sample ahead, and what a change of the weights does to requests in flight.
        rank: number of this process.
        version: returns the version of the weights that the engine has.
    """

    def __init__(self, settings: AsyncSettings, *, rank: int, version: Callable[[], int]) -> None:
        self._on_sync, self._rank, self._version = settings.on_sync, rank, version
        self._flight: Flight | None = None
        self._server: Server | None = None
        self.close()

    def __len__(self) -> int:
        """Batches that were requested and not taken."""
        return len(self._queue)

    def start(self, server: Server | None) -> None:
        """Begin a run with an empty queue.

        Args:
            server: what samples; its requests run in threads of their own. None on ranks that request nothing: all but
                the main one, unless batches are sampled by :meth:`take_sampled`.
        """
        self.close()
        if server is None:
            return
        self._server, self._flight = server, Flight(server, on_sync=self._on_sync)

    def close(self) -> None:
        """Give up requests in flight and empty the queue."""
        if self._flight is not None:
            self._flight.close()
        self._flight = None
        self._queue: deque[_Batch] = deque()
        self._waited = 0.0  # seconds of waiting for requests in flight, since the last generation

    def drop(self) -> None:
        """Forget the batches that were requested and not taken, because the epoch they belong to has ended early.

        All ranks call it. What comes next is requested again, at the weights of then.
        """
        if not self._queue:
            return
        if self._flight is not None:
            self._flight.drop()
        self._queue.clear()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which weights may change: no request runs, or only such as keep the adapter that they have.

        All ranks enter it together and, unless an error ends it, leave it together.
        """
        start = time.monotonic()
        if self._flight is not None:
            self._flight.hold()
        gather_objects(None)  # no rank's requests run
        self._waited += time.monotonic() - start
        try:
            yield
            gather_objects(None)  # the main rank has sent the weights
        finally:
            if self._flight is not None:
                self._flight.release()

    def take(
        self,
        prompts: Prompts,
        *,
        upcoming: Upcoming[Prompts],
        admitted: float,
        options: Callable[[], dict[str, Any]],
        n: int,
    ) -> Landed:
        """The batch that is due. Requests more batches before it waits. All ranks call it.

        Args:
            prompts: those of the batch that is due.
            upcoming: gives the prompts of the batches that may be requested now; fewer if training ends before.
            admitted: batches that may be requested by now, this one included
                (:func:`~trl_offpolicy.rollouts.ahead.lookahead.generations_admitted`). With a fraction the last one is
                requested in part; the rest follows when more is admitted, with the weights of then.
            options: returns the fields of a request, with ``max_tokens``.
            n: responses per prompt. A group of responses lies in consecutive rows of the ranks in their order.

        Raises:
            EngineError: on all ranks, if a request failed or the rows are not those that were requested.
        """
        self._submit(upcoming, admitted, options, n)
        batch = self._queue.popleft()
        as_asked = all(gather_objects(batch.prompts == prompts))
        start = time.monotonic()
        landed: Rollouts | EngineError | None = None
        if self._flight is not None:
            landed = _landed(batch.futures) if as_asked else _OTHER_ROWS
        landed = broadcast_object(landed)
        if isinstance(landed, EngineError):
            raise landed
        assert landed is not None
        first = self._rank * len(prompts)
        return Landed(_rows(landed, prompts, slice(first, first + len(prompts))), self._waited_since(start))

    def take_sampled(self, *, upcoming: Upcoming[Callable[[Engine], T]], admitted: float) -> tuple[T, float]:
        """This rank's batch that is due, sampled by a function. Starts more before it waits. All ranks call it.

        Args:
            upcoming: gives the functions that sample the batches that may be requested now. Each is called in a thread
                of its own, with an engine whose requests go by what a sync does with them.
            admitted: as in :meth:`take`, a whole number.

        Returns:
            What the function returned, and the seconds that the trainer waited since the batch before.

        Raises:
            EngineError: on all ranks, if the batch of one could not be sampled.
        """
        flight, server, known = self._flight, self._server, len(self._queue)
        assert flight is not None
        for sample in upcoming(known, max(known, int(admitted))):
            future = flight.run(lambda submit, sample=sample: sample(InFlight(server, submit)))  # type: ignore[misc]
            self._queue.append(_Batch(self._version(), [], [future]))
        batch, start = self._queue.popleft(), time.monotonic()
        landed = _result(batch.futures[0])
        errors = gather_objects(landed if isinstance(landed, EngineError) else None)
        if error := next((one for one in errors if one is not None), None):
            raise error
        found: T = landed
        return found, self._waited_since(start)

    def _waited_since(self, start: float) -> float:
        """Seconds since ``start``, and those of syncs since the batch before."""
        waited, self._waited = self._waited + time.monotonic() - start, 0.0
        return waited

    def _submit(self, upcoming: Upcoming[Prompts], admitted: float, options: Callable[[], Any], n: int) -> None:
        """Request what is not requested yet, in order, as far as the bound admits."""
        known = len(self._queue)
        for prompts in upcoming(known, max(known, math.ceil(admitted))):
            everyone = [row for rank in gather_objects(prompts) for row in rank]
            of_groups = deque(everyone[::n] if self._flight is not None else [])
            self._queue.append(_Batch(self._version(), prompts, [], of_groups))
        if self._flight is None:
            return
        for place, batch in enumerate(self._queue):
            for _ in range(batch.due(min(1.0, admitted - place))):
                batch.futures.append(self._flight.submit(batch.later.popleft(), options(), n))

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that may have sampled a token still to come."""
        return min((batch.version for batch in self._queue), default=self._version())


_OTHER_ROWS = EngineError(
    "async_rollouts: the trainer asks for other prompts than those that were looked ahead to. The data loader or the "
    "prompts changed between two reads; use a data set that gives the same rows each time."
)


def _landed(responses: Sequence[Future[list[ResponseInParts]]]) -> Rollouts | EngineError:
    """Wait for the rows of a batch. Returns them (without prompts), or the error that all ranks must raise."""
    rows: list[ResponseInParts] = []
    for future in responses:
        found = _result(future)
        if isinstance(found, EngineError):
            return found
        rows += found
    return as_rollouts(rows)


def _result(future: Future[Any]) -> Any:
    """Wait for a result. An error is returned: raised on one rank alone, it would leave the others waiting."""
    try:
        return future.result()
    except EngineError as error:
        return error
    except Exception as error:
        failed = EngineError(f"A rollout could not be sampled: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed


def _rows(all_rows: Rollouts, prompts: Prompts, here: slice) -> Rollouts:
    """This rank's part of the rows of all ranks."""
    assert all_rows.sampling_per_token_logps is not None
    return Rollouts(
        prompt_ids=prompts,
        completion_ids=all_rows.completion_ids[here],
        sampling_per_token_logps=all_rows.sampling_per_token_logps[here],
        policy_versions=all_rows.policy_versions[here],
        finish_reasons=all_rows.finish_reasons[here],
        routed_experts=None if all_rows.routed_experts is None else all_rows.routed_experts[here],
        sampling_mask=None if all_rows.sampling_mask is None else all_rows.sampling_mask[here],
    )
