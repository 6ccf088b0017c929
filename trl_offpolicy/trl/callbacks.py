"""Trainer callbacks: the run folder and the closing report."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_offpolicy.run_folder.writer import append_metrics, prepare_run_folder, run_versions, write_run_info

logger = logging.getLogger(__name__)


_SHORT = {  # label -> (key, format)
    "loss": ("loss", ".4f"),
    "reward": ("reward", ".3f"),
    "length": ("completions/mean_length", ".1f"),
    "KL k3": ("offpolicy/mismatch/kl_k3", ".2e"),
    "ESS": ("offpolicy/weight_applied/ess_token", ".3f"),
    "dropped": ("offpolicy/keep/dropped_sequence_fraction", ".1%"),
    "truncated": ("offpolicy/weight/truncated_fraction", ".1%"),
}


def short_line(step: int, logs: dict[str, Any]) -> str:
    """The handful of numbers that a person follows; all others are in ``metrics.jsonl``."""
    prefix = "eval_" if any(key.startswith("eval_") for key in logs) else ""
    values = {label: (logs.get(prefix + key), spec) for label, (key, spec) in _SHORT.items()}
    shown = [f"{label} {value:{spec}}" for label, (value, spec) in values.items() if isinstance(value, int | float)]
    return f"{'held out' if prefix else 'step'} {step:>4}  {'  '.join(shown)}" if shown else ""


class ShortProgressCallback(ProgressCallback):  # type: ignore[misc]
    """The progress bar with one short line a logging step instead of more than a hundred numbers."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the line above the bar."""
        line = short_line(state.global_step, logs or {})
        if line and self.training_bar is not None:  # the bar exists on the main process only
            self.training_bar.write(line)


class RunFolderCallback(TrainerCallback):  # type: ignore[misc]
    """Writes ``run.json`` and ``metrics.jsonl``, and at the end prints the summary and writes ``report.html``.

    Args:
        info: what ``run.json`` says besides versions, seed and command.
        report: print and write the report at the end.
        decode: token ids to text, for the report.
    """

    def __init__(self, info: dict[str, Any], *, report: bool, decode: Any) -> None:
        self._info, self._report, self._decode = info, report, decode

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare the folder on the main process."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        prepare_run_folder(folder, resumed_step=state.global_step)
        command = " ".join(map(shlex.quote, sys.argv))
        write_run_info(
            folder / "run.json", {**self._info, "seed": args.seed, "command": command, "versions": run_versions()}
        )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append to ``metrics.jsonl``."""
        if state.is_world_process_zero and logs:
            append_metrics(Path(args.output_dir) / "metrics.jsonl", state.global_step, logs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print the table and write the report; a failure here never costs the run."""
        if not (self._report and state.is_world_process_zero):
            return
        from trl_offpolicy.diagnosis import print_summary, summarize_run, write_report

        try:
            print_summary(summarize_run(args.output_dir))
            path = write_report(args.output_dir, decode=self._decode)
            folder = Path(args.output_dir)
            print(f"report:   {path}\nmetrics:  {folder / 'metrics.jsonl'}\nrollouts: {folder / 'rollouts.parquet'}")
        except Exception:
            logger.exception(
                "The run is complete, but its report failed; try: trl-offpolicy report %s", args.output_dir
            )
