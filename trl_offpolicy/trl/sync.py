"""Proves every sync of the TRL trainer's engine on a probe and logs it. A fault does not lose finished work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_offpolicy.engines.engine import EngineError, SyncReport
from trl_offpolicy.engines.server.contact import Refused
from trl_offpolicy.engines.sync import WeightSync, probe_of
from trl_offpolicy.rollouts.ahead.local_weights import all_finite
from trl_offpolicy.run_folder.checkpoints import by_step
from trl_offpolicy.run_folder.lock import RunFolderError
from trl_offpolicy.run_folder.syncs import append_sync
from trl_offpolicy.trl.engine import TRLEngine
from trl_offpolicy.trl.scoring import sequence_logps

RESUME = "train(resume_from_checkpoint=True) (recipes/grpo.py: --resume true)"
PROBE_TEXTS = (
    "The capital of France is Paris. Water boils at 100 degrees, and there are seven days in a week.",
    "12 + 7 = 19, 3 * 4 = 12. def add(a, b): return a + b. Step 1: read the question again.",
)


def prove_syncs(trainer: GRPOTrainer) -> None:
    """Prove and log every sync of a trainer that samples with vLLM, and leave no weights of the last one."""
    engine = getattr(trainer, "vllm_generation", None)
    if not isinstance(engine, TRLEngine):
        return

    def log(report: SyncReport) -> None:
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        if trainer.model.training:
            trainer._clock.spend("sync", report.seconds)
        for name, value in report.metrics().items():
            metrics[f"offpolicy/rollout/{name}"].append(value)
        if trainer.accelerator.is_main_process and Path(trainer.args.output_dir).is_dir():
            append_sync(trainer.args.output_dir, report)

    trainer.add_callback(_RemovesWeights(engine))
    engine.prove(
        _weight_sync(trainer, engine),
        log=log,
        step=lambda: int(trainer.state.global_step),
        steps=lambda: int(trainer.state.max_steps),
    )


class _RemovesWeights(TrainerCallback):  # type: ignore[misc]
    """At the end of a run, deletes the weights that were written for a server."""

    def __init__(self, engine: TRLEngine) -> None:
        self._engine = engine

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._engine.server is not None:
            self._engine.server.close()


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What accelerate's forward computes in, by its ``mixed_precision``."""


def _weight_sync(trainer: GRPOTrainer, engine: TRLEngine) -> WeightSync:
    if not engine.settings.check_sync:
        return WeightSync()
    texts = [trainer._tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBE_TEXTS]
    model = trainer.accelerator.unwrap_model(trainer.model)
    return WeightSync(
        probe_of(texts),
        partial(sequence_logps, trainer),
        without_adapter=getattr(model, "disable_adapter", None),
        autocast=_AUTOCAST.get(str(trainer.accelerator.mixed_precision)),
    )


@contextmanager
def kept_on_fault(trainer: GRPOTrainer, recorder: Any) -> Iterator[None]:
    """If the engine fails inside the block, write what is recorded, save a checkpoint, and say how to continue.

    Weights that are not finite are not saved: no run goes on from them, and they could take the place of a good one.

    Raises:
        EngineError: the same error, with the checkpoint named. Every rank must leave the block with it.
    """
    try:
        yield
    except EngineError as error:
        if recorder is not None:
            with suppress(OSError, RunFolderError):  # of one rank: the others would wait for it at the checkpoint
                recorder.flush()
        if not trainer.model.training or trainer.state.global_step == 0:
            raise
        step, folder = trainer.state.global_step, trainer.args.output_dir
        if all_finite(trainer.model, trainer.accelerator.device):
            trainer._save_checkpoint(trainer.model, trial=None)
            said = f"The state after step {step} is saved in {folder}; go on with {RESUME}."
        else:
            newest = next(iter(by_step(Path(folder))), None)
            said = f"The weights after step {step} are not finite, and are not saved. " + (
                f"Go on from {newest.name} with {RESUME}, and a smaller learning_rate or max_grad_norm."
                if newest is not None else f"{folder} has no earlier checkpoint."
            )  # fmt: skip
        kind = EngineError if isinstance(error, Refused) else type(error)  # that one is made of an answer's status
        raise kind(f"{error} {said}") from error
