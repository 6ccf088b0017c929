"""Sampling ahead in Lightning: which prompts come next, and what takes the place of the old policy on their rows.

The stream of prompts is known in advance, so the next generation batches are read from it. What is in the queue is not
part of a checkpoint: a resumed run requests it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_module import models
from lightning_module.engines import engine_type, forward_of, transfer_of
from lightning_module.host import Host
from lightning_module.streams import MicroStep
from trl_offpolicy.engines.engine import Engine, Rollouts, Sampling
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts.agents import AgentBatch, Completions, WrappedEngine
from trl_offpolicy.rollouts.ahead.checks import (
    check_adapter,
    check_agents,
    check_arguments,
    check_keeps,
    check_objective,
    check_server,
    check_snapshots,
)
from trl_offpolicy.rollouts.ahead.local_weights import free_gathered, is_sharded
from trl_offpolicy.rollouts.ahead.lookahead import generations_admitted, positions_ahead
from trl_offpolicy.rollouts.ahead.old_policy import NO_AVERAGE, OldPolicy, Score
from trl_offpolicy.rollouts.ahead.queue import Prompts, RolloutsAhead
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings
from trl_offpolicy.rollouts.batches import trainable

_COPIES_WEIGHTS = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
"""Strategies under which the weights of a version can be copied and exchanged."""
_NEEDED = ("parts", "cut", "can_cut")
"""What a server has beyond an engine: requests in parts, and their end on demand."""
_NEEDED_TO_KEEP = ("serve_several", "takes_adapter", "most_adapters", "keeps_kv")
"""And what it has if requests in flight keep their adapter."""


class ModuleAhead:
    """The queue of a module, with what replaces the old policy.

    Args:
        module: the module whose engine samples ahead.
        settings: its parsed argument ``async_rollouts``.
    """

    def __init__(self, module: Host, settings: AsyncSettings) -> None:
        self._module, self._settings = module, settings
        self._old = OldPolicy(settings)
        self._queue: RolloutsAhead | None = None
        self.versions: list[list[int]] = []
        """Of each token, in the batch that was handed out last."""

    def start(self, engine: Engine | None) -> None:
        """Begin a run with an empty queue.

        Raises:
            TypeError: the engine is not a server.
            EngineError: a sync is to cut requests in flight, but the server cannot do that.
            ValueError: copies of the weights are needed, which are not made under the strategy.
        """
        self.close()
        trainer, server = self._module.trainer, engine
        needed = (*_NEEDED, *_NEEDED_TO_KEEP) if self._settings.keeps else _NEEDED
        if lacking := [name for name in needed if not hasattr(server, name)]:
            raise TypeError(
                f"engine must be a server with async_rollouts, but got a {type(engine).__name__}, which lacks "
                f"{', '.join(lacking)} (trl_offpolicy.engines.server.engine.ServerEngine has them)."
            )
        copies = isinstance(trainer.strategy, _COPIES_WEIGHTS)
        strategy = type(trainer.strategy).__name__
        whole = models.keeps_whole(trainer.strategy)
        check_snapshots(self._settings, strategy=None if copies else strategy, sharding=None if whole else strategy)
        check_adapter(self._settings, has_adapter=ModelWeights(self._module.policy).has_adapter)
        check_server(self._settings, server)
        in_turns = self._module.agents.in_turns
        check_agents(self._settings, ranks=trainer.world_size if in_turns else 1)
        engine = trainer.strategy.deepspeed_engine if isinstance(trainer.strategy, DeepSpeedStrategy) else None
        self._old = OldPolicy(self._settings, release=partial(free_gathered, engine))
        self._queue = RolloutsAhead(self._settings, rank=trainer.global_rank, version=lambda: trainer.global_step)
        asks = trainer.is_global_zero or in_turns
        self._queue.start(server if asks else None)  # type: ignore[arg-type]

    def close(self) -> None:
        """Give up requests in flight and empty the queue."""
        if self._queue is not None:
            self._queue.close()
        self._queue, self.versions = None, []

    def end_epoch(self) -> None:
        """Forget what was requested for the rest of an epoch that ended early.

        After a whole epoch nothing is left. The next epoch has other prompts, or the same ones, whose old responses
        would be learned from at a larger lag than the bound.
        """
        if self._queue is not None:
            self._queue.drop()

    # ----------------------------------------------------------------------------------------------------- sampling

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which weights may change (:meth:`RolloutsAhead.quiet`). Afterwards the new ones are kept."""
        if self._queue is None:  # a validation without training
            yield
            return
        with self._queue.quiet():
            yield
            version = self._module.trainer.global_step
            self._old.keep(self._module.policy, version, oldest=self._queue.oldest_version)

    @property
    def in_flight(self) -> bool:
        """True if the generation batch that is due was begun before, with its environments."""
        return self._module.agents.in_turns and bool(self._queue)

    def sample(self, engine: Engine, step: MicroStep, batch: AgentBatch | None) -> tuple[AgentBatch, Completions]:
        """The generation batch of ``step``, sampled before. It also requests more. All ranks call it.

        Args:
            engine: the server.
            step: the micro-step that needs the batch.
            batch: what is asked for; None = it is :attr:`in_flight`.

        Raises:
            EngineError: on all ranks, if a batch could not be sampled or the rows are not those that were requested.
        """
        agents = self._module.agents
        if agents.in_turns:
            return self._take_sampled(step, batch)
        assert batch is not None
        due = _Due(engine, lambda ids: self._take(step, ids))
        return batch, agents.sample(due, batch, again=engine)

    def _take_sampled(self, step: MicroStep, due: AgentBatch | None) -> tuple[AgentBatch, Completions]:
        """As :meth:`_take`, of batches that this rank samples as a whole, tools and all."""
        assert self._queue is not None
        module = self._module

        def sampler(due: AgentBatch | None, number: int) -> Callable[[Engine], tuple[AgentBatch, Completions]]:
            rows = step.coming(number)

            def sample(engine: Engine) -> tuple[AgentBatch, Completions]:
                batch = due or module.agents.batch(rows, step.plan.num_generations)
                return batch, module.agents.sample(engine, batch)

            return sample

        def upcoming(first: int, end: int) -> Iterator[Callable[[Engine], tuple[AgentBatch, Completions]]]:
            for number in self._reached(step, end)[first:]:
                yield sampler(due if number == 0 else None, number)

        with module.measuring.clock.part("waiting"):
            found, waited = self._queue.take_sampled(upcoming=upcoming, admitted=self._admitted(step))
        module.measuring.add_rollout_number("wait_seconds", waited)
        return found

    def _take(self, step: MicroStep, ids: Prompts) -> Rollouts:
        """The completions of the generation batch that is due. It also requests more. All ranks call it.

        Args:
            step: the micro-step that needs them.
            ids: token ids of its prompts.

        Raises:
            EngineError: on all ranks, if a request failed or the rows are not those that were requested.
        """
        assert self._queue is not None
        module, n = self._module, step.plan.num_generations

        def repeated(prompts: Prompts) -> Prompts:
            return [one for one in prompts for _ in range(n)]

        def upcoming(first: int, end: int) -> Iterator[Prompts]:
            for number in self._reached(step, end)[first:]:
                yield repeated(module.agents.prompt_ids(step.coming(number)))

        with module.measuring.clock.part("waiting"):
            rollouts, waited = self._queue.take(
                repeated(ids),
                upcoming=upcoming,
                admitted=self._admitted(step),
                options=module.sampling.vllm_options,
                n=n,
            )
        module.measuring.add_rollout_number("wait_seconds", waited)
        return rollouts

    def _admitted(self, step: MicroStep) -> float:
        accumulation = self._module.trainer.accumulate_grad_batches
        return generations_admitted(
            lag=self._settings.lag,
            every=step.plan.window,
            in_step=accumulation - self._done(step) % accumulation,
            accumulation=accumulation,
        )

    @staticmethod
    def _done(step: MicroStep) -> int:
        """Micro-steps of this epoch before ``step``."""
        return int(step.generation[1] * step.plan.window + step.position)

    def _reached(self, step: MicroStep, count: int) -> list[int]:
        """0, 1, ...: which of the next ``count`` generation batches the run reaches in this epoch, from this one on."""
        trainer, window, done = self._module.trainer, step.plan.window, self._done(step)
        left = trainer.num_training_batches - done
        if trainer.max_steps >= 0:
            accumulation = trainer.accumulate_grad_batches
            steps = trainer.max_steps - trainer.global_step
            left = min(left, steps * accumulation - done % accumulation)
        starts = positions_ahead(position=0, every=window, count=count, left=int(left) + step.position)
        return [start // window for start in starts]

    # ---------------------------------------------------------------------------------------------------- log-probs

    @property
    def reads_scores(self) -> bool:
        """True if log-probs at the current weights are worth a forward before the loss step."""
        return self._old.reads_scores(self._module.objective.proximal)

    @property
    def name_of_scores(self) -> str | None:
        """The key for log-probs at the current weights; None = nothing reads them (:class:`OldPolicy`)."""
        return self._old.name_of_scores(self._module.objective.proximal)

    def complete(self, rows: dict[str, Tensor], score: Score) -> None:
        """Add the version of each token to a generation batch, and give its log-probs their right names.

        Args:
            rows: the batch.
            score: scores its completions; also called for weights that are not the current ones.
        """
        self._old.complete(
            rows,
            self.versions,
            model=self._module.policy,
            proximal=self._module.objective.proximal,
            score=score,
            mask=trainable(rows),
            current=self._module.trainer.global_step,
        )

    # -------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The average of the weights with ``old_logps: ewma``; nothing without it, or if weights are sharded."""
        if self._old.average is None or is_sharded(self._module.policy):
            return {}
        return self._old.average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if self._old.average is None:
            return
        if state:
            self._old.average.load_state_dict(state)
        else:
            rank_zero_warn(NO_AVERAGE)


class _Due(WrappedEngine):
    """A server that answers with what was requested before."""

    def __init__(self, engine: Engine, take: Callable[[Prompts], Rollouts]) -> None:
        super().__init__(engine)
        self._take = take

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """The completions that were requested for these prompts."""
        return self._take([list(ids) for ids in prompt_ids])


def sample_ahead(module: Host) -> ModuleAhead | None:
    """What samples ahead for a module whose settings are known; None = it samples and learns in turn.

    Raises:
        ValueError: the settings contradict each other; the message names the field.
    """
    given = module.settings
    settings = AsyncSettings.parse(given["async_rollouts"])
    if settings is None:
        return None
    if (kind := engine_type(given["engine"])) in ("transformers", "vllm"):
        raise ValueError(
            f"async_rollouts must be left out with engine {kind!r}: an engine in the trainer's process cannot sample "
            "while the trainer learns. Start a server (trl-offpolicy serve) and set engine: {type: server, base_url: "
            "http://127.0.0.1:8000}."
        )
    check_keeps(settings, transfer_of(given["engine"]), forward_of(given["engine"])["weight_rounding"])
    check_arguments(settings, given)
    settings.check_sampling(module.sampling.extra)
    check_objective(settings, module.objective)
    return ModuleAhead(module, settings)
