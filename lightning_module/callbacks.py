"""Callbacks: the run folder of the TRL side, and a progress bar with what matters."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from lightning_module.control import run_folder
from lightning_module.module import OffPolicyGRPOModule
from lightning_module.streams import MicroStep
from trl_offpolicy.run_folder.declared import declared_sides
from trl_offpolicy.run_folder.writer import RolloutRecorder
from trl_offpolicy.trl.callbacks import RunFolderCallback

_NO_CONTROL: Any = None  # transformers' callbacks take a TrainerControl, which these do not read


class RunFolder(Callback):
    """Writes ``run.json``, ``metrics.jsonl``, ``rollouts.parquet`` and ``report.html`` as the TRL trainer does.

    Args:
        folder: None = the logger's folder (``trainer.log_dir``).
        rollouts: record every rollout.
        report: print the summary and write the report at the end.
    """

    def __init__(self, folder: str | None = None, rollouts: bool = True, report: bool = True) -> None:
        self.folder, self.rollouts, self.report = folder, rollouts, report
        self._writer: RunFolderCallback | None = None
        self._recorder: RolloutRecorder | None = None
        self._args: Any = SimpleNamespace()
        self._written: dict[str, float] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the folder; a resumed run drops what came after its checkpoint."""
        assert isinstance(pl_module, OffPolicyGRPOModule)
        folder = str(run_folder(trainer))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        decode = pl_module.generation.prompts.tokenizer.decode
        self._args = SimpleNamespace(output_dir=folder, seed=os.environ.get("PL_GLOBAL_SEED"))
        self._written = pl_module.step_logs
        self._writer = RunFolderCallback(_description(trainer, pl_module), report=self.report, decode=decode)
        self._writer.on_train_begin(self._args, _state(trainer), _NO_CONTROL)
        trainer.strategy.barrier("run folder")
        if self.rollouts:
            self._recorder = RolloutRecorder(Path(folder) / "rollouts.parquet", decode, trainer.global_rank)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: MicroStep, batch_idx: int
    ) -> None:
        """Record the rollouts of this micro-step, and the numbers of a logging step."""
        assert isinstance(pl_module, OffPolicyGRPOModule)
        if self._writer is None:
            return
        record = outputs.get("rollouts") if isinstance(outputs, dict) else None
        if self._recorder is not None and record is not None:
            self._recorder.add(outputs["step"], **record)
        logs = pl_module.step_logs
        if logs is not self._written:
            self._written = logs
            self._writer.on_log(self._args, _state(trainer), _NO_CONTROL, {"epoch": trainer.current_epoch, **logs})
            if self._recorder is not None:
                self._recorder.flush()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Append the numbers of held-out prompts."""
        if self._writer is not None and not trainer.sanity_checking:
            values = {
                name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval_")
            }
            self._writer.on_log(self._args, _state(trainer), _NO_CONTROL, values)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what is left, then the report."""
        if self._recorder is not None:
            self._recorder.flush()
        trainer.strategy.barrier("rollouts")
        if self._writer is not None:
            self._writer.on_train_end(self._args, _state(trainer), _NO_CONTROL)


class OffPolicyProgressBar(RichProgressBar):
    """Lightning's rich bar with reward, KL, ESS and what was dropped."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The numbers of the last logging step, under short names."""
        logs = getattr(pl_module, "step_logs", {})
        shown = {label: logs[key] for label, key in _SHORT.items() if key in logs}
        return {label: f"{value:.2e}" if label == "KL" else f"{value:.3f}" for label, value in shown.items()}


_SHORT = {
    "reward": "reward",
    "KL": "offpolicy/mismatch/kl_k3",
    "ESS": "offpolicy/weight_applied/ess_token",
    "dropped": "offpolicy/keep/dropped_sequence_fraction",
    "loss": "loss",
}


_AUTOCAST = {"bf16": "bfloat16", "16": "float16"}


def _state(trainer: Trainer) -> Any:
    """What the TRL side's callback reads of ``transformers.TrainerState``."""
    return SimpleNamespace(is_world_process_zero=trainer.is_global_zero, global_step=trainer.global_step)


def _description(trainer: Trainer, module: OffPolicyGRPOModule) -> dict[str, Any]:
    """What ``run.json`` says about the method."""
    given, preset = module.settings, module.preset
    return {
        "model": module.hparams.get("model", ""),
        **replace(preset, objective=module.objective).described(),
        "advantages": repr(preset.advantages),
        "engine": given["engine"] if isinstance(given["engine"], str | dict) else type(given["engine"]).__name__,
        "trainer": f"lightning, {type(trainer.strategy).__name__}, {trainer.world_size} processes",
        "control": repr(module.control.spec),
        "declared": declared_sides(
            module.policy,
            engine=given["engine"] if isinstance(given["engine"], dict) else {},
            autocast=next((name for key, name in _AUTOCAST.items() if str(trainer.precision).startswith(key)), None),
            sampling={name: getattr(module.sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        ),
    }
