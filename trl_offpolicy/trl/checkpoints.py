"""Checkpoints of the TRL trainer: written aside and renamed, and resumed from the newest whole one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import trainer as transformers_trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl.trainer import grpo_trainer

from trl_offpolicy.engines.sync import raised_on_all_ranks
from trl_offpolicy.functional.collective import broadcast_object
from trl_offpolicy.run_folder.checkpoints import (
    aside,
    by_step,
    bytes_of,
    choose,
    fault_of,
    is_full,
    no_room,
    put_in_place,
)
from trl_offpolicy.run_folder.layout import STATE_FILE, UNFINISHED
from trl_offpolicy.run_folder.lock import RunFolderError
from trl_offpolicy.trl.rebinding import rebound


@contextmanager
def saved_whole(trainer: Any, trial: Any) -> Iterator[Path]:
    """A context in which transformers writes a checkpoint aside, into the folder that is given; then it is renamed.

    All ranks enter it. Only afterwards old checkpoints are deleted and the new one is uploaded.

    Raises:
        RunFolderError: on all ranks, if the disk is full. What was written of the checkpoint is deleted.
    """
    run = Path(trainer._get_output_dir(trial=trial))
    target = run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    first = trainer.accelerator.is_local_main_process
    if first:
        shutil.rmtree(aside(target), ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    elsewhere = {"PREFIX_CHECKPOINT_DIR": f"{UNFINISHED}{PREFIX_CHECKPOINT_DIR}"}
    with raised_on_all_ranks(RunFolderError), _pushed_later(trainer):
        try:
            with rebound(transformers_trainer, **elsewhere), rebound(grpo_trainer, **elsewhere):
                yield aside(target)
        except Exception as error:
            needed = _bytes_needed(trainer, run)
            if not is_full(error, run, needed=needed):
                raise
            shutil.rmtree(aside(target), ignore_errors=True)
            raise no_room(run, what=target.name, needed=needed, safe=by_step(run)) from error
    best = trainer.state.best_model_checkpoint
    if best is not None and Path(best).name == aside(target).name:  # transformers says so on every rank
        trainer.state.best_model_checkpoint = os.path.join(trainer._get_output_dir(trial=trial), target.name)
        if trainer.args.should_save:
            trainer.state.save_to_json(str(aside(target) / STATE_FILE))
    if first:
        put_in_place(target)
    trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(target))
    if trainer.args.should_save:
        best, most = trainer.state.best_model_checkpoint, trainer.args.save_total_limit
        rotate_checkpoints(output_dir=str(run), save_total_limit=most, best_model_checkpoint=best, use_mtime=True)


@contextmanager
def _pushed_later(trainer: Any) -> Iterator[None]:
    trainer._push_from_checkpoint = lambda folder: None
    try:
        yield
    finally:
        del trainer._push_from_checkpoint


def _bytes_needed(trainer: Any, run: Path) -> int:
    """Bytes of a checkpoint: those of the last one, or of weights and optimizer on this rank if that is more."""
    known = [bytes_of(path) for path in by_step(run)[:1]]
    states = getattr(trainer.optimizer, "state", {}) or {}
    tensors = [*trainer.model.parameters(), *(one for state in states.values() for one in state.values())]
    return max([sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor)), *known])


def resumed_from(trainer: Any, asked: str | bool | None) -> str | bool | None:
    """The checkpoint to go on from, the same on all ranks.

    Args:
        trainer: the trainer.
        asked: argument ``resume_from_checkpoint`` of ``train``: True = the newest whole one of the output folder.

    Raises:
        RunFolderError: on all ranks: the checkpoint that was named is not whole, or none is.
    """
    found = asked
    with raised_on_all_ranks(RunFolderError):
        if trainer.accelerator.is_main_process and asked is True:
            whole = choose(by_step(Path(trainer.args.output_dir)))
            found = True if whole is None else str(whole)  # transformers says that there is none
        elif trainer.accelerator.is_main_process and isinstance(asked, str) and Path(asked).is_dir():
            fault = fault_of(Path(asked))
            if fault is not None:
                raise RunFolderError(
                    f"resume_from_checkpoint must be a whole checkpoint, but {asked} is not: {fault}. Use "
                    "resume_from_checkpoint=True (recipes/grpo.py: --resume true) for the newest whole one."
                )
    return broadcast_object(found)  # type: ignore[no-any-return]
