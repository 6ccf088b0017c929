"""Sampling ahead in the TRL trainer: which prompts come next, and how the queue answers TRL's requests."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from trl_offpolicy.engines.engine import Engine
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts.ahead.checks import check_adapter, check_server, check_snapshots
from trl_offpolicy.rollouts.ahead.local_weights import free_gathered, is_sharded
from trl_offpolicy.rollouts.ahead.lookahead import Lookahead, generations_admitted, positions_ahead
from trl_offpolicy.rollouts.ahead.old_policy import NO_AVERAGE, OLD, OldPolicy
from trl_offpolicy.rollouts.ahead.queue import Prompts, RolloutsAhead
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings
from trl_offpolicy.rollouts.batches import trainable

T = TypeVar("T")
AVERAGE_FILE = "offpolicy_average.safetensors"
"""In a checkpoint: the moving average of the weights with ``old_logps: ewma``."""
logger = logging.getLogger(__name__)


class TrainerAhead:
    """The queue of an :class:`~trl_offpolicy.trainer.OffPolicyGRPOTrainer`, with what replaces the old policy.

    Args:
        trainer: the trainer whose data it reads ahead.
        settings: the ``async_rollouts`` field of its configuration.
    """

    def __init__(self, trainer: Any, settings: AsyncSettings) -> None:
        self._trainer, self._engine, self._lag = trainer, trainer.vllm_generation, settings.lag
        self._old = OldPolicy(settings, release=lambda: free_gathered(trainer.deepspeed))
        self._every = trainer.args.steps_per_generation * trainer.num_iterations
        rank = trainer.accelerator.process_index
        self._queue = RolloutsAhead(settings, rank=rank, version=lambda: self._engine.version)
        self.close()

    def start(self) -> None:
        """Begin a run with an empty queue."""
        self.close()
        self._queue.start(self._engine.server)

    def close(self) -> None:
        """Give up requests in flight and empty the queue."""
        self._queue.close()
        self.versions: list[list[int]] = []  # of each token, in the batch that was handed out last
        self._epoch: Iterator[Any] | None = None
        self._lookahead = Lookahead(iter(()))
        self._first_step = 0

    # --------------------------------------------------------------------------------------------------------- data

    def items(self, epoch: Iterator[Any]) -> Lookahead:
        """Wrap the iterator of an epoch, for the next optimizer step to read from."""
        if epoch is not self._epoch:
            self._queue.drop()  # of an epoch that a callback ended early
            self._epoch, self._lookahead = epoch, Lookahead(epoch)
        self._lookahead.forget()
        self._first_step = self._trainer._step
        return self._lookahead

    def _upcoming(self, first: int, end: int) -> Iterator[Any]:
        """Rows of generation batches, the present one being number 0; fewer near the end of the epoch or run."""
        trainer = self._trainer
        later = trainer.state.max_steps - trainer.state.global_step - 1
        left = self._in_step + later * trainer.args.gradient_accumulation_steps
        for at in positions_ahead(position=self._position, every=self._every, count=end, left=left)[first:]:
            if (rows := self._lookahead.at(at)) is None:
                return
            yield rows

    @property
    def _admitted(self) -> float:
        return generations_admitted(
            lag=self._lag,
            every=self._every,
            in_step=self._in_step,
            accumulation=self._trainer.args.gradient_accumulation_steps,
        )

    @property
    def _position(self) -> int:
        """Number of the present micro-batch in its optimizer step."""
        return int(self._trainer._step - self._first_step)

    @property
    def _in_step(self) -> int:
        """Micro-batches that are left of the optimizer step, the present one included."""
        return int(self._trainer.current_gradient_accumulation_steps - self._position)

    def _tokenized(self, rows: list[dict[str, Any]]) -> Prompts:
        """Token ids of the rows' prompts, made as TRL will make them when the batch is due."""
        if any(row.get(name) is not None for row in rows for name in ("image", "images")):
            raise ValueError("async_rollouts must be left out with images: their requests are not sent ahead.")
        ids, images, _ = self._trainer._tokenize_prompts(copy.deepcopy([row["prompt"] for row in rows]))
        if images is not None:
            raise ValueError("async_rollouts must be left out with images in the prompts.")
        return [list(row) for row in ids]

    # ----------------------------------------------------------------------------------------------------- sampling

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which weights may change (:meth:`RolloutsAhead.quiet`). Afterwards the new ones are kept."""
        with self._queue.quiet():
            yield
            self._old.keep(self._trainer.model, self._engine.version, oldest=self._queue.oldest_version)

    def generate(self, prompts: list[list[int]], num_generations: int) -> Any:
        """TRL's contract of ``generate``, for the batch that is due. It also requests more. All ranks call it.

        Raises:
            EngineError: on all ranks, if a request failed or the rows are not those that were requested.
        """

        def options() -> dict[str, Any]:
            return dict(self._engine._sampling().vllm_options())

        with self._trainer._clock.part("waiting"):
            rollouts, waited = self._queue.take(
                prompts,
                upcoming=lambda first, end: map(self._tokenized, self._upcoming(first, end)),
                admitted=self._admitted,
                options=options,
                n=num_generations,
            )
        self._trainer._metrics["train"]["offpolicy/rollout/wait_seconds"].append(waited)
        self.versions, ids = rollouts.policy_versions, rollouts.completion_ids
        routes, kept = rollouts.routed_experts or [None] * len(ids), rollouts.sampling_mask or []
        self._engine.add_reports(prompts, ids, routes=routes, kept=kept)
        logps = [[[value] for value in row] for row in rollouts.sampling_per_token_logps or []]
        return prompts, ids, logps, [[[token] for token in row] for row in ids]

    def take_sampled(self, sampler: Callable[[list[dict[str, Any]]], Callable[[Engine], T]]) -> T:
        """A batch of agents that is due (:meth:`RolloutsAhead.take_sampled`). It also requests more.

        Args:
            sampler: makes, of the rows of a generation batch, the function that samples it.
        """
        with self._trainer._clock.part("waiting"):
            found, waited = self._queue.take_sampled(
                upcoming=lambda first, end: map(sampler, self._upcoming(first, end)), admitted=self._admitted
            )
        self._trainer._metrics["train"]["offpolicy/rollout/wait_seconds"].append(waited)
        return found

    # ---------------------------------------------------------------------------------------------------- log-probs

    @property
    def name_of_scores(self) -> str | None:
        """The key for log-probs at the current weights; None = nothing reads them (:class:`OldPolicy`)."""
        if not self._trainer.model.training:
            return OLD
        return self._old.name_of_scores(self._trainer.objective.proximal)

    def complete(self, output: dict[str, Any]) -> None:
        """Add the version of each token to TRL's generation batch, and give its log-probs their right names."""
        self._old.complete(
            output,
            self.versions,
            model=self._trainer.model,
            proximal=self._trainer.objective.proximal,
            score=partial(self._score, output),
            mask=trainable(output),
            current=self._engine.version,
        )

    def _score(self, output: dict[str, Any], model: Any) -> Tensor:
        logps: Tensor = self._trainer._score_old(output, "train", with_sums=False, model=model)[0]
        return logps

    # -------------------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write the average of ``old_logps: ewma`` into a checkpoint; nothing without it, or if weights are sharded."""
        if self._old.average is None or is_sharded(self._trainer.model):
            return
        state = self._old.average.state_dict()
        parts = {name: value.contiguous() for name, value in state["average"].items()}
        save_file(parts, folder / AVERAGE_FILE, metadata={"version": str(state["version"])})

    def load(self, folder: Path) -> None:
        """Continue from :meth:`save`; without its file the average starts anew, and a warning says so."""
        if self._old.average is None:
            return
        if not (folder / AVERAGE_FILE).exists():
            logger.warning(NO_AVERAGE)
            return
        with safe_open(folder / AVERAGE_FILE, framework="pt") as file:
            average = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            version = int(file.metadata()["version"])
        self._old.average.load_state_dict({"version": version, "average": average})


