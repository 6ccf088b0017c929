"""Turns the dict that TRL passes around into this kit's batch, advantage inputs, reduction and recorded rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.functional.levels import turn_index
from trl_offpolicy.objective.advantages import AdvantageInputs
from trl_offpolicy.objective.objective import NO_SAMPLING
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.token_rewards import padded_token_rewards
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import ObjectiveOutput, PolicyBatch, Reduction

MODEL_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Inputs that a vision-language model needs besides text."""

_TEXT_INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")

_BATCH_FIELDS = (
    "old_per_token_logps", "sampling_per_token_logps", "rewards", "ref_per_token_logps", "policy_versions",
    "group_ids", "group_rewards", "decided_weights", "decided_keep", "past_average", "proximal_per_token_logps",
)  # fmt: skip


def check_prompts(prompt_ids: Sequence[Sequence[int]], prompts: Sequence[Any]) -> None:
    """Raise if a prompt has no token: there is nothing from which a model could go on.

    Raises:
        ValueError: the message shows the prompt.
    """
    empty = next((i for i, ids in enumerate(prompt_ids) if len(ids) == 0), None)
    if empty is not None:
        raise ValueError(
            f"prompt must have at least one token, but prompt {empty} of the batch, {prompts[empty]!r}, has none. "
            "Leave such rows out of the data set, or take a tokenizer that begins with a BOS token."
        )


def trainable(inputs: dict[str, Any]) -> Tensor:
    """(B, T) bool: completion tokens that the policy sampled, without tool output and padding."""
    mask: Tensor = inputs["completion_mask"]
    return (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).bool()


def policy_batch(
    inputs: dict[str, Any],
    logps: Tensor,
    *,
    version: int,
    entropies: Tensor | None = None,
    policy_mask: Tensor | None = None,
    sum_sq_probs: Tensor | None = None,
) -> PolicyBatch:
    """The :class:`~trl_offpolicy.PolicyBatch` of a dict.

    Args:
        inputs: TRL's keys and those of :func:`row_fields`.
        logps: (B, T) log-probs of the policy at ``version``.
        version: optimizer steps so far.
        entropies: as in :class:`~trl_offpolicy.PolicyBatch`, like the following two.
        policy_mask: tokens of the policy term.
        sum_sq_probs: sums of squared probabilities, from the fused head.
    """
    mask = trainable(inputs)
    return PolicyBatch(
        per_token_logps=logps,
        completion_mask=mask,
        turn_ids=turn_index(mask) if "tool_mask" in inputs else None,
        advantages=inputs["advantages"],
        entropies=entropies,
        policy_mask=policy_mask,
        sum_sq_probs=sum_sq_probs,
        current_version=version,
        **{name: inputs.get(name) for name in _BATCH_FIELDS},
    )


def total_rewards(by_function: Tensor, reward_weights: Tensor) -> Tensor:
    """(N,) weighted sum of the (N, K) rewards, without NaN; NaN if all of a row's rewards are NaN, as in TRL."""
    total = (by_function * reward_weights.to(by_function.device)).nansum(dim=1)
    return torch.where(by_function.isnan().all(dim=1), torch.nan, total)


def is_correct(rewards: Tensor, threshold: float) -> Tensor:
    """(N,) float: 1 if the total reward is at least ``threshold``, else 0; NaN if there is no reward.

    The mean of those that are not NaN is pass@1.
    """
    return torch.where(rewards.isnan(), torch.nan, (rewards >= threshold).float())


def row_fields(
    inputs: dict[str, Any], rewards: Tensor | None, *, rank: int, generations: int, first_group: int, version: int
) -> dict[str, Tensor]:
    """Fields that TRL's dict lacks for the rows of this rank: reward, rewards of the group, group and version.

    Args:
        inputs: TRL's dict.
        rewards: (N,) total rewards of all ranks, in rank order, or None.
        rank: number of this rank.
        generations: rows per group.
        first_group: groups counted so far; several generation batches can meet in one optimizer step.
        version: optimizer steps so far.
    """
    rows, device = len(inputs["advantages"]), inputs["advantages"].device
    here = slice(rank * rows, (rank + 1) * rows)
    fields = {
        "group_ids": first_group + torch.arange(here.start, here.stop, device=device) // generations,
        "policy_versions": torch.full((rows,), version, device=device),
    }
    if rewards is not None:
        of_group = rewards.view(-1, generations).repeat_interleave(generations, dim=0)
        fields |= {"rewards": rewards[here].to(device), "group_rewards": of_group[here].to(device)}
    return fields


