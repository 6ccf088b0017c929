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
    rows = _reasoning_gym(task, recipe, recipe.train_size + recipe.eval_size)
    held_out = rows[: recipe.eval_size]
    seen = {row["question"] for row in held_out}
    train = [row for row in rows[recipe.eval_size :] if row["question"] not in seen]
    if not train:
        raise ValueError(f"train_size must leave prompts that are not held out, but got {recipe.train_size}.")
    return Dataset.from_list(train), Dataset.from_list(held_out)


def _reasoning_gym(task: str, recipe: Any, size: int) -> list[dict[str, Any]]:
    """``size`` prompts, each distinct question first, so that a held-out head is disjoint from the rest."""
    import reasoning_gym

    first, repeated = [], []
    known: set[str] = set()
    for item in reasoning_gym.create_dataset(task, size=size, seed=0, **(recipe.dataset_options or {})):
        question = recipe.question_template.format(question=item["question"], **item["metadata"])
        messages = [{"role": "system", "content": recipe.system_prompt}] if recipe.system_prompt else []
        messages.append({"role": "user", "content": question})
        row = {"prompt": messages, "question": question, "answer": str(item["answer"])}
        (repeated if question in known else first).append(row)
        known.add(question)
    return first + repeated


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def graded_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """0.1 if there is a number, 0.2 if the reply is a number alone, 0.4 if the last number is right, 0.3 if all.

    Graded, because a strict score gives most groups no spread at the start. 1 is the best.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        text = _text(completion).strip()
        numbers = _NUMBER.findall(text)
        right = bool(numbers) and numbers[-1] == expected
        alone = _NUMBER.fullmatch(text) is not None
        scores.append(0.1 * bool(numbers) + 0.2 * alone + 0.4 * right + 0.3 * (right and alone))
    return scores


def exact_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the reply is the right number and nothing else."""
    return [float(_text(c).strip() == expected) for c, expected in zip(completions, answer, strict=True)]


REWARDS = {"graded_number": graded_number, "exact_number": exact_number}
