"""Prompts and rewards of the recipes."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from recipes.agent_calculator.calculator import calculator
from trl_offpolicy.checks import near
from trl_offpolicy.packages import require
from trl_offpolicy.parts import imported

_NUMBER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")


MADE = 2000
"""Training prompts of a reasoning-gym task if ``train_size`` does not say how many."""


def load_splits(recipe: Any) -> tuple[Dataset, Dataset]:
    """Training and held-out prompts, disjoint, in TRL's conversational format."""
    size = getattr(recipe, "train_size", None)
    if size is not None and size < 1:
        raise ValueError(f"train_size must be 1 or more, but got {size}.")
    if getattr(recipe, "train_files", None):
        return _from_files(recipe)
    if getattr(recipe, "val_files", None):
        raise ValueError(f"val_files must come with train_files, but got {recipe.val_files} alone.")
    kind, _, task = recipe.dataset_name.partition("/")
    if kind != "reasoning-gym":
        return _from_hub(recipe)
    if recipe.eval_size is None:
        raise ValueError(f"eval_size must be a number with {recipe.dataset_name}, which makes prompts, but got null.")
    rows = _reasoning_gym(task, recipe, (size or MADE) + recipe.eval_size)
    held_out = rows[: recipe.eval_size]
    seen = {row["question"] for row in held_out}
    train = [row for row in rows[recipe.eval_size :] if row["question"] not in seen]
    if not train:
        raise ValueError(f"train_size must leave prompts that are not held out, but got {recipe.train_size}.")
    return Dataset.from_list(train), Dataset.from_list(held_out)


def _from_hub(recipe: Any) -> tuple[Dataset, Dataset]:
    """Splits of a dataset on the Hub or in a folder; without a test split the first rows are held out."""
    splits = load_dataset(recipe.dataset_name, recipe.dataset_config, revision=recipe.dataset_revision)
    train, held_out = _held_out(splits["train"], splits.get("test"), recipe.eval_size)
    train = _first(train, getattr(recipe, "train_size", None))
    if "prompt" in train.column_names:
        return train, held_out
    convert = partial(_as_prompt, recipe=recipe)
    return train.map(convert), held_out.map(convert)


def _held_out(train: Dataset, held_out: Dataset | None, size: int | None) -> tuple[Dataset, Dataset]:
    """``size`` rows of ``held_out`` (None = all); without one the first rows of ``train``, of which one is left."""
    if size is None and held_out is not None:
        return train, held_out
    if size is None:
        raise ValueError("eval_size must be a number where there are neither val_files nor a split test, but got null.")
    if held_out is None:
        size = min(size, len(train) - 1)
        return train.select(range(size, len(train))), train.select(range(size))
    return train, _first(held_out, size)


_READERS: dict[str, Callable[[str], Dataset]] = {
    ".parquet": Dataset.from_parquet,
    ".json": Dataset.from_json,
    ".jsonl": Dataset.from_json,
}


def _from_files(recipe: Any) -> tuple[Dataset, Dataset]:
    """Prompts of verl's files; without ``val_files`` the first rows of ``train_files`` are held out."""
    train = _verl_rows("train_files", recipe.train_files)
    held_out = _verl_rows("val_files", recipe.val_files) if recipe.val_files else None
    train, held_out = _held_out(train, held_out, recipe.eval_size)
    return _first(train, getattr(recipe, "train_size", None)), held_out


def _first(rows: Dataset, size: int | None) -> Dataset:
    """The first ``size`` rows; None = all."""
    return rows if size is None else rows.select(range(min(size, len(rows))))


