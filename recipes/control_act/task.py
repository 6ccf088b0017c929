"""The task of this recipe: put ten letters into order."""

from __future__ import annotations

import random
from typing import Any

LETTERS = "abcdefghijklmnop"
LENGTH = 10
SEPARATOR = "|"


def question(draw: random.Random) -> str:
    """Ten letters and the separator, e.g. ``"f a c a p b d k a e |"``."""
    return " ".join([*draw.choices(LETTERS, k=LENGTH), SEPARATOR])


def solution(asked: str) -> str:
    """The same letters in order.

    Example:
        >>> solution("c a b |")
        'a b c'
    """
    return " ".join(sorted(asked.removesuffix(SEPARATOR).split()))


def sorted_letters(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Half the share of places that are right, and half for an answer that is right as a whole.

    Example:
        >>> sorted_letters(["a b c", "a c b"], ["a b c", "a b c"])
        [1.0, 0.16666666666666666]
    """
    rewards = []
    for said, expected in zip(completions, answer, strict=True):
        letters, wanted = said.split(), expected.split()
        right = sum(one == other for one, other in zip(letters, wanted, strict=False))
        rewards.append(0.5 * right / len(wanted) + 0.5 * (letters == wanted))
    return rewards
