"""The agent loop over any engine: sample, call the tools, append their answers as ids, sample the next turn.

It ends when no reply calls a tool, after ``max_iterations`` rounds, or for a completion whose tool output would exceed
its length. The semantics are those of ``GRPOTrainer._tool_call_loop`` of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trl_offpolicy.engines.engine import Engine, Rollouts, Sampling
from trl_offpolicy.engines.routing.reported import turn_unreported
from trl_offpolicy.functional.truncated_sampling import KeptIds
from trl_offpolicy.rollouts.agents.chat import Chat
from trl_offpolicy.rollouts.agents.guard import ToolGuard
from trl_offpolicy.rollouts.agents.recorded import WrappedEngine
from trl_offpolicy.rollouts.agents.tools import Answers, Message, Tool, answer_calls


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Completions of several turns, one entry each.

    Args:
        rollouts: the ids, with ``tool_mask``.
        messages: the turns: messages of the assistant and of tools.
        tool_calls: number of tool calls.
        tool_failures: number of these that ended in an error.
    """

    rollouts: Rollouts
    messages: list[list[Message]]
    tool_calls: list[int]
    tool_failures: list[int]


class AgentEngine(WrappedEngine):
    """An engine whose completions may call tools.

    Args:
        engine: the engine that samples each turn.
        chat: the tokenizer with its templates.
        tools: functions that the model may call.
        max_iterations: most rounds of tool calls per completion; None = any number.
        context_length: tokens that the engine can take; tool output that would reach it is left out. None = any.
        guard: bounds the time and the answers of the tools; None = nothing does.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        tools: Sequence[Tool] = (),
        *,
        max_iterations: int | None = None,
        context_length: int | None = None,
        guard: ToolGuard | None = None,
    ) -> None:
        super().__init__(engine)
        self._guard = guard
        self.chat, self.tools = chat, list(tools)
        self.max_iterations, self.context_length = max_iterations, context_length

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, of one or more turns; ``sampling.max_tokens`` is the length of all turns.

        ``tool_mask`` says which tokens the engine sampled.
        """
        return self.converse(prompt_ids, sampling, n=n).rollouts

    def converse(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        n: int = 1,
        tools: Sequence[Sequence[Tool]] | None = None,
    ) -> Episodes:
        """As :meth:`generate`, with the messages.

        Args:
            prompt_ids: ids of the prompts, which tell the model of the tools.
            sampling: how each turn is sampled.
            n: completions per prompt.
            tools: the tools of each completion; None = those of the engine for all.
        """
        first = self.engine.generate(prompt_ids, sampling, n=n)
        toolsets = [self.tools] * len(first) if tools is None else tools
        episodes = [_Episode(first, i, list(known)) for i, known in enumerate(toolsets)]
        for episode in episodes:
            episode.reply = self.chat.parse(episode.ids, episode.prompt, episode.tools)
            episode.messages.append(episode.reply)
        calling = [episode for episode in episodes if episode.calls]
        rounds = 0
        while calling and (self.max_iterations is None or rounds < self.max_iterations):
            calling = self._round(calling, sampling)
            rounds += 1
        return _gathered(episodes)

    @property
    def _refuses_beyond(self) -> int | None:
        """Tokens of prompt and limit together beyond which the engine refuses a request; None = it cuts the answer."""
        limit: int | None = getattr(self.engine, "context_length", None)
        return limit

    def _round(self, calling: Sequence[_Episode], sampling: Sampling) -> list[_Episode]:
        """Run the tools that were called and sample the next turns. Returns the episodes that call tools again."""
        going_on = [episode for episode in calling if self._hear_tools(episode, sampling.max_tokens)]
        if not going_on:
            return []
        # One request samples all of them up to the longest rest; a longer turn is then cut. A server refuses what would
        # not fit into its context: there each is asked for with what it has left.
        longest = max(len(episode.context) for episode in going_on) + _most_left(going_on, sampling)
        fits = self._refuses_beyond is None or longest <= self._refuses_beyond
        for asked in [going_on] if fits else [[episode] for episode in going_on]:
            self._sample_turns(asked, sampling)
        return [episode for episode in going_on if episode.calls]

    def _sample_turns(self, episodes: Sequence[_Episode], sampling: Sampling) -> None:
        """Sample the next turn of each, in one request."""
        contexts = [episode.context for episode in episodes]
        left = _most_left(episodes, sampling)
        if self._refuses_beyond is not None:
            left = max(min(left, self._refuses_beyond - max(map(len, contexts))), 1)
        turns = self.engine.generate(contexts, replace(sampling, max_tokens=left))
        for i, (episode, context) in enumerate(zip(episodes, contexts, strict=True)):
            sampled = episode.add_turn(turns, i, most=sampling.max_tokens - len(episode.ids))
            episode.reply = self.chat.parse(sampled, context, episode.tools) if sampled else {}
            if episode.reply:
                episode.messages.append(episode.reply)

    def _hear_tools(self, episode: _Episode, most: int) -> bool:
        """Run the called tools and append their answers. If these are too long, nothing is appended: False."""
        answers: Answers = answer_calls(episode.calls, episode.tools, guard=self._guard)
        episode.tool_calls += answers.calls
        episode.tool_failures += answers.failures
        suffix = self.chat.suffix_ids(answers.messages)
        length = len(episode.ids) + len(suffix)
        if length > most or (self.context_length is not None and len(episode.prompt) + length >= self.context_length):
            return False
        episode.messages += answers.messages
        episode.add_tool_output(suffix)
        return True


