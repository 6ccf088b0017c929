"""Environments: one object per rollout, what they add to prompts, which tools a row has, who gives the reward."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_agents import Script, ScriptedEngine, add, byte_tokenizer, call

from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.rollouts.agents import Chat, Environments, RecordedEngine, RolloutSampler
from trl_offpolicy.rollouts.agents.environments import tools_of


class Game:
    """A game whose opening depends on the row."""

    built = 0

    def __init__(self) -> None:
        type(self).built += 1
        self.number = type(self).built

    def reset(self, opening: Any = None, **row: Any) -> Any:
        self.row = row
        return opening

    def move(self, field: str) -> str:
        """Move.

        Args:
            field: Where to.

        Returns:
            What happened.
        """
        return f"{self.number} moved to {field}"

    def get_reward(self) -> float:
        return float(self.number)

    def _hidden(self) -> None: ...


class Later(Game):
    """Its reward takes time."""

    built = 0

    async def get_reward(self) -> float:  # type: ignore[override]
        return -1.0


ASK = [{"role": "user", "content": "Play."}]


def test_instances_are_built_once_and_reset_often() -> None:
    Game.built = 0
    environments = Environments(Game)
    first = environments.take([{}] * 3)
    assert [one.number for one in first] == [1, 2, 3]
    assert environments.take([{}] * 2) == first[:2] and Game.built == 3
    assert [tool.__name__ for tool in tools_of(first[0])] == ["move"] == [tool.__name__ for tool in environments.tools]


@pytest.mark.parametrize(
    ("row", "seen"),
    [
        ({"prompt": ASK}, "Play."),
        ({"prompt": ASK, "opening": " Now."}, "Play. Now."),
        ({"opening": "You are white."}, "You are white."),  # the environment gives the whole prompt
        ({"prompt": ASK, "opening": [{"type": "text", "text": "e4"}]},
         [{"type": "text", "text": "Play."}, {"type": "text", "text": "e4"}]),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Play."}]}], "opening": "e4"},
         [{"type": "text", "text": "Play."}, {"type": "text", "text": "e4"}]),
    ],
)  # fmt: skip
def test_what_reset_returns_is_added_to_the_prompt(row: dict[str, Any], seen: Any) -> None:
    environments = Environments(Game)
    (prompt,) = environments.reset(environments.take([row]), [row])
    assert prompt[-1]["content"] == seen and ASK == [{"role": "user", "content": "Play."}]  # the row is not changed


def test_the_column_that_names_the_environment_is_not_for_reset() -> None:
    rows = [{"prompt": ASK, "environment": "later", "level": 3}]
    environments = Environments({"game": Game, "later": Later})
    (one,) = environments.take(rows)
    environments.reset([one], rows)
    assert type(one) is Later and one.row == {"prompt": ASK, "level": 3}


def test_each_class_gives_its_own_reward() -> None:
    environments = Environments({"a": Game, "b": Later, "c": Game})
    (game, of_game), (later, of_later) = environments.rewards()
    assert (game, later) == ("Game", "Later")
    taken = environments.take([{"environment": name} for name in "abc"])
    assert of_game(environments=taken) == [taken[0].number, None, taken[2].number]
    assert asyncio.run(of_later(environments=taken)) == [None, -1.0, None]


def test_a_group_with_one_prompt_is_one_request_and_with_several_it_is_not() -> None:
    engine = RecordedEngine(ScriptedEngine(Script([call("move", field="e4") + "<|im_end|>", "Done.<|im_end|>"])))
    sampler = RolloutSampler(Chat(tokenizer=byte_tokenizer()), tools=[add], environments=Environments(Game))
    same = sampler.request([{"prompt": ASK}, {"prompt": ASK}], 4)
    assert (len(same.prompt_ids), same.n) == (2, 4)
    found = sampler.sample(engine, same, Sampling(max_tokens=600))
    said = {m["content"] for one in found.completions for m in one if m["role"] == "tool"}
    assert len({text.split()[0] for text in said}) > 1  # each rollout talks to its own game

    openings = iter("abcdefgh")
    environments = Environments(Game)
    reset = Game.reset
    try:
        Game.reset = lambda self, **row: next(openings)  # type: ignore[method-assign, assignment]
        drawn = RolloutSampler(Chat(tokenizer=byte_tokenizer()), environments=environments).request([{}, {}], 4)
    finally:
        Game.reset = reset  # type: ignore[method-assign]
    assert (len(drawn.prompt_ids), drawn.n) == (8, 1) and len({tuple(ids) for ids in drawn.prompt_ids}) == 8


def test_tools_of_the_environment_are_in_the_prompt() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + tokenizer.chat_template
    )
    environments = Environments({"game": Game, "none": Silent})
    sampler = RolloutSampler(Chat(tokenizer=tokenizer), tools=[add], environments=environments)
    rows = [{"prompt": ASK, "environment": name} for name in ("game", "none")]
    texts = [tokenizer.decode(ids) for ids in sampler.request(rows, 1).prompt_ids]
    assert texts[0].startswith("add move ") and texts[1].startswith("add <|im_start|>")


class Silent:
    """An environment without tools."""

    def reset(self, **_: Any) -> None: ...
