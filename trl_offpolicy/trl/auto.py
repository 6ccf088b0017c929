"""``offpolicy: auto`` in TRL: which moments of the trainer the session of :mod:`trl_offpolicy.control.auto` gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from trl_offpolicy.control.auto import AutoSession
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.functional.collective import gather_objects
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.rollouts import batches

GENERATION_FILE = "auto_generation.pt"
"""In a checkpoint: what each rank has added up of the generation that is judged when the next one is sampled."""


def choose_correction(trainer: Any, preset: Preset) -> AutoSession | None:
    """The session that chooses the correction of a trainer; None if the preset is a correction."""
    if preset.auto is None:
        return None

    def correct(chosen: Correction) -> None:
        trainer.objective = replace(trainer.objective, correction=chosen)
        trainer._stages = None if trainer._stages is None else trainer._stages.with_correction(chosen)

    is_main = trainer.accelerator.is_main_process
    return AutoSession(
        preset,
        correct=correct,
        say=tqdm.write if is_main else None,
        records=Path(trainer.args.output_dir) if is_main else None,
    )


def judge_first(trainer: Any, session: AutoSession, output: dict[str, Any]) -> None:
    """Choose by the first generation batch. If nothing has scored its old policy yet, this costs one forward, once.

    Args:
        trainer: the trainer.
        session: its session, which has not chosen yet.
        output: the generation batch as TRL has it, before it is shuffled and split; it is not changed.
    """
    old = output.get("old_per_token_logps")
    if old is None:
        old = trainer._score_old(output, "train", with_sums=False)[0]
    step = trainer.state.global_step
    session.decide_first(batches.policy_batch(output, old, version=step), step)


def save_generation(session: AutoSession, folder: Path, *, writes: bool) -> None:
    """Keep in a checkpoint what is not judged yet. All ranks call it; the one that ``writes`` does so for all."""
    parts = gather_objects(session.pending())
    if writes:
        torch.save(parts, folder / GENERATION_FILE)


def load_generation(trainer: Any, session: AutoSession, folder: Path) -> None:
    """Continue from :func:`save_generation`; on another number of ranks the next generation is the first one judged."""
    file, accelerator = folder / GENERATION_FILE, trainer.accelerator
    parts = torch.load(file, weights_only=True) if file.is_file() else []
    if len(parts) == accelerator.num_processes:
        session.load_pending(parts[accelerator.process_index], accelerator.device)
