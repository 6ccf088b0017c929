"""GRPO with measured and corrected rollouts: one readable script, to copy and modify.

    accelerate launch recipes/grpo.py --config recipes/quickstart/config.yaml
    accelerate launch recipes/grpo.py --config recipes/quickstart/config.yaml --offpolicy paper/icepop --seed 1

Any field of the YAML can be overridden on the command line; --help lists them all. With a network,
``model_name_or_path`` and ``dataset_name`` take Hub ids, ``model_revision`` and ``dataset_revision`` their commits.
``--smoke`` runs a configuration small on a CPU: with what its section ``smoke`` says, or, without one, in two steps
with the quickstart's model.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if os.environ.get("RANK", "0") == "0":
    print("importing torch, transformers and vLLM", file=sys.stderr, flush=True)

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, TrlParser, get_peft_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes.record import RecipeCallback, recipe_options, refuse_to_set, with_smoke
from recipes.tasks import REWARDS, agent_tools, load_splits, reward_function
from trl_offpolicy.checks import near
from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.packages import MissingPackageError
from trl_offpolicy.run_folder.lock import RunFolderError
from trl_offpolicy.trainer import OffPolicyGRPOTrainer


@dataclass
class RecipeArguments:
    """What is learned, and from what."""

    dataset_name: str = field(
        default="reasoning-gym/chain_sum",
        metadata={"help": "reasoning-gym/<task> (made on the spot, offline), or a Hub dataset (or folder)."},
    )
    dataset_options: dict | None = field(
        default=None, metadata={"help": "Options of the reasoning-gym task, e.g. {max_terms: 2, max_digits: 1}."}
    )
    question_template: str = field(
        default="{question}",
        metadata={"help": "The question, from {question} and the task's metadata, e.g. {expression}."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset, e.g. main."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Commit of a Hub dataset."})
    question_column: str = field(
        default="question",
        metadata={"help": "Of a dataset without a 'prompt' column: a text, or a list of messages."},
    )
    answer_column: str | None = field(
        default="answer", metadata={"help": "Of a dataset without a 'prompt' column; null: the reward reads none."}
    )
    answer_pattern: str | None = field(
        default=None, metadata={"help": "Regular expression whose first group is the answer, e.g. '#### (.+)'."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "System message before every question."})
    examples: list[dict] | None = field(
        default=None, metadata={"help": "Messages between the system message and the question, e.g. a tool call."}
    )
    tools: list[str] | None = field(default=None, metadata={"help": "Tools that the model may call, e.g. calculator."})
    chat_template: str | None = field(default=None, metadata={"help": "File with a chat template (jinja)."})
    response_template: str | None = field(
        default=None, metadata={"help": "File (JSON) that says how transformers reads tool calls in a reply."}
    )
    train_files: list[str] | None = field(
        default=None,
        metadata={"help": "In place of dataset_name: files (parquet, json, jsonl) with verl's columns, as in verl."},
    )
    val_files: list[str] | None = field(
        default=None, metadata={"help": "Held-out prompts in such files. Default: the first rows of train_files."}
    )
    reward: str = field(
        default="graded_number",
        metadata={
            "help": f"Reward function: one of {sorted(REWARDS)}, file.py:function or package.module:function. It takes "
            "TRL's arguments (completions, **columns) or verl's (data_source, solution_str, ground_truth, extra_info)."
        },
    )
    reward_options: dict | None = field(
        default=None, metadata={"help": "Further keyword arguments of the reward function, e.g. {strict: true}."}
    )
    train_size: int | None = field(
        default=None,
        metadata={"help": "Number of training prompts. Default: 2000 of a reasoning-gym task, all of other data."},
    )
    eval_size: int | None = field(
        default=64,
        metadata={"help": "Number of held-out prompts, disjoint from training; null: all of val_files or split test."},
    )
    cpu_threads: int | None = field(
        default=None,
        metadata={"help": "Threads of the trainer on a CPU. Default: one per core. Fewer while a server samples."},
    )
    resume: bool = field(default=False, metadata={"help": "Continue from the last checkpoint in output_dir."})
    smoke: dict | None = field(default=None, metadata={"help": "Options that --smoke puts in the place of others."})


def chat_tokenizer(recipe: RecipeArguments, model: ModelConfig) -> AutoTokenizer | None:
    """The model's tokenizer with the templates of the recipe; None = the trainer loads it as it is."""
    if recipe.chat_template is None and recipe.response_template is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
    if recipe.chat_template is not None:
        tokenizer.chat_template = Path(recipe.chat_template).read_text()
    if recipe.response_template is not None:
        tokenizer.response_template = json.loads(Path(recipe.response_template).read_text())
    return tokenizer


