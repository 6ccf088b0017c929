"""Which records of an engine's routing reach to the last sampled token, and what is said of one that does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trl_offpolicy.engines.routing.reported import EngineRoutes
from trl_offpolicy.rollouts.routing import check_turns

# prompt of two tokens after one of padding; turns of 2, 1 and 2 tokens, a tool's text of one token after each, padding
PROMPT, COMPLETION = [0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]
SAMPLED = [1, 1, 0, 1, 0, 1, 1, 0, 1]


def rows(sampled: list[int] | None = None) -> dict[str, Tensor]:
    """Two rows alike."""
    given = {"prompt_mask": PROMPT, "completion_mask": COMPLETION, "tool_mask": sampled or SAMPLED}
    found = {name: torch.tensor([value] * 2) for name, value in given.items()}
    return {**found, "prompt_ids": torch.zeros(2, 3, dtype=torch.long)}


def record(fed: int) -> EngineRoutes:
    return EngineRoutes(tuple(range(fed)), torch.zeros(fed, 1, 1))


@pytest.mark.parametrize(
    ("fed", "turn"),
    # fed tokens: the prompt's two, then those of the completion; the last sampled token is number 8 of all, from 0
    [(2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 3), (8, None), (9, None), (10, None)],
)
def test_a_record_that_ends_before_a_sampled_token_names_its_turn(fed: int, turn: int | None) -> None:
    found = [record(9), record(fed)]
    if turn is None:
        check_turns(rows(), found)
        return
    with pytest.raises(ValueError, match=rf"but got {fed} of 8 tokens for turn {turn} of completion 1\."):
        check_turns(rows(), found)


def test_rows_without_a_sampled_token_or_a_record_are_left_to_others() -> None:
    check_turns(rows([0] * 9), [record(2), None])
