"""docs/objectives.md against the code: the map, the picture, the tables and the example."""

import re
from pathlib import Path

import draw_objectives
import pytest
import yaml
from drawing import to_svg

import trl_offpolicy as op
from trl_offpolicy.functional.aggregation import AGGREGATIONS
from trl_offpolicy.functional.kl import KL_ESTIMATORS
from trl_offpolicy.presets.frameworks.trl import AGGREGATION
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES, LOSS_TYPES, PROXIMAL_TYPES, parse_objective
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

PAGE = draw_objectives.PAGE.read_text()


def first_cells(heading):
    """The code in the first column of the table under a heading."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    header, *cells = re.findall(r"^\| `([^`]+)` \|", part, flags=re.MULTILINE)
    assert header in ("aggregation", "estimator")
    return cells


@pytest.mark.parametrize("name", draw_objectives.MAPS)
def test_the_maps_are_those_of_the_code(name):
    shown = PAGE.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
    assert shown == draw_objectives.MAPS[name]()
    assert "-" not in {text for cls in LOSS_TYPES.values() for text in (cls.trust_region, cls.purpose)}
    assert "-" not in {text for cls in ADVANTAGE_TYPES.values() for text in (cls.formula, cls.bias)}


@pytest.mark.parametrize("name", draw_objectives.PICTURES)
@pytest.mark.integration
def test_the_pictures_are_those_the_script_draws(name):
    there = (Path(draw_objectives.__file__).parent / "pictures" / f"{name}.svg").read_text()
    again = to_svg(*draw_objectives.PICTURES[name])
    assert f"](pictures/{name}.svg)" in PAGE
    texts = [re.findall(r">([^<>]+)</(?:text|tspan|title)>", svg) for svg in (there, again)]
    assert texts[0] == texts[1]
    assert len(there) < 120_000


@pytest.mark.parametrize("name", [name for name in LOSS_TYPES if name not in draw_objectives.BATCH_STATISTICS])
def test_at_ratio_one_every_loss_is_the_policy_gradient(name):
    """OAPL regresses on the reward less a value and has another factor; all others have 1."""
    for advantage in (1.0, -1.0):
        factor = draw_objectives.gradient_weight(name, 1.0, advantage)
        assert factor == pytest.approx(1.0, abs=1e-5) or name == "oapl"


def test_tables_list_what_there_is():
    assert set(first_cells("Aggregations")) == set(AGGREGATIONS)
    assert first_cells("KL to the reference") == list(KL_ESTIMATORS)
    for loss_type, aggregation in AGGREGATION.items():
        (row,) = re.findall(rf"^\| `{aggregation}` .*$", PAGE, flags=re.MULTILINE)
        assert loss_type in row


def test_the_example_is_the_same_in_yaml_and_python():
    text, code = (re.search(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)[1] for kind in ("yaml", "python"))
    space = {}
    exec(compile(code, "docs/objectives.md", "exec"), space)
    spec = yaml.safe_load(text)["offpolicy"]
    parsed = parse_objective(spec["objective"], where="objective", base=op.presets.get(spec["preset"]).objective)
    assert parsed == space["objective"]


def test_every_yaml_block_is_a_configuration(tmp_path):
    """Also with the lines that are commented out in the place of those above them."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 7
    for text in blocks:
        choices = [text, re.sub(r"^ +advantages: rloo.*\n( +)# (advantages: .*)$", r"\1\2", text, flags=re.MULTILINE)]
        for choice in choices:
            given = yaml.safe_load(choice)
            options = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
            preset = OffPolicyGRPOConfig(str(tmp_path), **options, **given).preset
            spec = {} if isinstance(given["offpolicy"], str) else given["offpolicy"]
            for key, value in spec.get("objective", {}).items():
                assert value and getattr(preset.objective, key) != getattr(op.Objective(), key)
            assert (preset.advantages is None) == ("advantages" not in spec)


def test_names_exist():
    names = set(re.findall(r"^\| `(\w+)` \| `\w+` \|", PAGE.split("## Advantages")[1].split("## ")[0], re.MULTILINE))
    assert names == {cls.__name__ for cls in ADVANTAGE_TYPES.values()}
    centres = PAGE.split("## Proximal log-probs")[1]
    assert set(re.findall(r"^\| `(?:\{type: )?(\w+)", centres, re.MULTILINE)) - {"proximal"} == set(PROXIMAL_TYPES)
