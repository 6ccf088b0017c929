"""What is missing is named with the command that gets it: packages, and the model that `make model` prepares."""

from __future__ import annotations

import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trl_offpolicy
from lightning_module import OffPolicyGRPOModule
from recipes.tasks import load_splits
from trl_offpolicy.cli import commands as cli
from trl_offpolicy.cli.recipes import copy, find
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.packages import (
    EXTRAS,
    PREPARE_SCRIPT,
    MissingPackageError,
    check_model,
    interrupted_builds,
    require,
    warn_about_builds,
)
from trl_offpolicy.trainer import OffPolicyGRPOTrainer
from trl_offpolicy.trl.attach import syncs_in_memory

ROOT = Path(trl_offpolicy.__file__).parents[1]
VLLM = 'Install it in a checkout of trl-offpolicy: pip install -e ".[vllm]". On a machine without a GPU: make install.'


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda module: monkeypatch.setitem(sys.modules, module, None)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def test_every_extra_exists_and_holds_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        name = {"rl_doctor": "rldoctor"}.get(module, module).replace("_", "-")
        assert any(one.startswith(name) for one in extras[extra]), module


def test_an_installed_package_is_not_imported(without: Any) -> None:
    require("this", by="a test")  # it would print a poem
    assert "this" not in sys.modules
    with pytest.raises(
        MissingPackageError, match=r"^a test must have the package not_there, but it is not installed\.$"
    ):
        require("not_there", by="a test")


def test_the_trainer_with_vllm(without: Any, make_args: Any) -> None:
    without("vllm")
    with pytest.raises(MissingPackageError) as error:
        OffPolicyGRPOTrainer("a/model", reward, make_args(use_vllm=True))
    assert str(error.value) == f"use_vllm: true must have the package vllm, but it is not installed. {VLLM}"


def test_an_engine_in_this_process(without: Any) -> None:
    without("vllm")
    with pytest.raises(MissingPackageError, match=r'pip install -e "\.\[vllm\]"'):
        ColocateEngine("a/model", dtype="float32")


@pytest.mark.parametrize("command", [["serve", "--model", "a/model"], ["probe", "--model", "a/model"]])
def test_commands_with_vllm(command: list[str], without: Any, capsys: pytest.CaptureFixture[str]) -> None:
    without("vllm")
    assert cli.main(command) == cli.MISSING_PACKAGE
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"trl-offpolicy {command[0]}: ") and err.rstrip().endswith(VLLM)


@pytest.mark.parametrize(
    ("blocked", "module"), [("lightning", "lightning_module"), ("jsonargparse", "lightning_module.cli")]
)
def test_the_lightning_module(blocked: str, module: str, without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without(blocked)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingPackageError) as error:
        import_module(module)
    assert str(error.value).endswith(
        f"must have the package {blocked}, but it is not installed. Install it in a checkout of trl-offpolicy: "
        'pip install -e ".[lightning]".'
    )


def test_the_tasks_of_the_recipes(without: Any) -> None:
    without("reasoning_gym")
    recipe = SimpleNamespace(dataset_name="reasoning-gym/chain_sum", train_size=1, eval_size=1)
    with pytest.raises(
        MissingPackageError, match=r'^dataset_name: reasoning-gym/chain_sum must .* -e "\.\[quickstart\]"'
    ):
        load_splits(recipe)


PREPARED = ".cache/SmolLM2-135M-Instruct"
NOT_PREPARED = f"must be an existing folder or a Hub name, but got '{PREPARED}'."
CHECKOUT = " `make model` in a checkout of trl-offpolicy prepares it."


def test_a_model_that_is_not_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_args: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    args = make_args()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        OffPolicyGRPOTrainer(PREPARED, reward, args)
    assert str(error.value) == f"model {NOT_PREPARED}{CHECKOUT}"
    with pytest.raises(FileNotFoundError) as error:
        OffPolicyGRPOModule(PREPARED, reward)
    assert str(error.value) == f"model {NOT_PREPARED}{CHECKOUT}"
    for command in ("probe", "serve"):
        assert cli.main([command, "--model", PREPARED]) == cli.BAD_INPUT
        assert capsys.readouterr().err.endswith(f"{command}: --model {NOT_PREPARED}{CHECKOUT}\n")


def test_in_a_copy_of_a_recipe_the_message_names_the_copys_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no Makefile in a copy; its script finds the same command."""
    copy(find("quickstart"), tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        check_model("model", PREPARED)
    assert str(error.value) == f"model {NOT_PREPARED} `python {PREPARE_SCRIPT}` prepares it."
    assert (tmp_path / PREPARE_SCRIPT).is_file()


def test_names_on_the_hub_and_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("gpt2", "Qwen/Qwen3-0.6B", str(tmp_path), object()):
        check_model("model", name)
    with pytest.raises(FileNotFoundError, match=r"but got '/no/such/folder'\.$"):
        check_model("model", "/no/such/folder")


def test_attach_on_a_cpu_says_how_the_engine_must_run() -> None:
    engine = SimpleNamespace(mode="colocate", llm=SimpleNamespace(llm_engine=object()))
    trainer = SimpleNamespace(vllm_generation=engine, accelerator=SimpleNamespace(device=SimpleNamespace(type="cpu")))
    with pytest.raises(ValueError, match=r"^trainer must have vLLM in its own process, but .*prepare_environment\(\)"):
        syncs_in_memory(trainer)  # type: ignore[arg-type]


def test_the_lock_of_an_interrupted_build_is_found_and_explained(tmp_path, monkeypatch):
    """torch waits for such a lock without end; one that is young, or in whose folder a compiler works, is a build's."""
    builds = {name: tmp_path / "py311_cpu" / name for name in ("interrupted", "young", "running")}
    for folder in builds.values():
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        os.utime(folder / "lock", (0, 0))
    os.utime(builds["young"] / "lock")
    monkeypatch.chdir(builds["running"])
    assert interrupted_builds(tmp_path) == [builds["interrupted"] / "lock"]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.warns(
        UserWarning, match=r"interrupted/lock was left by an interrupted build of interrupted: .* delete it"
    ):
        warn_about_builds()
    (builds["interrupted"] / "lock").unlink()
    assert interrupted_builds() == []
