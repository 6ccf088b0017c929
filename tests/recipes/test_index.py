"""The list of recipes: complete, current, and each recipe's copy runs on its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.recipes import PAGE, page
from trl_offpolicy.cli import main
from trl_offpolicy.cli.recipes import FOLDER, all_recipes, copy, find

RECIPES = all_recipes()


def test_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python scripts/recipes.py"


def test_every_configuration_and_experiment_has_its_row() -> None:
    named = {recipe.name for recipe in RECIPES}
    configurations = {path.parent.name for path in FOLDER.glob("*/config.yaml")}
    experiments = {path.parent.name for path in FOLDER.glob("*/run.py")}
    lightning = {f"lightning/{path.name}" for path in FOLDER.glob("lightning/*.yaml")}
    assert named == configurations | experiments | lightning


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_row_names_files_that_exist_and_a_run_has_its_numbers(recipe) -> None:
    words = [word for word in recipe.command.split() if word.startswith("recipes/")]
    assert words and all((FOLDER.parent / word).is_file() for word in words)
    assert any(word.startswith(f"recipes/{recipe.folder}/") for word in words)
    assert bool(recipe.ran) == bool(recipe.time) == bool(recipe.expect)


def test_list_and_show_print_each_recipe(capsys) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(recipe.name in listed for recipe in RECIPES)
    assert main(["recipes", "show", "opsm_multi_step"]) == 0
    assert find("opsm_multi_step").command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show"], "recipes show needs NAME, but got none"),
        (["copy", "quickstrat"], "got 'quickstrat'; did you mean quickstart"),
        (["show", "zzzz"], "got 'zzzz'. 'trl-offpolicy recipes' lists them."),
        (["copy", "async_lag"], "async_lag also needs benchmarks/: run it in a checkout"),
    ],
)
def test_a_wrong_name_is_one_line(words: list[str], said: str, capsys) -> None:
    assert main(["recipes", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_copy_keeps_what_the_user_has_changed(tmp_path: Path, capsys) -> None:
    assert main(["recipes", "copy", "quickstart", str(tmp_path)]) == 0
    assert find("quickstart").command in capsys.readouterr().out
    config = tmp_path / "recipes/quickstart/config.yaml"
    config.write_text("max_steps: 1\n")
    assert main(["recipes", "copy", "quickstart", str(tmp_path)]) == 0
    assert "0 files copied" in capsys.readouterr().out and yaml.safe_load(config.read_text()) == {"max_steps": 1}


@pytest.mark.integration
@pytest.mark.parametrize("name", ["quickstart", "lightning/agent_calculator.yaml"])
def test_the_script_of_a_copy_uses_the_copys_own_files(name: str, tmp_path: Path) -> None:
    copy(find(name), tmp_path)
    tasks = tmp_path / "recipes/tasks.py"
    tasks.write_text(f'{tasks.read_text()}\nprint("the tasks of the copy")\n')
    script = "recipes/grpo.py" if name == "quickstart" else "-m"
    words = (
        [script, "--help"] if script != "-m" else ["-c", "import recipes.agent_calculator.calculator, recipes.tasks"]
    )
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the tasks of the copy" in done.stdout
