"""Prompts and rewards of the recipes."""

from __future__ import annotations

import re
from typing import Any

from datasets import Dataset, load_dataset

_NUMBER = re.compile(r"-?\d+")


def load_splits(recipe: Any) -> tuple[Dataset, Dataset]:
    """Training and held-out prompts, disjoint, in TRL's conversational format."""
    kind, _, task = recipe.dataset_name.partition("/")
    if kind != "reasoning-gym":
        splits = load_dataset(recipe.dataset_name)
        held_out = splits["test"] if "test" in splits else splits["train"].select(range(recipe.eval_size))
        return splits["train"], held_out.select(range(min(recipe.eval_size, len(held_out))))
    rows = _reasoning_gym(task, recipe.dataset_options or {}, recipe.system_prompt, recipe.train_size + recipe.eval_size)
    held_out = rows[: recipe.eval_size]
    seen = {row["question"] for row in held_out}
    train = [row for row in rows[recipe.eval_size :] if row["question"] not in seen]
    if not train:
        raise ValueError(f"train_size must leave prompts that are not held out, but got {recipe.train_size}.")
    return Dataset.from_list(train), Dataset.from_list(held_out)


def _reasoning_gym(task: str, options: dict[str, Any], system: str | None, size: int) -> list[dict[str, Any]]:
    import reasoning_gym

    rows, unique_first = [], []
    known: set[str] = set()
    for item in reasoning_gym.create_dataset(task, size=size, seed=0, **options):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": item["question"]})
        row = {"prompt": messages, "question": item["question"], "answer": str(item["answer"])}
        (rows if item["question"] in known else unique_first).append(row)
        known.add(item["question"])
    return unique_first + rows


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def graded_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """0.5 if the last number of the reply is right, 0.2 if the reply is a number alone, 0.3 more if that is right.

    Graded, because a strict score gives most groups no spread at the start.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        text = _text(completion).strip()
        numbers = _NUMBER.findall(text)
        right = bool(numbers) and numbers[-1] == expected
        alone = _NUMBER.fullmatch(text) is not None
        scores.append(0.5 * right + 0.2 * alone + 0.3 * (right and alone))
    return scores


def exact_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the reply is the right number and nothing else."""
    return [float(_text(c).strip() == expected) for c, expected in zip(completions, answer, strict=True)]


REWARDS = {"graded_number": graded_number, "exact_number": exact_number}
