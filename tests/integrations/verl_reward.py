"""A rule for verl's ``reward.custom_reward_function``: a number that the text alone determines, and that spreads."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return sum(map(ord, solution_str)) % 7 / 6
