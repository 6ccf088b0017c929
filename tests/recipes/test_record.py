"""``recipe.yaml``: what a run was started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from recipes.record import given_config, recipe_options


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "a readable YAML file, but got .*config.yaml: .*No such file"),
        ("a: [1", "a readable YAML file, but got .*config.yaml"),
        ("- a\n- b\n", r"a YAML file of options \(name: value\), but .*config.yaml is none"),
    ],
)
def test_a_configuration_that_is_none_is_told_in_a_sentence(text: str | None, said: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(SystemExit, match=f"(?s)--config must be {said}"):
        given_config(["--config", str(config)])


def test_config_without_a_file_and_a_file_without_options(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--config must be followed by a YAML file, but nothing comes after it"):
        given_config(["--seed", "7", "--config"])
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert given_config(["--config", str(tmp_path / "empty.yaml")]) == (1, {})
    assert given_config(["--seed", "7"]) == (0, {})


def test_what_is_switched_off_is_written_and_no_token_is(tmp_path: Path) -> None:
    given = SimpleNamespace(shuffle_dataset=False, hub_token="abc", seed=3)
    argv = ["--no_shuffle_dataset", "--hub_token", "abc", "--seed", "3"]
    assert recipe_options(given, argv=argv) == {"shuffle_dataset": False, "seed": 3}
