"""``offpolicy: auto`` in TRL: which moments of the trainer the session of :mod:`trl_offpolicy.control.auto` gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trl_offpolicy.control.auto import AutoSession
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.rollouts import batches


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
