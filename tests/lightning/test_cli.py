"""``python -m lightning_module``: YAML to a run, help, and the recipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines.server.servers import Server
from processes import run_command
from screen_lines import KNOWN, unknown_warnings
from tiny_models import save_tiny_model, tiny_prompts, tiny_tokenizer

from lightning_module.cli import main
from lightning_module.spec import resolve

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes" / "lightning").glob("*.yaml"))


def rows(count: int) -> tuple[list[Any], list[Any]]:
    """What a configuration names as ``dataset``."""
    return tiny_prompts(count).to_list(), tiny_prompts(2).to_list()


def config(folder: Path, model: Path, **extra: Any) -> Path:
    spec = {
        "seed_everything": 3,
        "model": {
            "model": str(model),
            "reward_funcs": "tiny_models:score_last_word",
            "correction": "measure",
            "sampling": {"max_tokens": 4},
            "adapter": {"r": 4, "target_modules": ["q_proj"]},
            **extra,
        },
        "data": {"dataset": "test_cli_rows:rows", "dataset_options": {"count": 8}, "micro_batch_size": 4,
                 "num_generations": 4},
        "trainer": {
            "accelerator": "cpu", "max_steps": 2, "log_every_n_steps": 1, "enable_progress_bar": False,
            "enable_checkpointing": False, "default_root_dir": str(folder),
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder)}},
        },
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_cli_rows", sys.modules[__name__])


def test_fit_from_yaml_with_overrides(tmp_path: Path, model_folder: Any) -> None:
    path = config(tmp_path, model_folder())
    cli = main(
        ["fit", "--config", str(path), "--model.learning_rate", "0.01", "--model.objective", "{entropy_coef: 0.1}"]
    )
    assert cli.trainer.global_step == 2
    assert cli.model.objective.entropy_coef == 0.1 and cli.model.hparams["learning_rate"] == 0.01
    logged = next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()  # the logger's folder, unless said
    assert [json.loads(line)["step"] for line in logged if "loss" in json.loads(line)] == [1, 2]
    assert yaml.safe_load(next(tmp_path.rglob("version_0/config.yaml")).read_text())["model"]["correction"] == "measure"


def test_a_mistake_in_the_yaml_is_named(tmp_path: Path, model_folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, SystemExit)) as raised:
        main(["fit", "--config", str(config(tmp_path, model_folder(), correction="paper/tos"))])
    assert "paper/tis" in str(raised.value) + capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--print_config"])
def test_help_and_defaults(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--model.model", "m", "--model.reward_funcs", "math:sqrt", "--data.dataset", "d", flag])
    out = capsys.readouterr().out
    assert stopped.value.code in (0, None)
    for name in ("correction", "num_generations", "steps_per_generation", "engine", "noise_floor_steps"):
        assert name in out
    if flag == "--help":
        assert "a preset's name, a mapping or a" in " ".join(out.split())  # the docstrings are the help


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_parse_and_describe_an_objective(recipe: Path) -> None:
    spec = yaml.safe_load(recipe.read_text())
    command = next(line for line in recipe.read_text().splitlines() if "python -m lightning_module fit" in line)
    assert f"recipes/lightning/{recipe.name}" in command
    objective = resolve(spec["model"]["correction"], spec["model"].get("objective")).objective
    assert objective.needs_sampling and objective.correction is not None
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(recipe), "--print_config"])
    assert stopped.value.code in (0, None)


def on_a_cpu(spec: dict[str, Any], folder: Path) -> None:
    """A recipe of a mixture of experts, on a tiny one."""
    model, tokenizer = save_tiny_model(folder / "model", "qwen3_moe"), tiny_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    tokenizer.save_pretrained(model)
    engine = {"type": "vllm", "dtype": "float32", "max_model_len": 64, "seed": 0}
    spec["model"] |= {"model": str(model), "model_options": {"dtype": "float32"}, "engine": engine}
    spec["model"]["sampling"] = {"max_tokens": 6}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_run_and_report(recipe: Path, tmp_path: Path) -> None:
    spec = yaml.safe_load(recipe.read_text())
    if recipe.stem.startswith("moe_"):
        on_a_cpu(spec, tmp_path)
    with served(spec["model"], tmp_path / "server.log"):
        screen = check_shortened(spec, tmp_path)
    assert recipe.stem != "quickstart" or unknown_warnings(screen, KNOWN) == []


@contextmanager
def served(model: dict[str, Any], log: Path) -> Iterator[None]:
    """With a vLLM server behind the recipe, if it asks for one."""
    if model["engine"]["type"] != "server":
        yield
        return
    flags = ("--max-model-len", "256")
    server = Server(ROOT / model["model"], log, lora_rank=model["adapter"]["r"], flags=flags).start()
    model["engine"]["base_url"] = server.url
    try:
        yield
    finally:
        server.kill()


def check_shortened(spec: dict[str, Any], tmp_path: Path) -> str:
    """Run two steps and check what they left; returns what was printed."""
    for entry in (*spec["trainer"]["callbacks"], *spec["trainer"]["logger"]):  # the same, into a folder of the test
        options = entry.get("init_args", {})
        options |= {key: str(tmp_path) for key in ("folder", "save_dir", "dirpath") if key in options}
    spec["trainer"] |= {"max_steps": 2, "val_check_interval": 2, "default_root_dir": str(tmp_path)}
    spec["data"].setdefault("dataset_options", {}).update(eval_size=4, train_size=40)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "lightning_module", "fit", "--config", str(tmp_path / "config.yaml")]
    done = run_command(command, seconds=1700, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "loss" in row]) == 2 and (tmp_path / "report.html").exists()
    assert all(0 < row["offpolicy/rollout/sync_agreement"] <= 1 for row in rows if "reward" in row)
    if "routing_replay" in spec["model"]:
        assert all(0 < row["offpolicy/routing/agreement"] <= 1 for row in rows if "loss" in row)
    return done.stdout + done.stderr
