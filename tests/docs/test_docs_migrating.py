"""docs/migrating.md against the code: its options are those that are read, its YAML blocks say the same thing twice."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from code_blocks import check_command

from trl_offpolicy import presets
from trl_offpolicy.cli.commands import main
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets.frameworks.areal import ARealOptions
from trl_offpolicy.presets.frameworks.ms_swift import MSSwiftOptions
from trl_offpolicy.presets.frameworks.nemo_rl import NeMoRLOptions
from trl_offpolicy.presets.frameworks.openrlhf import OpenRLHFOptions
from trl_offpolicy.presets.frameworks.prime_rl import PrimeRLOptions
from trl_offpolicy.presets.frameworks.skyrl import SkyRLOptions
from trl_offpolicy.presets.frameworks.slime import SlimeOptions
from trl_offpolicy.presets.frameworks.trl import TRLOptions
from trl_offpolicy.presets.frameworks.verl.advantages import ESTIMATORS, VerlAdvantageOptions
from trl_offpolicy.presets.frameworks.verl.losses import VerlLossOptions
from trl_offpolicy.presets.frameworks.verl.translate import VerlOptions
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text()
OPTIONS: dict[str, tuple[type, ...]] = {
    "verl": (VerlOptions, VerlLossOptions, VerlAdvantageOptions),
    "SkyRL": (SkyRLOptions,),
    "slime": (SlimeOptions,),
    "TRL": (TRLOptions,),
    "AReaL": (ARealOptions,),
    "OpenRLHF": (OpenRLHFOptions,),
    "NeMo-RL": (NeMoRLOptions,),
    "prime-rl": (PrimeRLOptions,),
    "ms-swift": (MSSwiftOptions,),
}


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def objective(block: str, folder: Path) -> Objective:
    plain: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
    result: Objective = OffPolicyGRPOConfig(str(folder), **{**plain, **yaml.safe_load(block)}).preset.objective
    return result


def test_every_framework_has_a_section() -> None:
    assert {title.lower() for title in OPTIONS} == set(presets.FRAMEWORKS)
    for title in OPTIONS:
        assert section(title).count(f"framework: {title.lower()}\n") == 1


@pytest.mark.parametrize("title", OPTIONS)
def test_options_and_defaults_are_those_that_are_read(title: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section(title), flags=re.MULTILINE)
    read = {item.name: repr(item.default) for cls in OPTIONS[title] for item in fields(cls)}
    if title == "TRL":  # its loss fields keep their place, the text names them
        named = set(re.findall(r"`(\w+)`", section(title)))
        loss = {name for name in read if not name.startswith(("vllm_", "use_vllm"))}
        assert {name for name in loss if not name.startswith(("sapo_", "vespo_"))} <= named
        read = {name: default for name, default in read.items() if name.startswith("vllm_")}
    assert dict(rows) == read


def test_every_estimator_of_verl_has_a_row() -> None:
    table = section("verl").split("| `adv_estimator` | here |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| ([\w, ]+) \| (.*) \|$", table, flags=re.MULTILINE))
    taken = {name for names, here in rows.items() if "refused" not in here for name in names.split(", ")}
    assert taken == set(ESTIMATORS)
    for names, here in rows.items():
        (kind,) = re.findall(r"type: (\w+)", here) or re.findall(r"^`(\w+)`", here) or [None]
        for name in names.split(", "):
            if "refused" in here:
                with pytest.raises(NotImplementedError):
                    presets.from_verl(adv_estimator=name)
            elif name != "gdpo" and kind is not None:
                estimator = presets.from_verl(adv_estimator=name).advantages
                assert type(estimator) is ADVANTAGE_TYPES[kind]


@pytest.mark.parametrize("title", OPTIONS)
def test_both_configurations_are_one_objective(title: str, tmp_path: Path) -> None:
    theirs, ours = re.findall(r"```yaml\n(.*?)```", section(title), flags=re.DOTALL)
    assert "framework" in theirs and "framework" not in ours
    assert objective(theirs, tmp_path) == objective(ours, tmp_path) != objective("offpolicy: measure", tmp_path)


MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


def test_the_commands_of_the_five_steps_exist() -> None:
    """Their files stand for the reader's own: the recipes' script gets the quickstart's configuration."""
    steps = re.findall(r"^(\d)\. .*\n(?:   .*\n)*", section("A whole file"), flags=re.MULTILINE)
    assert steps == list("12345")
    text = section("A whole file").partition("These files are read:")[0]
    commands = re.findall(r"`((?:pip|trl-offpolicy|accelerate|python) [^`]*)`", text)
    kinds = [
        check_command(shlex.split(command.replace("--config ours.yaml", "--config OURS.yaml"))) for command in commands
    ]
    assert kinds == ["pip", "migrate", "recipe", "recipe"]
    targets = {word for words in re.findall(r"`make ([^`]*)`", text) for word in words.split()}
    assert targets == {"install", "model"} and all(f"\n{name}:" in MAKEFILE.read_text() for name in targets)


def test_the_example_of_a_whole_file_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = section("A whole file")
    script, printed = (block.partition("\n")[2] for block in text.split("```")[1::2])
    (command,) = re.findall(r"^`(trl-offpolicy migrate .*)` prints this", text, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("run_grpo.sh").write_text(script)
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out == printed
    method = yaml.safe_dump({"offpolicy": yaml.safe_load(printed)["offpolicy"]})
    assert [term.name for term in objective(method, tmp_path).correction.keep] == ["outlier_veto"]
