"""``recipe.yaml``: what a run was started with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from recipes.record import EVALUATION_FILE, EvaluationCallback, recipe_options


@dataclass
class Options:
    """Stands for what TrlParser returns."""

    seed: int = 7
    learning_rate: float = 1e-5
    offpolicy: Any = None


def test_the_recipe_is_the_file_with_what_the_command_line_changed(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("learning_rate: 0.001\nenv: {A: b}\noffpolicy: {preset: paper/tis}\n")
    argv = ["--config", str(config), "--seed", "7", "--offpolicy=paper/icepop"]
    assert recipe_options(Options(learning_rate=0.001, offpolicy="paper/icepop"), argv=argv) == {
        "learning_rate": 0.001,
        "env": {"A": "b"},
        "offpolicy": "paper/icepop",
        "seed": 7,
    }


@pytest.mark.parametrize("given", [["--accelerator_config", '{"use_configured_state": true}'],
                                   ['--accelerator_config={"use_configured_state": true}']])  # fmt: skip
def test_an_option_that_its_owner_turned_into_an_object_is_written_as_it_was_given(given: list[str]) -> None:
    from transformers.trainer_pt_utils import AcceleratorConfig

    options = recipe_options(SimpleNamespace(accelerator_config=AcceleratorConfig()), argv=given)
    assert yaml.safe_load(yaml.safe_dump(options)) == {"accelerator_config": {"use_configured_state": True}}


def test_the_first_and_the_last_evaluation_are_kept(tmp_path: Path) -> None:
    callback, args = EvaluationCallback(), SimpleNamespace(output_dir=str(tmp_path))
    history: list[dict[str, float]] = []
    for step, reward in ((0, 0.125), (2, 0.25), (4, 0.5)):
        history += [{"loss": 0.1, "step": step}, {"eval_reward": reward, "eval_loss": 1.0, "step": step}]
        callback.on_evaluate(args, SimpleNamespace(is_world_process_zero=True, log_history=history), None)
        found = json.loads((tmp_path / EVALUATION_FILE).read_text())
        assert found["before"] == {"eval_reward": 0.125, "step": 0}
        assert found["after"] == (None if step == 0 else {"eval_reward": reward, "step": step})


def test_other_processes_and_runs_without_held_out_prompts_write_nothing(tmp_path: Path) -> None:
    args = SimpleNamespace(output_dir=str(tmp_path))
    for main, history in ((False, [{"eval_reward": 1.0, "step": 0}]), (True, [{"loss": 1.0, "step": 1}])):
        state = SimpleNamespace(is_world_process_zero=main, log_history=history)
        EvaluationCallback().on_evaluate(args, state, None)
    assert not list(tmp_path.iterdir())
