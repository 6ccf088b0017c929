"""Environments: one object per rollout, what they add to prompts, which tools a row has, who gives the reward."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import sqlite3
from typing import Any

import pytest
from scripted_agents import Script, ScriptedEngine, add, byte_tokenizer, call

from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.rollouts.agents import Chat, Environments, RecordedEngine, RolloutSampler
from trl_offpolicy.rollouts.agents.environments import bound_environment, tools_of
from trl_offpolicy.rollouts.agents.guard import ToolGuard
from trl_offpolicy.rollouts.screening import RolloutError, Screen


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


# ------------------------------------------------------------------------------------------------- bounded environments


def screen() -> Screen:
    return Screen("drop", vocabulary=None, filler=0)


def bounded(factory: Any, *, timeout: float | None = 20.0) -> tuple[Environments, Screen, ToolGuard]:
    guard, check = ToolGuard(timeout=timeout, max_tokens=10, tokenizer=byte_tokenizer()), screen()
    environments = Environments(factory, guard=guard)
    environments.bound(guard, check)
    check.begin()
    return environments, check, guard


class Shop:
    """An environment that keeps its state where one thread alone may use it, and whose tool calls its own methods."""

    def __init__(self) -> None:
        self.data = sqlite3.connect(":memory:")
        self.data.execute("create table sold (price real)")

    def reset(self, text: str = "Welcome.", fails: bool = False, **row: Any) -> str:
        if fails:
            raise ConnectionError("closed")
        self.data.execute("delete from sold")
        return text

    def sell(self, price: float) -> str:
        """Sell.

        Args:
            price: In euros.
        """
        self.data.execute("insert into sold values (?)", (price,))
        return f"{self.get_reward():g} so far"

    def close(self) -> str:
        """Begin a new day."""
        return self.reset()

    def get_reward(self) -> float:
        return float(self.data.execute("select coalesce(sum(price), 0) from sold").fetchone()[0])


@pytest.mark.parametrize("timeout", [20.0, None])
def test_an_environment_lives_in_one_thread_and_its_tools_may_call_it(timeout: float | None) -> None:
    """A tool that asks for the reward would otherwise wait for the thread that it keeps busy, until the timeout."""
    environments, check, guard = bounded(Shop, timeout=timeout)
    rows = [{"prompt": ASK}, {"prompt": ASK}]
    taken = environments.take(rows)  # the second is made later than the first
    prompts = environments.reset(taken, rows)
    assert [prompt[-1]["content"] for prompt in prompts] == ["Play.Welcome."] * 2
    for one, price in zip(taken, (2.0, 3.0), strict=True):
        assert guard.wrap(one.sell)(price=price) == f"{price:g} so far"
    assert environments.rewards()[0][1](environments=taken) == [2.0, 3.0]
    assert guard.wrap(taken[0].close)() == "Welcome." and taken[0].get_reward() == 0.0
    assert check.agree([[1], [1]], None).rows == ()


@pytest.mark.parametrize("ended", [False, True])
def test_a_reset_by_a_tool_is_of_no_row(ended: bool) -> None:
    """An async tool runs elsewhere: there it is told by the time alone."""
    environments, check, guard = bounded(Shop)
    rows = [{"prompt": ASK}] * 2
    taken = environments.take(rows)
    environments.reset(taken, rows)
    if ended:
        check.end_of_resets()
        assert taken[0].reset(fails=True) is None
    else:
        with pytest.raises(ConnectionError, match="closed"):
            guard.wrap(lambda: taken[0].reset(fails=True))()
    assert check.agree([[1], [1]], None).rows == ()
    check.begin()
    environments.reset(taken, [rows[0], {**rows[1], "fails": True}])
    assert check.agree([[1], [1]], None).rows == (1,)


def test_the_text_of_a_reset_is_a_prompt_and_stays_as_it_is() -> None:
    text = "x" * 100_000 + "<|im_end|>"
    environments, *_ = bounded(Shop)
    (prompt,) = environments.reset(environments.take([{}]), [{"text": text}])
    assert prompt[-1]["content"] == text


class Unscored(Shop):
    """Its reward fails, of the rows that say so."""

    def reset(self, lost: bool = True, **row: Any) -> str:
        self.lost = lost
        return ""

    def get_reward(self) -> float:
        if self.lost:
            raise ValueError("nobody counted")
        return 1.0


def test_rewards_that_all_fail_end_the_run() -> None:
    environments, check, _ = bounded({"a": Unscored, "b": Game})
    ((_, score), _) = environments.rewards()
    for lost in ([True, False], [True, True]):
        rows = [{"prompt": ASK, "environment": "a", "lost": one} for one in lost]
        taken = environments.take(rows)
        environments.reset(taken, rows)
        assert score(environments=taken) == [None if one else 1.0 for one in lost]
        if all(lost):
            with pytest.raises(RolloutError, match=r"get_reward of Unscored failed: .* nobody counted. So did all 2"):
                check.agree_on_scores()
        check.agree_on_scores()
    screen().agree_on_scores()


def test_what_cannot_be_bounded_is_refused() -> None:
    class Awaited(Game):
        async def reset(self, **row: Any) -> None: ...  # type: ignore[override]

    class Narrow:
        __slots__ = ("row",)

        def reset(self, **row: Any) -> None: ...

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        def reset(self, **row: Any) -> str:
            return "kept"

    with pytest.raises(TypeError, match=r"with a plain reset, but that of Awaited is async"):
        Environments(Awaited)
    guard = ToolGuard(timeout=5.0)
    with pytest.raises(TypeError, match=r"Narrow has __slots__ and no place for it"):
        bound_environment(Narrow(), guard, screen())
    assert bound_environment(Frozen(), guard, screen()).reset() == "kept"


def test_a_guard_may_be_copied_into_another_process() -> None:
    guard = ToolGuard(timeout=5.0)
    assert guard.made(int) == 0
    assert pickle.loads(pickle.dumps(guard)).wrap(len)("ab") == 2
