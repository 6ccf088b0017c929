"""Requests the generation batches of a ``trl.GRPOTrainer`` in server mode before the trainer needs them.

At a generation boundary all ranks do three things: replace the engine's weights (requests in flight are cut or waited
for), request as many batches as the bound on their lag admits, and hand the oldest batch to the trainer. Only the
requests run in other threads, on the main rank. Prompts and results travel between ranks here, in the main thread.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.rollouts.ahead.admission import Admission
from trl_offpolicy.rollouts.ahead.flight import Flight
from trl_offpolicy.rollouts.ahead.lookahead import Lookahead, positions_ahead
from trl_offpolicy.rollouts.ahead.parts import ResponseInParts
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings

AHEAD_METRICS = ("wait_seconds",)
"""Logged once per generation as ``offpolicy/rollout/<name>``."""

Landed = tuple[list[list[int]], list[list[float]], list[list[int]]]
"""Token ids, log-probs and versions of all rows of all ranks."""


@dataclass(frozen=True)
class _Batch:
    """A generation batch that was requested.

    Args:
        prompts: token ids of the prompts of this rank, repeated for each response.
        version: version of the weights when it was requested.
        responses: the responses of all ranks, on the main rank.
    """

    prompts: list[list[int]]
    version: int
    responses: list[Future[list[ResponseInParts]]]


class RolloutsAhead:
    """The queue between the engine and the trainer.

    Args:
        trainer: the trainer whose data it reads ahead.
        settings: the ``async_rollouts`` field of its configuration.
    """

    versions: list[list[int]]
    """The version of each token of each row of this rank, in the batch that was handed out last."""

    def __init__(self, trainer: Any, settings: AsyncSettings) -> None:
        args = trainer.args
        self._trainer = trainer
        self._engine = trainer.vllm_generation
        self._settings = settings
        self._every = args.steps_per_generation * trainer.num_iterations
        rows = args.per_device_train_batch_size * args.steps_per_generation * trainer.accelerator.num_processes
        self._admission = Admission(batch_size=rows, lag=settings.lag)
        self._flight: Flight | None = None
        self.close()

    def start(self) -> None:
        """Begin a run with an empty queue, and start the threads for requests on the main rank."""
        self.close()
        if self._engine.server is not None:
            self._flight = Flight(self._engine.server, cuts=self._settings.cuts)

    def close(self) -> None:
        """Give up requests in flight and empty the queue."""
        if self._flight is not None:
            self._flight.close()
        self._flight = None
        self._queue: deque[_Batch] = deque()
        self._learned = 0  # batches handed to the trainer: AReaL's i
        self._submitted = 0  # rollouts requested: AReaL's N_r
        self._epoch: Iterator[Any] | None = None
        self._lookahead = Lookahead(iter(()))
        self._first_step = 0
        self._waited = 0.0  # seconds of waiting for requests in flight, since the last generation
        self.versions = []

    # --------------------------------------------------------------------------------------------------------- data

    def items(self, epoch: Iterator[Any]) -> Lookahead:
        """Wrap the iterator of an epoch, for the next optimizer step to read from."""
        if epoch is not self._epoch:
            self._epoch, self._lookahead = epoch, Lookahead(epoch)
        self._lookahead.forget()
        self._first_step = self._trainer._step
        return self._lookahead

    def _rows_ahead(self, count: int) -> Iterator[list[dict[str, Any]]]:
        """The rows of ``count`` generation batches from the present one on; fewer near the end of the epoch or run."""
        trainer = self._trainer
        position = trainer._step - self._first_step
        later = trainer.state.max_steps - trainer.state.global_step - 1
        in_step = trainer.current_gradient_accumulation_steps - position
        left = in_step + later * trainer.args.gradient_accumulation_steps
        for at in positions_ahead(position=position, every=self._every, count=count, left=left):
            if (rows := self._lookahead.at(at)) is None:
                return
            yield rows

    def _tokenized(self, rows: list[dict[str, Any]]) -> list[list[int]]:
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
        """A context in which no request runs, so that weights may change."""
        start = time.monotonic()
        if self._flight is not None:
            self._flight.hold()
        self._waited += time.monotonic() - start
        try:
            yield
            self.synced()
        finally:
            if self._flight is not None:
                self._flight.release()

    def synced(self) -> None:
        """Called after the engine got new weights. Does nothing here."""

    def generate(self, prompts: list[list[int]], num_generations: int) -> Any:
        """TRL's contract of ``generate``, for the batch that is due. It also requests more. All ranks call it.

        Raises:
            EngineError: on all ranks, if a request failed or the rows are not those that were requested.
        """
        self._submit(num_generations)
        batch = self._queue.popleft()
        as_asked = all(gather_object([batch.prompts == prompts]))
        start = time.monotonic()
        payload: list[Any] = [None]
        if self._flight is not None:
            payload = [_landed(batch.responses) if as_asked else _OTHER_ROWS]
        broadcast_object_list(payload, from_process=0)
        if isinstance(payload[0], EngineError):
            raise payload[0]
        self._waited += time.monotonic() - start
        self._trainer._metrics["train"]["offpolicy/rollout/wait_seconds"].append(self._waited)
        self._waited = 0.0
        self._learned += 1
        first = self._trainer.accelerator.process_index * len(prompts)
        ids, logps, self.versions = (part[first : first + len(prompts)] for part in payload[0])
        return prompts, ids, [[[value] for value in row] for row in logps], [[[token] for token in row] for row in ids]

    def _submit(self, num_generations: int) -> None:
        """Request the batches that are not requested yet, as far as the bound admits."""
        size = self._admission.batch_size
        room = self._admission.allowance(submitted=self._submitted, version=self._learned) // size
        known = len(self._queue)
        for rows in islice(self._rows_ahead(known + room), known, None):
            prompts = self._tokenized(rows)
            everyone = gather_object(prompts)
            options = self._engine._sampling().vllm_options()
            flight = self._flight
            each = everyone[::num_generations]
            asked = [] if flight is None else [flight.submit(prompt, options, num_generations) for prompt in each]
            self._queue.append(_Batch(prompts, self._engine.version, asked))
            self._submitted += size

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that may have sampled a token still to come."""
        return min((batch.version for batch in self._queue), default=self._engine.version)


_OTHER_ROWS = EngineError(
    "async_rollouts: the trainer asks for other prompts than those that were looked ahead to. The data loader or the "
    "prompts changed between two reads; use a data set that gives the same rows each time."
)


def _landed(responses: list[Future[list[ResponseInParts]]]) -> Landed | EngineError:
    """Wait for the rows of a batch. Returns them, or the error that all ranks must raise."""
    try:
        rows = [response for future in responses for response in future.result()]
    except EngineError as error:
        return error
    except Exception as error:  # an error on the main rank alone would leave the others waiting
        return EngineError(f"A rollout could not be sampled: {type(error).__name__}: {error}")
    return [row.token_ids for row in rows], [row.logps for row in rows], [row.versions for row in rows]
