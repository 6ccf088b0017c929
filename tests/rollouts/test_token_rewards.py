"""The column ``token_rewards``: what is read, what is refused, and its way through fillers and turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_agents import Script, ScriptedEngine, add, byte_tokenizer, later

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.rollouts.agents import Chat
from trl_offpolicy.rollouts.agents.loop import AgentEngine
from trl_offpolicy.rollouts.agents.returned import read_returned
from trl_offpolicy.rollouts.screening import Screen
from trl_offpolicy.rollouts.token_rewards import not_finite, padded_token_rewards, read_token_rewards

IDS = [[5, 6, 7], [8]]
PROMPTS = [[{"role": "user", "content": f"What is {i} + 4?"}] for i in range(8)]


def test_rows_are_padded_with_zeros() -> None:
    rows = read_token_rewards([[0.5, -1, 2.0], [1.5]], IDS, wanted=True, where="rollout_func")
    assert rows is not None
    found = padded_token_rewards(rows, torch.zeros(2, 4))
    assert found.tolist() == [[0.5, -1.0, 2.0, 0.0], [1.5, 0.0, 0.0, 0.0]] and found.dtype == torch.float32
    assert read_token_rewards(None, IDS, wanted=False, where="rollout_func") is None


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, ValueError, r"^token_rewards must be a column of what the engine returns .* but it returned none\.$"),
        (0.5, TypeError, r"^token_rewards must be a list with one list per completion, but got float\.$"),
        ([[0.0] * 3], ValueError, r"^token_rewards must have 2 lists, one for each completion, but got 1\.$"),
        (
            [[0.0] * 3, [0.0, 0.0]],
            ValueError,
            r"^token_rewards must have one number for each token of completion_ids, 1 in row 1, but got 2\.$",
        ),
        ([[0.0, 0.0, "1"], [0.0]], TypeError, r"^token_rewards must hold lists of numbers, but row 0 is \[0\.0, 0"),
        ([[0.0, 0.0, True], [0.0]], TypeError, r"^token_rewards must hold lists of numbers, but row 0 is"),
    ],
)
def test_what_is_no_column_of_rewards_is_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_token_rewards(value, IDS, wanted=True, where="engine")


def test_a_long_row_is_shown_in_part() -> None:
    whole, longer = ["x" * 76], ["x" * 77]  # 80 and 81 characters as a list
    with pytest.raises(TypeError, match=r"row 0 is \['x{76}'\]\.$"):
        read_token_rewards([whole, [0.0]], IDS, wanted=True, where="engine")
    with pytest.raises(TypeError, match=r"row 0 is \['x{75}\.\.\.\.$"):
        read_token_rewards([longer, [0.0]], IDS, wanted=True, where="engine")


def test_padded_rewards_are_float32_whatever_the_default() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert padded_token_rewards([[0.5]], torch.zeros(1, 2)).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
    assert padded_token_rewards([[0.5]], torch.zeros(1, 2, device="meta")).device.type == "meta"


def test_a_column_that_is_not_wanted_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"^token_rewards must be true to learn from .* the engine returned, but got"):
        read_token_rewards([[0.0] * 3, [0.0]], IDS, wanted=False, where="engine")


def test_a_reward_that_is_not_finite_is_named() -> None:
    assert not_finite(None) is None and not_finite([[0.0, -1.0], []]) is None
    assert not_finite([[0.0], [1.0, math.nan]]) == "token_rewards must be finite, but token 1 of row 1 has nan"


def rollouts(**changes: Any) -> Rollouts:
    fields: dict[str, Any] = {
        "prompt_ids": [[1], [1]], "completion_ids": IDS, "sampling_per_token_logps": [[-1.0] * 3, [-1.0]],
        "policy_versions": [[0] * 3, [0]], "finish_reasons": ["stop"] * 2, "token_rewards": [[1.0, 2.0, 3.0], [4.0]],
    }  # fmt: skip
    return Rollouts(**{**fields, **changes})


def test_rollouts_have_one_for_each_token() -> None:
    message = "token_rewards must have one entry for each token of completion_ids, but"
    with pytest.raises(ValueError, match=f"^{message} row 1 has 2 for 1 tokens"):
        rollouts(token_rewards=[[1.0, 2.0, 3.0], [4.0, 5.0]])
    with pytest.raises(ValueError, match=f"^{message} got 1 rows for 2 completions"):
        rollouts(token_rewards=[[1.0, 2.0, 3.0]])


def test_a_filler_has_no_reward() -> None:
    screen = Screen("drop", vocabulary=8, filler=2)  # the id 8 is none
    found = screen.rollouts(rollouts(), [[1], [1]])
    assert found.completion_ids == [[5, 6, 7], [2]] and found.token_rewards == [[1.0, 2.0, 3.0], [0.0]]
    whole = rollouts()
    only_second = Rollouts(
        **{**vars(whole), **{name: value[1:] for name, value in vars(whole).items() if isinstance(value, list)}}
    )
    fewer = Screen("drop", vocabulary=9, filler=2).rollouts(replace(only_second, prompt_ids=[[3]]), [[1], [3]])
    assert fewer.completion_ids == [[2], [8]] and fewer.token_rewards == [[0.0], [4.0]]


def test_a_rollout_function_returns_them_beside_its_columns() -> None:
    given = {"prompt_ids": [[1], [1]], "completion_ids": IDS, "logprobs": None, "token_rewards": [[1, 2, 3], [4]]}
    found = read_returned(given, rows=2, version=0)
    assert found.rollouts.token_rewards == [[1.0, 2.0, 3.0], [4.0]] and found.columns == {}
    with pytest.raises(ValueError, match=r"^token_rewards must have one number for each .*, 3 in row 0, but got 2\.$"):
        read_returned({**given, "token_rewards": [[1, 2], [4]]}, rows=2, version=0)


class Scored(ScriptedEngine):
    """An engine that rewards each token by its id."""

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        found = super().generate(prompt_ids, sampling, n=n)
        return replace(found, token_rewards=[[float(token) for token in row] for row in found.completion_ids])


@pytest.mark.parametrize("length", [600, 230, 60])  # the shorter ones cut turns
def test_turns_keep_their_rewards_and_tool_output_has_none(length: int) -> None:
    chat = Chat(tokenizer=byte_tokenizer())
    agent = AgentEngine(Scored(Script()), chat, [add, later], context_length=5000)
    found = agent.generate(chat.encode(PROMPTS, [add, later]), Sampling(max_tokens=length), n=4)
    assert found.token_rewards is not None and found.tool_mask is not None
    assert length < 100 or any(0 in row for row in found.tool_mask)
    for ids, mask, rewards in zip(found.completion_ids, found.tool_mask, found.token_rewards, strict=True):
        assert rewards == [float(token * sampled) for token, sampled in zip(ids, mask, strict=True)]
