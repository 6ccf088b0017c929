"""``trainer.test`` and ``trainer.predict``: the numbers of validation under other names, and what was sampled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from lightning_runs import data, module, trainer
from tiny_models import tiny_prompts


def by_prompt(prompts: list[str], **_: Any) -> list[float | None]:
    """1 for w0, nothing for w1, else 0."""
    return [None if prompt.startswith("w1") else float(prompt.startswith("w0")) for prompt in prompts]


PROMPTS = [{"prompt": f"w{i} w5"} for i in (0, 1, 2, 3, 4)]


def test_test_reports_what_validation_reports(tmp_path: Path) -> None:
    ours = module(reward_funcs=by_prompt, correct_threshold=1.0)
    held_out = data(test_dataset=PROMPTS, val_batch_size=2, val_generations=3)
    owner = trainer(tmp_path)
    values = owner.test(ours, held_out, verbose=False)[0]
    assert values["test_reward"] == values["test_pass@1"] == pytest.approx(0.25)  # w1 has no reward and does not count
    assert 1 <= values["test_completions/mean_length"] <= 6 and "eval_reward" not in values


def test_predict_returns_what_was_sampled_for_each_prompt(tmp_path: Path) -> None:
    ours = module(reward_funcs=by_prompt)
    held_out = data(val_dataset=PROMPTS, val_batch_size=2, val_generations=2)  # without test rows: those of validation
    batches = trainer(tmp_path).predict(ours, held_out)
    rows = [row for batch in batches for row in batch]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in PROMPTS for _ in range(2)]
    assert all(isinstance(row["completion"], str) for row in rows)
    rewards = [row["rewards"]["by_prompt"] for row in rows]
    assert rewards[:2] == [1.0, 1.0] and math.isnan(rewards[2]) and rewards[4:] == [0.0] * 6


@pytest.mark.integration
def test_a_test_after_training_draws_what_it_draws_alone(tmp_path: Path) -> None:
    """All runs draw the same random numbers, so that they differ by the weights alone."""
    found = []
    for learning_rate in (0.0, 0.1):
        ours, owner = module(learning_rate=learning_rate), trainer(tmp_path, max_steps=1)
        prompts = data(tiny_prompts(12), test_dataset=PROMPTS, val_batch_size=5)
        owner.fit(ours, prompts)
        found.append([owner.test(ours, prompts, verbose=False)[0] for _ in range(2)])
    assert found[0][0] == found[0][1] and found[1][0] == found[1][1]
    assert found[0][0] != found[1][0]
