"""Control in TRL: a callback that hands each logged row to a session, and ends the run if the session asks for that."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_offpolicy.control import ControlSpec, ControlState
from trl_offpolicy.control.auto import CHOSEN_BY_AUTO
from trl_offpolicy.control.session import ControlSession, admitted_by, lacking
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.rollouts.ahead.local_weights import trainable
from trl_offpolicy.rollouts.model_parts import is_flattened
from trl_offpolicy.trl.engine import TRLEngine


class ControlCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a run through a :class:`~trl_offpolicy.control.session.ControlSession`.

    It adds to the logged row, so it must run before the callbacks that write the row: :func:`watch` puts it first. The
    logged ``learning_rate`` is the one that the optimizer used.

    Args:
        spec: the parsed ``control`` field.
        **lent: ``base``, ``correct``, ``admits`` and ``resync`` of the session; a stock trainer has none of them.
    """

    def __init__(self, spec: ControlSpec, **lent: Any) -> None:
        self.session = ControlSession(
            spec, say=tqdm.write, broadcast=lambda row: broadcast_object_list([row])[0], **lent
        )

    @property
    def spec(self) -> ControlSpec:
        """The parsed ``control`` field, without the controllers that cannot work here."""
        return self.session.spec

    @property
    def state(self) -> ControlState:
        """The session's state after the last logging step."""
        return self.session.state

    def state_dict(self) -> dict[str, Any]:
        """The session's state as plain values, for a checkpoint."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.session.load_state_dict(state)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hook into the optimizer, and read the last logged rows if the run is resumed."""
        self.session.begin(Path(args.output_dir), state.global_step, optimizer=kwargs.get("optimizer"))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the cosine between this gradient and the previous one, if that is configured."""
        if self.session.compares_gradients:
            model = kwargs["model"]
            self.session.compare_gradient(model.parameters(), in_parts=is_flattened(model))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Judge a row of training, add to it, and apply what the session decides."""
        if not logs or "loss" not in logs:
            return
        if "learning_rate" in logs:
            logs["learning_rate"] *= self.session.scale.value
        added = self.session.observe(
            state.global_step,
            logs,
            responses=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            world_size=args.world_size,
            is_main=state.is_world_process_zero,
        )
        logs.update(added)
        # the trainer has already put a copy of the row into its history
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(logs)
        if self.session.stop:
            control.should_training_stop = control.should_save = True
            if state.is_world_process_zero:
                tqdm.write(f"[control] the run ends here with a checkpoint in {args.output_dir}: {self.session.stop}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks from the optimizer."""
        self.session.end()


def supervise(trainer: Any, spec: ControlSpec | None, *, has_sampler: bool) -> ControlCallback | None:
    """Watch a run of :class:`~trl_offpolicy.trainer.OffPolicyGRPOTrainer`; returns the callback that does it.

    Args:
        trainer: the trainer.
        spec: its parsed ``control`` field; None = the run is not watched.
        has_sampler: True if an engine or ``rollout_func`` reports log-probs of its samples.

    Raises:
        ValueError: the configuration names a controller that cannot work here.
    """
    if spec is None:
        return None

    def correct(chosen: Correction) -> None:
        if trainer.objective.correction is not chosen:
            trainer.objective = replace(trainer.objective, correction=chosen)
            trainer._stages = None if trainer._stages is None else trainer._stages.with_correction(chosen)

    def resync() -> None:
        trainer._last_loaded_step = -1  # TRL syncs if this is not the current step
        if isinstance(trainer.vllm_generation, TRLEngine):
            # What the engine has is in doubt, so all weights are sent from now on.
            trainer.vllm_generation.confirm(False)

    base = trainer.objective.correction
    missing = lacking(
        base,
        has_sampler=has_sampler,
        needs_whole_batch=trainer._stages is not None and trainer._stages.early is not None,
        resync_needs="" if trainer.use_vllm else "vLLM",
        accept_needs=_accept_needs(trainer),
    )
    if trainer._auto is not None:
        missing["escalation"] = CHOSEN_BY_AUTO
    callback = ControlCallback(
        spec.without(missing), base=base, correct=correct, admits=admitted_by(trainer.objective), resync=resync
    )
    watch(trainer, callback)
    if "accept_update" in [item.name for item in callback.spec.controllers]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        gate = callback.session.gate(partial(trainable, model), is_main=trainer.accelerator.is_main_process)
        trainer.vllm_generation.gate_updates(gate)
    return callback


def _accept_needs(trainer: Any) -> str:
    """What judging updates would need and this run lacks; empty = nothing."""
    if not isinstance(getattr(trainer, "vllm_generation", None), TRLEngine):
        return "vLLM"
    if not trainer.vllm_generation.proves:
        return "a sync that is proved (engine.check_sync)"
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return "whole weights on each rank (no FSDP, no DeepSpeed)" if sharded else ""


def watch(trainer: Any, callback: ControlCallback) -> None:
    """Put the callback before those that write the logged row."""
    trainer.callback_handler.callbacks.insert(0, callback)