def _most_left(episodes: Sequence[_Episode], sampling: Sampling) -> int:
    """Tokens that the episode with the most left may still have, at least one."""
    return max(max(sampling.max_tokens - len(episode.ids), 1) for episode in episodes)


class _Episode:
    """A completion that grows turn by turn."""

    def __init__(self, rollouts: Rollouts, index: int, tools: list[Tool]) -> None:
        self.tools = tools
        self.prompt = list(rollouts.prompt_ids[index])
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logps: list[float] | None = None if rollouts.sampling_per_token_logps is None else []
        self.rewards: list[float] | None = None if rollouts.token_rewards is None else []
        self.versions: list[int] = []
        self.kept: list[KeptIds] = []
        self.reports = False
        """Whether the engine said of a turn which tokens it kept."""
        self.routes: Any = None
        self.number, self.turns = index, 0
        self.finish_reason = ""
        self.messages: list[Message] = []
        self.reply: Message = {}
        self.tool_calls = self.tool_failures = 0
        self.add_turn(rollouts, index, most=len(rollouts.completion_ids[index]))

    @property
    def context(self) -> list[int]:
        """Ids that the next turn goes on from."""
        return [*self.prompt, *self.ids]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls of the last reply."""
        return self.reply.get("tool_calls") or []

    def add_turn(self, rollouts: Rollouts, index: int, *, most: int) -> list[int]:
        """Append the beginning of a sampled turn, ``most`` tokens at most, and return its ids."""
        sampled = list(rollouts.completion_ids[index][:most])
        self.ids += sampled
        self.mask += [1] * len(sampled)
        self.versions += rollouts.policy_versions[index][:most]
        if self.logps is not None and rollouts.sampling_per_token_logps is not None:
            self.logps += rollouts.sampling_per_token_logps[index][:most]
        if self.rewards is not None and rollouts.token_rewards is not None:
            self.rewards += rollouts.token_rewards[index][:most]
        kept = None if rollouts.sampling_mask is None else rollouts.sampling_mask[index]
        self.reports |= kept is not None
        self.kept.append(KeptIds.unreported(len(sampled)) if kept is None else kept[:most])
        self._add_routes(None if rollouts.routed_experts is None else rollouts.routed_experts[index], sampled)
        was_cut = most < len(rollouts.completion_ids[index])
        self.finish_reason = "length" if was_cut else rollouts.finish_reasons[index]
        return sampled

    def _add_routes(self, routes: Any, sampled: list[int]) -> None:
        """Keep the routes of earlier turns as they were; take those of the tool output and the new turn.

        Raises:
            ValueError: the engine reported another turn and not this one, or not all tokens of this one.
        """
        self.turns += 1
        fed = len(self.prompt) + len(self.ids) - 1  # the last token is not fed
        if routes is None:
            if self.routes is not None and sampled:
                raise turn_unreported(self.turns, self.number, "none")
            return
        if self.routes is None and self.turns > 1:  # what is reported of earlier turns is not how they were sampled
            raise turn_unreported(1, self.number, "none")
        if len(routes) < fed:
            raise turn_unreported(self.turns, self.number, f"{len(routes)} of {fed} tokens")
        if self.routes is None:
            self.routes = routes[:fed]
            return
        import torch

        known = torch.as_tensor(self.routes)
        self.routes = torch.cat([known, torch.as_tensor(routes)[len(known) : fed]])

    def add_tool_output(self, ids: list[int]) -> None:
        """Append ids that no policy sampled. Placeholders stand in their other fields: log-prob and reward 0."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.versions += [self.versions[-1] if self.versions else -1] * len(ids)
        if self.logps is not None:
            self.logps += [0.0] * len(ids)
        if self.rewards is not None:
            self.rewards += [0.0] * len(ids)
        self.kept.append(KeptIds.alone(ids))


def _gathered(episodes: Sequence[_Episode]) -> Episodes:
    logps = [episode.logps for episode in episodes]
    kept = [KeptIds.joined(episode.kept) if episode.reports else None for episode in episodes]
    routes = [episode.routes for episode in episodes]
    rollouts = Rollouts(
        prompt_ids=[episode.prompt for episode in episodes],
        completion_ids=[episode.ids for episode in episodes],
        sampling_per_token_logps=_all_or_none(logps),
        policy_versions=[episode.versions for episode in episodes],
        finish_reasons=[episode.finish_reason for episode in episodes],
        routed_experts=_all_or_none(routes),
        sampling_mask=_all_or_none(kept),
        tool_mask=[episode.mask for episode in episodes],
        token_rewards=_all_or_none([episode.rewards for episode in episodes]),
    )
    return Episodes(
        rollouts=rollouts,
        messages=[episode.messages for episode in episodes],
        tool_calls=[episode.tool_calls for episode in episodes],
        tool_failures=[episode.tool_failures for episode in episodes],
    )


def _all_or_none(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values
