"""Completions for a trainer: of one turn, with tools, in environments, or by a function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from trl_offpolicy.checks import check_whole
from trl_offpolicy.engines.engine import Call, Engine, Rollouts, Sampling
from trl_offpolicy.engines.images import PromptImages
from trl_offpolicy.rollouts.agents.chat import Chat
from trl_offpolicy.rollouts.agents.environments import EMPTY_PROMPT, Environments, tools_of
from trl_offpolicy.rollouts.agents.guard import ToolGuard
from trl_offpolicy.rollouts.agents.loop import AgentEngine
from trl_offpolicy.rollouts.agents.recorded import RecordedEngine
from trl_offpolicy.rollouts.agents.returned import read_returned
from trl_offpolicy.rollouts.agents.tools import Tool, check_tools
from trl_offpolicy.rollouts.batches import check_prompts
from trl_offpolicy.rollouts.images import encode, has_images, images_of, placed
from trl_offpolicy.rollouts.screening import Screen

RolloutFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be sampled.

    Args:
        rows: rows of the data set, one per completion; "prompt" is what the model sees.
        prompt_ids: ids of the prompts; each gets ``n`` completions.
        n: completions per prompt.
        tools: the tools of each completion.
        environments: the environment of each completion; None = there are none.
        images: the images of each prompt; None = the prompts are text.
    """

    rows: list[dict[str, Any]]
    prompt_ids: list[list[int]]
    n: int
    tools: list[list[Tool]]
    environments: list[Any] | None = None
    images: list[PromptImages] | None = None


@dataclass(frozen=True, kw_only=True)
class Completions:
    """What was sampled, one entry per completion.

    Args:
        rollouts: the ids, with ``tool_mask`` if there are tools or the user's function returned one.
        completions: texts, or lists of messages.
        calls: what the engine was asked, and what it answered.
        columns: what the user's function returned besides, for the reward functions.
        sampled_ids: ids of the engine that the user's function reports; None = it did not.
        tool_calls: number of tool calls; None = there are no tools.
        tool_failures: number of these that ended in an error.
    """

    rollouts: Rollouts
    completions: list[Any]
    calls: list[Call]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    sampled_ids: list[list[int]] | None = None
    tool_calls: list[int] | None = None
    tool_failures: list[int] | None = None

    def reward_rows(self, request: Request) -> list[dict[str, Any]]:
        """The rows of the request with ``columns``, for the reward functions."""
        return [
            {**row, **{name: values[i] for name, values in self.columns.items()}} for i, row in enumerate(request.rows)
        ]


