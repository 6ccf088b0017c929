"""The buffer on disk: what was added is there again, also after a kill; bounds; draws."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_offpolicy.rollouts.replay import AgeDecay, ReplayBuffer, ReplayGroup, Response

RNG = np.random.default_rng


def group(number: int, *, version: int = 0, responses: int = 2, length: int = 3, priority: float = 1.0) -> ReplayGroup:
    return ReplayGroup(
        prompt_ids=(number, 7),
        responses=tuple(
            Response(
                completion_ids=tuple(range(length)),
                sampling_logps=tuple(-0.5 * place for place in range(length)),
                policy_versions=(version,) * length,
                reward=float(one),
            )
            for one in range(responses)
        ),
        group_id=number,
        priority=priority,
    )


def ids(buffer: ReplayBuffer) -> list[int]:
    return [entry.group_id for entry in buffer.entries]


def reopened(buffer: ReplayBuffer) -> ReplayBuffer:
    buffer.close()
    return ReplayBuffer(buffer.folder, max_rows=buffer.max_rows, max_bytes=buffer.max_bytes, decay=buffer.decay)


FULL = Response(
    completion_ids=(5, 6),
    sampling_logps=(-0.125, -2.5),
    policy_versions=(3, 4),
    completion_mask=(True, False),
    old_logps=(-0.25, -3.0),
    kept_ids=((5, 7), ()),
    reward=0.75,
)
BARE = Response(completion_ids=(9,), sampling_logps=(-1.0,), policy_versions=(4,), reward=1.0)


def test_a_group_comes_back_as_it_was(tmp_path: Path) -> None:
    stored = ReplayGroup(prompt_ids=(1, 2, 3), responses=(FULL, BARE), group_id=11, priority=2.5)
    buffer = ReplayBuffer(tmp_path, max_rows=10)
    buffer.add([group(0, version=9), stored])
    for again in (buffer, reopened(buffer)):
        drawn = again.sample(2, current_version=9, rng=RNG(0))
        assert set(drawn.groups) == {group(0, version=9), stored}
        assert drawn.lags[drawn.groups.index(stored)] == 6  # its oldest token
        assert (len(again), again.rows, again.bytes) == (
            2,
            4,
            sum(p.stat().st_size for p in tmp_path.glob("*.parquet")),
        )


def test_missing_rewards_and_logps_stay_missing(tmp_path: Path) -> None:
    response = Response(completion_ids=(1,), sampling_logps=(math.nan,), policy_versions=(0,), reward=math.nan)
    buffer = ReplayBuffer(tmp_path, max_rows=10)
    buffer.add([ReplayGroup(prompt_ids=(), responses=(response,), group_id=0)])
    (back,) = buffer.sample(1, current_version=0, rng=RNG(0)).groups[0].responses
    assert math.isnan(back.reward) and math.isnan(back.sampling_logps[0]) and back.old_logps is None


def test_nothing_is_pickled(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, max_rows=10)
    buffer.add([group(0)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "part-000000000000.parquet"]
    assert pq.read_table(tmp_path / "part-000000000000.parquet").num_rows == 2


def test_the_oldest_parts_make_room_for_rows(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, max_rows=6)
    for number in range(5):
        buffer.add([group(number)])
    assert ids(buffer) == [2, 3, 4] and buffer.rows == 6
    assert ids(reopened(buffer)) == [2, 3, 4]
    with pytest.raises(ValueError, match="max_rows = 6 responses, but got 8"):
        buffer.add([group(9, responses=8)])
    assert ids(buffer) == [2, 3, 4]


def test_bytes_are_bounded_on_disk(tmp_path: Path) -> None:
    one = ReplayBuffer(tmp_path / "one", max_rows=99)
    one.add([group(0)])
    buffer = ReplayBuffer(tmp_path / "many", max_bytes=3 * one.bytes + 10)
    for number in range(8):
        buffer.add([group(number)])
        on_disk = sum(path.stat().st_size for path in buffer.folder.glob("*.parquet"))
        assert buffer.bytes == on_disk <= 3 * one.bytes + 10
    assert ids(buffer) == [5, 6, 7]
    ids_of_noise = tuple(RNG(0).integers(0, 2**40, 5000).tolist())
    noise = replace(BARE, completion_ids=ids_of_noise, sampling_logps=(-1.0,) * 5000, policy_versions=(0,) * 5000)
    with pytest.raises(ValueError, match=r"max_bytes = \d+ on disk, but got \d+"):
        buffer.add([replace(group(9), responses=(noise,))])
    assert ids(buffer) == [5, 6, 7] and not list(buffer.folder.glob(".part*"))


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, max_rows=10)
    for number in range(4):
        buffer.add([group(number)])
    buffer.close()
    assert ids(ReplayBuffer(tmp_path, max_rows=4)) == [2, 3]


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), bound=st.integers(5, 12))
def test_the_newest_groups_stay_whatever_is_added(
    sizes: list[int], bound: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As many of the newest additions as fit, no more and no fewer; the same after a restart."""
    buffer = ReplayBuffer(tmp_path_factory.mktemp("buffer"), max_rows=bound)
    for number, size in enumerate(sizes):
        buffer.add([group(number, responses=size)])
    expected = [n for n in range(len(sizes)) if sum(sizes[n:]) <= bound]
    assert ids(buffer) == expected == ids(reopened(buffer))


