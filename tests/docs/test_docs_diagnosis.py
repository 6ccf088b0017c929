"""docs/diagnosis.md against the code: the tree's picture, the tables and the example."""

import re
from pathlib import Path

import draw_diagnosis
import pytest
from drawing import to_svg

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.verdict.tree import TREE

PAGE = draw_diagnosis.PAGE.read_text()


@pytest.mark.parametrize("name", draw_diagnosis.MAPS)
def test_the_tables_are_those_of_the_code(name):
    shown = PAGE.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
    assert shown == draw_diagnosis.MAPS[name]()


def texts_of(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</(?:text|tspan|title)>", svg)


@pytest.mark.parametrize("name", draw_diagnosis.PICTURES)
def test_the_pictures_are_those_the_script_draws(name):
    there = (Path(draw_diagnosis.__file__).parent / "pictures" / f"{name}.svg").read_text()
    assert texts_of(there) == texts_of(to_svg(*draw_diagnosis.PICTURES[name]))


def test_the_tree_shows_every_cause_it_can_name():
    shown = texts_of(to_svg(*draw_diagnosis.PICTURES["diagnosis_tree"]))
    assert {CAUSES[step.cause].title for step in TREE} <= set(shown)


def test_every_cause_has_an_example_that_names_it():
    of_one_batch = [cause for cause in CAUSES if cause not in draw_diagnosis.NOT_OF_ONE_BATCH]
    assert list(draw_diagnosis.EXAMPLES) == of_one_batch
    for cause, one in draw_diagnosis.EXAMPLES.items():
        assert one["right"] and any(text.startswith(CAUSES[cause].title) for text in one["said"])


def test_the_example_prints_what_the_page_says(capsys):
    code = PAGE.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/diagnosis.md", "exec"), {})
    assert capsys.readouterr().out.strip() == code.rsplit("# ", 1)[1].strip()
