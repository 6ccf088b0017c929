"""Bounds what a tool can do to a step: its time, the length of its answer, and the control tokens in it.

A tool that raises, hangs or ends the interpreter gives an error as its answer. The model reads that, no token of it is
trained on, and the step goes on.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from trl_offpolicy.checks import check_positive
from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.stats import Group, Stats

GUARD_METRICS = ("tool_timeout_fraction", "tool_cut_fraction", "tool_control_fraction")
TIMEOUT = 300.0
"""Seconds that a call may take, unless the user says otherwise."""
MOST_HUNG = 4
"""Calls of one tool that may hang at a time; while they do, further ones are answered at once."""
CHARACTERS = 16
"""Characters of an answer per token that a completion may have; a longer answer does not fit into it."""
_COUNTS = Layout(sums=("unusual", "calls", "timeouts", "cuts", "controls"))

Tool = Callable[..., Any]


class ToolError(RuntimeError):
    """A tool gave no answer; the text is what the model reads."""


def check_tool_timeout(value: Any) -> None:
    """Raise unless ``value`` is a number of seconds above 0, or None.

    Raises:
        ValueError: it is not.
    """
    if value is not None:
        check_positive(tool_timeout=value)


class ToolGuard:
    """Calls the tools of one trainer.

    With a timeout, plain functions run in one thread beside the trainer's, and so do the factories of environments
    (:meth:`made`). What a tool of an environment calls of the environment itself runs in that thread too, within the
    tool's own time. After a call that hangs, another thread takes the place of the one that hangs: an object that only
    its first thread may use, such as a connection of sqlite3, then fails in every call.

    Generation batches that are sampled ahead call tools from threads of their own. All the same, one plain call runs at
    a time: the next one waits for it, and this wait is not a part of its time.

    Args:
        timeout: seconds that a call may take; None = any time, and plain functions run in the caller's thread.
        max_tokens: length of the longest completion, which bounds that of an answer.
        tokenizer: its special tokens are taken apart where an answer holds one as text; None = they are not known.
    """

    def __init__(self, *, timeout: float | None, max_tokens: int = 1, tokenizer: Any = None) -> None:
        check_tool_timeout(timeout)
        self.timeout, self.longest = timeout, max(1000, CHARACTERS * max_tokens)
        self._control = _control_tokens(tokenizer)
        self._worker: _Worker | None = None
        self._turn = threading.Lock()  # whoever has it may make a plain call
        self._inside: set[int] = set()  # threads that run a plain call
        self._hung: dict[str, list[_Worker]] = {}
        self._counting = threading.Lock()
        self._counts = [0] * 4

    def know(self, tokenizer: Any, *, max_tokens: int) -> None:
        """Bound answers from now on by what the arguments of the same names say."""
        self._control, self.longest = _control_tokens(tokenizer), max(1000, CHARACTERS * max_tokens)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_turn", "_counting")}
        return {**kept, "_worker": None, "_hung": {}, "_inside": set()}  # threads are not copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=threading.Lock(), _counting=threading.Lock())

    @property
    def inside(self) -> bool:
        """True in a plain call that this guard bounds: what it calls needs no bound of its own."""
        return threading.get_ident() in self._inside

    def made(self, make: Callable[[], Any]) -> Any:
        """What a factory makes, in the thread that will call its methods. The time for it is not bounded."""
        if self.timeout is None or self.inside:
            return make()
        with self._turn:
            return self._free_worker().call(functools.partial(self._marked, make)).result()

    def wrap(self, tool: Tool, *, text: bool = True) -> Tool:
        """The tool with these bounds, under its own name, plain or async as it was.

        Args:
            tool: a plain or an async function.
            text: False = bound only the time of a plain one and the text of its errors, not its answer.
        """
        if inspect.iscoroutinefunction(tool):

            @functools.wraps(tool)
            async def later(*args: Any, **kwargs: Any) -> Any:
                return await self._awaited(functools.partial(tool, *args, **kwargs))

            return later

        @functools.wraps(tool)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            return self._answer(lambda: self._run(tool, args, kwargs), text=text)

        return bounded

    def stats(self, device: torch.device) -> Stats:
        """``rollout/tool_*_fraction`` of the calls since the last time; logged only if one of them was unusual."""
        with self._counting:
            counts, self._counts = self._counts, [0] * 4
        values = [torch.tensor(float(value), device=device) for value in (sum(counts[1:]), *counts)]
        parts = ("timeouts", "cuts", "controls")
        shares = {name: fraction(part, "calls") for name, part in zip(GUARD_METRICS, parts, strict=True)}
        return Stats({"rollout#tools": Group(moments(_COUNTS, values), shares, sparse=True)})

    def count_timeouts(self, calls: int) -> None:
        """Count calls that gave no answer, and did not come back to say so."""
        self._count(0, calls)
        self._count(1, calls)

    def _count(self, place: int, times: int = 1) -> None:
        with self._counting:
            self._counts[place] += times

    # -------------------------------------------------------------------------------------------------------- calls

    def _run(self, tool: Tool, args: Any, kwargs: Any) -> Any:
        if self.inside:  # the worker is busy with the caller: to wait for it would be to wait for oneself
            return tool(*args, **kwargs)
        call = functools.partial(self._marked, functools.partial(tool, *args, **kwargs))
        with self._turn:
            return call() if self.timeout is None else self._timed(getattr(tool, "__name__", "tool"), call)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        hung = self._hung[name] = [one for one in self._hung.get(name, ()) if one.busy]
        if len(hung) >= MOST_HUNG:
            self._count(1)
            raise ToolError(f"{name} does not answer: {len(hung)} earlier calls have not come back.")
        worker = self._free_worker()
        try:
            return worker.call(call).result(self.timeout)
        except TimeoutError:
            if not worker.busy:  # the tool's own TimeoutError
                raise
            self._count(1)
            hung.append(worker)
            self._worker = None  # its thread cannot be ended; another one takes its place
            raise ToolError(f"{name} gave no answer within {self.timeout:g} s.") from None

    def _free_worker(self) -> _Worker:
        if self._worker is None or self._worker.process != os.getpid():  # a fork has no threads
            self._worker = _Worker()
        return self._worker

    def _marked(self, call: Callable[[], Any]) -> Any:
        here = threading.get_ident()
        self._inside.add(here)
        try:
            return call()
        finally:
            self._inside.discard(here)

    async def _awaited(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            found = await asyncio.wait_for(_contained(begin), self.timeout)
        except TimeoutError:
            self._count(1)
            return self._answer(lambda: _raise(ToolError(f"no answer within {self.timeout} s.")))
        except Exception as error:
            return self._answer(functools.partial(_raise, error))
        return self._answer(lambda: found)

    def _answer(self, call: Callable[[], Any], *, text: bool = True) -> Any:
        """What a call gives, bounded.

        Raises:
            Exception: what the tool raised, with a bounded text.
        """
        self._count(0)
        try:
            found = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            said = str(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
            if isinstance(error, Exception) and self._bounded(said, count=False) == said:
                raise
            raise ToolError(self._bounded(said)) from error
        if not text:
            return found
        if isinstance(found, list) and found and all(isinstance(one, dict) and "type" in one for one in found):
            return [
                {**one, "text": self._bounded(one["text"])} if isinstance(one.get("text"), str) else one
                for one in found
            ]
        said = str(found)
        bounded = self._bounded(said)
        return found if bounded == said else bounded

    def bounded(self, text: str) -> str:
        """A text that is no tool's answer, such as a name that the model wrote, within the same bounds."""
        return self._bounded(text, count=False)

    def _bounded(self, text: str, *, count: bool = True) -> str:
        text = cut = _encodable(text)
        if len(text) > self.longest:
            cut = f"{text[: self.longest]} ... (cut: the answer has {len(text)} characters)"
        apart = cut if self._control is None else self._control.sub(lambda one: f"{one[0][0]} {one[0][1:]}", cut)
        if count:
            self._count(2, cut != text)
            self._count(3, apart != cut)
        return apart


