"""Carries version, group and reward of each sample to the loss; TRL's queue and collator drop them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, RolloutQueueDataset


class _Noting:
    """A queue that remembers the last item that it returned."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.last: Any = None

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self.last = self._queue.get(*args, **kwargs)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class VersionedQueueDataset(RolloutQueueDataset):  # type: ignore[misc]
    """TRL's stream of samples, with TRL's bound on staleness and TRL's counts, and the version of each sample."""

    def __init__(self, rollout_queue: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_Noting(rollout_queue), *args, **kwargs)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """TRL's rows, each with ``policy_version`` and, if the worker has one per token, ``token_versions``."""
        for row in super().__iter__():
            sample = self.queue.last
            yield {
                **row,
                "policy_version": sample.model_version,
                "token_versions": getattr(sample, "token_versions", None),
            }


class VersionedCollator(DataCollatorForRollout):  # type: ignore[misc]
    """TRL's packed rows with ``policy_versions``, ``group_ids`` and ``rewards``, one per loss term, as (ranks, M).

    ``global_n_samples`` (ranks,) counts the samples of all ranks, because ranks may have different numbers of them.
    """

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """Pack a micro-batch of samples into one row per rank, and add the fields of each loss term."""
        batch: dict[str, Any] = super().torch_call(examples)
        (rows,) = examples
        length = batch["token_index"].shape[1]
        for name, kind in (("policy_versions", torch.long), ("group_ids", torch.long), ("rewards", torch.float32)):
            terms = [[value for sample in row.samples for value in _terms(sample)[name]] for row in rows]
            batch[name] = torch.stack([torch.tensor([*row, *(0,) * (length - len(row))], dtype=kind) for row in terms])
        samples = sum(len(row.samples) for row in rows)  # repeated for every rank, as TRL repeats its count of tokens
        batch["global_n_samples"] = torch.full((self.num_processes,), float(samples))
        return batch


def _terms(sample: dict[str, Any]) -> dict[str, list[float]]:
    """One value per loss term of a sample, in TRL's order: its trained tokens from the second token on."""
    trained = [place for place, on in enumerate(sample["completion_mask"].tolist()) if on and place]
    versions = sample["token_versions"]
    own = [sample["policy_version"]] * len(trained) if versions is None else [int(versions[place]) for place in trained]
    return {
        "policy_versions": own,
        "group_ids": [int(sample["group_id"])] * len(trained),
        "rewards": [float(sample["metrics"].get("reward", math.nan))] * len(trained),
    }
