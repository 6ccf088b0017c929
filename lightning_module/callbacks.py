"""Two callbacks: one writes the run folder, the other is a progress bar with reward, KL and ESS."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from lightning_module.engines import engine_type, fusion_of, noise_of, reports_logps_of, sampling_findings
from lightning_module.streams import MicroStep
from trl_offpolicy.diagnosis.fixes import LIGHTNING
from trl_offpolicy.diagnosis.probe.proof import effective_settings
from trl_offpolicy.diagnosis.report.closing import closing_report
from trl_offpolicy.engines.sampling_states import described
from trl_offpolicy.engines.sync import raised_on_all_ranks
from trl_offpolicy.rollouts.sampler_stats import on_purpose
from trl_offpolicy.run_folder.base_model import BASE_MODEL, base_model
from trl_offpolicy.run_folder.declared import declared_sides, tools_in_use
from trl_offpolicy.run_folder.layout import EVAL_PREFIX, SETTINGS
from trl_offpolicy.run_folder.lock import RunFolderError, check_run_folder
from trl_offpolicy.run_folder.syncs import append_sync
from trl_offpolicy.run_folder.writer import RolloutRecorder, RunFolderWriter


class RunRecords(Callback):
    """Writes the records of a run, whatever module it trains. What is in them a subclass says.

    Args:
        folder: where to write; None = the subclass's default.
        rollouts: whether to record every rollout.
        report: whether to print the summary and write the report at the end.
    """

    def __init__(self, folder: str | None, rollouts: bool, report: bool) -> None:
        self.folder, self.rollouts, self.report = folder, rollouts, report
        self._writer: RunFolderWriter | None = None  # on the main process
        self._recorder: RolloutRecorder | None = None

    def _begin(
        self, trainer: Trainer, folder: Path, describe: Callable[[], dict[str, Any]], decode: Callable[[list[int]], str]
    ) -> None:
        """Prepare the folder; nothing is written with ``fast_dev_run``. All ranks call it.

        Args:
            trainer: Lightning's trainer.
            folder: of the run.
            describe: returns the entries of ``run.json``; called on the main process.
            decode: turns token ids into text.

        Raises:
            RunFolderError: on all ranks, if another run has the folder.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with raised_on_all_ranks(RunFolderError):
            if trainer.is_global_zero:
                report = partial(closing_report, decode=decode) if self.report else None
                self._writer = RunFolderWriter(folder, describe(), report=report)
                self._writer.begin(trainer.global_step, seed=os.environ.get("PL_GLOBAL_SEED"))
        if self.rollouts:
            self._recorder = RolloutRecorder(folder, decode, trainer.global_rank)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before a model is loaded, that the folder can be written and no other run has it. All ranks call it.

        Raises:
            RunFolderError: on all ranks, if it cannot be used.
        """
        if stage != TrainerFn.FITTING or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = self._where(trainer)
        with raised_on_all_ranks(RunFolderError):
            if trainer.is_global_zero:
                check_run_folder(folder, name="the run folder")

    def _where(self, trainer: Trainer) -> Path:
        """The folder to write into. All ranks call it: Lightning broadcasts the logger's folder."""
        return Path(self.folder or trainer.log_dir or trainer.default_root_dir)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what is still in memory, and give the folder back."""
        try:
            if self._recorder is not None:
                with suppress(OSError, RunFolderError):  # a full disk may be what ended the run
                    self._recorder.flush()
        finally:
            if self._writer is not None:
                self._writer.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the rollouts that are still in memory, then the report."""
        if self._recorder is not None:
            self._recorder.flush()
        trainer.strategy.barrier("rollouts")
        if self._writer is not None:
            self._writer.end()


class RunFolder(RunRecords):
    """Writes ``run.json``, ``metrics.jsonl``, ``rollouts.parquet`` and ``report.html`` as the TRL trainer does.

    It works with an :class:`~lightning_module.module.OffPolicyGRPOModule`.

    Args:
        folder: where to write; None = the logger's folder (``trainer.log_dir``).
        rollouts: whether to record every rollout.
        report: whether to print the summary and write the report at the end.
    """

    def __init__(self, folder: str | None = None, rollouts: bool = True, report: bool = True) -> None:
        super().__init__(folder, rollouts, report)
        self._written: dict[str, float] | None = None
        self._before: dict[str, float] = {}  # held-out numbers of the sanity check

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the folder. A resumed run deletes the records that came after its checkpoint."""
        module: Any = pl_module
        self._written = module.step_logs
        decode = module.generation.prompts.tokenizer.decode
        self._begin(trainer, run_folder(trainer), lambda: _description(trainer, module), decode)
        if self._writer is not None and self._before:
            self._writer.log(trainer.global_step, self._before)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: MicroStep, batch_idx: int
    ) -> None:
        """Record the rollouts of this micro-step, and the numbers of a logging step."""
        record = outputs.get("rollouts") if isinstance(outputs, dict) else None
        module: Any = pl_module
        if self._recorder is not None and record is not None:
            with module.measuring.clock.part("recording"):
                self._recorder.add(outputs["step"], **record)
        while self._writer is not None and module.measuring.syncs:
            append_sync(self._writer.folder, module.measuring.syncs.popleft())
        logs: dict[str, float] = module.step_logs
        if logs is self._written:  # nothing was logged in this step
            return
        self._written = logs
        if self._writer is not None:
            self._writer.log(trainer.global_step, {"epoch": trainer.current_epoch, **logs})
        if self._recorder is not None:
            with module.measuring.clock.part("recording"):
                self._recorder.flush()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Append the validation numbers to ``metrics.jsonl``; a whole sanity check (-1) measures before training."""
        values = {name: float(one) for name, one in trainer.callback_metrics.items() if name.startswith(EVAL_PREFIX)}
        if trainer.sanity_checking:  # the run has no folder yet
            self._before = values if trainer.num_sanity_val_steps == math.inf else {}
        elif self._writer is not None and values and trainer.state.fn == TrainerFn.FITTING:  # not one after the run
            self._writer.log(trainer.global_step, values)


