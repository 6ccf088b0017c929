"""OffPolicyGRPOTrainer with a replay buffer: drawn groups are added after the rows of each fresh generation batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_offpolicy.functional.advantages import group_advantages
from trl_offpolicy.rollouts.replay.batch import PaddedGroups, pad_groups
from trl_offpolicy.rollouts.replay.buffer import ReplayBuffer
from trl_offpolicy.rollouts.replay.records import ReplayGroup, Response
from trl_offpolicy.trl.rebinding import is_aligned
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

_LEFT = ("prompt_ids", "prompt_mask")
_KNOWN = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "sampling_per_token_logps",
    "num_items_in_batch", "group_ids", "policy_versions", "rewards", "group_rewards",
}  # fmt: skip


class ReplayGRPOTrainer(OffPolicyGRPOTrainer):
    """GRPO on fresh groups and replayed ones. Takes what :class:`~trl_offpolicy.trainer.OffPolicyGRPOTrainer` takes.

    ``replay_groups`` groups are drawn from the buffer and added to the rows of every generation batch (micro-batches
    grow by that share). Then the fresh groups are stored. So each sampled token is used more often; the number of
    sampled tokens is the same. Training must be aligned, that is, one optimizer step per generation batch. The
    log-probs of the loss step are then those of the proximal policy, so replayed rows need no extra forward, and their
    weights hold current/sampling. Advantages are made again from the stored rewards, scaled by group. Nothing is drawn
    while the buffer holds fewer groups. ``rollouts.parquet`` records a replayed row again, with the version that
    sampled it.

    Args:
        replay: the buffer.
        replay_groups: number of groups to add to a generation batch.
        max_lag: largest age of a drawn group, in optimizer steps; None = age only lowers priority.

    Raises:
        ValueError: the sizes do not fit, or a generation serves several optimizer steps.
        NotImplementedError: several processes, sampling ahead, tools, a KL term, images, or an objective that must see
            the whole generation batch.
    """

    def __init__(
        self, *args: Any, replay: ReplayBuffer, replay_groups: int, max_lag: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _check(self, replay_groups)
        self.replay, self.replay_groups, self.max_lag = replay, replay_groups, max_lag
        self._replay_rng = np.random.default_rng(self.args.seed)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        if unknown := sorted(set(output) - _KNOWN):
            raise NotImplementedError(
                f"a generation batch must hold nothing that replayed rows lack, but got {unknown}."
            )
        version = self.state.global_step
        groups = fresh_groups(output, self.num_generations)
        if self.replay.available(current_version=version, max_lag=self.max_lag) >= self.replay_groups:
            drawn = self.replay.sample(
                self.replay_groups, current_version=version, rng=self._replay_rng, max_lag=self.max_lag
            )
            rows = pad_groups(drawn.groups, pad_token_id=self._tokenizer.pad_token_id)
            output = with_replayed(output, rows)
        self.replay.add(groups)
        return output


def fresh_groups(output: dict[str, Any], generations: int) -> list[ReplayGroup]:
    """The groups of TRL's generation batch, each of ``generations`` neighbouring rows."""
    host = {name: value.cpu() for name, value in output.items() if isinstance(value, Tensor)}
    versions, groups = _by_token(host), []
    for start in range(0, len(host["prompt_ids"]), generations):
        responses = [_response(host, versions, row) for row in range(start, start + generations)]
        prompt = host["prompt_ids"][start][host["prompt_mask"][start].bool()].tolist()
        identity = int(host["group_ids"][start])
        groups.append(ReplayGroup(prompt_ids=tuple(prompt), responses=tuple(responses), group_id=identity))
    return groups


def _response(host: dict[str, Tensor], versions: Tensor, row: int) -> Response:
    inside = host["completion_mask"][row].bool()
    return Response(
        completion_ids=tuple(host["completion_ids"][row][inside].tolist()),
        sampling_logps=tuple(host["sampling_per_token_logps"][row][inside].tolist()),
        policy_versions=tuple(versions[row][inside].tolist()),
        reward=float(host["rewards"][row]),
    )


def with_replayed(output: dict[str, Any], rows: PaddedGroups) -> dict[str, Any]:
    """TRL's generation batch followed by the replayed rows, padded to one length, with the new token count."""
    device, first = output["prompt_ids"].device, int(output["group_ids"].max()) + 1
    fresh = {**output, "policy_versions": _by_token(output)}
    replayed: dict[str, Tensor] = {
        "prompt_ids": rows.prompt_ids,
        "prompt_mask": rows.prompt_mask,
        "completion_ids": rows.completion_ids,
        "completion_mask": rows.attention_mask,
        "sampling_per_token_logps": torch.where(rows.attention_mask, rows.sampling_per_token_logps, 0.0),
        "policy_versions": rows.policy_versions,
        "advantages": group_advantages(rows.rewards, rows.group_ids, torch.ones_like(rows.rewards, dtype=torch.bool)),
        "rewards": rows.rewards,
        "group_ids": rows.group_ids + first,
    }
    if "group_rewards" in output:
        generations = output["group_rewards"].shape[1]
        replayed["group_rewards"] = rows.rewards.view(-1, generations).repeat_interleave(generations, dim=0)
    mixed = {name: _joined(name, fresh[name], one.to(device)) for name, one in replayed.items()}
    tokens = output["num_items_in_batch"] + rows.attention_mask.sum().to(device)
    return {**output, **mixed, "num_items_in_batch": tokens}


def _by_token(output: dict[str, Any]) -> Tensor:
    """(B, T) version of each token, also if TRL's batch has one per row."""
    versions: Tensor = output["policy_versions"]
    return versions if versions.dim() == 2 else versions.unsqueeze(1).expand_as(output["completion_ids"])


def _joined(name: str, fresh: Tensor, replayed: Tensor) -> Tensor:
    """Both tensors concatenated along rows; 2-d ones are first padded to one length with the value fit for ``name``."""
    if fresh.dim() == 1:
        return torch.cat([fresh, replayed.to(fresh.dtype)])
    length = max(fresh.shape[1], replayed.shape[1])

    def widened(one: Tensor) -> Tensor:
        more = length - one.shape[1]
        return pad(one, (more, 0) if name in _LEFT else (0, more))

    return torch.cat([widened(fresh), widened(replayed.to(fresh.dtype))])


def _check(trainer: Any, replay_groups: int) -> None:
    args = trainer.args
    if replay_groups < 1:
        raise ValueError(f"replay_groups must be at least 1, but got {replay_groups}.")
    if replay_groups * trainer.num_generations % args.steps_per_generation:
        raise ValueError(
            "replay_groups * num_generations must be a multiple of steps_per_generation = "
            f"{args.steps_per_generation}, but got {replay_groups} * {trainer.num_generations}."
        )
    if not is_aligned(args):
        raise ValueError(
            "gradient_accumulation_steps must be a multiple of steps_per_generation * num_iterations (one optimizer "
            f"step a generation batch), but got {args.gradient_accumulation_steps} and {args.steps_per_generation} * "
            f"{trainer.num_iterations}."
        )
    refused = {
        "several processes": trainer.accelerator.num_processes > 1,
        "async_rollouts": trainer._ahead is not None,
        "tools": bool(trainer.tools),
        "a KL term": trainer.beta != 0.0,
        "an objective that must see the whole generation batch": trainer._stages is not None,
        "an engine without log-probs": not (trainer.use_vllm or trainer.rollout_func),
    }
    for what, given in refused.items():
        if given:
            raise NotImplementedError(f"ReplayGRPOTrainer does not work with {what}.")
