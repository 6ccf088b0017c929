"""Control in Lightning: the module hands each logged row to a session, which decides and applies the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_module.callbacks import run_folder
from trl_offpolicy.control import LearningRateScale, UpdateGate, parse_control
from trl_offpolicy.control.auto import CHOSEN_BY_AUTO
from trl_offpolicy.control.session import ControlSession, admitted_by, lacking
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.rollouts.ahead.local_weights import trainable
from trl_offpolicy.rollouts.model_parts import is_flattened

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Control:
    """Watches the run of a module through a :class:`~trl_offpolicy.control.session.ControlSession`.

    The ``module`` that the methods take is the :class:`~lightning_module.module.OffPolicyGRPOModule` that owns this.

    Args:
        control: what :func:`trl_offpolicy.control.parse_control` takes; None = the run is not watched.

    Raises:
        ValueError: ``control`` is not valid; the message names the field.
    """

    def __init__(self, control: Any) -> None:
        self.spec = parse_control(control)
        self._session: ControlSession | None = None
        self._folder = Path()

    def start(self, module: Any, restored: Mapping[str, Any]) -> None:
        """Begin a run, or continue one from the state of a checkpoint.

        Raises:
            ValueError: the configuration names a controller that cannot work in this run.
        """
        if self.spec is None:
            return
        trainer = module.trainer
        if self._session is None:
            self._session = self._make_session(module)
            self.spec = self._session.spec
        self._folder = run_folder(trainer)
        self._session.load_state_dict(restored)
        self._session.begin(
            self._folder, trainer.global_step, optimizer=trainer.optimizers[0], records=not trainer.fast_dev_run
        )

    def _make_session(self, module: Any) -> ControlSession:
        """The session, without the controllers that cannot work. Which ones can is known once the engine is built."""
        assert self.spec is not None
        base, own = module.objective.correction, module.generation.is_trainer

        def correct(chosen: Correction) -> None:
            if module.objective.correction is not chosen:
                module.objective = replace(module.objective, correction=chosen)

        missing = lacking(
            base,
            has_sampler=module.generation.reports_logps,
            needs_whole_batch=module.stages.early is not None,
            resync_needs="an engine with weights of its own" if own else "",
            accept_needs=self._accept_needs(module, own=own),
        )
        if module.preset.auto is not None:
            missing["escalation"] = CHOSEN_BY_AUTO
        return ControlSession(
            self.spec.without(missing),
            say=partial(print, flush=True),
            # looked up at every call, because the module may be given to another trainer
            broadcast=lambda row: module.trainer.strategy.broadcast(row),
            base=base,
            correct=correct,
            admits=admitted_by(module.objective),
            resync=lambda: module.generation.forget_sync(),
        )

    @staticmethod
    def _accept_needs(module: Any, *, own: bool) -> str:
        """What judging updates would need and this run lacks; empty = nothing."""
        if own:
            return "an engine with weights of its own"
        if not module.settings["sync_check"]:
            return "a sync that is proved (sync_check)"
        whole = isinstance(module.trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        return "" if whole else "whole weights on each rank (a single device or DDP)"

    def gate(self, module: Any) -> UpdateGate | None:
        """What judges each synced update of this run; None if no controller does. All ranks call it."""
        if self._session is None:
            return None
        return self._session.gate(partial(trainable, module.policy), is_main=module.trainer.is_global_zero)

    def learning_rate(self, optimizer: Any) -> float:
        """The learning rate that the optimizer uses in this step, after the controllers' scaling."""
        scale = LearningRateScale() if self._session is None else self._session.scale
        return scale.in_force(optimizer)

    def observe(self, module: Any, logs: Mapping[str, float]) -> dict[str, float]:
        """Judge the row of the optimizer step that is about to end. Decisions apply from the next step on.

        Returns:
            Further numbers to log.
        """
        if self._session is None:
            return {}
        trainer = module.trainer
        return self._session.observe(
            trainer.global_step + 1,
            logs,
            responses=module.measuring.responses * trainer.world_size,
            world_size=trainer.world_size,
            is_main=trainer.is_global_zero,
        )

    def compare_gradient(self, module: Any) -> None:
        """Measure the cosine between this gradient and that of the previous optimizer step, if that is configured."""
        if self._session is not None and self._session.compares_gradients:
            in_parts = is_flattened(module.trainer.strategy.model)
            self._session.compare_gradient(module.policy.parameters(), in_parts=in_parts)

    def end_step(self, trainer: Trainer) -> None:
        """Save a checkpoint and end the run, if the session decided that. All ranks call it."""
        if self._session is None or not self._session.stop:
            return
        path = self._folder / "checkpoints" / f"stopped-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        trainer.should_stop = True
        if trainer.is_global_zero:
            print(f"[control] the run ends here with the checkpoint {path}: {self._session.stop}", flush=True)
        self._session.stop = ""

    def state_dict(self) -> dict[str, Any]:
        """The state of the session, for a checkpoint; empty if the run is not watched."""
        return {} if self._session is None else self._session.state_dict()