def run_folder(trainer: Trainer) -> Path:
    """The folder that holds the run's records: that of its :class:`RunFolder`, else the logger's, else the root.

    Lightning broadcasts the logger's folder, so every rank must call this.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    told = next((one.folder for one in callbacks if isinstance(one, RunFolder)), None)
    return Path(told or trainer.log_dir or trainer.default_root_dir)


class OffPolicyProgressBar(RichProgressBar):
    """Lightning's rich progress bar, with reward, KL, ESS and the dropped fraction.

    It counts micro-batches, as Lightning does. With ``max_steps`` Lightning's own ends at the optimizer steps that are
    left ("12/2"), and its number of epochs is -1 ("Epoch 0/-2").
    """

    @property
    def total_train_batches(self) -> int | float:
        """The micro-batches of this epoch, at most those of the optimizer steps that are left."""
        trainer = self.trainer
        batches: int | float = trainer.num_training_batches
        if trainer.max_steps < 0:
            return batches
        seen: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready  # of this epoch, after resuming
        return min(batches, seen + (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)

    def _get_train_description(self, current_epoch: int) -> str:
        if self.trainer.max_epochs is not None and self.trainer.max_epochs > 0:
            return str(super()._get_train_description(current_epoch))
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))

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
    "dropped": "offpolicy/keep/dropped_token_fraction",
    "loss": "loss",
}


_AUTOCAST = {"bf16": "bfloat16", "16": "float16"}


def _commit(module: Any) -> str | None:
    """The commit on the Hub that the policy was loaded from; None if it came from a folder."""
    return getattr(getattr(module.policy, "config", None), "_commit_hash", None)


def _description(trainer: Trainer, module: Any) -> dict[str, Any]:
    """The entries of ``run.json`` that describe the method."""
    preset, engine = module.preset, module.settings["engine"]
    asked = getattr(module.generation.engine, "interview", None)  # an engine of the user's may not have it
    options, fusion = engine if isinstance(engine, dict) else None, fusion_of(engine)
    findings = sampling_findings(engine_type(engine), module.sampling, options, reports=reports_logps_of(engine))
    findings += getattr(module.generation.engine, "findings", ())  # what a server told of itself
    noise = noise_of(module.generation.engine)
    precisions = (name for key, name in _AUTOCAST.items() if str(trainer.precision).startswith(key))
    return {
        "model": module.hparams.get("model", ""),
        BASE_MODEL: base_model(str(module.hparams.get("model", "")), _commit(module)).described(),
        **replace(preset, objective=module.objective).described(),
        "advantages": repr(preset.advantages),
        "engine": engine if isinstance(engine, str | dict) else type(engine).__name__,
        "trainer": f"lightning, {type(trainer.strategy).__name__}, {trainer.world_size} processes",
        "async_rollouts": module.settings["async_rollouts"],
        "routing_replay": module.hparams.get("routing_replay"),
        "control": repr(module.control.spec),
        "sampling_states": described(findings),
        SETTINGS: settings_of(trainer, module),
        "declared": declared_sides(
            module.policy,
            engine=engine if isinstance(engine, dict) else {},
            autocast=next(precisions, None),
            tools=tools_in_use(module.agents.has_tools, own_rollouts=module.agents.rollout is not None),
            sampling={name: getattr(module.sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        ),
        "effective": effective_settings(
            None if asked is None else asked(),
            module.policy,
            module.generation.prompts.tokenizer,
            on_purpose=on_purpose(fusion, None if noise is None else noise.noise),
        ),
    }


def settings_of(trainer: Trainer, module: Any) -> dict[str, Any]:
    """The settings by which the doctor fits its fix to the run, under the names that the TRL trainer gives them."""
    given, data = module.settings, trainer.datamodule  # type: ignore[attr-defined]
    adapter = given["adapter"] if isinstance(given["adapter"], dict) else {}
    found = {
        "framework": LIGHTNING,
        "engine": given["engine"],
        "dtype": str((given["model_options"] or {}).get("dtype", "float32")),
        "bf16": str(trainer.precision).startswith("bf16"),
        "fp16": str(trainer.precision).startswith("16"),
        "learning_rate": given["learning_rate"],
        "async_rollouts": given["async_rollouts"],
        "lora_dropout": adapter.get("lora_dropout"),
        "num_iterations": getattr(data, "num_iterations", None),
        "steps_per_generation": getattr(data, "steps_per_generation", None),
        "gradient_accumulation_steps": trainer.accumulate_grad_batches,
        **{name: getattr(module.sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")},
    }
    return {name: value for name, value in found.items() if isinstance(value, str | int | float | bool | dict)}
