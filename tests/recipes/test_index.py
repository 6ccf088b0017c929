"""The list of recipes: complete, current, and each recipe's copy runs on its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from processes import run_command

from scripts.recipes import PAGE, page
from trl_offpolicy import Correction
from trl_offpolicy.cli import main
from trl_offpolicy.cli.recipes import FOLDER, Recipe, all_recipes, copy, find
from trl_offpolicy.presets.parsing import parse_correction, parse_preset

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


def words_of(line: str) -> str:
    """A command without its remark, its spaces one."""
    return " ".join(re.sub(r"\s#\s.*| \((?:first terminal|second)\)$", "", line).split())


def commands_in(text: str) -> set[str]:
    """The lines of a text, those that end in a backslash joined with the next."""
    return {words_of(line) for line in text.replace("\\\n", " ").splitlines()}


def header(path: Path) -> str:
    """The comment that a configuration begins with, without its signs."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.removeprefix("#") for line in takewhile(lambda line: line.startswith("#"), lines))


def configuration(recipe: Recipe) -> Path | None:
    """A recipe's YAML; None for an experiment, which has none."""
    path = FOLDER / recipe.name
    path = path if path.suffix else path / "config.yaml"
    return path if path.is_file() else None


def prepares(line: str) -> bool:
    """Model and packages: the READMEs have `make model` and the extras of a checkout in their place."""
    return line.startswith(("python recipes/quickstart/prepare_model.py", "pip install"))


