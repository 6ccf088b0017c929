"""Checkpoints under Lightning: written aside and renamed, and read from the newest whole one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from trl_offpolicy.run_folder.checkpoints import (
    aside,
    choose,
    fault_of,
    is_full,
    no_room,
    put_in_place,
    remove_unfinished,
)
from trl_offpolicy.run_folder.layout import UNFINISHED
from trl_offpolicy.run_folder.lock import RunFolderError


class WholeCheckpoints(CheckpointIO):
    """Lightning's reader and writer of checkpoint files, so that a half written one is never met.

    Args:
        inner: what reads and writes.
        resumes: says whether a run is to go on from what is read; otherwise the file that is named is meant.
    """

    def __init__(self, inner: CheckpointIO, resumes: Callable[[], bool]) -> None:
        self.inner, self._resumes = inner, resumes
        self._cleared: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a file aside and rename it. Before the first one, what a killed run left half written is deleted.

        Raises:
            RunFolderError: the disk is full. What was written of the file is deleted.
        """
        if _is_remote(path):
            self.inner.save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent not in self._cleared:
            remove_unfinished(target.parent)
            self._cleared.add(target.parent)
        try:
            self.inner.save_checkpoint(checkpoint, aside(target), storage_options)
        except Exception as error:
            needed = _bytes_in(checkpoint)
            aside(target).unlink(missing_ok=True)
            if not is_full(error, target.parent, needed=needed):
                raise
            raise no_room(target.parent, what=target.name, needed=needed, safe=_newest(target.parent)) from error
        put_in_place(target)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file; if it is not whole and a run resumes, the newest whole one of its folder, with a warning.

        Raises:
            RunFolderError: none is whole; or this one is not, and it is to be tested, validated or predicted with.
        """
        chosen = path
        if not _is_remote(path) and Path(path).is_file():
            fault = fault_of(Path(path))
            if fault is not None and not self._resumes():
                raise RunFolderError(f"ckpt_path must be a whole checkpoint, but {path} is not: {fault}.")
            others = [one for one in _newest(Path(path).parent) if one != Path(path)]
            chosen = choose([Path(path), *others])
        return self.inner.load_checkpoint(chosen, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Close what the inner one holds."""
        self.inner.teardown()


def keep_whole(trainer: Trainer) -> None:
    """Have a trainer write and read whole checkpoints, if Lightning's own reader and writer does it."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpoints(trainer.strategy.checkpoint_io, partial(_resumes, trainer))


def _resumes(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


def _newest(folder: Path) -> list[Path]:
    """The checkpoint files of a folder, newest first."""
    files = [one for one in folder.glob("*.ckpt") if one.is_file() and not one.name.startswith(UNFINISHED)]
    return sorted(files, key=lambda one: -one.stat().st_mtime)


def _bytes_in(value: Any) -> int:
    """Bytes of the tensors in nested mappings and lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_bytes_in, value.values()))
    return sum(map(_bytes_in, value)) if isinstance(value, list | tuple) else 0


def warn_of_lost_gradients(trainer: Trainer) -> None:
    """Warn of a run that is resumed between two optimizer steps: no checkpoint holds the gradients so far."""
    whole, seen = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_progress.current.ready
    at_the_end = seen >= trainer.num_training_batches  # the last step of an epoch may have fewer micro-batches
    done = seen % whole
    if done and not at_the_end:
        rank_zero_warn(
            f"The checkpoint was written after {done} of the {whole} micro-batches of an optimizer step, and holds no "
            f"gradients: the first step of this run has those of the other {whole - done} alone. Choose "
            "val_check_interval (it counts micro-batches) as a multiple of accumulate_grad_batches."
        )
