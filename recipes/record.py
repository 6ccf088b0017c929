"""``recipe.yaml``: the options of a run, in its folder."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_offpolicy.migrate.page import NEEDED, TO_SET
from trl_offpolicy.migrate.shared import FIELDS_TO_SET
from trl_offpolicy.run_folder.layout import RECIPE_FILE
from trl_offpolicy.run_folder.secrets import is_secret

SMALL: dict[str, Any] = {
    "model_name_or_path": ".cache/SmolLM2-135M-Instruct",
    "dtype": "float32",
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 16,
    "max_steps": 2,
    "warmup_steps": 0,
    "eval_size": 4,
    "eval_strategy": "no",
    "logging_steps": 1,
    "log_completions": True,  # TRL prints a prompt with its completion and reward: does the user's own work?
    "num_completions_to_print": 1,
    "save_strategy": "no",
    "report_to": "none",
    "push_to_hub": False,
}
"""What ``--smoke`` sets where a configuration has no section ``smoke``."""
SMALL_ENGINE: dict[str, Any] = {
    "vllm_mode": "colocate",
    "vllm_max_model_length": 1024,
    "engine": {"dtype": "float32", "enforce_eager": True},
}
"""The same for vLLM."""
LARGE = (
    "model_revision", "trust_remote_code", "attn_implementation", "load_in_4bit", "load_in_8bit", "tf32", "deepspeed",
    "fsdp", "fsdp_config", "torch_compile", "use_liger_kernel", "steps_per_generation", "generation_batch_size",
    "eval_on_start", "vllm_tensor_parallel_size", "vllm_server_base_url", "vllm_server_host",
    "vllm_server_port", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
)  # fmt: skip
"""What it drops there: of the model, of several devices, of a GPU."""
DENSE = ("routing_replay", "freeze_router", "freeze_router_bias")
"""And of a mixture of experts, because the quickstart's model is dense."""
METHOD_OF_ENGINE = ("weight_rounding", "norm_noise")
"""Options of the engine that are part of the method, and stay."""


def small_settings(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A configuration in two small steps on a CPU: its data, reward and method with the quickstart's model.

    Args:
        config: the configuration.
        name: of its file; the run's folder is ``runs/<name>_smoke``.
    """
    left_out = (*LARGE, *DENSE, *SMALL_ENGINE, "async_rollouts", "cpu_threads")
    kept = {field: value for field, value in config.items() if field not in left_out}
    small = {**kept, **SMALL, "output_dir": f"runs/{name}_smoke"}
    if not config.get("use_vllm"):
        return small
    method = {option: value for option, value in (config.get("engine") or {}).items() if option in METHOD_OF_ENGINE}
    return {**small, **SMALL_ENGINE, "engine": {**method, **SMALL_ENGINE["engine"]}}


def left_out_of_method(config: Mapping[str, Any]) -> str:
    """What of the method two small steps leave out, for the line on the screen; empty if nothing."""
    return "".join(f", without {name}" for name in (*DENSE, "async_rollouts") if config.get(name))


def given_config(argv: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Where on the command line the configuration's file stands, and its options; (0, {}) without ``--config``.

    Args:
        argv: the command line, without the program's name.

    Raises:
        SystemExit: no readable file of options stands there.
    """
    words = list(argv)
    if "--config" not in words:
        return 0, {}
    place = words.index("--config") + 1
    if place == len(words):
        raise SystemExit("--config must be followed by a YAML file, but nothing comes after it.")
    try:
        options = yaml.safe_load(Path(words[place]).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SystemExit(f"--config must be a readable YAML file, but got {words[place]}: {error}") from None
    if not isinstance(options, dict | None):
        raise SystemExit(f"--config must be a YAML file of options (name: value), but {words[place]} is none.")
    return place, options or {}


def with_smoke(argv: Sequence[str]) -> list[str]:
    """The command line; for ``--smoke`` with a configuration in which the section ``smoke`` takes precedence.

    A configuration without that section, such as one that was migrated, becomes that of :func:`small_settings`.

    Args:
        argv: the command line, without the program's name.

    Raises:
        SystemExit: there is no configuration.
    """
    given = [word for word in argv if word != "--smoke"]
    place, config = given_config(given)
    small = config.pop("smoke", None)
    if len(given) == len(argv):
        return given
    if not place:
        raise SystemExit("--smoke must come with a --config, but there is none.")
    if small:
        config |= small
    else:
        before, config = config, small_settings(config, Path(given[place]).stem)
        if os.environ.get("RANK", "0") == "0":
            said = "no section smoke: two small steps on a CPU with its data, reward and method, and the model"
            without = left_out_of_method(before)
            print(f"{given[place]} has {said} {SMALL['model_name_or_path']}{without}", file=sys.stderr)
    merged = Path(tempfile.mkdtemp(prefix="smoke-"), Path(given[place]).name)
    merged.write_text(yaml.safe_dump(config, sort_keys=False))
    return [*given[:place], str(merged), *given[place + 1 :]]


def refuse_to_set(argv: Sequence[str], *, started_with: Sequence[str] | None = None) -> None:
    """Stop where ``trl-offpolicy migrate`` left a field of the configuration to the user, who has not set it.

    Without this the script's own default would take its place: another task, without a word.

    Args:
        argv: the command line, without the program's name; an option on it sets its field.
        started_with: the user's own, before :func:`with_smoke`: its file is the one to write in.

    Raises:
        SystemExit: a field is ``TO_SET``; names it, and what to write there.
    """
    _, config = given_config(argv)
    given = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    replaced = {"dataset_name"} if "train_files" in {*config, *given} else set()
    left = [name for name, value in config.items() if TO_SET in (value if isinstance(value, list) else [value])]
    if left := [name for name in left if name not in given | replaced]:
        meant = "; ".join({**NEEDED, **FIELDS_TO_SET}.get(name, name) for name in left)
        written = argv if started_with is None else started_with
        path = written[given_config(written)[0]]
        raise SystemExit(f"{', '.join(left)} must be set in {path}, but is still {TO_SET} there. Write {meant}.")


def recipe_options(*parsed: Any, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The options of a run, those of ``--config`` and of the command line together, without tokens and passwords.

    Args:
        *parsed: the dataclasses that ``TrlParser`` returned; they give the values of the options on the command line.
        argv: the command line (default: this program's).
    """
    given = list(sys.argv[1:] if argv is None else argv)
    _, options = given_config(given)
    options.pop("smoke", None)
    for place, word in enumerate(given):
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        owner = next((one for one in parsed if hasattr(one, name)), None)
        if owner is None and name.startswith("no_"):  # how the command line switches off what is on
            name = name.removeprefix("no_")
            owner = next((one for one in parsed if hasattr(one, name)), None)
        if word.startswith("--") and owner is not None:
            value = getattr(owner, name)
            value = getattr(value, "value", value)  # enumerations as YAML writes them
            if not isinstance(value, bool | int | float | str | list | dict | None):
                value = yaml.safe_load(word.partition("=")[2] or given[place + 1])  # made into an object by its owner
            options[name] = value
    return {name: value for name, value in options.items() if not is_secret(name)}


class RecipeCallback(TrainerCallback):
    """Writes ``recipe.yaml`` into the run folder once older records are out of the way.

    Args:
        options: of the run, from :func:`recipe_options`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """On the main process."""
        if state.is_world_process_zero:
            Path(args.output_dir, RECIPE_FILE).write_text(yaml.safe_dump(self._options, sort_keys=False))