def _raise(error: Exception) -> Any:
    raise error


async def _contained(begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What an async tool gives. What would end the thread of the loop, and every later call with it, is its error."""
    try:
        return await begin()
    except (SystemExit, KeyboardInterrupt) as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the time is over
            raise
        raise ToolError("CancelledError: the tool was cancelled") from error


def _encodable(text: str) -> str:
    """The text with a mark in place of each half of a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """The texts that a tokenizer reads as control tokens; None if there is none.

    They are its special tokens, and of the others that were added those with which the chat template marks something,
    as <tool_call> of Qwen. Added words, spaces and HTML stay what they are.
    """
    named = list(getattr(tokenizer, "all_special_tokens", ()))
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    template = str(getattr(tokenizer, "chat_template", None) or "")
    marks = (token.content for token in added if re.search(r"[<\[|]", token.content) and token.content in template)
    texts = {*named, *(token.content for token in added if token.special), *marks}
    texts = {text for text in texts if len(text) > 1}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


class _Worker:
    """A thread that runs one call after the other, so that what is bound to a thread stays on one."""

    def __init__(self) -> None:
        self.busy, self.process = False, os.getpid()
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="tools", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.busy = True
        self._calls.put((function, future))
        return future

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                found, error = function(), None
            except Exception as raised:
                found, error = None, raised
            except BaseException as raised:  # of the tool: in the trainer's thread it would end the run
                found, error = None, ToolError(f"{type(raised).__name__}: {raised}")
            self.busy = False
            future.set_result(found) if error is None else future.set_exception(error)
