"""Control in TRL: a callback that reads each logged row and turns a supervisor's decisions into settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_offpolicy.control import (
    ACTIONS_FILE,
    ControlSpec,
    ControlState,
    LearningRateScale,
    Outcome,
    Supervisor,
    append_actions,
)
from trl_offpolicy.control.gradient_cosine import ConsecutiveCosine
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective.measure import gradient_variance
from trl_offpolicy.run_folder.run_data import METRICS_FILE, read_metrics
from trl_offpolicy.stats import PREFIX


class ControlCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a run and, with policy ``stop`` or ``act``, does something about it.

    It must come before the callbacks that write what was logged, because it adds to it: put it first
    (:func:`watch`). What the optimizer really used stands under ``learning_rate``.

    Args:
        spec: what ``control`` says.
        correct: takes a correction into use; None = the trainer has none of its own.
        base: the configured correction, level 0 of an escalation.
        resync: makes the next generation wait for a sync of its own.
    """

    def __init__(
        self,
        spec: ControlSpec,
        *,
        correct: Callable[[Correction], None] | None = None,
        base: Correction | None = None,
        resync: Callable[[], None] | None = None,
    ) -> None:
        self.spec, self.supervisor = spec, Supervisor(spec)
        self.state: ControlState = self.supervisor.start()
        self._correct, self._resync = correct, resync
        self._ladder = () if spec.escalation is None else spec.escalation.ladder(base or Correction())
        self._scale = LearningRateScale()
        self._cosine = ConsecutiveCosine() if spec.gradient_cosine else None

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.state.as_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if state:
            self.state = self.supervisor.restore(state)
            self._put_in_force(self.supervisor.settings(self.state))

    # --------------------------------------------------------------------------------------------------------- events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hook into the optimizer; take the last rows of a run that goes on."""
        if self.spec.moves_learning_rate and kwargs.get("optimizer") is not None:
            self._scale.attach(kwargs["optimizer"])
        file = Path(args.output_dir) / METRICS_FILE
        if state.global_step > 0 and not self.state.rows and file.is_file():
            rows = tuple(row for row in read_metrics(args.output_dir).rows if row["step"] <= state.global_step)
            self.state = replace(self.state, rows=rows[-self.spec.history :])

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare the gradient with the last one, if asked for."""
        if self._cosine is not None:
            self._cosine.update(kwargs["model"].parameters())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Judge a row of training, add to it, say and do what follows."""
        if not logs or "loss" not in logs:
            return
        if "learning_rate" in logs:
            logs["learning_rate"] *= self._scale.value
        added = gradient_variance(logs, responses=args.train_batch_size * _steps(args) * args.world_size)
        if self._cosine is not None and (cosine := self._cosine.value()) is not None:
            added[f"{PREFIX}gradient/cosine_previous"] = cosine
        row = {**logs, **added}
        if self.spec.policy != "warn" and args.world_size > 1:
            row = broadcast_object_list([row])[0]  # the main rank's, so that all decide the same
        self.state, outcome = self.supervisor.observe(self.state, state.global_step, row)
        added |= outcome.metrics
        logs.update(added)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(logs)
        self._put_in_force(outcome)
        if outcome.stop:
            control.should_training_stop = control.should_save = True
        if state.is_world_process_zero:
            _say(outcome, Path(args.output_dir))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the optimizer alone."""
        self._scale.detach()

    def _put_in_force(self, outcome: Outcome) -> None:
        self._scale.value = outcome.learning_rate_scale
        if self._correct is not None and self._ladder:
            self._correct(self._ladder[outcome.correction_level])
        if outcome.resync and self._resync is not None:
            self._resync()


def supervise(trainer: Any, spec: ControlSpec | None, *, has_sampler: bool) -> ControlCallback | None:
    """Have a run of :class:`~trl_offpolicy.trainer.OffPolicyGRPOTrainer` watched.

    Args:
        trainer: it.
        spec: what its ``control`` says; None = nobody watches.
        has_sampler: something samples that has log-probs of its own.

    Raises:
        ValueError: a controller was asked for by name that cannot work here.
    """
    if spec is None:
        return None
    stages, correction = trainer._stages, trainer.objective.correction or Correction()

    def correct(chosen: Correction) -> None:
        if trainer.objective.correction is not chosen:
            trainer.objective = replace(trainer.objective, correction=chosen)
            trainer._stages = None if trainer._stages is None else trainer._stages.with_correction(chosen)

    def resync() -> None:
        trainer._last_loaded_step = -1  # TRL syncs where it is not the step of now

    missing = {}
    if not has_sampler:
        missing["escalation"] = "an engine with log-probs of its own"
    elif stages is not None and stages.early is not None:
        missing["escalation"] = "a correction of row scope"
    if not trainer.use_vllm:
        missing["resync"] = "vLLM"
    if not correction.weights and "escalation" in missing:
        missing["ess_step"] = "a correction with a weight"
    callback = ControlCallback(spec.without(missing), correct=correct, base=correction, resync=resync)
    watch(trainer, callback)
    return callback


def watch(trainer: Any, callback: ControlCallback) -> None:
    """Put the callback before those that write what was logged."""
    trainer.callback_handler.callbacks.insert(0, callback)


def _steps(args: Any) -> int:
    return int(args.gradient_accumulation_steps)


def _say(outcome: Outcome, folder: Path) -> None:
    for line in outcome.lines:
        tqdm.write(f"[control] {line}")
    if outcome.stop:
        tqdm.write(f"[control] the run ends here with a checkpoint in {folder}: {outcome.stop}")
    if outcome.actions:
        folder.mkdir(parents=True, exist_ok=True)
        append_actions(folder / ACTIONS_FILE, outcome.actions)
