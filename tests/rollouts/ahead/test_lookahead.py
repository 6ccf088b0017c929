"""Items come once each, in order, whatever was looked at before."""

from __future__ import annotations

import random

import pytest

from trl_offpolicy.rollouts.ahead.lookahead import Lookahead, positions_ahead


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
