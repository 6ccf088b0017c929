"""Greedy completions beside the sampled ones, whose rewards are the baseline of ReMax; for both trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.objective.advantages import AdvantageInputs
from trl_offpolicy.objective.staging import Stages

NO_IMAGES = "advantages must not be 'remax' with images: the prompts of its greedy completions are text."


def reads_greedy(stages: Stages | None) -> bool:
    """True if the advantages read the rewards of greedy completions."""
    return stages is not None and stages.advantages is not None and "greedy_rewards" in stages.advantages.requires


def check_greedy(stages: Stages | None, refused: Mapping[str, bool]) -> None:
    """Raise if greedy completions are read, but cannot be sampled.

    Args:
        stages: with the estimator of the advantages.
        refused: what they do not go with -> whether the run has it.

    Raises:
        NotImplementedError: the run has one of them; the message names it.
    """
    if reads_greedy(stages) and (found := [name for name, here in refused.items() if here]):
        raise NotImplementedError(
            f"advantages must not be 'remax' with {' and '.join(found)}: its greedy completions are of one turn, and "
            "sampled by the trainer's engine when the batch is due. 'rloo' has a baseline without them."
        )


def greedy(sampling: Sampling) -> Sampling:
    """The most likely token at each place, under the same penalties: top-k of one, which every engine knows.

    Example:
        >>> greedy(Sampling(max_tokens=8, temperature=0.7, top_p=0.9)).top_k
        1
    """
    return replace(sampling, top_k=1, top_p=1.0, min_p=0.0)


def baseline_of_rows(by_function: Tensor, weights: Tensor, count: int) -> Tensor:
    """(P * count,) total reward of the greedy completion of each row's prompt; NaN where it has none.

    Args:
        by_function: (P, K) rewards of the greedy completions, one for each prompt; NaN = none.
        weights: (K,) of the reward functions.
        count: sampled completions per prompt, in consecutive rows.
    """
    ids = torch.arange(len(by_function), device=by_function.device)
    outcome = AdvantageInputs(rewards=by_function, group_ids=ids, reward_weights=weights.to(by_function)).outcome
    return outcome.repeat_interleave(count)
