"""``recipes/grpo.py``: every field has its help, a YAML file its ``env:``, the command line the last word."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import run_command
from trl import GRPOConfig, ModelConfig, TrlParser

from trl_offpolicy.trl.config import OffPolicyGRPOConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("grpo_recipe", ROOT / "recipes" / "grpo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(recipe: Any) -> Any:
    return recipe.RecipeArguments


def test_help_lists_every_field_and_explains_ours(arguments: Any) -> None:
    parser = TrlParser((arguments, OffPolicyGRPOConfig, ModelConfig))
    shown = {option: action for action in parser._actions for option in action.option_strings}
    for kind in (arguments, OffPolicyGRPOConfig, ModelConfig):
        assert {f"--{item.name}" for item in fields(kind) if item.init} <= shown.keys()
    inherited = {item.name for item in (*fields(GRPOConfig), *fields(ModelConfig))}
    ours = {item.name for item in (*fields(OffPolicyGRPOConfig), *fields(arguments))} - inherited
    assert "offpolicy" in ours and all(len(shown[f"--{name}"].help or "") > 20 for name in ours)
    assert "--offpolicy" in parser.format_help()  # % signs in a help text would raise here


def test_env_of_the_yaml_is_set_and_the_command_line_wins(
    arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TEST_VARIABLE", "before")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nseed: 3\nlearning_rate: 1.0e-3\n"
        "offpolicy: {preset: measure}\nenv: {SOME_TEST_VARIABLE: after}\n"
    )
    parser = TrlParser((arguments, OffPolicyGRPOConfig, ModelConfig))
    _, training, _ = parser.parse_args_and_config(["--config", str(config), "--seed", "7", "--offpolicy", "paper/mis"])
    assert os.environ["SOME_TEST_VARIABLE"] == "after"
    assert (training.seed, training.learning_rate, training.offpolicy) == (7, 1e-3, "paper/mis")


@pytest.mark.parametrize(
    ("text", "saved", "expected"),
    [
        ("", True, False),
        ("resume: true", False, False),  # nothing to go on from yet: it starts anew
        ("resume: true", True, True),
        ("resume_from_checkpoint: true", True, True),
        ("resume_from_checkpoint: true", False, True),  # and then fails: it must find one
        ("resume_from_checkpoint: false", True, False),
        ("resume_from_checkpoint: elsewhere/checkpoint-3", True, "elsewhere/checkpoint-3"),
    ],
)
def test_a_run_starts_from_the_checkpoint_that_its_yaml_names(
    recipe: Any, tmp_path: Path, text: str, saved: bool, expected: bool | str
) -> None:
    if saved:
        (tmp_path / "checkpoint-2").mkdir()
    config = tmp_path / "config.yaml"
    config.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n{text}\n")
    parser = TrlParser((recipe.RecipeArguments, OffPolicyGRPOConfig, ModelConfig))
    own, training, _ = parser.parse_args_and_config(["--config", str(config)])
    assert recipe.checkpoint_to_resume(own, training) == expected


@pytest.mark.parametrize("where", ["file", "command line"])
def test_a_misspelt_option_is_answered_with_the_nearest(arguments: Any, tmp_path: Path, where: str) -> None:
    config = tmp_path / "config.yaml"
    misspelt = "offpolcy: paper/tis\n" if where == "file" else ""
    config.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n{misspelt}")
    parser = TrlParser((arguments, OffPolicyGRPOConfig, ModelConfig))
    words = [] if where == "file" else ["--offpolcy", "paper/tis"]
    with pytest.raises(ValueError) as error:
        parser.parse_args_and_config(["--config", str(config), *words])
    recipe = sys.modules["grpo_recipe"]
    assert recipe.meant_options(str(error.value), parser).startswith(" Did you mean 'offpolicy'")
    assert recipe.meant_options("no option is named", parser) == ""


@pytest.mark.integration
@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "lightning").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_rewards_of_the_lightning_recipes_can_be_imported(path: Path) -> None:
    """In a process of its own, from the checkout: here other tests have put more on the path."""
    named = yaml.safe_load(path.read_text())["model"]["reward_funcs"]
    code = f"from trl_offpolicy.parts import imported; assert callable(imported({named!r}))"
    done = run_command([sys.executable, "-c", code], seconds=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