class RowCounter:
    """Counts the prompt groups of a run of ``trl.GRPOTrainer``, so that each has its own number."""

    def __init__(self) -> None:
        self.seen = {"train": 0, "eval": 0}

    def fields(self, trainer: Any, inputs: dict[str, Any], by_function: Tensor | None) -> dict[str, Tensor]:
        """:func:`row_fields` of a generation batch; ``by_function`` is the (N, K) rewards of all ranks, or None."""
        mode = "train" if trainer.model.training else "eval"
        generations = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        first = self.seen[mode]
        self.seen[mode] += len(inputs["advantages"]) * trainer.accelerator.num_processes // generations
        return row_fields(
            inputs,
            None if by_function is None else total_rewards(by_function, trainer.reward_weights),
            rank=trainer.accelerator.process_index,
            generations=generations,
            first_group=first,
            version=trainer.state.global_step,
        )

    def state_dict(self) -> dict[str, int]:
        """The groups counted so far, by mode; a run that goes on from a checkpoint must not number others alike."""
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from :meth:`state_dict`."""
        self.seen = dict(state)


def advantage_inputs(
    inputs: dict[str, Any],
    by_function: Tensor,
    reward_weights: Tensor,
    *,
    rank: int,
    greedy: Tensor | None = None,
    token_rewards: Sequence[Sequence[float]] | None = None,
) -> AdvantageInputs:
    """The inputs of an estimator for the rows of this rank; ``by_function`` is the (N, K) rewards of all ranks.

    ``greedy`` (B,) is the reward of the greedy completion of each of this rank's prompts, if it was sampled.
    ``token_rewards`` holds a list for each of its rows (:func:`~.token_rewards.read_token_rewards`), if there are any.
    """
    rows, device = len(inputs["advantages"]), inputs["advantages"].device
    return AdvantageInputs(
        rewards=by_function[rank * rows : (rank + 1) * rows].to(device),
        group_ids=inputs["group_ids"],
        reward_weights=reward_weights.to(device),
        mask=trainable(inputs),
        token_rewards=None if token_rewards is None else padded_token_rewards(token_rewards, inputs["completion_ids"]),
        greedy_rewards=None if greedy is None else greedy.to(device),
    )


def decide(
    stages: Stages,
    rows: dict[str, Any],
    inputs: AdvantageInputs | None,
    *,
    score_old: Callable[[], tuple[Tensor, Tensor | None]],
    version: int,
    keep_as: str | None = "old_per_token_logps",
) -> Stats:
    """Run what needs the whole generation batch, before it is shuffled and split. All ranks call it.

    Args:
        stages: the parts of the objective that need the whole batch.
        rows: the generation batch. The results are added to it and travel with the rows.
        inputs: the inputs of an estimator; None = the advantages in ``rows`` are the trainer's own.
        score_old: returns (B, T) log-probs of the old policy, and the sums of its squared probabilities or None. It is
            called only if they are read and not known.
        version: optimizer steps so far.
        keep_as: key under which these log-probs travel with the rows, unless it is set already; None = they do not.

    Returns:
        Diagnostics, once per generation batch; empty if only advantages were made.
    """
    if stages.needs_old:
        old, sums = rows.get("old_per_token_logps"), None  # known if older weights were kept
        if old is None or stages.needs_sum_sq_probs:
            old, sums = score_old()
        if keep_as is not None:
            rows.setdefault(keep_as, old)
        decided = stages.decide(policy_batch(rows, old, version=version, sum_sq_probs=sums), inputs)
    elif stages.kl_in_reward is not None:  # that of the sampler, which nothing has to score
        sampling = rows.get("sampling_per_token_logps")
        if sampling is None:
            raise ValueError(NO_SAMPLING)
        decided = stages.decide(policy_batch(rows, sampling, version=version), inputs)
    else:
        assert inputs is not None  # with neither an early part nor an estimator there is nothing to decide
        decided = stages.estimate(inputs)
    rows.update(decided.rows)
    if stages.late.denominator == "kept" and decided.kept_tokens is not None:
        assert decided.kept_sequences is not None
        rows["kept_tokens"], rows["kept_sequences"] = decided.kept_tokens, decided.kept_sequences
    return decided.stats


def row_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B,) advantages; per-token advantages are averaged over the trainable tokens."""
    if advantages.dim() == 1:
        return advantages
    return torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def replace_last(table: deque[float], values: list[float]) -> None:
    """Replace the newest entries of one of TRL's tables of completions by ``values``."""
    for _ in range(min(len(values), len(table))):
        table.pop()
    table.extend(values)


