"""Adds drawn groups after the rows of a fresh generation batch, and stores the fresh ones; the same for all trainers.

A generation batch is a dict of tensors under TRL's names, with those of
:func:`~trl_offpolicy.rollouts.batches.row_fields`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_offpolicy.functional.advantages import ScaleRewards, group_advantages
from trl_offpolicy.functional.truncated_sampling import KeptIds
from trl_offpolicy.objective.advantages import GRPO
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.kept import KEY
from trl_offpolicy.rollouts.micro_batches import taken
from trl_offpolicy.rollouts.replay.batch import PaddedGroups, pad_groups
from trl_offpolicy.rollouts.replay.buffer import ReplayBuffer
from trl_offpolicy.rollouts.replay.records import ReplayGroup, Response

_LEFT = ("prompt_ids", "prompt_mask")
_REFERENCE = "ref_per_token_logps"
_KNOWN = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "sampling_per_token_logps",
    "num_items_in_batch", "group_ids", "policy_versions", "rewards", "group_rewards", KEY,
}  # fmt: skip


def mixed(
    output: dict[str, Any],
    buffer: ReplayBuffer,
    count: int,
    *,
    version: int,
    rng: np.random.Generator,
    max_lag: int | None,
    generations: int,
    pad_token_id: int,
    score_reference: Callable[[dict[str, Any]], Tensor] | None = None,
    scale_rewards: ScaleRewards = "group",
) -> dict[str, Any]:
    """A generation batch followed by ``count`` drawn groups; its own groups are then stored.

    Nothing is drawn while the buffer holds fewer groups of ``generations`` rows. Groups of another size, from a run
    with another ``num_generations``, are not drawn (:func:`warn_of_other_sizes`).

    Args:
        output: the generation batch.
        buffer: what is drawn from, and stored in.
        count: groups to draw.
        version: current weight version.
        rng: of the draw.
        max_lag: largest age of a drawn group, in optimizer steps; None = age only lowers priority.
        generations: rows per group.
        pad_token_id: id that pads shorter rows.
        score_reference: returns (B, T) log-probs of the reference for rows, for those that are replayed if the fresh
            ones have them. The reference does not change, but the buffer outlives its run.
        scale_rewards: what the fresh rows' advantages are divided by.

    Raises:
        NotImplementedError: the batch holds something that replayed rows lack, or lacks the engine's log-probs.
    """
    known = _KNOWN if score_reference is None else {*_KNOWN, _REFERENCE}
    if unknown := sorted(set(output) - known):
        raise NotImplementedError(f"a generation batch must hold nothing that replayed rows lack, but got {unknown}.")
    if "sampling_per_token_logps" not in output:
        raise NotImplementedError("replay does not work with an engine without log-probs.")
    groups = fresh_groups(output, generations)
    if buffer.available(current_version=version, max_lag=max_lag, responses=generations) >= count:
        drawn = buffer.sample(count, current_version=version, rng=rng, max_lag=max_lag, responses=generations)
        reference = output.pop(_REFERENCE, None)
        fresh = len(output["prompt_ids"])
        output = with_replayed(output, pad_groups(drawn.groups, pad_token_id=pad_token_id), ids=drawn.ids.tolist(),
                               scale_rewards=scale_rewards)  # fmt: skip
        if reference is not None and score_reference is not None:
            replayed = taken(output, torch.arange(fresh, len(output["prompt_ids"])))
            output[_REFERENCE] = _joined(_REFERENCE, reference, score_reference(replayed))
    buffer.add(groups)
    return output


def warn_of_other_sizes(buffer: ReplayBuffer, generations: int) -> None:
    """Say how many groups of a buffer will not be drawn, because they do not have ``generations`` responses.

    A buffer of an earlier run may hold such groups, and one run may have followed another in its folder. The groups
    that fit are still worth drawing, so the others are left out and the buffer is not refused. They make room for new
    ones as they age.
    """
    others = [entry.rows for entry in buffer.entries if entry.rows != generations]
    if others:
        sizes = ", ".join(map(str, sorted(set(others))))
        warnings.warn(
            f"{len(others)} of {len(buffer)} groups in {buffer.folder} are not replayed: they have {sizes} responses, "
            f"and num_generations is {generations}.",
            stacklevel=3,
        )


def fresh_groups(output: Mapping[str, Any], generations: int) -> list[ReplayGroup]:
    """The groups of a generation batch, each of ``generations`` neighbouring rows.

    A group with a row that has no trainable token (an empty completion, or a cut one that left the loss) is left out.
    """
    host = {name: value.cpu() for name, value in output.items() if isinstance(value, Tensor)}
    versions, groups = _by_token(host), []
    kept = output.get(KEY) or [None] * len(host["prompt_ids"])
    for start in range(0, len(host["prompt_ids"]), generations):
        if not host["completion_mask"][start : start + generations].bool().any(dim=1).all():
            continue
        responses = [_response(host, versions, kept[row], row) for row in range(start, start + generations)]
        prompt = host["prompt_ids"][start][host["prompt_mask"][start].bool()].tolist()
        identity = int(host["group_ids"][start])
        groups.append(ReplayGroup(prompt_ids=tuple(prompt), responses=tuple(responses), group_id=identity))
    return groups


def _response(host: dict[str, Tensor], versions: Tensor, kept: KeptIds | None, row: int) -> Response:
    inside = host["completion_mask"][row].bool()
    return Response(
        completion_ids=tuple(host["completion_ids"][row][inside].tolist()),
        sampling_logps=tuple(host["sampling_per_token_logps"][row][inside].tolist()),
        policy_versions=tuple(versions[row][inside].tolist()),
        kept_ids=None if kept is None else tuple(map(tuple, kept[: int(inside.sum())].tolist())),
        reward=float(host["rewards"][row]),
    )


def with_replayed(
    output: Mapping[str, Any], rows: PaddedGroups, *, ids: Sequence[int], scale_rewards: ScaleRewards = "group"
) -> dict[str, Any]:
    """The generation batch followed by the replayed rows, padded to one length, with the new token count.

    Args:
        output: the generation batch.
        rows: the replayed rows.
        ids: number of each replayed group, negative (``ReplaySample.ids``). Several generation batches meet in one
            optimizer step or logging window, and fresh groups of the next one have the next numbers from 0 up.
        scale_rewards: as for :func:`~trl_offpolicy.functional.advantages.group_advantages`; that of the fresh rows.

    Raises:
        ValueError: a number could be that of a fresh group, two replayed groups have the same one, or a replayed group
            does not have as many rows as the fresh ones, which ``group_rewards`` tells.
    """
    if max(ids) >= 0 or len(set(ids)) != len(ids):
        raise ValueError(f"ids must be negative and different, but got {list(ids)}.")
    device = output["prompt_ids"].device
    fresh = {**output, "policy_versions": _by_token(output)}
    replayed: dict[str, Tensor] = {
        "prompt_ids": rows.prompt_ids,
        "prompt_mask": rows.prompt_mask,
        "completion_ids": rows.completion_ids,
        "completion_mask": rows.attention_mask,
        "sampling_per_token_logps": torch.where(rows.attention_mask, rows.sampling_per_token_logps, 0.0),
        "policy_versions": rows.policy_versions,
        "advantages": group_advantages(
            rows.rewards, rows.group_ids, torch.ones_like(rows.rewards, dtype=torch.bool), scale_rewards=scale_rewards
        ),
        "rewards": rows.rewards,
        "group_ids": torch.tensor(list(ids))[rows.group_ids],
    }
    if "group_rewards" in output:
        generations, sizes = output["group_rewards"].shape[1], rows.group_ids.bincount().tolist()
        if set(sizes) != {generations}:
            raise ValueError(f"replayed groups must have {generations} rows each, as fresh ones, but got {sizes}.")
        replayed["group_rewards"] = rows.rewards.view(-1, generations).repeat_interleave(generations, dim=0)
    mixed: dict[str, Any] = {name: _joined(name, fresh[name], one.to(device)) for name, one in replayed.items()}
    if KEY in output:
        mixed[KEY] = [*output[KEY], *map(KeptIds.of, rows.kept_ids)]
    tokens = output["num_items_in_batch"] + rows.attention_mask.sum().to(device)
    return {**output, **mixed, "num_items_in_batch": tokens}


def _by_token(output: Mapping[str, Any]) -> Tensor:
    """(B, T) version of each token, also if the batch has one per row."""
    versions: Tensor = output["policy_versions"]
    return versions if versions.dim() == 2 else versions.unsqueeze(1).expand_as(output["completion_ids"])


def _joined(name: str, fresh: Tensor, replayed: Tensor) -> Tensor:
    """Both tensors concatenated along rows; 2-d ones are first padded to one length with the value fit for ``name``."""
    if fresh.dim() == 1:
        return torch.cat([fresh, replayed.to(fresh.dtype)])
    length = max(fresh.shape[1], replayed.shape[1])

    def widened(one: Tensor) -> Tensor:
        more = length - one.shape[1]
        if name == "policy_versions":  # padding repeats a row's last version
            return torch.cat([one, one[:, -1:].expand(-1, more)], dim=1)
        return pad(one, (more, 0) if name in _LEFT else (0, more))

    return torch.cat([widened(fresh), widened(replayed.to(fresh.dtype))])


def check_sizes(
    count: int,
    *,
    rows: int,
    max_rows: int | None,
    generations: int,
    steps_per_generation: int,
    num_iterations: int,
    accumulation: int,
    names: tuple[str, str, str] = ("replay_groups", "gradient_accumulation_steps", "replay.max_rows"),
) -> None:
    """Raise unless the replayed rows can be split like the fresh ones, each serves one step, and the buffer holds them.

    The log-probs of the loss step are then those of the proximal policy.

    Args:
        count: replayed groups per generation batch.
        rows: fresh rows per generation batch.
        max_rows: bound of the buffer; None = it has another.
        generations: rows per group.
        steps_per_generation: micro-batches per generation batch.
        num_iterations: passes over a generation batch.
        accumulation: micro-batches per optimizer step.
        names: the trainer's options for ``count``, ``accumulation`` and ``max_rows``.

    Raises:
        ValueError: they cannot; the message names the option.
    """
    count_name, accumulation_name, bound_name = names
    if count < 1:
        raise ValueError(f"{count_name} must be at least 1, but got {count}.")
    if count * generations % steps_per_generation:
        raise ValueError(
            f"{count_name} * num_generations must be a multiple of steps_per_generation = "
            f"{steps_per_generation}, but got {count} * {generations}."
        )
    if accumulation % (steps_per_generation * num_iterations):
        raise ValueError(
            f"{accumulation_name} must be a multiple of steps_per_generation * num_iterations (one optimizer "
            f"step a generation batch), but got {accumulation} and {steps_per_generation} * {num_iterations}."
        )
    # the buffer keeps whole generation batches, and nothing is drawn while it has fewer groups than a draw
    batches = -(-count * generations // rows)
    if max_rows is not None and max_rows < batches * rows:
        raise ValueError(
            f"{bound_name} must be at least {batches * rows}, so that the buffer holds {batches} generation batch(es) "
            f"of {rows} rows, from which {count} groups of {generations} can be drawn, but got {max_rows}."
        )


def refused_objectives(stages: Stages | None, *, token_rewards: bool) -> dict[str, bool]:
    """What of an objective replay does not work with, for :func:`refuse`.

    Advantages are made of the rewards of fresh rows by function, which the buffer does not hold. A correction is
    decided later, on fresh and replayed rows.
    """
    if stages is None:
        return {}
    return {
        "token_rewards": token_rewards,
        "a KL term in the reward": stages.kl_in_reward is not None,
        "other advantages than grpo": stages.advantages not in (None, GRPO()),
        "baseline 'kept'": stages.reads_correction,
    }


def refuse(owner: str, given: Mapping[str, bool]) -> None:
    """Raise if something is given that replay does not work with.

    Args:
        owner: who replays, for the message.
        given: by its name in words, whether it is given.

    Raises:
        NotImplementedError: the message names the first one.
    """
    for what, is_given in given.items():
        if is_given:
            raise NotImplementedError(f"{owner} does not work with {what}.")