class RolloutSampler:
    """Turns rows of a data set into completions.

    Args:
        chat: the tokenizer with its templates.
        tools: functions that the model may call.
        environments: environments, whose methods are tools too.
        rollout: ``f(prompts, engine, sampling)``, which samples in place of the loop. ``prompts`` holds one prompt per
            completion. It is also given ``tokenizer`` and ``rows`` (of the data set) if it names them.
        max_iterations: most rounds of tool calls per completion; None = any number.
        guard: bounds the time and the answers of the tools; None = nothing does.

    Raises:
        TypeError: a tool or ``rollout`` is no function.
        ValueError: a tool cannot be described to the model, the tokenizer's templates cannot write or read tool calls,
            or the arguments contradict each other.
    """

    def __init__(
        self,
        chat: Chat,
        *,
        tools: Sequence[Tool] = (),
        environments: Environments | None = None,
        rollout: RolloutFunction | None = None,
        max_iterations: int | None = None,
        guard: ToolGuard | None = None,
    ) -> None:
        check_arguments(tools, environments, rollout, max_iterations)
        self.chat, self.tools, self.environments = chat, list(tools), environments
        self.rollout, self.max_iterations = rollout, max_iterations
        self.guard = guard
        if self.has_tools:
            chat.check()

    @property
    def has_tools(self) -> bool:
        """True if a completion may have several turns by this kit's loop."""
        return bool(self.tools) or (self.environments is not None and bool(self.environments.tools))

    def request(self, rows: Sequence[Mapping[str, Any]], count: int) -> Request:
        """The request of ``count`` completions of each row. Environments are reset.

        Raises:
            ValueError: a prompt has no token, or is a text where tools or images need messages.
            NotImplementedError: images together with tools, environments or ``rollout``.
        """
        if any(map(has_images, rows)) or self._reads_parts(rows):
            return self._with_images(rows, count)
        repeated = [deepcopy(dict(row)) for row in rows for _ in range(count)]  # an environment may change its own
        if self.environments is not None:
            return self._in_environments(repeated, count)
        prompts = [row["prompt"] for row in rows]
        if self.rollout is not None:  # it makes the ids; these serve to prove a weight sync
            return Request(rows=repeated, prompt_ids=self._any_ids(prompts), n=count, tools=[[]] * len(repeated))
        self._check_messages(prompts)
        ids = self.chat.encode(prompts, self.tools)
        check_prompts(ids, prompts)
        return Request(rows=repeated, prompt_ids=ids, n=count, tools=[self.tools] * len(repeated))

    def _reads_parts(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """True if a processor writes these messages: its template may leave out contents that are no list of parts."""
        alone = not (self.has_tools or self.environments is not None or self.rollout is not None)
        return alone and self.chat.processor is not None and not any(isinstance(row["prompt"], str) for row in rows)

    def _with_images(self, rows: Sequence[Mapping[str, Any]], count: int) -> Request:
        """The request of a batch that a processor writes, with images or without."""
        loops = {"tools": self.has_tools, "environment_factory": self.environments, "rollout": self.rollout}
        if found := [name for name, value in loops.items() if value]:
            raise NotImplementedError(
                f"{' and '.join(found)} must be left out with images: they are sampled on in one turn only."
            )
        if self.chat.processor is None:
            raise ValueError(
                "tokenizer must be a processor for rows with images (transformers.AutoProcessor), but got a "
                f"{type(self.chat.tokenizer).__name__}, which reads text alone."
            )
        if texts := [row["prompt"] for row in rows if isinstance(row["prompt"], str)]:
            raise ValueError(
                f"prompt must be a list of messages with images, but got the text {texts[0]!r}. "
                "Use [{'role': 'user', 'content': ...}]."
            )
        prompts = [placed(row["prompt"], images_of(row)) for row in rows]
        ids, images = encode(self.chat.processor, prompts, self.chat.options)
        check_prompts(ids, prompts)
        seen = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True) for _ in range(count)]
        given = images if any(one.pictures for one in images) else None
        return Request(rows=seen, prompt_ids=ids, n=count, tools=[[]] * len(seen), images=given)

    def _any_ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Ids of prompts that may be anything that the user's function understands."""
        if isinstance(prompts[0], str) or self.chat.tokenizer.chat_template is not None:
            return self.chat.encode(prompts)
        return self.chat.encode([str(prompt) for prompt in prompts])

    def _in_environments(self, rows: list[dict[str, Any]], count: int) -> Request:
        assert self.environments is not None
        self._check_messages([row.get("prompt", EMPTY_PROMPT) for row in rows])
        environments = self.environments.take(rows)
        prompts = self.environments.reset(environments, rows)
        tools = [[*self.tools, *tools_of(environment)] for environment in environments]
        ids = [self.chat.encode([prompt], known)[0] for prompt, known in zip(prompts, tools, strict=True)]
        check_prompts(ids, prompts)
        seen = [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
        alike = all(ids[i] == ids[i - i % count] for i in range(len(ids)))  # else a group has several prompts
        asked, n = (ids[::count], count) if alike else (ids, 1)
        return Request(rows=seen, prompt_ids=asked, n=n, tools=tools, environments=environments)

    def _check_messages(self, prompts: Sequence[Any]) -> None:
        if (self.has_tools or self.environments is not None) and any(isinstance(prompt, str) for prompt in prompts):
            text = next(prompt for prompt in prompts if isinstance(prompt, str))
            raise ValueError(
                f"prompt must be a list of messages with tools or environments, but got the text {text!r}: calls and "
                "answers are messages. Use [{'role': 'user', 'content': ...}]."
            )

    def sample(
        self,
        engine: Engine,
        request: Request,
        sampling: Sampling,
        *,
        context_length: int | None = None,
        screen: Screen | None = None,
    ) -> Completions:
        """The completions of a request.

        Args:
            engine: what samples.
            request: what :meth:`request` returned.
            sampling: how a turn is sampled; ``max_tokens`` is the length of all turns together.
            context_length: tokens that the engine can take; None = any.
            screen: checks what ``rollout`` returned; None = nobody does. The engine's replies are its engine's matter.

        Raises:
            TypeError: ``rollout`` returned something of another form; so does ``ValueError``. They name the field.
        """
        engine = RecordedEngine(engine)
        if self.rollout is not None:
            return self._by_function(engine, request, sampling, screen)
        if not self.has_tools:
            images = {} if request.images is None else {"images": request.images}
            rollouts = engine.generate(request.prompt_ids, sampling, n=request.n, **images)
            return Completions(rollouts=rollouts, completions=self._decoded(rollouts, request), calls=engine.calls)
        agent = AgentEngine(
            engine,
            self.chat,
            self.tools,
            max_iterations=self.max_iterations,
            context_length=context_length,
            guard=self.guard,
        )
        episodes = agent.converse(request.prompt_ids, sampling, n=request.n, tools=request.tools)
        return Completions(
            rollouts=episodes.rollouts,
            completions=list(episodes.messages),
            calls=engine.calls,
            tool_calls=episodes.tool_calls,
            tool_failures=episodes.tool_failures,
        )

    def _by_function(
        self, engine: RecordedEngine, request: Request, sampling: Sampling, screen: Screen | None
    ) -> Completions:
        assert self.rollout is not None
        offered = {"tokenizer": self.chat.tokenizer, "rows": request.rows}
        named = {name: value for name, value in offered.items() if name in inspect.signature(self.rollout).parameters}
        output = self.rollout([row["prompt"] for row in request.rows], engine, sampling, **named)
        returned = read_returned(output, rows=len(request.rows), version=engine.version)
        rollouts = returned.rollouts
        if screen is not None:
            rollouts = screen.rollouts(rollouts, rollouts.prompt_ids)
        return Completions(
            rollouts=rollouts,
            completions=self._decoded(rollouts, request),
            calls=engine.calls,
            columns=returned.columns,
            sampled_ids=returned.sampled_ids,
        )

    def _decoded(self, rollouts: Rollouts, request: Request) -> list[Any]:
        prompts = [row["prompt"] for row in request.rows]
        return self.chat.decode(rollouts.completion_ids, rollouts.prompt_ids, prompts, request.tools)


def check_arguments(
    tools: Sequence[Tool],
    environments: Environments | None,
    rollout: RolloutFunction | None,
    max_iterations: int | None,
) -> None:
    """The checks of :class:`RolloutSampler` that need no tokenizer."""
    if rollout is not None:
        if not callable(rollout):
            raise TypeError(f"rollout must be a function, but got {rollout!r}.")
        if tools or environments is not None:
            raise ValueError("rollout must be None with tools or environment_factory: it runs its own loop.")
        wanted = [
            one
            for one in inspect.signature(rollout).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL)
        ]
        if len(wanted) < 3 and not any(one.kind is one.VAR_POSITIONAL for one in wanted):
            raise TypeError(f"rollout must take (prompts, engine, sampling), but {rollout!r} takes {len(wanted)}.")
    check_tools([*tools, *_first_of_each(environments)])
    if max_iterations is not None:
        check_whole("max_tool_calling_iterations", max_iterations, least=0)


def _first_of_each(environments: Environments | None) -> list[Tool]:
    """One method of each name: several environments may share names, but none may shadow a function."""
    methods = [] if environments is None else environments.tools
    return list({method.__name__: method for method in methods}.values())
