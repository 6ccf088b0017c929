"""Tools and environments of a TRL trainer that samples ahead.

TRL's own tool loop calls the engine several times at the trainer's pace. Here this kit's loop, which has the same
semantics, samples whole episodes in flight. When a batch is due, TRL is handed what it would have made itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from trl.chat_template_utils import parse_response

from trl_offpolicy.engines.engine import Engine
from trl_offpolicy.rollouts.agents import AgentBatch, Chat, Completions, Environments, Lane, Lanes, RolloutSampler
from trl_offpolicy.rollouts.agents.chat import chat_tokenizer
from trl_offpolicy.rollouts.screening import Screen
from trl_offpolicy.rollouts.token_ids import runs

Rows = Sequence[Mapping[str, Any]]


def read_reply(tokenizer: Any, ids: Sequence[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """TRL's ``parse_response``; a reply of a thousand open brackets, which no JSON reader takes, is plain text too."""
    try:
        found: dict[str, Any] = parse_response(tokenizer, ids, *args, **kwargs)
    except RecursionError:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    return found


class Landed(NamedTuple):
    """A generation batch that was sampled in flight."""

    batch: AgentBatch
    completions: Completions


class TrainerAgents:
    """Samples a trainer's episodes, and hands them to TRL.

    Args:
        trainer: the built trainer.
        tools: its argument of the name.
        environment_factory: its argument of the name.

    Raises:
        ValueError: the chat template or the tokenizer does not go with this kit's loop.
    """

    def __init__(self, trainer: Any, *, tools: Sequence[Any], environment_factory: Any) -> None:
        self._trainer, self._tools, self._factory = trainer, list(tools), environment_factory
        self._chat = Chat(
            tokenizer=chat_tokenizer(copy.deepcopy(trainer._tokenizer), trainer.chat_template),  # for other threads
            options=trainer.chat_template_kwargs,
        )
        self._lanes = Lanes(self._lane(), self._lane)
        self.landed: Landed | None = None
        """What TRL is handed now; None = TRL samples by itself, as in an evaluation."""

    def _lane(self) -> Lane:
        trainer, guard = self._trainer, self._trainer._guard
        sampler = RolloutSampler(
            self._chat,
            tools=self._tools,
            environments=None if self._factory is None else Environments(self._factory, guard=guard),
            max_iterations=trainer.args.max_tool_calling_iterations,
            guard=guard,
        )
        like = trainer._screen.screen
        screen = Screen(like.mode, vocabulary=like.vocabulary, filler=like.filler, decode=self._chat.tokenizer.decode)
        return Lane(sampler, screen)

    def sampler(self, rows: Rows) -> Callable[[Engine], Landed]:
        """What samples a generation batch, in a thread of its own.

        Args:
            rows: rows of the data set, each repeated for each of its completions.
        """
        trainer = self._trainer
        count, sampling = trainer.num_generations, trainer.vllm_generation._sampling()
        limit: int | None = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)

        def sample(engine: Engine) -> Landed:
            batch = self._lanes.batch(rows[::count], count)
            longest = getattr(engine, "context_length", None) or limit
            return Landed(batch, batch.sample(engine, sampling, context_length=longest))

        return sample

    @contextmanager
    def batch(self, inputs: Any) -> Iterator[Any]:
        """A context in which TRL takes the batch that is due for what it samples; yields the rows to give to it.

        Weights are sent and more batches are requested before. In an evaluation TRL samples by itself.

        Args:
            inputs: TRL's rows of the batch.
        """
        trainer = self._trainer
        if not trainer.model.training:
            yield inputs
            return
        with trainer._clock.part("generation", counted=True):
            if trainer.state.global_step != trainer._last_loaded_step:
                trainer.vllm_generation.sync_weights()
                trainer._last_loaded_step = trainer.state.global_step
            landed = trainer._ahead.take_sampled(self.sampler)
            trainer._ahead.versions = landed.completions.rollouts.policy_versions
        with self._handed_over(landed):
            yield landed.batch.request.rows
            self._lanes.give_back(landed.batch)

    @contextmanager
    def _handed_over(self, landed: Landed) -> Iterator[None]:
        """TRL resets no environments in this context, because those of the batch have acted already."""
        trainer = self._trainer
        own = trainer.environment_factories, trainer.environments, trainer._screen.screen
        trainer.environment_factories = trainer.environments = None
        self.landed, trainer._screen.screen = landed, landed.batch.lane.screen
        self._report(landed.completions)
        try:
            yield
        finally:
            self.landed = None
            trainer.environment_factories, trainer.environments, trainer._screen.screen = own

    def _report(self, completions: Completions) -> None:
        """Give the trainer's engine what the server said of each turn, and of the routing of each episode."""
        engine, rollouts = self._trainer.vllm_generation, completions.rollouts
        engine.calls += completions.calls
        prompts, ids = rollouts.prompt_ids, rollouts.completion_ids
        engine.add_reports(prompts, ids, routes=rollouts.routed_experts or [None] * len(ids), kept=[])
        for row, kept in enumerate(rollouts.sampling_mask or []):
            for start, end in [] if kept is None else self._turns(row):
                before = [[*prompts[row], *ids[row][:start]]]
                engine.add_reports(before, [ids[row][start:end]], routes=[None], kept=[kept[start:end]])

    def _turns(self, row: int) -> list[tuple[int, int]]:
        """(start, end) of each turn of a completion."""
        mask = self._rollouts.tool_mask
        return [(0, len(self._rollouts.completion_ids[row]))] if mask is None else runs([bool(x) for x in mask[row]])

    # ------------------------------------------------------------------------------------------------- TRL's methods

    def tokenize_prompts(self) -> Any:
        """TRL's ``_tokenize_prompts`` of the batch that landed: ids, images, and their further fields."""
        return self._rollouts.prompt_ids, None, {}

    def generate_single_turn(self) -> Any:
        """TRL's ``_generate_single_turn``: ids and log-probs of the first turn."""
        self._trainer.environments = self._landed.batch.request.environments  # for the rewards
        rollouts = self._rollouts
        ends = [self._turns(row)[0][1] for row in range(len(rollouts))]
        columns = (rollouts.completion_ids, rollouts.sampling_per_token_logps)
        return tuple([values[:end] for values, end in zip(column, ends, strict=True)] for column in columns)

    def tool_call_loop(self) -> Any:
        """TRL's ``_tool_call_loop``: masks, messages, ids, log-probs, numbers of calls and failures, and images."""
        rollouts, completions = self._rollouts, self._landed.completions
        calls, failures = sum(completions.tool_calls or []), sum(completions.tool_failures or [])
        ids, logps = rollouts.completion_ids, rollouts.sampling_per_token_logps
        return rollouts.tool_mask, completions.completions, ids, logps, calls, failures, [[] for _ in ids]

    @property
    def _landed(self) -> Landed:
        assert self.landed is not None
        return self.landed

    @property
    def _rollouts(self) -> Any:
        return self._landed.completions.rollouts


def agents_ahead(trainer: Any, given: Mapping[str, Any]) -> TrainerAgents | None:
    """What samples the episodes of a trainer ahead; None = it has no agents, or TRL's own loop samples in turn.

    Args:
        trainer: the trainer, all but built.
        given: its arguments by name.
    """
    tools, factory = given.get("tools") or [], given.get("environment_factory")
    if trainer._ahead is None or not (tools or factory):
        return None
    return TrainerAgents(trainer, tools=tools, environment_factory=factory)
