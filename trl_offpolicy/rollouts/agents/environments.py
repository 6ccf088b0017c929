"""Environments: one object per rollout, whose methods are tools and which may give the reward. As in TRL."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_offpolicy.rollouts.agents.guard import ToolGuard
from trl_offpolicy.rollouts.agents.tools import Tool, check_tools
from trl_offpolicy.rollouts.screening import Screen

logger = logging.getLogger(__name__)

_OWN = ("reset", "get_reward")
EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""Prompt of a row that has none: the environment's ``reset`` then gives all of it."""


class Environments:
    """Instances of one class, or of several that the column ``environment`` of a row chooses from.

    An instance has ``reset(**row)``, called before a rollout, whose result, if it is not None, is added to the last
    message of the prompt. Other public methods are tools. ``get_reward()``, if there is one, is the rollout's reward.
    Instances are built once and reset often.

    Args:
        factory: a class (or function) that makes an instance, or {name: such a class}.
        guard: makes the instances, in the thread in which it calls their methods; None = this thread does.

    Raises:
        TypeError: ``factory`` is not of this form, or ``reset`` is async.
        ValueError: an instance has no ``reset``, or a method cannot be described to a model.
    """

    def __init__(
        self, factory: Callable[[], Any] | Mapping[str, Callable[[], Any]], *, guard: ToolGuard | None = None
    ) -> None:
        self.by_name = isinstance(factory, Mapping)
        self._factories: dict[Any, Callable[[], Any]] = (
            dict(factory) if isinstance(factory, Mapping) else {None: factory}
        )
        if not self._factories or not all(callable(one) for one in self._factories.values()):
            raise TypeError(
                f"environment_factory must be a class, or a mapping from names to classes, but got {factory!r}."
            )
        if guard is not None:
            self._factories = {name: made_by(guard, make) for name, make in self._factories.items()}
        self._pool = {name: [make()] for name, make in self._factories.items()}
        self._bind: Callable[[Any], Any] = lambda environment: environment
        for (first,) in self._pool.values():
            if "reset" not in _methods(type(first)):
                raise ValueError(f"environment_factory must make objects with a reset method, but got {first!r}.")
            _check_reset(first)
            check_tools(tools_of(first), where=f"environment_factory: methods of {type(first).__name__}")

    def bound(self, guard: ToolGuard, screen: Screen) -> None:
        """From now on :func:`bound_environment` holds for every instance."""
        self._bind = lambda environment: bound_environment(environment, guard, screen)
        self._pool = {name: [self._bind(one) for one in pool] for name, pool in self._pool.items()}

    @property
    def tools(self) -> list[Tool]:
        """The tools of all environments."""
        return [tool for (first, *_) in self._pool.values() for tool in tools_of(first)]

    def rewards(self) -> list[tuple[str, Callable[..., Any]]]:
        """(class name, reward function) of each class with ``get_reward``; None for rollouts of another class."""
        kinds = dict.fromkeys(type(first) for (first, *_) in self._pool.values())
        return [(kind.__name__, _reward_of(kind)) for kind in kinds if "get_reward" in _methods(kind)]

    def take(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """An instance of its own for each row. The next call gives the same instances again.

        Raises:
            ValueError: a row names no known environment.
        """
        taken: Counter[Any] = Counter()
        found = []
        for row in rows:
            name = row.get("environment") if self.by_name else None
            if name not in self._factories:
                raise ValueError(
                    f"environment must be one of {list(self._factories)} in every row of the data set, as "
                    f"environment_factory names them, but got {name!r}."
                )
            if taken[name] == len(self._pool[name]):
                self._pool[name].append(self._bind(self._factories[name]()))
            found.append(self._pool[name][taken[name]])
            taken[name] += 1
        return found

    def reset(self, environments: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Reset each environment with its row; returns the prompts, with what the environments added to them.

        Raises:
            ValueError: a prompt is a text: the tools' answers need messages.
        """
        return [self._prompt(one, row) for one, row in zip(environments, rows, strict=True)]

    def _prompt(self, environment: Any, row: Mapping[str, Any]) -> Any:
        prompt = row.get("prompt", EMPTY_PROMPT)
        given = {name: value for name, value in row.items() if not (self.by_name and name == "environment")}
        seen = environment.reset(**given)
        if seen is None or isinstance(prompt, str):  # a text is refused by the sampler
            return prompt
        content = prompt[-1]["content"]
        if isinstance(seen, list) and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if isinstance(seen, str) and isinstance(content, list):
            seen = [{"type": "text", "text": seen}]
        return [*prompt[:-1], {**prompt[-1], "content": content + seen}]


def made_by(guard: ToolGuard, make: Callable[[], Any]) -> Callable[[], Any]:
    """The factory, which makes its instances where a guard calls their methods."""
    return functools.partial(guard.made, make)


def bound_environment(environment: Any, guard: ToolGuard, screen: Screen) -> Any:
    """The environment, whose ``reset`` and ``get_reward`` are bounded as tools are.

    A ``reset`` that fails adds nothing to the prompt and is reported; a ``get_reward`` that fails gives no reward. The
    text that ``reset`` returns is a part of the prompt: it stays as it is. A tool that calls them calls its own ones.

    Args:
        environment: an instance; its two methods are replaced.
        guard: bounds time and text.
        screen: hears of every ``reset`` and ``get_reward``.

    Raises:
        TypeError: ``reset`` is async, or the methods cannot be replaced.
    """
    kind = type(environment)
    _check_reset(environment)
    own = kind.reset.__get__(environment)  # its own one, also if it was bound before
    reset = guard.wrap(own, text=False)

    def bounded_reset(*args: Any, **kwargs: Any) -> Any:
        if guard.inside:
            return own(*args, **kwargs)
        try:
            seen = reset(*args, **kwargs)
        except Exception as error:
            screen.reset(f"reset of {kind.__name__} failed: {type(error).__name__}: {error}")
            return None
        screen.reset("")
        return seen

    _replace(environment, "reset", bounded_reset)
    if "get_reward" in _methods(kind):
        screen.scored_by_environments = True
        _replace(environment, "get_reward", _bounded_reward(kind, kind.get_reward.__get__(environment), guard, screen))
    return environment


def _bounded_reward(kind: type[Any], own: Callable[[], Any], guard: ToolGuard, screen: Screen) -> Callable[[], Any]:
    get_reward = guard.wrap(own)

    def said(error: Exception) -> None:
        why = f"get_reward of {kind.__name__} failed: {type(error).__name__}: {error}"
        logger.warning("The rollout has no reward: %s", why)
        screen.scored(why)

    if inspect.iscoroutinefunction(own):

        async def later() -> Any:
            try:
                found = await get_reward()
            except Exception as error:
                return said(error)
            screen.scored("")
            return found

        return later

    def bounded() -> Any:
        if guard.inside:
            return own()
        try:
            found = get_reward()
        except Exception as error:
            return said(error)
        screen.scored("")
        return found

    return bounded


def _check_reset(environment: Any) -> None:
    kind = type(environment)
    if inspect.iscoroutinefunction(kind.reset):
        raise TypeError(
            f"environment_factory must make objects with a plain reset, but that of {kind.__name__} is async: nothing "
            "awaits it."
        )


def _replace(environment: Any, name: str, method: Callable[..., Any]) -> None:
    try:
        object.__setattr__(environment, name, method)  # a frozen dataclass has a place for it too
    except AttributeError:
        raise TypeError(
            f"environment_factory must make objects whose {name} can be bounded, but {type(environment).__name__} has "
            "__slots__ and no place for it. Leave out __slots__, or add '__dict__' to them."
        ) from None


def tools_of(environment: Any) -> list[Tool]:
    """The methods of an environment that are tools: public, and neither ``reset`` nor ``get_reward``."""
    names = [name for name in _methods(type(environment)) if name not in _OWN and not name.startswith("_")]
    return [getattr(environment, name) for name in names]


def _methods(kind: type[Any]) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]


def _reward_of(kind: type[Any]) -> Callable[..., Any]:
    """A reward function that asks the environments of exactly this class."""
    if inspect.iscoroutinefunction(kind.get_reward):

        async def later(environments: Sequence[Any], **_: Any) -> list[Any]:
            return [await one.get_reward() if type(one) is kind else None for one in environments]

        return later

    def get_reward(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [one.get_reward() if type(one) is kind else None for one in environments]

    return get_reward
