"""OffPolicyGRPOTrainer: TRL's GRPOTrainer with the loss of :class:`~trl_offpolicy.Objective`.

The seam is ``_compute_loss``: log-probs once through TRL's own method, a PolicyBatch, the objective, its stats. Where
TRL samples and learns with the same weights (aligned steps), old is the current policy and no extra forward is paid.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import ProgressCallback
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trl_offpolicy.callbacks import RunFolderCallback, ShortProgressCallback
from trl_offpolicy.config import OffPolicyGRPOConfig, resolve_preset
from trl_offpolicy.correction_stats import noise_floor
from trl_offpolicy.engines.colocate import colocate_engine
from trl_offpolicy.functional.advantages import ScaleRewards
from trl_offpolicy.objective_terms import NONFINITE_CURRENT
from trl_offpolicy.objectives import Objective
from trl_offpolicy.presets.trl import GLOBAL_TOKEN_LOSSES
from trl_offpolicy.recording import RolloutRecorder
from trl_offpolicy.staging import Stages
from trl_offpolicy.stats import Stats
from trl_offpolicy.trainer_checks import check_engine, stages_of, warn_about_dropout
from trl_offpolicy.trl_names import trl_names
from trl_offpolicy.types import ObjectiveOutput, PolicyBatch, Reduction

_MODEL_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
_TEXT_INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_BATCH_FIELDS = (
    "old_per_token_logps", "sampling_per_token_logps", "rewards", "ref_per_token_logps", "policy_versions",
    "group_ids", "group_rewards", "decided_weights", "decided_keep",
)  # fmt: skip


class OffPolicyGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO that knows which policy sampled each token. Takes what ``trl.GRPOTrainer`` takes.

    Args:
        args: an :class:`OffPolicyGRPOConfig`; its ``offpolicy`` field names the correction.

    Raises:
        TypeError: ``args`` is not an ``OffPolicyGRPOConfig``.
        ValueError: the correction needs an engine with log-probs of its own and there is none, or the sampling
            options make them incomparable.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "trl-offpolicy"]

    entropy_coef: float
    _entropy_window_stats: Tensor | None

    def __init__(self, model: Any, reward_funcs: Any, args: OffPolicyGRPOConfig, *rest: Any, **kwargs: Any) -> None:
        if not isinstance(args, OffPolicyGRPOConfig):
            raise TypeError(f"args must be an OffPolicyGRPOConfig, but got {type(args).__name__}.")
        has_rollout_func = kwargs.get("rollout_func") is not None
        preset = resolve_preset(args, has_rollout_func=has_rollout_func)
        self.objective: Objective = preset.objective
        check_engine(args, self.objective, has_rollout_func=has_rollout_func)
        self._stages = stages_of(args, self.objective)
        warn_about_dropout(kwargs.get("peft_config"))
        with colocate_engine(cast("dict[str, Any] | None", args.engine)):
            super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self._stats: dict[str, Stats] = {}
        self._rewards: Tensor | None = None
        self._groups_seen = {"train": 0, "eval": 0}
        self._recorder = self._make_recorder() if args.record_rollouts else None
        info = {
            "model": getattr(self.model.config, "_name_or_path", ""),
            "preset": preset.name,
            "correction": repr(self.objective.correction),
            "objective": repr(replace(self.objective, correction=None)),
            "engine": f"vllm {args.vllm_mode} {args.engine or ''}" if args.use_vllm else "transformers generate",
        }
        if self.pop_callback(ProgressCallback) is not None:  # absent in notebooks and with disable_tqdm
            self.add_callback(ShortProgressCallback)
        self.add_callback(RunFolderCallback(info, report=args.write_report, decode=self._tokenizer.decode))

    def _make_recorder(self) -> RolloutRecorder:
        folder = Path(self.args.output_dir) / "rollouts.parquet"
        return RolloutRecorder(folder, self._tokenizer.decode, self.accelerator.process_index)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the total reward of every completion of all ranks; TRL's own batch does not carry it."""
        per_function: Tensor = super()._calculate_rewards(*args, **kwargs)
        total = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
        self._rewards = torch.where(per_function.isnan().all(dim=1), torch.nan, total)
        return per_function

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rows, rank = len(output["advantages"]), self.accelerator.process_index
        generations = self.num_generations if self.model.training else self.num_generations_eval
        device = output["advantages"].device
        here = slice(rank * rows, (rank + 1) * rows)
        if self._rewards is not None:
            output["rewards"] = self._rewards[here].to(device)
            by_group = self._rewards.view(-1, generations)
            output["group_rewards"] = by_group.repeat_interleave(generations, dim=0)[here].to(device)
        mode = "train" if self.model.training else "eval"
        group_ids = torch.arange(rank * rows, (rank + 1) * rows, device=device) // generations
        output["group_ids"] = self._groups_seen[mode] + group_ids  # several generation batches can meet in one step
        self._groups_seen[mode] += rows * self.accelerator.num_processes // generations
        output["policy_versions"] = torch.full((rows,), self.state.global_step, device=device)
        if self._stages is not None:
            self._decide(output, self._stages, mode)
        return output

    def _decide(self, output: dict[str, Any], stages: Stages, mode: str) -> None:
        """Run what needs the whole generation batch, before TRL shuffles and splits it; its rows travel along."""
        if "old_per_token_logps" not in output:
            train = mode == "train"
            size = self.args.per_device_train_batch_size if train else self.args.per_device_eval_batch_size
            with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                output["old_per_token_logps"] = self._score(self.model, output, batch_size=size)[0]
        old = output["old_per_token_logps"]
        batch = self._policy_batch(output, _trainable(output), old)
        decided = stages.decide(batch, scale_rewards=cast("ScaleRewards", self.scale_rewards))
        output.update(decided.rows)
        if self.objective.denominator == "kept":
            output["kept_tokens"], output["kept_sequences"] = decided.kept_tokens, decided.kept_sequences
        self._add_stats(mode, decided.stats)

    def _score(self, model: Any, inputs: dict[str, Any], *, batch_size: int | None = None, **wanted: bool) -> Any:
        """TRL's own scoring of the completions: (log-probs (B, T), entropies, auxiliary loss)."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            batch_size,
            **wanted,
            **{name: inputs.get(name) for name in _MODEL_INPUTS},
        )

    # ---------------------------------------------------------------------------------------------------------- loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        logps, entropies, aux_loss = self._score(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        batch = self._policy_batch(inputs, _trainable(inputs), logps, entropies)
        reduction = self._reduction(inputs, mode)
        result = self._current_objective()(batch, reduction)
        self._add_stats(mode, result.stats)
        self._raise_if_not_finite(mode)
        self._record(inputs, batch, result, mode)
        self._measure_noise_floor(model, inputs, batch, mode)
        if self._entropy_bonus_enabled:
            self._log_policy_loss(batch, result, reduction, mode)
        self._update_entropy_coefficient(batch, mode)
        return result.loss if aux_loss is None else result.loss + self._scaled_aux_loss(aux_loss, mode)

    def _policy_batch(
        self, inputs: dict[str, Any], mask: Tensor, logps: Tensor, entropies: Tensor | None = None
    ) -> PolicyBatch:
        policy_mask = None
        if entropies is not None and self.top_entropy_quantile < 1.0:
            policy_mask = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        return PolicyBatch(
            per_token_logps=logps,
            completion_mask=mask,
            advantages=inputs["advantages"],
            entropies=entropies,
            policy_mask=policy_mask,
            current_version=self.state.global_step,
            **{name: inputs.get(name) for name in _BATCH_FIELDS},
        )

    def _add_stats(self, mode: str, stats: Stats) -> None:
        known = self._stats.get(mode)
        self._stats[mode] = stats if known is None else known.merge(stats)

    def _measure_noise_floor(self, model: Any, inputs: dict[str, Any], batch: PolicyBatch, mode: str) -> None:
        """Score the micro-batch again in halves (a single row: doubled); once in ``noise_floor_steps`` steps."""
        every = self.args.noise_floor_steps
        if mode != "train" or not every or self.state.global_step % every or "noise_floor" in self._stats[mode].groups:
            return
        rows = len(batch.mask)
        if any(inputs.get(name) is not None for name in _MODEL_INPUTS):
            return  # images are not split by rows
        again = inputs if rows > 1 else {name: inputs[name].repeat(2, 1) for name in _TEXT_INPUTS}
        with torch.no_grad():
            logps = self._score(model, again, batch_size=max(rows // 2, 1) if rows > 1 else 2)[0][:rows]
        self._add_stats(mode, noise_floor(batch.per_token_logps.detach(), logps, batch.mask))

    def _current_objective(self) -> Objective:
        """The objective of the loss step, with the adaptive entropy coefficient of this moment."""
        objective = self.objective if self._stages is None else self._stages.late
        if not self.use_adaptive_entropy:
            return objective
        active = self._last_world_entropy <= self.args.entropy_target
        return replace(objective, entropy_coef=self.entropy_coef if active else 0.0)

    def _reduction(self, inputs: dict[str, Any], mode: str) -> Reduction:
        """TRL's denominators: its loss is scaled for gradient accumulation here, not by the base trainer."""
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1
        # these counts span the generation batch; rescale them to one accumulation window
        share = accumulation / self.args.steps_per_generation if mode == "train" else 1.0
        tokens = sequences = None
        if "kept_tokens" in inputs:
            tokens, sequences = (inputs[name].clamp(min=1.0) * share for name in ("kept_tokens", "kept_sequences"))
        elif self.loss_type in GLOBAL_TOKEN_LOSSES:
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) * share
        return Reduction(
            tokens=tokens,
            sequences=sequences,
            world_size=self.accelerator.num_processes,
            accumulation=accumulation,
            max_length=self.max_completion_length,
        )

    def _scaled_aux_loss(self, aux_loss: Tensor, mode: str) -> Tensor:
        self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss.detach()).mean().item())
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1
        scaled: Tensor = self.router_aux_loss_coef * aux_loss / accumulation
        return scaled

    def _log_policy_loss(self, batch: PolicyBatch, result: ObjectiveOutput, reduction: Reduction, mode: str) -> None:
        """TRL's ``policy_loss``: the loss without entropy bonus and accumulation scaling."""
        whole = replace(reduction, accumulation=1)
        loss = self.objective._reduce(result.per_token_loss.detach(), batch.mask, result.keep_mask, whole)
        self._metrics[mode]["policy_loss"].append(self.accelerator.gather(loss).nanmean().item())

    def _raise_if_not_finite(self, mode: str) -> None:
        """Once per optimizer step: the only wait for the device in the loss."""
        check = mode == "train" and self.accelerator.sync_gradients
        if check and float(self._stats[mode].groups["loss"].moments["nonfinite"]) > 0:
            raise ValueError(NONFINITE_CURRENT)

    def _update_entropy_coefficient(self, batch: PolicyBatch, mode: str) -> None:
        """TRL's adaptive entropy controller, on the entropy of the whole accumulation window and all ranks."""
        if not (self.use_adaptive_entropy and mode == "train"):
            if self._entropy_bonus_enabled and mode == "train" and self.accelerator.sync_gradients:
                self._metrics[mode]["entropy_coef"].append(self.entropy_coef)
            return
        assert batch.entropies is not None
        acting = batch.mask if batch.policy_mask is None else batch.mask & batch.policy_mask
        sums = torch.stack([torch.where(acting, batch.entropies, 0.0).sum(), acting.sum()]).detach()
        self._entropy_window_stats = sums if self._entropy_window_stats is None else self._entropy_window_stats + sums
        if not self.accelerator.sync_gradients:
            return
        total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum").tolist()
        self._last_world_entropy = total / max(count, 1.0)
        step = self.args.entropy_coef_delta
        step = step if self._last_world_entropy <= self.args.entropy_target else -step
        low, high = self.args.entropy_coef_min, self.args.entropy_coef_max
        self.entropy_coef = min(max(self.entropy_coef + step, low), high)
        self._entropy_window_stats = None
        self._metrics[mode]["entropy_coef"].append(self.entropy_coef)

    def _record(self, inputs: dict[str, Any], batch: PolicyBatch, result: ObjectiveOutput, mode: str) -> None:
        """Record each rollout once, on the first pass over it."""
        window = self.args.steps_per_generation * self.num_iterations
        if self._recorder is None or mode != "train" or self._step % window >= self.args.steps_per_generation:
            return
        self._recorder.add(
            self.state.global_step,
            prompt_ids=inputs["prompt_ids"],
            prompt_mask=inputs["prompt_mask"],
            completion_ids=inputs["completion_ids"],
            attention_mask=inputs["completion_mask"],
            completion_mask=batch.mask,
            sampling_per_token_logps=batch.sampling_per_token_logps,
            old_per_token_logps=batch.logps("old"),
            weights=result.weights,
            keep_mask=result.keep_mask,
            reward=batch.rewards,
            advantage=batch.advantages if batch.advantages.dim() == 1 else batch.advantages.mean(1),
            group_id=batch.group_ids,
            policy_version=batch.policy_versions,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Reduce the stats over ranks with one collective, add them under TRL's and this kit's names, and log."""
        mode = "train" if self.model.training else "eval"
        stats = self._stats.pop(mode, None)
        if stats is not None:
            values = stats.all_reduce(self.accelerator.gather).compute()
            for key, value in {**values, **trl_names(self.objective, values)}.items():
                self._metrics[mode][key].append(value)
        if self._recorder is not None:
            self._recorder.flush()
        super().log(logs, start_time)


def _trainable(inputs: dict[str, Any]) -> Tensor:
    """(B, T) bool: completion tokens that the model itself wrote."""
    mask: Tensor = inputs["completion_mask"]
    return (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).bool()