def drop_foreign_commits(recipe: RecipeArguments, model: ModelConfig) -> None:
    """A commit belongs to the name beside it: another name on the command line comes without the YAML's commit."""
    given = {word.split("=")[0].replace("-", "_") for word in sys.argv[1:]}
    if "__model_name_or_path" in given and "__model_revision" not in given:
        model.model_revision = "main"
    if "__dataset_name" in given and "__dataset_revision" not in given:
        recipe.dataset_revision = None


def meant_options(message: str, parser: TrlParser) -> str:
    """The options nearest to those that TRL's message does not know, as a text for its end; empty if none is near."""
    known = {option.removeprefix("--") for action in parser._actions for option in action.option_strings}
    unknown = re.findall(r"'--([\w-]+)", message)
    return "".join(near(name.replace("-", "_"), known) for name in unknown if name not in known)


WEIGHTS_AND_TOKENIZER = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
"""Files of a model on the Hub that are loaded; it may have the same weights in other formats too."""


def model_folder(model: ModelConfig) -> str:
    """The model at its commit, as a folder that trainer, tokenizer and engine all load; without a commit, its name."""
    if model.model_revision == "main" or Path(model.model_name_or_path).is_dir():
        return model.model_name_or_path
    pinned = partial(snapshot_download, model.model_name_or_path, revision=model.model_revision)
    pinned = partial(pinned, allow_patterns=WEIGHTS_AND_TOKENIZER)
    try:
        return pinned()
    except OfflineModeIsEnabled:
        return pinned(local_files_only=True)


def keep_hub_name(model: Any, name: str, revision: str) -> None:
    """Have an adapter say for which model on the Hub it was made, not in which folder of this machine that lay."""
    for config in getattr(model, "peft_config", {}).values():
        config.base_model_name_or_path, config.revision = name, revision


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with one line where a setting, a file or a package is wrong: the user can mend it without a traceback."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, MissingPackageError, RunFolderError) as error:
        raise SystemExit(f"{sys.argv[0]}: {' '.join(str(error).split())}") from error


def make_trainer(recipe: RecipeArguments, training: OffPolicyGRPOConfig, model: ModelConfig) -> OffPolicyGRPOTrainer:
    """The trainer of a recipe, with prompts, reward function and model."""
    reward = reward_function(recipe.reward, recipe.reward_options)
    train, held_out = load_splits(recipe)
    name, model.model_name_or_path = model.model_name_or_path, model_folder(model)
    training.model_init_kwargs = {"dtype": model.dtype or "float32", **(training.model_init_kwargs or {})}
    trainer = OffPolicyGRPOTrainer(
        model.model_name_or_path,
        reward,
        training,
        train_dataset=train,
        eval_dataset=held_out if training.eval_strategy != "no" else None,
        peft_config=get_peft_config(model),
        processing_class=chat_tokenizer(recipe, model),
        tools=agent_tools(recipe.tools),
    )
    if model.model_name_or_path != name:
        keep_hub_name(trainer.model, name, model.model_revision)
    return trainer


def checkpoint_to_resume(recipe: RecipeArguments, training: OffPolicyGRPOConfig) -> bool | str:
    """The checkpoint to start from: a folder, or True = the newest whole one of the output folder.

    ``--resume true`` starts anew where there is none yet. ``resume_from_checkpoint``, which transformers leaves to the
    script, must find one.
    """
    asked = training.resume_from_checkpoint
    if asked is not None and str(asked).lower() != "false":
        return True if str(asked).lower() == "true" else str(asked)
    folder = Path(training.output_dir)
    return recipe.resume and folder.is_dir() and get_last_checkpoint(folder) is not None


def main() -> None:
    """Parse, train, save."""
    given = sys.argv[1:]
    sys.argv[1:] = with_smoke(given)
    refuse_to_set(sys.argv[1:], started_with=given)
    # Whole names alone: of a shortened one recipe.yaml and the checks above would not know.
    parser = TrlParser((RecipeArguments, OffPolicyGRPOConfig, ModelConfig), allow_abbrev=False)
    try:
        recipe, training, model = parser.parse_args_and_config()
    except ValueError as error:
        raise SystemExit(f"{sys.argv[0]}: {error}{meant_options(str(error), parser)}") from None
    drop_foreign_commits(recipe, model)
    options = recipe_options(recipe, training, model)
    commits = {"model_revision": model.model_revision, "dataset_revision": recipe.dataset_revision}
    options |= {name: commit for name, commit in commits.items() if name in options}
    if training.use_cpu and training.world_size == 1:
        torch.set_num_threads(recipe.cpu_threads or os.cpu_count() or 1)  # accelerate launch would leave a single one
    start = checkpoint_to_resume(recipe, training)
    with one_line_errors():
        trainer = make_trainer(recipe, training, model)
    trainer.add_callback(RecipeCallback(options))
    trainer.train(resume_from_checkpoint=start)
    trainer.save_model(training.output_dir)
    data = Path(recipe.train_files[0]).stem if recipe.train_files else recipe.dataset_name
    trainer.create_model_card(dataset_name=data)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=data)


if __name__ == "__main__":
    main()
