"""Tools, environments and rollout functions of a module, and the check of the ids that it trains on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from lightning_module.host import Host
from lightning_module.prompts import Prompts
from trl_offpolicy.engines.engine import Engine
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.parts import imported
from trl_offpolicy.rollouts.agents import AgentBatch, Chat, Completions, Environments, Lane, Lanes, RolloutSampler
from trl_offpolicy.rollouts.agents.guard import ToolGuard, check_tool_timeout
from trl_offpolicy.rollouts.agents.sampler import check_arguments
from trl_offpolicy.rollouts.screening import Screen, check_on_bad_rollout
from trl_offpolicy.rollouts.token_ids import TokenIds
from trl_offpolicy.stats import Stats


class Agents:
    """Samples the completions of a module: of one turn, with tools, in environments, or by a function of the user's.

    Args:
        module: the module, with its settings.

    Raises:
        TypeError: a setting is no function.
        ValueError: settings contradict each other, or a tool cannot be described to a model.
    """

    def __init__(self, module: Host) -> None:
        given = module.settings
        self._module = module
        tools = given["tools"] or []
        self.tools = [_named(tool, "tools") for tool in (tools if isinstance(tools, list | tuple) else [tools])]
        check_tool_timeout(given["tool_timeout"])
        self._guard = ToolGuard(timeout=given["tool_timeout"])
        self.environments = _environments(given["environment_factory"], self._guard)
        self.rollout = _named(given["rollout"], "rollout")
        self._most = given["max_tool_calling_iterations"]
        check_arguments(self.tools, self.environments, self.rollout, self._most)
        self._lanes: Lanes | None = None
        check_on_bad_rollout(given["on_bad_rollout"])
        self._ids = TokenIds(None, given["check_token_ids"])  # the tokenizer is loaded with the policy

    @property
    def has_tools(self) -> bool:
        """True if completions may call tools."""
        return bool(self.tools) or (self.environments is not None and bool(self.environments.tools))

    @property
    def in_turns(self) -> bool:
        """True if completions have turns by this kit's loop, or environments to themselves."""
        return bool(self.tools) or self.environments is not None

    @property
    def rewards(self) -> list[tuple[str, Callable[..., Any]]]:
        """(name, reward function) of each class of environments that has ``get_reward``."""
        return [] if self.environments is None else self.environments.rewards()

    def start(self, prompts: Prompts) -> None:
        """Check the templates and that the ranks need not wait for each other. Called before the engine is built.

        Raises:
            ValueError: see :class:`~trl_offpolicy.rollouts.agents.RolloutSampler`; or ranks share the sampling model.
        """
        self._check_ranks()
        self._guard.know(prompts.tokenizer, max_tokens=self._module.sampling.max_tokens)
        self._ids.tokenizer = prompts.tokenizer
        threads = self._module.ahead is not None and self.in_turns  # a tokenizer is not for several of them
        chat = Chat(
            tokenizer=copy.deepcopy(prompts.tokenizer) if threads else prompts.tokenizer,
            options=self._module.settings["chat_template_kwargs"] or {},
            processor=prompts.processor,
        )
        factory = self._module.settings["environment_factory"]
        self._lanes = Lanes(
            self._lane(chat, prompts, self.environments),
            lambda: self._lane(chat, prompts, _environments(factory, self._guard)),
        )

    def _lane(self, chat: Chat, prompts: Prompts, environments: Environments | None) -> Lane:
        sampler = RolloutSampler(
            chat,
            tools=self.tools,
            environments=environments,
            rollout=self.rollout,
            max_iterations=self._most,
            guard=self._guard,
        )
        screen = Screen(
            self._module.settings["on_bad_rollout"],
            vocabulary=getattr(self._module.policy.config.get_text_config(), "vocab_size", None),
            filler=next(iter(prompts.ends), prompts.pad),
            decode=chat.tokenizer.decode,
        )
        return Lane(sampler, screen)

    def _check_ranks(self) -> None:
        trainer, spec = self._module.trainer, self._module.settings["engine"]
        loops = bool(self.tools) or self.environments is not None or self.rollout is not None
        if trainer.world_size == 1 or not loops:
            return
        options = spec if isinstance(spec, Mapping) else {"type": spec}
        own = options["type"] == "transformers" or isinstance(spec, TransformersEngine)
        sharded = not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if own and sharded:
            raise ValueError(
                "tools, environment_factory and rollout must have an engine on each rank, but the ranks share the "
                "sharded model that samples: each calls it as often as its rows need, and they would wait for each "
                "other. Use another engine, or one rank."
            )

    # ------------------------------------------------------------------------------------------------------- sampling

    def batch(self, rows: Sequence[Mapping[str, Any]], count: int) -> AgentBatch:
        """Ask for ``count`` completions of each row; environments are reset.

        Raises:
            NotImplementedError: rows have images, and a setting or the engine does not go with them.
        """
        assert self._lanes is not None
        batch = self._lanes.batch(rows, count)
        if batch.request.images is not None:
            check_images(self._module)
        return batch

    def prompt_ids(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Token ids of the prompts of rows that are asked for later."""
        batch = self.batch(rows, 1)
        self.give_back(batch)
        return batch.request.prompt_ids

    def sample(self, engine: Engine, batch: AgentBatch, *, again: Engine | None = None) -> Completions:
        """The completions of a batch (:meth:`AgentBatch.sample`)."""
        longest = context_length(engine, self._module.policy)
        return batch.sample(engine, self._module.sampling, context_length=longest, again=again)

    def give_back(self, batch: AgentBatch) -> None:
        """:meth:`Lanes.give_back`."""
        assert self._lanes is not None
        self._lanes.give_back(batch)

    def guard_stats(self, device: torch.device) -> Stats:
        """What the tools of a generation batch did beyond their bounds; empty if there are no tools."""
        return Stats({}) if not self.has_tools else self._guard.stats(device)

    def check_ids(self, rows: dict[str, Tensor], completions: Completions) -> Stats:
        """Whether the rows hold the ids that the engine sampled (:class:`TokenIds`).

        Args:
            rows: tensors of the generation batch.
            completions: what was sampled for it.
        """
        return self._ids(rows, completions.calls, completions.sampled_ids)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Names of what a checkpoint cannot hold if it has no import path."""
        return {
            "tools": [tool.__name__ for tool in self.tools],
            "environment_factory": self.environments is not None,
            "rollout": self.rollout is not None,
        }

    def check_restored(self, state: Mapping[str, Any]) -> None:
        """Raise if the run of a checkpoint had what this module lacks: it would go on without, unseen.

        Raises:
            ValueError: the message names the argument.
        """
        for name, had in state.items():
            if had and not self.state_dict()[name]:
                raise ValueError(
                    f"{name} must be given again: the run of the checkpoint had it{_listed(had)}, and a function "
                    "without an import path is not in a checkpoint."
                )


SERVER_TAKES_IDS = (
    "whose requests hold token ids: vLLM's server takes images by /v1/chat/completions/render, which this kit does not "
    "call"
)


def check_images(module: Host) -> None:
    """Raise unless the settings and the engine of a module go with images.

    Raises:
        NotImplementedError: the message names the setting.
    """
    routed = module.experts.routing.options.mode != "none"
    refused = {
        "async_rollouts": module.ahead is not None,
        "replay": module.replay is not None,
        "routing_replay": routed,
    }
    if found := [name for name, value in refused.items() if value]:
        raise NotImplementedError(
            f"{' and '.join(found)} must be left out with images: what is kept and sent there is text."
        )
    engine: Any = module.generation.engine  # type: ignore[attr-defined]
    if "images" not in inspect.signature(engine.generate).parameters:
        why = SERVER_TAKES_IDS if isinstance(engine, ServerEngine) else "which is sent token ids alone"
        raise NotImplementedError(
            "engine must take images with rows that have them (generate(..., images=...)), as 'transformers' and "
            f"'vllm' do, but got a {type(engine).__name__}, {why}."
        )


def context_length(engine: Engine, policy: Any) -> int | None:
    """Tokens that the engine can take: what vLLM in this process or its server says, else those of the model."""
    told = getattr(engine, "context_length", None)
    if told is not None:
        return int(told)
    llm = getattr(getattr(engine, "llm", None), "llm_engine", None)
    if llm is not None:
        return int(llm.model_config.max_model_len)
    return getattr(policy.config.get_text_config(), "max_position_embeddings", None)


def _named(value: Any, where: str) -> Any:
    return imported(value, where=where) if isinstance(value, str) else value


def _environments(factory: Any, guard: ToolGuard) -> Environments | None:
    if factory is None:
        return None
    where = "environment_factory"
    if isinstance(factory, Mapping):
        return Environments({name: _named(one, where) for name, one in factory.items()}, guard=guard)
    return Environments(_named(factory, where), guard=guard)


def _listed(had: Any) -> str:
    return f" ({', '.join(had)})" if isinstance(had, list) else ""
