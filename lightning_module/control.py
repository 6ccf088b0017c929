"""Control in Lightning: the module hands over each logged row; a supervisor's decisions become settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_offpolicy.control import (
    ACTIONS_FILE,
    ControlState,
    LearningRateScale,
    Outcome,
    Supervisor,
    append_actions,
    parse_control,
)
from trl_offpolicy.control.gradient_cosine import ConsecutiveCosine
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective.measure import gradient_variance
from trl_offpolicy.run_folder.run_data import METRICS_FILE, read_metrics
from trl_offpolicy.stats import PREFIX

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_module.module import OffPolicyGRPOModule


class Control:
    """Watches the run of a module and, with policy ``stop`` or ``act``, does something about it.

    Args:
        control: what :func:`trl_offpolicy.control.parse_control` takes; None = nobody watches.

    Raises:
        ValueError: naming the field.
    """

    state: ControlState

    def __init__(self, control: Any) -> None:
        self.spec = parse_control(control)
        self._folder = Path()
        self._supervisor: Supervisor | None = None
        self._scale = LearningRateScale()
        self._ladder: tuple[Correction, ...] = ()
        self._cosine: ConsecutiveCosine | None = None
        self._stop = ""

    def start(self, module: OffPolicyGRPOModule, restored: Mapping[str, Any]) -> None:
        """The run begins, or goes on from the state of a checkpoint.

        Raises:
            ValueError: a controller was asked for by name that cannot work in this run.
        """
        if self.spec is None:
            return
        self._folder = run_folder(module.trainer)
        if self._supervisor is None:
            self.spec = spec = self.spec.without(_missing(module))
            self._supervisor = Supervisor(spec)
            base = module.objective.correction or Correction()
            self._ladder = () if spec.escalation is None else spec.escalation.ladder(base)
        spec, supervisor = self.spec, self._supervisor
        self._cosine = ConsecutiveCosine() if spec.gradient_cosine else None
        self.state = supervisor.restore(restored) if restored else supervisor.start()
        if not restored and module.trainer.global_step > 0:
            self.state = replace(self.state, rows=_logged(self._folder, module.trainer.global_step)[-spec.history :])
        if spec.moves_learning_rate:
            self._scale.attach(module.trainer.optimizers[0])
        self._put_in_force(module, supervisor.settings(self.state))

    def learning_rate(self, optimizer: Any) -> float:
        """What the optimizer uses in this step."""
        return self._scale.in_force(optimizer)

    def observe(self, module: OffPolicyGRPOModule, logs: Mapping[str, float]) -> dict[str, float]:
        """Judge the row of the optimizer step that is about to end, and do what follows from the next one on.

        Returns:
            What is to be logged besides.
        """
        if self.spec is None or self._supervisor is None:
            return {}
        trainer, step = module.trainer, module.trainer.global_step + 1
        added = gradient_variance(logs, responses=module.measuring.responses * trainer.world_size)
        if self._cosine is not None and (cosine := self._cosine.value()) is not None:
            added[f"{PREFIX}gradient/cosine_previous"] = cosine
        row = {**logs, **added}
        if self.spec.policy != "warn" and trainer.world_size > 1:
            row = trainer.strategy.broadcast(row)  # the main rank's, so that all decide the same
        self.state, outcome = self._supervisor.observe(self.state, step, row)
        self._put_in_force(module, outcome)
        self._stop = outcome.stop
        if trainer.is_global_zero:
            _say(outcome, self._folder, write=not trainer.fast_dev_run)  # type: ignore[attr-defined]
        return {**added, **outcome.metrics}

    def compare_gradient(self, module: OffPolicyGRPOModule) -> None:
        """With that of the optimizer step before, if asked for."""
        if self._cosine is not None:
            self._cosine.update(module.policy.parameters())

    def end_step(self, trainer: Trainer) -> None:
        """Save a checkpoint and end the run, if that was decided. All ranks call it."""
        if not self._stop:
            return
        path = self._folder / "checkpoints" / f"stopped-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        trainer.should_stop = True
        if trainer.is_global_zero:
            print(f"[control] the run ends here with the checkpoint {path}: {self._stop}", flush=True)
        self._stop = ""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {} if self._supervisor is None else self.state.as_dict()

    def _put_in_force(self, module: OffPolicyGRPOModule, outcome: Outcome) -> None:
        self._scale.value = outcome.learning_rate_scale
        if self._ladder and module.objective.correction is not (wanted := self._ladder[outcome.correction_level]):
            module.objective = replace(module.objective, correction=wanted)
        if outcome.resync:
            module.generation.forget_sync()


def run_folder(trainer: Trainer) -> Path:
    """Where the run's records are: the folder of its ``RunFolder`` callback, else the logger's, else the root.

    Collective: Lightning broadcasts the logger's folder, so every rank calls this.
    """
    from lightning_module.callbacks import RunFolder

    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    told = next((one.folder for one in callbacks if isinstance(one, RunFolder)), None)
    return Path(told or trainer.log_dir or trainer.default_root_dir)


def _logged(folder: Path, step: int) -> tuple[dict[str, float], ...]:
    """The rows of a run that goes on, up to ``step``."""
    if not (folder / METRICS_FILE).is_file():
        return ()
    return tuple(row for row in read_metrics(folder).rows if row["step"] <= step)


def _missing(module: OffPolicyGRPOModule) -> dict[str, str]:
    """Controllers that cannot work, by what they lack."""
    own = module.generation.is_trainer
    missing = {"resync": "an engine with weights of its own"} if own else {}
    if own:
        missing["escalation"] = "an engine with log-probs of its own"
    elif module.stages.early is not None:
        missing["escalation"] = "a correction of row scope"
    if "escalation" in missing and not (module.objective.correction or Correction()).weights:
        missing["ess_step"] = "a correction with a weight"
    return missing


def _say(outcome: Outcome, folder: Path, *, write: bool) -> None:
    for line in outcome.lines:
        print(f"[control] {line}", flush=True)
    if outcome.actions and write:
        folder.mkdir(parents=True, exist_ok=True)
        append_actions(folder / ACTIONS_FILE, outcome.actions)
