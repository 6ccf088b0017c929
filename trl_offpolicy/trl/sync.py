"""Every sync of the TRL trainer's engine is proven on a probe and logged; a fault costs no finished work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.sync import SyncCheck, probe_of
from trl_offpolicy.trl.engine import TRLEngine
from trl_offpolicy.trl.filtered_scoring import at_temperature_one

PROBE_TEXTS = (
    "The capital of France is Paris. Water boils at 100 degrees, and there are seven days in a week.",
    "12 + 7 = 19, 3 * 4 = 12. def add(a, b): return a + b. Step 1: read the question again.",
)


class SyncWatch:
    """Called by the engine after each sync, on all ranks.

    Args:
        trainer: whose weights were synced.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.check = SyncCheck()
        tokenizer = trainer._tokenizer
        self.probe = probe_of([tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBE_TEXTS])

    def __call__(self, engine: TRLEngine) -> None:
        """Log ``rollout/sync_seconds`` and ``sync_bytes``, and ``sync_agreement`` where the engine can score.

        Raises:
            SyncError: on every rank, if the engine of any does not answer with the weights that it was given.
        """
        report, metrics = engine.last_sync, self.trainer._metrics["train" if self.trainer.model.training else "eval"]
        assert report is not None
        values = {"sync_seconds": report.seconds, "sync_bytes": float(report.bytes)}
        if engine.settings.check_sync:
            answers = gather_object([self._prove(engine, report.version)])
            for answer in answers:
                if isinstance(answer, EngineError):
                    raise answer
            known = [answer for answer in answers if answer is not None]
            values |= {"sync_agreement": sum(known) / len(known)} if known else {}
        for name, value in values.items():
            metrics[f"offpolicy/rollout/{name}"].append(value)

    def _prove(self, engine: TRLEngine, version: int) -> float | EngineError | None:
        """The agreement of this rank's engine; the error instead of raising it, so that no rank waits for another."""
        trainer = self._score()
        without = self._without_adapter()
        try:
            answer = engine.score(self.probe)
            if answer is None:
                return None
            return self.check.observe(version, engine=answer, trainer=trainer, others=without)
        except EngineError as error:
            return error

    def _without_adapter(self) -> dict[str, list[list[float]]]:
        disable = getattr(self.trainer.accelerator.unwrap_model(self.trainer.model), "disable_adapter", None)
        if disable is None:
            return {}
        with disable():
            return {"the base model without the adapter": self._score()}

    @torch.no_grad()
    def _score(self) -> list[list[float]]:
        """The trainer's log-probs (temperature 1) of tokens 1, 2, ... of the probe. All ranks call it."""
        trainer, scores = self.trainer, []
        device = trainer.accelerator.device
        for row in self.probe:
            ids = torch.tensor([row], device=device)
            mask = torch.ones_like(ids)
            with (
                disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
                at_temperature_one(mask, len(row) - 1),
            ):
                logps = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, len(row) - 1)
            scores.append(logps[0][0].tolist())
        return scores


def watch_sync(trainer: GRPOTrainer) -> None:
    """Prove and log every sync of a trainer that samples with vLLM."""
    engine = getattr(trainer, "vllm_generation", None)
    if isinstance(engine, TRLEngine):
        engine.watch(SyncWatch(trainer), step=lambda: int(trainer.state.global_step))


@contextmanager
def kept_on_fault(trainer: GRPOTrainer, recorder: Any) -> Iterator[None]:
    """If the engine fails inside: write what is recorded, save a checkpoint, and say how to go on.

    Raises:
        EngineError: the same, with the checkpoint named. Every rank must leave the block with it.
    """
    try:
        yield
    except EngineError as error:
        if recorder is not None:
            recorder.flush()
        if not trainer.model.training or trainer.state.global_step == 0:
            raise
        trainer._save_checkpoint(trainer.model, trial=None)
        raise type(error)(
            f"{error} The state after step {trainer.state.global_step} is saved in {trainer.args.output_dir}; go on "
            "with resume_from_checkpoint: true."
        ) from error
