"""Requests in the background: no token of a version that it is not labelled with, whatever the threads do."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.rollouts.ahead.flight import Flight

OPTIONS = {"max_tokens": 12}


class Slow:
    """A server that takes a little for each token; the "log-prob" of a token is the version that gave it."""

    def __init__(self, *, seconds: float = 0.002) -> None:
        self.version: int | None = 0
        self.seconds = seconds
        self.loading = False
        self.requests: list[tuple[list[int], int, int]] = []
        self._cut = threading.Condition()
        self._cuts = 0

    def cut(self) -> None:
        with self._cut:
            self._cuts += 1
            self._cut.notify_all()

    def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> list[tuple[list[int], list[float], str]]:
        self.requests.append((prompt, options["max_tokens"], n))
        before, ids, logps = self._cuts, [], []
        while len(ids) < options["max_tokens"]:
            with self._cut:
                if self._cut.wait_for(lambda: self._cuts > before, self.seconds):
                    return [(ids, logps, "abort")] * n
            assert not self.loading, "a request ran while weights were loaded"
            ids.append(len(prompt) + len(ids))
            logps.append(float(self.version or 0))
        return [(ids, logps, "length")] * n

    def load(self, version: int) -> None:
        self.loading = True
        time.sleep(0.005)
        self.version, self.loading = version, False


@pytest.mark.parametrize("cuts", [True, False])
def test_every_token_is_of_the_version_that_it_is_labelled_with(cuts: bool) -> None:
    server = Slow()
    flight = Flight(server, on_sync="continue" if cuts else "finish", workers=4)
    futures = [flight.submit([7] * (1 + i), OPTIONS, 2) for i in range(6)]
    for version in (1, 2, 3):
        time.sleep(0.012)
        flight.hold()
        server.load(version)
        flight.release()
    crossing = 0
    for i, future in enumerate(futures):
        responses = future.result(timeout=10)
        assert len(responses) == 2
        for response in responses:
            assert response.token_ids == list(range(1 + i, 13 + i))  # goes on where it was cut
            assert response.logps == [float(version) for version in response.versions]
            crossing += len(set(response.versions)) > 1
    assert (crossing > 0) is cuts
    flight.close()


def test_the_rest_is_asked_for_with_what_is_there_as_prompt() -> None:
    server = Slow(seconds=0.01)
    flight = Flight(server, on_sync="continue", workers=2)
    future = flight.submit([1, 2], OPTIONS, 2)
    time.sleep(0.035)
    flight.hold()
    flight.release()
    (response, _) = future.result(timeout=10)
    cut = len(response.parts[0].token_ids)

    assert server.requests[0] == ([1, 2], 12, 2)
    assert sorted(server.requests[1:]) == [([1, 2, *response.token_ids[:cut]], 12 - cut, 1)] * 2
    flight.close()


def test_older_prompts_go_first_and_one_worker_is_enough() -> None:
    server = Slow(seconds=0.0005)
    flight = Flight(server, on_sync="continue", workers=1)
    futures = [flight.submit([i], OPTIONS, 1) for i in range(4)]
    flight.hold()
    flight.release()
    for future in futures:
        future.result(timeout=10)

    new = [prompt for prompt, limit, _ in server.requests if limit == 12]
    assert new == [[0], [0], [1], [2], [3]] or new == [[0], [1], [2], [3]]
    flight.close()


def test_an_error_of_a_request_is_one_of_its_rows_alone() -> None:
    class Broken(Slow):
        def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> Any:
            if prompt == [1]:
                raise EngineError("gone")
            return super().parts(prompt, options, n)

    flight = Flight(Broken(seconds=0.0), on_sync="finish")
    futures = [flight.submit([i], OPTIONS, 1) for i in range(3)]
    flight.hold()  # returns all the same

    assert [future.exception() is None for future in futures] == [True, False, True]
    with pytest.raises(EngineError, match=r"^gone"):
        futures[1].result()


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_server_that_ends_every_request_is_not_asked_for_ever(tokens: int) -> None:
    """One that gives a token each time is slow, but gets there."""

    class Paused(Slow):
        def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> Any:
            self.requests.append((prompt, options["max_tokens"], n))
            return [([1] * tokens, [0.0] * tokens, "abort")] * n

    server = Paused()
    flight = Flight(server, on_sync="finish")
    future = flight.submit([1], {"max_tokens": 200}, 1)
    if tokens:
        assert len(future.result(timeout=10)[0].token_ids) == len(server.requests) == 200
    else:
        with pytest.raises(EngineError, match=r"^the server must sample, but it ended 100 requests .* in a row"):
            future.result(timeout=10)
        assert len(server.requests) == 100
    flight.close()


def test_closing_gives_up_what_is_in_flight() -> None:
    flight = Flight(Slow(seconds=0.5), on_sync="continue", workers=1)
    futures = [flight.submit([i], OPTIONS, 1) for i in range(3)]
    time.sleep(0.02)
    start = time.monotonic()
    flight.close()

    for future in futures:
        with pytest.raises(EngineError, match=r"^Sampling ahead has ended"):
            future.result(timeout=1)
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("can_cut", [True, False])
def test_dropped_requests_end_and_new_ones_go_on(can_cut: bool) -> None:
    class Stubborn(Slow):
        def cut(self) -> None:
            if can_cut:
                super().cut()

    server = Stubborn(seconds=0.01)
    flight = Flight(server, on_sync="continue" if can_cut else "finish", workers=1)
    old = [flight.submit([i], OPTIONS, 2) for i in range(3)]
    while not server.requests:
        time.sleep(0.001)
    flight.drop()
    for future in old:
        with pytest.raises(EngineError, match=r"^The request was dropped"):
            future.result(timeout=1)
    flight.hold()  # waits for one that the server cannot cut
    server.load(1)
    flight.release()
    (response,) = flight.submit([9], OPTIONS, 1).result(timeout=10)
    assert set(response.versions) == {1}
    assert [prompt for prompt, _, _ in server.requests] == [[0], [9]]  # what waited is not asked for, nor a rest
    flight.close()


def test_requests_run_at_once() -> None:
    """None of forty is answered before all have begun."""

    class Together(Slow):
        def parts(self, *_: Any, **__: Any) -> list[tuple[list[int], list[float], str]]:
            begun.wait(60)
            return [([1], [-0.5], "stop")]

    begun = threading.Barrier(40)
    flight = Flight(Together(), on_sync="finish")
    futures = [flight.submit([i], {"max_tokens": 10}, 1) for i in range(40)]

    assert [future.result(timeout=90)[0].token_ids for future in futures] == [[1]] * 40
    flight.close()


def test_requests_that_keep_their_version_are_left_alone_and_new_ones_wait() -> None:
    """Those in flight at a sync end with the version that they began with; one behind them begins with the new one."""

    class Several(Slow):
        def serve_several(self, in_use: Any) -> None: ...

        def parts(
            self, prompt: list[int], options: dict[str, Any], n: int, *, version: int | None = None
        ) -> list[tuple[list[int], list[float], str]]:
            started.release()
            assert go_on.wait(10)
            assert not (self.loading and version == self.version)
            return [([1], [float(version or 0)], "stop")] * n

    started, go_on, server = threading.Semaphore(0), threading.Event(), Several()
    flight = Flight(server, on_sync="keep", workers=2)
    futures = [flight.submit([7], OPTIONS, 1) for _ in range(3)]
    for _ in range(2):
        assert started.acquire(timeout=10)
    flight.hold()
    assert flight.versions() == {0}
    assert not any(future.done() for future in futures)
    server.load(1)
    flight.release()
    go_on.set()

    versions = [future.result(timeout=10)[0].versions for future in futures]
    assert versions == [[0], [0], [1]]
    assert [future.result()[0].logps for future in futures] == [[0.0], [0.0], [1.0]]
    assert flight.versions() == frozenset()
    flight.close()


def turns(prompt: list[int], count: int, pause: float) -> Any:
    """A rollout of ``count`` turns, each of which goes on from the one before after a pause; its responses."""

    def rollout(submit: Any) -> list[Any]:
        context, found = list(prompt), []
        for _ in range(count):
            (response,) = submit(context, {"max_tokens": 4}, 1).result(timeout=10)
            found.append(response)
            context += [*response.token_ids, 0]
            time.sleep(pause)  # a tool
        return found

    return rollout


@pytest.mark.parametrize("on_sync", ["continue", "finish"])
def test_a_sync_waits_for_whole_rollouts_or_cuts_what_they_ask_for(on_sync: Any) -> None:
    server = Slow()
    flight = Flight(server, on_sync=on_sync, workers=4)
    futures = [flight.run(turns([7] * (1 + i), 4, 0.004)) for i in range(5)]
    for version in (1, 2):
        time.sleep(0.012)
        flight.hold()
        assert on_sync == "continue" or all(future.done() for future in futures)
        server.load(version)
        flight.release()
    several = 0
    for i, future in enumerate(futures):
        found = future.result(timeout=10)
        assert [len(response.token_ids) for response in found] == [4] * 4
        assert found[1].token_ids[0] == 1 + i + 5  # after the first turn and the tool's answer
        versions = [version for response in found for version in response.versions]
        assert [float(version) for version in versions] == [value for response in found for value in response.logps]
        assert versions == sorted(versions)
        several += len(set(versions)) > 1
    assert (several > 0) is (on_sync == "continue")
    flight.close()


def test_turns_of_a_rollout_that_keep_their_version_begin_with_that_of_then() -> None:
    class Several(Slow):
        def serve_several(self, in_use: Any) -> None: ...

        def parts(self, prompt: list[int], options: dict[str, Any], n: int, *, version: int) -> Any:
            started.release()
            assert go_on.wait(10)
            return [([1], [float(version)], "stop")] * n

    started, go_on, server = threading.Semaphore(0), threading.Event(), Several()
    flight = Flight(server, on_sync="keep", workers=2)
    future = flight.run(turns([7], 3, 0.0))
    assert started.acquire(timeout=10)
    flight.hold()
    server.load(1)
    flight.release()
    go_on.set()

    assert [response.versions for response in future.result(timeout=10)] == [[0], [1], [1]]
    flight.close()


def test_an_error_of_a_rollout_is_its_result() -> None:
    def broken(submit: Any) -> None:
        submit([1], OPTIONS, 1).result(timeout=10)
        raise KeyError("word")

    flight = Flight(Slow(), on_sync="finish")
    future = flight.run(broken)
    flight.hold()  # returns all the same
    with pytest.raises(KeyError, match="word"):
        future.result(timeout=1)
    flight.close()


@pytest.mark.parametrize(("end", "said"), [(Flight.drop, "The request was dropped"), (Flight.close, "has ended")])
def test_a_rollout_that_is_given_up_asks_for_nothing_more(end: Any, said: str) -> None:
    """Also if its tool runs at that time, and answers later."""
    calls, answered = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def rollout(submit: Any) -> None:
        submit([1], {"max_tokens": 1}, 1).result(timeout=10)
        calls.set()
        assert answered.wait(10)
        try:
            submit([1, 2], {"max_tokens": 1}, 1)
        except EngineError as error:
            raised.append(error)
            raise

    server = Slow()
    flight = Flight(server, on_sync="finish")
    future = flight.run(rollout)
    assert calls.wait(10)
    end(flight)
    with pytest.raises(EngineError, match=said):
        future.result(timeout=1)
    answered.set()
    while not raised:
        time.sleep(0.001)
    assert said in str(raised[0]) and [prompt for prompt, _, _ in server.requests] == [[1]]
    flight.close()


def test_later_turns_go_before_prompts_that_were_asked_for_after_them() -> None:
    server = Slow(seconds=0.0005)
    flight = Flight(server, on_sync="finish", workers=1)
    first = flight.run(turns([7], 2, 0.0))
    while not server.requests:
        time.sleep(0.001)
    others = [flight.submit([i], {"max_tokens": 40}, 1) for i in range(4)]
    first.result(timeout=10)
    assert not others[-1].done()
    for future in others:
        future.result(timeout=10)
    flight.close()
