"""The queue between a server and a trainer: what is asked for when, whose row is whose, errors on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import two_ranks

from trl_offpolicy.engines.engine import EngineError, Sampling
from trl_offpolicy.rollouts.ahead.queue import Landed, RolloutsAhead
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings

N = 2  # responses per prompt


class Scripted:
    """Answers prompt [p] with tokens 10 p, 10 p + 1, ... in the order of its responses; it may fail or be cut."""

    can_cut = True

    def __init__(self, *, fails_at: int | None = None, free: int = 99) -> None:
        self.version: int | None = 0
        self.fails_at, self.free = fails_at, free
        self.asked: list[int] = []
        self.waiting, self.was_cut = threading.Event(), threading.Event()

    def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> list[tuple[list[int], list[float], str]]:
        if n == N:
            self.asked.append(prompt[0])
        if prompt[0] == self.fails_at:
            raise OSError("gone")
        if n == N and prompt[0] >= self.free and not self.was_cut.is_set():
            self.waiting.set()
            assert self.was_cut.wait(20)
            return [([7], [-0.7], "abort")] * n
        first = 10 * prompt[0]
        return [([first + i], [-0.1 * first - i], "stop") for i in range(n)]

    def cut(self) -> None:
        self.was_cut.set()


class Trainer:
    """Learns from generation batches of ``size`` prompts over all ranks, one version a batch."""

    def __init__(self, settings: Any, server: Any, *, batches: int = 5, rank: int = 0, ranks: int = 1) -> None:
        self.version, self.batches, self.rank, self.ranks = 0, batches, rank, ranks
        parsed = AsyncSettings.parse(settings)
        assert parsed is not None
        self.queue = RolloutsAhead(parsed, rank=rank, version=lambda: self.version)
        self.server = server if rank == 0 else None
        self.queue.start(self.server)
        self.admitted = parsed.lag + 1

    def prompts(self, number: int) -> list[list[int]]:
        """Of this rank: one prompt in each batch, for each of its responses."""
        return [[1 + number * self.ranks + self.rank]] * N

    def upcoming(self, first: int, end: int) -> Iterator[list[list[int]]]:
        return (self.prompts(self.version + k) for k in range(first, min(end, self.batches - self.version)))

    def step(self, prompts: list[list[int]] | None = None) -> Landed:
        with self.queue.quiet():
            if self.server is not None:
                self.server.version = self.version
        asked = self.prompts(self.version) if prompts is None else prompts
        options = {"max_tokens": 9}
        landed = self.queue.take(asked, upcoming=self.upcoming, admitted=self.admitted, options=lambda: options, n=N)
        self.version += 1
        return landed


def test_a_server_is_told_of_the_versions_in_use_while_a_run_keeps_several() -> None:
    """A run after it, which does not, syncs as ever."""

    class Several(Scripted):
        in_use: Any = None

        def serve_several(self, in_use: Any) -> None:
            self.in_use = in_use

    server = Several()
    trainer = Trainer({"lag": 2, "partial": "keep"}, server)
    assert server.in_use() == frozenset()
    trainer.queue.close()
    assert server.in_use is None


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_each_batch_once_in_order_at_most_lag_versions_old(lag: int) -> None:
    trainer = Trainer({"lag": lag, "partial": "finish"}, Scripted())
    for number in range(5):
        rollouts, waited = trainer.step()
        assert rollouts.prompt_ids == [[1 + number]] * N
        assert rollouts.completion_ids == [[10 + 10 * number], [11 + 10 * number]]
        assert rollouts.policy_versions == [[max(0, number - lag)]] * N
        assert rollouts.finish_reasons == ["stop"] * N and waited >= 0
        assert trainer.queue.oldest_version == (max(0, number + 1 - lag) if lag and number < 4 else number + 1)
    assert sorted(trainer.server.asked) == [1, 2, 3, 4, 5]  # nothing for after the end
    trainer.queue.close()


class Wide(Trainer):
    """Three prompts in a batch; each is told by the batch and its place in it."""

    def prompts(self, number: int) -> list[list[int]]:
        return [[1 + 3 * number + place] for place in range(3) for _ in range(N)]


@pytest.mark.parametrize(("alpha", "early"), [(0.5, 1), (0.7, 2), (1.5, 1), (2.34, 1), (2.0, 0)])
def test_no_sample_is_older_than_the_ratio_and_no_more_than_its_share_is_in_flight(alpha: float, early: int) -> None:
    """Counted by hand: of each batch the first ``early`` prompts are asked for a generation before the others."""
    trainer = Wide({"lag": alpha, "partial": "finish"}, Scripted(), batches=7)
    trainer.admitted = 1 + alpha
    flight, asked = trainer.queue._flight, []
    submit = flight.submit

    def submitting(prompt: Any, *rest: Any) -> Any:
        asked.append(prompt[0])
        return submit(prompt, *rest)

    flight.submit = submitting
    floor = int(alpha)
    for number in range(7):
        rollouts, _ = trainer.step()
        gaps = [number - row[0] for row in rollouts.policy_versions]
        lags = [min(number, floor + 1 if place < early else floor) for place in range(3) for _ in range(N)]
        assert gaps == lags and max(gaps) <= -(-alpha // 1)
        assert rollouts.completion_ids == [[10 * (1 + 3 * number + place) + i] for place in range(3) for i in range(N)]
        unused = len(asked) - 3 * number  # this batch among them
        assert unused == min(3 * (1 + floor) + early, 3 * (7 - number)) <= 3 * (1 + alpha)
    assert asked == list(range(1, 22))  # in order, each once, nothing after the end
    trainer.queue.close()


def test_a_cut_response_goes_on_under_the_new_weights() -> None:
    trainer = Trainer({"lag": 1, "partial": "continue"}, Scripted(free=2))
    trainer.step()
    assert trainer.server.waiting.wait(20)
    rollouts, waited = trainer.step()  # prompt 2 was in flight at the sync

    assert [row[0] for row in rollouts.completion_ids] == [7, 7]
    assert rollouts.policy_versions == [[0, 1]] * N
    assert waited > 0
    trainer.queue.close()


def test_other_prompts_than_those_looked_ahead_to_are_an_error() -> None:
    trainer = Trainer(1, Scripted())
    trainer.step()
    with pytest.raises(EngineError, match="asks for other prompts than those that were looked ahead to"):
        trainer.step([[99]] * N)


def test_a_closed_queue_starts_empty() -> None:
    trainer = Trainer({"lag": 2, "partial": "finish"}, Scripted())
    trainer.step()
    trainer.queue.start(trainer.server)

    assert trainer.step().rollouts.policy_versions == [[1]] * N  # asked for again, at the weights of now
    trainer.queue.close()


def test_what_is_dropped_is_asked_for_again() -> None:
    trainer = Trainer({"lag": 2, "partial": "finish"}, Scripted())
    trainer.queue.drop()  # nothing yet
    trainer.step()
    trainer.queue.drop()
    assert trainer.queue.oldest_version == 1

    versions = [trainer.step().rollouts.policy_versions for _ in range(4)]
    assert versions == [[[1]] * N, [[1]] * N, [[1]] * N, [[2]] * N]  # lag 0, 1, 2, 2: as in a new run
    trainer.queue.close()


class Agents(Trainer):
    """Each rank samples a batch of its own, of two turns; the second one begins where the first one ended."""

    def upcoming(self, first: int, end: int) -> Iterator[Any]:
        return (self.sampler(self.version + k) for k in range(first, min(end, self.batches - self.version)))

    def sampler(self, number: int) -> Any:
        def sample(engine: Any) -> Any:
            one = engine.generate([self.prompts(number)[0]], Sampling(max_tokens=9), n=N)
            if self.rank == self.fails and number == 1:
                raise KeyError("word")
            assert engine.version is not None and len(engine.generate(one.completion_ids, Sampling(max_tokens=9))) == N
            return one

        return sample

    def step(self, prompts: Any = None) -> Any:
        with self.queue.quiet():
            self.synced.append(self.busy())
            self.server.version = self.version
        found, self.waited = self.queue.take_sampled(upcoming=self.upcoming, admitted=self.admitted)
        self.version += 1
        return found

    def busy(self) -> bool:
        return bool(self.queue._flight._running.total())


def agents(settings: Any, *, rank: int = 0, ranks: int = 1, fails: int | None = None) -> Agents:
    trainer = Agents(settings, Scripted(), rank=rank, ranks=ranks)
    trainer.fails, trainer.synced, trainer.server = fails, [], Scripted()
    trainer.queue.start(trainer.server)  # of every rank
    return trainer


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_batches_of_agents_are_sampled_as_a_whole(lag: int) -> None:
    trainer = agents({"lag": lag, "partial": "finish"})
    for number in range(5):
        found = trainer.step()
        assert found.prompt_ids == [[1 + number]] * N
        assert found.completion_ids == [[10 + 10 * number], [11 + 10 * number]]
        assert found.policy_versions == [[max(0, number - lag)]] * N and trainer.waited >= 0
        assert len(trainer.queue) == min(lag, 4 - number)
    assert trainer.synced == [False] * 5
    trainer.queue.close()


def run(rank: int) -> dict[str, Any]:
    """Two ranks share a server: each gets its rows, and an error of the main rank's requests."""
    trainer = Trainer(1, Scripted(), rank=rank, ranks=2, batches=3)
    seen = [trainer.step().rollouts for _ in range(3)]
    trainer.queue.close()
    failing = Trainer(1, Scripted(fails_at=3), rank=rank, ranks=2, batches=3)
    failing.step()
    try:
        failing.step()
    except EngineError as error:
        message = str(error)
    other = Trainer(1, Scripted(), rank=rank, ranks=2, batches=3)
    try:
        other.step(None if rank == 0 else [[99]] * N)  # rank 1 alone asks for something else
    except EngineError as error:
        mixed = str(error)
    own = agents(1, rank=rank, ranks=2)
    episodes = [own.step() for _ in range(3)]
    broken = agents(1, rank=rank, ranks=2, fails=1)
    broken.step()
    try:
        broken.step()
    except EngineError as error:
        tool = str(error)
    return {
        "episodes": [one.prompt_ids for one in episodes],
        "tool": tool,
        "prompts": [one.prompt_ids for one in seen],
        "ids": [one.completion_ids for one in seen],
        "versions": [one.policy_versions for one in seen],
        "failed": message,
        "mixed": mixed,
    }


@pytest.mark.integration
def test_two_ranks_share_the_server_and_its_errors(tmp_path: Any) -> None:
    for rank, seen in enumerate(two_ranks.launch(__file__, run, tmp_path)):
        numbers = [1 + 2 * step + rank for step in range(3)]
        assert seen["prompts"] == [[[number]] * N for number in numbers]
        assert seen["ids"] == [[[10 * number], [10 * number + 1]] for number in numbers]
        assert seen["versions"] == [[[0]] * N, [[0]] * N, [[1]] * N]
        assert seen["failed"] == "A rollout could not be sampled: OSError: gone"
        assert "other prompts" in seen["mixed"]
        assert seen["episodes"] == [[[number]] * N for number in numbers]
        assert seen["tool"] == "A rollout could not be sampled: KeyError: 'word'"  # of rank 1


if __name__ == "__main__":
    two_ranks.join(run)
