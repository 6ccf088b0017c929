"""Prompts of the recipes, for ``PromptDataModule(dataset="recipes.lightning.data:sums")``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from recipes.tasks import load_splits

_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(train_size: int = 2000, eval_size: int = 64, **options: Any) -> tuple[list[Any], list[Any]]:
    """Training and held-out one-digit sums, disjoint; ``options`` are those of reasoning-gym's chain_sum."""
    recipe = SimpleNamespace(
        dataset_name="reasoning-gym/chain_sum",
        dataset_options={**_SUMS, **options},
        question_template="What is {expression}?",
        system_prompt="Answer with just the number.",
        train_size=train_size,
        eval_size=eval_size,
    )
    train, held_out = load_splits(recipe)
    return train.to_list(), held_out.to_list()


def of_recipe(config: str, train_size: int | None = None, eval_size: int = 64) -> tuple[list[Any], list[Any]]:
    """Training and held-out prompts of a recipe of the TRL trainer, disjoint.

    Args:
        config: its ``config.yaml``, which names task, question, system prompt and examples.
        train_size: number of training prompts.
        eval_size: number of held-out prompts.
    """
    given = yaml.safe_load(Path(config).read_text())
    names = ("dataset_name", "dataset_options", "question_template", "system_prompt", "examples")
    recipe = SimpleNamespace(**{name: given.get(name) for name in names}, train_size=train_size, eval_size=eval_size)
    train, held_out = load_splits(recipe)
    return train.to_list(), held_out.to_list()
