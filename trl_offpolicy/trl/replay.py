"""OffPolicyGRPOTrainer with a replay buffer: drawn groups are added after the rows of each fresh generation batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from trl_offpolicy.functional.advantages import ScaleRewards
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.ahead.old_policy import PROXIMAL
from trl_offpolicy.rollouts.compressed_forward import DENSE
from trl_offpolicy.rollouts.replay.buffer import ReplayBuffer
from trl_offpolicy.rollouts.replay.mixing import (
    check_sizes,
    fresh_groups,
    mixed,
    refuse,
    refused_objectives,
    warn_of_other_sizes,
    with_replayed,
)
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

__all__ = ["ReplayGRPOTrainer", "fresh_groups", "with_replayed"]

_FOLDER = "replay"
"""In a checkpoint: the files of the buffer."""


class ReplayGRPOTrainer(OffPolicyGRPOTrainer):
    """GRPO on fresh groups and replayed ones. Takes what :class:`~trl_offpolicy.trainer.OffPolicyGRPOTrainer` takes.

    ``replay_groups`` groups are drawn from the buffer and added to the rows of every generation batch (micro-batches
    grow by that share). Then the fresh groups are stored. So each sampled token is used more often; the number of
    sampled tokens is the same. Training must be aligned, that is, one optimizer step per generation batch. The
    log-probs of the loss step are then those of the proximal policy, so replayed rows need no extra forward, and their
    weights hold current/sampling. A correction of wide scope is decided on fresh and replayed rows together, which
    costs one forward over both. Advantages are made again from the stored rewards, scaled as the fresh ones are.
    Nothing is drawn while the buffer holds fewer groups. ``rollouts.parquet`` records a replayed row again, with the
    version that sampled it.

    A resumed run draws what the run would have drawn that was not stopped: a checkpoint holds the state of the draws
    and, in its folder ``replay``, the files of the buffer. The resume brings back groups that made room since, and
    deletes those that came later.

    Args:
        replay: the buffer.
        replay_groups: number of groups to add to a generation batch.
        max_lag: largest age of a drawn group, in optimizer steps; None = age only lowers priority.
        in_checkpoint: whether a checkpoint holds the files of the buffer, and a resume brings them back. If not, a
            resumed run takes the buffer as it is; groups from after the checkpoint are not drawn until the run has come
            as far again.

    Raises:
        ValueError: the sizes do not fit, a generation serves several optimizer steps, or the buffer is too small.
        NotImplementedError: several processes, sampling ahead, tools, images, a KL term in the reward, token_rewards,
            other advantages than GRPO's, scale_rewards 'batch', or the baseline 'kept'.
    """

    def __init__(
        self,
        *args: Any,
        replay: ReplayBuffer,
        replay_groups: int,
        max_lag: int | None = None,
        in_checkpoint: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _check(self, replay, replay_groups)
        self.replay, self.replay_groups, self.max_lag = replay, replay_groups, max_lag
        self._replay_rng = np.random.default_rng(self.args.seed)
        self._in_checkpoint = in_checkpoint
        self._looked = False  # for groups of another size, once

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        if not self._looked:
            warn_of_other_sizes(self.replay, self.num_generations)
            self._looked = True
        output = mixed(
            output,
            self.replay,
            self.replay_groups,
            version=self.state.global_step,
            rng=self._replay_rng,
            max_lag=self.max_lag,
            generations=self.num_generations,
            pad_token_id=self._tokenizer.pad_token_id,
            score_reference=self._score_reference,
            scale_rewards=self._scale_rewards,
        )
        if self._stages is not None and self._stages.early is not None:
            super()._decide(output, replace(self._stages, advantages=None), "train")
        return output

    def _decide(self, output: dict[str, Any], stages: Stages, mode: str, greedy: Tensor | None = None) -> None:
        """In training only the advantages; the correction is decided on fresh and replayed rows."""
        if mode != "train":
            super()._decide(output, stages, mode, greedy)
        elif stages.advantages is not None:
            super()._decide(output, replace(stages, early=None), mode, greedy)

    @property
    def _scale_rewards(self) -> ScaleRewards:
        """What the fresh rows' advantages are divided by; the objective's are refused unless they are GRPO's."""
        by_trl = self._stages is None or self._stages.advantages is None
        scale: ScaleRewards = self.args.scale_rewards if by_trl else "group"
        return scale

    @property
    def _name_of_scores(self) -> str | None:
        return PROXIMAL if self.model.training else super()._name_of_scores  # replayed rows are of older weights

    def _score_reference(self, rows: dict[str, Any]) -> Tensor:
        """(B, T) log-probs of what fresh rows have: the dense context, the reference model, or no adapter."""
        if self.args.kl_reference == DENSE:
            return self._score_dense(rows)
        scored, alone = self.ref_model, nullcontext()
        if scored is None:
            model = self.accelerator.unwrap_model(self.model)
            scored, alone = self.model, use_adapter(model, "ref" if "ref" in model.peft_config else None)
        whole = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), whole, alone:
            logps: Tensor = self._score(scored, rows, batch_size=self.args.per_device_train_batch_size)[0]
        return logps

    @property
    def _stateful(self) -> dict[str, Any]:
        return {**super()._stateful, "replay": _Draws(self._replay_rng)}

    def _save_parts(self, folder: Path) -> None:
        super()._save_parts(folder)
        if self._in_checkpoint:
            self.replay.save(folder / _FOLDER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._in_checkpoint:
            return
        if (saved := Path(checkpoint) / _FOLDER).is_dir():  # else it was written without the files
            self.replay.load(saved)


class _Draws:
    """The state of the draws, as a part of a checkpoint."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"random": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._rng.bit_generator.state = state["random"]


def _check(trainer: Any, replay: ReplayBuffer, replay_groups: int) -> None:
    args = trainer.args
    check_sizes(
        replay_groups,
        rows=args.per_device_train_batch_size * args.steps_per_generation,
        max_rows=replay.max_rows,
        generations=trainer.num_generations,
        steps_per_generation=args.steps_per_generation,
        num_iterations=trainer.num_iterations,
        accumulation=args.gradient_accumulation_steps,
    )
    refused = {
        "several processes": trainer.accelerator.num_processes > 1,
        "async_rollouts": trainer._ahead is not None,
        "tools": bool(trainer.tools),
        **refused_objectives(trainer._stages, token_rewards=args.token_rewards),
        "scale_rewards 'batch'": trainer._scale_rewards == "batch",
        "multi_objective_aggregation 'normalize_then_sum'": args.multi_objective_aggregation == "normalize_then_sum",
        "an engine without log-probs": not (args.reports_logps or trainer.rollout_func),
    }
    refuse("ReplayGRPOTrainer", refused)
