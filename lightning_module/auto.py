"""``correction: auto`` in Lightning: which moments the session of :mod:`trl_offpolicy.control.auto` gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_module.callbacks import run_folder
from lightning_module.streams import MicroStep
from trl_offpolicy.control.auto import AutoSession
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.functional.collective import gather_objects
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.rollouts.batches import policy_batch
from trl_offpolicy.types import PolicyBatch


class AutoCorrection:
    """Lets the batches of a module choose its correction; does nothing if the preset is a correction.

    The ``module`` that the methods take is the :class:`~lightning_module.module.OffPolicyGRPOModule` that owns this.

    Args:
        preset: the module's preset.
    """

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._session: AutoSession | None = None

    def start(self, module: Any, restored: Mapping[str, Any]) -> None:
        """Begin a run, or continue one from the state of a checkpoint. All ranks call it."""
        if self._preset.auto is None:
            return
        trainer = module.trainer
        folder = run_folder(trainer)

        def correct(chosen: Correction) -> None:
            module.objective = replace(module.objective, correction=chosen)

        writes = trainer.is_global_zero and not trainer.fast_dev_run
        self._session = AutoSession(
            self._preset,
            correct=correct,
            say=partial(print, flush=True) if trainer.is_global_zero else None,
            records=folder if writes else None,
        )
        self._session.load_state_dict(restored.get("choice", {}))
        pending = restored.get("pending", [])
        if len(pending) == trainer.world_size:  # else the rollouts in use are sampled again
            self._session.load_pending(pending[trainer.global_rank], module.device)

    def end_generation(self, module: Any) -> None:
        """Judge the generation that is over, before the next one is sampled. All ranks call it."""
        if self._session is not None:
            self._session.end_generation(module.trainer.global_step)

    def judge_first(self, module: Any, rows: dict[str, Tensor], size: int) -> None:
        """Choose by the first generation batch. If nothing has scored its old policy yet, it costs one forward, once.

        Args:
            module: the module.
            rows: the generation batch, with advantages.
            size: rows in one forward.
        """
        if self._session is None or not self._session.undecided:
            return
        old = rows.get("old_per_token_logps")
        if old is None:
            old = module.score(rows, batch_size=size).logps
        step = module.trainer.global_step
        self._session.decide_first(policy_batch(rows, old, version=step), step)

    def observe(self, step: MicroStep, batch: PolicyBatch) -> None:
        """Add a micro-batch of the present generation, on the first pass over it."""
        if self._session is not None and step.iteration == 0:
            self._session.observe(batch)

    def metrics(self) -> dict[str, float]:
        """The choice and its numbers, to log."""
        return {} if self._session is None else self._session.metrics()

    def state_dict(self) -> dict[str, Any]:
        """The choice, and what each rank has added up of its generation; empty without auto. All ranks call it."""
        if self._session is None:
            return {}
        return {"choice": self._session.state_dict(), "pending": gather_objects(self._session.pending())}
