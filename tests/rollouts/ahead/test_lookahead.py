"""Items come once each, in order, whatever was looked at before."""

from __future__ import annotations

import random

import pytest

from trl_offpolicy.rollouts.ahead.lookahead import Lookahead, generations_admitted, positions_ahead


@pytest.mark.parametrize("seed", range(5))
def test_looking_ahead_changes_nothing(seed: int) -> None:
    draw, items, taken = random.Random(seed), Lookahead(iter(range(23))), []
    while True:
        items.forget()
        first = len(taken)
        for _ in range(draw.randint(1, 4)):
            position = draw.randint(0, 12)
            expected = first + position
            assert items.at(position) == (expected if expected < 23 else None)
            if (item := next(items, None)) is None:
                assert taken == list(range(23))
                return
            taken.append(item)


def test_items_of_this_step_are_still_there() -> None:
    items = Lookahead(iter("abcde"))
    items.forget()
    assert [next(items), next(items)] == ["a", "b"]

    assert [items.at(position) for position in range(6)] == ["a", "b", "c", "d", "e", None]
    items.forget()
    assert items.at(0) == "c"


def test_nothing_is_read_before_it_is_asked_for() -> None:
    read = []
    items = Lookahead(read.append(i) or i for i in range(9))

    assert items.at(3) == 3
    assert read == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("position", "every", "count", "left", "expected"),
    [
        (0, 2, 3, 100, [0, 2, 4]),
        (1, 2, 2, 100, [1, 3]),
        (0, 2, 4, 5, [0, 2, 4]),  # the generation at 6 would be after the end
        (0, 2, 4, 4, [0, 2]),
        (0, 4, 3, 1, [0]),
        (0, 1, 1, 9, [0]),
    ],
)
def test_positions_of_generations(position: int, every: int, count: int, left: int, expected: list[int]) -> None:
    assert positions_ahead(position=position, every=every, count=count, left=left) == expected


def test_a_fraction_of_a_lag_admits_this_part_of_its_batches() -> None:
    one, four = {"every": 4, "in_step": 4, "accumulation": 4}, {"every": 1, "in_step": 3, "accumulation": 4}
    assert [generations_admitted(lag=lag, **one) for lag in (0.25, 1.0, 2.75)] == [1.25, 2, 3.75]
    # of a step of four generations one is learned from; the next step's four are admitted by their share
    assert [generations_admitted(lag=lag, **four) for lag in (0, 0.25, 0.5, 1, 1.5)] == [3, 4, 5, 7, 9]


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(("every", "accumulation"), [(1, 1), (4, 4), (8, 4), (1, 4), (2, 4), (3, 4), (4, 6)])
def test_admitted_is_what_stays_within_the_lag(lag: int, every: int, accumulation: int) -> None:
    """Counted out: a generation may be requested if it is at most ``lag`` generations or optimizer steps away."""
    for position in range(0, 2 * accumulation * every, every):  # micro-batches since the start, at a generation
        in_step = accumulation - position % accumulation
        admitted = generations_admitted(lag=lag, every=every, in_step=in_step, accumulation=accumulation)
        steps_away = [(position + k * every) // accumulation - position // accumulation for k in range(40)]
        assert admitted == sum(k <= lag or away <= lag for k, away in enumerate(steps_away))
