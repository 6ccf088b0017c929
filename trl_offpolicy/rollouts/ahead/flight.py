"""Sends requests to a server in the background. A sync waits for them, cuts them, or passes them by.

A request is asked for alone, or by a rollout: a function in a thread of its own that asks again and again, as a loop of
tools does.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any, Protocol, TypeVar

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.server.answers import Answer
from trl_offpolicy.rollouts.ahead.parts import Part, ResponseInParts
from trl_offpolicy.rollouts.ahead.settings import Partial

WORKERS = 256
_AGAIN = 0.05
"""Seconds between two cuts; a request that was on its way during the first cut is caught by the next."""
_FRUITLESS = 100
"""Requests of one response that may be cut in a row before their first token. A server that ends all would be asked for
ever, and the trainer would wait for ever."""
T = TypeVar("T")
Order = tuple[int, ...]
"""Number of a rollout or of a request that is asked for alone; requests of a rollout have its number and their own."""
Submit = Callable[[list[int], dict[str, Any], int], "Future[list[ResponseInParts]]"]
"""Requests ``n`` responses: called with (prompt, options, n) as :meth:`Flight.submit` is."""
_ENDED = "Sampling ahead has ended."
_DROPPED = "The request was dropped: its generation batch is not reached."


class Server(Protocol):
    """The part of :class:`~trl_offpolicy.engines.server.ServerEngine` that is used here."""

    version: int | None

    def parts(
        self, prompt: list[int], options: dict[str, Any], n: int, *, version: int | None = None
    ) -> Sequence[Answer | tuple[Any, ...]]:
        """Sample ``n`` completions; returns the fields of an :class:`Answer` for each, at least the first three.

        Args:
            prompt: token ids.
            options: fields of the request.
            n: number of completions.
            version: of the adapter that samples; None = the weights of now. Only given with ``on_sync="keep"``.
        """

    def cut(self) -> None:
        """End every request at once. Each returns the tokens that it has."""

    def serve_several(self, in_use: Callable[[], Collection[int]] | None) -> None:
        """From now on keep the adapters of the versions ``in_use()`` at a sync (``on_sync="keep"``); None ends it."""


@dataclass
class _Job:
    """The responses to one prompt, which may be sampled in several requests."""

    order: Order
    prompt: list[int]
    options: dict[str, Any]
    responses: list[ResponseInParts]
    future: Future[list[ResponseInParts]] = field(default_factory=Future)

    @property
    def limit(self) -> int:
        return int(self.options["max_tokens"])

    def is_finished(self) -> bool:
        return all(response.parts and response.is_finished(self.limit) for response in self.responses)


class Flight:
    """Samples responses in background threads, older prompts first.

    Args:
        server: the server that samples.
        on_sync: what :meth:`hold` does with requests in flight: "continue" cuts them, "finish" waits for them and for
            whole rollouts, "keep" leaves them alone; each then ends under the version that it began with, which the
            server keeps until :meth:`close`.
        workers: largest number of requests in flight; further ones wait.
    """

    def __init__(self, server: Server, *, on_sync: Partial, workers: int = WORKERS) -> None:
        self._server = server
        self._on_sync = on_sync
        self._workers = workers
        self._threads = 0
        self._items = 0  # of work, waiting or running
        self._numbers = count()
        self._work: PriorityQueue[tuple[Order, int, _Job | None, range]] = PriorityQueue()
        self._unfinished: dict[Order, Future[Any]] = {}
        self._gate = threading.Condition()
        self._open = True
        self._closed = False
        self._running: Counter[int] = Counter()  # requests by the version that they began with
        if on_sync == "keep":
            server.serve_several(self.versions)

    def submit(self, prompt: Sequence[int], options: dict[str, Any], n: int) -> Future[list[ResponseInParts]]:
        """Request ``n`` responses to a prompt; returns at once.

        Args:
            prompt: token ids.
            options: fields of the request, with ``max_tokens``.
            n: number of responses.
        """
        return self._ask((), prompt, options, n)

    def run(self, rollout: Callable[[Submit], T]) -> Future[T]:
        """Run a rollout in a thread of its own; returns at once.

        Args:
            rollout: a function that is given what it asks the server by.
        """
        order: Order = (next(self._numbers),)
        future: Future[T] = Future()
        with self._gate:
            self._unfinished[order] = future

        def follow() -> None:
            try:
                self._finish(order, rollout(partial(self._ask, order)))
            except BaseException as error:  # handed to whoever asks for the result
                self._finish(order, error=error)

        threading.Thread(target=follow, daemon=True, name=f"rollout-{order[0]}").start()
        return future

    def _ask(
        self, rollout: Order, prompt: Sequence[int], options: dict[str, Any], n: int
    ) -> Future[list[ResponseInParts]]:
        """:meth:`submit`, for a rollout or, if that is (), for nobody.

        Raises:
            EngineError: the rollout was given up.
        """
        job = _Job((*rollout, next(self._numbers)), list(prompt), options, [ResponseInParts(())] * n)
        with self._gate:
            if rollout and rollout not in self._unfinished:
                raise self._given_up()
            self._unfinished[job.order] = job.future
        self._put(job, range(n))
        return job.future

    def hold(self) -> None:
        """Return when no request runs that a change of the weights would change. None starts before :meth:`release`."""
        if self._on_sync == "finish":
            with self._gate:
                unfinished = list(self._unfinished.values())
            wait(unfinished)
        with self._gate:
            self._open = False
        if self._on_sync == "keep":
            return
        while self._running.total():
            if self._on_sync == "continue":
                self._server.cut()
            with self._gate:
                self._gate.wait_for(lambda: not self._running.total(), _AGAIN)

    def release(self) -> None:
        """Let requests start again, after :meth:`hold`."""
        with self._gate:
            self._open = True
            self._gate.notify_all()

    def versions(self) -> frozenset[int]:
        """The versions with which requests in flight have begun."""
        with self._gate:
            return frozenset(+self._running)

    def drop(self) -> None:
        """Give up what is not finished, as :meth:`close`, but go on: new requests may be submitted.

        One that the server cannot cut may still run. :meth:`hold` waits for it like for any other.
        """
        self._give_up(_DROPPED)

    def close(self) -> None:
        """Give up requests and rollouts that are not finished; their results raise an EngineError."""
        with self._gate:
            self._closed = True
            self._gate.notify_all()
            threads = self._threads
        self._give_up(_ENDED)
        for i in range(threads):
            self._work.put(((-1,), i, None, range(0)))
        if self._on_sync == "keep":
            self._server.serve_several(None)

    def _give_up(self, why: str) -> None:
        with self._gate:
            unfinished, running = list(self._unfinished), self._running.total()
        for order in unfinished:
            self._finish(order, error=EngineError(why))
        if running:
            self._server.cut()

    # ------------------------------------------------------------------------------------------------------ threads

    def _put(self, job: _Job, which: range) -> None:
        """Queue a request for the responses ``which`` of a job. Threads are daemons, so a failed run can exit."""
        self._work.put((job.order, which.start, job, which))
        with self._gate:
            self._items += 1
            if self._threads >= min(self._items, self._workers):
                return
            self._threads += 1
        threading.Thread(target=self._serve, daemon=True, name=f"requests-{self._threads}").start()

    def _serve(self) -> None:
        while True:
            _, _, job, which = self._work.get()
            if job is None:
                return
            try:
                self._sample(job, which)
            except BaseException as error:  # handed to whoever asks for the result
                self._finish(job.order, error=error)
            finally:
                with self._gate:
                    self._items -= 1

    def _sample(self, job: _Job, which: range) -> None:
        """Run one request. A response that was cut goes back into the queue and continues after its last token."""
        done = job.responses[which.start].token_ids
        options = {**job.options, "max_tokens": job.limit - len(done)}
        parts = self._request(job, job.prompt + done, options, len(which))
        for i, part in zip(which, parts, strict=True):
            job.responses[i] = job.responses[i].then(part)
            if job.responses[i].fruitless >= _FRUITLESS:
                raise EngineError(
                    f"the server must sample, but it ended {_FRUITLESS} requests of a response in a row before their "
                    "first token. Look at its log: it may be paused, or something else aborts its requests."
                )
        with self._gate:
            finished = job.is_finished()
        if finished:
            self._finish(job.order, job.responses)
        for i in which:
            if not job.responses[i].is_finished(job.limit):
                self._put(job, range(i, i + 1))

    def _finish(self, order: Order, found: Any = None, *, error: BaseException | None = None) -> None:
        with self._gate:
            future = self._unfinished.pop(order, None)
        if future is None:
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(found)

    def _given_up(self) -> EngineError:
        return EngineError(_ENDED if self._closed else _DROPPED)

    def _request(self, job: _Job, prompt: list[int], options: dict[str, Any], n: int) -> list[Part]:
        """One request under one version: it ends before the next sync, or under the adapter that it began with."""
        with self._gate:
            self._gate.wait_for(lambda: self._open or self._closed)
            if self._closed or job.order not in self._unfinished:  # given up while it waited, or cut and to go on
                raise self._given_up()
            version = -1 if self._server.version is None else self._server.version
            self._running[version] += 1
        try:
            pinned = {"version": version} if self._on_sync == "keep" else {}
            answers = self._server.parts(prompt, options, n, **pinned)
        finally:
            with self._gate:
                self._running[version] -= 1
                self._gate.notify_all()
        return [
            Part(
                token_ids=tuple(one.token_ids),
                logps=tuple(one.logps),
                version=version,
                finish_reason=one.finish_reason,
                kept=one.kept,
                routes=one.routes,
            )
            for one in (Answer(*answer) for answer in answers)
        ]
