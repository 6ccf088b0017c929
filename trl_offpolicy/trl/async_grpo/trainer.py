"""TRL's experimental ``AsyncGRPOTrainer`` with the loss of :class:`~trl_offpolicy.Objective`.

TRL clips one ratio, current/sampling, around the policy that sampled. That ratio mixes engine mismatch and staleness.
Here the objective decides what is clipped and weighted. TRL's sampling, packing, weight sync, staleness bound and
metrics are unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer

from trl_offpolicy import presets
from trl_offpolicy.objective.losses import PPOClip
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.proximal import AveragedProximal
from trl_offpolicy.stats import Stats
from trl_offpolicy.trl.async_grpo.data import VersionedCollator, VersionedQueueDataset
from trl_offpolicy.trl.async_grpo.packed import packed_batch
from trl_offpolicy.trl.rebinding import rebound
from trl_offpolicy.types import Reduction


class OffPolicyAsyncGRPOTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """TRL's asynchronous GRPO whose loss is an objective of this kit. Takes what ``AsyncGRPOTrainer`` takes.

    **Not run on FlashAttention-3.** TRL's class loads an attention kernel for GPUs from the Hub; loss, gradient and
    training were tested on a CPU with a plain attention in its place.

    A sample is trained once, in the only optimizer step on its batch. So the current policy, detached, is the proximal
    policy, at no extra forward. In decoupled mode weights hold proximal/sampling, which is staleness and engine
    mismatch together, because TRL keeps no log-probs of pi_old that could separate them; PPO's clip then has nothing
    to cut. In bypass mode the clipped ratio is current/sampling, which is TRL's own loss. A lag counts weight syncs,
    plus one if an optimizer step was made since the last sync. TRL tags a sample with the version at the start of its
    group. If a worker's samples have ``token_versions`` (one per token of ``input_ids``), versions are per token.

    Args:
        objective: an :class:`~trl_offpolicy.Objective`, or a preset's name. With a name, the bounds of PPO's clip are
            ``args.epsilon`` and ``args.epsilon_high``.

    Raises:
        NotImplementedError: the objective needs whole groups or generation batches (TRL packs sample by sample), a
            reference policy, or an average over several steps on the same rows.
    """

    def __init__(self, *args: Any, objective: Objective | str = "paper/tis", **kwargs: Any) -> None:
        if isinstance(objective, Objective):
            _check(objective)
        super().__init__(*args, **kwargs)
        if isinstance(objective, str):
            objective = presets.get(objective).objective
            if isinstance(objective.policy_loss, PPOClip):
                clip = replace(objective.policy_loss, low=self.epsilon_low, high=self.epsilon_high)
                objective = replace(objective, policy_loss=clip)
            _check(objective)
        self.objective = objective
        self._stats: Stats | None = None
        self._synced_version, self._synced_step = 0, 0

    # ------------------------------------------------------------------------------------------------------- versions

    @property
    def current_version(self) -> int:
        """Version of the learner's weights: that of the last sync, plus one if an optimizer step was made since."""
        return self._synced_version + int(self.state.global_step > self._synced_step)

    def _sync_weight(self) -> None:
        """Sync as TRL does, then send every rank the version, which only the main process counts."""
        super()._sync_weight()
        (self._synced_version,) = broadcast_object_list([self.model_version], from_process=0)
        self._synced_step = self.state.global_step

    def get_train_dataloader(self) -> Any:
        """TRL's loader, with versions, groups and rewards added to its batches."""
        classes = {"RolloutQueueDataset": VersionedQueueDataset, "DataCollatorForRollout": VersionedCollator}
        with rebound(async_grpo_trainer, **classes):
            return super().get_train_dataloader()

    # ----------------------------------------------------------------------------------------------------------- loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The objective's loss on the log-probs of TRL's forward. TRL also logs its own metrics."""
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, arguments, output: seen.append(output))
        try:
            super().compute_loss(model, inputs)  # its own loss is not used and costs no backward
        finally:
            hook.remove()
        (outputs,) = seen
        logps, entropies = outputs.log_probs.flatten(), outputs.entropy.flatten()
        batch = packed_batch(inputs, logps, entropies, current_version=self.current_version)
        accumulation = self.current_gradient_accumulation_steps
        result = self.objective(batch, self._reduction(inputs, accumulation))
        self._stats = result.stats if self._stats is None else self._stats.merge(result.stats)
        if not self.aux_loss_enabled:
            return result.loss
        scaled: Tensor = self.router_aux_loss_coef * outputs.aux_loss / accumulation
        return result.loss + scaled

    def _reduction(self, inputs: dict[str, Any], accumulation: int) -> Reduction:
        """TRL's denominator: the trained tokens (or samples) of all ranks; then the mean over micro-batches."""
        by_token = self.objective.aggregation == "token_mean"
        count = inputs["global_n_tokens" if by_token else "global_n_samples"][0].clamp(min=1.0) * accumulation
        return Reduction(
            tokens=count if by_token else None,
            sequences=None if by_token else count,
            world_size=self.accelerator.num_processes,
            accumulation=accumulation,
            max_length=self.args.max_completion_length,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the diagnostics of the window, over all ranks, to TRL's metrics."""
        stats, self._stats = self._stats, None
        if stats is not None:
            for key, value in stats.logged(self.accelerator.gather).items():
                self._metrics["train"][key].append(value)
        super().log(logs, start_time)


def _check(objective: Objective) -> None:
    """Raise if the objective needs something that TRL's packed batches do not hold."""
    if objective.scope not in ("row", "micro_batch"):
        raise NotImplementedError(
            "objective must have scope 'row' or 'micro_batch' with AsyncGRPOTrainer, which packs sample by sample, "
            f"but got {objective.scope!r}."
        )
    if objective.kl is not None:
        raise NotImplementedError("objective.kl must be None: AsyncGRPOTrainer has no reference policy.")
    if moving := [type(one).__name__ for one in objective.shaping if one.moves]:
        raise NotImplementedError(
            "objective.shaping must have fixed coefficients (target None) with AsyncGRPOTrainer, but got "
            f"{moving[0]}, which moves."
        )
    if isinstance(objective.proximal, AveragedProximal):
        raise NotImplementedError(
            "objective.proximal must not be AveragedProximal: AsyncGRPOTrainer makes one step on a sample, so there is "
            "nothing to average."
        )
