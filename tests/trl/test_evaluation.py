"""Held-out numbers: each prompt counts once, whatever the batch and however many ranks, in both trainers alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from lightning_runs import OwnMismatch, data, module
from lightning_runs import trainer as lightning_trainer
from tiny_models import tiny_prompts
from trainer_runs import Engine

from trl_offpolicy.trl.held_out import HeldOutMeans

PROMPTS, GENERATIONS = 5, 2


def first_prompt(prompts: list[str], **_: Any) -> list[float]:
    """1 for the completions of one prompt of the five."""
    return [float(prompt.startswith("w0")) for prompt in prompts]


def tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def odd_only(prompts: list[str], **_: Any) -> list[float | None]:
    """A reward that some prompts do not have."""
    return [1.0 if int(prompt.split()[0][1:]) % 2 else None for prompt in prompts]


REWARDS = [first_prompt, tokens, odd_only]


def evaluated(trainer: Any) -> dict[str, float]:
    trainer.reward_funcs = REWARDS
    trainer.reward_func_names = [one.__name__ for one in REWARDS]
    trainer.reward_processing_classes = [None] * len(REWARDS)
    trainer.reward_weights = torch.tensor([1.0, 0.0, 0.0])
    trainer._held_out = HeldOutMeans(trainer.reward_func_names, 1.0)
    found: dict[str, float] = trainer.evaluate(tiny_prompts(PROMPTS))
    return found


def assert_exact(found: dict[str, float]) -> None:
    assert found["eval_reward"] == pytest.approx(1 / PROMPTS)
    assert found["eval_pass@1"] == found["eval_rewards/first_prompt/mean"] == found["eval_reward"]
    assert found["eval_rewards/odd_only/mean"] == 1.0
    assert found["eval_completions/mean_length"] == pytest.approx(found["eval_rewards/tokens/mean"])


@pytest.mark.integration
def test_both_trainers_count_each_prompt_once(build: Callable[..., Any], tmp_path: Path) -> None:
    """Two prompts a batch: of five the last batch has one, and a mean of means would count it twice."""
    assert_exact(evaluated(build(Engine(), num_generations_eval=GENERATIONS, per_device_eval_batch_size=4)))
    ours = module(OwnMismatch(), reward_funcs=REWARDS, reward_weights=[1.0, 0.0, 0.0], correct_threshold=1.0)
    held_out = data(val_dataset=tiny_prompts(PROMPTS), val_batch_size=2, val_generations=GENERATIONS)
    assert_exact(lightning_trainer(tmp_path).validate(ours, held_out, verbose=False)[0])


@pytest.mark.integration
def test_one_completion_of_a_held_out_prompt(build: Callable[..., Any]) -> None:
    """As verl evaluates by its defaults, and so a migrated configuration: groups of one, and a last batch of one."""
    assert_exact(evaluated(build(Engine(), num_generations_eval=1, per_device_eval_batch_size=4)))


@pytest.mark.integration
def test_an_evaluation_leaves_nothing_to_the_next(build: Callable[..., Any]) -> None:
    trainer = build(Engine(), num_generations_eval=GENERATIONS, per_device_eval_batch_size=4)
    assert_exact(evaluated(trainer))
    assert_exact(evaluated(trainer))


def test_what_is_repeated_does_not_count() -> None:
    means = HeldOutMeans(["one"], None)
    means.begin(3)
    for values in ([1.0, 2.0], [6.0, 1.0], [1.0, 2.0]):  # the set has three rows, then begins again
        means.sampled([[0] * int(value) for value in values], None)
        means.add(torch.tensor(values)[:, None], torch.tensor(values), lambda rows: rows)
    assert means.close() == {"reward": 3.0, "completions/mean_length": 3.0, "rewards/one/mean": 3.0}
    assert means.close() == {}


def train(folder: Path, rank: int) -> dict[str, float]:
    """One of two ranks: two prompts a step of each, so that the second batch of the second rank is filled up."""
    sizes = {"num_generations_eval": GENERATIONS, "per_device_eval_batch_size": 4, "num_generations": 4}
    return evaluated(two_ranks.tiny_trainer(folder, "run", Engine(), **sizes))


@pytest.mark.slow
def test_two_ranks_count_each_prompt_once(tmp_path: Path) -> None:
    for found in two_ranks.trained(__file__, tmp_path)[0]:
        assert_exact(found)


if __name__ == "__main__":
    two_ranks.leave(train)
