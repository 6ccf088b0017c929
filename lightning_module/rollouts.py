"""Pads an engine's rollouts into tensors, and splits a generation batch into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_module.streams import BatchPlan
from trl_offpolicy.engines.engine import Rollouts
from trl_offpolicy.functional.collective import gather_objects
from trl_offpolicy.functional.truncated_sampling import KeptIds
from trl_offpolicy.rollouts.ahead.parts import padded_versions
from trl_offpolicy.rollouts.kept import KEY
from trl_offpolicy.rollouts.micro_batches import Splitting, split_rows, taken
from trl_offpolicy.rollouts.rank_balance import balanced
from trl_offpolicy.types import Average


def collate(rollouts: Rollouts, *, pad: int, device: torch.device) -> dict[str, Tensor]:
    """Tensors with prompts padded on the left and completions on the right, under the names of TRL's batches.

    ``sampling_per_token_logps`` is present only if the engine reports log-probs, ``tool_mask`` only if there are turns.
    """
    prompts, completions = rollouts.prompt_ids, rollouts.completion_ids
    tensors = {
        "prompt_ids": _padded(prompts, pad, left=True),
        "prompt_mask": _padded([[1] * len(row) for row in prompts], 0, left=True),
        "completion_ids": _padded(completions, pad),
        "completion_mask": _padded([[1] * len(row) for row in completions], 0),
    }
    if rollouts.sampling_per_token_logps is not None:
        tensors["sampling_per_token_logps"] = _padded(rollouts.sampling_per_token_logps, 0.0)
    if rollouts.tool_mask is not None:
        tensors["tool_mask"] = _padded(rollouts.tool_mask, 1)
    return {name: value.to(device) for name, value in tensors.items()}


def row_or_token_versions(rollouts: Rollouts, *, length: int, current: int, device: torch.device, where: str) -> Tensor:
    """Versions of the weights that sampled: (B, T) if some token has older ones than the trainer, else (B,).

    A version below 0 is an unknown one: it counts as the current one. All ranks call it and get the same form.

    Args:
        rollouts: what was sampled.
        length: T, at least the longest completion.
        current: optimizer steps so far, the version of the trainer's weights.
        device: of the result.
        where: who reported them, for the message.

    Raises:
        ValueError: on every rank, if a token of any rank has a newer version than the trainer.
    """
    known = {version for row in rollouts.policy_versions for version in row if version >= 0} | {current}
    everywhere: set[int] = set().union(*gather_objects(known))
    if (newest := max(everywhere)) > current:
        raise ValueError(
            f"{where}: policy_versions must be at most {current}, the optimizer steps so far, but got {newest}."
        )
    if everywhere == {current}:
        return torch.full((len(rollouts),), current, device=device)
    rows = [[current if version < 0 else version for version in row] for row in rollouts.policy_versions]
    return torch.tensor(padded_versions(rows, length=length, of_empty=current), device=device)


def _padded(rows: Sequence[Sequence[Any]], fill: float, *, left: bool = False) -> Tensor:
    width = max([len(row) for row in rows] + [1])
    filled = [[*[fill] * (width - len(row)), *row] if left else [*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(filled)


def without_truncated(rows: dict[str, Tensor], terminated: Tensor) -> None:
    """TRL's ``mask_truncated_completions``: completions that did not end by themselves lose all their tokens.

    Args:
        rows: a generation batch; its masks are replaced.
        terminated: (B,) bool, True = the completion ended by itself.
    """
    for name in ("completion_mask", "tool_mask"):
        if name in rows:
            rows[name] = rows[name] * terminated.unsqueeze(1).to(rows[name].dtype)


_IMAGES = "images"
"""A list with one mapping of image inputs per row, on the host until they are scored; rows of a group share them."""


class RolloutBuffer:
    """The rollouts of one generation batch, shuffled and split as TRL does it.

    Args:
        generation: (epoch, number within it) of the generation batch.
        micro_batches: one dict of tensors per micro-batch. A loss step may add entries for the next pass over it.
    """

    def __init__(self, generation: tuple[int, int], micro_batches: list[dict[str, Any]]) -> None:
        self.generation = generation
        self.micro_batches = micro_batches

    @classmethod
    def split(
        cls, generation: tuple[int, int], rows: Mapping[str, Any], plan: BatchPlan, how: Splitting
    ) -> RolloutBuffer:
        """Split the rows, in an order that is drawn for this generation, as far as ``how`` leaves it free.

        With a single micro-batch no order is drawn. All ranks call it.

        Args:
            generation: (epoch, number within it) of the generation batch.
            rows: its rows; with replayed ones more than ``plan.completions``.
            plan: its sizes.
            how: what may be sorted and cut.
        """
        if plan.steps_per_generation > 1:
            count = len(rows["completion_ids"])
            order = torch.randperm(count, generator=torch.Generator().manual_seed(hash(generation)))
            rows = taken(rows, order)
        rows, how = balanced(rows, plan.steps_per_generation, how)
        return cls(generation, split_rows(rows, plan.steps_per_generation, how))

    def state_dict(self) -> dict[str, Any]:
        """The buffer as tensors and plain values, for a checkpoint."""
        return {"generation": list(self.generation), "micro_batches": [_stored(part) for part in self.micro_batches]}

    @classmethod
    def restored(cls, state: Mapping[str, Any], device: torch.device, *, on_host: Sequence[str] = ()) -> RolloutBuffer:
        """The buffer whose :meth:`state_dict` is ``state``: on ``device``, but the fields named ``on_host`` there."""
        first, second = state["generation"]
        return cls((first, second), [_restored(part, device, on_host) for part in state["micro_batches"]])


def _stored(part: Mapping[str, Any]) -> dict[str, Any]:
    average = part.get("past_average")
    tensors: dict[str, Any] = {name: value.cpu() for name, value in part.items() if isinstance(value, Tensor)}
    if _IMAGES in part:
        tensors[_IMAGES] = part[_IMAGES]
    if KEY in part:
        tensors[KEY] = [(row.ids, row.counts) for row in part[KEY]]
    return tensors if average is None else {**tensors, "past_average": _moved(vars(average), torch.device("cpu"))}


def _restored(part: Mapping[str, Any], device: torch.device, on_host: Sequence[str]) -> dict[str, Any]:
    tensors = {name: value for name, value in part.items() if isinstance(value, Tensor)}
    moved: dict[str, Any] = {name: value if name in on_host else value.to(device) for name, value in tensors.items()}
    if _IMAGES in part:
        moved[_IMAGES] = part[_IMAGES]
    if KEY in part:
        moved[KEY] = [KeptIds(*row) for row in part[KEY]]
    if "past_average" in part:
        moved["past_average"] = Average(**_moved(part["past_average"], device))
    return moved


def _moved(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}