def recorded_rows(inputs: dict[str, Any], batch: PolicyBatch, result: ObjectiveOutput) -> dict[str, Tensor | None]:
    """A micro-batch as the recorder takes it. Old log-probs that were not computed are NaN."""
    return {
        "prompt_ids": inputs["prompt_ids"],
        "prompt_mask": inputs["prompt_mask"],
        "completion_ids": inputs["completion_ids"],
        "attention_mask": inputs["completion_mask"],
        "completion_mask": batch.mask,
        "sampling_per_token_logps": batch.sampling_per_token_logps,
        "old_per_token_logps": old_where_known(batch),
        "entropies": batch.entropies if batch.old_per_token_logps is None else None,  # those of old
        "weights": result.weights,
        "keep_mask": result.keep_mask,
        "reward": batch.rewards,
        "advantage": row_advantages(batch.advantages, batch.mask),
        "group_id": batch.group_ids,
        "policy_version": oldest_versions(batch),
        "policy_versions": batch.policy_versions if versions_by_token(batch) else None,
    }


def old_where_known(batch: PolicyBatch) -> Tensor:
    """(B, T) log-probs of the old policy; NaN where older weights sampled and their log-probs were not computed."""
    old, lags = batch.logps("old"), batch.version_lags
    if batch.old_per_token_logps is not None or lags is None:
        return old
    return torch.where(lags > 0, torch.nan, old)


def versions_by_token(batch: PolicyBatch) -> bool:
    """True if the batch has a version per token, not only per row."""
    return batch.policy_versions is not None and batch.policy_versions.dim() == 2


def oldest_versions(batch: PolicyBatch) -> Tensor | None:
    """(B,) integer: the oldest version among a row's tokens; for a row without tokens, that of its padding."""
    versions = batch.policy_versions
    if versions is None or not versions_by_token(batch):
        return versions
    assert versions is not None
    newest = torch.iinfo(versions.dtype).max
    of_tokens = torch.where(batch.mask, versions, newest).amin(-1)
    return torch.where(batch.mask.any(-1), of_tokens, versions[:, -1])


def in_other_batches(inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The same rows to score in halves (a single row is doubled), and the batch size."""
    rows = len(inputs["prompt_ids"])
    if rows > 1:
        return inputs, rows // 2
    names = (*_TEXT_INPUTS, "tool_mask", "routed_experts", "kept_ids", "images", *MODEL_INPUTS)
    present = {name: inputs[name] for name in names if inputs.get(name) is not None}
    return {name: torch.cat([v] * 2) if isinstance(v, Tensor) else v * 2 for name, v in present.items()}, 2


def trainer_reduction(trainer: Any, inputs: dict[str, Any], *, train: bool, by_token: bool) -> Reduction:
    """:func:`loss_reduction` of a step of ``trl.GRPOTrainer``."""
    accumulation = trainer.current_gradient_accumulation_steps if train else 1
    return loss_reduction(
        inputs,
        accumulation=accumulation,
        share=accumulation / trainer.args.steps_per_generation if train else 1.0,
        by_token=by_token,
        world_size=trainer.accelerator.num_processes,
        max_length=trainer.max_completion_length,
    )


def loss_reduction(
    inputs: dict[str, Any], *, accumulation: int, share: float, by_token: bool, world_size: int, max_length: int
) -> Reduction:
    """TRL's denominators. TRL's GRPO loss itself scales for gradient accumulation, not the base trainer.

    Args:
        inputs: with ``num_items_in_batch``, and ``kept_tokens`` and ``kept_sequences`` if the denominator is "kept".
        accumulation: micro-batches per optimizer step.
        share: the part of the generation batch, which those counts cover, that one optimizer step uses.
        by_token: True if the loss divides by the tokens of the step.
        world_size: number of ranks.
        max_length: L of Dr. GRPO.
    """
    tokens = sequences = None
    if "kept_tokens" in inputs:
        tokens, sequences = (inputs[name].clamp(min=1.0) * share for name in ("kept_tokens", "kept_sequences"))
    elif by_token:
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) * share
    return Reduction(
        tokens=tokens, sequences=sequences, world_size=world_size, accumulation=accumulation, max_length=max_length
    )