def test_fresh_groups_are_drawn_more_often(tmp_path: Path) -> None:
    """Ages 0 and 4 at a half-life of 4: two to one. With a priority of two for the older one: even."""
    buffer = ReplayBuffer(tmp_path, max_rows=100, decay=AgeDecay(rate=math.log(2) / 4))
    buffer.add([group(0, version=6, responses=1), group(1, version=10, responses=1)])
    rng = RNG(1)
    drawn = [buffer.sample(1, current_version=10, rng=rng).groups[0].group_id for _ in range(1500)]
    assert np.mean(drawn) == pytest.approx(2 / 3, abs=0.04)


def test_too_old_groups_can_be_left_out(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, max_rows=100)
    buffer.add([group(number, version=number) for number in range(6)])
    drawn = buffer.sample(3, current_version=6, rng=RNG(0), max_lag=3)
    assert sorted(one.group_id for one in drawn.groups) == [3, 4, 5] and sorted(drawn.lags) == [1, 2, 3]
    with pytest.raises(ValueError, match="from 1 to 3, the groups there are, but got 4"):
        buffer.sample(4, current_version=6, rng=RNG(0), max_lag=3)
    assert len(buffer) == 6


def test_groups_of_one_size_can_be_drawn_alone(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, max_rows=100)
    buffer.add([group(number, responses=responses) for number, responses in enumerate((2, 4, 2, 8, 4))])
    assert [buffer.available(current_version=0, responses=size) for size in (2, 3, 4, 8, None)] == [2, 0, 2, 1, 5]
    drawn = buffer.sample(2, current_version=0, rng=RNG(0), responses=4)
    assert sorted(one.group_id for one in drawn.groups) == [1, 4]
    with pytest.raises(ValueError, match="3"):
        buffer.sample(3, current_version=0, rng=RNG(0), responses=4)


def test_groups_from_after_the_checkpoint_wait(tmp_path: Path) -> None:
    """A run at version 9 is killed and resumed from version 4."""
    buffer = ReplayBuffer(tmp_path, max_rows=100)
    buffer.add([group(number, version=number) for number in (3, 4, 5, 9)])
    resumed = reopened(buffer)
    assert [resumed.available(current_version=now) for now in (2, 4, 8, 9)] == [0, 2, 3, 4]
    assert {one.group_id for one in resumed.sample(2, current_version=4, rng=RNG(0)).groups} == {3, 4}


def test_an_unreadable_part_is_left_out_with_a_warning(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, max_rows=100)
    buffer.add([group(0)])
    buffer.add([group(1)])
    buffer.close()
    first = tmp_path / "part-000000000000.parquet"
    first.write_bytes(first.read_bytes()[:50])
    with pytest.warns(UserWarning, match="part-000000000000.parquet is left out"):
        again = ReplayBuffer(tmp_path, max_rows=100)
    assert ids(again) == [1]
    again.add([group(2)])
    assert ids(again) == [1, 2]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, max_rows=10)
    with pytest.raises(BlockingIOError, match="must not be open in another process"):
        ReplayBuffer(tmp_path, max_rows=10)
    buffer.close()
    ReplayBuffer(tmp_path, max_rows=10).close()