def cells(recipe: Recipe) -> dict[str, str]:
    """The rows "what | choice" of a recipe's README."""
    text = (FOLDER / recipe.folder / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| ([a-z ,]+) \| (.+) \|$", text, re.MULTILINE))


def numbers_of(correction: Correction) -> set[float]:
    """Caps, bounds and limits of a correction."""
    parts = [part for part in (correction.weight, *correction.keep) if part is not None]
    options = [getattr(part, field.name) for part in parts for field in fields(part)]
    return {float(one) for one in options if isinstance(one, float)}


NUMBER = re.compile(r"(?<![\w/.-])\d+(?:\.\d+)?(?:e-\d+)?(?![\w%])")
TRAINED_BY_TRL = [recipe for recipe in RECIPES if (FOLDER / recipe.name / "config.yaml").is_file()]


@pytest.mark.parametrize("recipe", TRAINED_BY_TRL, ids=lambda recipe: recipe.name)
def test_readme_tells_of_the_correction_and_the_engine_that_run(recipe: Recipe) -> None:
    told = cells(recipe)
    settings = yaml.safe_load((FOLDER / recipe.name / "config.yaml").read_text(encoding="utf-8"))
    if "correction" in told:
        said = {float(one) for one in NUMBER.findall(told["correction"])}
        preset, more = parse_preset(settings["offpolicy"], where="offpolicy")
        correction = parse_correction(more.get("correction", {}), where="offpolicy.correction", base=preset.correction)
        assert said - {0.0, 1.0} == numbers_of(correction)  # a weight of 0, ratios of 1
    if "engine" in told:
        engine = settings.get("engine", {})
        assert ("server" in told["engine"]) == (settings["vllm_mode"] == "server")
        assert ("rounded" in told["engine"]) == ("weight_rounding" in engine)
        if "weight_rounding" in engine:
            assert {"fp8": "FP8", "int8": "8 bits"}[engine["weight_rounding"]] in told["engine"]
        dtype = re.search(r"b?float\d+", told["engine"])  # the first; a reason may name others
        assert dtype is None or dtype[0] == engine.get("dtype", "float32")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_readme_and_header_have_the_commands_of_the_index(recipe: Recipe) -> None:
    readme = (FOLDER / recipe.folder / "README.md").read_text(encoding="utf-8")
    path = configuration(recipe)
    wanted = {words_of(line) for line in recipe.lines if not prepares(line)}
    assert path is None or wanted <= commands_in(header(path))
    if recipe.folder == "lightning" and recipe.lines[-1] not in commands_in(readme):
        assert f"`{Path(recipe.name).name}`" in readme  # one README for all: its first block has some of the commands
    else:
        assert wanted <= commands_in(readme)
    prepared = any(line.startswith("python recipes/quickstart/prepare_model.py") for line in recipe.before)
    assert not prepared or re.search(r"make (?:install )?(?:model|quickstart)", readme)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_begins_with_what_it_needs(recipe: Recipe) -> None:
    path = configuration(recipe)
    spec = yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}
    engine = spec.get("model", {}).get("engine", {})
    served = spec.get("vllm_mode") == "server" or engine.get("type") == "server"
    assert served == any("trl-offpolicy serve " in line for line in recipe.before)
    model = spec.get("model_name_or_path") or spec.get("model", {}).get("model") or ""
    assert model.startswith(".cache/SmolLM2") == any("prepare_model.py" in line for line in recipe.before)
    assert model.startswith(".cache/") == any("python recipes/" in line for line in recipe.before)
    for script in re.findall(r"python (recipes/\S+\.py)", "\n".join(recipe.before)):
        assert (FOLDER.parent / script).is_file()
    served_by = [line for line in recipe.before if "trl-offpolicy serve " in line and "CUDA_VISIBLE_DEVICES" in line]
    for line in served_by:  # engine and learner are on GPUs of their own, and each process has one
        mine, theirs = (
            set(re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", text)[0].split(",")) for text in (recipe.command, line)
        )
        assert not mine & theirs and f"--num_processes {len(mine)} " in recipe.command


def test_the_quickstarts_numbers_are_those_of_its_committed_run() -> None:
    folder = FOLDER / "quickstart" / "results"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    rewards, before, after = (
        [row[key] for row in rows] for key in ("reward", "offpolicy/mismatch/kl_k3", "offpolicy/kept/kl_k3")
    )
    expect = find("quickstart").expect
    assert len(rows) == 16 and f"reward {sum(rewards[:4]) / 4:.2f} to {sum(rewards[-4:]) / 4:.2f} in 16" in expect
    held_out = [evaluation[when]["eval_reward"] for when in ("before", "after")]
    assert f"held out {held_out[0]:.2f} to {held_out[1]:.2f};" in expect
    assert f"KL k3 {sum(before) / 16:.3f} before and {sum(after) / 16:.3f} after" in expect


def test_list_and_show_print_each_recipe(tmp_path: Path, capsys) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(recipe.name in listed for recipe in RECIPES)
    assert main(["recipes", "show", "opsm_multi_step"]) == 0
    assert find("opsm_multi_step").command in capsys.readouterr().out
    for words in (["show", "icepop_moe"], ["copy", "icepop_moe", str(tmp_path)]):
        assert main(["recipes", *words]) == 0
        shown = capsys.readouterr().out
        places = [shown.index(line) for line in find("icepop_moe").lines]
        assert places == sorted(places) and len(places) == 3


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


def in_copy(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of a user who has the package and a copy, and is in the copy's folder."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    return run_command([sys.executable, *words], seconds=500, cwd=folder, env=environment)


@pytest.mark.parametrize("name", ["quickstart", "grpo_tis_gsm8k"])
def test_what_is_printed_after_a_copy_begins_with_the_preparation(name: str, tmp_path: Path, capsys) -> None:
    assert main(["recipes", "copy", name, str(tmp_path)]) == 0
    commands = [line.split("#")[0].split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert commands[-1] == find(name).command.split()
    prepare = [words for words in commands if words[0] == "python"]
    assert prepare == ([["python", "recipes/quickstart/prepare_model.py"]] if name == "quickstart" else [])
    assert all((tmp_path / words[1]).is_file() for words in prepare)


@pytest.mark.integration
def test_a_copy_is_prepared_and_says_so_where_it_was_not(tmp_path: Path) -> None:
    """The printed preparation starts; without it the run ends with one line that names it."""
    copy(find("quickstart"), tmp_path)
    shown = in_copy(tmp_path, "recipes/quickstart/prepare_model.py", "--help")
    assert shown.returncode == 0 and "--output" in shown.stdout
    run = in_copy(tmp_path, "recipes/grpo.py", "--config", "recipes/quickstart/config.yaml")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert run.stderr.rstrip().endswith(
        "recipes/grpo.py: model must be an existing folder or a Hub name, but got '.cache/SmolLM2-135M-Instruct'. "
        "`python recipes/quickstart/prepare_model.py` prepares it."
    )


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
    done = in_copy(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the tasks of the copy" in done.stdout
