"""The clock of a training step, with a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl_offpolicy.rollouts import clock as clock_module
from trl_offpolicy.rollouts.clock import PARTS, TIME_METRICS, StepClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moved = [100.0]
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: moved[0]))
    return moved


def test_a_part_inside_another_is_counted_once(now: list[float]) -> None:
    clock = StepClock()
    with clock.part("scoring"):
        now[0] += 1.0
        with clock.part("generation"):
            now[0] += 4.0
            clock.spend("sync", 3.0)
        with clock.part("rewards"):
            now[0] += 2.0
    now[0] += 5.0
    spent = {"generation": 1.0, "sync": 3.0, "rewards": 2.0, "scoring": 1.0, "learning": 5.0}
    expected = dict.fromkeys(TIME_METRICS, 0.0) | spent
    assert clock.close(12.0, steps=1) == expected


def test_the_means_are_by_step_and_the_next_window_begins_anew(now: list[float]) -> None:
    clock = StepClock()
    with clock.part("generation"):
        now[0] += 6.0
    assert clock.close(10.0, steps=4)["generation"] == 1.5
    assert clock.close(10.0, steps=2) == {**dict.fromkeys(PARTS, 0.0), "learning": 5.0}


def test_a_part_that_fails_is_counted_and_closed(now: list[float]) -> None:
    clock = StepClock()
    with pytest.raises(RuntimeError), clock.part("scoring"), clock.part("rewards"):
        now[0] += 2.0
        raise RuntimeError
    with clock.part("scoring"):
        now[0] += 1.0
    expected = dict.fromkeys(TIME_METRICS, 0.0) | {"rewards": 2.0, "scoring": 1.0}
    assert clock.close(3.0, steps=1) == pytest.approx(expected)


def test_what_is_no_part_of_a_training_step_is_not_counted(now: list[float]) -> None:
    clock = StepClock()
    with clock.part("generation", counted=False):
        now[0] += 7.0
    assert clock.close(1.0, steps=1) == {**dict.fromkeys(PARTS, 0.0), "learning": 1.0}


def test_a_function_and_what_begins_and_ends_are_counted(now: list[float]) -> None:
    clock = StepClock()

    def backward(seconds: float) -> float:
        now[0] += seconds
        return seconds

    assert clock.timed("backward", backward)(3.0) == 3.0
    clock.begin("correction")
    backward(1.0)
    clock.end("correction")
    found = clock.close(6.0, steps=1)
    assert (found["backward"], found["correction"], found["learning"]) == (3.0, 1.0, 2.0)