class _Run(TrainerCallback):  # type: ignore[misc]
    """Empties the queue when a run begins and when it ends."""

    def __init__(self, ahead: TrainerAhead) -> None:
        self._ahead = ahead

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ahead.start()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._ahead.close()


def sample_ahead(trainer: Any) -> TrainerAhead | None:
    """Have the trainer's engine sample ahead, if its configuration asks for that.

    Raises:
        ValueError: the weights cannot be copied.
        EngineError: a sync is to cut requests in flight, but the server cannot do that.
    """
    settings = AsyncSettings.parse(trainer.args.async_rollouts)
    if settings is None:
        return None
    fsdp1 = trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version < 2
    sharding = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed" if trainer.is_deepspeed_enabled else None
    check_snapshots(settings, strategy="FSDP1 (fsdp_version: 1)" if fsdp1 else None, sharding=sharding)
    check_adapter(settings, has_adapter=ModelWeights(trainer.vllm_generation.model).has_adapter)
    if (server := trainer.vllm_generation.server) is not None:
        check_server(settings, server)
    ahead = TrainerAhead(trainer, settings)
    trainer.vllm_generation.ahead, trainer.vllm_generation.quiet = ahead, ahead.quiet
    trainer._leave_out_old |= not OldPolicy(settings).reads_scores(trainer.objective.proximal)
    trainer.add_callback(_Run(ahead))
    return ahead
