"""Prompts and rewards of the recipes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from datasets import Dataset, load_dataset

from recipes.agent_calculator.calculator import calculator
from trl_offpolicy.packages import require

_NUMBER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")


def load_splits(recipe: Any) -> tuple[Dataset, Dataset]:
    """Training and held-out prompts, disjoint, in TRL's conversational format."""
    kind, _, task = recipe.dataset_name.partition("/")
    if kind != "reasoning-gym":
        return _from_hub(recipe)
    rows = _reasoning_gym(task, recipe, recipe.train_size + recipe.eval_size)
    held_out = rows[: recipe.eval_size]
    seen = {row["question"] for row in held_out}
    train = [row for row in rows[recipe.eval_size :] if row["question"] not in seen]
    if not train:
        raise ValueError(f"train_size must leave prompts that are not held out, but got {recipe.train_size}.")
    return Dataset.from_list(train), Dataset.from_list(held_out)


def _from_hub(recipe: Any) -> tuple[Dataset, Dataset]:
    """Splits of a dataset on the Hub or in a folder; without a test split the first rows are held out."""
    splits = load_dataset(recipe.dataset_name, recipe.dataset_config, revision=recipe.dataset_revision)
    train, held_out = splits["train"], splits.get("test")
    if held_out is None:
        size = min(recipe.eval_size, len(train) - 1)
        train, held_out = train.select(range(size, len(train))), train.select(range(size))
    held_out = held_out.select(range(min(recipe.eval_size, len(held_out))))
    if "prompt" in train.column_names:
        return train, held_out
    convert = partial(_as_prompt, recipe=recipe)
    return train.map(convert), held_out.map(convert)


def _as_prompt(row: dict[str, Any], recipe: Any) -> dict[str, Any]:
    """A question and its answer in TRL's conversational format."""
    for name in ("question_column", "answer_column"):
        if getattr(recipe, name) not in row:
            raise ValueError(f"{name} must be a column of {recipe.dataset_name} ({', '.join(row)}), but got "
                             f"{getattr(recipe, name)!r}.")  # fmt: skip
    answer = str(row[recipe.answer_column])
    if recipe.answer_pattern is not None:
        found = re.search(recipe.answer_pattern, answer)
        if found is None:
            raise ValueError(
                f"answer_pattern must match every answer, but {recipe.answer_pattern!r} is not in {answer!r}."
            )
        answer = found[1]
    question = recipe.question_template.format(question=row[recipe.question_column])
    return {"prompt": _messages(recipe, question), "question": question, "answer": answer.strip()}


def _messages(recipe: Any, question: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": recipe.system_prompt}] if recipe.system_prompt else []
    return [*system, *(getattr(recipe, "examples", None) or []), {"role": "user", "content": question}]


def _reasoning_gym(task: str, recipe: Any, size: int) -> list[dict[str, Any]]:
    """``size`` prompts, each distinct question first, so that a held-out head is disjoint from the rest."""
    require("reasoning_gym", by=f"dataset_name: reasoning-gym/{task}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=SyntaxWarning)  # cellpylib, a dependency, compares with "is"
        import reasoning_gym

    first, repeated = [], []
    known: set[str] = set()
    for item in reasoning_gym.create_dataset(task, size=size, seed=0, **(recipe.dataset_options or {})):
        question = recipe.question_template.format(question=item["question"], **item["metadata"])
        row = {"prompt": _messages(recipe, question), "question": question, "answer": str(item["answer"])}
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


def final_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the last number of the reply is the answer's; thousands may be set off by commas."""
    found = [_DECIMAL.findall(_text(c).replace(",", "")) for c in completions]
    return [
        float(bool(numbers) and float(numbers[-1]) == float(expected.replace(",", "")))
        for numbers, expected in zip(found, answer, strict=True)
    ]


def accuracy(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    """TRL's ``accuracy_reward``: is the \\boxed{} answer the same mathematics as the reference (needs math_verify)."""
    from trl.rewards import accuracy_reward

    scores: list[float | None] = accuracy_reward(completions, solution=answer)
    return scores


def agent_tools(names: list[str] | None) -> list[Callable[..., str]] | None:
    """The tools of these names.

    Raises:
        ValueError: there is no such tool.
    """
    unknown = [name for name in names or () if name not in TOOLS]
    if unknown:
        raise ValueError(f"tools must be among {sorted(TOOLS)}, but got {', '.join(unknown)}.")
    return [TOOLS[name] for name in names] if names else None


TOOLS = {"calculator": calculator}
REWARDS = {
    "graded_number": graded_number,
    "exact_number": exact_number,
    "final_number": final_number,
    "accuracy": accuracy,
}