def _verl_rows(field: str, files: Sequence[str]) -> Dataset:
    """Rows of verl's files one after the other: ``prompt``, and what its reward functions are given.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is of another kind, or its rows are not verl's.
    """
    rows: list[dict[str, Any]] = []
    for name in files:
        path = Path(name).expanduser()
        if path.suffix not in _READERS:
            raise ValueError(f"{field} must end with {', '.join(_READERS)}, but got {name!r}.")
        if not path.is_file():
            raise FileNotFoundError(f"{field} must be existing files, but there is no {name!r}.")
        rows += [_verl_row(row, f"{field} ({name})") for row in _READERS[path.suffix](str(path))]
    if not rows:
        raise ValueError(f"{field} must hold at least one row, but got {list(files)} without any.")
    return Dataset.from_list(rows)


def _verl_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row of verl's file in TRL's conversational format."""
    truth = row.get("reward_model")
    if not isinstance(row.get("prompt"), list) or not isinstance(truth, dict) or "ground_truth" not in truth:
        raise ValueError(
            f"{where} must have the columns prompt (a list of messages) and reward_model with ground_truth, as verl's "
            f"files have, but got the columns {', '.join(row)}."
        )
    if shown := [kind for kind in ("images", "videos", "audios") if row.get(kind)]:
        raise ValueError(f"{where} must hold prompts of text alone, but its rows have {', '.join(shown)}.")
    kept = {"data_source": row.get("data_source"), "ground_truth": truth["ground_truth"]}
    return {"prompt": row["prompt"], **kept, "extra_info": row.get("extra_info")}


def _as_prompt(row: dict[str, Any], recipe: Any) -> dict[str, Any]:
    """A question (a text, or the messages of a chat) and its answer in TRL's conversational format."""
    columns = {name: getattr(recipe, name) for name in ("question_column", "answer_column")}
    for name, column in columns.items():
        if column not in row and not (name == "answer_column" and column is None):
            raise ValueError(
                f"{name} must be a column of {recipe.dataset_name} ({', '.join(row)}), but got {column!r}."
            )
    given = row[recipe.question_column]
    if isinstance(given, list):
        question, prompt = given[-1]["content"], [*_messages_before(recipe), *given]
    else:
        question = _filled(recipe.question_template, {"question": given})
        prompt = _messages(recipe, question)
    if recipe.answer_column is None:
        return {"prompt": prompt, "question": question}
    return {"prompt": prompt, "question": question, "answer": _answer(str(row[recipe.answer_column]), recipe)}


def _answer(answer: str, recipe: Any) -> str:
    """The answer, or what ``answer_pattern`` finds in it."""
    if recipe.answer_pattern is not None:
        found = re.search(recipe.answer_pattern, answer)
        if found is None:
            raise ValueError(
                f"answer_pattern must match every answer, but {recipe.answer_pattern!r} is not in {answer!r}."
            )
        answer = found[1]
    return answer.strip()


def _messages_before(recipe: Any) -> list[dict[str, str]]:
    """The recipe's own messages before every question."""
    system = [{"role": "system", "content": recipe.system_prompt}] if recipe.system_prompt else []
    return [*system, *(getattr(recipe, "examples", None) or [])]


def _messages(recipe: Any, question: str) -> list[dict[str, str]]:
    return [*_messages_before(recipe), {"role": "user", "content": question}]


