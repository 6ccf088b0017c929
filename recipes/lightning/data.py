"""Prompts of the recipes, for ``PromptDataModule(dataset="recipes.lightning.data:sums")``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
