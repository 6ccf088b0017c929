"""Trainer callbacks: one prints a progress line, the other keeps the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from trl_offpolicy.diagnosis.report.closing import closing_report
from trl_offpolicy.engines.sync import raised_on_all_ranks
from trl_offpolicy.run_folder.layout import EVAL_PREFIX
from trl_offpolicy.run_folder.lock import RunFolderError
from trl_offpolicy.run_folder.writer import RolloutRecorder, RunFolderWriter

_SHORT = {  # label -> (key, format)
    "loss": ("loss", ".4f"),
    "reward": ("reward", ".3f"),
    "length": ("completions/mean_length", ".1f"),
    "KL k3": ("offpolicy/mismatch/kl_k3", ".2e"),
    "ESS": ("offpolicy/weight_applied/ess_token", ".3f"),
    "dropped": ("offpolicy/keep/dropped_token_fraction", ".1%"),
    "truncated": ("offpolicy/weight/truncated_fraction", ".1%"),
}


def short_line(step: int, logs: dict[str, Any]) -> str:
    """A line with the few numbers that a person follows; all others are in ``metrics.jsonl``."""
    prefix = EVAL_PREFIX if any(key.startswith(EVAL_PREFIX) for key in logs) else ""
    values = {label: (logs.get(prefix + key), spec) for label, (key, spec) in _SHORT.items()}
    shown = [f"{label} {value:{spec}}" for label, (value, spec) in values.items() if isinstance(value, int | float)]
    if not shown:
        return ""
    return f"{'held out' if prefix else 'step'} {step:>4}  {'  '.join(shown)}"


class ShortProgressCallback(ProgressCallback):  # type: ignore[misc]
    """The progress bar, with one short line per logging step instead of more than a hundred numbers."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write :func:`short_line` above the bar."""
        line = short_line(state.global_step, logs or {})
        if line and self.training_bar is not None:  # the bar exists on the main process only
            self.training_bar.write(line)


class RunFolderCallback(TrainerCallback):  # type: ignore[misc]
    """Calls a :class:`~trl_offpolicy.run_folder.writer.RunFolderWriter` on the main process.

    Args:
        writer: the writer to call.
    """

    def __init__(self, writer: RunFolderWriter) -> None:
        self._writer = writer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare the folder and write ``run.json``. All ranks call it.

        Raises:
            RunFolderError: on all ranks, if another run has the folder.
        """
        with raised_on_all_ranks(RunFolderError):
            if state.is_world_process_zero:
                self._writer.begin(state.global_step, seed=args.seed)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append the logged row to ``metrics.jsonl``."""
        if state.is_world_process_zero and logs:
            self._writer.log(state.global_step, logs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the writer report on the run."""
        if state.is_world_process_zero:
            self._writer.end()


def record_run(trainer: GRPOTrainer, info: Mapping[str, Any], *, report: bool) -> RunFolderCallback:
    """Have a trainer keep ``run.json`` and ``metrics.jsonl`` in its output folder; returns the callback that does it.

    Args:
        trainer: the trainer to record.
        info: entries of ``run.json`` besides versions, seed and command.
        report: whether to print the summary and write ``report.html`` at the end.
    """
    closing = partial(closing_report, decode=trainer._tokenizer.decode) if report else None
    callback = RunFolderCallback(RunFolderWriter(trainer.args.output_dir, info, report=closing))
    trainer.add_callback(callback)
    return callback


def rollout_recorder(trainer: GRPOTrainer) -> RolloutRecorder:
    """A recorder that writes the rollouts of this rank into the trainer's output folder."""
    return RolloutRecorder(trainer.args.output_dir, trainer._tokenizer.decode, trainer.accelerator.process_index)