def _reasoning_gym(task: str, recipe: Any, size: int) -> list[dict[str, Any]]:
    """``size`` prompts, each distinct question first, so that a held-out head is disjoint from the rest."""
    require("reasoning_gym", by=f"dataset_name: reasoning-gym/{task}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=SyntaxWarning)  # cellpylib, a dependency, compares with "is"
        import reasoning_gym

    first, repeated = [], []
    known: set[str] = set()
    options = dict(recipe.dataset_options or {})
    if fixed := sorted({"size", "seed"} & set(options)):
        raise ValueError(f"dataset_options must leave out {fixed[0]}: train_size and eval_size decide, and seed is 0.")
    try:
        items = reasoning_gym.create_dataset(task, size=size, seed=0, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(
            f"dataset_options must be options of {recipe.dataset_name}, but got {options}: {error}."
        ) from error
    for item in items:
        question = _filled(recipe.question_template, {**item["metadata"], "question": item["question"]})
        row = {"prompt": _messages(recipe, question), "question": question, "answer": str(item["answer"])}
        (repeated if question in known else first).append(row)
        known.add(question)
    return first + repeated


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """The question.

    Raises:
        ValueError: the template names something that the data has not.
    """
    try:
        return template.format(**values)
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"question_template must name {', '.join(values)}, but got {template!r}, which names {error}."
        ) from error


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


def reward_function(name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The reward function of this name, in TRL's form.

    Args:
        name: one of ``REWARDS``, ``file.py:function`` or ``package.module:function``. The function is TRL's
            (``f(completions, **columns)``, a list of numbers) or verl's (``f(data_source, solution_str, ground_truth,
            extra_info)``, one number, or a mapping with ``score``); which one is seen by its arguments.
        options: further keyword arguments of the function.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no such function, or it takes neither TRL's nor verl's arguments.
    """
    function = _named_reward(name)
    given = inspect.signature(function).parameters
    if "solution_strs" in given:
        raise ValueError(
            f"reward must score one response at a time, but {name!r} takes verl's batches (solution_strs)."
        )
    if {"solution_str", "ground_truth"} <= given.keys():
        return _as_trl_reward(function, dict(options or {}))
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in given.values())
    if "completions" not in given and not takes_all:
        raise ValueError(
            "reward must take TRL's arguments (completions, **columns) or verl's (data_source, solution_str, "
            f"ground_truth, extra_info), but {name!r} takes {', '.join(given) or 'none'}."
        )
    return wraps(function)(partial(function, **options)) if options else function


def _named_reward(name: str) -> Callable[..., Any]:
    """The function that ``name`` stands for, as it is."""
    if name in REWARDS:
        return REWARDS[name]
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(
            f"reward must be one of {sorted(REWARDS)}, 'file.py:function' or 'package.module:function', but got "
            f"{name!r}.{near(name, REWARDS)}"
        )
    found = _of_file(place, attribute) if place.endswith(".py") else imported(name, where="reward")
    if not callable(found):
        raise ValueError(f"reward must name a function, but {name!r} is a {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


def _of_file(file: str, attribute: str) -> Any:
    """What a file of Python code calls ``attribute``; the file is run as a module of its own."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"reward must name a function in an existing file, but there is no {file!r} in {Path.cwd()} (paths count "
            "from where the command is started)."
        )
    spec = importlib.util.spec_from_file_location(f"reward_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # it ends with .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        hint = near(attribute, [one for one in vars(module) if not one.startswith("_")])
        raise ValueError(f"reward must name a function of {file}, but got {attribute!r}.{hint}")
    return getattr(module, attribute)


def _as_trl_reward(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """verl's function, which scores one response, as TRL's, which scores a list."""

    def calls(completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Any]:
        names = ("data_source", "ground_truth", "extra_info")
        if missing := [name for name in names[:2] if name not in columns]:
            raise ValueError(f"reward needs the columns {', '.join(missing)} of verl's files: set train_files.")
        more = columns.get("extra_info", [None] * len(completions))  # verl hands {} to the function, not None
        return [
            function(
                data_source=columns["data_source"][row],
                solution_str=_text(completion),
                ground_truth=columns["ground_truth"][row],
                extra_info=dict(more[row] or {}),
                **options,
            )
            for row, completion in enumerate(completions)
        ]

    def scored(completions: list[Any], **columns: Any) -> list[float]:
        return [_score(result) for result in calls(completions, columns)]

    async def awaited(completions: list[Any], **columns: Any) -> list[float]:
        return [_score(result) for result in await asyncio.gather(*calls(completions, columns))]

    made: Callable[..., Any] = awaited if inspect.iscoroutinefunction(function) else scored
    made.__name__ = getattr(function, "__name__", "reward")  # TRL logs rewards/<name>
    return made


def _score(result: Any) -> float:
    """verl's functions return a number, or a mapping with ``score`` and numbers to log."""
    return float(result["score"] if isinstance(result, Mapping) else result)


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