@pytest.mark.parametrize(
    ("bounds", "message"),
    [({}, "max_rows or max_bytes"), ({"max_rows": 0}, "positive, but got 0"), ({"max_bytes": -1}, "-1")],
)
def test_a_bound_is_needed(bounds: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(tmp_path, **bounds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling_logps": (-1.0,)}, "sampling_logps must have 2 entries, one a token, but got 1"),
        ({"policy_versions": ()}, "policy_versions must have 2 entries"),
        ({"completion_mask": (True,) * 3}, "completion_mask must have 2 entries, one a token, but got 3"),
        ({"completion_ids": ()}, "at least one token"),
    ],
)
def test_incomplete_responses_are_refused(change: dict[str, tuple[float, ...]], message: str) -> None:
    fields = {"completion_ids": (1, 2), "sampling_logps": (-1.0, -1.0), "policy_versions": (0, 0), "reward": 1.0}
    with pytest.raises(ValueError, match=message):
        Response(**{**fields, **change})


def test_incomplete_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one response"):
        ReplayGroup(prompt_ids=(1,), responses=(), group_id=0)
    for priority in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="priority must be"):
            ReplayGroup(prompt_ids=(1,), responses=(BARE,), group_id=0, priority=priority)


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_replay_buffer import group
from trl_offpolicy.rollouts.replay import ReplayBuffer
buffer = ReplayBuffer(sys.argv[1], max_rows=10**6)
for number in range(10**6):
    buffer.add([group(number, length=400, responses=8)])
    print(number, flush=True)
"""


@pytest.mark.integration
def test_a_killed_writer_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    """kill -9 while it writes: every addition that it reported is there, whole, and one more at most."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(here), str(here.parents[1])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        reported = [int(writer.stdout.readline()) for _ in range(20)]
        time.sleep(0.002)
        writer.send_signal(signal.SIGKILL)
        reported += [int(line) for line in writer.stdout.read().split()]
    assert writer.returncode == -signal.SIGKILL
    buffer = ReplayBuffer(tmp_path, max_rows=10**6)
    assert not list(tmp_path.glob(".part*"))
    found = ids(buffer)
    assert found[: len(reported)] == reported and len(found) <= len(reported) + 1
    drawn = buffer.sample(len(buffer), current_version=0, rng=RNG(0))
    assert {one.group_id for one in drawn.groups} == set(found)
    assert all(one == group(one.group_id, length=400, responses=8) for one in drawn.groups)
    buffer.add([group(10**6)])
    assert ids(buffer)[-1] == 10**6


def test_a_half_written_part_is_cleared_away(tmp_path: Path) -> None:
    ReplayBuffer(tmp_path, max_rows=10).close()
    (tmp_path / ".part-000000000000.tmp").write_bytes(b"PAR1 and no more")
    assert len(ReplayBuffer(tmp_path, max_rows=10)) == 0
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_checkpoint_brings_back_what_made_room_and_drops_what_came_later(tmp_path: Path, as_folder: bool) -> None:
    with ReplayBuffer(tmp_path, max_rows=6) as buffer:
        for number in range(3):
            buffer.add([group(number, version=number)])
        saved, before = buffer.state_dict(), buffer.entries
        buffer.save(tmp_path / "saved")
        for number in range(3, 5):
            buffer.add([group(number, version=number)])
        assert ids(buffer) == [2, 3, 4]
        if as_folder:
            buffer.load(tmp_path / "saved")
        else:
            buffer.load_state_dict(saved)
        assert buffer.entries == before and buffer.rows == 6
        buffer.add([group(9, version=9)])
        assert ids(buffer) == [1, 2, 9]
    with ReplayBuffer(tmp_path, max_rows=6) as again:
        assert ids(again) == [1, 2, 9]
        assert again.sample(3, current_version=9, rng=RNG(0)).groups


def numbers(buffer: ReplayBuffer) -> dict[int, int]:
    """The number of each group in the buffer, by its first prompt token."""
    drawn = buffer.sample(len(buffer), current_version=9, rng=RNG(0))
    return {one.prompt_ids[0]: int(number) for one, number in zip(drawn.groups, drawn.ids, strict=True)}


def test_each_group_has_a_number_of_its_own_that_no_fresh_group_has(tmp_path: Path) -> None:
    """The same at each draw, after a restart, after groups left, and beside what is added later."""
    buffer = ReplayBuffer(tmp_path, max_rows=8)
    buffer.add([group(0), group(1)])
    buffer.add([replace(group(2), group_id=0)])  # of another run, say
    first = numbers(buffer)
    assert len(set(first.values())) == 3 and max(first.values()) < 0
    buffer = reopened(buffer)
    assert numbers(buffer) == first
    saved = buffer.state_dict()
    buffer.add([group(3), group(4)])  # takes the room of groups 0 and 1
    later = numbers(buffer)
    assert later[2] == first[2] and not {later[3], later[4]} & set(first.values())
    buffer.load_state_dict(saved)
    assert numbers(buffer) == first
