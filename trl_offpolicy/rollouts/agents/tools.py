"""Runs the tools that a reply calls. An error becomes the tool's answer, as in TRL."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trl_offpolicy.rollouts.agents.background import run_in_background
from trl_offpolicy.rollouts.agents.guard import ToolError, ToolGuard

Tool = Callable[..., Any]
Message = dict[str, Any]


GRACE = 5.0
"""Seconds beyond a tool's own time after which the loop of async tools counts as blocked by one of them."""


class Answers(NamedTuple):
    """Messages of the role "tool", the number of calls, and how many of these failed."""

    messages: list[Message]
    calls: int
    failures: int


def check_tools(tools: Sequence[Tool], *, where: str = "tools") -> None:
    """Raise unless each tool can be described to a model, under a name of its own.

    Raises:
        TypeError: one is no function.
        ValueError: one lacks type hints or a docstring, or two have the same name.
    """
    from transformers.utils import get_json_schema

    names: list[str] = []
    for tool in tools:
        if not callable(tool) or not hasattr(tool, "__name__"):
            raise TypeError(f"{where} must be functions, but got {tool!r}.")
        try:
            get_json_schema(tool)
        except Exception as error:
            raise ValueError(
                f"{where} must have type hints and a Google docstring that describes every argument, because the chat "
                f"template shows them to the model, but {tool.__name__} has not: {error}"
            ) from error
        names.append(tool.__name__)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{where} must have different names, but two are called {', '.join(twice)}.")


def answer_calls(
    calls: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, guard: ToolGuard | None = None
) -> Answers:
    """Call the tools and return their answers. Those of async tools, which run together, come last.

    Args:
        calls: entry ``tool_calls`` of a message: ``{"type": "function", "function": {"name", "arguments"}}``.
        tools: plain or async functions.
        guard: bounds their time and answers; None = nothing does.
    """
    named = {tool.__name__: tool if guard is None else guard.wrap(tool) for tool in tools}
    shown = (lambda text: text) if guard is None else guard.bounded  # what the model wrote may hold control tokens
    results: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Any]] = []
    for call in calls:
        name, answer = _call(call, named, shown)
        (waiting if inspect.iscoroutine(answer) else results).append((name, answer))
    if waiting:
        limit = None if guard is None or guard.timeout is None else guard.timeout + GRACE
        try:
            answers = run_in_background(_together([answer for _, answer in waiting]), timeout=limit)
        except TimeoutError:
            assert guard is not None  # without one there is no limit
            guard.count_timeouts(len(waiting))
            blocked = ToolError("no answer: an async tool blocks the event loop that all of them share.")
            answers = [blocked] * len(waiting)
        results += [(name, answer) for (name, _), answer in zip(waiting, answers, strict=True)]
    failures = sum(isinstance(answer, Exception) for _, answer in results)
    return Answers([_message(shown(name), answer) for name, answer in results], len(calls), failures)


def _call(call: Mapping[str, Any], tools: Mapping[str, Tool], shown: Callable[[str], str]) -> tuple[str, Any]:
    """(name, result, coroutine or error) of one call. ``shown`` bounds what the model wrote."""
    if call.get("type") != "function":
        kind = shown(str(call.get("type")))
        return str(call.get("name", "unknown")), ValueError(f"Unsupported tool call type: {kind}")
    function = call["function"]
    name = function["name"]
    if name not in tools:
        return name, ValueError(f"Tool {shown(name)} not found.")
    try:
        return name, tools[name](**function["arguments"])
    except Exception as error:
        return name, error


async def _together(waiting: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*waiting, return_exceptions=True))


def _message(name: str, answer: Any) -> Message:
    """The answer as a message.

    Raises:
        NotImplementedError: it holds an image.
    """
    if isinstance(answer, Exception):
        answer = {"error": str(answer)}
    if isinstance(answer, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in answer):
        raise NotImplementedError(f"tools must return text, but {name} returned an image, which cannot be sampled on.")
    return {"role": "tool", "name": name, "content": answer if _are_parts(answer) else str(answer)}


def _are_parts(answer: Any) -> bool:
    """True if an answer is a list of parts of a message, which go into the template as they are."""
    return isinstance(answer, list) and bool(answer) and all(isinstance(one, dict) and "type" in one for one in answer)
