"""The calculator agent has a recipe for each trainer: what must be alike is alike, and the README says what is not."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lightning_module import OffPolicyGRPOModule, PromptDataModule
from recipes.lightning.data import of_recipe
from recipes.tasks import REWARDS, TOOLS, load_splits
from trl_offpolicy.parts import imported
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "recipes/agent_calculator/config.yaml"
README = (ROOT / "recipes" / "lightning" / "README.md").read_text()
DIFFERENT = {"engine.seed"}
"""Settings that are not alike; the README names each in code."""
_ENGINE = ("dtype", "enforce_eager", "weight_rounding", "seed")
_ALIKE = ("chat_template", "response_template", "max_tool_calling_iterations", "check_token_ids", "learning_rate",
          "weight_decay", "warmup_steps", "async_rollouts", "replay")  # fmt: skip


def defaults_of(function: Any) -> dict[str, Any]:
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def by_trl() -> dict[str, Any]:
    """The settings of the TRL recipe, defaults included, under common names."""
    given = {one.name: one.default for one in fields(OffPolicyGRPOConfig)} | yaml.safe_load((ROOT / CONFIG).read_text())
    return {
        **{name: given.get(name) for name in _ALIKE},
        **{f"engine.{name}": given["engine"].get(name) for name in _ENGINE},
        "engine.max_model_len": given["vllm_max_model_length"],
        "model": given["model_name_or_path"],
        "rewards": [REWARDS[given["reward"]]],
        "tools": [TOOLS[name] for name in given["tools"]],
        "correction": given["offpolicy"],
        "kl": given["beta"],
        "adapter": [given[f"lora_{name}"] for name in ("r", "alpha", "dropout", "target_modules")],
        "schedule": str(given["lr_scheduler_type"]),
        "clip": given.get("max_grad_norm"),
        "sizes": [given[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps",
                                           "num_generations", "max_completion_length", "max_steps")],
        "passes": [given["num_iterations"], given["steps_per_generation"]],
        "sampling": [given[name] for name in ("temperature", "top_p", "top_k", "min_p")],
        "seed": given["seed"],
        "held_out": [given["eval_size"], given["num_generations_eval"], given["eval_steps"], given["eval_on_start"]],
    }  # fmt: skip


def by_lightning() -> dict[str, Any]:
    """The same of the Lightning recipe."""
    given = yaml.safe_load((ROOT / "recipes" / "lightning" / "agent_calculator.yaml").read_text())
    model = defaults_of(OffPolicyGRPOModule.__init__) | given["model"]
    data, trainer = defaults_of(PromptDataModule.__init__) | given["data"], given["trainer"]
    sampling = {"top_p": 1.0, "top_k": 0, "min_p": None, **model["sampling"]}
    accumulation = trainer["accumulate_grad_batches"]
    assert data["dataset_options"]["config"] == CONFIG
    return {
        **{name: model[name] for name in _ALIKE},
        **{f"engine.{name}": model["engine"].get(name) for name in (*_ENGINE, "max_model_len")},
        "model": model["model"],
        "rewards": [imported(model["reward_funcs"], where="reward_funcs")],
        "tools": [imported(one, where="tools") for one in model["tools"]],
        "correction": model["correction"],
        "kl": 0.0 if model["objective"] is None else model["objective"],
        "adapter": [model["adapter"][name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules")],
        "schedule": model["lr_scheduler"],
        "clip": trainer["gradient_clip_val"],
        "sizes": [data["micro_batch_size"], accumulation, data["num_generations"], sampling["max_tokens"],
                  trainer["max_steps"]],
        "passes": [data["num_iterations"], data["steps_per_generation"]],
        "sampling": [sampling[name] for name in ("temperature", "top_p", "top_k", "min_p")],
        "seed": given["seed_everything"],
        "held_out": [data["dataset_options"]["eval_size"], data["val_generations"],
                     trainer["val_check_interval"] // accumulation, trainer["num_sanity_val_steps"] == -1],
    }  # fmt: skip


def test_what_must_be_alike_is_alike_and_the_rest_is_told() -> None:
    theirs, ours = by_trl(), by_lightning()
    assert theirs.keys() == ours.keys()
    assert {name for name in theirs if theirs[name] != ours[name]} == DIFFERENT
    assert all(f"`{name}`" in README for name in DIFFERENT)


def test_the_prompts_are_the_same() -> None:
    pytest.importorskip("reasoning_gym")
    given = yaml.safe_load((ROOT / CONFIG).read_text())
    sizes = {"train_size": 40, "eval_size": 16}
    theirs = load_splits(SimpleNamespace(**{**given, **sizes}))
    ours = of_recipe(CONFIG, **sizes)
    assert [part.to_list() for part in theirs] == list(ours)
    assert len(ours[0]) > 20 and len(ours[1]) == 16 and ours[0][0]["prompt"][0]["role"] == "system"
